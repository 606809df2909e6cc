"""A server whose gradients are added up on their way from server to server (`cluster { algorithm: … }`).

Rule: every worker sends all its gradients to the server beside it, its gateway, and to no other. The gateways run the
algorithm among themselves, one `algorithms.Relay` each, and tell each its own worker what came out. What becomes of the
sum is the server's business as ever: its worker hands in the shard's gradient as the script left it (`given`). Where no
worker sees a mean (`grads: kHidden`), nothing comes down, and the gateway of a bucket's home hands the sum in itself.
New values go the same way down: an all-gather.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from topotrain.config.job import Algorithm, Apply, Grads, Job, Reduce
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.bitmaps import NO_REVISION, bits_to_int, int_to_bits
from topotrain.core.model.schema import Allocate, FlatBuffers, torch_dtype
from topotrain.core.protocol.message_validation import check_bits
from topotrain.core.server.server import Deliver, Server
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
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
from topotrain.extensions.collectives.precomputed_gradients import PrecomputedGradients


@dataclass(slots=True)
class _Backward:
    """The means of one backward that this gateway's worker has been told."""

    told: int = 0
    contributed: int = 0


@dataclass(slots=True)
class _Hidden:
    """What the worker says of its gradients before it commits: the last push of each bucket counts, none is final."""

    pushes: dict[int, m.Push] = field(default_factory=dict)
    commit: m.Commit | None = None
    given: set[int] = field(default_factory=set)


class CollectiveServer(Server):
    """A `Server` that also is its own worker's way into the collective. Arguments as for `Server`."""

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        allocate: Allocate,
        shared: bool = False,
        deliver: Deliver | None = None,
        resumed: SnapshotSource | None = None,
    ) -> None:
        super().__init__(me, job, topology, allocate, shared, deliver, resumed)
        self._worker = Address(Role.WORKER, me.group, me.index)
        self._algorithm = job.cluster.algorithm
        self._divide = job.reduce is Reduce.kMean
        self._hidden = job.grads is Grads.kHidden
        self._waits_for_commit = self._hidden and job.apply is not Apply.kOnArrival
        self._ways: _Ways | None = None
        self._backwards: dict[tuple[int, int], _Backward] = {}
        self._held = _Hidden()
        self._told: dict[int, tuple[int, set[Address]]] = {}  # bucket -> the step of its values, and who was told them

    # --- the door ------------------------------------------------------------------------------------------------

    def _handler(self, message: m.Message) -> Callable[..., None]:
        return _HANDLERS.get(type(message)) or super()._handler(message)

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where a body is to be received (see `wire.Endpoint.place`)."""
        self.manners.check(sender, message)
        if self.model is not None and isinstance(message, m.CollectivePart):
            self._way.bucket(message.bucket)
            # What is passed on, or to the worker, is best in memory of our own: a view of a view would be copied.
            return self._way.relay.place(sender.index, message, viewable and message.up)
        if self.model is not None and isinstance(message, m.Push):
            self._check_beside(sender)
            bucket = self._way.bucket(message.bucket)
            return None if viewable and not self._way.is_leaf(bucket) else self._way.flats.view("push", bucket)
        return super().place(sender, message, viewable)

    @property
    def _way(self) -> "_Ways":
        if self._ways is None:
            size = self._topology.shards
            self._ways = _Ways(self._known.map, self._algorithm, size, self.me.index, self._allocate)
        return self._ways

    @property
    def _given(self) -> PrecomputedGradients:
        staging = self._known.staging[0]
        assert isinstance(staging, PrecomputedGradients)
        return staging

    def _check_beside(self, sender: Address) -> None:
        if sender != self._worker:
            raise m.ProtocolError(f"{self.me} takes gradients of {self._worker} only, not of {sender}")

    # --- the worker's part ---------------------------------------------------------------------------------------

    def _push(self, sender: Address, message: m.Push) -> None:
        self._check_beside(sender)
        staging = self._current(sender, message.step)
        if staging is None:
            return
        check_bits(message.present, len(self._way.bucket(message.bucket).pieces), f"{sender}: pieces")
        if self._waits_for_commit:
            known = self._held.pushes.get(message.bucket)
            if known is None or known.ordinal < message.ordinal:
                self._held.pushes[message.bucket] = message
            self._give_hidden()
            return
        self._given.check(sender.index, message.ordinal)
        self._add(message.step, message.ordinal, message.bucket, message.weight, message.present, message.body)

    def _add(
        self, step: int, ordinal: int, number: int, weight: float, present: bytes, body: torch.Tensor | None
    ) -> None:
        bucket = self._way.bucket(number)
        counts = weight if self._divide else float(weight > 0)
        part = Contribution.of(
            [counts], present or bytes((len(bucket.pieces) + 7) // 8), self._way.elements(bucket, body)
        )
        self._carry(self._way.relay.local(step, ordinal, number, part))

    def _backward_end(self, sender: Address, message: m.BackwardEnd) -> None:
        self._check_beside(sender)
        if self._current(sender, message.step) is None:
            return
        super()._backward_end(sender, message)
        pushed = bits_to_int(message.pushed)
        for bucket in self._known.map.buckets:
            if not pushed >> bucket.id & 1:
                self._add(message.step, message.ordinal, bucket.id, message.weight, b"", None)

    def _check_pushed(self, sender: Address, message: m.BackwardEnd) -> None:
        check_bits(message.pushed, len(self._known.map.buckets), f"{sender}: the buckets of a backward")

    def _commit(self, sender: Address, message: m.Commit) -> None:
        super()._commit(sender, message)
        if self._waits_for_commit and sender == self._worker and message.step == self._given.step:
            self._held.commit = self._held.commit or message
            self._give_hidden()

    def _give_hidden(self) -> None:
        """Once the worker has committed, no push can be replaced: its buckets, as they come, are its part."""
        commit = self._held.commit
        for bucket in self._known.map.buckets if commit is not None else ():
            if commit is None or bucket.id in self._held.given:
                continue
            wanted, push = commit.revisions[bucket.id], self._held.pushes.get(bucket.id)
            if wanted == NO_REVISION:
                self._held.given.add(bucket.id)
                self._add(commit.step, 0, bucket.id, commit.weight, b"", None)
            elif push is not None and push.ordinal >= wanted:
                self._held.given.add(bucket.id)
                self._add(commit.step, 0, bucket.id, commit.weight, push.present, push.body)

    def _carry_out(self, decision: m.StepDecision) -> None:
        super()._carry_out(decision)
        self._held = _Hidden()

    # --- the collective ------------------------------------------------------------------------------------------

    def _hop(self, sender: Address, message: m.CollectivePart) -> None:
        bucket = self._way.bucket(message.bucket)
        self._way.elements(bucket, message.body)
        check_bits(message.present, len(bucket.pieces), f"{sender}: pieces")
        self._carry(self._way.relay.arrive(sender.index, message))

    def _carry(self, outs: list[Out]) -> None:
        for out in outs:
            if isinstance(out, SendPart):
                self.send(Address(Role.SERVER, self.me.group, out.to), out.hop)
            elif isinstance(out, CompleteSum):
                self._total(out)
            elif out.hop.ordinal == VALUES:
                hop = out.hop
                self.send(self._worker, m.Values(hop.step, hop.bucket, hop.version, body=hop.body))
            else:
                self._result(out)

    def _total(self, total: CompleteSum) -> None:
        part, bucket = total.part, self._way.bucket(total.bucket)
        if part.body is not None and self._divide and part.divisor != 1.0:
            part.body.div_(part.divisor)
        outs = self._way.relay.result(total.step, total.ordinal, total.bucket, part.present, part.body)
        if self._hidden:  # only the home has a use for it
            outs = [out for out in outs if isinstance(out, SendPart) and out.to == bucket.shard]
        self._carry(outs)
        if not self._hidden or bucket.shard == self.me.index:
            self._known_here(total.step, total.ordinal, bucket, part.present, part.body)

    def _result(self, result: CollectiveResult) -> None:
        hop = result.hop
        bucket = self._way.bucket(hop.bucket)
        self._known_here(hop.step, hop.ordinal, bucket, hop.present, self._way.elements(bucket, hop.body))

    def _known_here(self, step: int, ordinal: int, bucket: Bucket, present: bytes, mean: torch.Tensor | None) -> None:
        """The group's mean of a bucket is in this gateway; without one nobody has a gradient."""
        if self._hidden:
            self._given.give(bucket.id, bits_to_int(present), mean)
            self._try_stage(self._worker.group)
            return
        backward = self._backwards.setdefault((step, ordinal), _Backward())
        backward.told += 1
        if mean is not None:
            backward.contributed |= 1 << bucket.id
            self.send(self._worker, m.ReducedGradient(step, ordinal, bucket.id, present, body=mean))
        count = len(self._known.map.buckets)
        if backward.told == count:
            del self._backwards[step, ordinal]
            self._given.reduced(ordinal)
            self.send(self._worker, m.BackwardReduced(step, ordinal, int_to_bits(backward.contributed, count)))

    # --- new values ----------------------------------------------------------------------------------------------

    def send(self, to: Address, message: m.Message) -> None:
        """As a server sends; but what a step has made of the values goes to the other workers by way of their gateways.

        So does not what one worker asks for alone (it has no number of a step), nor what is said a second time.
        """
        passed_on = isinstance(message, m.Values) and message.round >= 0 and self._algorithm is not Algorithm.kNaive
        if passed_on and isinstance(message, m.Values) and message.bucket in range(*self._own_buckets):
            step, told = self._told.get(message.bucket, (-1, set()))
            if step < message.round:
                self._told[message.bucket] = (message.round, told := set())
                relay = self._way.relay
                self._carry(relay.result(message.round, VALUES, message.bucket, b"", message.body, message.version))
            if to not in told:
                told.add(to)
                if to != self._worker:
                    return
        super().send(to, message)

    @property
    def _own_buckets(self) -> tuple[int, int]:
        buckets = self._known.buckets
        return (buckets[0].id, buckets[-1].id + 1) if buckets else (0, 0)


class _Ways:
    """One gateway's relay, and the memory that it needs: over the whole model, made once."""

    def __init__(self, slice_map: SliceMap, algorithm: Algorithm, size: int, rank: int, allocate: Allocate) -> None:
        self._map = slice_map
        self.flats = FlatBuffers(slice_map, None, allocate)
        self.relay = Relay(algorithm, size, rank, lambda number: slice_map.buckets[number].shard, self._buffer)
        trees = [up(algorithm, size, home) for home in range(size)]
        self._leaf = [parents[rank] != rank and not children(parents, rank) for parents in trees]

    def _buffer(self, slot: str, number: int) -> torch.Tensor:
        return self.flats.view(slot, self._map.buckets[number])

    def bucket(self, number: int) -> Bucket:
        """A bucket of the model. Raises ProtocolError if there is none."""
        if not 0 <= number < len(self._map.buckets):
            raise m.ProtocolError(f"bucket {number} of {len(self._map.buckets)}")
        return self._map.buckets[number]

    def is_leaf(self, bucket: Bucket) -> bool:
        """What this rank's worker has of the bucket is passed on as it is."""
        return self._leaf[bucket.shard]

    def elements(self, bucket: Bucket, body: torch.Tensor | None) -> torch.Tensor | None:
        """A body as elements. Raises ProtocolError when it has another size than the bucket."""
        if body is None:
            return None
        space = self._map.spaces[bucket.space]
        if body.nbytes != (bucket.hi - bucket.lo) * space.itemsize:
            raise m.ProtocolError(f"a body of {body.nbytes} bytes for {bucket.hi - bucket.lo} elements")
        return body.view(torch_dtype(space.dtype))


_HANDLERS: Mapping[type[m.Message], Callable[..., Any]] = {
    m.Push: CollectiveServer._push,
    m.BackwardEnd: CollectiveServer._backward_end,
    m.Commit: CollectiveServer._commit,
    m.CollectivePart: CollectiveServer._hop,
}
