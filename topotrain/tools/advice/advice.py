"""The advice: the named blocks with their predictions, and the block to take."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from topotrain.config.job import ConfigError, Job
from topotrain.config.job_file import dumps_cluster
from topotrain.tools.advice.candidate import Candidate, LeftOut, candidates, not_considered
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES, planned_memory, processes_of
from topotrain.tools.prediction.speed_bounds import SpeedBound, speed_bound
from topotrain.tools.probe.probe_file import Probe

VERSION = 1
EVEN = 0.02
"""Layouts with speeds that differ by less are equally fast: the one that changes nothing, or is smaller, is taken."""
BUSY = 0.7
"""The share of the time from which on a resource is what the others wait for."""
WAITS = 0.2
"""The share of a step from which on waiting for one process is its reason."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A candidate with its prediction, and its bound by arithmetic."""

    candidate: Candidate
    prediction: Prediction
    bound: SpeedBound

    @property
    def samples_per_s(self) -> float:
        """Samples per second that are left of failures."""
        return self.prediction.useful_samples_per_s

    @property
    def is_exact(self) -> bool:
        return not self.candidate.changes

    @property
    def reason(self) -> str:
        """Why it is as fast as it is. `topotrain run --profile` shows such figures, too."""
        found = self.prediction
        parts, total = found.parts, found.parts.total or found.step_s or 1.0
        if found.busiest and found.busiest[0].share >= BUSY:
            resource = found.busiest[0]
            verb = "are" if resource.name.endswith("cores") else "is"
            return f"{resource.name} {verb} busy {resource.share:.0%} of the step"
        if found.waits and found.waits[0].seconds / total >= WAITS:
            wait, computes = found.waits[0], f"computing takes {parts.compute / total:.0%}"
            return f"workers wait {wait.seconds / total:.0%} of the step for {wait.process}; {computes}"
        shares = {"push": parts.push, "apply": parts.apply, "pull": parts.pull, "waiting": parts.wait}
        most = max(shares, key=lambda name: shares[name])
        rest = f"; most of the rest is {most}, {shares[most] / total:.0%}" if shares[most] / total >= 0.01 else ""
        return f"workers compute {parts.compute / total:.0%} of the step{rest}"

    @property
    def memory_bytes(self) -> int:
        """The bytes of training state on the fullest host."""
        places = self.candidate.topology
        hosts = {str(each): places.host_of(each) for unit in places.units for each in (*unit.workers, *unit.servers)}
        needed = Counter[int]()
        for each in self.prediction.memory:
            needed[hosts.get(each.process, 0)] += each.nbytes
        return max(needed.values(), default=0)

    @property
    def traffic_bytes(self) -> float:
        """The bytes that all processes send per worker step.

        They go to other hosts, or on one host to each other.
        """
        links = self.prediction.links
        between = [link for link in links if link.between_hosts]
        return sum(link.nbytes for link in (between if between or self.candidate.given > 1 else links))

    def as_data(self) -> dict[str, Any]:
        candidate, found = self.candidate, self.prediction
        return {
            "layout": candidate.label,
            "framework": candidate.topology.framework,
            "hosts": candidate.used,
            "block": dumps_cluster(candidate.job.cluster),
            "samples_per_s": self.samples_per_s,
            "error": found.error,
            "step_s": found.step_s,
            "at_most_samples_per_s": self.bound.samples_per_s,
            "memory_bytes": self.memory_bytes,
            "traffic_bytes": self.traffic_bytes,
            "staleness": asdict(found.staleness),
            "goodput": found.goodput,
            "changes": list(candidate.changes),
            "needs": candidate.needs,
            "same_as_one_process": self.is_exact,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """The rehearsed layouts, and those that were not rehearsed."""

    machines: Machines
    rehearsed: tuple[Rehearsed, ...]  # the fastest first; never empty
    bounded: tuple[tuple[Candidate, SpeedBound], ...]  # of too many processes, or after the time
    refused: tuple[LeftOut, ...]  # layouts that do not fit into memory
    left_out: tuple[LeftOut, ...]  # layouts and settings that were not considered

    @property
    def winner(self) -> Rehearsed:
        """The layout to take: a script need allow nothing for it."""
        return _winner([each for each in self.rehearsed if not each.candidate.needs] or self.rehearsed)

    @property
    def preferred(self) -> tuple[Rehearsed, ...]:
        """The layouts in the order to take them: the winner, then by their speed."""
        winner = self.winner
        return (winner, *(each for each in self.rehearsed if each is not winner))

    @property
    def best_exact(self) -> Rehearsed | None:
        """The fastest layout with the updates of one process, for any script, or None."""
        exact = [each for each in self.rehearsed if each.is_exact and not each.candidate.needs]
        if not exact:
            return None
        # Without the others, slower ones are even with it.
        return self.winner if self.winner in exact else _winner(exact)

    def as_data(self) -> dict[str, Any]:
        exact = self.best_exact
        return {
            "version": VERSION,
            "hosts": max(1, self.machines.hosts),
            "winner": self.winner.as_data(),
            "fastest_exact": None if exact is None else exact.candidate.label,
            "candidates": [each.as_data() for each in self.rehearsed],
            "bounds": [
                {"layout": candidate.label, "at_most_samples_per_s": bound.samples_per_s, "limit": bound.limit}
                for candidate, bound in self.bounded
            ],
            "refused": [{"layout": each.what, "why": each.why} for each in self.refused],
            "not_considered": [asdict(each) for each in self.left_out],
        }


Predictor = Callable[[Job, Probe, Machines], Prediction]


def advise(
    probe: Probe,
    machines: Machines,
    job: Job,
    sync: bool = False,
    within_s: float = 60.0,
    predictor: Predictor = predict,
    show: Callable[[str], None] = lambda text: None,
) -> Advice:
    """Rehearse the named blocks for a program on machines.

    Args:
        probe: of the program.
        machines: where the job is to run.
        job: its other fields are kept, and its block is a candidate unless it is `auto`.
        sync: only layouts with the updates of one process.
        within_s: seconds after which no further candidate is rehearsed. The first one always is.
        predictor: of the layouts; it raises ConfigError for a job that it cannot predict.
        show: shows which layout is rehearsed.

    Raises:
        ConfigError: no layout fits, or a straggler is none of the hosts.
    """
    began = time.monotonic()
    found, left_out = candidates(probe, machines, job)
    found = [each for each in found if not (sync and each.changes)]
    refused: list[LeftOut] = []
    rehearsed: list[Rehearsed] = []
    bounded: list[tuple[Candidate, SpeedBound]] = []
    for number, each in enumerate(found, 1):
        bound = speed_bound(each.job, each.topology, each.machines, probe)
        is_late = bool(rehearsed) and time.monotonic() - began >= within_s
        try:
            if is_late or processes_of(each.topology) > MOST_PROCESSES:
                if machines.memory_bytes is not None:
                    planned_memory(each.job, probe, each.machines, each.topology)
                bounded.append((each, bound))
                continue
            show(f"rehearsing {number} of {len(found)}: {each.label}")
            rehearsed.append(Rehearsed(each, predictor(each.job, probe, each.machines), bound))
        except ConfigError as error:
            (refused if error.field == "--memory" else left_out).append(LeftOut(each.label, str(error)))
    if not rehearsed:
        raise _nothing(refused, left_out)
    return Advice(
        machines,
        rehearsed=tuple(sorted(rehearsed, key=lambda one: -one.samples_per_s)),
        bounded=tuple(sorted(bounded, key=lambda one: -one[1].samples_per_s)),
        refused=tuple(refused),
        left_out=(*left_out, *not_considered(machines)),
    )


def fastest(found: Sequence[tuple[Candidate, float]]) -> int:
    """Return the place of the fastest layout; of even ones the exact, smaller one."""
    best = max(speed for _, speed in found)
    even = [place for place, (_, speed) in enumerate(found) if speed >= best * (1 - EVEN)]
    return min(even, key=lambda place: (bool(found[place][0].changes), found[place][0].processes, -found[place][1]))


def _winner(rehearsed: Sequence[Rehearsed]) -> Rehearsed:
    return rehearsed[fastest([(each.candidate, each.samples_per_s) for each in rehearsed])]


def _nothing(refused: Sequence[LeftOut], left_out: Sequence[LeftOut]) -> ConfigError:
    if refused:
        return ConfigError("--memory", None, f"no layout fits: {refused[0].what}: {refused[0].why}")
    why = f": {left_out[0].what}: {left_out[0].why}" if left_out else ""
    return ConfigError("advice", None, f"no layout can be rehearsed{why}")
