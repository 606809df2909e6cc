"""Processes that the kernel has stopped (SIGSTOP) and that count as lost in time.

The kernel reports to the parent when a child stops and continues, so no process is polled. A process that a debugger
holds is not reported, and has no time limit. This module is pure: it receives events and the time.
"""

from topotrain.core.events import Event, Exited, Failed, Frozen, Started, Thawed

LEASE_S = 2.0
"""Seconds for which a process may be stopped: a user who stops it for a moment must not cause a restart."""


class StoppedProcesses:
    """The processes that are stopped at present, with their pids and start times."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    @property
    def due(self) -> float | None:
        """The time at which the first of them counts as lost."""
        return min((since + LEASE_S for _, since in self._since.values()), default=None)

    def heard(self, event: Event, now: float) -> None:
        """Record an event.

        A process that stops again has continued in between.
        """
        match event:
            case Frozen(who=who, pid=pid):
                self._since[who] = pid, now
            case Thawed(who=who) | Started(who=who) | Exited(who=who):
                self.forget(who)
            case _:
                pass

    def forget(self, who: str) -> None:
        """Forget a process in any state."""
        self._since.pop(who, None)

    def over(self, now: float) -> list[tuple[Failed, float]]:
        """Return and forget the processes that were stopped for too long.

        Each comes with its failure, and the time since which it is stopped.
        """
        found = [(who, pid, since) for who, (pid, since) in self._since.items() if now >= since + LEASE_S]
        for who, _, _ in found:
            self.forget(who)
        return [(Failed(who, "died", _words(who, pid), ""), since) for who, pid, since in found]


def _words(who: str, pid: int) -> str:
    return f"{who} (pid {pid}) was frozen for {LEASE_S:g} s and was ended"
