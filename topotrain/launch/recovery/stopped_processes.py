"""Processes that the kernel has stopped (SIGSTOP): how long each may stay so before it counts as lost.

Rule: pure; it is told events and the time. The kernel tells a parent when a child stops and when it goes on, so nobody
asks whether a process is alive. One that a debugger holds is not told of, and may take its time.
"""

from topotrain.core.events import Event, Exited, Failed, Frozen, Started, Thawed

LEASE_S = 2.0
"""So long a process may be stopped: somebody who looks at it for a moment shall not cost the job a restart."""


class StoppedProcesses:
    """Who is stopped at present, with its pid, and since when."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    @property
    def due(self) -> float | None:
        """When the first of them has been stopped for long enough."""
        return min((since + LEASE_S for _, since in self._since.values()), default=None)

    def heard(self, event: Event, now: float) -> None:
        """Take an event; a process that stops again has gone on meanwhile."""
        match event:
            case Frozen(who=who, pid=pid):
                self._since[who] = pid, now
            case Thawed(who=who) | Started(who=who) | Exited(who=who):
                self.forget(who)
            case _:
                pass

    def forget(self, who: str) -> None:
        """Whatever happens to it now, it is no longer waited for."""
        self._since.pop(who, None)

    def over(self, now: float) -> list[tuple[Failed, float]]:
        """Who has been stopped for too long, as the words of its loss, and since when; they are forgotten."""
        found = [(who, pid, since) for who, (pid, since) in self._since.items() if now >= since + LEASE_S]
        for who, _, _ in found:
            self.forget(who)
        return [(Failed(who, "died", _words(who, pid), ""), since) for who, pid, since in found]


def _words(who: str, pid: int) -> str:
    return f"{who} (pid {pid}) was frozen for {LEASE_S:g} s and was ended"
