"""Stall detection: which workers wait for which, when a job makes no steps.

The user gets a notice. Workers report long waits (`Waits`). The others wait for a worker that neither waits nor makes
steps: its program computes, reads its data, or hangs. This module is pure: it receives events and the time.
"""

from collections.abc import Collection

from topotrain.core.events import Event, Exited, Finished, Notice, Started, StepDone, Waits

GATHER_S = 1.0
"""Seconds after the first report of a wait, for the reports of workers that began to wait at about the same time."""
QUIET_S = 5.0
"""Seconds without a step after which the others may be waiting for a worker."""


class StallDetector:
    """Watches the workers of this host.

    Args:
        workers: their names.
    """

    def __init__(self, workers: Collection[str]) -> None:
        self._workers = frozenset(workers)
        self._waiting: dict[str, float] = {}
        self._stepped: dict[str, float] = {}
        self._gone: set[str] = set()
        self._due: float | None = None

    def on_event(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            case Waits(who=who, seconds=seconds):
                self._waiting[who] = seconds
                # Workers that began to wait at about the same time report within GATHER_S, so one notice names them
                # all.
                self._due = now + GATHER_S if self._due is None else self._due
            case StepDone(who=who):
                self._waiting.pop(who, None)
                self._stepped[who] = now
            case Started(who=who):
                self._waiting.pop(who, None)
                self._gone.discard(who)
            case Finished(who=who) | Exited(who=who):
                self._waiting.pop(who, None)
                self._gone.add(who)
            case _:
                pass

    def poll(self, now: float, missing: Collection[str] = ()) -> Notice | None:
        """Return the notice that is due, if any.

        missing: workers that are absent from the job at present.
        """
        if self._due is None or now < self._due:
            return None
        self._due = None
        rest = self._workers - self._waiting.keys() - self._gone - set(missing)
        # A worker that never made a step counts as quiet at once.
        quiet = sorted(who for who in rest if now - self._stepped.get(who, -QUIET_S) >= QUIET_S)
        # Others still make steps, so it is the asynchronous job's ordinary state.
        if not self._waiting or (rest and not quiet):
            return None
        seconds = max(self._waiting.values())
        text = f"{_some(sorted(self._waiting))} waited {seconds:.0f} s so far"
        # Otherwise all workers of this host wait, and the reason is elsewhere.
        if quiet:
            text += f"; not {_some(quiet, '')}: is its program computing, reading data, or does it hang?"
        else:
            text += ": for the servers, or for workers elsewhere"
        return Notice("launcher", text)


def _some(who: Collection[str], verb: str = " has| have") -> str:
    """Return at most four of the names, and the verb in the right number."""
    names, most = list(who), 4
    more = f" and {len(names) - most} more" if len(names) > most else ""
    one, _, many = verb.partition("|")
    return ", ".join(names[:most]) + more + (one if len(names) == 1 else many)
