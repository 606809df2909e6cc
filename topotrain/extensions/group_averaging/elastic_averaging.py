"""Elastic averaging: server groups that are tied to a center.

Asynchronous EASGD (Zhang, Choromanska and LeCun, Deep learning with Elastic Averaging SGD, 2015). A group with value x
exchanges with the center c after every `sync_freq` updates:

    x <- x - a (x - c)        c <- c + a (x - c)        both with the values before

The center of a bucket is at the bucket's master group, beside that group's own value. An exchange is one of
`PairwiseSync` with the center as the partner, so the sum of the center and all groups changes by updates alone. The
result of a job is the center, after a last exchange of every group that has updated since its last one.
"""

import torch

from topotrain.core.model.schema import BucketValues
from topotrain.core.protocol import PairOffer, PairReply, ProtocolError
from topotrain.core.server.component_state import State
from topotrain.core.server.group_sync import GroupMessages, PairwiseSync


class ElasticAveraging(PairwiseSync):
    """Exchange of one server with the centers of its buckets.

    Args:
        group, groups, values, sync_freq: as for PairwiseSync.
        rate: the moving rate a.
    """

    averages = False

    def __init__(self, group: int, groups: int, values: BucketValues, sync_freq: int, rate: float) -> None:
        super().__init__(group, groups, values, sync_freq, rate)
        self._masters = {b.id: b.master for b in values.buckets}
        self._center: dict[int, torch.Tensor] = {}
        # (group, bucket) -> updates of that group at its last exchange with a center that is here.
        self._told: dict[tuple[int, int], int] = {}

    def partner(self, bucket: int, sync: int) -> int:
        return self._masters[bucket]

    def begin(self) -> None:
        here = (bucket for bucket, master in self._masters.items() if master == self._group)
        self._center = {bucket: self._view(bucket).clone() for bucket in here}

    @property
    def centers(self) -> dict[int, torch.Tensor]:
        """The centers of the buckets that this group masters."""
        return self._center

    def _exchange(self, bucket: int) -> GroupMessages:
        if self._masters[bucket] != self._group:
            return super()._exchange(bucket)
        updates, self._updates[bucket] = self._updates[bucket], 0
        self._tell(self._group, bucket, updates)
        value, center = self._view(bucket), self._center[bucket]
        change = (center - value).mul_(self._rate)
        center.sub_(change)
        value.add_(change)
        self._measure(self._group, bucket, self._brings(self._group, bucket), change, value)
        return []

    def _move(self, group: int, message: PairReply, change: torch.Tensor) -> GroupMessages:
        super()._move(group, message, change)
        updates = self._updates[message.bucket]
        # Updates since the offer may be due already, and at the end all of them are.
        due = updates >= self._freq or (updates > 0 and self._draining)
        return self._exchange(message.bucket) if due else []

    def _offered_to(self, bucket: int) -> torch.Tensor:
        center = self._center.get(bucket)
        if center is None:
            raise ProtocolError(f"an offer of bucket {bucket}, of which group {self._group} has no center")
        return center

    def _count_offer(self, group: int, message: PairOffer) -> None:
        self._tell(group, message.bucket, message.updates)

    def _tell(self, group: int, bucket: int, updates: int) -> None:
        self._told[group, bucket] = self._told.get((group, bucket), 0) + updates

    def _brings(self, group: int, bucket: int) -> int:
        return sum(self._told.get((other, bucket), 0) for other in range(self._groups) if other != group)

    def drain(self) -> GroupMessages:
        self._draining = True
        due = [bucket for bucket in self._buckets if self._updates[bucket] and bucket not in self._waiting]
        return [sent for bucket in due for sent in self._exchange(bucket)]

    def drained(self) -> bool:
        return super().drained() and not any(self._updates.values())

    def result(self, bucket: int, value: torch.Tensor) -> torch.Tensor:
        # The value itself stays: at the end of a job another group may still take a snapshot.
        return self._center.get(bucket, value)

    # --- snapshots: the center, as if every group exchanged with it once more at that moment --------------------------

    def begin_cut(self, bucket: int, frozen: torch.Tensor) -> None:
        mine = frozen.clone()
        frozen.copy_(self._center[bucket])
        self.join_cut(frozen, mine)

    def join_cut(self, frozen: torch.Tensor, value: torch.Tensor) -> None:
        frozen.add_((value - frozen).mul_(self._rate))

    def end_cut(self, frozen: torch.Tensor) -> None:
        pass

    def state_dict(self) -> State:
        return {**super().state_dict(), "center": self._center, "told": self._told}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._center, self._told = dict(state["center"]), dict(state["told"])
