"""The start of the model, from the first message on.

It has three steps: the model, its first values, and the same start for all server groups.
"""

from collections.abc import Collection

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.model import shared_windows
from topotrain.core.model.schema import parse_schema
from topotrain.core.server.component_state import State
from topotrain.core.server.groups.group_exchange import GroupExchange
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.startup import Startup
from topotrain.core.server.steps.decisions import Decisions
from topotrain.core.server.steps.pulls import Pulls

_MAX_HELD = 1 << 14


class ModelStart:
    """Starts one server.

    Args:
        state, startup, groups, pulls, decisions, exchange, queue, hooks: the parts of the server that it uses.
    """

    def __init__(
        self,
        state: ShardState,
        startup: Startup,
        groups: WorkerGroups,
        pulls: Pulls,
        decisions: Decisions,
        exchange: GroupExchange,
        queue: MessageQueue,
        hooks: ExtensionHooks,
    ) -> None:
        self._hooks = hooks
        self._state, self._startup, self._groups, self._pulls = state, startup, groups, pulls
        self._decisions, self._exchange, self._queue = decisions, exchange, queue
        self._held: list[tuple[Address, m.Message]] = []
        self._ready_groups: set[int] = set()

    # --- the model -----------------------------------------------------------------------------------------------

    def hold(self, sender: Address, message: m.Message) -> None:
        """Keep a message that has overtaken the model's description."""
        if len(self._held) >= _MAX_HELD:
            raise m.ProtocolError(f"{sender} sends too much before {self._state.me} knows the model")
        self._held.append((sender, message))

    def schema_part(self, sender: Address, message: m.SchemaPart) -> None:
        """A part of a description of the model."""
        schema = self._startup.part(sender, message)
        if schema is None:
            return
        if self._startup.describe(sender, schema):
            self._open(sender)
        text = self._startup.difference(sender, schema)
        if text:
            self._queue.send(sender, m.Fail(f"the models of a job's workers must be the same: {text}", True))
        elif sender.role is Role.SERVER:
            self._ready_groups.add(sender.group)
            self.share()
            self._pulls.release()
        else:
            self._startup.show(sender)

    def shared_buffer(self, sender: Address, message: m.SharedBuffer) -> None:
        """Use memory that the server shares with a process of its host.

        The process is a worker, or the first server of its group.
        """
        if sender.role is Role.SERVER:
            self._startup.window(message)
            self._open(sender)
            return
        model = self._state.model
        if model is None:
            self.hold(sender, message)
            return
        if message.name != "grad":
            raise m.ProtocolError(f"a shared buffer {message.name!r} from {sender}, which can only give 'grad'")
        flat = shared_windows.seen(message, model.map, self._state.me.index)
        model.flats.put(f"{message.name} {sender.index} {sender.group}", message.space, flat)

    def _open(self, sender: Address) -> None:
        """Make the model once its description, and the memory that it lives in, are here."""
        state = self._state
        if state.model is not None or not self._startup.complete:
            return
        try:
            model = self._startup.open(self._hooks)
        except (ValueError, TypeError, ImportError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
            self._queue.send(sender, m.Fail(f"{state.me} cannot build the optimizer: {error}", True))
            return
        try:
            state.start.restore(model, state.me.index)
        except ConfigError as error:
            self._queue.send(sender, m.Fail(str(error), True))
            return
        state.open(model)
        if state.start.clocks is not None:
            self._groups.restore_clocks(state.start.clocks)
        self._exchange.expect_buffers(len(model.schema.buffers))
        for part in model.schema.parts() if state.me.group != 0 else ():
            self._queue.send(Address(Role.SERVER, 0, state.me.index), part)
        self._queue.handle_later(self._held)
        self._held = []
        if state.complete:
            self._values_here()

    def make_model(self, schema: str) -> None:
        """Make the model of another copy of this server from its description."""
        self._state.open(self._startup.mold(parse_schema(schema), self._hooks))

    def refused(self, sender: Address, message: m.Fail) -> None:
        """Server group 0 refuses this group's model."""
        for workers in self._groups.workers.values():
            for worker in workers:
                self._queue.send(worker, message)

    # --- the values ----------------------------------------------------------------------------------------------

    def init(self, sender: Address, message: m.Init) -> None:
        """The first values of a bucket."""
        state = self._state
        if state.has_values(message.bucket):
            return  # sent twice; the group may be warming up already
        target, body = state.known.values(message.bucket), state.known.body(message)
        if body.data_ptr() != target.data_ptr():
            target.copy_(body)
        state.add_values(message.bucket)
        if state.complete:
            self._values_here()

    def optimizer_state(self, sender: Address, message: m.StatePart | m.StateRequest) -> None:
        """A worker gives the state of its optimizer, or asks for that of the server."""
        model = self._state.known
        if isinstance(message, m.StateRequest):
            for part in model.state.tell(message.round, sender.index):
                self._queue.send(sender, part)
            return
        model.piece(message.bucket, message.piece)
        if not self._state.start.resumed:  # else the state of the script is older than that of the snapshot
            model.state.load(message)

    def _values_here(self) -> None:
        if self._state.me.group == 0:
            self.share()
        else:
            self._start_together()
        self._pulls.release()

    def share(self) -> None:
        """Give every server group the same start.

        It is given at once, or after group 0's warm-up (`warmup_steps`).
        """
        state = self._state
        others = range(1, state.topology.server_groups)
        if state.common or state.me.group != 0 or not state.complete or self._ready_groups != set(others):
            return
        if self._groups.clocks.clock(0) < state.job.warmup_steps and self._groups.runs(0):
            return
        for group in others:
            for bucket in state.known.buckets:
                body = state.known.values(bucket.id).clone()
                self._queue.send(Address(Role.SERVER, group, state.me.index), m.Init(bucket.id, body=body))
        self._start_together()

    def _start_together(self) -> None:
        self._state.start_together()
        for group in self._groups.start_together(self._state.job.warmup_steps, self._state.start.clocks):
            self._decisions.rejoin(group)
        self._exchange.begin()

    def reset(self, workers: Collection[Address]) -> None:
        """These workers are gone: forget what is held of them."""
        self._held = [(sender, message) for sender, message in self._held if sender not in workers]
        self._startup.forget(workers)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"held": self._held, "ready_groups": self._ready_groups}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._held, self._ready_groups = list(state["held"]), set(state["ready_groups"])
