"""Counts of one worker: batches, steps, samples, losses and staleness."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from topotrain.core.client.client_context import StepOutcome
from topotrain.core.profiling.spans import Clock


class ProcessClock(Clock):
    """The clock of this process."""

    def now(self) -> int:
        return time.monotonic_ns()

    def thread(self) -> str:
        return threading.current_thread().name


class BatchAccounting(ABC):
    """Notes the batches that a script is given."""

    own_steps = 0
    """Calls of `step` by the script."""

    @abstractmethod
    def drawn(self, stream: int, seq: int, weight: float | None, samples: int, made: int = 0) -> None:
        """The script gets batch `seq` (from 0) of a stream.

        stream: (epoch << 32) | lease, or the value of `DataPlan.stream`. Weight 0: a repeated batch, which must not
        count. None: the batch has no part in the weight of the step. made: the number of steps of an earlier process
        with this batch, which count already.
        """

    @abstractmethod
    def left_early(self, epoch: int, batches: int) -> None:
        """The script left the loop after so many batches. This must not wait."""

    @abstractmethod
    def over(self) -> None:
        """The loop has had its last batch."""

    @abstractmethod
    def lost(self, stream: int, batches: int) -> None:
        """Batches of a lease that the stream, read again, no longer has."""

    @abstractmethod
    def first_uncounted(self, epoch: int) -> int:
        """The first epoch with a batch that may not be in the values; at most `epoch`."""


class StepBatches:
    """Counts what one worker's loader gave the script since the last commit.

    A job may let a worker make several steps before it commits. Samples count for the commit when the step that used
    them is over (`use`), and batches when the script is given them.
    """

    def __init__(self) -> None:
        self._given_weight: float | None = None
        self._batch_weight = 1.0
        self._marks: dict[int, tuple[int, int]] = {}  # stream -> first and last batch
        self.last: tuple[int, int] | None = None
        """Stream and number of the batch that the script was given last."""
        self._unused = 0
        self.last_samples = 0
        """Samples of the batch that the script was given last."""
        self.samples = 0
        """Samples in the gradient that is committed next."""

    def add(self, stream: int, seq: int, weight: float | None, samples: int, counted: bool = False) -> None:
        """The script was given batch `seq` of a stream; a commit may have counted it."""
        if weight is not None:
            self._batch_weight, self._given_weight = weight, None
        if counted:
            return
        self.last_samples = samples
        self._unused += samples
        # Batches of a stream are read in order, so first and last are enough.
        first, _ = self._marks.get(stream, (seq, seq))
        self._marks[stream] = (first, seq)
        self.last = stream, seq

    def weight(self) -> float:
        """The weight of the gradient: samples, or the argument of `tt.weight`."""
        return self._batch_weight if self._given_weight is None else self._given_weight

    @property
    def weight_given(self) -> bool:
        """Whether the script has set the weight of the coming backward."""
        return self._given_weight is not None

    def set_weight(self, weight: float) -> None:
        """Set the weight of the coming backward, which holds for one batch."""
        self._given_weight = weight

    @property
    def unused(self) -> int:
        """The samples that the script was given since its last step."""
        return self._unused

    def use(self, counts: bool = True) -> None:
        """The samples given since the last step are in the next commit, or in none."""
        # A step may have read several batches (gradient accumulation).
        self.samples += self._unused if counts else 0
        self._unused = 0

    def committed(self) -> None:
        """A step with these batches and samples was committed."""
        self._marks.clear()
        self.samples = 0

    def forget(self) -> None:
        """The batches are in no step."""
        self._marks.clear()

    @property
    def first_epoch(self) -> int | None:
        """The first epoch of which a batch is in no commit. None: all batches are in one."""
        return min((stream >> 32 for stream in self._marks), default=None)

    @property
    def marks(self) -> tuple[int, ...]:
        """Stream, first and last batch of each stream, as a commit has them."""
        return tuple(number for stream, mark in self._marks.items() for number in (stream, *mark))

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._marks.values())


# Steps: with fewer own times the median is not reported, and of more only the last ones are kept.
_FEW_OWN, _MOST_OWN = 10, 501


RECENT_S = 10.0
"""Seconds over which the staleness of samples is counted."""
_EXACT = 64  # a staleness below it is counted exactly


class StalenessCounts:
    """Counts how often each staleness was seen, in bounded memory."""

    def __init__(self) -> None:
        self._exact = [0] * _EXACT
        self._large: dict[int, int] = {}  # by the number of bits
        self._total = self._sum = 0
        self.most = 0
        """The largest staleness."""

    @property
    def mean(self) -> float:
        """The mean of all."""
        return self._sum / self._total if self._total else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is counted."""
        return not self._total

    def add(self, values: Sequence[int]) -> None:
        """Count the staleness of each slice of a step."""
        self._total += len(values)
        self._sum += sum(values)
        self.most = max(self.most, *values) if values else self.most
        for value in values:
            if value < _EXACT:
                self._exact[value] += 1
            else:
                bits = (value - 1).bit_length()
                self._large[bits] = self._large.get(bits, 0) + 1

    def add_counts(self, other: "StalenessCounts") -> None:
        """Count what another one has counted."""
        self._total, self._sum = self._total + other._total, self._sum + other._sum
        self.most = max(self.most, other.most)
        self._exact = [one + more for one, more in zip(self._exact, other._exact, strict=True)]
        for bits, count in other._large.items():
            self._large[bits] = self._large.get(bits, 0) + count

    def at_most(self, share: float) -> float:
        """The staleness that this share of all does not exceed.

        From 64 on it is rounded up to a power of two.
        """
        needed, seen = share * self._total, 0
        if not self._total:
            return 0.0
        for value, count in enumerate(self._exact):
            seen += count
            if seen >= needed:
                return float(value)
        for bits in sorted(self._large):
            seen += self._large[bits]
            if seen >= needed:
                return float(1 << bits)
        return float(1 << max(self._large))


class RecentStaleness:
    """Counts the staleness of the last seconds, in parts that end with a report."""

    def __init__(self) -> None:
        self._open = StalenessCounts()
        self._parts: deque[tuple[float, StalenessCounts]] = deque()

    def add(self, values: Sequence[int]) -> None:
        """Count the staleness of each slice of a step."""
        self._open.add(values)

    def report(self, now: float) -> StalenessCounts:
        """End a part, and return the counts of the last RECENT_S seconds.

        Without any in that time they are those of the last part that has some.
        """
        if not self._open.is_empty:
            self._parts.append((now, self._open))
            self._open = StalenessCounts()
        while len(self._parts) > 1 and self._parts[0][0] <= now - RECENT_S:
            self._parts.popleft()
        found = StalenessCounts()
        for _, part in self._parts:
            found.add_counts(part)
        return found


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step of a worker that was skipped, because a gradient was not finite.

    step: its number, from 1. by: the worker with that gradient, "" if only the group's sum is known. parameter: one
    with such a gradient, "" for the rows of a table.
    """

    step: int
    by: str
    parameter: str


@dataclass(slots=True)
class WorkerStats:
    """Counts of one worker.

    Staleness counts versions, per step and slice. Losses are those since `take_loss`.
    """

    steps: int = 0
    samples: int = 0
    lost: int = 0  # batches that a stream did not give again
    dropped: int = 0  # batches that came too late, and that the script did not wait to be given again
    skipped: int = 0  # steps whose batch is used up, and has changed no value
    skips: list[SkippedStep] = field(default_factory=list)  # those since `take_skips`
    staleness_sum: int = 0
    staleness_count: int = 0
    staleness_max: int = 0
    staleness_counts: StalenessCounts = field(default_factory=StalenessCounts)
    recent_staleness: RecentStaleness = field(default_factory=RecentStaleness)
    loss_sum: float | torch.Tensor = 0.0  # a tensor where the loss is on a device
    losses: int = 0
    backwards: int = 0  # of the script, through any model, without private ones
    started: float = 0.0
    late: int = 0  # steps that were made without this worker's contribution, which came too late
    own: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_OWN))  # seconds of the last steps
    last_norm: float = float("nan")  # of the last step's gradient, if the script asked for it

    @property
    def own_s(self) -> float | None:
        """Median of this worker's own seconds for a step; None: too few were measured."""
        return median(self.own) if len(self.own) >= _FEW_OWN else None

    @property
    def staleness_mean(self) -> float:
        """Mean over steps and slices."""
        return self.staleness_sum / self.staleness_count if self.staleness_count else 0.0

    @property
    def staleness_p95(self) -> float:
        """95 of 100 updates of a slice were at most so stale."""
        return self.staleness_counts.at_most(0.95)

    def start(self, now: float) -> None:
        """The script's first step or batch is at this time. Later calls change nothing."""
        self.started = self.started or now

    def continue_from(self, steps: int) -> None:
        """Earlier processes of this worker have made so many steps."""
        self.steps = steps

    def add_batch(self, samples: int) -> None:
        """Count a batch that the script was given."""
        self.samples += samples

    def add_own_time(self, seconds: float) -> None:
        """Count this worker's own time for a step, without its waits for others."""
        self.own.append(seconds)

    def add_outcome(self, outcome: StepOutcome) -> None:
        """Count a committed step's staleness, and its norm if there is one."""
        if outcome.norm >= 0:
            self.last_norm = outcome.norm
        self.staleness_sum += sum(outcome.staleness)
        self.staleness_count += len(outcome.staleness)
        self.staleness_max = max(self.staleness_max, *outcome.staleness)
        self.staleness_counts.add(outcome.staleness)
        self.recent_staleness.add(outcome.staleness)

    def add_steps(self, count: int) -> None:
        """Count steps of the group."""
        self.steps += count

    def add_lost(self, batches: int) -> None:
        """Count batches that a stream no longer had when it was read again."""
        self.lost += batches

    def add_skip(self, skip: SkippedStep) -> None:
        """Count a step that was skipped."""
        self.skipped += 1
        self.skips.append(skip)

    def take_skips(self) -> list[SkippedStep]:
        """The skips since the last call."""
        taken, self.skips = self.skips, []
        return taken

    # --- losses --------------------------------------------------------------------------------------------------

    def add_backward(self, losses: list[float | torch.Tensor]) -> None:
        """Count a backward that began at these scalars."""
        self.backwards += 1
        for loss in losses:
            self.loss_sum += loss

    def count_loss(self) -> None:
        """The losses of one more step are complete."""
        self.losses += 1

    def take_loss(self) -> float | None:
        """Mean loss per step since the last call, or None."""
        # A loss on a device is added up there; only this line waits for the device.
        mean = float(self.loss_sum) / self.losses if self.losses else None
        self.loss_sum, self.losses = 0.0, 0
        return mean

    # --- batches that came too late --------------------------------------------------------------------------------

    def loss_state(self) -> tuple[float | torch.Tensor, int]:
        """The losses so far, for `drop_step`."""
        # A tensor is cloned, because `add_backward` adds to it in place.
        return (self.loss_sum.clone() if isinstance(self.loss_sum, torch.Tensor) else self.loss_sum), self.losses

    def drop_step(self, samples: int, losses: tuple[float | torch.Tensor, int]) -> None:
        """A step was made without this worker: its samples and losses do not count."""
        self.late += 1
        self.undo_step(samples, losses)

    def undo_step(self, samples: int, losses: tuple[float | torch.Tensor, int]) -> None:
        """The batch of a step is computed again: its samples and losses do not count yet."""
        self.samples -= samples
        self.loss_sum, self.losses = losses

    def drop_batch(self) -> None:
        """Count a batch that came too late and is not given again."""
        self.dropped += 1
