"""What a unit does about processes that die while another unit decides for the whole job (recovery.py, post.py).

Rule: pure; it stands where `RecoveryPolicy` stands in unit 0. What that has to know is told to it; a death, and an
error that may follow from one, are held until it has said what follows. An exception of the user's program ends the job
at once, here as there.
"""

from collections.abc import Callable, Collection, Sequence

from topotrain.core.events import (
    Agreed,
    Covered,
    Differs,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Lost,
    Missed,
    Saved,
    Started,
    StepDone,
    Thawed,
    Unrepeatable,
    Unsaved,
)
from topotrain.launch.recovery.recovery_actions import FailJob, Word


class Follower:
    """See above.

    Args:
        residents: who lives here.
        say: tells unit 0 an event.
    """

    def __init__(self, residents: Collection[str], say: Callable[[Event], None]) -> None:
        self._residents, self._say = set(residents), say
        self._first: set[str] = set()  # whose next step is the first of its process
        self._held: list[Failed] = []
        self._exited: set[str] = set()
        self._listens = self._ended = self._alone = False

    @property
    def due(self) -> float | None:
        """Nothing happens by itself."""
        return None

    @property
    def missing(self) -> set[str]:
        """As of `RecoveryPolicy`."""
        return set()

    @property
    def complete(self) -> bool:
        """Unit 0 has said that nothing is to start again, or cannot be heard, and all here have ended well."""
        return self._ended or (self._alone and not self._held and self._residents <= self._exited)

    @property
    def listens(self) -> bool:
        """Every step is told."""
        return self._listens

    def listen(self, on: bool) -> None:
        """Unit 0 wants to hear every step, or no longer."""
        self._listens = on

    def end(self) -> None:
        """Unit 0 has said that nothing is to start again."""
        self._ended = True

    def told(self, all: bool, alone: bool) -> None:
        """Whether unit 0 has heard everything; alone: it could not be reached for so long that nobody waits for it."""
        self._alone = alone
        if all:  # what follows is its to say
            self._held.clear()

    def heard(self, event: Event, now: float) -> Sequence[Word]:
        """What follows from an event here and now."""
        match event:
            case Failed() if self._ended:
                return [event]
            case Lost(who=who, text=text, log=log) if self._ended:
                return [Failed(who, "died", text, log)]
            case Failed(kind=kind):
                self._say(event)
                if kind in ("program", "config"):
                    return [event]
                self._held.append(event)
                return []
            case Lost(who=who, text=text, log=log):
                self._say(event)
                self._held.append(Failed(who, "died", text, log))
                return []
            case Unrepeatable():
                self._say(event)
                return []
            case Started(who=who):
                self._first.add(who)
                if who.startswith("server"):  # it may have come from a unit that is gone
                    self._residents.add(who)
                self._exited.discard(who)
                self._held = [held for held in self._held if held.who != who]
                self._say(event)
            case Exited(who=who):
                self._exited.add(who)
                self._say(event)
            case StepDone(who=who):
                if self._listens or who in self._first:
                    self._say(event)
                self._first.discard(who)
            case Finished() | Agreed() | Frozen() | Thawed():
                self._say(event)
            case Covered() | Missed() | Differs() | Saved() | Unsaved():
                self._say(event)
            case _:
                pass
        return [event]

    def turn(self, now: float) -> Sequence[Word]:
        """Who cannot be heard for so long has no say in it any more."""
        if self._held and self._alone:
            held, self._held = self._held, []
            return [FailJob(tuple(held))]
        return []
