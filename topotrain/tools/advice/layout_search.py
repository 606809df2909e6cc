"""The search of an advice.

It decides which candidates are rehearsed, in which order, and which need no rehearsal.

The candidate of each family with the highest bound is rehearsed first, so that a user can compare the families. The
others follow by falling bound, as long as their bound is above the fastest layout of their kind. So the fastest one is
always found, unless the time or the number of rehearsals ends the search.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from topotrain.config.job import ConfigError
from topotrain.tools.advice.candidate import Candidate, Family, LeftOut
from topotrain.tools.advice.predictor import Predictor
from topotrain.tools.advice.speed_bounds import BoundEstimate, SpeedBound
from topotrain.tools.advice.wishes import Wishes
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.probe.probe_file import Probe


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A candidate and its prediction."""

    candidate: Candidate
    prediction: Prediction
    bound: SpeedBound

    @property
    def samples_per_s(self) -> float:
        """Samples per second that are left of failures."""
        return self.prediction.useful_samples_per_s

    @property
    def is_exact(self) -> bool:
        """Whether the updates are those of one process."""
        return self.candidate.is_exact and self.prediction.same_as_one_process


class SearchListener(Protocol):
    """Is told how far a search is."""

    def rehearsing(self, number: int, of: int, candidate: Candidate) -> None:
        """Take note that a candidate is rehearsed.

        number: from 1. of: how many there can be.
        """
        ...


class SearchClock(Protocol):
    """The time of a search."""

    def now(self) -> float:
        """Return seconds since any moment."""
        ...


class SilentListener:
    """Takes note of nothing."""

    def rehearsing(self, number: int, of: int, candidate: Candidate) -> None:
        """As `SearchListener.rehearsing`."""


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        """As `SearchClock.now`."""
        return time.monotonic()


@dataclass(slots=True)
class LayoutSearch:
    """Rehearses candidates until the fastest is known, or the time is over.

    predictor: of the layouts. probe: of the program. listener: is told about each rehearsal.
    """

    predictor: Predictor
    probe: Probe
    wishes: Wishes
    listener: SearchListener = field(default_factory=SilentListener)
    clock: SearchClock = field(default_factory=MonotonicClock)
    rehearsed: list[Rehearsed] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Rehearse what is worth it; `rehearsed` and `left_out` are the result."""
        began = self.clock.now()
        bounded = [(each, BoundEstimate(each, self.probe).bound()) for each in candidates]
        bounded.sort(key=lambda pair: -pair[1].samples_per_s)
        firsts: dict[Family, Candidate] = {}
        for each, _ in bounded:
            firsts.setdefault(each.family, each)
        chosen = frozenset(map(id, firsts.values()))
        # Candidates that compute the same as one process come first: time may run out.
        exact = [pair for pair in bounded if id(pair[0]) in chosen and pair[0].is_exact]
        other = [pair for pair in bounded if id(pair[0]) in chosen and not pair[0].is_exact]
        rest = [pair for pair in bounded if id(pair[0]) not in chosen]
        done = 0
        for each, bound in (*exact, *other, *rest):
            why = "" if id(each) in chosen else self._needless(each, bound)
            why = why or self._over(done, self.clock.now() - began, bound)
            if why:
                self.left_out.append(LeftOut(each.label, why))
                continue
            done += 1
            self.listener.rehearsing(done, min(len(bounded), self.wishes.most), each)
            self._rehearse(each, bound)
        self.rehearsed.sort(key=lambda found: -found.samples_per_s)

    def _rehearse(self, candidate: Candidate, bound: SpeedBound) -> None:
        try:
            prediction = self.predictor.predict(candidate.job, self.probe, candidate.machines)
        except ConfigError as error:
            self.left_out.append(LeftOut(candidate.label, str(error)))
            return
        self.rehearsed.append(Rehearsed(candidate, prediction, bound))

    def _needless(self, candidate: Candidate, bound: SpeedBound) -> str:
        """Why a rehearsal would not change the advice; "": it might."""
        rivals: Iterable[Rehearsed] = self.rehearsed
        if candidate.is_exact:
            # The fastest layout of this kind is asked for as well.
            rivals = (each for each in self.rehearsed if each.is_exact)
        best = max((each.samples_per_s for each in rivals), default=0.0)
        if bound.samples_per_s > best:
            return ""
        return f"by arithmetic at most {bound.samples_per_s:,.0f} samples/s: {bound.limit}"

    def _over(self, done: int, seconds: float, bound: SpeedBound) -> str:
        """Why no further candidate is rehearsed; "": one may be."""
        # At least one, for which the search was started.
        if done and seconds >= self.wishes.within_s:
            why = f"the search has ended after {self.wishes.within_s:g} s"
        elif done >= self.wishes.most:
            why = f"the search has ended after {self.wishes.most} rehearsals"
        else:
            return ""
        return f"{why}; by arithmetic at most {bound.samples_per_s:,.0f} samples/s"
