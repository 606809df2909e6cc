"""The state of a job's present attempt: its processes and their reports.

This module is pure: it receives events and the time.
"""

from collections.abc import Collection, Iterable

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Exited, Failed, Frozen, Lost, Started, Thawed

LEASE_S = 2.0
"""Seconds for which a process may be stopped. A user can stop it for a moment without causing a restart."""
RETRY_S = 1.0
"""Seconds after which a start that has failed is tried again. A limit of processes or memory may be over by then."""
START_S = 60.0
"""Seconds within which a process that restarts must have been forked."""
SERVERS_S = 20.0
"""Seconds for the servers to end after the last worker."""


class OverdueProcesses:
    """The processes that count as lost at some time, and why.

    They are stopped (SIGSTOP), could not be started, or have to start until then. The kernel reports to the parent when
    a child stops and continues, so no process is polled.
    """

    def __init__(self) -> None:
        self._late: dict[str, tuple[Failed, float, float]] = {}  # the loss, since when, and when it counts

    @property
    def due(self) -> float | None:
        """The time at which the first of them counts as lost."""
        return min((until for _, _, until in self._late.values()), default=None)

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            # A process that a debugger holds is not reported, and so has no time limit.
            case Frozen(who=who, pid=pid):
                # A process that stops again has continued in between, so its time starts anew.
                self.add(who, f"{who} (pid {pid}) was frozen for {LEASE_S:g} s and was ended", now, LEASE_S)
            case Lost(who=who, pid=0, text=text, log=log):
                self.add(who, text, now, RETRY_S, log)
            case Thawed(who=who) | Started(who=who) | Exited(who=who):
                self.forget(who)
            case _:
                pass

    def add(self, who: str, text: str, now: float, within_s: float, log: str = "") -> None:
        """Record that a process counts as lost after so many seconds."""
        self._late[who] = Failed(who, "died", text, log), now, now + within_s

    def forget(self, who: str) -> None:
        """Forget a process in any state."""
        self._late.pop(who, None)

    def expired(self, now: float) -> list[tuple[Failed, float]]:
        """Return, and forget, the losses that count by now, and since when."""
        found = [(lost, since) for lost, since, until in self._late.values() if now >= until]
        for lost, _ in found:
            # Reported once: `poll` comes again before the process has ended.
            self.forget(lost.who)
        return found


class AttemptState:
    """The processes of the present attempt.

    Args:
        topology: the layout of the whole job.
        absent: the worker groups that have no processes.
    """

    def __init__(self, topology: Topology, absent: Collection[int] = ()) -> None:
        self._polled = 0.0
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
        self.repeatable: dict[str, str] = {}
        """Of the workers that have reported it: why their script cannot repeat a step; "": it can."""
        self.overdue = OverdueProcesses()
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

    def limit_servers(self, now: float) -> None:
        """Record that the servers have to end, if this was the last worker."""
        for who in () if self.up & self.group_of.keys() else sorted(self.up):
            self.overdue.add(who, f"{who} did not end within {SERVERS_S:g} s after the last worker", now, SERVERS_S)

    def lose_unit(self, rank: int) -> set[str]:
        """Record the loss of a unit; return its processes."""
        gone = self.residents_of(rank)
        self.lost_units.add(rank)
        self.up -= gone
        # A process that was about to start in this unit does not come any more.
        self.leaving -= gone
        for who in gone:
            self.overdue.forget(who)
        return gone

    def on_repeatable(self, who: str, reason: str) -> None:
        """Record whether a worker's script can repeat a step."""
        # A reason stays: a script that has broken a rule once may do so again.
        self.repeatable[who] = self.repeatable.get(who) or reason

    def survivors(self, group: int, lost: str) -> set[str]:
        """Return the workers that can go on without a lost one of their group.

        None of them can if one cannot.
        """
        # A worker that is about to restart, or has not made a step again, takes no part in the present step.
        there = self.members(group) & self.up & self.repeatable.keys() - self.leaving - {lost}
        return set() if any(self.repeatable[who] for who in there) else there

    def not_started(self, who: str) -> None:
        """Record that a process could not start. It is retried when it counts as lost."""
        self.leaving.add(who)
        self.up.discard(who)

    def take_overdue(self, now: float) -> list[tuple[Failed, float]]:
        """Return the losses that count by now, and since when."""
        self._polled = now
        found = self.overdue.expired(now)
        # The report is about the process that was to start, and no longer about its predecessor.
        self.leaving -= {lost.who for lost, _ in found}
        return found

    def move(self, who: str, rank: int, now: float) -> None:
        """Record that a process restarts, in this unit."""
        self._unit_of[who] = rank
        self._await_start({who}, now)

    def _await_start(self, members: set[str], now: float) -> None:
        # From here on losses of these processes are those of the former ones, until the new ones have started.
        self.leaving |= members
        self.up |= members
        # Nothing else would notice that one never does, as where the former process cannot be killed.
        # A loss may be older than the poll that reports it, and the new start has its full time from that poll on.
        since = max(now, self._polled)
        for who in sorted(members):  # a policy that receives all again decides alike
            self.overdue.add(who, f"{who} could not be started within {START_S:g} s", since, START_S)

    def restart(self, group: int, members: set[str], now: float) -> int:
        """Record that these workers of a group restart; return their incarnation."""
        # What the former processes have reported must not be counted against the new ones.
        self.forget(members)
        self._await_start(members, now)
        self.finished -= members
        for who in members:
            self.repeatable.pop(who, None)
        self.incarnations[group] = self.incarnations.get(group, 0) + 1
        return self.incarnations[group]

    def dismiss(self, who: Collection[str]) -> None:
        """Record that these processes are ended because they have no work left."""
        # They count as finished, so their ends are no losses.
        self.finished.update(who)
        self.leaving.difference_update(who)
        for each in who:
            self.overdue.forget(each)

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
            self.overdue.forget(who)
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
