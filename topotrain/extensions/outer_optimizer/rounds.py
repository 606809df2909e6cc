"""The rounds of one worker: when each fragment is exchanged, and its counts. Pure."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from topotrain.config.job import ConfigError, Weigh


def check_fragments(fragments: int, parameters: int) -> None:
    """Raise ConfigError for more fragments than the optimizer has parameters."""
    if fragments > parameters:
        accepted = f"must be at most {parameters}, the number of parameters that the optimizer has"
        raise ConfigError("cluster.fragments", fragments, accepted)


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

    def interval_at(self, own: float, fastest: float) -> int:
        """A worker's own steps while the fastest one makes those between two exchanges.

        This is the dynamic number of local updates of Liu et al. (2024), rounded.

        own, fastest: seconds of a step. 0: not known.
        """
        if not own or not fastest:
            return self.interval
        # Rounded to the nearest and not down: of two steps a worker that is 1 % slower would make one.
        return min(self.interval, max(1, int(self.interval * fastest / own + 0.5)))


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
        self.last_told = 0.0
        """The steps of the last push, counted in the same way."""

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
        self.last_told = told.steps / len(self._learned)
        self._read = 0
        return told

    @property
    def pending_steps(self) -> float:
        """The steps that are in no push, counted as in `dropped`."""
        return sum(each.steps for each in self._learned) / len(self._learned)

    @property
    def steps(self) -> tuple[float, ...]:
        """The steps of each fragment that were not pushed."""
        return tuple(each.steps for each in self._learned)

    @property
    def pending(self) -> tuple[int, ...]:
        """The fragments with steps that were not pushed."""
        return tuple(fragment for fragment, each in enumerate(self._learned) if each.steps)


def fragment_to_push(turn: int, untold: Sequence[float]) -> int:
    """Return the fragment of a worker's next push.

    Args:
        turn: the next fragment of the worker's own turn.
        untold: by fragment, the steps since its last push.
    """
    # At the end of the script the fragment may have no step that was not pushed, and others have some.
    following = (fragment % len(untold) for fragment in range(turn, turn + len(untold)))
    return next((fragment for fragment in following if untold[fragment]), turn)


def rearmost(waiting: Collection[int], fragments: int) -> int:
    """Return the one of these fragments that comes first in a turn.

    A turn has no end, so that is the one behind the widest gap; of several the one with the lowest number.
    """
    return max(sorted(waiting), key=lambda fragment: min((fragment - 1 - other) % fragments for other in waiting))


class StepTimes:
    """The time from one step of a worker to the next."""

    def __init__(self) -> None:
        # Few, so that a worker that becomes slower is soon known to be. The median leaves out pauses of the script.
        self._last: deque[float] = deque(maxlen=15)
        self._then: int | None = None

    def step(self, now: int) -> None:
        """A step begins at this time, in nanoseconds."""
        if self._then is not None and now > self._then:
            self._last.append((now - self._then) / 1e9)
        self._then = now

    @property
    def seconds(self) -> float:
        """The median of the last times. 0: not known."""
        return median(self._last) if self._last else 0.0
