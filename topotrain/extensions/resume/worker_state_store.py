"""What workers leave at server (0,0), so that a fresh process can go on where theirs ended.

Rule: a deposit counts once all of it is here; until then the one before it stands. Nobody looks into one. Of each
worker three things are kept: the state in which its last epoch began (`EPOCH`), what has changed since (`SINCE`, void
as soon as another epoch has begun), and what it was at the snapshots that are being taken.
"""

from dataclasses import dataclass, field

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.server_extension import ServerExtension
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotParticipant
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart, WorkerStateRequest

PART = 16 << 20
"""Bytes of a part, but for the last."""
LARGEST = 1 << 32
"""Bytes of a deposit, at most."""
EPOCH, SINCE = -1, -2
_SNAPSHOTS = 2  # of one worker at a time: one that is being written, and the next

Replies = list[tuple[Address, Message]]


def parts_of(nbytes: int) -> int:
    """Into how many parts a deposit is cut."""
    return -(-nbytes // PART)


def cut(who: Address, number: int, data: torch.Tensor) -> list[WorkerStatePart]:
    """The messages of a deposit (1-D uint8; views of it are sent, so it must not change any more)."""
    count = parts_of(data.numel())
    return [
        WorkerStatePart(
            who.group, who.index, number, part, count, data.numel(), body=data[part * PART : (part + 1) * PART]
        )
        for part in range(count)
    ]


def room(who: Address, message: WorkerStatePart) -> torch.Tensor:
    """Memory for a part of the state of worker `who`.

    Raises:
        ProtocolError: a message that no correct process sends.
    """
    if who != Address(Role.WORKER, message.group, message.index):
        raise ProtocolError(f"the state of worker ({message.group},{message.index}) where that of {who} was due")
    if not 0 < message.nbytes <= LARGEST or message.parts != parts_of(message.nbytes):
        raise ProtocolError(f"a worker's state of {message.nbytes} bytes in {message.parts} parts")
    if not 0 <= message.part < message.parts or (message.number <= 0 and message.number not in (EPOCH, SINCE)):
        raise ProtocolError(f"part {message.part} of {message.parts} of a worker's state number {message.number}")
    return torch.empty(min(PART, message.nbytes - message.part * PART), dtype=torch.uint8)


@dataclass(slots=True)
class PartialState:
    """A deposit whose parts come in, in order."""

    nbytes: int = -1
    parts: list[torch.Tensor] = field(default_factory=list)

    def take(self, message: WorkerStatePart, body: torch.Tensor) -> torch.Tensor | None:
        """Add a part; returns the whole, 1-D uint8, with the last one. One that comes again is no part of it."""
        if message.part == 0:
            self.nbytes, self.parts = message.nbytes, []
        if message.nbytes != self.nbytes or message.part != len(self.parts):
            return None
        self.parts.append(body.view(torch.uint8))
        if len(self.parts) < message.parts:
            return None
        parts, self.parts, self.nbytes = self.parts, [], -1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class _Box:
    """What one worker has left."""

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    coming: dict[int, PartialState] = field(default_factory=dict)

    def keep(self, number: int, data: torch.Tensor) -> None:
        self.kept[number] = data
        if number == EPOCH:
            self.kept.pop(SINCE, None)
        old = sorted(n for n in self.kept if n > 0)[:-_SNAPSHOTS]
        for each in old:
            del self.kept[each]


class WorkerStateStore(ServerExtension, SnapshotParticipant):
    """The deposits of all workers of a job; lives in server (0,0)."""

    messages = (WorkerStatePart, WorkerStateRequest)

    def __init__(self) -> None:
        self._boxes: dict[Address, _Box] = {}

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """As `room`, for what a worker says of itself."""
        if isinstance(message, WorkerStatePart):
            return room(sender, message)
        return super().place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> Replies:
        """Take a part, or tell what is here."""
        if not isinstance(message, WorkerStatePart):
            return [(sender, reply) for number in (EPOCH, SINCE) for reply in self._told(sender, number)]
        if message.body is None:
            raise ProtocolError(f"{sender}: a part of its state without a body")
        box = self._boxes.setdefault(sender, _Box())
        if message.part == 0:  # what was being said of it, or of older snapshots, will not be said to its end
            box.coming = {n: a for n, a in box.coming.items() if n <= 0}
        if message.part and message.number not in box.coming:
            return []
        whole = box.coming.setdefault(message.number, PartialState()).take(message, message.body)
        if whole is not None:
            del box.coming[message.number]
            box.keep(message.number, whole)
        return []

    def _told(self, who: Address, number: int) -> list[WorkerStatePart]:
        box = self._boxes.get(who)
        data = None if box is None else box.kept.get(number)
        return [WorkerStatePart(who.group, who.index, number, 0, 0, 0)] if data is None else cut(who, number, data)

    def taken(self, number: int) -> dict[Address, torch.Tensor]:
        """Who has left its state at this snapshot so far, and the state (1-D uint8)."""
        return {who: box.kept[number] for who, box in self._boxes.items() if number in box.kept}

    def begun(self) -> dict[Address, torch.Tensor]:
        """The state in which the last epoch began of each worker that leaves its state here (1-D uint8)."""
        return {who: box.kept[EPOCH] for who, box in self._boxes.items() if EPOCH in box.kept}

    def forget(self, number: int) -> None:
        """This snapshot, and all before it, are written, or given up."""
        for box in self._boxes.values():
            for each in [n for n in box.kept if 0 < n <= number]:
                del box.kept[each]

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        boxes = {
            who: (box.kept, {number: field_values(partial) for number, partial in box.coming.items()})
            for who, box in self._boxes.items()
        }
        return {"boxes": boxes}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._boxes = {
            who: _Box(dict(kept), {number: PartialState(size, list(parts)) for number, (size, parts) in coming.items()})
            for who, (kept, coming) in state["boxes"].items()
        }
