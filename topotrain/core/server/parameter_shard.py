"""One shard of a model: its values, its gradient sources, and the update.

A server makes it when the first worker has described the model.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from topotrain.config.async_momentum import Corrector, corrector, groups_apart
from topotrain.config.job import Agreement as AgreementKind
from topotrain.config.job import Apply, Grads, Job, NonFinite, Reduce, Slicing
from topotrain.config.sharding import Bucket, Piece, SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.model.body_codec import ServerBodyCodec, present_body
from topotrain.core.model.schema import BucketValues, BufferMemory, FlatBuffers, Schema, bucket_of, effective, typed
from topotrain.core.model.shared_windows import VALUES
from topotrain.core.optim.adapter import HyperCheck, OptimizerSpec, SliceUpdate, of_optimizer
from topotrain.core.optim.updater_block import clip_bounds
from topotrain.core.server.component_state import State, restore_tensor
from topotrain.core.server.gradients.backward_means import ArrivalMeans, ReturnedMeans, SharedMemoryMeans
from topotrain.core.server.gradients.committed_pushes import CommittedPushes
from topotrain.core.server.gradients.gradient_source import (
    GradientSource,
    GroupBuffers,
    ReducedBucket,
    SourceSettings,
    StagedGradient,
)
from topotrain.core.server.group_sync import GroupSync, MasterSync, NoSync, RingSync
from topotrain.core.server.nonfinite import NO_WORKER, all_finite
from topotrain.core.server.server_extension import ExtensionHooks

_MOST_ENTRIES = 32  # of a parameter's state: torch's optimizers have at most five, and a peer must not fill the memory


@dataclass(frozen=True, slots=True)
class StatePosition:
    """Where a piece's elements lie inside the value of an optimizer's entry: [lo, hi)."""

    piece: Piece
    lo: int
    hi: int


class GradientViews:
    """The gradient of one bucket by segment.

    Most steps have their gradient in the same buffer, so the views of the last one serve again. A step of a model of
    many small tensors would spend most of its time on them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # By worker group, one for each: that of a process that is gone must not keep its memory.
        self._held: dict[int, tuple[tuple[int, torch.dtype, int], Mapping[int, torch.Tensor | None]]] = {}

    def of(self, group: int, gradient: torch.Tensor, present: int) -> Mapping[int, torch.Tensor | None]:
        """Return segment id -> its part of a group's gradient, or None.

        It is the same object for the same memory.
        """
        # While views hold the memory, no other buffer can have its address.
        key = (gradient.data_ptr(), gradient.dtype, present)
        held = self._held.get(group)
        if held is None or held[0] != key:
            # None, and not zeros: Adam on None leaves its state, and Adam on zeros does not.
            views = {
                piece.segment: gradient[self._bucket.place(piece)] if present >> i & 1 else None
                for i, piece in enumerate(self._bucket.pieces)
            }
            held = self._held[group] = key, views
        return held[1]


class UpdateUnit:
    """The unit of an update: one bucket, or the shard where tensors are kept whole.

    Element-wise optimizers give the same bits either way.
    """

    def __init__(
        self, buckets: tuple[Bucket, ...], places: dict[int, list[StatePosition]], update: SliceUpdate, whole: bool
    ) -> None:
        self.buckets = buckets
        self.places = places
        self.update = update
        self.whole = whole
        self.views = None if whole else GradientViews(buckets[0])
        """The gradients of a unit of one bucket. None: tensors are kept whole."""


class OptimizerState:
    """The optimizer's state as messages, one for each piece of each entry."""

    def __init__(self, slice_map: SliceMap, flats: FlatBuffers, units: Sequence[UpdateUnit]) -> None:
        self._map = slice_map
        self._flats = flats
        self._units = units
        self._by_piece = {p.piece: (u, key, p) for u in units for key, places in u.places.items() for p in places}
        # Of entries of which pieces are missing: (first bucket, key, name) -> value, and the pieces that are in it.
        self._loading: dict[tuple[int, int, str], tuple[torch.Tensor, set[int]]] = {}
        self._names: dict[int, set[str]] = {}

    def parts(self, number: int, worker: int) -> Iterator[m.Message]:
        """The entries of a worker's parameters, in reply to its request `number`."""
        count = 0
        for unit in self._units:
            for key, name, value in unit.update.state():
                if not self._map.spaces[self._map.segments[key].space].on(worker):
                    continue
                whole = isinstance(value, torch.Tensor) and value.dim() > 0
                # Parts of such a state belong to no elements of the parameter, so a worker could not join them.
                if isinstance(value, torch.Tensor) and whole and value.numel() != unit.places[key][-1].hi:
                    yield m.Fail(f"optimizer state {name!r} is not element-wise and cannot be gathered")
                    return
                for place in unit.places[key]:
                    count += 1
                    yield self._part(number, place, name, value, whole)
        # The count tells the worker when all parts are here, also on a transport that reorders them.
        yield m.StatePart(number, -1, -1, float(count), "")

    def _part(
        self, number: int, place: StatePosition, name: str, value: torch.Tensor | float, whole: bool
    ) -> m.StatePart:
        bucket = self._map.buckets[place.piece.bucket]
        index = bucket.pieces.index(place.piece)
        if not isinstance(value, torch.Tensor) or not whole:
            return m.StatePart(number, bucket.id, index, float(value), name)
        # The elements in the order of memory, which is that of the parameter's flat slice, whatever its strides are.
        flat = value if value.dim() == 1 else value.as_strided((value.numel(),), (1,))
        body = flat[place.lo : place.hi].to(self._flats.view("values", bucket).dtype)
        return m.StatePart(number, bucket.id, index, 0.0, name, body=body)

    def load(self, part: m.StatePart) -> None:
        """Load one part. An entry counts when all of its pieces are here."""
        bucket = self._map.buckets[part.bucket]
        unit, key, place = self._by_piece[bucket.pieces[part.piece]]
        if unit.update.optimizes(key, part.key) and not of_optimizer(part.key)[1]:
            unit.update.forget(key, part.key)
            return
        names = self._names.setdefault(key, set())
        names.add(part.key)
        # The names come from a worker, and each would allocate memory of the size of the parameter.
        if len(names) > _MOST_ENTRIES or not unit.update.optimizes(key, part.key):
            raise m.ProtocolError(f"state {part.key!r} of a parameter that has none such")
        if part.body is None:
            unit.update.load_state(key, part.key, torch.tensor(part.number, dtype=torch.float32))
            return
        piece = place.piece
        like = self._flats.view("values", bucket)[bucket.place(piece)]
        places = unit.places[key]
        entry = (unit.buckets[0].id, key, part.key)
        if entry not in self._loading:
            self._loading[entry] = torch.zeros(places[-1].hi, dtype=like.dtype), set()
        loaded, here = self._loading[entry]
        loaded[place.lo : place.hi] = typed(part.body, like)
        here.add(place.lo)
        if len(here) == len(places):
            del self._loading[entry]
            if unit.whole:
                described = self._map.parameters[self._map.segments[key].parameter]
                loaded = loaded.as_strided(described.shape, described.stride)
            unit.update.load_state(key, part.key, loaded)

    def state_dict(self) -> State:
        """Return the incomplete entries, see `component_state`."""
        # Complete entries are in the state of the optimizers.
        return {"loading": self._loading, "names": {key: sorted(names) for key, names in self._names.items()}}

    def load_state_dict(self, state: State) -> None:
        self._loading = {entry: (value, set(here)) for entry, (value, here) in state["loading"].items()}
        self._names = {key: set(names) for key, names in state["names"].items()}


@dataclass(slots=True)
class ParameterShard:
    """The state of a server that knows the model. `staging` is by worker group."""

    schema: Schema
    map: SliceMap
    buckets: tuple[Bucket, ...]
    flats: FlatBuffers
    units: tuple[UpdateUnit, ...]
    staging: dict[int, GradientSource]
    group_sync: GroupSync
    state: OptimizerState
    codec: ServerBodyCodec
    hyper: HyperCheck
    on_arrival: bool = False
    checked: bool = False

    pieces: int = field(init=False)
    """The number of pieces of the shard's buckets."""

    optimizers: int = field(init=False)
    """The number of the job's optimizers."""

    _products: dict[torch.dtype, torch.Tensor] = field(init=False, default_factory=dict)  # of gradients and factors

    def __post_init__(self) -> None:
        self.optimizers = 1 + max((parameter.optimizer for parameter in self.map.parameters), default=0)
        self.pieces = sum(len(bucket.pieces) for bucket in self.buckets)

    def bucket(self, number: int) -> Bucket:
        """A bucket of this shard. Raises ProtocolError for another's."""
        return bucket_of(self.buckets, number)

    def piece(self, number: int, piece: int) -> Piece:
        """A piece of a bucket of this shard. Raises ProtocolError if there is none."""
        pieces = self.bucket(number).pieces
        if not 0 <= piece < len(pieces):
            raise m.ProtocolError(f"piece {piece} of bucket {number}, which has {len(pieces)}")
        return pieces[piece]

    def values(self, number: int) -> torch.Tensor:
        """The current values of a bucket: the one place where a parameter changes."""
        return self.flats.view("values", self.bucket(number))

    def body(self, message: m.Message) -> torch.Tensor:
        """The body of a message as elements. Raises ProtocolError for another size."""
        return typed(present_body(message), self.values(getattr(message, "bucket", -1)))

    def gradients(self, group: int) -> list[torch.Tensor]:
        """The staged step's gradient, one 1-D tensor per segment that has one."""
        staging = self.staging[group]
        found: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            present = staging.present(bucket)
            for i, piece in enumerate(bucket.pieces):
                # A segment may have pieces in several buckets, and `staging.segment` has all of them.
                if present >> i & 1 and piece.segment not in found:
                    found[piece.segment] = staging.segment(self.map.segments[piece.segment])
        return list(found.values())

    def touched(self, group: int) -> list[int]:
        """The buckets in which the staged step has a gradient."""
        return [bucket.id for bucket in self.buckets if self.staging[group].present(bucket)]

    def vote(self, group: int, applied: int, incarnation: int = 0) -> m.StepVote:
        """This shard's vote on the staged step. applied: decisions carried out here."""
        staging = self.staging[group]
        members = staging.members
        if members:  # which of these workers make the step is not decided, so nothing can be summed or measured yet
            refused = self._refused(staging) if self.checked else ()
            return m.StepVote(group, staging.step, True, 0.0, False, applied, incarnation, refused, members)
        commit = staging.first
        # Under a GradScaler an overflow is normal: the step is skipped, and no worker is at fault.
        refused = self._refused(staging) if self.checked and not commit.check_finite else ()
        if refused and not self._may_go_on(staging, refused):
            return m.StepVote(group, staging.step, False, 0.0, False, applied, incarnation, refused)
        if not (commit.check_finite or commit.clip_norm > 0):
            return m.StepVote(group, staging.step, True, 0.0, False, applied, incarnation, refused)
        # The norm and the check need the whole gradient. Other steps are summed bucket by bucket in the update.
        staging.sum_all()
        there = self.gradients(group)
        finite = not commit.check_finite or all(all_finite(gradient.reshape(-1)) for gradient in there)
        power, infinity = 0.0, commit.clip_type == float("inf")
        if commit.clip_norm > 0:
            # Of each tensor first, as in torch's clipping. Powers can be added over tensors and shards, norms cannot.
            norms = [norm_of(g, commit.clip_type) * commit.inv_scale for g in there]
            power = max(norms, default=0.0) if infinity else sum(to_power(norm, commit.clip_type) for norm in norms)
        return m.StepVote(group, staging.step, finite, power, infinity, applied, incarnation)

    def _refused(self, staging: GradientSource) -> tuple[int, ...]:
        """`StepVote.refused` of a step that is not under a GradScaler."""
        found = sorted(staging.nonfinite_workers().items())
        return tuple(n for worker, key in found for n in (worker, self.map.segments[key].parameter))

    def _may_go_on(self, staging: GradientSource, refused: tuple[int, ...]) -> bool:
        """Whether a step may be applied without these workers."""
        # Their part must be in no mean yet, and in no norm.
        if self.on_arrival:
            return True
        return not staging.visible and NO_WORKER not in refused[::2] and staging.first.clip_norm <= 0

    def refuse(self, group: int, workers: Collection[int]) -> bool:
        """Leave these workers' gradients out of the group's step. False: nothing is left."""
        # On arrival such a gradient was never applied, and all others have been.
        return self.on_arrival or self.staging[group].refuse(workers)

    def parameter(self, number: int) -> str:
        """The name of a parameter."""
        return self.schema.parameters[number].name if number >= 0 else ""

    def apply(self, group: int, hyper: bytes, commit: m.Commit, norm: float, staleness: int = 0) -> Iterator[Bucket]:
        """Update the values with the group's step. Yields each bucket once it is new."""
        if self.on_arrival:  # the values are new already, and have been shown
            return
        factor = step_factor(commit, norm)
        yield from self.apply_gradient(self.staging[group], group, hyper, commit.optimizer, factor, staleness)

    def apply_gradient(
        self,
        gradient: StagedGradient,
        group: int,
        hyper: bytes,
        optimizer: int | None,
        factor: float = 1.0,
        staleness: int = 0,
    ) -> Iterator[Bucket]:
        """Update the values with a gradient times `factor`. Yields each new bucket.

        group: the worker group, or a number that is none for a gradient of several.
        optimizer: the number of the one that steps. None: each that has a gradient.
        """
        # One bucket at a time: it stays in the processor's cache between the sum, the update and the transport.
        for unit in self.units:
            if unit.whole:
                gradient.sum_all()
            self._update(unit, gradient, group, hyper, optimizer, factor, staleness)
            yield from unit.buckets

    def subtract(self, gradient: StagedGradient, rate: float) -> Iterator[Bucket]:
        """Subtract a gradient times `rate` from the values; yield each new bucket."""
        for bucket in self.buckets:
            present = gradient.present(bucket)
            if present:
                values, mean = self.values(bucket.id), gradient.gradient(bucket)
                for at, piece in enumerate(bucket.pieces):
                    if present >> at & 1:
                        part = bucket.place(piece)
                        values[part].add_(mean[part], alpha=-rate)
            yield bucket

    def _update(
        self,
        unit: UpdateUnit,
        gradient: StagedGradient,
        group: int,
        hyper: bytes,
        optimizer: int | None,
        factor: float,
        staleness: int,
    ) -> None:
        """Update one unit with a gradient times `factor`."""
        grads: Mapping[int, torch.Tensor | None] = {}
        if unit.views is None:
            whole = self._whole_gradients(unit, gradient)
            grads = {key: g if g is None or factor == 1.0 else g * factor for key, g in whole.items()}
        else:
            (bucket,) = unit.buckets
            present = gradient.present(bucket)
            if present:
                grads = unit.views.of(group, self._scaled(gradient.gradient(bucket), factor), present)
        if any(grad is not None for grad in grads.values()):
            unit.update.apply(hyper, grads, staleness, optimizer)

    def _scaled(self, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient of a bucket times `factor`. The next call may overwrite it."""
        if factor == 1.0:
            return gradient
        # Not in place: the gradient may be a worker's own memory, or the buffer of the group's mean. Always in the same
        # memory, so that the views of the step before serve again.
        held = self._products.get(gradient.dtype)
        if held is None or held.numel() < gradient.numel():
            largest = max(bucket.hi - bucket.lo for bucket in self.buckets)
            held = self._products[gradient.dtype] = torch.empty(largest, dtype=gradient.dtype)
        return torch.mul(gradient, factor, out=held[: gradient.numel()])

    def _whole_gradients(self, unit: UpdateUnit, gradient: StagedGradient) -> dict[int, torch.Tensor | None]:
        """The gradients of a unit of whole tensors, by segment."""
        present = {
            piece.segment
            for bucket in unit.buckets
            for i, piece in enumerate(bucket.pieces)
            if gradient.present(bucket) >> i & 1
        }
        segments = dict.fromkeys(piece.segment for bucket in unit.buckets for piece in bucket.pieces)
        return {key: gradient.segment(self.map.segments[key]) if key in present else None for key in segments}

    def update_now(self, group: int, reduced: ReducedBucket, hyper: bytes) -> None:
        """Update one bucket's values with a gradient of this group that has just arrived."""
        bucket, gradient = self.bucket(reduced.bucket), reduced.mean
        assert gradient is not None
        unit = self.units[bucket.id - self.buckets[0].id]
        assert unit.views is not None
        if reduced.present:
            unit.update.apply(hyper, unit.views.of(group, gradient, reduced.present))

    def state_dict(self) -> State | None:
        """Return the state, see `component_state`. None: not possible now."""
        codec = self.codec.state_dict()
        if codec is None:
            return None
        return {
            "buffers": list(self._kept_buffers()),
            "updates": [unit.update.state_dict() for unit in self.units],
            "staging": {group: staging.state_dict() for group, staging in self.staging.items()},
            "hyper": self.hyper.state_dict(),
            "group_sync": self.group_sync.state_dict(),
            "state": self.state.state_dict(),
            "codec": codec,
        }

    def load_state_dict(self, state: State) -> None:
        for name, space, theirs in state["buffers"]:
            restore_tensor(self.flats.flat(name, space), theirs)
        for unit, update in zip(self.units, state["updates"], strict=True):
            unit.update.load_state_dict(update)
        for group, staging in self.staging.items():
            staging.load_state_dict(state["staging"][group])
        self.hyper.load_state_dict(state["hyper"])
        self.group_sync.load_state_dict(state["group_sync"])
        self.state.load_state_dict(state["state"])
        self.codec.load_state_dict(state["codec"])

    def _kept_buffers(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the buffers that count even without a message, as (name, space, buffer)."""
        names = {VALUES}
        for group, staging in self.staging.items():
            if staging.begun or staging.keeps_means:
                names |= {f"mean {group}", f"total {group}"}
            if staging.workers > 1:  # other workers are sent the same values later
                names.add(f"out {group}")
        for (name, space), flat in sorted(self.flats.held(), key=lambda held: held[0]):
            if name in names:
                yield name, space, flat


def norm_of(gradient: torch.Tensor, kind: float) -> float:
    """The norm of a gradient."""
    # In float16 a norm above 65504 would be infinite, and clipping would leave zeros.
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    return float(torch.linalg.vector_norm(gradient, kind, dtype=wide))


def global_norm(power: float, commit: m.Commit) -> float:
    """The norm over all shards, from their combined powers; -1: no clipping."""
    if commit.clip_norm <= 0:
        return -1.0
    return power if commit.clip_type == float("inf") else to_power(power, 1.0 / commit.clip_type)


def to_power(number: float, exponent: float) -> float:
    """`number**exponent`; infinite, as in torch, where a double cannot hold it."""
    try:
        return float(number**exponent)
    except OverflowError:
        return float("inf")


def step_factor(commit: m.Commit, norm: float) -> float:
    """The factor of a step's gradients. norm: the global one."""
    factor = commit.inv_scale
    if 0 < commit.clip_norm < norm:
        factor *= commit.clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
    return factor


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """The memory of a server's shard.

    Attributes:
        buffers: where flat buffers are.
        shared: workers and servers of a host see one another's memory.
        windows: parts of parameter buffers that other processes see, too, by name and space.
    """

    buffers: BufferMemory
    shared: bool = False
    windows: Mapping[tuple[str, int], torch.Tensor] = field(default_factory=dict)


def open_model(
    me: Address,
    job: Job,
    topology: Topology,
    schema: Schema,
    slice_map: SliceMap,
    memory: ShardMemory,
    hooks: ExtensionHooks,
    resumed: bool = False,
) -> ParameterShard:
    """Make the shard of server `me`. Raises whatever the optimizer's class raises.

    resumed: the job goes on from a snapshot.
    """
    job = effective(job, schema.parameters)
    flats = FlatBuffers(slice_map, me.index, memory.buffers)
    # Before the first view: a buffer that is not put here is allocated when it is first used.
    for (name, space), flat in memory.windows.items():
        flats.put(name, space, flat)
    buckets = slice_map.buckets_of(me.index)
    correct = corrector(job, groups_apart(topology))
    units = _units(job, schema, slice_map, buckets, flats, correct)
    codec = hooks.server_codec(slice_map, me.index, flats)
    staging = {}
    for group in topology.worker_groups_of(me.group):
        seen = memory.shared and topology.sees_memory(group)
        settings = SourceSettings(
            workers=topology.workers_per_group,
            tree=topology.sum_tree(group),
            buckets=buckets,
            buffers=GroupBuffers(flats, group),
            # With one worker its gradient is the mean already, so no backward has to come back.
            visible=job.apply is Apply.kOnArrival or (job.grads is Grads.kVisible and topology.workers_per_group > 1),
            divide=job.reduce is Reduce.kMean,
            checked=job.nonfinite is not NonFinite.kAllow,
            # Any worker will do: all have the same mean, and make the same edits. Shards use different ones.
            reader=me.index % topology.workers_per_group if seen else None,
            codec=codec,
            names=[schema.parameters[segment.parameter].name for segment in slice_map.segments],
            # Before its snapshot the job may have had deaths, after which schedulers differ.
            hyper_differs=resumed,
        )
        staging[group] = hooks.gradient_source(job, slice_map, settings) or _source(job, settings)
    mine = BucketValues(flats, buckets)
    group_sync = hooks.group_sync(mine) or _group_sync(me.group, job, topology, mine)
    state = OptimizerState(slice_map, flats, units)
    on_arrival = job.apply is Apply.kOnArrival
    hyper = HyperCheck(OptimizerSpec.from_text(schema.optimizer), job.import_)
    checked = job.nonfinite is not NonFinite.kAllow
    return ParameterShard(
        schema, slice_map, buckets, flats, units, staging, group_sync, state, codec, hyper, on_arrival, checked
    )


def _source(job: Job, settings: SourceSettings) -> GradientSource:
    if job.apply is Apply.kOnArrival:
        return ArrivalMeans(settings)
    if not settings.visible:
        return CommittedPushes(settings)
    return ReturnedMeans(settings) if settings.reader is None else SharedMemoryMeans(settings)


def _units(
    job: Job,
    schema: Schema,
    slice_map: SliceMap,
    buckets: tuple[Bucket, ...],
    flats: FlatBuffers,
    correct: Corrector,
) -> tuple[UpdateUnit, ...]:
    whole = slice_map.slicing is Slicing.kTensor
    parts = [buckets] if whole else [(bucket,) for bucket in buckets]
    spec = OptimizerSpec.from_text(schema.optimizer)
    return tuple(_unit(job, spec, slice_map, part, flats, whole, correct) for part in parts)


def _unit(
    job: Job,
    spec: OptimizerSpec,
    slice_map: SliceMap,
    buckets: tuple[Bucket, ...],
    flats: FlatBuffers,
    whole: bool,
    correct: Corrector,
) -> UpdateUnit:
    """The unit of these buckets. Its keys are segment ids."""
    # A bucket has at most one piece of a segment, so an id is unique also where a unit is one bucket.
    places: dict[int, list[StatePosition]] = {}
    values: dict[int, torch.Tensor] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            segment = slice_map.segments[piece.segment]
            start = segment.lo if whole else piece.lo
            places.setdefault(segment.id, []).append(StatePosition(piece, piece.lo - start, piece.hi - start))
            if whole:
                values[segment.id] = flats.segment("values", segment)
            else:
                values[segment.id] = flats.view("values", bucket)[bucket.place(piece)]
    rows = [(key, slice_map.segments[key].parameter, value) for key, value in values.items()]
    update = SliceUpdate(spec, rows, job.import_, clip_bounds(job.updater), correct)
    return UpdateUnit(buckets, places, update, whole)


def _group_sync(group: int, job: Job, topology: Topology, values: BucketValues) -> GroupSync:
    cluster = job.cluster
    if not topology.synced:
        return NoSync()
    if cluster.agreement is AgreementKind.kRingAverage:
        return RingSync(group, topology.server_groups, values, cluster.sync_freq)
    return MasterSync(group, values, cluster.sync_freq)
