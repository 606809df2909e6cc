"""The search of an advice.

It decides which candidates are rehearsed, in which order, and which need no rehearsal.

One worker is rehearsed first. The candidate of each family with the highest bound follows, so that a user can compare
the families. Then comes one of each number of hosts. The others follow by falling bound, as long as their bound is
above the fastest layout of their kind. So the fastest one is always found, unless the time or the number of rehearsals
ends the search.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from topotrain.config.job import ConfigError
from topotrain.tools.advice.candidate import Candidate, Family, LeftOut
from topotrain.tools.advice.predictor import Predictor
from topotrain.tools.advice.wishes import SearchTime, Wishes
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.prediction.speed_bounds import SpeedBound
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


class SilentListener:
    """Takes note of nothing."""

    def rehearsing(self, number: int, of: int, candidate: Candidate) -> None:
        """As `SearchListener.rehearsing`."""


@dataclass(slots=True)
class LayoutSearch:
    """Rehearses candidates until the fastest is known, or the time is over.

    Attributes:
        predictor: of the layouts.
        probe: of the program.
        wishes: of the user.
        time: until which a layout may be rehearsed.
        listener: is told about each rehearsal.
        rehearsed, left_out: the result.
        late: layouts that were left out because the time was over.
    """

    predictor: Predictor
    probe: Probe
    wishes: Wishes
    time: SearchTime
    listener: SearchListener = field(default_factory=SilentListener)
    rehearsed: list[Rehearsed] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    late: int = 0

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Rehearse what is worth it; `rehearsed` and `left_out` are the result."""
        bounded = self._bounded(candidates)
        firsts, alike = _firsts(bounded)
        rest = [pair for pair in bounded if id(pair[0]) not in firsts and id(pair[0]) not in alike]
        order = [*firsts.values(), *alike.values(), *rest]
        done = 0
        for each, bound in order:
            why = "" if id(each) in firsts else self._needless(each, bound)
            why = why or self._over(done, bound)
            if why:
                self.left_out.append(LeftOut(each.label, why))
                continue
            done += 1
            self.listener.rehearsing(done, min(len(bounded), self.wishes.most), each)
            self._rehearse(each, bound)
        self.rehearsed.sort(key=lambda found: -found.samples_per_s)

    def _bounded(self, candidates: Sequence[Candidate]) -> "list[Bounded]":
        """Return the candidates with their bounds, the highest first."""
        found: list[Bounded] = []
        # One worker has no bound to speak of, and is there however short the time is.
        for each in sorted(candidates, key=lambda candidate: candidate.family is not Family.ONE):
            if found and self.time.is_over():
                self.late += 1
                self.left_out.append(LeftOut(each.label, self._ended()))
            else:
                found.append((each, each.bound(self.probe)))
        return sorted(found, key=lambda pair: -pair[1].samples_per_s)

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

    def _over(self, done: int, bound: SpeedBound) -> str:
        """Why no further candidate is rehearsed; "": one may be."""
        # At least one, for which the search was started.
        if done and self.time.is_over():
            self.late += 1
            why = self._ended()
        elif done >= self.wishes.most:
            why = f"the search has ended after {self.wishes.most} rehearsals"
        else:
            return ""
        return f"{why}; by arithmetic at most {bound.samples_per_s:,.0f} samples/s"

    def _ended(self) -> str:
        return f"the search has ended after {self.time.within_s:g} s"


Bounded = tuple[Candidate, SpeedBound]
"""A candidate, and how fast it is at most."""


def _firsts(bounded: Sequence[Bounded]) -> tuple[dict[int, Bounded], dict[int, Bounded]]:
    """Return the identities of the candidates that are rehearsed first, in order.

    The first ones are the best of each family: one worker, layouts that compute the same as one process, and the rest.
    With one worker among them, nothing slower is ever advised. The second ones are the best of each number of hosts
    that compute the same. Without them a search that ends early would know large layouts only.
    """
    families: dict[Family, Bounded] = {}
    hosts: dict[int, Bounded] = {}
    for pair in bounded:
        families.setdefault(pair[0].family, pair)
        if pair[0].is_exact and pair[0].family is not Family.ONE:
            hosts.setdefault(pair[0].used, pair)
    ranked = sorted(families.values(), key=lambda pair: (pair[0].family is not Family.ONE, not pair[0].is_exact))
    firsts = {id(pair[0]): pair for pair in ranked}
    return firsts, {id(pair[0]): pair for pair in hosts.values() if id(pair[0]) not in firsts}
