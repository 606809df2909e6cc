"""A worker's client: it pushes gradients, commits steps and receives values.

`Client` computes nothing, and blocks only in the `Waiter` that it is given. In a job the waiter is a condition variable
that the transports' reader threads notify. In a simulation it is a turn of the simulated network. A feature that is not
needed to push, commit and receive is an extension (`client_extension`), and the client names none.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client_context import (
    ClientModel,
    JobError,
    PeerLost,
    ServerChannel,
    StepEnd,
    StepOutcome,
    Waiter,
)
from topotrain.core.client.client_extension import ClientExtension, ClientHooks
from topotrain.core.client.model_buffers import ModelBufferClient
from topotrain.core.client.optimizer_state import OptimizerStateClient
from topotrain.core.client.rejoin import Rejoin
from topotrain.core.client.shared_buffers import SharedBufferClient
from topotrain.core.client.step_exchange import GradientExchange, ServerReduction, StepCommit
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import BodyCodec
from topotrain.core.model.schema import FlatBuffers, Schema
from topotrain.core.protocol import MessageValidator
from topotrain.core.transport_contract import MessageSender

__all__ = ["Client", "JobError", "StepOutcome", "PeerLost", "StepEnd", "Waiter"]

Handler = Callable[[Address, Any], None]
Placing = Callable[[Address, Any, bool], torch.Tensor | None]
E = TypeVar("E", bound=ClientExtension)


class Client:
    """One worker's client.

    Args:
        me: this worker.
        topology: the job's layout.
        sender: sends the worker's messages. It never blocks on the receiver.
        waiter: how to wait.
        shared: the transports show memory, as for `server.Server`.
        incarnation: of the worker's group. Above 0, `rejoin.announce` must be called before anything else.
        extensions: extensions that are attached from the beginning.
        gradients: how the group adds up gradients. None: the servers do.
    """

    def __init__(
        self,
        me: Address,
        topology: Topology,
        sender: MessageSender,
        waiter: Waiter,
        shared: bool = False,
        incarnation: int = 0,
        extensions: Sequence[ClientExtension] = (),
        gradients: GradientExchange | None = None,
    ) -> None:
        self.channel = ServerChannel(me, topology, sender, waiter)
        self.model = ClientModel(self.channel, topology, shared)
        self.values = ValuePull(self.channel, self.model)
        self.gradients = gradients or ServerReduction()
        self._hooks = ClientHooks()
        self.gradients.bind(self.channel, self.model, self.values, self._hooks)
        self.steps = StepCommit(self.channel, self.model, self.values, self.gradients, self._hooks)
        self._returned = incarnation > 0
        self.rejoin = Rejoin(self.channel, incarnation)
        self.optimizer_state = OptimizerStateClient(self.rejoin)
        self.buffers = ModelBufferClient()
        self.shared_buffers = SharedBufferClient(me)
        self._validator = MessageValidator(me, topology, shared)
        self._places: dict[type[m.Message], Placing] = {
            m.Values: self.values.place,
            m.ReducedGradient: self.gradients.place,
        }
        self._handlers: dict[type[m.Message], Handler] = {
            m.Values: self.values.on_values,
            m.ReducedGradient: self.gradients.on_mean,
            m.BackwardReduced: self.gradients.on_reduced,
            m.Applied: self.steps.on_applied,
            m.JoinBackward: self.steps.on_join,
            m.Fail: self.channel.on_failure,
        }
        # Only a restarted worker gets WorkerRejoined, and has to check whether a message is for it.
        returned = (self.rejoin,) if self._returned else ()
        for extension in (*returned, self.optimizer_state, self.buffers, self.shared_buffers, *extensions):
            self.attach(extension)

    def attach(self, extension: ClientExtension) -> None:
        """Let an extension handle its messages, and take part in commits.

        Raises:
            ValueError: the client handles one of its messages already.
        """
        # Under the waiter, because reader threads already look up handlers.
        with self.channel.waiter.update():
            taken = [kind.__name__ for kind in extension.messages if kind in self._handlers]
            if taken:
                raise ValueError(f"{type(extension).__name__} handles {', '.join(taken)}, which something else handles")
            self._hooks.add(extension)
            self._handlers.update(dict.fromkeys(extension.messages, extension.handle))
        extension.bind(self.channel, self.model, self.values)

    def extension(self, kind: type[E]) -> E:
        """The attached extension of this class. Raises KeyError if there is none."""
        found = self._hooks.by_class[kind]
        assert isinstance(found, kind)
        return found

    # --- the model -----------------------------------------------------------------------------------------------

    def open(
        self,
        schema: Schema,
        slice_map: SliceMap,
        flats: FlatBuffers,
        streams: bool = False,
        adds: bool = False,
        lazy: bool = False,
        partial: bool = False,
    ) -> None:
        """Describe the model to the servers. `flats` are the worker's buffers.

        streams: gradients are applied on arrival, and values may come back before the step is committed.
        adds: every backward is reduced by itself, so that all pushes of a step count.
        lazy: `pull: kLazy`, the servers announce each bucket when it is new.
        partial: as for `ValuePull.open`.
        """
        # All parts know the model before the servers do, because replies may come at once.
        self.model.open(slice_map, flats, self._body_codec(slice_map, flats, adds))
        self.values.open(streams, lazy, partial)
        self.buffers.open(schema.buffers, len(schema.parameters))
        for server in self.channel.servers:
            for part in schema.parts():
                self.channel.send(server, part)
            if self.model.windowed and adds:
                self.shared_buffers.show("grad", server)

    def _body_codec(self, slice_map: SliceMap, flats: FlatBuffers, adds: bool) -> BodyCodec:
        # The codec is asked for before the model is open, because the model needs it.
        held = slice_map.buckets_on(self.channel.me.index)
        codecs = (extension.body_codec(slice_map, flats, adds, held) for extension in self._hooks.by_class.values())
        return next((codec for codec in codecs if codec is not None), BodyCodec())

    def send_initial(self, buffer: str) -> None:
        """Group 0: send the values that all workers start from, out of this flat buffer."""
        model, me = self.model, self.channel.me
        for bucket in model.map.buckets:
            server = model.server_of(bucket)
            # One worker sends a space. A server that is ahead of a restarted script has newer values.
            if model.map.spaces[bucket.space].sending_worker == me.index and not self.rejoin.is_ahead(server):
                self.channel.send(server, m.Init(bucket.id, body=model.flats.view(buffer, bucket)))

    # --- calls by the transport ----------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where a body is to be received (see `Endpoint.place`)."""
        self._validator.check(sender, message)
        if self._returned and not self.rejoin.admits(sender, message):
            return None
        # Bodies are placed by the transport, before the message is handled and without exclusive access.
        placing = self._places.get(type(message))
        if placing is not None:
            return placing(sender, message, viewable)
        extension = self._hooks.handlers.get(type(message))
        return None if extension is None else extension.place(sender, message)

    def handle(self, sender: Address, message: m.Message) -> None:
        """Handle a message of a server or of another worker. Raises ProtocolError."""
        self._validator.check(sender, message)
        with self.channel.waiter.update():
            # A message without a handler is one of an extension that this job does not have. It is dropped.
            handler = self._handlers.get(type(message))
            if handler is not None and (not self._returned or self.rejoin.admits(sender, message)):
                handler(sender, message)

    def lost(self, peer: Address, reason: str) -> None:
        """A connection ended."""
        with self.channel.waiter.update():
            # A list: every extension must get the loss, also after one has dealt with it.
            expected = [extension.on_lost(peer, reason) for extension in self._hooks.on_lost]
            self.channel.on_lost(peer, reason, any(expected))

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self, steps: int) -> None:
        """The script has ended."""
        # A lazily committed step must be over: the end of a script while its group is in a step is an error.
        self.values.settle()
        for server in self.channel.servers:
            self.channel.send(server, m.Finish(steps))
        if self.channel.me.index != 0 or self.channel.me.group != 0:
            self.channel.leave()  # worker (0,0) still needs the result

    def give_up(self, text: str, cause: bool = True) -> None:
        """Tell the servers why this worker cannot go on; `cause` as in `message.Fail`."""
        self.channel.report_failure(text, cause)
        self.leave()

    def leave(self) -> None:
        """From here on, connections may end."""
        self.channel.leave()
        self.gradients.close()
