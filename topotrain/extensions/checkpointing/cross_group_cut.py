"""A snapshot of server groups that add: the updates of all groups in one model.

The changes that a group sends to a master behind its freeze are marked (`Delta.cut`), and wait until the master's group
has frozen, too. Changes from before are added to the frozen values, and so is the rest that a group had not sent yet
(`Remainder`). Then each master has, for its buckets, the start and every update that the groups had applied when they
froze, each of them once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Delta, Message
from topotrain.core.server.group_sync import MasterSync
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox
from topotrain.extensions.checkpointing.group_cut import GroupCut
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart


class CrossGroupCut(GroupCut):
    """The changes that cross a snapshot, where each bucket has a master."""

    def __init__(self, server: Server, groups: int) -> None:
        super().__init__(server, groups)
        self._wanted: set[tuple[int, int]] = set()  # (group, bucket) of the remainders
        self._sent: dict[tuple[int, int], int] = {}  # (group, bucket) -> the last exchange before the group froze

    @property
    def _group_sync(self) -> MasterSync:
        group_sync = self._server.state.known.group_sync
        assert isinstance(group_sync, MasterSync)
        return group_sync

    def send_remainders(self, number: int) -> None:
        self.number = number
        # Also for buckets without a change: a master's snapshot is complete only with every group's Remainder.
        for master, bucket, sync, body in self._group_sync.remainders():
            to = Address(Role.SERVER, master, self._server.me.index)
            self._server.queue.send(to, Remainder(number, bucket, sync, body=body))

    def begin(self, frozen: FrozenShard, report: Sequence[tuple[Address, SnapshotPart]]) -> None:
        self._wanted = {(other, bucket) for other in self._others for bucket in self._mastered()}
        self._frozen, self._report, self._sent = frozen, report, {}
        # A group that masters no bucket waits for nothing.
        self._report_if_complete()

    @property
    def complete(self) -> bool:
        # A Remainder names the last exchange before the freeze. The Deltas up to that one may still be on their way.
        return self._sent.keys() == self._wanted and all(
            self._group_sync.taken(group, bucket) >= sync for (group, bucket), sync in self._sent.items()
        )

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Add a Remainder to the frozen values. A repeated one changes nothing."""
        assert isinstance(message, Remainder)
        body = self._server.state.known.body(message)
        # A Remainder of a dropped snapshot, or after a failed freeze, has no frozen values to be added to.
        if self._hold(sender, message, body) or self._frozen is None or message.number != self.number:
            return ()
        key = (sender.group, message.bucket)
        if key in self._wanted and key not in self._sent:
            self._sent[key] = message.sync
            self._add(message.bucket, body)
        self._report_if_complete()
        return ()

    def mark_of(self, message: Message) -> int:
        if isinstance(message, Remainder):
            return message.number
        return message.cut if isinstance(message, Delta) else -1

    def take_exchange(self, sender: Address, message: Message, body: torch.Tensor) -> bool:
        """Hold a message that was sent behind a snapshot that is still to come here."""
        return self._hold(sender, message, body)

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
