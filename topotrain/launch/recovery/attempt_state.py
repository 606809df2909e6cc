"""The state of a job's present attempt: its processes and their reports.

This module is pure: it receives events and the time.
"""

from collections.abc import Collection, Iterable

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Exited, Failed, Frozen, Started, Thawed

LEASE_S = 2.0
"""Seconds for which a process may be stopped. A user can stop it for a moment without causing a restart."""


class StoppedProcesses:
    """The processes that the kernel has stopped (SIGSTOP), with their pids and times.

    The kernel reports to the parent when a child stops and continues, so no process is polled.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    @property
    def due(self) -> float | None:
        """The time at which the first of them counts as lost."""
        return min((since + LEASE_S for _, since in self._since.values()), default=None)

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            # A process that a debugger holds is not reported, and so has no time limit.
            case Frozen(who=who, pid=pid):
                # A process that stops again has continued in between, so its time starts anew.
                self._since[who] = pid, now
            case Thawed(who=who) | Started(who=who) | Exited(who=who):
                self.forget(who)
            case _:
                pass

    def forget(self, who: str) -> None:
        """Forget a process in any state."""
        self._since.pop(who, None)

    def expired(self, now: float) -> list[tuple[Failed, float]]:
        """Return, and forget, failures of processes stopped for too long, and since when."""
        found = [(who, pid, since) for who, (pid, since) in self._since.items() if now >= since + LEASE_S]
        for who, _, _ in found:
            # Reported once: `poll` comes again before the process has ended.
            self.forget(who)
        text = "{} (pid {}) was frozen for {:g} s and was ended"
        return [(Failed(who, "died", text.format(who, pid, LEASE_S), ""), since) for who, pid, since in found]


class AttemptState:
    """The processes of the present attempt.

    Args:
        topology: the layout of the whole job.
        absent: the worker groups that have no processes.
    """

    def __init__(self, topology: Topology, absent: Collection[int] = ()) -> None:
        self.reset(topology, absent)

    def reset(self, topology: Topology, absent: Collection[int]) -> None:
        """Begin another attempt, possibly with another layout."""
        workers = [worker for unit in topology.units for worker in unit.workers]
        servers = [server for unit in topology.units for server in unit.servers]
        self.group_of = {str(worker): worker.group for worker in workers}
        self.residents = frozenset(map(str, (*workers, *servers)))
        self._unit_of = {str(who): unit.rank for unit in topology.units for who in (*unit.workers, *unit.servers)}
        self._ranks = {f"unit {unit.rank}": unit.rank for unit in topology.units}
        self.up = {who for who in self.residents if self.group_of.get(who) not in absent}
        """Residents with a process that has not ended, or is about to restart."""
        self.leaving: set[str] = set()
        """Restarting processes, until the new process has started."""
        self.finished: set[str] = set()
        self.incarnations: dict[int, int] = {}
        self.bounds: dict[bool, str] = {}
        """Reasons, found by scripts, why no group can restart alone (False) and why the job cannot restart (True)."""
        self.stopped = StoppedProcesses()
        self.lost_units: set[int] = set()
        self.missed: set[str] = set()
        """Servers that have lost the connection to another server that was not reported as ended."""
        self.held: list[Failed] = []
        """Errors that wait for a death that may have caused them."""
        self.held_until: float | None = None
        self.over = False
        """Whether the job ends, or this attempt does."""

    def end(self) -> None:
        """End the attempt: nothing restarts in it any more."""
        self.over, self.held_until = True, None

    def unit_of(self, who: str) -> int:
        """Return the rank of the unit of a process."""
        return self._unit_of[who]

    def residents_of(self, rank: int) -> set[str]:
        """Return the processes of a unit."""
        return {who for who, unit in self._unit_of.items() if unit == rank}

    def lost_units_of(self, group: int) -> list[int]:
        """Return the lost units that have workers of a group."""
        return sorted({self._unit_of[who] for who in self.members(group)} & self.lost_units)

    def members(self, group: int) -> set[str]:
        """Return the workers of a group."""
        return {who for who, number in self.group_of.items() if number == group}

    def started(self, who: str) -> None:
        """Record a process that has started."""
        self.leaving.discard(who)
        self.up.add(who)

    def exited(self, who: str) -> None:
        """Record the end of a process, or of a unit, which ends after its processes."""
        # A killed unit reports the end of none of its processes.
        self.up -= self.residents_of(self._ranks[who]) if who in self._ranks else {who}

    def lose_unit(self, rank: int) -> set[str]:
        """Record the loss of a unit; return its processes."""
        gone = self.residents_of(rank)
        self.lost_units.add(rank)
        self.up -= gone
        # A process that was about to start in this unit does not come any more.
        self.leaving -= gone
        for who in gone:
            self.stopped.forget(who)
        return gone

    def move(self, who: str, rank: int) -> None:
        """Record that a process restarts, in this unit."""
        self._unit_of[who] = rank
        self.stopped.forget(who)
        # Until the new process has started, reports under this name are about the former one.
        self.leaving.add(who)
        self.up.add(who)

    def restart(self, group: int, members: set[str]) -> int:
        """Record that these workers of a group restart; return their incarnation."""
        # What the former processes have reported must not be counted against the new ones.
        self.forget(members)
        # From here on losses of these workers are those of the former processes, until the new ones have started.
        self.leaving |= members
        self.up |= members
        self.finished -= members
        self.incarnations[group] = self.incarnations.get(group, 0) + 1
        return self.incarnations[group]

    def dismiss(self, who: Collection[str]) -> None:
        """Record that these processes are ended because they have no work left."""
        # They count as finished, so their ends are no losses.
        self.finished.update(who)
        self.leaving.difference_update(who)

    def hold(self, failed: Failed, until: float) -> None:
        """Hold an error back until a time; an earlier time limit stays."""
        self.held.append(failed)
        # A later error may be another consequence of the same death, which is reported by the first limit or never.
        self.held_until = self.held_until or until

    def release(self, now: float) -> list[Failed]:
        """Return the errors that have waited for long enough."""
        if self.held_until is None or now < self.held_until:
            return []
        held, self.held, self.held_until = self.held, [], None
        return held

    def forget(self, members: Iterable[str]) -> None:
        """Drop the reports of these workers, and the errors of servers about them."""
        members = set(members)
        for who in members:
            self.stopped.forget(who)
        # Errors of servers are dropped, too: they are about connections to the processes that restart.
        self._keep([held for held in self.held if held.who in self.group_of and held.who not in members])

    def forget_servers(self, servers: Collection[str]) -> None:
        """Drop what these servers have reported about lost connections."""
        self._keep([held for held in self.held if held.who not in servers])
        self.missed.clear()

    def _keep(self, held: list[Failed]) -> None:
        self.held = held
        # Without an error there is no timer, and the next error gets its full time.
        self.held_until = self.held_until if held else None
