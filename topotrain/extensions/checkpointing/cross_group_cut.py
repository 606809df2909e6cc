"""A snapshot of several server groups: the updates of all groups in one model.

Each group freezes behind a step of its own. The changes that it sends to a master afterwards are marked (`Delta.cut`),
and wait until the master's group has frozen, too. Changes from before are added to the frozen values, and so is the
rest that a group had not sent yet (`Remainder`). Then each master has, for its buckets, the start and every update that
the groups had applied when they froze, each of them once. No message crosses this cut backwards (Lai and Yang, On
distributed snapshots, 1987).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Delta, Message, ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.group_sync import MasterSync
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ExchangeExtension, Outbox
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart


class CrossGroupCut(ExchangeExtension):
    """The changes that cross a snapshot, on one shard, with `groups` server groups."""

    messages = (Remainder,)

    def __init__(self, server: Server, groups: int) -> None:
        self._server = server
        self._others = [other for other in range(groups) if other != server.me.group]
        self.number = 0
        """The last snapshot for which this shard has frozen."""
        # Sent behind a snapshot that is still to come here, by (sender, whether it is a Delta, bucket).
        self._early: dict[tuple[Address, bool, int], tuple[Address, Delta | Remainder]] = {}
        self._wanted: set[tuple[int, int]] = set()  # (group, bucket) of the remainders
        self._sent: dict[tuple[int, int], int] = {}  # (group, bucket) -> the last exchange before the group froze
        self._frozen: FrozenShard | None = None  # until it is complete
        self._report: Sequence[tuple[Address, SnapshotPart]] = ()

    @property
    def _group_sync(self) -> MasterSync:
        group_sync = self._server.state.known.group_sync
        # Jobs with RingSync take no snapshots (`server_snapshots.refusal`).
        assert isinstance(group_sync, MasterSync)
        return group_sync

    # --- the moment of the snapshot ------------------------------------------------------------------------------

    def send_remainders(self, number: int) -> None:
        """The shard freezes now: send the masters the changes that they do not have."""
        self.number = number
        # Also for buckets without a change: a master's snapshot is complete only with every group's Remainder.
        for master, bucket, sync, body in self._group_sync.remainders():
            to = Address(Role.SERVER, master, self._server.me.index)
            self._server.queue.send(to, Remainder(number, bucket, sync, body=body))

    def begin(self, frozen: FrozenShard, report: Sequence[tuple[Address, SnapshotPart]]) -> None:
        """Add the changes of the other groups to the frozen shard; then send `report`."""
        mastered = [b.id for b in self._server.state.known.buckets if b.master == self._server.me.group]
        self._wanted = {(other, bucket) for other in self._others for bucket in mastered}
        self._frozen, self._report, self._sent = frozen, report, {}
        # A group that masters no bucket waits for nothing.
        self._report_if_complete()

    def handle_early(self) -> None:
        self._server.queue.handle_later(self._early.values())
        self._early = {}

    @property
    def complete(self) -> bool:
        """Whether all changes before the snapshot are in what is frozen."""
        # A Remainder names the last exchange before the freeze. The Deltas up to that one may still be on their way.
        return self._sent.keys() == self._wanted and all(
            self._group_sync.taken(group, bucket) >= sync for (group, bucket), sync in self._sent.items()
        )

    def _report_if_complete(self) -> None:
        if self._frozen is not None and self.complete:
            self._server.queue.send_all(self._report)
            # From here on the writer may read the frozen values, so nothing is added to them.
            self._frozen, self._report = None, ()

    # --- changes of the other groups -----------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """Memory for the body of a Remainder."""
        model = self._server.state.model
        if model is None or viewable or not isinstance(message, Remainder):
            return None
        # The same buffer as for the group's Deltas: a body is handled before the next one arrives.
        return model.flats.view(f"from {sender.group}", model.bucket(message.bucket))

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Add a Remainder to the frozen values. A repeated one changes nothing."""
        assert isinstance(message, Remainder)
        body = self._server.state.known.body(message)
        # A Remainder of a dropped snapshot, or after a failed freeze, has no frozen values to be added to.
        if self.take_exchange(sender, message, body) or self._frozen is None or message.number != self.number:
            return ()
        key = (sender.group, message.bucket)
        if key in self._wanted and key not in self._sent:
            self._sent[key] = message.sync
            self._add(message.bucket, body)
        self._report_if_complete()
        return ()

    def take_exchange(self, sender: Address, message: Message, body: torch.Tensor) -> bool:
        """Hold a message that was sent behind a snapshot that is still to come here."""
        if not isinstance(message, Delta | Remainder) or not self._is_early(message):
            return False
        # Without a reply a group sends one Delta of a bucket, and one Remainder, so a faulty group takes little memory.
        key = sender, isinstance(message, Delta), message.bucket
        if key not in self._early:
            # The body is a view of memory that the next message overwrites.
            self._early[key] = sender, replace(message, body=body.clone())
        elif self._early[key][1].sync != message.sync:
            raise ProtocolError(f"{sender} is far ahead of a snapshot that {self._server.me} does not know")
        return True

    def _is_early(self, message: Delta | Remainder) -> bool:
        mark = message.cut if isinstance(message, Delta) else message.number
        # This group's freeze is still to come, and the change must not be in its frozen values.
        return mark > self.number

    def exchanged(self, message: Message, body: torch.Tensor) -> None:
        """The values have taken a Delta, which its group may have sent before it froze."""
        # `cut` below the number: the change was applied before its group froze, so the snapshot must have it.
        if self._frozen is not None and isinstance(message, Delta) and message.cut < self.number:
            self._add(message.bucket, body)
            self._report_if_complete()

    def _add(self, bucket: int, body: torch.Tensor) -> None:
        assert self._frozen is not None
        # The writer's slices are views of these flats, and the order to write follows the report.
        self._frozen.flats[bucket].add_(body)

    def amend_exchange(self, message: Message) -> Message:
        """Mark the changes that this group sends with its last snapshot."""
        return replace(message, cut=self.number) if isinstance(message, Delta) else message

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        # The other fields matter only while something is frozen, and then `ServerSnapshots` gives no state.
        return {"number": self.number, "early": self._early}

    def load_state_dict(self, state: State) -> None:
        self.number, self._early = state["number"], dict(state["early"])
