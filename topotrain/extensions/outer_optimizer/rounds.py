"""The rounds of one worker: when each fragment is exchanged, and its counts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from topotrain.config.job import Weigh


def fragments_of(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the fragment of each parameter, so that all have about as many bytes.

    Largest first, each into the smallest fragment. Every fragment gets a parameter, if there are as many.
    """
    found = [0] * len(sizes)
    filled = [(0, 0, fragment) for fragment in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # Of equal sizes the one with fewer parameters: a parameter may have no elements.
        nbytes, parameters, fragment = smallest = min(filled)
        filled.remove(smallest)
        filled.append((nbytes + sizes[index], parameters + 1, fragment))
        found[index] = fragment
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RoundSchedule:
    """The local steps, from 1, at which a worker exchanges.

    Attributes:
        sync_freq: steps between two exchanges of a fragment.
        fragments: these are exchanged in turn.
        overlap: steps between a push and the new values.
    """

    sync_freq: int
    fragments: int = 1
    overlap: int = 0

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.sync_freq // self.fragments

    def pushes(self, step: int) -> bool:
        """Whether the worker pushes a fragment behind this step."""
        return step % self.interval == 0

    def takes(self, step: int) -> bool:
        """Whether it takes the new values of the last push behind this step."""
        return step % self.interval == self.overlap

    def fragment(self, pushes: int) -> int:
        """The fragment of the push after so many pushes."""
        return pushes % self.fragments


@dataclass(frozen=True, slots=True)
class Learned:
    """The steps of a worker that are in its values of a fragment, and in no push.

    Attributes:
        steps: local steps that changed its values. Of a step that is in them in part, this part counts.
        samples: the samples of these steps; 0 where the script reads no loader of the job.
    """

    steps: float = 0
    samples: float = 0

    def weight(self, weigh: Weigh) -> float:
        """The weight of this part in the mean of a round."""
        if not self.steps:
            return 0.0
        if weigh is Weigh.kEqual:
            return 1.0
        # Samples times samples per step: steps with larger batches have less noise (Decoupled DiLoCo).
        return self.samples * self.samples / self.steps if self.samples else float(self.steps)


class UntoldSteps:
    """The steps of a worker that no server knows, by fragment.

    Invariant: for each fragment, the steps that were pushed, those here, and those that were dropped are all steps that
    were made.
    """

    def __init__(self, fragments: int) -> None:
        self._learned = [Learned()] * fragments
        self._read = 0  # samples since the last push, as far as they are here
        self.made = 0
        """All steps."""
        self.dropped = 0.0
        """Steps that new values have replaced. One of one of n fragments counts as 1/n."""

    def __getitem__(self, fragment: int) -> Learned:
        return self._learned[fragment]

    def step(self) -> None:
        """The worker has made a step. It changes all fragments."""
        self._learned = [Learned(each.steps + 1, each.samples) for each in self._learned]
        self.made += 1

    def read(self, samples: int) -> None:
        """So many samples are in the steps since the last push of any fragment."""
        new, self._read = samples - self._read, samples
        self._learned = [Learned(each.steps, each.samples + new) for each in self._learned]

    def keep(self, fragment: int, share: float) -> None:
        """A fragment has new values, with this share of the steps since its push."""
        if share < 1:
            lost = self._learned[fragment]
            self._learned[fragment] = Learned(lost.steps * share, lost.samples * share)
            self.dropped += lost.steps * (1 - share) / len(self._learned)

    def push(self, fragment: int) -> Learned:
        """Return what is pushed of a fragment, and count it as told."""
        told, self._learned[fragment] = self._learned[fragment], Learned()
        self._read = 0
        return told

    @property
    def pending_steps(self) -> float:
        """The steps that are in no push, counted as in `dropped`."""
        return sum(each.steps for each in self._learned) / len(self._learned)

    @property
    def pending(self) -> tuple[int, ...]:
        """The fragments with steps that were not pushed."""
        return tuple(fragment for fragment, each in enumerate(self._learned) if each.steps)
