"""Recovery in a unit that another unit decides for.

`Follower` replaces `RecoveryPolicy` in all units but the leader. It is pure: it does no I/O and reads no clock. It
sends the leader the events that matter for recovery.
"""

from collections.abc import Collection, Sequence

from topotrain.core.events import (
    Event,
    EventSink,
    Exited,
    Failed,
    Lost,
    Repeatable,
    Repeated,
    Saved,
    Started,
    StepDone,
    Unrepeatable,
)
from topotrain.launch.recovery.recovery_actions import Action, FailJob
from topotrain.launch.recovery.recovery_policy import POLICY_EVENTS


class Follower:
    """The policy of a unit that follows the decisions of the leader.

    Args:
        residents: the workers and servers of this unit.
        leader: sends events to the leader.
    """

    def __init__(self, residents: Collection[str], leader: EventSink) -> None:
        self._residents, self._leader = set(residents), leader
        self._first: set[str] = set()  # processes that have not finished a step yet
        self._held: list[Failed] = []
        self._exited: set[str] = set()
        self._listens = self._ended = self._alone = False

    @property
    def due(self) -> float | None:
        """None: a follower has no timers."""
        return None

    @property
    def missing(self) -> set[str]:
        """The empty set: a follower waits for all its workers."""
        return set()

    @property
    def complete(self) -> bool:
        """Whether this unit may end."""
        # Unit 0 restarts nothing any more, or it is out of reach and all processes here ended well.
        return self._ended or (self._alone and not self._held and self._residents <= self._exited)

    @property
    def suspicious(self) -> bool:
        """Whether failures here wait for the leader, which may be their cause."""
        return bool(self._held)

    @property
    def listens(self) -> bool:
        """Whether the leader wants every step."""
        return self._listens

    def listen(self, on: bool) -> None:
        """Set whether the leader wants every step."""
        self._listens = on

    def end(self) -> None:
        """Note that the leader restarts nothing any more."""
        self._ended = True

    def on_connection(self, all_received: bool, alone: bool) -> None:
        """Note the state of the connection to the leader.

        Args:
            all_received: the leader has received all messages.
            alone: the leader was out of reach for so long that this unit stops waiting for it.
        """
        self._alone = alone
        if all_received:  # the leader decides what follows
            self._held.clear()

    def on_event(self, event: Event, now: float) -> Sequence[Action]:
        """Return the actions that follow from a local event."""
        match event:
            case Failed() if self._ended:
                return [event]
            case Lost(who=who, text=text, log=log) if self._ended:
                return [Failed(who, "died", text, log)]
            case Failed(kind=kind):
                self._leader.emit(event)
                # As in the leader: nothing else can explain these, so the job ends at once.
                if kind in ("program", "config"):
                    return [event]
                # Not shown yet: the leader may restart the process, or find a better cause.
                self._held.append(event)
                return []
            case Lost(who=who, text=text, log=log):
                self._leader.emit(event)
                self._held.append(Failed(who, "died", text, log))
                return []
            case Unrepeatable() | Repeatable() | Repeated():
                self._leader.emit(event)
                return []
            case Started(who=who):
                self._first.add(who)
                if who.startswith("server"):  # it may replace a server of a lost unit
                    self._residents.add(who)
                self._exited.discard(who)
                # Unit 0 has decided to restart it, so its former error is settled.
                self._held = [held for held in self._held if held.who != who]
                self._leader.emit(event)
            case Exited(who=who):
                self._exited.add(who)
                self._leader.emit(event)
            case StepDone(who=who):
                # A first step may end a recovery. Further steps matter only while one is open (`wants_steps`).
                if self._listens or who in self._first:
                    self._leader.emit(event)
                self._first.discard(who)
            case _ if isinstance(event, (*POLICY_EVENTS, Saved)):
                self._leader.emit(event)
            case _:
                pass
        return [event]

    def poll(self, now: float) -> Sequence[Action]:
        """Return the actions that are due by time."""
        if self._held and self._alone:
            # No decision of the leader will come, so this unit ends by its own errors.
            held, self._held = self._held, []
            return [FailJob(tuple(held))]
        return []
