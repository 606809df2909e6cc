"""How server groups agree on a bucket of parameters.

`MasterSync`: each bucket has one master group. Another group sends what it added since the last time, the master
adds it to its own value and replies with that; meanwhile training goes on, and what was added in between is kept:
    send:  delta = cur - snap, sent = cur        reply m:  cur += m - sent, snap = m
Every local update thus reaches the master exactly once, however long the reply takes (SINGA's Distributed Hogwild, with
the updates between request and reply no longer lost).

`PairwiseSync`: a group offers its value to another one, which moves to the average and replies with what the offerer
has to add to be there, too. Both change by opposite amounts, so the sum over the groups is kept (pairwise averaging:
Boyd et al., Randomized gossip algorithms, 2006). In `RingSync` the partner is the right neighbor. Extensions have other
rules (`ExchangeExtension.group_sync`).

One object per server. It owns no values: it reads and changes the shard's tensors in place.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from topotrain.core.model.schema import BucketValues
from topotrain.core.protocol import Delta, MasterValue, Message, PairOffer, PairReply
from topotrain.core.server.component_state import State, field_values

GroupMessages = list[tuple[int, Message]]  # (server group, message)


@dataclass(slots=True)
class Distance:
    """How far this server was from the other server groups, over all exchanges.

    Attributes:
        exchanges: the number of exchanges.
        updates: updates of other groups that the exchanges brought.
        most: the most updates that one exchange brought.
        moved, values: sums of squares of the differences, and of the values that they were added to.
    """

    exchanges: int = 0
    updates: int = 0
    most: int = 0
    moved: float = 0.0
    values: float = 0.0

    def add(self, updates: int, difference: torch.Tensor, value: torch.Tensor) -> None:
        """Count one exchange of a bucket."""
        self.exchanges += 1
        self.updates += updates
        self.most = max(self.most, updates)
        # Two passes over the bucket's memory, which is little beside the exchange itself.
        self.moved += _square(difference)
        self.values += _square(value)

    @property
    def mean(self) -> float:
        """Updates that an exchange brings."""
        return self.updates / self.exchanges if self.exchanges else 0.0

    @property
    def share(self) -> float:
        """The norm of the differences over that of the values, as root mean squares."""
        return math.sqrt(self.moved / self.values) if self.values > 0 else 0.0


def _square(tensor: torch.Tensor) -> float:
    """The square of the norm."""
    # A half-precision number cannot hold it.
    if tensor.dtype in (torch.float32, torch.float64):
        return float(torch.dot(tensor, tensor))
    return float(torch.linalg.vector_norm(tensor if tensor.itemsize > 2 else tensor.float())) ** 2


class GroupSync(Protocol):
    """The synchronization of one server with the other server groups."""

    @property
    def distance(self) -> Distance:
        """How far the other groups were away at the exchanges."""
        ...

    @property
    def averages(self) -> bool:
        """Whether the result is the mean of all groups, and not the masters' values."""
        ...

    def begin(self) -> None:
        """All groups start from the values that are now in place."""
        ...

    def updated(self, buckets: Sequence[int]) -> GroupMessages:
        """One more local update of these buckets was applied."""
        ...

    def meet(self, group: int, message: Message, body: torch.Tensor) -> GroupMessages:
        """A message of another server group."""
        ...

    def taken(self, group: int, bucket: int) -> int:
        """The last exchange of a group in a bucket that this server masters; 0: none."""
        ...

    def drain(self) -> GroupMessages:
        """No more local updates will come: send what is left."""
        ...

    def drained(self) -> bool:
        """After `drain`: whether no message of this server is under way."""
        ...

    def result(self, bucket: int, value: torch.Tensor) -> torch.Tensor:
        """Return this group's part of the result in a bucket, after the drain.

        value: the group's value of the bucket.
        """
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class NoSync:
    """A single server group, or groups that are not synchronized."""

    averages = False

    def __init__(self) -> None:
        self.distance = Distance()

    def begin(self) -> None:
        pass

    def updated(self, buckets: Sequence[int]) -> GroupMessages:
        return []

    def meet(self, group: int, message: Message, body: torch.Tensor) -> GroupMessages:
        return []

    def taken(self, group: int, bucket: int) -> int:
        return 0

    def drain(self) -> GroupMessages:
        return []

    def drained(self) -> bool:
        return True

    def result(self, bucket: int, value: torch.Tensor) -> torch.Tensor:
        return value

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


class MasterSync:
    """Exchange of differences with each bucket's master group.

    Args:
        group: this server's group.
        values: the buckets of this shard, and their values.
        sync_freq: local updates of a bucket between two exchanges.
    """

    averages = False

    def __init__(self, group: int, values: BucketValues, sync_freq: int) -> None:
        self._masters = {b.id: b.master for b in values.buckets if b.master != group}
        self._view = values.values
        self._freq = sync_freq
        self._snap: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._updates = dict.fromkeys(self._masters, 0)
        self._round = dict.fromkeys(self._masters, 0)
        self._waiting: set[int] = set()
        self._last_added: dict[tuple[int, int], int] = {}
        self._made = dict.fromkeys((b.id for b in values.buckets if b.master == group), 0)  # updates of all groups
        self._made_by: dict[tuple[int, int], int] = {}  # those of one of them
        self._seen = dict.fromkeys(self._masters, 0)  # updates of others
        self.distance = Distance()
        self._draining = False

    def begin(self) -> None:
        # The start is the same everywhere, so the first difference is what this group has added since.
        self._snap = {bucket: self._view(bucket).clone() for bucket in self._masters}

    def updated(self, buckets: Sequence[int]) -> GroupMessages:
        out: GroupMessages = []
        for bucket in buckets:
            if bucket in self._made:
                self._made[bucket] += 1
            elif bucket in self._masters:
                self._updates[bucket] += 1
                # One exchange of a bucket at a time: `sent` and `snap` belong to the one under way.
                if self._updates[bucket] >= self._freq and bucket not in self._waiting:
                    out.append(self._send(bucket))
        return out

    def _send(self, bucket: int) -> tuple[int, Message]:
        current = self._view(bucket)
        # The values go on changing until the reply, which counts from this point.
        self._sent[bucket] = current.clone()
        self._round[bucket] += 1
        updates, self._updates[bucket] = self._updates[bucket], 0
        self._waiting.add(bucket)
        added = current - self._snap[bucket]
        return self._masters[bucket], Delta(bucket, self._round[bucket], updates=updates, body=added)

    def meet(self, group: int, message: Message, body: torch.Tensor) -> GroupMessages:
        if isinstance(message, Delta):
            return self._take(group, message, body)
        if isinstance(message, MasterValue):
            return self._merge(message, body)
        return []

    def _take(self, group: int, message: Delta, body: torch.Tensor) -> GroupMessages:
        key = (group, message.bucket)
        # Each difference is added once, although a request may come twice.
        if message.sync == self._last_added.get(key, 0) + 1:
            value = self._view(message.bucket)
            value.add_(body)
            self._last_added[key] = message.sync
            self._made[message.bucket] = self._made.get(message.bucket, 0) + message.updates
            self._made_by[key] = self._made_by.get(key, 0) + message.updates
            self.distance.add(message.updates, body, value)
        elif message.sync > self._last_added.get(key, 0):
            return []  # an earlier one is still under way; it will be sent again
        others = self._made.get(message.bucket, 0) - self._made_by.get(key, 0)
        # A copy of the present value, also in reply to a repeated request: the first reply may be lost.
        return [(group, MasterValue(message.bucket, message.sync, others, body=self._view(message.bucket).clone()))]

    def _merge(self, message: MasterValue, body: torch.Tensor) -> GroupMessages:
        bucket = message.bucket
        if bucket not in self._waiting or message.sync != self._round[bucket]:
            return []  # a reply that came twice
        # All that the master has, and this group has not: local updates since the request stay in the values.
        missed = body - self._sent.pop(bucket)
        self._view(bucket).add_(missed)
        self.distance.add(message.updates - self._seen[bucket], missed, body)
        self._seen[bucket] = message.updates
        # The master's value, and not this group's: the next difference is this group's addition to it.
        self._snap[bucket].copy_(body)
        self._waiting.discard(bucket)
        # Updates since the request may be due already, and at the end all of them are.
        if self._updates[bucket] and (self._draining or self._updates[bucket] >= self._freq):
            return [self._send(bucket)]
        return []

    def taken(self, group: int, bucket: int) -> int:
        return self._last_added.get((group, bucket), 0)

    def remainders(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Of each bucket of another master: (master, bucket, last exchange, change since)."""
        for bucket, master in self._masters.items():
            current = self._view(bucket)
            since = self._sent[bucket] if bucket in self._waiting else self._snap[bucket]
            if not self._updates[bucket]:  # nothing; at the end of a job a master's final value may have come instead
                since = current
            yield master, bucket, self._round[bucket], current - since

    def drain(self) -> GroupMessages:
        self._draining = True
        return [self._send(b) for b in self._masters if self._updates[b] and b not in self._waiting]

    def drained(self) -> bool:
        return self._draining and not self._waiting and not any(self._updates.values())

    def result(self, bucket: int, value: torch.Tensor) -> torch.Tensor:
        return value

    def state_dict(self) -> State:
        return {
            "snap": self._snap,
            "sent": self._sent,
            "updates": self._updates,
            "round": self._round,
            "waiting": self._waiting,
            "last_added": self._last_added,
            "made": self._made,
            "made_by": self._made_by,
            "seen": self._seen,
            "distance": field_values(self.distance),
            "draining": self._draining,
        }

    def load_state_dict(self, state: State) -> None:
        self._snap, self._sent = dict(state["snap"]), dict(state["sent"])
        self._updates, self._round, self._waiting = dict(state["updates"]), dict(state["round"]), set(state["waiting"])
        self._last_added, self._made, self._made_by = (
            dict(state["last_added"]),
            dict(state["made"]),
            dict(state["made_by"]),
        )
        self._seen, self._draining = dict(state["seen"]), state["draining"]
        self.distance = Distance(*state["distance"])


class PairwiseSync:
    """Averaging in pairs of groups, in which no group waits for another one.

    A group offers its value of a bucket to a partner. The partner moves towards it by a share of what lies between
    them, and replies with the opposite change. The offerer adds that change whenever it arrives, to whatever its value
    is by then. So all changes of an exchange add up to zero: the sum over the groups is kept, with what is in replies
    under way, and no order of exchanges is a deadlock.

    Args:
        group, groups: this server's group, and how many there are (>= 2).
        values, sync_freq: as for MasterSync.
        rate: the share of the difference by which each of the two moves; 0.5: both are at the mean.
    """

    averages = True

    def __init__(self, group: int, groups: int, values: BucketValues, sync_freq: int, rate: float = 0.5) -> None:
        self._group, self._groups = group, groups
        self._buckets = [b.id for b in values.buckets]
        self._view = values.values
        self._freq, self._rate = sync_freq, rate
        self._updates = dict.fromkeys(self._buckets, 0)
        self._round = dict.fromkeys(self._buckets, 0)
        self._waiting: set[int] = set()
        # The last exchange of each group in a bucket, its reply, and the reply's mark.
        self._answers: dict[tuple[int, int], tuple[int, torch.Tensor | None, int]] = {}
        self._made = dict.fromkeys(self._buckets, 0)
        self._seen: dict[tuple[int, int], int] = {}  # updates of others that exchanges with a group have brought
        self._cut = 0
        self.distance = Distance()
        self._draining = False

    def partner(self, bucket: int, sync: int) -> int:
        """The group to which this one offers a bucket in its exchange number `sync`."""
        raise NotImplementedError

    def begin(self) -> None:
        pass

    def updated(self, buckets: Sequence[int]) -> GroupMessages:
        out: GroupMessages = []
        for bucket in buckets:
            self._made[bucket] += 1
            self._updates[bucket] += 1
            if self._updates[bucket] >= self._freq and bucket not in self._waiting:
                out += self._exchange(bucket)
        return out

    def _exchange(self, bucket: int) -> GroupMessages:
        """Begin an exchange of a bucket."""
        updates, self._updates[bucket] = self._updates[bucket], 0
        self._round[bucket] = sync = self._round[bucket] + 1
        self._waiting.add(bucket)
        # A copy: the next update may come before the offer is sent.
        body = self._view(bucket).clone()
        return [(self.partner(bucket, sync), PairOffer(bucket, sync, self._cut, updates, body=body))]

    def meet(self, group: int, message: Message, body: torch.Tensor) -> GroupMessages:
        if isinstance(message, PairOffer):
            return self._average(group, message, body)
        # A reply that came twice must not be added twice.
        if isinstance(message, PairReply) and self.awaits(message):
            return self._move(group, message, body)
        return []

    def awaits(self, message: PairReply) -> bool:
        """Whether this is the reply to the offer that is under way."""
        return message.bucket in self._waiting and message.sync == self._round[message.bucket]

    def waits(self, bucket: int) -> bool:
        """Whether an offer of a bucket is under way."""
        return bucket in self._waiting

    def _move(self, group: int, message: PairReply, change: torch.Tensor) -> GroupMessages:
        """Add the change of a reply."""
        bucket = message.bucket
        self._waiting.discard(bucket)
        value = self._view(bucket)
        value.add_(change)
        self._measure(group, bucket, message.updates, change, value)
        return []

    def _measure(self, group: int, bucket: int, updates: int, change: torch.Tensor, value: torch.Tensor) -> None:
        """Count an exchange with a group, which brought its updates up to this number."""
        seen = self._seen.get((group, bucket), 0)
        # The value has moved by a share of what lay between the two.
        self.distance.add(updates - seen, change / self._rate, value)
        self._seen[group, bucket] = updates

    def _average(self, group: int, message: PairOffer, body: torch.Tensor) -> GroupMessages:
        bucket, key = message.bucket, (group, message.bucket)
        number, change, mark = self._answers.get(key, (0, None, 0))
        if message.sync > number:
            current = self._offered_to(bucket)
            # The offerer moves by as much as this side, the other way.
            change, mark = (current - body).mul_(self._rate), self._cut
            current.sub_(change)
            # Kept for an offer that comes twice: this value has moved since. So has the mark, if a snapshot came.
            self._answers[key] = message.sync, change, mark
            self._count_offer(group, message)
        # A repeated offer: it was answered before the last one, or its reply has arrived.
        elif message.sync < number or change is None:
            return []
        return [(group, PairReply(bucket, message.sync, self._brings(group, bucket), mark, body=change))]

    def _offered_to(self, bucket: int) -> torch.Tensor:
        """The value that moves when another group offers its own."""
        return self._view(bucket)

    def _count_offer(self, group: int, message: PairOffer) -> None:
        """A group has offered its value for the first time in this exchange."""

    def _brings(self, group: int, bucket: int) -> int:
        """Updates since the start that a reply to a group brings."""
        return self._made.get(bucket, 0)

    def taken(self, group: int, bucket: int) -> int:
        return 0

    def drain(self) -> GroupMessages:
        self._draining = True
        # Nothing is sent, because the values of all groups are averaged at the end of the job (`Shutdown`).
        return []

    def drained(self) -> bool:
        return self._draining and not self._waiting

    def result(self, bucket: int, value: torch.Tensor) -> torch.Tensor:
        return value

    # --- snapshots -----------------------------------------------------------------------------------------------

    def mark(self, number: int) -> None:
        """This group freezes for a snapshot: mark what it sends from here on."""
        self._cut = number

    def begin_cut(self, bucket: int, frozen: torch.Tensor) -> None:
        """Make this group's frozen value of a bucket the begin of that of all groups."""

    def join_cut(self, frozen: torch.Tensor, value: torch.Tensor) -> None:
        """Add what another group had of a bucket."""
        frozen.add_(value)

    def end_cut(self, frozen: torch.Tensor) -> None:
        """All groups have joined."""
        frozen.div_(self._groups)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {
            "updates": self._updates,
            "round": self._round,
            "waiting": self._waiting,
            "answers": self._answers,
            "made": self._made,
            "seen": self._seen,
            "cut": self._cut,
            "distance": field_values(self.distance),
            "draining": self._draining,
        }

    def load_state_dict(self, state: State) -> None:
        self._updates, self._round, self._waiting = dict(state["updates"]), dict(state["round"]), set(state["waiting"])
        self._answers, self._made, self._seen = dict(state["answers"]), dict(state["made"]), dict(state["seen"])
        self.distance, self._draining = Distance(*state["distance"]), state["draining"]
        self._cut = state["cut"]


class RingSync(PairwiseSync):
    """Pairwise averaging with the right neighbor in the ring of server groups."""

    def partner(self, bucket: int, sync: int) -> int:
        return (self._group + 1) % self._groups
