"""Loaders of every kind that are divided over workers, and the workers that share one."""

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    get_worker_info,
)

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import AppliedBatchesReply, Fail, Message
from topotrain.training.data.data_messages import (
    DrawnBatches,
    DrawRequest,
    Lease,
    LeaseRelease,
    LeaseRequest,
    PassBegun,
)
from topotrain.training.data.lease_queue import LeaseQueue
from topotrain.training.data.sampling import CHUNK, Chunk


class LeaseServer:
    """The queue of leases and the replies to every worker; a request that is held makes its thread wait."""

    def __init__(self, groups: int, workers: int) -> None:
        self.workers = [Address(Role.WORKER, g, i) for g in range(groups) for i in range(workers)]
        self.book = LeaseQueue(groups, workers)
        self.replies: dict[Address, queue.SimpleQueue[Message]] = {who: queue.SimpleQueue() for who in self.workers}
        self.lock = threading.Lock()
        self.ended: Counter[int] = Counter()
        self.applied: dict[int, int] = {}

    def tell(self, who: Address, message: Message) -> None:
        with self.lock:
            self.post(self.book.handle(who, message))

    def end(self, who: Address) -> None:
        with self.lock:
            self.ended[who.group] += 1
            if self.ended[who.group] * (self.workers[-1].group + 1) == len(self.workers):
                self.post(self.book.group_over(who.group))

    def post(self, replies: list[tuple[Address, Message]]) -> None:
        for to, reply in replies:
            assert not isinstance(reply, Fail), reply.text
            self.replies[to].put(reply)


@dataclass
class LoaderClient:
    """One worker's client of the leases, and what it reported."""

    lease_server: LeaseServer
    who: Address
    drawn_: list[tuple[int, int, float | None, int]] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    lost_: int = 0
    done_by_others: int = 0
    since: int = -1
    most: int = -1
    own_steps: int = 0

    def lease(
        self, epoch: int, ordinal: int, total: int, digest: int, passed: int, wait: bool, uncounted: int = -1
    ) -> tuple[int, int, int]:
        self.lease_server.tell(
            self.who, LeaseRequest(epoch, ordinal, total, digest, passed, wait, uncounted, self.most)
        )
        reply = self.lease_server.replies[self.who].get(timeout=20)
        assert isinstance(reply, Lease), reply
        self.done_by_others = reply.done_by_others
        return reply.lease, reply.first, reply.last

    def applied(self, stream: int) -> int:
        return self.lease_server.applied.get(stream, 0)

    def progress(self, stream: int) -> AppliedBatchesReply:
        return AppliedBatchesReply(stream, self.applied(stream))

    def free(self, epoch: int, ordinal: int, first: int) -> None:
        self.lease_server.tell(self.who, LeaseRelease(epoch, ordinal, first))

    def put_draw(self, epoch: int, chunk: int, drawn: Chunk, keep: bool = False) -> None:
        sizes, indices, end = drawn
        assert len(sizes) + len(indices) <= CHUNK
        self.lease_server.tell(self.who, DrawnBatches(epoch, chunk, end, sizes, indices, keep))

    def begin_pass(self, *told: int, **content: int) -> None:
        self.lease_server.tell(self.who, PassBegun(*told, **content))

    def get_draw(self, epoch: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        self.lease_server.tell(self.who, DrawRequest(epoch, chunk, since=min(self.since, epoch)))
        reply = self.lease_server.replies[self.who].get(timeout=20)
        assert isinstance(reply, DrawnBatches)
        return reply.sizes, reply.indices, reply.end

    def drawn(self, stream: int, seq: int, weight: float | None, samples: int, made: int = 0) -> None:
        self.drawn_.append((stream, seq, weight, samples))

    def left_early(self, epoch: int, batches: int) -> None:
        self.left.append((epoch, batches))

    def over(self) -> None:
        self.over_ = True

    def lost(self, stream: int, batches: int) -> None:
        self.lost_ += batches

    def first_uncounted(self, epoch: int) -> int:
        return epoch


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if not 0 <= int(i) < self.n:
            raise IndexError(i)
        return torch.tensor(int(i))


class Stream(IterableDataset[int]):
    """Numbers, shared out among the loader's processes as torch's documentation has it."""

    def __init__(self, n: int, shuffle: bool = False) -> None:
        self.n, self.shuffle = n, shuffle

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = list(range(self.n))[info.id :: info.num_workers] if info else list(range(self.n))
        if self.shuffle:
            random.shuffle(mine)
        return iter(mine)


class Doubled(DataLoader[Any]):
    """A subclass that looks at its own batches."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 2


def batches_of_own() -> list[list[int]]:
    return [[3, 1], [2], [0, 4, 5, 6]]


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(11), 4),
    "shuffled": lambda: DataLoader(Numbers(11), 4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Numbers(11), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "subset": lambda: DataLoader(Numbers(11), 2, sampler=SubsetRandomSampler([2, 4, 6, 8])),
    "batch sampler": lambda: DataLoader(Numbers(11), batch_sampler=batches_of_own()),
    "keys": lambda: DataLoader(Numbers(11), batch_size=None, sampler=RandomSampler(Numbers(11))),
    "processes": lambda: DataLoader(Numbers(11), 2, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Numbers(11), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(11, shuffle=True), 4),
    "stream in processes": lambda: DataLoader(Stream(11, shuffle=True), 2, num_workers=2, prefetch_factor=3),
    "stream of items": lambda: DataLoader(Stream(5), batch_size=None),
    "subclass": lambda: Doubled(Numbers(11), 4, shuffle=True),
    "stream, subclass": lambda: Doubled(Stream(11), 4),
}


def flat(batch: Any) -> list[int]:
    return batch.tolist() if isinstance(batch, torch.Tensor) and batch.ndim else [int(batch)]
