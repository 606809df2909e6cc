"""The earlier processes of a worker, in this run of the job or in an earlier one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from topotrain.config.job import ConfigError
from topotrain.extensions.checkpointing.checkpoint_reader import Manifest
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.training.context import Context
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import EpochStart
from topotrain.training.data.map_dataset import ResumePoint
from topotrain.training.worker import Worker

INTERLEAVED = "the script reads two loaders at once, and what it holds of each is not known to another process"


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """State from which a fresh process continues.

    Args:
        condition: the saved state. None: the script begins at its beginning.
        later: the schedulers of the state, if they have changed since.
        own: this worker has saved the state, so its random number generators are this worker's.
        alive: it did so in this run of the job.
        returned: servers of this run may have applied gradients of this worker's group.
        first: the first pass that is not over.
        steps: the steps of this worker.
        taken: the steps of its group among them, in this run.
        unfinished: an earlier process of this run may have died between two steps with one batch.
        past: the snapshot from which the job continues.
        main: the state of worker (0,0) in it.
        lead: the state of worker 0 of the group, for objects that are the same on all workers of it.
        data: the loader's settings in the passes that were under way in the snapshot.
    """

    condition: WorkerState | None = None
    later: WorkerState | None = None
    own: bool = True
    alive: bool = False
    returned: bool = False
    first: int = 0
    steps: int = 0
    taken: int = 0
    unfinished: bool = False
    past: Manifest | None = None
    main: WorkerState | None = None
    lead: WorkerState | None = None
    data: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def restores(self, epoch: int) -> bool:
        """Whether the state is restored at the begin of this pass."""
        # Groups that do not wait for each other are in different passes, so the state may be of a later one.
        # It is then restored twice: for the first pass that is not over, and again for its own.
        return self.condition is not None and epoch in (self.first, self.condition.passes)

    def has_read(self, epoch: int) -> bool:
        """Whether an earlier process of this run may have read something of this pass."""
        # Also a later one than the first: its state is saved when the batches before it count.
        return self.returned and epoch >= self.first

    def opening(self, start: EpochStart) -> ResumePoint:
        """Return where a pass of this epoch begins."""
        begun = self.condition if self.restores(start.epoch) else None
        # Generators of another worker, or of another pass, would draw other masks.
        mine = begun if begun is not None and self.own and begun.passes == start.epoch else None
        drawn, source = self._drawn(start, mine)
        done = () if self.past is None else self.past.runs(start.epoch)
        self._check_data(start, sum(last - first for first, last in done))
        return ResumePoint(
            done=done,
            returned=self.has_read(start.epoch),
            # "": in the plan's own way, with the generators as they are.
            drawn="" if drawn == start.drawn else drawn,
            dice=None if source is None else source.draw or source.begin,
            fresh=True if source is None else source.fresh,
            again=mine is not None and bool(mine.now),
            restored=mine is not None,
            unfinished=self.unfinished and start.epoch == self.first,
        )

    def _check_data(self, start: EpochStart, done: int) -> None:
        """Raise ConfigError if the batches that are done would be others now."""
        for name, was in self.data.get(start.epoch, {}).items() if done else ():
            if start.data.get(name) != was:
                accepted = (
                    f"must be {was}, as when the snapshot was taken: {done} batches of this epoch are trained, and "
                    f"the others could not be told from them; an epoch that has not begun may have another one"
                )
                raise ConfigError(name, start.data.get(name), accepted)

    def _drawn(self, start: EpochStart, mine: WorkerState | None) -> tuple[Literal["dice", "seed"], WorkerState | None]:
        """Return how an epoch was first drawn, and the state with its generators."""
        # A state of this run knows how its pass was drawn. In a snapshot the state of worker (0,0) does.
        if mine is not None and self.alive:
            return mine.drawn, mine
        if self.main is None or self.past is None:
            return start.drawn, None
        if start.epoch == self.main.passes:
            return self.main.drawn, self.main
        # Only groups without a common draw are in several epochs at once.
        # A pass that was begun must be drawn again in the same order, or its applied batches would be other samples.
        begun = start.epoch < self.main.passes or bool(self.past.runs(start.epoch))
        return ("seed" if begun else start.drawn), None


def find(here: Context, worker: Worker) -> PreviousRun:
    """Find the saved state of this worker, and its steps that are applied since.

    Raises ConfigError if the state cannot be read.
    """
    past = cast("Manifest | None", here.resumed)
    returned = here.place.identity.incarnation > 0
    conditions = {} if past is None else {who: _read(past, *who) for who in past.workers}
    if any(condition.interleaved for condition in conditions.values()):
        raise ConfigError("resume", str(here.me), f"is not possible: {INTERLEAVED}")
    main = conditions.get((0, 0))
    before = conditions.get((here.me.group, here.me.index))
    # A worker that the earlier job did not have takes the model's buffers and schedulers of worker (0,0).
    own, before = before is not None, before or main
    steps = 0 if before is None else before.steps
    # A pass is over when it is over for all groups. Those that were ahead find it empty.
    first = min((condition.first for condition in conditions.values()), default=0)
    # A worker may have saved its state one step before the values.
    if past is not None and past.first_epoch is not None:
        first = min(first, past.first_epoch)
    first = first if past is None else max(first, past.closed)
    later, alive, taken, unfinished = None, False, 0, False
    lead, ahead = conditions.get((here.me.group, 0)) or main, 0
    if returned:
        taken = worker.client.extension(DataClient).applied(-1)
        # The servers count commits, and each is so many calls of `optimizer.step()`.
        steps += taken * here.place.job.cluster.local_steps
        if here.alike:
            # The states of two workers of a group may be those of two passes. All begin at the last of these passes, as
            # they have to ask for batches and values equally often, and all batches of passes before it count.
            states = worker.client.extension(WorkerStateClient).load_group()
            known = [None if left is None else WorkerState.from_bytes(_bytes(left)) for left in states]
            lead, ahead = known[0] or lead, max((state.passes for state in known if state is not None), default=0)
        left, since = worker.client.extension(WorkerStateClient).load(here.me.index)
        # A state of this run is newer than the snapshot's.
        if left is not None:
            before, own, alive = WorkerState.from_bytes(_bytes(left)), True, True
            first = before.passes
            later = None if since is None else WorkerState.from_bytes(_bytes(since))
        first = max(first, ahead)
        # The process died behind its first step, and does not know whether the scheduler would have stepped with it.
        if before is not None and later is None and before.schedulers and steps == 1:
            before = replace(before, within=_stepped_within(here, worker))
        # A state is saved when the script asks for a batch. A step after that may be one of several with the batch.
        saved = later or before
        unfinished = len(worker.optimizers) > 1 and (saved is None or saved.steps < steps)
    data = {each.passes: each.data for each in conditions.values()}
    return PreviousRun(before, later, own, alive, returned, first, steps, taken, unfinished, past, main, lead, data)


def _stepped_within(here: Context, worker: Worker) -> list[str]:
    """Schedulers that have stepped within a pass, as the rest of the group knows.

    The other workers' script is the same, and some of them may have asked for the next batch.
    """
    found: set[str] = set()
    for index in range(here.place.topology.workers_per_group):
        if index != here.me.index:
            states = worker.client.extension(WorkerStateClient).load(index)
            found.update(*(WorkerState.from_bytes(_bytes(blob)).within for blob in states if blob is not None))
    return sorted(found)


def _read(past: Manifest, group: int, index: int) -> WorkerState:
    return WorkerState.from_bytes(past.worker(group, index) or b"")


def _bytes(blob: torch.Tensor) -> bytes:
    return bytes(blob.numpy().tobytes())
