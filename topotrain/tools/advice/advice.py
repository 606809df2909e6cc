"""The advice: the rehearsed candidates, the other ones, and the winner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import dumps_cluster
from topotrain.tools.advice.advice_reasons import reason
from topotrain.tools.advice.candidate import Candidate, LeftOut
from topotrain.tools.advice.candidate_list import CandidateSource
from topotrain.tools.advice.layout_search import LayoutSearch, Rehearsed, SearchListener, SilentListener
from topotrain.tools.advice.predictor import Predictor, RehearsalPredictor
from topotrain.tools.advice.wishes import SearchClock, Wishes, search_time
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.probe.probe_file import Probe

VERSION = 1
EVEN = 0.02
"""Layouts with speeds that differ by less are equally fast: the one that changes nothing, or is smaller, is taken."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The rehearsed layouts, the fastest first, and those that were not rehearsed.

    Attributes:
        machines: where the job is to run.
        wishes: of the user.
        rehearsed: with predictions; never empty.
        refused: layouts that do not fit into memory.
        left_out: layouts and settings that were not rehearsed.
        late: layouts that were not rehearsed because the time was over.
    """

    machines: Machines
    wishes: Wishes
    rehearsed: tuple[Rehearsed, ...]
    refused: tuple[LeftOut, ...]
    left_out: tuple[LeftOut, ...]
    late: int = 0

    @property
    def winner(self) -> Rehearsed:
        """The layout to take."""
        return _winner(self.rehearsed)

    @property
    def preferred(self) -> tuple[Rehearsed, ...]:
        """The layouts in the order to take them: the winner, then by their speed."""
        return (self.winner, *(each for each in self.rehearsed if each is not self.winner))

    @property
    def best_exact(self) -> Rehearsed | None:
        """The fastest layout with the updates of one process. None: there is none."""
        exact = [each for each in self.rehearsed if each.is_exact]
        return _winner(exact) if exact else None

    def reason(self, one: Rehearsed) -> str:
        """Return why a layout is as fast as it is."""
        return reason(one, self.rehearsed)

    def as_data(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        winner = self.winner
        return {
            "version": VERSION,
            "hosts": max(1, self.machines.hosts),
            "ended_by_time": bool(self.late),
            "winner": self._row(winner),
            "candidates": [self._row(each) for each in self.rehearsed],
            "refused": [{"layout": each.what, "why": each.why} for each in self.refused],
            "not_considered": [{"what": each.what, "why": each.why} for each in self.left_out],
        }

    def _row(self, one: Rehearsed) -> dict[str, Any]:
        candidate, found = one.candidate, one.prediction
        return {
            "layout": candidate.label,
            "framework": candidate.topology.framework,
            "hosts": candidate.used,
            "block": dumps_cluster(candidate.job.cluster),
            "samples_per_s": one.samples_per_s,
            "error": found.error,
            "step_s": found.step_s,
            "at_most_samples_per_s": one.bound.samples_per_s,
            "memory_bytes": host_memory(one),
            "traffic_bytes": host_traffic(one),
            "staleness": {"mean": found.staleness.mean, "p95": found.staleness.p95, "max": found.staleness.max},
            "goodput": found.goodput,
            "changes": list(candidate.changes),
            "same_as_one_process": one.is_exact,
            "reason": self.reason(one),
        }


def advise(
    probe: Probe,
    machines: Machines,
    job: Job | None = None,
    wishes: Wishes | None = None,
    predictor: Predictor | None = None,
    listener: SearchListener | None = None,
    clock: SearchClock | None = None,
) -> Advice:
    """Rehearse the layouts for a program on machines.

    Args:
        probe: of the program.
        machines: where the job is to run.
        job: its other fields are kept, and its block is a candidate unless it is `auto`. None: a job with defaults.
        wishes: of the user.
        predictor: of the layouts; None: a rehearsal.
        listener: is told about each rehearsal.
        clock: of the search. None: that of this machine.

    Raises:
        ConfigError: no layout fits, or a straggler is none of the hosts.
    """
    wanted = wishes or Wishes()
    own = job is not None and not job.cluster.auto
    source = CandidateSource(probe, machines, job or Job(), wanted, own)
    used = predictor or RehearsalPredictor()
    # What comes before the first rehearsal takes time, too.
    time = search_time(wanted.within_s, clock)
    found = source.collect(time)
    search = LayoutSearch(used, probe, wanted, time, listener or SilentListener())
    search.run(found.candidates)
    if not search.rehearsed:
        raise _nothing(found.candidates, found.refused, search.left_out)
    left_out = (*search.left_out, *found.left_out)
    return Advice(machines, wanted, tuple(search.rehearsed), found.refused, left_out, search.late + found.late)


def host_memory(one: Rehearsed) -> int:
    """Return the bytes of training state on the fullest host."""
    places = one.candidate.topology
    hosts = {str(each): places.host_of(each) for unit in places.units for each in (*unit.workers, *unit.servers)}
    needed: dict[int, int] = {}
    for each in one.prediction.memory:
        host = hosts.get(each.process, 0)
        needed[host] = needed.get(host, 0) + each.nbytes
    return max(needed.values(), default=0)


def host_traffic(one: Rehearsed) -> float:
    """Return the bytes that all processes send to other hosts, per worker step.

    If there is one host, these are the bytes that they send to each other.
    """
    links = one.prediction.links
    between = [link for link in links if link.between_hosts]
    return sum(link.nbytes for link in (between if between or one.candidate.given > 1 else links))


def _winner(rehearsed: Sequence[Rehearsed]) -> Rehearsed:
    best = max(each.samples_per_s for each in rehearsed)
    even = [each for each in rehearsed if each.samples_per_s >= best * (1 - EVEN)]
    return min(even, key=lambda each: (not each.is_exact, each.candidate.processes, -each.samples_per_s))


def _nothing(candidates: Sequence[Candidate], refused: Sequence[LeftOut], left_out: Sequence[LeftOut]) -> ConfigError:
    """Return the error of an advice without any layout."""
    if not candidates and refused:
        least = refused[0]
        return ConfigError("--memory", None, f"no layout fits: {least.what}: {least.why}")
    why = f": {left_out[0].what}: {left_out[0].why}" if left_out else ""
    return ConfigError("advice", None, f"no layout can be rehearsed{why}")
