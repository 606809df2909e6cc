"""What the report knows of a job's processes: counters, rounds, and stragglers.

Stragglers are workers that are slow compared to the others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median_low
from typing import Any

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Finished, LocalSteps, Rounds, StateTaken, StepDone
from topotrain.tools.monitor.loss_curves import Point
from topotrain.tools.recording.history_series import MOST_POINTS, SeriesPoint, ThinnedSeries

FACTOR = 1.5
LEAST_S = 0.02
"""A straggler takes at least this many seconds more than the others. Less may be the system's scheduling."""


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """The counters of a resident.

    stale: the sum of the staleness of all steps. late: the steps of backup workers without it.
    made, lost, waited_s: the steps between rounds, those of them that are in no round, and seconds of waits for rounds.
    """

    steps: int = 0
    samples: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_link: int = 0
    stale: float = 0.0
    staleness_max: int = 0
    time: float = 0.0
    late: int = 0
    made: int = 0
    lost: float = 0.0
    waited_s: float = 0.0

    def and_then(self, more: "ProcessCounts") -> "ProcessCounts":
        both = {name: getattr(self, name) + getattr(more, name) for name in _COUNTERS}
        most = max(self.staleness_max, more.staleness_max)
        # Not the sum of both: a restarted process reports the steps of its group, with those of former processes.
        return ProcessCounts(**both | {"staleness_max": most, "steps": more.steps or self.steps})


_COUNTERS = tuple(f.name for f in fields(ProcessCounts))


@dataclass(slots=True)
class ProcessTally:
    """The counters of a resident, of its present process and the former ones."""

    pid: int | None = None
    before: ProcessCounts = ProcessCounts()
    last: StepDone | Finished | None = None
    """The last event of the present process."""
    time: float = 0.0
    """Seconds of the present process since its first step."""
    local: LocalSteps | None = None
    """The steps between rounds of the present process."""
    trains_alone: bool = False
    """It has reported such steps."""
    _losses: ThinnedSeries = field(default_factory=ThinnedSeries)

    @property
    def step(self) -> int:
        """The last step of the present process."""
        return 0 if self.last is None else self.last.step if isinstance(self.last, StepDone) else self.last.steps

    @property
    def curve(self) -> list[Point]:
        return [(point.at, point.value) for point in self._losses.since(-1) if point.value is not None]

    @property
    def whole(self) -> ProcessCounts:
        # Not added up event by event: jobs have hundreds of processes, which report four times a second.
        return self.before.and_then(self._now())

    def _now(self) -> ProcessCounts:
        last, local, now = self.last, self.local, ProcessCounts()
        if local is not None:
            # A worker tells all its steps before its end: pending ones are those of a process that came to no end.
            now = ProcessCounts(made=local.made, lost=local.pending + local.dropped, waited_s=local.waited_s)
        if last is None:
            return now
        # The mean is over the steps of this process, and `step` includes those of former ones.
        stale = last.staleness_mean * max(0, self.step - self.before.steps)
        traffic = {"bytes_out": last.bytes_out, "bytes_in": last.bytes_in, "bytes_link": last.bytes_link}
        counts = {"steps": self.step, "samples": last.samples, "staleness_max": last.staleness_max, "late": last.late}
        return replace(now, stale=stale, time=self.time, **traffic, **counts)

    def take(self, pid: int | None, event: Event) -> None:
        """Take the counters of an event; pid: of the present process, if it is known."""
        if pid is not None and pid != self.pid:
            if self.pid is not None:
                # A new process counts from 0 again.
                self.before, self.last, self.time, self.local = self.whole, None, 0.0, None
            self.pid = pid
        match event:
            case LocalSteps():
                self.local, self.trains_alone = event, True
            case Finished():
                self.last = event
            case StepDone(time=time, loss=loss):
                self.last, self.time = event, time
                if loss is not None and math.isfinite(loss):  # else every mean would not be finite
                    self._losses.add(SeriesPoint(0, self.before.time + time, 0, loss), MOST_POINTS)
            case _:
                pass


def round_report(
    rounds: Rounds | None, taken: Sequence[StateTaken], tallies: Mapping[str, ProcessTally]
) -> dict[str, Any] | None:
    """Return the figures of rounds and workers; None: there is no outer optimizer.

    rounds: the last event about them. taken: all states that were taken from another group, or were not.
    """
    alone = {who: tallies[who].whole for who in sorted(tallies) if tallies[who].trains_alone}
    if rounds is None and not alone:
        return None
    return {
        **_of_rounds(rounds),
        "lost_steps": sum(counts.lost for counts in alone.values()),
        "states_taken": sum(each.whole for each in taken),
        "states_missed": sum(not each.whole for each in taken),
        "workers": [
            {
                "who": who,
                "steps": counts.made,
                "lost_steps": counts.lost,
                "waited_s": counts.waited_s,
                "bytes_out": counts.bytes_out,
                "bytes_in": counts.bytes_in,
            }
            for who, counts in alone.items()
        ],
    }


def _of_rounds(found: Rounds | None) -> dict[str, Any]:
    if found is None:  # the job failed before its first round was reported
        found = Rounds("", {}, 0.0, 0, ())
    members = {int(count): rounds for count, rounds in found.members.items()}
    rounds = sum(members.values())
    return {
        "count": rounds,
        "members": {str(count): members[count] for count in sorted(members)},
        "members_mean": sum(count * made for count, made in members.items()) / rounds if rounds else None,
        "age_mean": found.age_mean,
        "age_max": found.age_max,
        "last": [_round(line) for line in found.last],
    }


def _round(line: str) -> dict[str, Any]:
    fragment, number, *groups = map(int, line.split())
    return {"fragment": fragment, "number": number, "groups": groups}


@dataclass(frozen=True, slots=True)
class Straggler:
    """A straggler, with its median seconds for a step, and that of the others."""

    who: str
    own_s: float
    others_s: float

    @property
    def factor(self) -> float:
        return self.own_s / self.others_s

    def words(self) -> str:
        times = f"{self.own_s:.3g} s of its own for a step, {self.factor:.1f} times the median of the others"
        return f"{self.who} is slow: it takes {times} ({self.others_s:.3g} s)"

    def as_data(self) -> dict[str, Any]:
        return {"who": self.who, "own_s": self.own_s, "group_s": self.others_s, "factor": self.factor}


def stragglers(topology: Topology, own: Mapping[str, float]) -> list[Straggler]:
    """Return the slow workers; own: seconds for a step, by worker.

    They take more than FACTOR times the median of the others, and LEAST_S more. The others are those of the worker's
    group; of a group of one worker, those of the other groups.
    """
    found = []
    for members in _compared(topology):
        # Of their own time without waits: in a group that steps together, all whole steps are as long as the slowest.
        known = {who: own[who] for who in members if who in own}
        for who, own_s in known.items():
            # With its own time among them, the median of two workers would follow the slow one.
            others = [seconds for other, seconds in known.items() if other != who]
            middle = median_low(others) if others else 0.0
            if middle > 0 and own_s > max(FACTOR * middle, middle + LEAST_S):
                found.append(Straggler(who, own_s, middle))
    return found


def _compared(topology: Topology) -> Iterator[list[str]]:
    groups = [list(map(str, topology.workers(group))) for group in range(topology.worker_groups)]
    yield from groups if topology.workers_per_group > 1 else [[who for group in groups for who in group]]
