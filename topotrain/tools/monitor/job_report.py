"""The report of a job: events in, plain data out.

`--report` writes it as JSON, and `compare` tabulates it.

* Counters in events are cumulative. The last one of a resident counts, so lost events do no harm.
* The counts of a restarted resident include work that was done twice.
* `samples` counts the samples in the final values, each once. The servers report that number at the end.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from time import monotonic
from typing import Any, TypeVar

from topotrain.config.job import Job
from topotrain.config.slice_size import slice_bytes
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import (
    Apart,
    Counted,
    Event,
    Failed,
    Final,
    Incident,
    Joined,
    LastingNotice,
    Left,
    Metrics,
    Output,
    Recovered,
    Resized,
    Rounds,
    Skipped,
    Started,
    StateTaken,
    StepDone,
    Tabled,
    Tested,
)
from topotrain.launch import JobOutcome
from topotrain.launch.agent.workspace import LOGS, log_name
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.monitor.loss_curves import Point, merge
from topotrain.tools.monitor.process_tally import (
    ProcessCounts,
    ProcessTally,
    Straggler,
    round_report,
    stragglers,
)
from topotrain.tools.recording.event_stories import moved
from topotrain.tools.recording.job_summary import finite, mean_loss
from topotrain.tools.recording.process_table import ProcessTable
from topotrain.tools.recording.recorded_lines import layout_data

_FIRST = Address(Role.WORKER, 0, 0)
_KEPT = (Final, Incident, Joined, LastingNotice, Left, Metrics, Recovered, Resized, StateTaken, Tabled, Tested)
"""Events of which the report needs each one."""
_E = TypeVar("_E", bound=Event)
_MOST_SKIPS = 100  # step numbers kept of each worker


@dataclass(slots=True)
class _Skips:
    """A worker's skipped steps: their number, and the last ones by step number."""

    before: int = 0  # of former processes
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_SKIPS))
    last: Skipped | None = None

    def record(self, event: Skipped) -> None:
        # The number does not grow only where a new process counts from 1 again.
        if self.last is not None and event.total <= self.last.total:
            self.before += self.last.total
        self.steps.append(event.step)
        self.last = event

    def as_data(self, who: str) -> dict[str, Any]:
        """Return the count, the steps, and the worker and parameter of the last one."""
        assert self.last is not None
        by, parameter = self.last.by or None, self.last.parameter or None
        return {
            "who": who,
            "count": self.before + self.last.total,
            "steps": list(self.steps),
            "by": by,
            "parameter": parameter,
        }


class Report:
    """Collects the events of a job. `as_data` returns the report when the job is over."""

    def __init__(self, job: Job, topology: Topology) -> None:
        self.job = job
        self.states = ProcessTable()
        """The processes, for displays."""
        self._tallies: dict[str, ProcessTally] = {}  # also of those that have left
        self._lay_out(topology)
        self._counted: dict[str, int] = {}  # worker -> its samples as its server has counted them
        self._kept: list[Event] = []
        self._apart: dict[str, Apart] = {}
        self._skips: dict[str, _Skips] = {}
        self._rounds: Rounds | None = None

    @property
    def stragglers(self) -> list[Straggler]:
        return stragglers(self.topology, self._own_s())

    def __call__(self, event: Event) -> None:
        for process in self.states.on_event(event, monotonic()):
            self._tallies[process.who].take(process.pid, event)
        if isinstance(event, StepDone | Output):
            return  # most events are of these
        if isinstance(event, _KEPT):
            self._kept.append(event)
        match event:
            case Counted():
                self._counted.update(event.samples)
            case Apart():
                self._apart[event.who] = event
            case Skipped():
                self._skips.setdefault(event.who, _Skips()).record(event)
            case Resized():
                self._lay_out(resized_layout(self.topology, event.workers))
            case Rounds():
                self._rounds = event
            case Started():
                self._trains_on(event.who)
            case _:
                pass

    def _all(self, kind: type[_E]) -> list[_E]:
        return [event for event in self._kept if isinstance(event, kind)]

    def _lay_out(self, topology: Topology) -> None:
        """Count for all processes of a layout; those that have left may be back."""
        self.topology = topology
        self.states.use(layout_data(topology), monotonic())
        # The loss curve of a worker that joins starts here.
        begun = ProcessCounts(time=max((tally.whole.time for tally in self._tallies.values()), default=0.0))
        for who in self.states.by_name:
            self._tallies.setdefault(who, ProcessTally(before=begun))

    def _trains_on(self, who: str) -> None:
        """Drop the server's counts of a group after a restart."""
        # The server reports them again at the end, with the samples of the new processes.
        group = who.partition("/")[0]
        self._counted = {known: count for known, count in self._counted.items() if known.partition("/")[0] != group}

    def _samples(self, who: str, tally: ProcessTally) -> int:
        """Return the samples of a worker, as counted by its server or else by itself."""
        if who in self._counted:
            return self._counted[who]
        # The count of worker (0,0) includes the samples of workers that have left.
        gone = str(_FIRST) in self._counted and who not in self.states.by_name
        return 0 if gone else tally.whole.samples

    def curve(self, bins: int = 60) -> list[Point]:
        """Return the loss over time (seconds since the first step)."""
        groups = range(self.topology.worker_groups)
        tallies = self._tallies
        by_group = [[tallies[str(w)].curve for w in self.topology.workers(g)] for g in groups]
        # Groups step at a pace of their own, so each counts once per bin, however many of its workers report.
        return merge([merge(curves, bins) for curves in by_group], bins)

    def as_data(self, outcome: JobOutcome) -> dict[str, Any]:
        """Return the whole report; `wall_seconds` includes the job's start and end."""
        tallies, tests = self._tallies, self._all(Tested)
        changes: list[Left | Joined] = [*self._all(Left), *self._all(Joined)]
        recovered = {each.number: each for each in self._all(Recovered)}
        workers = [tally for who, tally in tallies.items() if who.startswith("worker ")]
        # The longest training time of a worker, from its first step on.
        seconds = max((tally.whole.time for tally in workers), default=0.0)
        # With work that was done twice: the rate is that of the hardware, while `samples` is that of the result.
        given = sum(tally.whole.samples for tally in workers)
        return {
            "job": self.job.name,
            "program": self.job.program,
            "args": list(self.job.args),
            "framework": self.topology.framework,
            "workspace": self.job.workspace,
            "code": outcome.code,
            "cause": None if outcome.cause is None else asdict(outcome.cause),
            "layout": self.topology.as_data(),
            "slice_bytes": slice_bytes(self.topology),
            "seconds": seconds,
            "wall_seconds": outcome.seconds,
            "steps": max((tally.whole.steps for tally in workers), default=0),
            "samples": sum(self._samples(who, each) for who, each in tallies.items() if who.startswith("worker ")),
            "samples_per_s": given / seconds if seconds > 0 else 0.0,
            # Without workers that have left: their last losses are of an earlier time.
            "last_loss": finite(mean_loss(self.states.workers())),
            "metrics": {name: finite(value) for each in self._all(Metrics) for name, value in each.values.items()},
            "tests": _points([test for test in tests if test.kind == "test"]),
            "validations": _points([test for test in tests if test.kind == "validate"]),
            "evaluations_skipped": max((test.skipped for test in tests), default=0),
            **_staleness(workers),
            "server_groups_apart": _apart(list(self._apart.values())),
            "rounds": round_report(self._rounds, self._all(StateTaken), tallies),
            **_traffic(list(tallies.values())),
            "tables": _tables(self._all(Tabled)),
            "final": next((each.path for each in reversed(self._all(Final))), None),
            "skipped": [self._skips[who].as_data(who) for who in sorted(self._skips)],
            "notices": list(dict.fromkeys(each.text for each in self._all(LastingNotice))),
            "incidents": [incident(found, recovered.get(found.number)) for found in self._all(Incident)],
            "groups": [_change(found) for found in sorted(changes, key=attrgetter("at_s"))],
            "changes": [_resize(found, recovered.get(found.number)) for found in self._all(Resized)],
            **self._paces(),
            "processes": self._processes(),
        }

    def _own_s(self) -> dict[str, float]:
        """Return each worker's own seconds for a step, as far as they are known."""
        lasts = {who: tally.last for who, tally in self._present().items()}
        return {who: last.own_s for who, last in lasts.items() if last is not None and last.own_s is not None}

    def _present(self) -> dict[str, ProcessTally]:
        return {worker.who: self._tallies[worker.who] for worker in self.states.workers()}

    def _paces(self) -> dict[str, Any]:
        """Return each worker's own seconds for a step, threads, late steps; stragglers."""
        tallies = self._present()
        return {
            "own_step_s": self._own_s(),
            "threads": {who: each.last.threads for who, each in tallies.items() if each.last and each.last.threads},
            "stragglers": [slow.as_data() for slow in self.stragglers],
            "late": {who: late for who, each in tallies.items() if (late := each.whole.late)},
        }

    def _processes(self) -> list[dict[str, Any]]:
        tallies = self._tallies
        found: dict[tuple[int, int], list[Address]] = {}
        for unit in self.topology.units:
            for resident in (*unit.workers, *unit.servers):
                pid = tallies[str(resident)].pid
                if pid is not None:
                    # By unit, too: processes on different machines may have the same pid.
                    found.setdefault((unit.rank, pid), []).append(resident)
        return [self._process(unit, pid, residents) for (unit, pid), residents in found.items()]

    def _process(self, unit: int, pid: int, residents: Sequence[Address]) -> dict[str, Any]:
        workers = [r for r in residents if r.role is Role.WORKER]
        known = self._tallies
        tallies = [known[str(r)] for r in residents]
        return {
            "unit": unit,
            "rank": workers[0].group * self.topology.workers_per_group + workers[0].index if workers else None,
            "pid": pid,
            "workers": [[r.group, r.index] for r in workers],
            "servers": [[r.group, r.index] for r in residents if r.role is Role.SERVER],
            "steps": max(tally.whole.steps for tally in tallies),
            "samples": sum(self._samples(str(r), known[str(r)]) for r in workers),
            **_traffic(tallies),
            **_staleness(tallies),
        }


@dataclass(frozen=True, slots=True)
class JobResult:
    outcome: JobOutcome
    report: Report


def incident(found: Incident, recovered: Recovered | None) -> dict[str, Any]:
    """Return a loss, the action, and how long training waited (null: it did not)."""
    return {
        "who": found.who,
        "what": found.what,
        "action": found.action,
        "at_s": found.at_s,
        "waited_s": None if recovered is None else recovered.waited_s,
        "others_waited_s": None if recovered is None else recovered.others_s,
    }


def _change(found: Left | Joined) -> dict[str, Any]:
    what = found.how if isinstance(found, Left) else f"joins (incarnation {found.incarnation})"
    return {"group": found.group, "what": what, "at_s": found.at_s}


def _resize(found: Resized, recovered: Recovered | None) -> dict[str, Any]:
    """Return a resize; waited_s: null if training never continued."""
    waited_s = None if recovered is None else recovered.waited_s
    sizes = {"workers": found.workers, "step": found.step}
    return {"what": moved(found), **sizes, "at_s": found.at_s, "waited_s": waited_s}


def _points(tests: Sequence[Tested]) -> list[dict[str, Any]]:
    return [{"step": one.step} | {name: finite(value) for name, value in one.values.items()} for one in tests]


def _tables(held: Sequence[Tabled]) -> list[dict[str, Any]]:
    tables = {name: [one for one in held if one.table == name] for name in dict.fromkeys(one.table for one in held)}
    return [
        {
            "name": name,
            "rows": sum(one.rows for one in some),
            "bytes": sum(one.bytes for one in some),
            "servers": [{"server": one.who, "rows": one.rows, "bytes": one.bytes} for one in some],
        }
        for name, some in tables.items()
    ]


def _staleness(tallies: Sequence[ProcessTally]) -> dict[str, Any]:
    """Return the mean over steps, and the maximum."""
    steps = sum(tally.whole.steps for tally in tallies)
    total = sum(tally.whole.stale for tally in tallies)
    return {
        "staleness_mean": total / steps if steps else 0.0,
        "staleness_max": max((tally.whole.staleness_max for tally in tallies), default=0),
    }


def _apart(servers: Sequence[Apart]) -> dict[str, Any] | None:
    """Return the distance between server groups over all exchanges, or None."""
    exchanges = sum(one.exchanges for one in servers)
    if not exchanges:
        return None
    # The mean of squares over all exchanges, because each server reports a root mean square.
    squares = sum(one.exchanges * one.share**2 for one in servers)
    return {
        "exchanges": exchanges,
        "updates_mean": sum(one.exchanges * one.updates_mean for one in servers) / exchanges,
        "updates_max": max(one.updates_max for one in servers),
        "share": finite(math.sqrt(squares / exchanges)),
    }


def _traffic(tallies: Sequence[ProcessTally]) -> dict[str, int]:
    counts = [tally.whole for tally in tallies]
    return {name: sum(getattr(count, name) for count in counts) for name in ("bytes_out", "bytes_in", "bytes_link")}


def story(cause: Failed, job: Job, topology: Topology) -> str:
    residents = {str(r): r for unit in topology.units for r in (*unit.workers, *unit.servers)}
    resident = residents.get(cause.who)
    unit = f" (unit {topology.unit_of(resident)})" if resident else ""
    # Some causes name their process themselves.
    named = cause.text.startswith(cause.who)
    head = cause.text if named else f"{cause.who}{unit} {_DEEDS.get(cause.kind, 'failed')}: {cause.text}"
    log = f"{job.workspace}/{LOGS}" + (f"/{log_name(resident, topology.unit_of(resident))}" if resident else "")
    return "\n".join([head, *cause.traceback.splitlines(), f"log: {log}"])


_DEEDS = {"died": "died", "config": "refused the job", "peer": "lost a peer"}
