"""The processes of a job for report and terminal: phases, figures and counters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from topotrain.config.topology import Role, Topology
from topotrain.core.events import (
    Connects,
    Event,
    Exited,
    Failed,
    Finished,
    Left,
    LocalSteps,
    Resized,
    Serving,
    Started,
    StepDone,
    Waits,
)
from topotrain.launch.recovery.resize import resized_layout
from topotrain.tools.monitor.progress.process_tally import ProcessCounts, ProcessTally
from topotrain.tools.recording.process_figures import WorkerFigures


class ProcessPhase(Enum):
    """The phases of a worker or a server."""

    ABSENT = 0
    STARTED = 1
    CONNECTED = 2
    TRAINING = 3
    OVER = 4


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The phase of a worker or server, and the time of its last progress.

    figures: of a worker, those that the page has, too; they stay when it starts again. tally: its counters.
    is_shown: it is in the present layout, and no server in a worker's process or without any.
    """

    who: str
    unit: int
    is_server: bool
    group: int
    is_shown: bool = True
    phase: ProcessPhase = ProcessPhase.ABSENT
    since: float = 0.0
    waits: bool = False
    """The worker has reported that it waits itself."""
    ending: str = ""
    """How it has ended."""
    figures: WorkerFigures = field(default_factory=WorkerFigures)
    tally: ProcessTally = field(default_factory=ProcessTally)

    @property
    def step(self) -> int:
        """The last step of the present process."""
        return self.tally.step

    @property
    def word(self) -> str:
        """The state in a word."""
        if self.phase is ProcessPhase.ABSENT:
            return "starting"
        return self.ending or ("training" if self.phase is ProcessPhase.TRAINING else "preparing")


class ProcessStates:
    """Follows the processes of a layout. All times are of one clock.

    Args:
        topology: the layout of the job.
        now: the time.
    """

    def __init__(self, topology: Topology, now: float) -> None:
        self._states: dict[str, ProcessState] = {}
        self._lay_out(topology, now)

    def _lay_out(self, topology: Topology, now: float) -> None:
        """Use this layout from now on. Processes that stay, and all counters, are kept."""
        self.topology, states = topology, {}
        hidden, former = topology.inline or topology.collective, self._states
        # The loss curve of a worker that joins starts here.
        begun = ProcessCounts(time=max((tally.whole.time for tally in self.tallies().values()), default=0.0))
        for unit in topology.units:
            for resident in (*unit.servers, *unit.workers):
                who, is_server = str(resident), resident.role is Role.SERVER
                known = former.get(who)
                tally = ProcessTally(before=begun) if known is None else known.tally
                if known is None or not known.is_shown:
                    shown = not (is_server and hidden)
                    known = ProcessState(who, unit.rank, is_server, resident.group, shown, since=now, tally=tally)
                states[who] = replace(known, unit=unit.rank)
        left = {who: replace(state, is_shown=False) for who, state in former.items() if who not in states}
        # Replaced as a whole, and so is each state: the thread that draws reads them without a lock.
        self._states = states | left

    def all(self) -> Sequence[ProcessState]:
        """Return the states that are shown, in layout order."""
        return [state for state in self._states.values() if state.is_shown]

    def workers(self) -> Sequence[ProcessState]:
        """Return the states of the workers, in layout order."""
        return [state for state in self.all() if not state.is_server]

    def tallies(self) -> dict[str, ProcessTally]:
        """Return counters of workers and servers by name, also of those that have left."""
        return {who: state.tally for who, state in self._states.items()}

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        if isinstance(event, StepDone | Finished | LocalSteps) and event.who in self._states:
            self._states[event.who].tally.record(event)
        match event:
            case StepDone(who=who) if who in self._states:
                state = self._states[who]
                state.figures.on_step(now, event)
                self._states[who] = replace(state, phase=ProcessPhase.TRAINING, since=now, waits=False, ending="")
            case Resized(workers=workers):
                self._lay_out(resized_layout(self.topology, workers), now)
            case Started(who=who, pid=pid):
                self._start(who, pid, now)
            case Serving(who=who, pid=pid) if who in self._states:
                self._states[who].tally.start(pid)
                self._enter(who, ProcessPhase.TRAINING, now)
            case Connects(who=who):
                self._enter(who, ProcessPhase.CONNECTED, now)
            case Waits(who=who) if who in self._states:
                self._states[who] = replace(self._states[who], waits=True)
            case Finished(who=who) if who in self._states:
                self._states[who].figures.on_finished(event)
                self._enter(who, ProcessPhase.OVER, now, "finished")
            case Failed(who=who):
                self._enter(who, ProcessPhase.OVER, now, "failed")
            case Exited(who=who, pid=pid) if who in self._states and self._states[who].tally.pid in (None, pid):
                # A failed worker has reported it; the others are being stopped.
                stops = event.code != 0 and self._states[who].ending != "failed"
                self._enter(who, ProcessPhase.OVER, now, "stopped" if stops else self._states[who].ending or "finished")
            case Left(group=group):
                for who in [who for who in self._states if who.startswith(f"worker {group}/")]:
                    self._enter(who, ProcessPhase.OVER, now, "away")
            case _:
                pass

    def _start(self, who: str, pid: int, now: float) -> None:
        state = self._states.get(who)
        if who.startswith("unit "):
            for absent in [s for s in self._states.values() if f"unit {s.unit}" == who]:
                if absent.phase is ProcessPhase.ABSENT:
                    self._states[absent.who] = replace(absent, since=now)
        elif state is not None:
            # One process has all servers of its unit, and the name of the first.
            also = [s.who for s in self._states.values() if s.unit == state.unit and s.is_server and state.is_server]
            for each in {who, *also}:
                self._states[each].tally.start(pid)
                self._states[each] = replace(self._states[each], waits=False)
                self._enter(each, ProcessPhase.STARTED, now)

    def _enter(self, who: str, phase: ProcessPhase, now: float, ending: str = "") -> None:
        if who in self._states:
            self._states[who] = replace(self._states[who], phase=phase, since=now, ending=ending)


def describe(workers: Sequence[ProcessState]) -> str:
    """Describe all workers in one line."""
    low, high = min(each.figures.step for each in workers), max(each.figures.step for each in workers)
    steps = f"step {high}" if low == high else f"steps {low} to {high}"
    # As on the page: those of dead and absent workers are figures of an earlier time.
    counted = [each for each in workers if each.ending not in ("failed", "away")]
    losses = [each.figures.loss for each in counted if each.figures.loss is not None]
    loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
    active = [each for each in counted if each.word == "training"] or counted
    rate = sum(each.figures.samples_per_s or 0.0 for each in active)
    mean = sum(each.figures.staleness_mean for each in workers) / len(workers)
    worst = max(each.figures.staleness_max for each in workers)
    counts: dict[str, int] = {}
    for each in workers:
        counts[each.word] = counts.get(each.word, 0) + 1
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{steps}  {loss}{rate:,.0f} samples/s  staleness {mean:.2f} (max {worst})  workers: {states}"
