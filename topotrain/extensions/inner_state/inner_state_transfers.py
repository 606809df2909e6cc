"""On the coordinator: an inner optimizer's state goes to a group that is back.

It comes from a worker group that is alive.

A group that asks gets the state of worker 0 of another group, the donor. Part follows part, and the next one is
requested when all workers of the group have the last, so the coordinator holds one part at a time. All of them receive
the same parts, so they have the same state.

Where a donor dies, has none, or sends no part for `PATIENCE_S`, another one is asked, and the transfer begins again.
Where no other is left the answer is that there is no state.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.component_state import State, field_values
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, TimedExtension
from topotrain.extensions.inner_state.inner_state_client import part_memory
from topotrain.extensions.inner_state.inner_state_messages import DonorSilent, InnerStatePart, InnerStateRequest

PATIENCE_S = 20.0
"""Seconds for one part, at least. A donor that stands still holds up the group that asks, and no other one."""
_NONE = -1


@dataclass(slots=True)
class _Transfer:
    """A group that asks.

    number: of the transfer from this donor. waiting: the workers that wait for the part. refused: groups that were
    asked in vain.
    """

    number: int
    donor: int = _NONE
    part: int = 0
    waiting: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    def begin(self, donor: int) -> None:
        """Take the state from this donor."""
        self.donor = donor

    def advance(self) -> None:
        """Note that the present part has come. No worker waits for the next one yet."""
        self.part += 1
        self.waiting.clear()

    def give_up(self, number: int) -> None:
        """Refuse the donor, and begin again under another number."""
        self.refused.add(self.donor)
        # What has come from this donor is worth nothing.
        self.donor, self.part, self.number = _NONE, 0, number


class InnerStateTransfers(TimedExtension):
    """Passes states on, on the coordinator."""

    messages = (InnerStateRequest, InnerStatePart, DonorSilent)

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transfers: dict[int, _Transfer] = {}  # by the group that asks
        self._numbers = 0

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        if isinstance(message, InnerStatePart):
            return part_memory(sender, message)
        return super().place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> Outbox:
        if isinstance(message, InnerStateRequest):
            return self._requested(sender)
        if isinstance(message, InnerStatePart):
            return self._arrived(sender, message)
        assert isinstance(message, DonorSilent)
        found = self._transfers.get(message.group)
        if found is None or found.number != message.number:
            return ()
        if found.part == message.part:
            return self._give_up(message.group, found)
        self._watch(message.group, found)
        return ()

    def _requested(self, sender: Address) -> Outbox:
        group = sender.group
        found = self._transfers.setdefault(group, _Transfer(self._next_number()))
        found.waiting.add(sender.index)
        return self._ask(group, found)

    def _ask(self, group: int, found: _Transfer) -> Outbox:
        """Request the next part, if all workers of the group wait for it."""
        if not self._all_wait(group, found):
            return ()
        if found.donor == _NONE:
            candidates = self._candidates(group, found)
            if not candidates:
                del self._transfers[group]
                return self._to_all(group, InnerStatePart(group, found.number, 0, 0, 0))
            found.begin(min(candidates))
            self._watch(group, found)
        return ((_worker_of(found.donor), InnerStateRequest(group, found.number, found.part)),)

    def _watch(self, group: int, found: _Transfer) -> None:
        # One message at a time for a transfer, and not one for each part: each costs a thread.
        self._server.timer.wake(PATIENCE_S, DonorSilent(group, found.number, found.part))

    def _arrived(self, sender: Address, message: InnerStatePart) -> Outbox:
        group = message.group
        found = self._transfers.get(group)
        # A repeated part, or one of a transfer that was given up.
        if found is None or sender != _worker_of(found.donor) or message.number != found.number:
            return ()
        if not message.parts:
            return self._give_up(group, found)
        if message.part != found.part or not self._all_wait(group, found):
            return ()
        if message.body is None:
            raise ProtocolError(f"{sender}: a part of its optimizer's state without a body")
        found.advance()
        if found.part == message.parts:
            del self._transfers[group]
        return self._to_all(group, message)

    def _give_up(self, group: int, found: _Transfer) -> Outbox:
        """Ask another donor, if there is one."""
        found.give_up(self._next_number())
        return self._ask(group, found)

    def _all_wait(self, group: int, found: _Transfer) -> bool:
        return len(found.waiting) == len(self._server.worker_groups.workers[group])

    def _candidates(self, group: int, found: _Transfer) -> list[int]:
        groups = self._server.worker_groups
        # A group that itself asks has no state to give.
        out = {group, *found.refused, *self._transfers}
        return [each for each in groups.clocks.live() if each not in out and groups.runs(each)]

    def _to_all(self, group: int, message: InnerStatePart) -> Outbox:
        workers = self._server.worker_groups.workers[group]
        return tuple((worker, replace(message, body=message.body)) for worker in workers)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- hooks of the server -------------------------------------------------------------------------------------

    def on_lost(self, worker: Address) -> None:
        self._without(worker.group)

    def reset_group(self, group: int, ended: bool) -> None:
        found = self._transfers.pop(group, None)
        if found is not None and found.donor != _NONE:
            self._server.queue.send(_worker_of(found.donor), InnerStateRequest(group, found.number, -1))
        self._without(group)

    def _without(self, donor: int) -> None:
        # By a message, because these hooks send nothing to workers while a group is being reset.
        for group, found in self._transfers.items():
            if found.donor == donor:
                self._server.timer.wake(0.0, DonorSilent(group, found.number, found.part))

    def on_timer(self) -> None:
        for group, found in list(self._transfers.items()):  # the timer may end one on another thread
            if found.donor != _NONE:
                self._watch(group, found)

    def state_dict(self) -> State:
        transfers: Iterable[tuple[int, _Transfer]] = self._transfers.items()
        return {"transfers": {group: field_values(found) for group, found in transfers}, "numbers": self._numbers}

    def load_state_dict(self, state: State) -> None:
        self._numbers = state["numbers"]
        self._transfers = {
            group: _Transfer(number, donor, part, set(waiting), set(refused))
            for group, (number, donor, part, waiting, refused) in state["transfers"].items()
        }


def _worker_of(group: int) -> Address:
    return Address(Role.WORKER, group, 0)
