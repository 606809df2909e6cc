"""A snapshot of server groups that average in pairs: one model of all groups.

An exchange moves a part of a value from one group to another, and a reply under way has a part that is in no group. Its
mark (`PairReply.cut`) tells on which side of the cut that part was taken away. If that was before, the group that
awaits the reply adds the part to what it had when it froze. Only then it sends that value to the bucket's master
(`Remainder`), which joins the values of all groups as their agreement asks for (`PairwiseSync.join_cut`).
"""

from collections.abc import Sequence

import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message, PairOffer, PairReply
from topotrain.core.server.group_sync import PairwiseSync
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox
from topotrain.extensions.checkpointing.group_cut import GroupCut
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart


class AveragingCut(GroupCut):
    """The exchanges that cross a snapshot, where groups average in pairs."""

    STATE = (*GroupCut.STATE, "_awaited")

    def __init__(self, server: Server, groups: int) -> None:
        super().__init__(server, groups)
        # Buckets of which this group awaited a reply when it froze, and what it had of them. None: it is the master,
        # and its value is in `_frozen`.
        self._awaited: dict[int, torch.Tensor | None] = {}
        self._wanted: set[tuple[int, int]] = set()  # (group, bucket) of the remainders that have not come

    @property
    def _group_sync(self) -> PairwiseSync:
        group_sync = self._server.state.known.group_sync
        assert isinstance(group_sync, PairwiseSync)
        return group_sync

    def send_remainders(self, number: int) -> None:
        self.number, self._frozen, self._awaited = number, None, {}
        model, group_sync, me = self._server.state.known, self._group_sync, self._server.me.group
        group_sync.mark(number)
        for bucket in model.buckets:
            # A copy: a later update must not change what is sent, or kept until the reply.
            value = None if bucket.master == me else model.values(bucket.id).clone()
            if group_sync.waits(bucket.id):
                self._awaited[bucket.id] = value
            elif value is not None:
                self._send(bucket.id, value)

    def _send(self, bucket: int, value: torch.Tensor) -> None:
        master = self._server.state.known.bucket(bucket).master
        to = Address(Role.SERVER, master, self._server.me.index)
        self._server.queue.send(to, Remainder(self.number, bucket, 0, body=value))

    def begin(self, frozen: FrozenShard, report: Sequence[tuple[Address, SnapshotPart]]) -> None:
        self._wanted = {(other, bucket) for other in self._others for bucket in self._mastered()}
        self._frozen, self._report = frozen, report
        for bucket in self._mastered():
            self._group_sync.begin_cut(bucket, frozen.flats[bucket])
        # A group that masters no bucket waits for nothing.
        self._report_if_complete()

    @property
    def complete(self) -> bool:
        return not self._wanted and None not in self._awaited.values()

    def _report_if_complete(self) -> None:
        if self._frozen is not None and self.complete:
            for bucket in self._mastered():
                self._group_sync.end_cut(self._frozen.flats[bucket])
        super()._report_if_complete()

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Join the value of another group. A repeated Remainder changes nothing."""
        assert isinstance(message, Remainder)
        body = self._server.state.known.body(message)
        key = (sender.group, message.bucket)
        # A Remainder of a dropped snapshot, or after a failed freeze, has no frozen values to be joined with.
        if self._hold(sender, message, body) or self._frozen is None or message.number != self.number:
            return ()
        if key in self._wanted:
            self._wanted.discard(key)
            self._group_sync.join_cut(self._frozen.flats[message.bucket], body)
        self._report_if_complete()
        return ()

    def mark_of(self, message: Message) -> int:
        if isinstance(message, Remainder):
            return message.number
        return message.cut if isinstance(message, PairOffer | PairReply) else -1

    def take_exchange(self, sender: Address, message: Message, body: torch.Tensor) -> bool:
        """Hold a message from behind the cut, and use a reply that the cut awaits."""
        if self._hold(sender, message, body):
            return True
        if isinstance(message, PairReply) and message.bucket in self._awaited and self._group_sync.awaits(message):
            self._complete_value(message, body)
        return False

    def _complete_value(self, message: PairReply, change: torch.Tensor) -> None:
        bucket, value = message.bucket, self._awaited.pop(message.bucket)
        # The other side has subtracted the change before its own cut, so it belongs to this side's value there.
        before = message.cut < self.number
        if value is not None:
            self._send(bucket, value.add_(change) if before else value)
        elif self._frozen is not None:
            if before:
                self._frozen.flats[bucket].add_(change)
            self._report_if_complete()
