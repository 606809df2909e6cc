"""Who waits for whom, once a job makes no step: told to the user, who may know why.

Rule: pure; it is told events and the time. Workers say that they wait for long (`Waits`). Who neither waits nor makes a
step is whom the others wait for: its program computes, reads its data, or hangs.
"""

from collections.abc import Collection

from topotrain.core.events import Event, Exited, Finished, Notice, Started, StepDone, Waits

GATHER_S = 1.0
"""How long after the first who waits the others are heard, who began to wait at about the same time."""
QUIET_S = 5.0
"""Who has made a step within so many seconds is not waited for."""


class StallDetector:
    """Hears the workers of this machine.

    Args:
        workers: their names.
    """

    def __init__(self, workers: Collection[str]) -> None:
        self._workers = frozenset(workers)
        self._waiting: dict[str, float] = {}
        self._stepped: dict[str, float] = {}
        self._gone: set[str] = set()
        self._due: float | None = None

    def heard(self, event: Event, now: float) -> None:
        """An event of a worker, or of anybody."""
        match event:
            case Waits(who=who, seconds=seconds):
                self._waiting[who] = seconds
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

    def turn(self, now: float, missing: Collection[str] = ()) -> Notice | None:
        """What there is to tell by now. missing: workers that are not part of the job at present."""
        if self._due is None or now < self._due:
            return None
        self._due = None
        rest = self._workers - self._waiting.keys() - self._gone - set(missing)
        quiet = sorted(who for who in rest if now - self._stepped.get(who, -QUIET_S) >= QUIET_S)
        if not self._waiting or (rest and not quiet):
            return None
        seconds = max(self._waiting.values())
        text = f"{_some(sorted(self._waiting))} waited {seconds:.0f} s so far"
        if quiet:
            text += f"; not {_some(quiet, '')}: is its program computing, reading data, or does it hang?"
        else:
            text += ": for the servers, or for workers elsewhere"
        return Notice("launcher", text)


def _some(who: Collection[str], verb: str = " has| have") -> str:
    """Names, not too many, and a verb for so many."""
    names, most = list(who), 4
    more = f" and {len(names) - most} more" if len(names) > most else ""
    one, _, many = verb.partition("|")
    return ", ".join(names[:most]) + more + (one if len(names) == 1 else many)
