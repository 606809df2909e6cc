"""A worker's part in the sums of its host.

Several workers of one group in one unit send one gradient over the network to each server of another host, and one
worker's pull serves all of them. For each such server one of the workers is the lead (`HostUnit.lead`):

* **Gradients.** A worker shows its gradient of a bucket to the lead, in shared memory. The lead adds up those of all
  workers, in rank order, and sends the sum (`HostPush`). A unit is one term of the group's canonical sum, so the server
  gets exactly the bits that it would have made of the unit's gradients.
* **Means and values.** The server sends them to the lead, which shows them to the others.

**Exactly once.** Only bodies take this way. Each worker still ends its backwards and commits its steps on every server
itself, and gets its replies itself. So a step has the contributions of all workers or is not made, whichever process
dies, and a sum counts once: it names the workers of its gradients, and a server keeps one gradient of each worker.

**Beginning and end.** A worker connects to the others of its unit in the background, and tells the servers when it is
done. A server that knows this of all of them says from which step on the sums begin (`HostSumStart`), before the reply
to the step before it. Until then every worker pushes and pulls by itself. If a worker of the unit is replaced while the
others go on, the server says that the sums are over, and repeats the values that may not have been passed on.

**Where a sum is of no use** the lead sends the gradients one by one, in the same step:

* The weights of the group's workers differ, as in the last batch of an epoch: each gradient is multiplied by its weight
  before it is added. The lead sees the weights of its unit. The server asks where those of other units differ.
* The sum is not finite: the servers must find out which worker's gradient it is.
* A worker's gradients are not finite (`grads: kHidden`): the servers leave it out, and need those of the others.
* float16 and `reduce: kMean`: the parts are made smaller before they are added, by a factor that depends on the weights
  of the whole group. Such buckets are pushed by each worker itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepEnd
from topotrain.core.client.client_extension import ClientExtension, ClientHooks
from topotrain.core.client.step_exchange import ServerReduction
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.protocol import NO_REVISION, int_to_bits
from topotrain.core.server.nonfinite import all_finite
from topotrain.core.transport_contract import TransportError
from topotrain.extensions.host_sums.host_sum_messages import (
    HostBackwardEnd,
    HostCommit,
    HostGradient,
    HostHello,
    HostMean,
    HostReady,
    HostSumStart,
    HostValues,
    SeparateGradients,
)
from topotrain.extensions.host_sums.host_units import HostUnit
from topotrain.extensions.host_sums.sum_writer import HostSumSettings, SumWriter, elements
from topotrain.extensions.host_sums.unit_gradients import (
    BackwardGradients,
    CommittedGradients,
    UnitGradients,
    UnitSum,
)


class UnitLinks(ABC):
    """The connections of a worker to the other workers of its unit."""

    @abstractmethod
    def begin(self, workers: Sequence[Address], reduction: "HostReduction") -> None:
        """Connect to these workers without waiting.

        `HostReduction.connected` is to be called for each.
        """

    @abstractmethod
    def send(self, to: Address, message: m.Message) -> None:
        """Send a message without waiting. Raises TransportError without a connection."""

    @abstractmethod
    def close(self) -> None:
        """The worker leaves. No further connection is made."""


class HostReduction(ServerReduction):
    """Sends gradients to servers of this host directly, and to others over a lead.

    Args:
        unit: the worker's unit.
        settings: how its gradients are added up.
        links: connects it with the others.
    """

    def __init__(self, unit: HostUnit, settings: HostSumSettings, links: UnitLinks) -> None:
        super().__init__()
        self._unit, self._settings, self._links = unit, settings, links
        self._first: dict[int, int] = {}  # shard -> the first step with sums
        self._met: set[int] = set()
        self._others: tuple[Address, ...] = ()
        self._direct: set[int] = set()  # buckets that no unit adds up
        self._infinite: set[int] = set()  # buckets of the present step with a gradient that is not finite
        self._gradients: UnitGradients | None = None

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull, hooks: ClientHooks) -> None:
        super().bind(channel, model, values, hooks)
        self._others = tuple(each for each in self._unit.addresses() if each != channel.me)
        self._writer = SumWriter(model, self._settings, self._unit.workers)

    # --- the beginning -------------------------------------------------------------------------------------------

    def start(self, device: torch.device) -> None:
        """As `GradientExchange.start`: connect to the others of the unit."""
        shards = [shard for shard in self._unit.shards if self._unit.lead(shard) == self.channel.me.index]
        slice_map, workers = self.model.map, self._unit.workers
        # A script may split its model, and then its workers have other parameters. The unit never begins.
        if any(space.owners for space in slice_map.spaces):
            return
        for bucket in slice_map.buckets:
            if self.model.flats.view("local", bucket).dtype is torch.float16 and self._settings.divide:
                self._direct.add(bucket.id)
        if self._settings.replaces:
            self._gradients = CommittedGradients(workers, slice_map, shards)
        else:
            self._gradients = BackwardGradients(workers)
        # Each pair connects once, from the later worker to the earlier one.
        self._links.begin([other for other in self._others if other.index < self.channel.me.index], self)

    def connected(self, peer: Address) -> None:
        """This worker has connected to another one of its unit."""
        with self.channel.waiter.update():
            # A connection is made by one side only. The message shows the other side that it exists.
            self._post(peer, HostHello())
            self.meet(peer)

    def meet(self, peer: Address) -> None:
        """There is a connection to another worker of the unit. Called under the waiter."""
        self._met.add(peer.index)
        if self.is_connected:
            for shard in sorted(self._unit.shards):
                self._post(self.channel.servers[shard], HostReady())

    @property
    def keeps(self) -> bool:
        # A mean is sent to one worker of the unit, which shows it to the others.
        return False

    @property
    def is_connected(self) -> bool:
        """Whether there are connections to all other workers of the unit."""
        return len(self._met) == len(self._others)

    @property
    def sums(self) -> int:
        """Sums that this worker has sent as a lead."""
        return self._writer.sums

    @property
    def apart(self) -> int:
        """Gradients of its unit that it has sent one by one."""
        return self._writer.apart

    def begin_sums(self, shard: int, step: int) -> None:
        """A server adds up sums of this unit from this step on; -1: not any more."""
        if step < 0:
            self._first.pop(shard, None)
        else:
            self._first[shard] = step

    def _adds(self, shard: int, step: int) -> bool:
        """Whether the unit sends sums to this server in this step."""
        first = self._first.get(shard)
        return first is not None and step >= first

    def close(self) -> None:
        self._links.close()

    # --- gradients of this worker --------------------------------------------------------------------------------

    def push(
        self,
        step: int,
        ordinal: int,
        bucket: Bucket,
        weight: float,
        present: int,
        body: torch.Tensor,
        fresh: bool = False,
    ) -> None:
        if self._settings.replaces and self._settings.checked:
            (self._infinite.discard if all_finite(body) else self._infinite.add)(bucket.id)
        if bucket.id in self._direct or not self._adds(bucket.shard, step):
            super().push(step, ordinal, bucket, weight, present, body, fresh)
            return
        # As in `ServerReduction.push`: means and values may come from the first message on.
        self._backward = (step, ordinal)
        self.values.expect_early(step)
        bits = int_to_bits(present, len(bucket.pieces))
        with self.channel.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
            self._give(bucket.shard, HostGradient(step, ordinal, bucket.id, weight, bits, body=body))

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int, absent: bool = False) -> None:
        super().end_backward(step, ordinal, weight, pushed, absent)
        message = HostBackwardEnd(step, ordinal, int_to_bits(pushed, len(self.model.map.buckets)))
        # By lead: it may add up for several servers.
        leads = {self._unit.lead(shard): shard for shard in sorted(self._unit.shards) if self._adds(shard, step)}
        for shard in leads.values():
            self._give(shard, message)

    def before_commit(self, step: int, end: StepEnd) -> StepEnd:
        if end.revisions:
            counted = (number for number in self._infinite if end.revisions[number] != NO_REVISION)
            finite = next(counted, None) is None
            for shard in sorted(self._unit.shards):
                if self._adds(shard, step):
                    low, count = self.model.reduced_by(self.channel.servers[shard])
                    revisions = bytes(
                        NO_REVISION if number in self._direct else end.revisions[number]
                        for number in range(low, low + count)
                    )
                    self._give(shard, HostCommit(shard, step, end.weight, finite, revisions))
        self._infinite.clear()
        return super().before_commit(step, end)

    def _give(self, shard: int, message: HostGradient | HostBackwardEnd | HostCommit) -> None:
        """Give a message to the lead of a server, which may be this worker."""
        lead = self._unit.lead(shard)
        if lead != self.channel.me.index:
            self._post(Address(Role.WORKER, self._unit.group, lead), message)
            return
        with self.channel.waiter.update():
            sums, ends = self._collect(lead, message)
        # Not under the waiter: readers may go on meanwhile.
        self._send(sums, ends)

    # --- gradients of the unit, on the lead ----------------------------------------------------------------------

    def receive(self, sender: Address, message: m.Message) -> None:
        """A message about gradients has come. Called under the waiter."""
        if self._gradients is None:
            return
        if isinstance(message, SeparateGradients):
            bucket = self.model.bucket(sender, message.bucket)
            self._send(self._gradients.separate(message.step, message.ordinal, bucket.id), [])
        else:
            assert isinstance(message, HostGradient | HostBackwardEnd | HostCommit)
            self._send(*self._collect(sender.index, message))

    def _collect(
        self, worker: int, message: HostGradient | HostBackwardEnd | HostCommit
    ) -> tuple[list[UnitSum], list[tuple[int, m.Message]]]:
        assert self._gradients is not None
        if isinstance(message, HostGradient):
            self._check(worker, message)
            sums = self._gradients.add(worker, message)
        elif isinstance(message, HostBackwardEnd):
            sums = self._gradients.end(worker, message)
        else:
            sums = self._gradients.commit(worker, message)
        return sums, list(self._gradients.take_ends())

    def _check(self, worker: int, message: HostGradient) -> None:
        """Raise ProtocolError for a gradient that no correct worker sends here."""
        if not 0 <= message.bucket < len(self.model.map.buckets):
            raise m.ProtocolError(f"worker {worker} has no bucket {message.bucket}")
        bucket = self.model.map.buckets[message.bucket]
        m.check_bits(message.present, len(bucket.pieces), self._address(worker), f"the pieces of bucket {bucket.id}")
        elements(self.model, bucket, message)

    def _send(self, sums: Sequence[UnitSum], ends: Sequence[tuple[int, m.Message]]) -> None:
        for each in sums:
            bucket = self.model.map.buckets[each.bucket]
            server = self.model.server_of(bucket)
            with self.channel.spans.span("reduce", step=each.step + 1, ordinal=each.ordinal, bucket=bucket.id):
                messages = self._writer.messages(bucket, each)
            for message in messages:
                self._post(server, message)
        for shard, end in ends:
            self._post(self.channel.servers[shard], end)

    # --- means and values ----------------------------------------------------------------------------------------

    def on_mean(self, sender: Address, message: m.ReducedGradient) -> None:
        """As `GradientExchange.on_mean`; the lead shows it to the others."""
        super().on_mean(sender, message)
        shard = sender.index
        # A mean that came encoded, or from before the beginning, was sent to each worker.
        if self._adds(shard, message.step) and self._unit.lead(shard) == self.channel.me.index:
            where = (shard, message.step, message.ordinal, message.bucket, message.present)
            for other in self._others:
                self._post(other, HostMean(*where, body=message.body))

    def take_mean(self, message: HostMean) -> None:
        """The lead shows a mean of a server."""
        server = self.channel.servers[message.shard]
        where = (message.step, message.ordinal, message.bucket, message.present)
        super().on_mean(server, m.ReducedGradient(*where, body=message.body))

    def values_place(self, message: HostValues) -> torch.Tensor:
        """Where a server's values for the unit are to be received."""
        # Apart from "params", which may get other values while another worker still reads these.
        bucket = self.model.bucket(self.channel.servers[message.shard], message.bucket)
        return self._writer.buffer("values", bucket)

    def take_values(self, sender: Address, message: HostValues) -> None:
        """A server has sent values for the unit, or the lead shows them."""
        if sender.role is Role.SERVER:
            for other in self._others:
                self._post(other, message)
        server = self.channel.servers[message.shard]
        values = m.Values(message.round, message.bucket, message.version, body=message.body)
        self.values.on_values(server, values)

    # --- sending -------------------------------------------------------------------------------------------------

    def _address(self, worker: int) -> Address:
        return Address(Role.WORKER, self._unit.group, worker)

    def _post(self, to: Address, message: m.Message) -> None:
        # A lost worker or server is noticed by its connection. The step is dropped then, or the group starts again.
        with suppress(TransportError):
            self._links.send(to, message)


class HostSumClient(ClientExtension):
    """Gives the messages of the unit and of its servers to the reduction.

    Args:
        unit: the worker's unit.
        reduction: its part in the sums.
    """

    messages = (
        HostHello,
        HostSumStart,
        HostGradient,
        HostBackwardEnd,
        HostCommit,
        SeparateGradients,
        HostMean,
        HostValues,
    )

    def __init__(self, unit: HostUnit, reduction: HostReduction) -> None:
        self._unit, self._reduction = unit, reduction

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._me, self._model = channel.me.index, model

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """As `ClientExtension.place`. Bodies of other workers are read in their memory."""
        if isinstance(message, HostValues) and sender.role is Role.SERVER:
            self._check(sender, message.shard)
            return self._reduction.values_place(message)
        return None

    def handle(self, sender: Address, message: m.Message) -> None:
        if sender.role is Role.WORKER and sender.index not in self._unit.workers:
            raise m.ProtocolError(f"{sender} is not in the unit of the workers {self._unit.workers}")
        if isinstance(message, HostHello):
            self._reduction.meet(sender)
        elif isinstance(message, HostSumStart):
            self._reduction.begin_sums(sender.index, message.step)
        elif isinstance(message, HostMean):
            self._check(sender, message.shard)
            self._reduction.take_mean(message)
        elif isinstance(message, HostValues):
            self._check(sender, message.shard)
            self._reduction.take_values(sender, message)
        elif self._model.is_open:
            self._reduction.receive(sender, message)

    def _check(self, sender: Address, shard: int) -> None:
        """Raise ProtocolError if means or values of a server cannot come from this sender."""
        source = shard if sender.role is Role.SERVER else self._unit.lead(shard)
        is_lead = sender.role is Role.WORKER or self._unit.lead(shard) == self._me
        if shard not in self._unit.shards or sender.index != source or not is_lead or not self._model.is_open:
            raise m.ProtocolError(f"{sender} sends what server {shard} has, which it does not get")

    def on_lost(self, peer: Address, reason: str) -> bool:
        """As `ClientExtension.on_lost`: the servers notice the end of another worker, too."""
        return peer.role is Role.WORKER and peer.index in self._unit.workers
