"""A worker: the user's model and optimizer, tied to a place in the job.

The gradient's trip starts here. Autograd finishes with a parameter, a hook copies the gradient into a flat buffer and
its bucket goes home (`gradient_hooks`, `exchange`). `optimizer.step()` does no arithmetic here: it commits the step on
every server and returns when the new values stand in the model's parameters.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from topotrain.config.async_momentum import explanation, momentum_of
from topotrain.config.job import Apply, ConfigError, Correction, Grads, Job, NonFinite, Pull
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core.client.client import Client, JobError, StepEnd, StepOutcome
from topotrain.core.model.finite import all_finite
from topotrain.core.model.schema import FlatBuffers, Schema, effective, slice_map_for, torch_dtype
from topotrain.core.optim.adapter import HyperEncoder, OptimizerSpec, describe
from topotrain.core.server.nonfinite import NOBODY, NonfiniteLimit, complaint
from topotrain.training.parameters.device_parameters import HostParameters
from topotrain.training.parameters.flat_parameters import ModelBuffers, ModelParts, in_file
from topotrain.training.parameters.gradient_hooks import ArrivalPath, GradientPath, MeanPath, PushPath

_FEW_OWN, _MOST_OWN = 10, 501  # steps whose own time is known, before it is told, and that are kept


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """Step `step` (from 1) of a worker counted for nothing, for some gradient was not finite.

    by: the worker whose gradient it was, "" where only the group's sum is known; parameter: one of which it is true, ""
    for a table's rows.
    """

    step: int
    by: str
    parameter: str


@dataclass(slots=True)
class WorkerStats:
    """What a worker has done. Staleness counts versions, per step and slice; losses are those since `take_loss`."""

    steps: int = 0
    samples: int = 0
    lost: int = 0  # batches that a stream did not give again
    dropped: int = 0  # batches that came too late, and that the script did not wait to be given again
    skipped: int = 0  # steps whose batch is used up, and has changed no value
    skips: list[SkippedStep] = field(default_factory=list)  # those since `take_skips`
    staleness_sum: int = 0
    staleness_count: int = 0
    staleness_max: int = 0
    loss_sum: float | torch.Tensor = 0.0  # a tensor where the loss is on a device
    losses: int = 0
    backwards: int = 0  # of the script, through whatever model, but private ones
    started: float = 0.0
    late: int = 0  # steps that were made without this worker's contribution, which came too late
    own: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_OWN))  # seconds of the last steps

    @property
    def own_s(self) -> float | None:
        """Median time that this worker itself takes for a step, in seconds; None: too few were measured."""
        return median(self.own) if len(self.own) >= _FEW_OWN else None

    def add(self, outcome: StepOutcome) -> None:
        """Count a committed step."""
        self.staleness_sum += sum(outcome.staleness)
        self.staleness_count += len(outcome.staleness)
        self.staleness_max = max(self.staleness_max, *outcome.staleness)

    @property
    def staleness_mean(self) -> float:
        """Mean over steps and slices."""
        return self.staleness_sum / self.staleness_count if self.staleness_count else 0.0

    def skip(self, skip: SkippedStep) -> None:
        """Count a step that was skipped."""
        self.skipped += 1
        self.skips.append(skip)

    def take_skips(self) -> list[SkippedStep]:
        """The skips since the last call."""
        taken, self.skips = self.skips, []
        return taken

    def take_loss(self) -> float | None:
        """Mean loss per step since the last call, or None."""
        mean = float(self.loss_sum) / self.losses if self.losses else None
        self.loss_sum, self.losses = 0.0, 0
        return mean


def plan_of(topology: Topology, parts: ModelParts, spec: OptimizerSpec) -> tuple[Schema, SliceMap]:
    """The description of a model for the servers, and its map; every worker computes the same."""
    slice_map = slice_map_for(parts.parameters, topology)
    return Schema(parts.parameters, parts.buffers, spec.to_text(), slice_map.digest), slice_map


class Worker:
    """One worker of the job.

    Args:
        me, job, topology: its place.
        parts: the model, taken apart.
        optimizer: the user's.
        exchange: the door to the servers.
        flats: makes the worker's flat buffers from the map; they may lie in shared memory.
        aside: parameters of the optimizer that are no business of the worker's: rows that travel one by one.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        parts: ModelParts,
        optimizer: torch.optim.Optimizer,
        exchange: Client,
        flats: Callable[[SliceMap], FlatBuffers],
        aside: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self.me = me
        self.job = job = effective(job, parts.parameters)
        self.parts = parts
        self.optimizer = optimizer
        self.exchange = exchange
        exchange.clock = time.monotonic
        self.tally = WorkerStats()
        spec = describe(optimizer, parts.tensors, job.cluster.slicing, job.import_, aside)
        self._groups = len(optimizer.param_groups)
        self._topology = topology
        self._optimizer_name = spec.name
        if job.correction is Correction.kMomentum and not self.momentum:
            accepted = "needs an optimizer whose momentum is above 0: there is nothing to take it from"
            raise ConfigError("correction", job.correction, accepted)
        schema, self.map = plan_of(topology, parts, spec)
        self.buffers = ModelBuffers(parts, self.map, flats(self.map))
        self.mirror = self.buffers.mirror
        on_arrival = job.apply is Apply.kOnArrival
        sees_means = topology.workers_per_group > 1 and job.grads is Grads.kVisible
        exchange.device = next((t.device for t in (*parts.tensors, *aside) if not t.is_meta), exchange.device)
        # To a device values are copied when all are here.
        self.lazy = job.pull is Pull.kLazy and isinstance(self.mirror, HostParameters)
        exchange.open(schema, self.map, self.buffers.flats, on_arrival, sees_means, self.lazy)
        self._said_weight: float | None = None
        self._samples_weight = 1.0
        self._marks: dict[int, tuple[int, int]] = {}  # stream -> first and last batch of this step
        self._hyper = b""
        self._hyper_now = HyperEncoder(optimizer)
        self._clip = (0.0, 2.0)
        self.last_norm = float("nan")
        self.snapshot = 0
        """The snapshot that this worker's state is wanted for; 0: none."""
        self.leaves = False
        """The worker's group leaves the job: the script is to be given nothing more."""
        self._left: list[tuple[int, torch.Tensor, int]] = []  # lazily committed gradients, and their versions
        self._own_steps = 0
        self._backup = job.cluster.backup > 0
        self._verdict: bool | None = None  # whether the batch that was given last counts; None: not known yet
        self._given = 0  # samples of it
        self._unsaid = 0  # samples that were given since the last commit
        self._own_samples = 0  # since the last call of `step`
        self._loss: tuple[float | torch.Tensor, int] = (0.0, 0)  # of the tally when the last step was over
        self._freed: tuple[float, float] | None = None  # when this worker's last wait for a step was over
        self._strikes = NonfiniteLimit(job.nonfinite)
        self._committed = 0
        self._accrued: set[int] = set()
        self.final_buffers: list[torch.Tensor] = []
        self._speaks = me.group == topology.worker_groups_of(topology.server_group_of(me.group))[0]
        self.path: GradientPath = self._make_path(topology.workers_per_group)
        self.before_commit: list[Callable[[int, StepEnd], None]] = []
        self.after_step: list[Callable[[StepOutcome | None], None]] = []
        self.after_epoch: list[Callable[[], None]] = []
        """Called where the others have made steps while this worker had no batch left."""
        self.counts: Callable[[], float] = self.weight
        """What this worker's gradients count on the servers."""

    def _make_path(self, group_size: int) -> GradientPath:
        args = (self.parts, self.buffers, self.exchange, self.map, self.weight)
        if self.job.apply is Apply.kOnArrival:
            return ArrivalPath(*args, rates=self._hyper_now)
        if group_size > 1 and self.job.grads is Grads.kVisible:
            return MeanPath(*args)
        return PushPath(*args, compare=group_size == 1, eager=self.job.cluster.n_push == 1)

    def start(self) -> None:
        """Take the job's initial values: worker (0,0)'s, or those of the first worker of group 0 that holds them."""
        if self.me.group == 0 and any(space.speaker == self.me.index for space in self.map.spaces):
            self.buffers.copy_from_model("local")
            self.exchange.give_initial("local")
            self.buffers.live_in("local")  # until their place is filled: what the script made need not stay as long
        if self.exchange.windowed:
            self.exchange.take_windows()
        else:
            self.buffers.make("params")  # readers of several roads would each make it, and it is large
        self.exchange.fetch()
        self.buffers.move_model()
        self.exchange.before_values = self.mirror.settle
        self.exchange.after_values = self.mirror.renew

    def rejoin(self, taken: int) -> None:
        """Another process had this worker's place, and its group has gone on: come to the step that it is in.

        taken: so many of the group's steps are counted in the tally.
        """
        if self.exchange.late_steps is not None:
            self._committed = taken
            self._move(self.exchange.late_steps.catch_up())

    # --- what the script says ------------------------------------------------------------------------------------

    @property
    def momentum(self) -> float:
        """The largest momentum of the optimizer's groups; 0 where it has none."""
        return momentum_of(self._optimizer_name, self.optimizer.param_groups)

    def weight(self) -> float:
        """What this worker's gradient counts: samples of its share, or what `tt.weight` said."""
        return self._samples_weight if self._said_weight is None else self._said_weight

    def left_early(self, epoch: int, batches: int) -> None:
        """The script left the loop over the loader; the batches it did not read are free again."""
        if self.exchange.late_steps is not None:
            self.tally.dropped += self.counts_given() is False
            self._marks.clear()
            self.exchange.late_steps.through(epoch)
        else:
            if not self.path.backwards:  # nothing that was given since the last step has a gradient
                self._own_samples = 0
            self.exchange.left_early(self._committed, self.path.backwards)

    def counts_given(self) -> bool | None:
        """With backup workers: whether the batch that was given last has counted; None: no step was taken on it.

        It is asked once; False: it came too late, and has to be given again.
        """
        verdict, self._verdict = self._verdict, None
        return verdict

    def through(self, epoch: int) -> None:
        """With backup workers: there is no batch left for this one; wait for the others, and take their values."""
        assert self.exchange.late_steps is not None
        self._move(self.exchange.late_steps.catch_up(epoch))
        for call in self.after_epoch:
            call()

    def lost(self, stream: int, batches: int) -> None:
        """A stream that was read again no longer had these batches: they are counted as lost."""
        self.tally.lost += batches

    def say_weight(self, weight: float) -> None:
        """The coming backward counts this much (tokens of a token mean, say)."""
        self._said_weight = weight

    def drawn(self, stream: int, seq: int, weight: float, samples: int) -> None:
        """The loader gave the script a batch."""
        if not self.tally.started:
            self.tally.started = time.monotonic()
        self.exchange.spans.since("data")
        self._samples_weight = weight
        self._said_weight = None
        self._given = samples
        self._own_samples += samples
        self.tally.samples += samples
        first, _ = self._marks.get(stream, (seq, seq))
        self._marks[stream] = (first, seq)

    def clip(self, max_norm: float, norm_type: float) -> None:
        """Clip this step's global gradient norm on the servers."""
        if self._backup:
            raise RuntimeError(
                f"cluster.backup = {self.job.cluster.backup}: the servers cannot clip, since whose gradients make a "
                f"step is decided before they are added up; clip none, or use cluster.backup: 0"
            )
        if self.job.apply is Apply.kOnArrival:
            raise RuntimeError(
                "a norm is known at step() only, and apply: kOnArrival updates before; use apply: kAtStep"
            )
        self._clip = (max_norm, norm_type)

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self, inv_scale: float = 1.0, check_finite: bool = False) -> StepOutcome | None:
        """Commit the step; the new values stand in the parameters when this returns.

        Returns None where the job lets a worker go on alone for some steps (`n_push` > 1).
        """
        if not self.tally.started:
            self.tally.started = time.monotonic()
        cluster = self.job.cluster
        alone = cluster.n_push > 1 or cluster.n_fetch > 1
        if alone:
            self._check()
        if self._backup:
            self._check_single()
        if self._freed is not None:
            then, waited = self._freed
            self.tally.own.append(time.monotonic() - then - (self.exchange.waited - waited))
        self._own_steps += 1
        with torch.no_grad():  # gradients may have a history (create_graph=True); the buffers must not get one
            if alone:
                outcome = self._step_alone(inv_scale, check_finite)
            else:
                self._count_own()
                outcome = self._commit(inv_scale, check_finite, fetch=True, meanwhile=self._check, lazy=self.lazy)
        self._freed = time.monotonic(), self.exchange.waited
        self.tally.steps += 0 if outcome is not None and outcome.late else 1  # else `_move` has counted them
        spans = self.exchange.spans
        with spans.span("report"):
            for call in self.after_step:
                call(outcome)
        if self._backup:
            loss = self.tally.loss_sum
            self._loss = (loss.clone() if isinstance(loss, torch.Tensor) else loss), self.tally.losses
        if outcome is not None:
            spans.step_done(self._committed)
        return outcome

    def _count_own(self, counts: bool = True) -> None:
        """What was given since the last step is in the gradient that is committed next, or in none."""
        self._unsaid += self._own_samples if counts else 0
        self._own_samples = 0

    def _check_single(self) -> None:
        """A step that comes too late is done again, so it must be known what it consists of."""
        batches = sum(last - first + 1 for first, last in self._marks.values())
        if batches != 1 or self.path.backwards != 1:
            raise RuntimeError(
                f"cluster.backup = {self.job.cluster.backup} needs one batch of the loader and one backward for each "
                f"optimizer.step(), this one has {batches} and {self.path.backwards}: a step that comes too late is "
                f"done again (no gradient accumulation, no batches ahead; or cluster.backup: 0)"
            )

    def _move(self, outcome: StepOutcome) -> None:
        """The group has made steps without this worker."""
        self.tally.steps += outcome.next - self._committed
        self._committed = outcome.next
        self.snapshot = outcome.snapshot or self.snapshot
        self.path.go_to(outcome.next)
        self._hyper = b""  # whether all servers know what was said with a step that was late

    def _drop(self, outcome: StepOutcome) -> None:
        """What this worker has contributed to the step came too late: nothing of it counts."""
        self._verdict = False
        self.tally.late += 1
        self.tally.samples -= self._given
        self.tally.loss_sum, self.tally.losses = self._loss
        self._move(outcome)

    def _check(self) -> None:
        with self.exchange.spans.span("check"):
            self.buffers.check(self.parts.parameters)
        if len(self.optimizer.param_groups) != self._groups:
            raise RuntimeError("add_param_group after tt.prepare: give the optimizer all its groups before")

    def _commit(
        self,
        inv_scale: float,
        check_finite: bool,
        fetch: bool,
        meanwhile: Callable[[], None] = lambda: None,
        lazy: bool = False,
    ) -> StepOutcome | None:
        step = self._committed
        self.exchange.settle()
        try:
            revisions, edited, dropped = self.path.at_step(step)
        except RuntimeError:
            self._check()  # a parameter that is not as it was explains more
            raise
        updater = self.job.updater
        clip_norm, clip_type = self._clip
        if not clip_norm and updater is not None and updater.clip_norm:
            clip_norm = updater.clip_norm
        text = self._hyper_now()
        end = StepEnd(
            backwards=self.path.backwards,
            weight=self.counts(),
            fetch=fetch,
            hyper=b"" if text == self._hyper else text,
            marks=tuple(number for stream, mark in self._marks.items() for number in (stream, *mark)),
            samples=self._unsaid,
            revisions=revisions,
            edited=edited,
            dropped=dropped,
            inv_scale=inv_scale,
            check_finite=check_finite,
            clip_norm=clip_norm,
            clip_type=clip_type,
        )
        for call in self.before_commit:
            call(step, end)
        outcome = None
        if lazy:
            meanwhile()
            self._left = list(self._with_gradient())
            self.exchange.commit_lazily(step, end, self._settled)
        else:
            outcome = self.exchange.commit(step, end, meanwhile)
            if not outcome.late:
                self._count(outcome, self._own_steps)
        self._hyper = text
        self._marks.clear()
        self._unsaid = 0
        self._clip = (0.0, 2.0)
        self.path.after_step()
        if outcome is not None and outcome.late:
            self._drop(outcome)
        else:
            self._verdict = True
            self._committed += 1
        return outcome

    def _with_gradient(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        for index, tensor in enumerate(self.parts.tensors):
            if tensor.grad is not None:
                yield index, tensor.grad, tensor.grad._version

    def _settled(self, outcome: StepOutcome) -> None:
        """A step that was committed lazily is over; meanwhile its gradients were still read."""
        self._count(outcome, self._committed)
        for index, gradient, version in self._left:
            if gradient._version != version:
                raise RuntimeError(
                    f"the gradient of {self.parts.parameters[index].name} was changed after step(), but with pull: "
                    f"kLazy it may still be read then: use zero_grad(set_to_none=True), the default, or pull: kStep"
                )
        self._left = []

    def _count(self, outcome: StepOutcome, step: int) -> None:
        if outcome.norm >= 0:
            self.last_norm = outcome.norm
        self.snapshot = outcome.snapshot or self.snapshot
        self.leaves = self.leaves or outcome.leaves
        self.tally.add(outcome)
        refused = dict(outcome.refused)
        if refused and (outcome.found_inf or self.me.index in refused):
            self.tally.skip(self._skip(step, refused))

    def _skip(self, step: int, refused: dict[int, int]) -> SkippedStep:
        """Whose fault it was: this worker's own before that of others, and of what is known of a sum nothing at all."""
        by = self.me.index if self.me.index in refused else max(refused)
        parameter = self.parts.parameters[refused[by]].name if refused[by] >= 0 else ""
        if by != NOBODY:
            return SkippedStep(step, str(self.me._replace(index=by)), parameter)
        mine = self._spoiled(self.path.sent)
        return SkippedStep(step, str(self.me) if mine else "", mine or parameter)

    def _spoiled(self, sent: Sequence[torch.Tensor | None]) -> str:
        """Of these gradients, by parameter, the name of one that is not finite, or ""."""
        for described, gradient in zip(self.parts.parameters, sent, strict=True):
            if gradient is not None and not all_finite(gradient.reshape(-1)):
                return described.name
        return ""

    # --- Downpour's own steps (n_push, n_fetch) --------------------------------------------------------------------

    def _step_alone(self, inv_scale: float, check_finite: bool) -> StepOutcome | None:
        """Local plain SGD between pushes of the summed gradient (Dean et al., 2012, section 4.1)."""
        rate = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        push = self._own_steps % self.job.cluster.n_push == 0
        fetch = self._own_steps % self.job.cluster.n_fetch == 0
        overflow = self._overflows(check_finite)
        self._count_own(not overflow)
        for index, tensor in enumerate(self.parts.tensors):
            if tensor.grad is None or overflow:
                continue
            gradient = tensor.grad if inv_scale == 1.0 else tensor.grad * inv_scale
            self.mirror.room("accrued", index).add_(gradient)
            self._accrued.add(index)
            self.mirror.value(index).add_(gradient, alpha=-rate.get(id(tensor), 0.0))
        outcome = self._push_accrued(fetch) if push else None
        if fetch and not push:
            self.exchange.fetch()
        return outcome

    def _overflows(self, scaled: bool) -> bool:
        """Whether this step's own gradients are to be left out of the sum; under a GradScaler that is nobody's fault.

        Raises JobError where it happens too often, in the servers' words.
        """
        policy = self.job.nonfinite
        if not scaled and policy is NonFinite.kAllow:
            return False
        name = self._spoiled([tensor.grad for tensor in self.parts.tensors])
        if scaled:
            return bool(name)
        if name:
            self.tally.skip(SkippedStep(self._own_steps, str(self.me), name))
        if self._strikes.step(self.me.group, [self.me.index] if name else []) is not None:
            why = explanation(self._topology, self.momentum)
            words = complaint(str(self.me), name, self._own_steps, self._strikes.most, why)
            raise JobError(f"worker group {self.me.group}: {words}", False, self._strikes.quarantine)
        return bool(name)

    def _push_accrued(self, fetch: bool) -> StepOutcome | None:
        kept = {index: self.parts.tensors[index].grad for index in range(len(self.parts.tensors))}
        for index, tensor in enumerate(self.parts.tensors):
            tensor.grad = self.mirror.room("accrued", index) if index in self._accrued else None
        try:
            outcome = self._commit(1.0, False, fetch)
        finally:
            for index, gradient in kept.items():
                self.parts.tensors[index].grad = gradient
        for index in self._accrued:
            self.mirror.room("accrued", index).zero_()
        self._accrued.clear()
        return outcome

    def settle(self) -> None:
        """With `pull: kLazy`, wait until the last step is applied and all its values are in the model."""
        self.exchange.settle()

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script ended: push what is left, leave the buffers, say goodbye."""
        if self._accrued:
            self._push_accrued(fetch=False)
        self.exchange.buffers.put(self.parts.buffer_tensors)
        self.exchange.finish(self._committed)

    def take_final(self, folder: Path | None = None) -> None:
        """Worker (0,0): the job's result goes into the model: the master view, and buffers averaged over the groups.

        Groups without servers each have a model of their own: group 0's is the result, and so are its buffers.

        Where the model is split, what others hold comes, too: parameter i then is `buffers.view("params", i)`, and the
        model's buffers are in `final_buffers`. folder: memory for the parameters that this worker does not hold is to
        be in files there, since it may have no room for the whole model; None: ordinary memory.
        """
        for space in self.map.spaces:
            if folder is not None and not space.on(self.me.index):
                room = in_file(folder)(space.length, torch_dtype(space.dtype))
                self.buffers.flats.put("params", space.index, room)
        self.exchange.final_values()
        found = self.exchange.buffers.final()
        if self.job.cluster.nserver_groups == 0:
            found = {0: found.get(0, {})}
        for index, buffer in enumerate(self.parts.buffer_tensors):
            rows = [found[group][index].view(buffer.dtype).reshape(buffer.shape) for group in sorted(found)]
            self.final_buffers.append(_averaged(rows))
            if not buffer.is_meta:
                buffer.copy_(self.final_buffers[index])
        self.buffers.remember()

    # --- optimizer state -----------------------------------------------------------------------------------------

    def gather_state(self) -> None:
        """Fill `optimizer.state` with what the servers hold."""
        held: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        whole: list[tuple[torch.Tensor, str]] = []
        for part in self.exchange.optimizer_state.get():
            bucket = self.map.buckets[part.bucket]
            piece = bucket.pieces[part.piece]
            segment = self.map.segments[piece.segment]
            entry = held.setdefault(self.parts.tensors[segment.parameter], {})
            if part.body is None:
                entry[part.key] = torch.tensor(part.number)
                continue
            if part.key not in entry:
                described = self.map.parameters[segment.parameter]
                laid_out = torch.empty(described.count, dtype=torch_dtype(described.dtype))
                entry[part.key] = laid_out.as_strided(described.shape, described.stride)
                whole.append((self.parts.tensors[segment.parameter], part.key))
            flat = entry[part.key].as_strided((entry[part.key].numel(),), (1,))
            at = segment.start + piece.lo - segment.lo
            flat[at : at + piece.hi - piece.lo] = part.body.view(flat.dtype)
        for tensor, key in whole:  # as in torch, numbers (a count of steps) stay on the CPU
            if not tensor.is_meta:
                held[tensor][key] = held[tensor][key].to(tensor.device)
        self.optimizer.state.clear()
        self.optimizer.state.update(held)

    def scatter_state(self) -> None:
        """Hand `optimizer.state` to the servers, and forget it here.

        Of each parameter one worker of each server group's speaks.
        """
        if self._speaks:
            index_of = {id(tensor): index for index, tensor in enumerate(self.parts.tensors)}
            for tensor, entry in self.optimizer.state.items():
                space, _ = self.map.offsets[index_of[id(tensor)]]
                if self.map.spaces[space].speaker == self.me.index:
                    for key, value in entry.items():
                        self._put(index_of[id(tensor)], key, value)
        self.optimizer.state.clear()

    def _put(self, index: int, key: str, value: object) -> None:
        described = self.map.parameters[index]
        number = _as_number(value)
        if number is None:
            assert isinstance(value, torch.Tensor)
            if value.numel() != described.count:
                raise RuntimeError(f"optimizer state {key!r} of {described.name} is not element-wise")
            laid_out = torch.empty(described.count, dtype=value.dtype).as_strided(described.shape, described.stride)
            flat = laid_out.copy_(value).as_strided((described.count,), (1,)).to(torch_dtype(described.dtype))
        for segment in self.map.segments_of_parameter(index):
            for piece in self.map.pieces_of(segment.id):
                bucket = self.map.buckets[piece.bucket]
                at = segment.start + piece.lo - segment.lo
                part = number if number is not None else flat[at : at + piece.hi - piece.lo].clone()
                self.exchange.optimizer_state.put(bucket, bucket.pieces.index(piece), key, part)


def _as_number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 else None
    if isinstance(value, int | float):
        return float(value)
    raise RuntimeError(f"optimizer state of type {type(value).__name__} cannot be handed over")


def _averaged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over the worker groups; counters and other whole numbers are group 0's."""
    like = rows[0]
    if len(rows) == 1 or not (like.is_floating_point() or like.is_complex()):
        return like
    return torch.stack(list(rows)).to(torch.complex128 if like.is_complex() else torch.float64).mean(0).to(like.dtype)
