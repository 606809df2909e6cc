"""The messages between server groups that cross a snapshot.

Each group freezes behind a step of its own. No message crosses this cut backwards (Lai and Yang, On distributed
snapshots, 1987): messages from behind a freeze wait until the receiver has frozen, too. Changes that were sent
before a freeze, and arrive behind the receiver's, are added to the frozen values. Then the masters' frozen values are
one model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from topotrain.config.topology import Address
from topotrain.core.protocol import Message, ProtocolError
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ExchangeExtension
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart


class GroupCut(ExchangeExtension, ABC):
    """The messages that cross a snapshot, on one shard, with `groups` server groups."""

    # The other fields matter only while something is frozen, and then `ServerSnapshots` gives no state.
    STATE: ClassVar[tuple[str, ...]] = ("number", "_early")

    messages = (Remainder,)

    def __init__(self, server: Server, groups: int) -> None:
        self._server = server
        self._others = [other for other in range(groups) if other != server.me.group]
        self.number = 0
        """The last snapshot for which this shard has frozen."""
        # Sent behind a snapshot that is still to come here, by (sender, type, bucket).
        self._early: dict[tuple[Address, int, int], tuple[Address, Message]] = {}
        self._frozen: FrozenShard | None = None  # until it is complete
        self._report: Sequence[tuple[Address, SnapshotPart]] = ()

    # --- the moment of the snapshot ------------------------------------------------------------------------------

    @abstractmethod
    def send_remainders(self, number: int) -> None:
        """The shard freezes now: send the masters what they do not have."""

    @abstractmethod
    def begin(self, frozen: FrozenShard, report: Sequence[tuple[Address, SnapshotPart]]) -> None:
        """Complete the frozen shard with what the other groups have; then send `report`."""

    def handle_early(self) -> None:
        """Handle what was held for this shard's freeze."""
        self._server.queue.handle_later(self._early.values())
        self._early = {}

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all that belongs to the snapshot is in what is frozen."""

    def _mastered(self) -> list[int]:
        return [b.id for b in self._server.state.known.buckets if b.master == self._server.me.group]

    def _report_if_complete(self) -> None:
        if self._frozen is not None and self.complete:
            self._server.queue.send_all(self._report)
            # From here on the writer may read the frozen values, so nothing is added to them.
            self._frozen, self._report = None, ()

    # --- messages of the other groups ----------------------------------------------------------------------------

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        """Memory for the body of a Remainder."""
        model = self._server.state.model
        if model is None or viewable or not isinstance(message, Remainder):
            return None
        # The same buffer as for the group's exchanges: a body is handled before the next one arrives.
        return model.flats.view(f"from {sender.group}", model.bucket(message.bucket))

    @abstractmethod
    def mark_of(self, message: Message) -> int:
        """The last snapshot for which the sender had frozen before; -1: no mark."""

    def _hold(self, sender: Address, message: Message, body: torch.Tensor) -> bool:
        """Hold a message that was sent behind a snapshot that is still to come here."""
        # This group's freeze is still to come, and the change must not be in its frozen values.
        if not self._is_early(message):
            return False
        # Without a reply a group sends one message of each type about a bucket, so a faulty one takes little memory.
        key = sender, message.KIND, getattr(message, "bucket", -1)
        held = self._early.get(key)
        if held is None:
            # The body is a view of memory that the next message overwrites.
            self._early[key] = sender, replace(message, body=body.clone())
        elif held[1] != message:
            raise ProtocolError(f"{sender} is far ahead of a snapshot that {self._server.me} does not know")
        return True

    def _is_early(self, message: Message) -> bool:
        return self.mark_of(message) > self.number
