"""In-place recovery in a script: a step is repeated with other workers.

`optimizer.step()` returns without an update, and the loader gives the samples of that batch once more, divided among
the present members. So the body of the script's loop runs once more for the batch, as with backup workers.

This is right only for a script with one model and one optimizer, with one batch of the loader and one backward for each
step, and a loop that is not left early, and which neither changes nor thaws parameters itself. The steps that a worker
makes are checked, and the launcher is told. Where a script does something else, a death restarts its whole group.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from topotrain.core.client.client_context import PeerLost, StepEnd, StepOutcome
from topotrain.core.events import Repeatable, Repeated
from topotrain.extensions.elastic.eligibility import in_place_refusal
from topotrain.extensions.in_place_recovery.in_place_client import InPlaceClient
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import BatchReplay, BatchSource, PassReplay
from topotrain.training.data.map_dataset import DataPlan, LoadedBatch, ResumePoint
from topotrain.training.data.sampling import draws_at_once, index_sampler
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

MOST_SAMPLES = 1 << 22
"""Samples of an epoch with a draw that server (0,0) keeps for a worker that comes back: 100 MB for three epochs."""


class RepeatedSteps(WorkerExtension):
    """The steps of one worker, which may have to be repeated.

    Args:
        here: the process.
        worker: its worker.
    """

    def __init__(self, here: Context, worker: Worker) -> None:
        self._here, self._worker = here, worker
        self._client = worker.client.extension(InPlaceClient)
        self._data = worker.client.extension(DataClient)
        self._reason: str | None = None  # why a step cannot be repeated; None: nothing is known yet
        self._absent = False  # the group goes on without this process, until it joins
        self._alone = False  # this process has joined, and has to find the batch that the group is at
        self._taken = 0
        self._next = 0  # the number of the group's step that this worker makes next
        self._repeat = False  # the batch that was given last is to be given again
        self._losses = worker.tally.loss_state()  # after the last step
        self._thaws: int | None = None  # of the path, at the first step
        self._done: float | None = None  # the end of the last step
        self._waits_since: float | None = None

    def refuse(self, reason: str) -> None:
        """Note that no step of this worker can be repeated from here on, and report it."""
        if not self._reason:
            self._reason = reason
            self._here.emit(Repeatable(str(self._worker.me), reason))

    # --- the loader ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The workers among which a batch is divided now."""
        return self._client.members

    def take_repeat(self) -> bool:
        """Whether the last batch is to be given again. The next call returns False."""
        repeat, self._repeat = self._repeat, False
        # A step that was dropped before this worker has drawn its batch needs no repeated one.
        while self._client.dropped(self._next):
            self._go_to(self._client.catch_up())
        return repeat

    def opening(self, epoch: int, point: ResumePoint) -> ResumePoint:
        """How a pass begins: this process may have to join its group first."""
        if self._absent:
            # A pass that is over costs nothing, and what the script does after it must not keep the group waiting.
            if self._client.group_epoch().epoch > epoch:
                return replace(point, over=True)
            self._join()
        return replace(point, alone=self._alone, members=self.members)

    def has_batch(self) -> None:
        """Note that the script is given a batch that the group has not applied."""
        self._alone = False

    def _join(self) -> None:
        # Until this worker has a batch: the group may have gone on to the next epoch since the question.
        self._absent, self._alone = False, True
        joined = self._client.join()
        self._go_to(StepOutcome(joined.version, (), False, -1.0, late=True, next=joined.step, repeats=True))
        # No step is made without this worker any more.
        self._worker.tally.add_steps(self._data.applied(-1) - self._taken)

    def _go_to(self, outcome: StepOutcome) -> None:
        """Continue at another step of the group."""
        self._worker.advance(outcome)
        self._next = outcome.next

    # --- calls by the worker ---------------------------------------------------------------------------------------

    def before_change(self) -> None:
        """As `WorkerExtension.before_change`: a change cannot be repeated.

        Raises:
            PeerLost: a worker of the group is away and would miss the change, or the last step is not made.
        """
        self.refuse("the script changes parameters in tt.assign")
        away = self._absent or self._alone or 0 < len(self.members) < self._worker.client.channel.group_size
        if away or self._repeat:
            raise self._lost()

    def _lost(self) -> PeerLost:
        # The launcher restarts the whole group, as it does for any worker that has lost a peer.
        return PeerLost(f"a worker of the group is lost, and the step cannot be repeated: {self._reason}")

    def rejoin(self, taken: int) -> None:
        self._taken = taken
        # If the whole group restarts, all its workers are members from the first step on.
        self._absent = not self._client.group_epoch().joined

    def before_step(self) -> None:
        """Note whether the step has one batch, one backward and the same parameters.

        Raises:
            PeerLost: other parameters train, and a worker that is away, or was, may not know of it.
        """
        if self._here.unrepeatable:
            self.refuse(self._here.unrepeatable)
        batches, backwards = len(self._worker.batches), self._worker.path.backwards
        if batches != 1 or backwards != 1:
            self.refuse(f"a step of the script has {batches} batches of the loader and {backwards} backwards")
        thaws = self._worker.path.thaws
        if self._thaws not in (None, thaws):
            self.refuse("the script freezes or thaws parameters between its steps")
            if self.members:
                raise self._lost()
        self._thaws = thaws

    def before_commit(self, step: int, end: StepEnd) -> None:
        self._next = step + 1
        # A scaler adapts its scale to the outcome of the step.
        if end.check_finite or end.inv_scale != 1.0:
            self.refuse("the script uses a GradScaler")

    def after_commit(self, outcome: StepOutcome | None) -> None:
        """As `WorkerExtension.after_commit`.

        Raises:
            PeerLost: the group repeats the step, and this script cannot.
        """
        now = time.monotonic()
        if outcome is not None and outcome.repeats:
            if self._reason:
                raise self._lost()
            self._repeat = True
            self._worker.tally.undo_step(self._worker.batches.last_samples, self._losses)
            self._waits_since = self._done if self._waits_since is None else self._waits_since
            return
        if self._reason is None:
            self._reason = ""
            self._here.emit(Repeatable(str(self._worker.me), ""))
        if self._waits_since is not None:
            self._here.emit(Repeated(str(self._worker.me), self._worker.tally.steps + 1, now - self._waits_since))
        self._done, self._waits_since = now, None

    def step_reported(self) -> None:
        self._losses = self._worker.tally.loss_state()

    def leave_epoch(self, epoch: int) -> bool:
        # The workers of a group count these exits, and a new process would count from 0.
        self.refuse("the script leaves a loop over the loader before its end")
        if self._repeat:
            self._repeat = False
            self._worker.tally.drop_batch()
        return False


class RepeatedBatches(PassReplay):
    """The batches of one pass, some of them divided once more.

    Args:
        steps: knows the members of the group, and which steps are repeated.
    """

    def __init__(self, steps: RepeatedSteps) -> None:
        self._steps, self._members = steps, steps.members

    def next(self, fresh: BatchSource) -> LoadedBatch:
        repeat = self.repeats = self._steps.take_repeat()
        if repeat or self._members != self._steps.members:
            self._members = self._steps.members
            fresh.divide_again(self._members, repeat)
        found = fresh()
        self._steps.has_batch()
        return found


@dataclass(frozen=True, slots=True)
class StepReplay(BatchReplay):
    """Gives the batch of a dropped step again, divided among other workers."""

    steps: RepeatedSteps

    def plan_for(self, loader: DataLoader[Any], plan: DataPlan) -> DataPlan:
        reason = _loader_refusal(loader, plan)
        if reason:
            self.steps.refuse(reason)
            return plan
        return replace(plan, repeats=True)

    def opening(self, epoch: int, point: ResumePoint) -> ResumePoint:
        return self.steps.opening(epoch, point)

    def begin(self, epoch: int) -> RepeatedBatches:
        return RepeatedBatches(self.steps)

    def interleaved(self) -> None:
        self.steps.refuse("the script reads two loaders at once")


def _loader_refusal(loader: DataLoader[Any], plan: DataPlan) -> str:
    """Why the batches of a loader cannot be divided once more. Empty: they can."""
    if isinstance(loader.dataset, IterableDataset):
        return "the loader reads a stream"
    if loader.batch_sampler is None or type(loader).__iter__ is not DataLoader.__iter__:
        return "the loader does not make its batches itself"
    if plan.mode != "broadcast":
        return ""
    # One that looks at the training would draw something else in a new process.
    if not draws_at_once(loader):
        return f"the loader has a sampler of another class: {type(index_sampler(loader)).__name__}"
    samples = len(loader) * (loader.batch_size or 1)
    return f"an epoch has {samples} samples, more than {MOST_SAMPLES}" if samples > MOST_SAMPLES else ""


def _script_refusal(here: Context, request: PrepareRequest) -> str:
    """Why no step of a script can be repeated, as `tt.prepare` shows it; "": it can."""
    if len(request.optimizers) > 1:
        return "the script has several optimizers, and a batch may have a step of each"
    if request.several:
        return "the script has several models, and a batch may have a backward of each"
    return here.unrepeatable


class InPlaceExtension(PrepareExtension):
    """Where a group may go on without a dead worker, its workers can repeat a step."""

    def __init__(self) -> None:
        self._refusal = ""

    def connected(self, here: Context, request: PrepareRequest) -> None:
        self._refusal = _script_refusal(here, request)

    def batch_replay(self, here: Context, worker: Worker) -> BatchReplay | None:
        if in_place_refusal(here.place.job, here.place.topology, here.me.group):
            return None
        if self._refusal:
            # Without a positive report of a worker, the launcher restarts its group as a whole.
            here.emit(Repeatable(str(here.me), self._refusal))
            return None
        steps = RepeatedSteps(here, worker)
        worker.attach(steps)
        return StepReplay(steps)
