"""Store of worker states on server (0,0), for fresh processes of workers.

It has up to three kinds of each worker: the state at the begin of its last epoch (`EPOCH`), the changes since
(`SINCE`), and the states at the snapshots that are being taken. The store does not interpret them.
"""

from dataclasses import dataclass, field

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.server_extension import ServerExtension
from topotrain.extensions.checkpointing.shard_snapshot import WorkerStateKeeper
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart, WorkerStateRequest

PART = 16 << 20
"""Bytes of a part, but for the last."""
LARGEST = 1 << 32
"""Bytes of a saved state, at most."""
EPOCH, SINCE = -1, -2
# Snapshots of one worker at a time: one that is being written, and the next.
_SNAPSHOTS = 2

Replies = list[tuple[Address, Message]]


def parts_of(nbytes: int) -> int:
    return -(-nbytes // PART)


def cut(worker: Address, number: int, data: torch.Tensor) -> list[WorkerStatePart]:
    """Return the messages of a state, 1-D uint8. Their bodies are views of `data`."""
    count = parts_of(data.numel())
    return [
        WorkerStatePart(
            worker.group, worker.index, number, part, count, data.numel(), body=data[part * PART : (part + 1) * PART]
        )
        for part in range(count)
    ]


def room(worker: Address, message: WorkerStatePart) -> torch.Tensor:
    """Return memory for a part of a worker's state. Raises ProtocolError."""
    # A worker saves only its own state, so none can change that of another.
    if worker != Address(Role.WORKER, message.group, message.index):
        raise ProtocolError(f"the state of worker ({message.group},{message.index}) where that of {worker} was due")
    # The sizes come from a peer, and memory is made for them part by part.
    if not 0 < message.nbytes <= LARGEST or message.parts != parts_of(message.nbytes):
        raise ProtocolError(f"a worker's state of {message.nbytes} bytes in {message.parts} parts")
    if not 0 <= message.part < message.parts or (message.number <= 0 and message.number not in (EPOCH, SINCE)):
        raise ProtocolError(f"part {message.part} of {message.parts} of a worker's state number {message.number}")
    return torch.empty(min(PART, message.nbytes - message.part * PART), dtype=torch.uint8)


@dataclass(slots=True)
class PartialState:
    """A state that is being received, part by part."""

    nbytes: int = -1
    parts: list[torch.Tensor] = field(default_factory=list)

    def take(self, message: WorkerStatePart, body: torch.Tensor) -> torch.Tensor | None:
        """Add a part. The last one returns the whole state, 1-D uint8."""
        # Part 0 begins a new state: the worker was interrupted in the one before.
        if message.part == 0:
            self.nbytes, self.parts = message.nbytes, []
        # A repeated part, or one of a state without its beginning.
        if message.nbytes != self.nbytes or message.part != len(self.parts):
            return None
        self.parts.append(body.view(torch.uint8))
        if len(self.parts) < message.parts:
            return None
        parts, self.parts, self.nbytes = self.parts, [], -1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class _WorkerStates:
    """The states of one worker, by number."""

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    coming: dict[int, PartialState] = field(default_factory=dict)

    def receive(self, message: WorkerStatePart, body: torch.Tensor) -> None:
        """Add a part of a state. The state counts when all of its parts are here."""
        # The worker begins another state, so its partial states for snapshots will not be completed.
        if message.part == 0:
            self.coming = {number: partial for number, partial in self.coming.items() if number <= 0}
        # The rest of a state that was given up above.
        if message.part and message.number not in self.coming:
            return
        whole = self.coming.setdefault(message.number, PartialState()).take(message, body)
        # Until then the state before it counts.
        if whole is not None:
            del self.coming[message.number]
            self._keep(message.number, whole)

    def _keep(self, number: int, data: torch.Tensor) -> None:
        self.kept[number] = data
        # The changes since belong to the state before.
        if number == EPOCH:
            self.kept.pop(SINCE, None)
        # Bounds the memory if snapshots are requested faster than they are published.
        old = sorted(n for n in self.kept if n > 0)[:-_SNAPSHOTS]
        for each in old:
            del self.kept[each]


class WorkerStateStore(ServerExtension, WorkerStateKeeper):
    """The states of all workers of a job, on server (0,0)."""

    messages = (WorkerStatePart, WorkerStateRequest)

    def __init__(self) -> None:
        self._states: dict[Address, _WorkerStates] = {}

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        if isinstance(message, WorkerStatePart):
            return room(sender, message)
        return super().place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> Replies:
        if isinstance(message, WorkerStateRequest):
            worker = sender._replace(index=message.index)
            return [(sender, reply) for number in (EPOCH, SINCE) for reply in self._saved(worker, number)]
        assert isinstance(message, WorkerStatePart)
        if message.body is None:
            raise ProtocolError(f"{sender}: a part of its state without a body")
        self._states.setdefault(sender, _WorkerStates()).receive(message, message.body)
        return []

    def _saved(self, worker: Address, number: int) -> list[WorkerStatePart]:
        states = self._states.get(worker)
        data = None if states is None else states.kept.get(number)
        # The body is a view of the stored tensor, which is replaced and never written again.
        return (
            [WorkerStatePart(worker.group, worker.index, number, 0, 0, 0)]
            if data is None
            else cut(worker, number, data)
        )

    def snapshot_states(self, number: int) -> dict[Address, torch.Tensor]:
        return {worker: states.kept[number] for worker, states in self._states.items() if number in states.kept}

    def epoch_states(self) -> dict[Address, torch.Tensor]:
        return {worker: states.kept[EPOCH] for worker, states in self._states.items() if EPOCH in states.kept}

    def forget_snapshots(self, number: int) -> None:
        for states in self._states.values():
            for each in [n for n in states.kept if 0 < n <= number]:
                del states.kept[each]

    def state_dict(self) -> State:
        workers = {
            worker: (states.kept, {number: field_values(partial) for number, partial in states.coming.items()})
            for worker, states in self._states.items()
        }
        return {"workers": workers}

    def load_state_dict(self, state: State) -> None:
        self._states = {
            worker: _WorkerStates(
                dict(kept), {number: PartialState(size, list(parts)) for number, (size, parts) in coming.items()}
            )
            for worker, (kept, coming) in state["workers"].items()
        }
