"""One snapshot of a job whose server groups hold different values: what all of them have counted, as one model.

Rule: each group freezes behind a step of its own, and what a group adds to a master afterwards says so (`Delta.cut`):
where the master's group is not so far yet, it waits there. What was sent before and comes after the master has frozen
is added to what is frozen, and so is what a group had not sent yet: it sends that as a `Remainder`. Then each master
has, of its buckets, the start and every update that the groups had applied when they froze, each of them once (a cut
that no message crosses backwards: Lai and Yang, On distributed snapshots, 1987).
"""

from collections.abc import Iterator

import torch

from topotrain.core.protocol import Delta
from topotrain.core.server.group_sync import MasterSync
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard
from topotrain.extensions.checkpointing.snapshot_messages import Remainder


class CrossGroupCut:
    """One shard's part.

    Args:
        model: of the shard.
        group, groups: of this server, and how many there are.
    """

    def __init__(self, model: ParameterShard, group: int, groups: int) -> None:
        assert isinstance(model.agreement, MasterSync)
        self._model, self._agreement = model, model.agreement
        others = [other for other in range(groups) if other != group]
        self._mastered = [b.id for b in model.buckets if b.master == group]
        self._wanted = {(other, bucket) for other in others for bucket in self._mastered}
        self._sent: dict[tuple[int, int], int] = {}  # (group, bucket) -> the last exchange before the group froze
        self._frozen: FrozenShard | None = None

    def remainders(self, number: int) -> Iterator[tuple[int, Remainder]]:
        """This is the moment; what to tell the masters, which wait for it: (server group, message)."""
        for master, bucket, sync, body in self._agreement.remainders():
            yield master, Remainder(number, bucket, sync, body=body)

    def begin(self, frozen: FrozenShard) -> None:
        """The shard is frozen; what the others had added by then is to come."""
        self._frozen = frozen
        self._sent = {}

    def late(self, message: Delta, body: torch.Tensor) -> None:
        """The group that sent this had not frozen when it did; the shard has taken it after it froze."""
        self._add(message.bucket, body)

    def take(self, group: int, message: Remainder, body: torch.Tensor) -> None:
        """What a group had not sent yet; one that is said twice changes nothing."""
        key = (group, message.bucket)
        if key in self._wanted and key not in self._sent:
            self._sent[key] = message.sync
            self._add(message.bucket, body)

    @property
    def complete(self) -> bool:
        """Everything is in what is frozen."""
        return self._sent.keys() == self._wanted and all(
            self._agreement.taken(group, bucket) >= sync for (group, bucket), sync in self._sent.items()
        )

    def _add(self, bucket: int, body: torch.Tensor) -> None:
        assert self._frozen is not None
        self._frozen.flats[bucket].add_(body)
