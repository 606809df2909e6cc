"""The recorded order of one server, as a replay goes through it. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.extensions.decision_record.order_entries import (
    LOST,
    Arrival,
    Entry,
    ModelKnown,
    Note,
    OwnMessage,
    StepMade,
    VersionShown,
)
from topotrain.extensions.decision_record.ordered_messages import is_aside

_WORDS: Mapping[str, str] = {
    "Commit": "the commit of a step",
    "Fetch": "a request for values",
    "LeaseRequest": "a request for batches",
    "LeaseRelease": "the end of a loop over the loader",
    "Finish": "the end of the script",
    "WorkerRejoined": "the start of another process",
    "GroupIdle": "a rest without batches",
}


def words_of(kind: int) -> str:
    """Return what a kind of message is, for the user."""
    if kind == LOST:
        return "the death of its process"
    name = m.kind_of(kind).__name__
    return _WORDS.get(name, f"a message {name}")


def words_of_note(note: Note) -> str:
    """Return what a note says, for the user."""
    if isinstance(note, VersionShown):
        return f"worker group {note.group} is shown version {note.version}"
    what = "is skipped at" if note.skipped else "makes"
    return f"a step of worker group {note.group} {what} version {note.version}"


@dataclass(frozen=True, slots=True)
class RecordedLife:
    """One process of a worker that the recording has seen die.

    number: of the process, from 0. messages: those with an order that its script has sent to a server. ended: the
    script was over.
    """

    number: int
    messages: int
    ended: bool


class ReplayOrder:
    """The events that a server is to handle, and the notes that must follow.

    Args:
        entries: of the server.
        whole: the recorded job came to its end. Otherwise the order ends where the recording does.
    """

    def __init__(self, entries: Iterable[Entry], whole: bool = True) -> None:
        self.whole = whole
        self.model = b""
        """The digest of the recorded model; empty: no model was described."""
        self._events: deque[Arrival | OwnMessage] = deque()
        self._notes: deque[Note] = deque()
        self.lives: dict[Address, list[RecordedLife]] = {}
        """Of each worker that has died, its processes but for the last."""
        counts: dict[Address, tuple[int, bool]] = {}
        for entry in entries:
            match entry:
                case ModelKnown(digest):
                    self.model = digest
                case StepMade() | VersionShown():
                    self._notes.append(entry)
                case OwnMessage():
                    self._events.append(entry)
                case Arrival(sender, kind):
                    self._events.append(entry)
                    messages, ended = counts.get(sender, (0, False))
                    if kind == LOST:
                        known = self.lives.setdefault(sender, [])
                        known.append(RecordedLife(len(known), messages, ended))
                        counts[sender] = 0, False
                    elif not is_aside(kind):
                        counts[sender] = messages + 1, ended or kind == m.Finish.KIND

    @property
    def next(self) -> Arrival | OwnMessage | None:
        """The event that the server is to handle next. None: the recording ends here."""
        return self._events[0] if self._events else None

    def advance(self) -> None:
        """It is being handled."""
        self._events.popleft()

    def expect(self) -> Note | None:
        """Take the next note that must follow. None: there is none left."""
        return self._notes.popleft() if self._notes else None

    def life(self, worker: Address, number: int) -> RecordedLife | None:
        """Return a process of a worker that the recording has seen die.

        None: the recording has not seen its death, or the script was over before.
        """
        known = self.lives.get(worker, ())
        return known[number] if number < len(known) and not known[number].ended else None
