"""The processes of a job, as its events tell of them.

The terminal, the report, the page and the metrics all stand on this one fold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from topotrain.config.topology import Address, Role
from topotrain.core.events import (
    Connects,
    Ending,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Incident,
    Joined,
    Left,
    Lost,
    Resources,
    ServerLoad,
    Serving,
    Slices,
    Started,
    StepDone,
    Thawed,
    Waits,
)
from topotrain.tools.recording.history_series import StateTrack
from topotrain.tools.recording.process_figures import RateWindow, ServerFigures, WorkerFigures
from topotrain.tools.recording.recorded_lines import residents

_ENDED = {"finished": "finished", "away": "away"}


class ProcessPhase(Enum):
    ABSENT = 0
    STARTED = 1
    CONNECTED = 2
    TRAINING = 3
    OVER = 4


@dataclass(slots=True)
class ProcessTrack:
    """One worker or server of the layout over time.

    since: when it last made progress. waits: it has reported that it waits itself. again: it was started before.
    ending: how it has ended; "": it has not.
    """

    who: str
    address: Address
    unit: int
    host: str
    since: float = 0.0
    phase: ProcessPhase = ProcessPhase.ABSENT
    waits: bool = False
    frozen: bool = False
    again: bool = False
    ending: str = ""
    pid: int | None = None
    step: int = 0
    """The last step of the present process."""
    memory_bytes: int | None = None
    slices: list[dict[str, Any]] = field(default_factory=list)
    states: StateTrack = field(default_factory=StateTrack)
    figures: WorkerFigures = field(default_factory=WorkerFigures)
    """Of a worker; they stay when it starts again."""
    load: ServerFigures = field(default_factory=ServerFigures)
    stopped_with_job: bool = False
    """Whether the process took part until the job ended."""
    sent: RateWindow = field(default_factory=RateWindow)
    """The bytes to all other processes."""

    @property
    def is_server(self) -> bool:
        return self.address.role is Role.SERVER

    @property
    def group(self) -> int:
        return self.address.group

    @property
    def word(self) -> str:
        """The state in a word, for the terminal."""
        if self.phase is ProcessPhase.ABSENT:
            return "starting"
        return self.ending or ("training" if self.phase is ProcessPhase.TRAINING else "preparing")

    @property
    def state(self) -> str:
        """The state as the page has it; "": nothing is known yet."""
        if self.ending:
            return _ENDED.get(self.ending, "dead")
        if self.frozen:
            return "stopped"
        if self.waits:
            return "waits"
        if self.phase is ProcessPhase.TRAINING:
            return "computes" if not self.is_server else "applies" if self.load.works else "waits"
        return "" if self.phase is ProcessPhase.ABSENT else "restarts" if self.again else "starting"

    @property
    def is_present(self) -> bool:
        """Whether the process takes part in the job."""
        return self.states.now not in ("dead", "away", "finished", "")

    @property
    def counts(self) -> bool:
        """Whether the job counts its last figures: it was not lost, and has not left."""
        return self.is_present or self.states.now == "finished" or self.stopped_with_job

    @property
    def progress(self) -> int:
        """The steps of a worker, or the updates of a server."""
        return self.load.updates if self.is_server else self.figures.step

    def on_event(self, event: Event, now: float) -> None:
        """Record an event of the process."""
        match event:
            case StepDone():
                self.figures.on_step(now, event)
                self.step = event.step
                self._reach(ProcessPhase.TRAINING, now)
            case Started(pid=pid):
                self._start(pid, now)
            case Serving(pid=pid):
                self._start(pid, now)
                self._reach(ProcessPhase.TRAINING, now)
            case Connects():
                self._reach(ProcessPhase.CONNECTED, now)
            case Waits():
                self.waits, self.frozen = True, False
            case ServerLoad():
                self.load.on_load(now, event)
                self.frozen = False
                if self.phase in (ProcessPhase.ABSENT, ProcessPhase.OVER):
                    self._reach(ProcessPhase.TRAINING, now)
            case Resources():
                self.memory_bytes = event.memory_bytes
                self.load.on_resources(now)
            case Slices():
                parts = zip(event.names, event.first, event.count, strict=False)
                self.slices = [{"name": name, "first": first, "count": count} for name, first, count in parts]
            case Frozen() | Thawed():
                self.frozen = isinstance(event, Frozen)
            case Finished():
                self.figures.on_finished(event)
                self.step = event.steps
                self.end("finished", now)
            case Ending():
                # The process is still there.
                self.ending = "finished"
            case Failed():
                self.end("failed", now)
            case Lost() | Incident():
                self.end("failed" if self.ending == "failed" else "stopped", now)
            # The exit of a former process may come behind the start of its successor. A worker that has failed has
            # reported it; the others are being stopped.
            case Exited(pid=pid, code=code) if self.pid in (None, pid) and self.phase is not ProcessPhase.OVER:
                self.end(self.ending or ("stopped" if code else "finished"), now)
            case _:
                pass

    def _start(self, pid: int, now: float) -> None:
        if pid == self.pid and self.phase not in (ProcessPhase.ABSENT, ProcessPhase.OVER):
            return
        self.again = self.pid is not None and self.phase is not ProcessPhase.ABSENT and self.ending != "away"
        if pid != self.pid:
            self.pid, self.step, self.sent = pid, 0, RateWindow()
        self._reach(ProcessPhase.STARTED, now)

    def place(self, unit: int, host: str) -> None:
        self.unit, self.host = unit, host

    def begin(self, now: float) -> None:
        if self.phase is ProcessPhase.ABSENT:
            self.since = now

    def join(self, now: float) -> None:
        self.again = False
        self._reach(ProcessPhase.STARTED, now)

    def end(self, ending: str, now: float, with_job: bool = False) -> None:
        """Record how it has ended. with_job: it took part until the job ended."""
        self._reach(ProcessPhase.OVER, now)
        self.ending, self.stopped_with_job = ending, with_job

    def _reach(self, phase: ProcessPhase, now: float) -> None:
        # First: the thread that draws reads without a lock, and must see no long wait where there is none.
        self.since = now
        self.phase, self.ending, self.waits, self.frozen, self.stopped_with_job = phase, "", False, False, False

    @property
    def bytes_per_s(self) -> float | None:
        """The present rate of bytes to all other processes."""
        grown = self.sent.grown()
        return None if grown is None or grown[0] <= 0 else grown[1][0] / grown[0]

    def as_data(self) -> dict[str, Any]:
        of = {"role": "server" if self.is_server else "worker", "group": self.group, "index": self.address.index}
        place = {"unit": self.unit, "host": self.host, "pid": self.pid}
        return {"name": self.who, **of, **place, **({"slices": self.slices} if self.is_server else {})}


class ProcessTable:
    """The processes of the present layout. All times are of one clock."""

    def __init__(self) -> None:
        self._processes: Mapping[str, ProcessTrack] = {}
        self._groups: dict[int, list[ProcessTrack]] = {}
        """The workers of each group."""
        self.servers_in_workers = False
        """Whether servers have no process of their own."""

    @property
    def by_name(self) -> Mapping[str, ProcessTrack]:
        """The processes by name, in layout order."""
        return self._processes

    def all(self) -> Collection[ProcessTrack]:
        return self._processes.values()

    def workers(self) -> Sequence[ProcessTrack]:
        return [process for process in self.all() if not process.is_server]

    def alone(self) -> Sequence[ProcessTrack]:
        """Return the processes, without servers inside those of workers."""
        return self.workers() if self.servers_in_workers else list(self.all())

    def group(self, number: int) -> Sequence[ProcessTrack]:
        return self._groups.get(number, ())

    def use(self, layout: Mapping[str, Any], now: float) -> None:
        """Use a recorded layout from now on. The tracks of processes that stay are kept."""
        known, processes, self._groups = self._processes, dict[str, ProcessTrack](), {}
        for address, unit, host in residents(layout):
            name = str(address)
            track = processes[name] = known.get(name) or ProcessTrack(name, address, unit, host, now)
            track.place(unit, host)
            if not track.is_server:
                self._groups.setdefault(address.group, []).append(track)
        self.servers_in_workers = layout.get("servers_in_workers") is True
        # Replaced as a whole: the thread that draws reads it without a lock.
        self._processes = processes

    def on_event(self, event: Event, now: float) -> Collection[ProcessTrack]:
        """Record an event, and return the processes that it is about."""
        who = getattr(event, "who", "")
        process = self._processes.get(who)
        if process is not None:
            found: Collection[ProcessTrack] = (process,)
            if process.is_server and isinstance(event, Started):
                # One process has all servers of its unit, and the name of the first.
                found = [each for each in self.all() if each.is_server and each.unit == process.unit]
            for each in found:
                each.on_event(event, now)
            return found
        match event:
            case Left(group=group):
                return _ended(self.group(group), "away", now)
            case Joined(group=group):
                for each in self.group(group):
                    each.join(now)
                return self.group(group)
            case Failed() | Lost() if who.startswith("unit "):
                left = [each for each in self._of_unit(who) if each.ending not in ("finished", "away")]
                return _ended(left, "failed", now)
            case Started() if who.startswith("unit "):
                for each in self._of_unit(who):
                    each.begin(now)
        return ()

    def inside(self, worker: ProcessTrack) -> Iterable[ProcessTrack]:
        """Return the servers inside a worker's process."""
        for each in self.all() if self.servers_in_workers and not worker.is_server else ():
            if each.is_server and each.unit == worker.unit and each.address.index in (worker.address.index, 0):
                yield each

    def _of_unit(self, who: str) -> Iterable[ProcessTrack]:
        return (each for each in self.all() if f"unit {each.unit}" == who)


def _ended(processes: Collection[ProcessTrack], ending: str, now: float) -> Collection[ProcessTrack]:
    for each in processes:
        each.end(ending, now)
    return processes
