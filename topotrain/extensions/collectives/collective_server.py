"""Collectives on a server: gradients are added up between servers.

A job asks for this with `cluster { algorithm: … }`. Every worker sends all its gradients to the server beside it, its
gateway, and to no other. The gateways run the algorithm among themselves, one `algorithms.Relay` each, and each sends
the means to its own worker. The worker sends the shard's gradient as the script left it (`precomputed_gradients`).

Where no worker sees a mean (`grads: kHidden`), the sum goes only to the gateway of the bucket's shard, which hands it
in itself. New values go the same way to the workers: an all-gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from topotrain.config.job import Algorithm, Apply, Grads, Job, Reduce
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import BufferMemory, FlatBuffers, torch_dtype
from topotrain.core.protocol import NO_REVISION, bits_to_int, check_bits, int_to_bits
from topotrain.core.server.gradients.gradient_source import GradientSource, SourceSettings
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import GradientExtension, Outbox, StepResult
from topotrain.extensions.collectives.algorithms import (
    VALUES,
    CollectiveResult,
    CompleteSum,
    Contribution,
    Out,
    Relay,
    SendPart,
    children,
    up,
)
from topotrain.extensions.collectives.collective_messages import CollectivePart
from topotrain.extensions.collectives.precomputed_gradients import (
    EditedTotals,
    Gateway,
    PrecomputedGradients,
    RelayedTotals,
)


class TorchCollectiveServer(GradientExtension):
    """The server's part of a job in which torch.distributed adds up the gradients."""

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource:
        return EditedTotals(settings, None)

    def state_dict(self) -> None:
        """Return None: `replication_rules` refuse a second copy."""


@dataclass(slots=True)
class _Backward:
    """The means of one backward that are in this gateway."""

    count: int = 0
    contributed: int = 0

    def add(self, bits: int) -> None:
        """Count a bucket. bits: its bit, if it has a mean."""
        self.count += 1
        self.contributed |= bits


@dataclass(slots=True)
class _HeldPushes:
    """The pushes of a step before its commit: the last one of each bucket counts."""

    pushes: dict[int, m.Push] = field(default_factory=dict)
    commit: m.Commit | None = None
    given: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _SentValues:
    """The last step of which a bucket's values were sent, and their readers so far."""

    step: int
    workers: set[Address] = field(default_factory=set)


class CollectiveServer(GradientExtension):
    """A server as its own worker's gateway into the collective.

    Args:
        server: the server.
        job, topology: the job of the server.
        memory: as for `Server`.
    """

    messages = (CollectivePart, m.Push)

    def __init__(self, server: Server, job: Job, topology: Topology, memory: BufferMemory) -> None:
        self._server = server
        self._me = server.me
        self._worker = Address(Role.WORKER, server.me.group, server.me.index)
        self._algorithm = job.cluster.algorithm
        self._shards = topology.shards
        self._divide = job.reduce is Reduce.kMean
        self._memory = memory
        self._backwards: dict[tuple[int, int], _Backward] = {}
        self._held = _HeldPushes()
        self._sent: dict[int, _SentValues] = {}  # by bucket

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource:
        self._map = slice_map
        self._own = frozenset(bucket.id for bucket in settings.buckets)
        self._relay = _GatewayRelay(slice_map, self._algorithm, self._shards, self._me.index, self._memory)
        self._gateway = Gateway(self._me, self._worker, len(slice_map.buckets))
        on_arrival = job.apply is Apply.kOnArrival
        self._hidden = job.grads is Grads.kHidden
        self._waits_for_commit = self._hidden and not on_arrival
        self._source: PrecomputedGradients
        if self._hidden:
            self._source = self._totals = RelayedTotals(settings, self._gateway, on_arrival)
        else:
            self._source = EditedTotals(settings, self._gateway)
        return self._source

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        if self._server.state.model is None:
            return None
        if isinstance(message, CollectivePart):
            self._relay.bucket(message.bucket)
            # A part that is passed on is best in memory of this process: a view of a view would be copied.
            return self._relay.place(sender.index, message, viewable and message.up)
        if isinstance(message, m.Push):
            self._gateway.check_sender(sender)
            bucket = self._relay.bucket(message.bucket)
            # A leaf passes the part on, so it needs it in memory of this process, as above.
            return None if viewable and not self._relay.is_leaf(bucket) else self._relay.flats.view("push", bucket)
        return super().place(sender, message, viewable)

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        if isinstance(message, m.Push):
            self._push(sender, message)
        elif isinstance(message, CollectivePart):
            bucket = self._relay.bucket(message.bucket)
            self._relay.elements(bucket, message.body)
            check_bits(message.present, len(bucket.pieces), sender, "pieces")
            self._carry_out(self._relay.arrive(sender.index, message))
        return ()

    # --- the worker's part ---------------------------------------------------------------------------------------

    def _push(self, sender: Address, message: m.Push) -> None:
        self._gateway.check_sender(sender)
        # A push of a step that is over: it has counted already, or never will.
        if self._server.contributions.current_source(sender, message.step) is None:
            return
        check_bits(message.present, len(self._relay.bucket(message.bucket).pieces), sender, "pieces")
        # A later push may replace a hidden gradient, so nothing is added before the commit names the pushes.
        if self._waits_for_commit:
            known = self._held.pushes.get(message.bucket)
            if known is None or known.ordinal < message.ordinal:
                self._held.pushes[message.bucket] = message
            self._give_committed()
            return
        self._source.check_ordinal(sender.index, message.ordinal)
        self._add(message.step, message.ordinal, message.bucket, message.weight, message.present, message.body)

    def _add(
        self, step: int, ordinal: int, number: int, weight: float, present: bytes, body: torch.Tensor | None
    ) -> None:
        """Add the worker's part of a bucket to the collective."""
        bucket = self._relay.bucket(number)
        counts = weight if self._divide else float(weight > 0)
        part = Contribution.of(
            [counts], present or bytes((len(bucket.pieces) + 7) // 8), self._relay.elements(bucket, body)
        )
        self._carry_out(self._relay.local(step, ordinal, number, part))

    def backward_ended(self, sender: Address, message: m.BackwardEnd) -> Outbox:
        pushed = bits_to_int(message.pushed)
        # The collective needs a part of every rank for every bucket, also where this worker has no gradient.
        for bucket in self._map.buckets:
            if not pushed >> bucket.id & 1:
                self._add(message.step, message.ordinal, bucket.id, message.weight, b"", None)
        return ()

    def committed(self, sender: Address, message: m.Commit) -> Outbox:
        if self._waits_for_commit and sender == self._worker:
            self._held.commit = self._held.commit or message
            self._give_committed()
        return ()

    def _give_committed(self) -> None:
        """Add the pushes that the worker's commit names, as far as they are here."""
        commit = self._held.commit
        for bucket in self._map.buckets if commit is not None else ():
            if commit is None or bucket.id in self._held.given:
                continue
            # The commit names the ordinal of the last push of each bucket. It may overtake the push.
            wanted, push = commit.revisions[bucket.id], self._held.pushes.get(bucket.id)
            if wanted == NO_REVISION:
                self._held.given.add(bucket.id)
                self._add(commit.step, 0, bucket.id, commit.weight, b"", None)
            elif push is not None and push.ordinal >= wanted:
                self._held.given.add(bucket.id)
                self._add(commit.step, 0, bucket.id, commit.weight, push.present, push.body)

    def step_over(self, result: StepResult) -> Outbox:
        self._held = _HeldPushes()
        return ()

    # --- the collective ------------------------------------------------------------------------------------------

    def _carry_out(self, outs: Sequence[Out]) -> None:
        for out in outs:
            if isinstance(out, SendPart):
                self._server.queue.send(Address(Role.SERVER, self._me.group, out.to), out.hop)
            elif isinstance(out, CompleteSum):
                self._finish_sum(out)
            else:
                self._receive_result(out)

    def _finish_sum(self, total: CompleteSum) -> None:
        """As the center of a bucket, divide its sum and send it to the others."""
        part, bucket = total.part, self._relay.bucket(total.bucket)
        if part.body is not None and self._divide and part.divisor != 1.0:
            part.body.div_(part.divisor)
        outs = self._relay.result(total.step, total.ordinal, total.bucket, part.present, part.body)
        if self._hidden:  # only the gateway of the bucket's shard has a use for it
            outs = [out for out in outs if isinstance(out, SendPart) and out.to == bucket.shard]
        self._carry_out(outs)
        if not self._hidden or bucket.shard == self._me.index:
            self._use_mean(total.step, total.ordinal, bucket, part.present, part.body)

    def _receive_result(self, result: CollectiveResult) -> None:
        part = result.hop
        if part.ordinal == VALUES:
            self._server.queue.send(self._worker, m.Values(part.step, part.bucket, part.version, body=part.body))
        else:
            bucket = self._relay.bucket(part.bucket)
            self._use_mean(part.step, part.ordinal, bucket, part.present, self._relay.elements(bucket, part.body))

    def _use_mean(self, step: int, ordinal: int, bucket: Bucket, present: bytes, mean: torch.Tensor | None) -> None:
        """Use the group's mean of a bucket; None: no worker has a gradient."""
        if self._hidden:
            # One push per step and bucket counts, so the backwards need no order here.
            reduced = self._totals.give(bucket.id, bits_to_int(present), mean)
            if reduced is not None:
                self._server.contributions.update_on_arrival(self._worker.group, reduced)
            self._server.contributions.try_stage(self._worker.group)
            return
        backward = self._backwards.setdefault((step, ordinal), _Backward())
        backward.add(0 if mean is None else 1 << bucket.id)
        if mean is not None:
            self._server.queue.send(self._worker, m.ReducedGradient(step, ordinal, bucket.id, present, body=mean))
        count = len(self._map.buckets)
        # After the last mean of a backward: the worker waits for this message, and may only then read p.grad.
        if backward.count == count:
            del self._backwards[step, ordinal]
            self._source.reduced(ordinal)
            self._server.queue.send(
                self._worker, m.BackwardReduced(step, ordinal, int_to_bits(backward.contributed, count))
            )

    # --- new values ----------------------------------------------------------------------------------------------

    def route_values(self, worker: Address, values: m.Values) -> Outbox:
        """As `GradientExtension.route_values`. Other workers get them from their gateways."""
        # A worker that asks alone gets its values directly: they have no number of a step.
        # kNaive gathers at rank 0, while each server updates its own shard: its servers send their values directly.
        passed_on = values.round >= 0 and values.bucket in self._own and self._algorithm is not Algorithm.kNaive
        if passed_on:
            # The server calls this once for each worker that waits. The first call sends the values through the tree.
            sent = self._sent.get(values.bucket)
            if sent is None or sent.step < values.round:
                sent = self._sent[values.bucket] = _SentValues(values.round)
                result = self._relay.result
                self._carry_out(result(values.round, VALUES, values.bucket, b"", values.body, values.version))
            if worker not in sent.workers:
                sent.workers.add(worker)
                if worker != self._worker:
                    return ()
        # A worker that is sent the same values a second time gets them directly, too.
        return ((worker, values),)

    def state_dict(self) -> None:
        """Return None: a second copy is not possible."""
        # Parts of a sum are views of other processes' memory.


class _GatewayRelay(Relay):
    """One gateway's relay, with memory over the whole model."""

    def __init__(self, slice_map: SliceMap, algorithm: Algorithm, size: int, rank: int, memory: BufferMemory) -> None:
        self._map = slice_map
        self.flats = FlatBuffers(slice_map, None, memory)
        super().__init__(algorithm, size, rank, [bucket.shard for bucket in slice_map.buckets])
        trees = [up(algorithm, size, home) for home in range(size)]
        self._leaf = [parents[rank] != rank and not children(parents, rank) for parents in trees]

    def buffer(self, slot: str, bucket: int) -> torch.Tensor:
        return self.flats.view(slot, self._map.buckets[bucket])

    def bucket(self, number: int) -> Bucket:
        """Return a bucket of the model. Raises ProtocolError if there is none."""
        if not 0 <= number < len(self._map.buckets):
            raise m.ProtocolError(f"bucket {number} of {len(self._map.buckets)}")
        return self._map.buckets[number]

    def is_leaf(self, bucket: Bucket) -> bool:
        """Whether this rank passes its worker's part of the bucket on unchanged."""
        return self._leaf[bucket.shard]

    def elements(self, bucket: Bucket, body: torch.Tensor | None) -> torch.Tensor | None:
        """Return a body as elements. Raises ProtocolError if its size is not the bucket's."""
        if body is None:
            return None
        space = self._map.spaces[bucket.space]
        if body.nbytes != (bucket.hi - bucket.lo) * space.itemsize:
            raise m.ProtocolError(f"a body of {body.nbytes} bytes for {bucket.hi - bucket.lo} elements")
        return body.view(torch_dtype(space.dtype))
