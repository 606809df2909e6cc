"""What a fresh process of a worker knows of those before it: in this life of the job, or in one that is continued."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.training.context import Context
from topotrain.training.data.batch_ranges import Runs
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.distributed_loader import EpochStart
from topotrain.training.data.map_dataset import ResumePoint
from topotrain.training.worker import Worker


class RunHistory(Protocol):
    """The earlier life of a job that is continued (see `Context.resumed`)."""

    @property
    def workers(self) -> Iterable[tuple[int, int]]:
        """(group, index) of those that left something."""
        ...

    def worker(self, group: int, index: int) -> bytes | None:
        """What that worker left: its `WorkerState`."""
        ...

    @property
    def first_epoch(self) -> int | None:
        """Of the first batch that is not applied; None: nobody had read further."""
        ...

    @property
    def closed(self) -> int:
        """All epochs before this one are applied, and there are no runs of them."""
        ...

    def runs(self, epoch: int) -> Runs:
        """Batches of the loader that are applied, by their numbers in the epoch as it was drawn first."""
        ...


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """What is known.

    Args:
        condition: where to go on; None: at the beginning. later: its schedulers, where they have changed since.
        own: it was left by this very worker, so its dice are this worker's. alive: and in this life of the job.
        returned: servers of this life of the job may have applied something of this worker's group.
        first: the first pass that is not over.
        steps: that this worker has taken; taken: those of its group among them, in this life of the job.
        past, main: the earlier life of the job, and what worker (0,0) left there.
    """

    condition: WorkerState | None = None
    later: WorkerState | None = None
    own: bool = True
    alive: bool = False
    returned: bool = False
    first: int = 0
    steps: int = 0
    taken: int = 0
    past: RunHistory | None = None
    main: WorkerState | None = None

    def restores(self, epoch: int) -> bool:
        """Whether the condition is to be put back as this pass begins.

        It may be of a later pass than the first that is not over, since groups that wait for nobody are not all in one:
        then what the script holds is put back for the first, and once more for its own.
        """
        return self.condition is not None and epoch in (self.first, self.condition.passes)

    def opening(self, sight: EpochStart) -> ResumePoint:
        """How a pass of this epoch begins."""
        begun = self.condition if self.restores(sight.epoch) else None
        mine = begun if begun is not None and self.own and begun.passes == sight.epoch else None
        drawn, source = self._drawn(sight, mine)
        return ResumePoint(
            done=() if self.past is None else self.past.runs(sight.epoch),
            returned=self.returned and sight.epoch == self.first,
            drawn="" if drawn == sight.drawn else drawn,
            dice=None if source is None else source.draw or source.begin,
            fresh=True if source is None else source.fresh,
            again=mine is not None and bool(mine.now),
            restored=mine is not None,
        )

    def _drawn(self, sight: EpochStart, mine: WorkerState | None) -> tuple[Literal["dice", "seed"], WorkerState | None]:
        """How an epoch was drawn when it was drawn first, and whose note of it tells the dice."""
        if mine is not None and self.alive:
            return mine.drawn, mine
        if self.main is None or self.past is None:
            return sight.drawn, None
        if sight.epoch == self.main.passes:
            return self.main.drawn, self.main
        # Only groups without a common draw are in several epochs at once.
        begun = sight.epoch < self.main.passes or bool(self.past.runs(sight.epoch))
        return ("seed" if begun else sight.drawn), None


def find(here: Context, worker: Worker) -> PreviousRun:
    """Look for what was left, and how far it has come since. Raises ConfigError for what cannot be read."""
    past: RunHistory | None = here.resumed
    returned = here.place.identity.incarnation > 0
    conditions = {} if past is None else {who: _read(past, *who) for who in past.workers}
    main = conditions.get((0, 0))
    before = conditions.get((here.me.group, here.me.index))
    own, before = before is not None, before or main
    steps = 0 if before is None else before.steps
    first = min((condition.passes for condition in conditions.values()), default=0)
    if past is not None and past.first_epoch is not None:  # a worker may have left its state a step behind the values
        first = min(first, past.first_epoch)
    first = first if past is None else max(first, past.closed)
    later, alive, taken = None, False, 0
    if returned:
        taken = worker.client.extension(DataClient).applied(-1)
        steps += taken * here.place.job.cluster.n_push
        left, since = worker.client.extension(WorkerStateClient).load()
        if left is not None:
            before, own, alive = WorkerState.from_bytes(_bytes(left)), True, True
            first = before.passes
            later = None if since is None else WorkerState.from_bytes(_bytes(since))
    return PreviousRun(before, later, own, alive, returned, first, steps, taken, past, main)


def _read(past: RunHistory, group: int, index: int) -> WorkerState:
    return WorkerState.from_bytes(past.worker(group, index) or b"")


def _bytes(blob: torch.Tensor) -> bytes:
    return bytes(blob.numpy().tobytes())
