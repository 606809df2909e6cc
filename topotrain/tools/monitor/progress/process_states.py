"""The processes of a job as the terminal shows them: phases and figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from topotrain.config.topology import Role, Topology
from topotrain.core.events import Connects, Event, Exited, Failed, Finished, Left, Serving, Started, StepDone, Waits
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
    """The phase of a process, and the time of its last progress.

    figures: of a worker, those that the page has, too; they stay when it starts again.
    """

    who: str
    unit: int
    is_server: bool
    group: int
    phase: ProcessPhase = ProcessPhase.ABSENT
    since: float = 0.0
    step: int = 0
    waits: bool = False
    """The worker has reported that it waits itself."""
    pid: int | None = None
    ending: str = ""
    """How it has ended."""
    figures: WorkerFigures = field(default_factory=WorkerFigures)

    @property
    def word(self) -> str:
        """The state in a word."""
        if self.phase is ProcessPhase.ABSENT:
            return "starting"
        return self.ending or ("training" if self.phase is ProcessPhase.TRAINING else "preparing")


class ProcessStates:
    """Follows the processes of a layout. All times are of one clock.

    Args:
        topology: the layout, with the units that run here.
        now: the time.
    """

    def __init__(self, topology: Topology, now: float) -> None:
        self._states: dict[str, ProcessState] = {}
        self.lay_out(topology, now)

    def lay_out(self, topology: Topology, now: float) -> None:
        """Use this layout from now on. The states of processes that stay are kept."""
        states = {}
        self.topology = topology
        for unit in topology.units:
            # A server in a worker's process, or none at all, is no process of its own.
            servers = () if topology.inline or topology.collective else unit.servers
            for resident in (*servers, *unit.workers):
                who, is_server = str(resident), resident.role is Role.SERVER
                known = self._states.get(who, ProcessState(who, unit.rank, is_server, resident.group, since=now))
                states[who] = replace(known, unit=unit.rank)
        # Replaced as a whole, and so is each state: the thread that draws reads them without a lock.
        self._states = states

    def all(self) -> Sequence[ProcessState]:
        """Return all states, in layout order."""
        return list(self._states.values())

    def workers(self) -> Sequence[ProcessState]:
        """Return the states of the workers, in layout order."""
        return [state for state in self.all() if not state.is_server]

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            case StepDone(who=who, step=step) if who in self._states:
                state = self._states[who]
                state.figures.on_step(now, event)
                self._states[who] = replace(
                    state, phase=ProcessPhase.TRAINING, since=now, step=step, waits=False, ending=""
                )
            case Started(who=who, pid=pid):
                self._start(who, pid, now)
            case Serving(who=who):
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
            case Exited(who=who, pid=pid) if who in self._states and self._states[who].pid in (None, pid):
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
                self._states[each] = replace(self._states[each], step=0, waits=False, pid=pid)
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
