"""The batches that a script was given for its next step, and their weight."""

from abc import ABC, abstractmethod


class BatchAccounting(ABC):
    """Notes the batches that a script is given."""

    @abstractmethod
    def drawn(self, stream: int, seq: int, weight: float, samples: int) -> None:
        """The script gets batch `seq` (from 0) of a stream.

        Weight 0: a repeated batch that must not count.

        stream: (epoch << 32) | lease, or the value of `DataPlan.stream`.
        """

    @abstractmethod
    def left_early(self, epoch: int, batches: int) -> None:
        """The script left the loop after so many batches. This must not wait."""

    @abstractmethod
    def lost(self, stream: int, batches: int) -> None:
        """Batches of a lease that the stream, read again, no longer has."""


class StepBatches:
    """Counts what one worker's loader gave the script since the last commit.

    A job may let a worker make several steps before it commits. Samples therefore count for the commit only when the
    step that used them is over (`use`), and batches when the script is given them.
    """

    def __init__(self) -> None:
        self._given_weight: float | None = None
        self._batch_weight = 1.0
        self._marks: dict[int, tuple[int, int]] = {}  # stream -> first and last batch
        self._unused = 0
        self.last_samples = 0
        """Samples of the batch that the script was given last."""
        self.samples = 0
        """Samples in the gradient that is committed next."""

    def add(self, stream: int, seq: int, weight: float, samples: int) -> None:
        """The script was given batch `seq` of a data stream."""
        # `tt.weight` holds for one batch.
        self._batch_weight, self._given_weight = weight, None
        self.last_samples = samples
        self._unused += samples
        # Batches of a stream are read in order, so first and last are enough.
        first, _ = self._marks.get(stream, (seq, seq))
        self._marks[stream] = (first, seq)

    def weight(self) -> float:
        """The weight of the gradient: samples, or the argument of `tt.weight`."""
        return self._batch_weight if self._given_weight is None else self._given_weight

    def set_weight(self, weight: float) -> None:
        """Set the weight of the coming backward (the tokens of a token mean, say)."""
        self._given_weight = weight

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
    def marks(self) -> tuple[int, ...]:
        """Stream, first and last batch of each stream, as a commit has them."""
        return tuple(number for stream, mark in self._marks.items() for number in (stream, *mark))

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._marks.values())
