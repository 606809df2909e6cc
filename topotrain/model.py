"""One shard of a model as its server holds it: values, what the groups have staged, the update, and their arithmetic.

It is made when the first worker has said which model the job trains. Nothing here decides when something happens:
`server` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from topotrain import message as m
from topotrain.job import Agreement as AgreementKind
from topotrain.job import Grads, Job, Reduce
from topotrain.neighbor import Agreement, Alone, MasterAgreement, RingAgreement
from topotrain.reduction import Staging
from topotrain.shard import Allocate, FlatBuffers, Schema, slice_map_for, typed
from topotrain.slices import Bucket, SliceMap
from topotrain.topology import Address, Topology
from topotrain.update import OptimizerSpec, SliceUpdate


class OptimizerState:
    """The optimizer's state as messages: told entry by entry and piece by piece, and loaded the same way."""

    def __init__(self, slice_map: SliceMap, flats: FlatBuffers, update: SliceUpdate) -> None:
        self._map = slice_map
        self._flats = flats
        self._update = update
        self._loading: dict[tuple[int, str], torch.Tensor] = {}

    def tell(self, number: int) -> Iterator[m.Message]:
        """Every entry, in answer to request `number`; the last part says how many there were."""
        parts = 0
        for key, name, value in self._update.state():
            segment = self._map.segments[key]
            whole = isinstance(value, torch.Tensor) and value.dim() > 0
            if isinstance(value, torch.Tensor) and whole and value.numel() != segment.hi - segment.lo:
                yield m.Fail(f"optimizer state {name!r} is not element-wise and cannot be gathered")
                return
            for piece in self._map.pieces_of(key):
                parts += 1
                bucket = self._map.buckets[piece.bucket]
                index = bucket.pieces.index(piece)
                if not isinstance(value, torch.Tensor) or not whole:
                    yield m.StatePart(number, bucket.id, index, float(value), name)
                    continue
                flat = value if value.dim() == 1 else value.as_strided((value.numel(),), (1,))
                body = flat[piece.lo - segment.lo : piece.hi - segment.lo].to(self._flats.view("values", bucket).dtype)
                yield m.StatePart(number, bucket.id, index, 0.0, name, body=body)
        yield m.StatePart(number, -1, -1, float(parts), "")

    def load(self, part: m.StatePart) -> None:
        """Take one part; an entry counts when its last piece is here."""
        bucket = self._map.buckets[part.bucket]
        piece = bucket.pieces[part.piece]
        if part.body is None:
            self._update.load_state(piece.segment, part.key, torch.tensor(part.number, dtype=torch.float32))
            return
        segment = self._map.segments[piece.segment]
        like = self._flats.view("values", bucket)[piece.lo - bucket.lo : piece.hi - bucket.lo]
        key = (piece.segment, part.key)
        held = self._loading.setdefault(key, torch.empty(segment.hi - segment.lo, dtype=like.dtype))
        held[piece.lo - segment.lo : piece.hi - segment.lo] = typed(part.body, like)
        if piece == self._map.pieces_of(piece.segment)[-1]:
            whole = self._loading.pop(key)
            self._update.load_state(piece.segment, part.key, whole.view_as(self._flats.segment("values", segment)))


@dataclass(slots=True)
class Model:
    """What a server knows once it knows the model. `staging` is by worker group."""

    schema: Schema
    map: SliceMap
    buckets: tuple[Bucket, ...]
    flats: FlatBuffers
    update: SliceUpdate
    staging: dict[int, Staging]
    agreement: Agreement
    state: OptimizerState

    def bucket(self, number: int) -> Bucket:
        """A bucket of this shard. Raises ProtocolError for another's."""
        return _bucket(self.buckets, number)

    def values(self, number: int) -> torch.Tensor:
        """The current values of a bucket: the one place where a parameter changes."""
        return self.flats.view("values", self.bucket(number))

    def body(self, message: m.Message) -> torch.Tensor:
        """The body of a message about a bucket, as elements. Raises ProtocolError if it is none, or of another size."""
        if message.body is None:
            raise m.ProtocolError(f"{type(message).__name__} without a body")
        return typed(message.body, self.values(getattr(message, "bucket", -1)))

    def gradients(self, group: int) -> dict[int, torch.Tensor | None]:
        """Segment id -> the staged step's gradient; None where nobody has one."""
        found: dict[int, torch.Tensor | None] = {}
        for bucket in self.buckets:
            present = self.staging[group].present(bucket)
            for i, piece in enumerate(bucket.pieces):
                if present >> i & 1 and found.get(piece.segment) is None:
                    found[piece.segment] = self.flats.segment(f"mean {group}", self.map.segments[piece.segment])
                else:
                    found.setdefault(piece.segment, None)
        return found

    def touched(self, group: int) -> list[int]:
        """The buckets in which the staged step has a gradient."""
        return [bucket.id for bucket in self.buckets if self.staging[group].present(bucket)]

    def vote(self, group: int, applied: int) -> m.Staged:
        """What this shard has to say about the group's staged step; `applied`: decisions carried out so far."""
        staging = self.staging[group]
        commit = staging.commits[0]
        there = [gradient for gradient in self.gradients(group).values() if gradient is not None]
        finite = not commit.check_finite or all(bool(torch.isfinite(gradient).all()) for gradient in there)
        power, infinity = 0.0, commit.clip_type == float("inf")
        if commit.clip_norm > 0:
            norms = [float(torch.linalg.vector_norm(g, commit.clip_type)) * commit.inv_scale for g in there]
            power = max(norms, default=0.0) if infinity else sum(norm**commit.clip_type for norm in norms)
        return m.Staged(group, staging.step, finite, power, infinity, applied)

    def apply(self, group: int, hyper: bytes, commit: m.Commit, norm: float) -> None:
        """Update the values with the group's staged step."""
        gradients = self.gradients(group)
        factor = commit.inv_scale
        if 0 < commit.clip_norm < norm:
            factor *= commit.clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        for gradient in gradients.values():
            if gradient is not None and factor != 1.0:
                gradient.mul_(factor)
        self.update.apply(hyper, gradients)


def global_norm(power: float, commit: m.Commit) -> float:
    """The norm over all shards from their combined powers; -1 where the step does not clip."""
    if commit.clip_norm <= 0:
        return -1.0
    return power if commit.clip_type == float("inf") else power ** (1.0 / commit.clip_type)


def open_model(me: Address, job: Job, topology: Topology, schema: Schema, allocate: Allocate) -> Model:
    """Make the shard of server `me`. Raises what the optimizer's class raises for settings that it does not take."""
    slice_map = slice_map_for(schema.parameters, topology)
    flats = FlatBuffers(slice_map, me.index, allocate)
    buckets = slice_map.buckets_of(me.index)
    segments = [(s.id, s.parameter, flats.segment("values", s)) for s in slice_map.segments_of(me.index)]
    update = SliceUpdate(OptimizerSpec.from_text(schema.optimizer), segments, job.import_, _clip(job))
    staging = {group: _staging(job, topology, group, buckets, flats) for group in topology.worker_groups_of(me.group)}
    agreement = _agreement(me.group, job, topology, buckets, flats)
    state = OptimizerState(slice_map, flats, update)
    return Model(schema, slice_map, buckets, flats, update, staging, agreement, state)


def _bucket(buckets: tuple[Bucket, ...], number: int) -> Bucket:
    if not buckets or not buckets[0].id <= number <= buckets[-1].id:
        raise m.ProtocolError(f"bucket {number} is not mine")
    return buckets[number - buckets[0].id]


def _staging(job: Job, topology: Topology, group: int, buckets: tuple[Bucket, ...], flats: FlatBuffers) -> Staging:
    workers = topology.workers_per_group
    return Staging(
        workers,
        topology.sum_tree(group),
        buckets,
        lambda name, bucket: flats.view(f"{name} {group}", bucket),
        visible=job.grads is Grads.kVisible and workers > 1,
        divide=job.reduce is Reduce.kMean,
    )


def _agreement(group: int, job: Job, topology: Topology, buckets: tuple[Bucket, ...], flats: FlatBuffers) -> Agreement:
    def view(number: int) -> torch.Tensor:
        return flats.view("values", _bucket(buckets, number))

    cluster = job.cluster
    if not topology.synced:
        return Alone()
    if cluster.agreement is AgreementKind.kRingAverage:
        return RingAgreement(group, topology.server_groups, buckets, view, cluster.sync_freq)
    return MasterAgreement(group, buckets, view, cluster.sync_freq)


def _clip(job: Job) -> tuple[float, float] | None:
    updater = job.updater
    clips = updater is not None and updater.clip_low < updater.clip_high
    return (updater.clip_low, updater.clip_high) if updater is not None and clips else None
