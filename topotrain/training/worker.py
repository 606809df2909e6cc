"""A worker: the user's model and optimizer, connected to the servers of a job.

A gradient starts here. Autograd finishes with a parameter, a hook copies the gradient into a flat buffer and its bucket
is pushed (`gradient_hooks`, `step_exchange`). `optimizer.step()` does no arithmetic here: it commits the step on
every server and returns when the new values are in the model's parameters.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.async_momentum import explanation
from topotrain.config.job import Apply, ConfigError, Correction, Grads, Job, NonFinite, Pull
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core.client.client import Client, JobError, PeerLost, StepEnd, StepOutcome
from topotrain.core.model.schema import BufferMemory, FlatBuffers, Schema, effective, slice_map_for
from topotrain.core.optim.adapter import HyperEncoder, OptimizerSpec, describe_all
from topotrain.core.optim.slice_trial import check_parts
from topotrain.core.server.nonfinite import NonfiniteLimit, local_nonfinite_message
from topotrain.training.gradients.gradient_checks import HeldGradients, NonfiniteGradients
from topotrain.training.gradients.gradient_hooks import GradientPath
from topotrain.training.gradients.local_steps import LocalOptimizer, LocalSteps
from topotrain.training.gradients.mean_path import MeanPath
from topotrain.training.gradients.push_path import ArrivalPath, PushPath
from topotrain.training.parameters.device_parameters import HostParameters
from topotrain.training.parameters.flat_parameters import ModelBuffers, ModelParts
from topotrain.training.parameters.local_sgd import LocalSgd
from topotrain.training.parameters.server_state import NEW_GROUP, ServerState
from topotrain.training.worker_extension import WorkerExtension, WorkerHooks
from topotrain.training.worker_stats import BatchAccounting, ProcessClock, SkippedStep, StepBatches, WorkerStats


def plan_of(topology: Topology, parts: ModelParts, spec: OptimizerSpec) -> tuple[Schema, SliceMap]:
    """The model's description for the servers and its slice map, equal on all workers."""
    slice_map = slice_map_for(parts.parameters, topology)
    return Schema(parts.parameters, parts.buffers, spec.to_text(), slice_map.digest), slice_map


def refuse_several(job: Job) -> None:
    """Raise ConfigError for settings of a job that do not allow several optimizers."""
    cluster = job.cluster
    for field, value, plain, why in (
        ("apply", job.apply, Apply.kAtStep, "a gradient is applied before the script says to which step it belongs"),
        ("cluster.n_push", cluster.n_push, 1, "local steps have one learning rate for all parameters"),
        ("cluster.n_fetch", cluster.n_fetch, 1, "local steps have one learning rate for all parameters"),
        ("cluster.backup", cluster.backup, 0, "a step that was made without a worker has to be of one batch"),
    ):
        if value != plain:
            accepted = f"must be {getattr(plain, 'value', plain)} with several optimizers: {why}"
            raise ConfigError(field, getattr(value, "value", value), accepted)


class WorkerMemory:
    """Allocates a worker's flat buffers; a subclass may put some of them elsewhere.

    Args:
        memory: allocates them.
        regions: have the memory of the parameters, which the script may write to. None: it does not.
    """

    def __init__(self, memory: BufferMemory, regions: ProcessMemory | None = None) -> None:
        self._memory, self.regions = memory, regions

    def flat_buffers(self, slice_map: SliceMap) -> FlatBuffers:
        """The worker's flat buffers."""
        return FlatBuffers(slice_map, None, self._memory)


class Worker(BatchAccounting):
    """One worker of the job.

    Args:
        parts: the model, taken apart.
        optimizers: by number. A parameter belongs to the steps of its own optimizer (`sharding.Parameter.optimizer`).
        memory: allocates the worker's flat buffers.
        local: the optimizers run in this process, and the servers run those of `local`. None: the servers run them.

    Raises:
        ConfigError: the job's settings do not allow these optimizers.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        parts: ModelParts,
        optimizers: Sequence[torch.optim.Optimizer],
        client: Client,
        memory: WorkerMemory,
        local: LocalOptimizer | None = None,
    ) -> None:
        self.me, self.parts, self.optimizers, self.client = me, parts, tuple(optimizers), client
        self.job = job = effective(job, parts.parameters)
        self._topology = topology
        self.tally = WorkerStats()
        self.batches = StepBatches()
        self._hooks = WorkerHooks()
        if len(self.optimizers) > 1:
            refuse_several(job)
        self._served = served = self.optimizers if local is None else local.optimizers
        spec = describe_all(served, parts.tensors, job.cluster.slicing, job.import_, parts.aside)
        check_parts(spec, job.cluster.slicing, job.import_)
        self._spec = spec = replace(spec, outer=local is not None)
        self._groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if job.correction is Correction.kMomentum and not self.momentum:
            accepted = "needs an optimizer with a momentum above 0: there is nothing to take it from"
            raise ConfigError("correction", job.correction, accepted)
        schema, self.map = plan_of(topology, parts, spec)
        flats = memory.flat_buffers(self.map)
        self.buffers = ModelBuffers(parts, self.map, flats, local is not None, memory.regions)
        self.mirror = self.buffers.mirror
        tensors = (*parts.tensors, *parts.aside)
        self.device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
        # A model on a device copies all values at once, so its layers cannot wait for some of them.
        self.lazy = job.pull is Pull.kLazy and isinstance(self.mirror, HostParameters)
        # With optimizers here the servers get one sum of steps, and no gradient.
        sees_means = topology.workers_per_group > 1 and job.grads is Grads.kVisible and local is None
        partial = len(served) > 1 and local is not None
        # The own time of a worker is its time without waits for others.
        client.channel.measure_waits(ProcessClock())
        client.open(schema, self.map, self.buffers.flats, job.apply is Apply.kOnArrival, sees_means, self.lazy, partial)
        # The groups of a server group would load the same state, so the first one does it for all.
        speaks = me.group == topology.worker_groups_of(topology.server_group_of(me.group))[0]
        state = client.optimizer_state
        self.server_state = ServerState(parts, self.map, served, state, me.index if speaks else None)
        self.hyper = HyperEncoder(*served)
        self._sent_hyper = b""
        self._local: LocalSteps
        self.path: GradientPath
        self.runs_optimizers = local is not None
        """Whether the script's optimizers run in this process, and not on the servers."""
        if local is None:
            self._local = LocalSgd(parts, self.mirror, self.optimizers[0], job.cluster)
            self.path = _path_of(self, topology.workers_per_group)
        else:
            self._local = local
            self.path = local.open(self.buffers, client, self.batches)
            self._hooks.add(local)
        self._hint = _hint(self.lazy, any(me in members for members in topology.sharing(topology.unit_of(me))))
        self._nonfinite = NonfiniteGradients(me, parts)
        self._limit = NonfiniteLimit(job.nonfinite)
        self.snapshot = 0
        """The snapshot that needs this worker's state; 0: none."""
        self.leaves = False
        """Whether the worker's group leaves the job, so that the script must not be given more batches."""
        self._made = 0  # so many next calls are steps that an earlier process has made
        self._undecided: int | None = None  # the first epoch with a batch of the commit that is under way
        self.committed = 0
        """Steps and changes of the group: the number of the next commit."""
        self._clip = (0.0, 2.0)  # largest norm (0: no bound) and its type, for the next commit only
        self._held = HeldGradients(parts)
        self._freed: tuple[float, float] | None = None  # time, and seconds waited, when the last step was over

    def attach(self, extension: WorkerExtension) -> None:
        """Let an extension take part in the steps from here on."""
        self._hooks.add(extension)

    def start(self, compare: bool = False) -> bool:
        """Fetch the job's initial values.

        Returns whether the script's own were others, if it is to compare them.
        """
        # They come from worker (0,0); in a split model, from the first worker of group 0 that holds the parameter.
        if self.me.group == 0 and any(space.sending_worker == self.me.index for space in self.map.spaces):
            self.buffers.copy_from_model(self.mirror.share)
            # Out of this buffer: "params" may be memory of the servers, which is not here yet.
            self.client.send_initial(self.mirror.share)
            # Until "params" is filled. The memory that the script made can be freed meanwhile.
            self.buffers.live_in(self.mirror.share)
        if self.client.model.windowed:
            self.client.shared_buffers.await_parameters()
        else:
            self.buffers.make("params")  # otherwise each reader of a transport would make it, and it is large
        self.client.values.fetch()
        self.client.gradients.start(self.device)
        others = compare and self.buffers.differ("params")
        self.buffers.move_model()
        # Not before: `move_model` itself takes the first values, into memory that it may have to allocate.
        self.client.values.observe(self._local.observer(self.mirror))
        return others

    def rejoin(self, taken: int) -> None:
        """This process replaces one that is gone: continue at its group's present step.

        taken: the number of the group's steps that the tally counts already.
        """
        for extension in self._hooks.rejoin:
            outcome = extension.rejoin(taken)
            if outcome is not None:
                self.committed = taken
                self.advance(outcome)

    # --- calls by the script -------------------------------------------------------------------------------------

    @property
    def optimizer_names(self) -> list[str]:
        """The class names of the optimizers that the servers run."""
        return [name for name, _ in self._spec.optimizers]

    @property
    def momentum(self) -> float:
        """The largest momentum of the groups of the servers' optimizers; 0 without any."""
        return self._spec.momentum([group for each in self._served for group in each.param_groups])

    def drawn(self, stream: int, seq: int, weight: float | None, samples: int, made: int = 0) -> None:
        self.tally.start(time.monotonic())
        self.client.channel.spans.since("data")
        self.tally.add_batch(0 if made else samples)
        self.batches.add(stream, seq, weight, samples, made > 0)
        self._made = made

    def left_early(self, epoch: int, batches: int) -> None:
        if any(extension.leave_epoch(epoch) for extension in self._hooks.leave_epoch):
            return
        if not self.path.backwards:  # no batch that was given since the last step has a gradient
            self.batches.use(counts=False)
        self.client.channel.exit_loop(self.committed, self.path.backwards)

    def over(self) -> None:
        # After its loop a script reads parameters, to validate or to print them.
        if self.lazy:
            self.client.values.settle()

    def lost(self, stream: int, batches: int) -> None:
        self.tally.add_lost(batches)

    def first_uncounted(self, epoch: int) -> int:
        uncommitted = self.batches.first_epoch
        return min(each for each in (epoch, uncommitted, self._undecided) if each is not None)

    def clip(self, max_norm: float, norm_type: float) -> None:
        """Clip this step's global gradient norm on the servers."""
        for extension in self._hooks.before_clip:
            extension.before_clip()
        if self.job.apply is Apply.kOnArrival:
            raise RuntimeError(
                "a norm is known at step() only, and apply: kOnArrival updates before; use apply: kAtStep"
            )
        self._clip = (max_norm, norm_type)

    # --- calls by extensions -------------------------------------------------------------------------------------

    def advance(self, outcome: StepOutcome) -> None:
        """The group has made or dropped steps alone, and is in step `outcome.next` now."""
        if not outcome.repeats:
            self.tally.add_steps(outcome.next - self.committed)
        self.committed = outcome.next
        self.snapshot = outcome.snapshot or self.snapshot
        self.path.go_to(outcome.next)
        self._sent_hyper = b""  # a server that dropped the late commit does not know its hyper-parameters

    def end_epoch(self) -> None:
        """Call `after_epoch` of all extensions."""
        for extension in self._hooks.after_epoch:
            extension.after_epoch()

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self, inv_scale: float = 1.0, check_finite: bool = False, number: int = 0) -> StepOutcome | None:
        """Commit the step; the new values are in the parameters when this returns.

        Args:
            inv_scale: the factor of the gradients.
            check_finite: skip the step if they are not finite.
            number: of the optimizer. The gradients of others stay as they are.

        Returns None where the outcome is not known yet (`pull: kLazy`), where the step was local (`n_push` > 1), and
        where an earlier process has made it.
        """
        # The servers have this step. The parameters have its values, and those of steps after it.
        if self._made:
            self._made -= 1
            return None
        # A script that divides its data itself has no loader that would have started the clock.
        self.tally.start(time.monotonic())
        for extension in self._hooks.before_step:
            extension.before_step()
        if self._local.is_used:
            # A local step writes the parameters, so an edit by the script must be found before it.
            self._check()
        if self._freed is not None:
            then, waited = self._freed
            self.tally.add_own_time(time.monotonic() - then - (self.client.channel.waited - waited))
        self.own_steps += 1
        with torch.no_grad():  # gradients may have a history (create_graph=True); the buffers must not get one
            if self._local.is_used:
                outcome = self._step_locally(inv_scale, check_finite, number)
            else:
                self.batches.use()
                outcome = self._commit(inv_scale, check_finite, fetch=True, number=number)
        # The time until the next step, without waits, is this worker's own.
        self._freed = time.monotonic(), self.client.channel.waited
        if outcome is None or not outcome.late:  # otherwise `advance` has counted the steps
            self.tally.add_steps(1)
        spans = self.client.channel.spans
        with spans.span("report"):
            for extension in self._hooks.after_step:
                extension.after_step(outcome)
            for extension in self._hooks.step_reported:
                extension.step_reported()
        if outcome is not None:
            spans.step_done(self.committed)
        return outcome

    # --- a change of values between two steps ----------------------------------------------------------------------

    def change_state(self, number: int, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Give parameters this state of an optimizer, before the next step.

        All workers of the group do the same; those of the first worker are the values.
        """
        if any(extension.repeats_change() for extension in self._hooks.repeats_change):
            return  # the servers have the change of an earlier process
        # The step before may be under way.
        self.client.values.settle()
        self.server_state.scatter(number, state)
        self.hyper.count_change()

    def refresh(self) -> None:
        """Bring the parameters to values of the servers, before a change of them.

        Raises:
            PeerLost: the group cannot make a change now.
        """
        for extension in self._hooks.before_change:
            extension.before_change()
        self.client.values.settle()
        if not self._local.is_used:
            return
        # By the count of steps, which is the same on all workers of the group, also if one of them has no gradient.
        if self.own_steps and not self._local.pushes(self.own_steps):
            with torch.no_grad():
                self._push_sum(fetch=True)
        else:
            self.client.values.fetch()

    def commit_change(self) -> None:
        """Commit a change of values that extensions have sent; fetch the values.

        All workers of the group make this call between the same two steps. It counts as no step.

        Raises:
            PeerLost: the group has lost a worker meanwhile.
        """
        outcome = self.client.steps.change(self.committed)
        if outcome.late:
            # The launcher restarts the whole group, as it does for any worker that has lost a peer.
            raise PeerLost("a worker of the group is lost, and a change of parameters (tt.assign) cannot be repeated")
        self.committed += 1
        self.path.go_to(self.committed)
        self.snapshot = outcome.snapshot or self.snapshot
        self.leaves = self.leaves or outcome.leaves

    def _check(self) -> None:
        """Raise RuntimeError if the script has changed a parameter or added a group."""
        with self.client.channel.spans.span("check"):
            self.buffers.check(self._hint)
        if [len(optimizer.param_groups) for optimizer in self.optimizers] != self._groups:
            raise RuntimeError(NEW_GROUP)

    def _commit(self, inv_scale: float, check_finite: bool, fetch: bool, number: int = 0) -> StepOutcome | None:
        step, steps = self.committed, self.client.steps
        # A lazily committed step may still read "local", which `at_step` may write.
        self.client.values.settle()
        if not self._local.is_used:
            # Now: the new values may be there as soon as the last worker has committed the step.
            self._check()
        end, hyper = self._end_of(number, inv_scale, check_finite, fetch)
        for extension in self._hooks.before_commit:
            extension.before_commit(step, end)
        if self._local.defers if self._local.is_used else self.lazy:
            if not self._local.is_used:
                # The servers may read these gradients after step() has returned.
                self._held.hold(number)
            steps.begin(step, end)
            made, outcome = self.own_steps, None

            def settled(outcome: StepOutcome) -> None:
                self._undecided = None
                self._count(outcome, made)
                self._held.release()

            steps.finish_later(step, end, settled)
            self._undecided = self.batches.first_epoch
        else:
            steps.begin(step, end)
            outcome = steps.finish(step, end, self._join)
            if not outcome.late:
                self._count(outcome, self.own_steps)
        # Servers keep the last hyper-parameters, so unchanged ones are not sent again.
        self._sent_hyper = hyper
        # From here on batches count for the next step.
        self.batches.committed()
        self._clip = (0.0, 2.0)
        # The path counts its backwards for the next step from here on.
        self.path.after_step()
        if outcome is not None and outcome.late:
            self.advance(outcome)
        else:
            self.committed += 1
        for extension in self._hooks.after_commit:
            extension.after_commit(outcome)
        return outcome

    def _join(self, end: StepEnd) -> StepEnd:
        """Join a backward of others after this worker's commit; return the new commit."""
        self.path.join()
        path = self.path
        return replace(end, backwards=path.backwards, edited=0, dropped=0, digest=0, ages=path.ages, resets=path.resets)

    def _end_of(self, number: int, inv_scale: float, check_finite: bool, fetch: bool) -> tuple[StepEnd, bytes]:
        """Send the remaining gradients; return the commit and the hyper-parameters."""
        revisions, edited, dropped = self.path.at_step(self.committed, number)
        updater = self.job.updater
        clip_norm, clip_type = self._clip
        if not clip_norm and updater is not None and updater.clip_norm:
            clip_norm = updater.clip_norm
        # At each step: the script or a scheduler may have changed the parameter groups.
        hyper = self.hyper()
        weights = (extension.weight() for extension in self._hooks.weight)
        end = StepEnd(
            backwards=self.path.backwards,
            weight=next((weight for weight in weights if weight is not None), self.batches.weight()),
            fetch=fetch,
            hyper=b"" if hyper == self._sent_hyper else hyper,
            marks=self.batches.marks,
            samples=self.batches.samples,
            revisions=revisions,
            edited=edited,
            dropped=dropped,
            inv_scale=inv_scale,
            check_finite=check_finite,
            clip_norm=clip_norm,
            clip_type=clip_type,
            optimizer=number,
            ages=() if self._local.is_used else self.path.ages,
            resets=self.path.resets,
            digest=self.path.digest,
        )
        return end, hyper

    def _count(self, outcome: StepOutcome, step: int) -> None:
        self.snapshot = outcome.snapshot or self.snapshot
        self.leaves = self.leaves or outcome.leaves
        self.tally.add_outcome(outcome)
        if outcome.refused:
            # Only now: it reads all gradients of this worker.
            skipped = self._nonfinite.skipped(step, outcome, self.path.sent)
            if skipped is not None:
                self.tally.add_skip(skipped)

    # --- local steps (n_push, n_fetch) ---------------------------------------------------------------------------

    def _step_locally(self, inv_scale: float, check_finite: bool, number: int) -> StepOutcome | None:
        step = self.own_steps
        finite = not self._overflows(check_finite)
        self.batches.use(finite)
        if finite:
            self._local.step(inv_scale, number)
        pushes, fetches = self._local.pushes(step), self._local.fetches(step)
        outcome = self._push_sum(fetches) if pushes else None
        if fetches and not pushes:
            self.client.values.fetch()
        if self._local.defers and self._local.settles(step, self.client.steps.is_over()):
            self.client.values.settle()
        return outcome

    def _push_sum(self, fetch: bool) -> StepOutcome | None:
        with self._local.sum_as_gradient():
            # 1.0: each local step has unscaled its gradients.
            return self._commit(1.0, False, fetch, self._local.optimizer_of_push)

    def _overflows(self, scaled: bool) -> bool:
        """Whether this step's gradients are left out of the sum.

        scaled: by a GradScaler, which overflows now and then. Such steps are not counted. Raises JobError if other
        steps overflow too often.
        """
        policy = self.job.nonfinite
        if not scaled and policy is NonFinite.kAllow:
            return False
        name = self._nonfinite.find([tensor.grad for tensor in self.parts.tensors])
        if scaled:
            return bool(name)
        # In a group of several this is the mean, and the part of another worker may have made it so.
        alone = self.client.channel.group_size == 1
        culprit = str(self.me) if name and (alone or self._nonfinite.find(self.path.sent)) else ""
        if name:
            self.tally.add_skip(SkippedStep(self.own_steps, culprit, name))
        if self._limit.step(self.me.group, [self.me.index] if name else []) is not None:
            why = explanation(self.job, self._topology, self.momentum)
            words = local_nonfinite_message(culprit, name, self.own_steps, self._limit.most, why)
            raise JobError(f"worker group {self.me.group}: {words}", False, self._limit.quarantine)
        return bool(name)

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script has ended: push what is left, and send the model's buffers."""
        self.parts = self.parts.with_present_buffers()
        # A push that is under way belongs to steps before these.
        self.client.values.settle()
        while self._local.has_sum:
            # Without values: worker (0,0) fetches the result after all groups have ended.
            self._push_sum(fetch=False)
        self.client.buffers.put(self.parts.buffer_tensors)
        self.path.finish()
        self.client.finish(self.tally.steps)

    def end_job(self) -> None:
        """Call `job_over` of all extensions."""
        # In reverse, so that an extension still finds those that were attached before it.
        for extension in reversed(self._hooks.job_over):
            extension.job_over()

    def leave_job(self) -> None:
        """Call `left_job` of all extensions."""
        for extension in self._hooks.left_job:
            extension.left_job()


def _hint(lazy: bool, shared: bool) -> str:
    """Return why a value that was put back may still not be the servers'."""
    if shared:
        return "; other worker groups change these values meanwhile, so that works with share_memory: false only"
    return "; with pull: kLazy, values come after step(), so that works with pull: kStep only" if lazy else ""


def _path_of(worker: Worker, group_size: int) -> GradientPath:
    job, args = worker.job, (worker.buffers, worker.client.gradients, worker.batches)
    if job.apply is Apply.kOnArrival:
        return ArrivalPath(*args, hyper=worker.hyper)
    if group_size > 1 and job.grads is Grads.kVisible:
        # Local steps look for the culprit among the own gradients.
        return MeanPath(*args, in_place=job.cluster.n_push == 1)
    # With local steps the pushed gradient is a sum that exists only at step(), so no backward can send it.
    return PushPath(*args, compare=group_size == 1, eager=job.cluster.n_push == 1)
