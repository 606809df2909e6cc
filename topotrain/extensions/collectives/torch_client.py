"""A worker's door where torch.distributed adds up the gradients (`cluster { engine: kGloo | kNccl }`).

Rule: all workers of the group start the same collectives in the same order: the buckets from the last to the first,
each as soon as it and all before it are full, zeros where a worker has no gradient, and then one vector with the sum
of the weights and, for each piece, how many have it. Each worker then hands the part of the server beside it in; the
step, its commit and the new values are the servers' business and travel on our own roads. The flat buffers are the
host's memory: NCCL is given copies of them on the GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from topotrain.config.job import ConfigError, Engine, Grads, Job, Reduce
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.bitmaps import NO_REVISION
from topotrain.core.client.client import Client, PeerLost, StepEnd, Waiter
from topotrain.core.client.client_extension import ClientExtension
from topotrain.extensions.collectives.torch_backend import (
    DEADLINE,
    CollectiveError,
    CollectiveWork,
    TorchCollective,
    check_engine,
)

Part = tuple[float, int, torch.Tensor]  # weight, bitmap of pieces, gradient


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum under way: `total` on the host, and where it is made, which for NCCL is a copy on the GPU."""

    work: CollectiveWork
    total: torch.Tensor
    made: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        if self.made is not self.total:
            self.total.copy_(self.made)


@dataclass(frozen=True, slots=True)
class TorchCollectiveConfig:
    """The job, the store of the group's rendezvous, and the address it binds to (as for `TorchCollective`)."""

    job: Job
    store: Any
    address: str = ""


class TorchCollectiveClient(Client):
    """One worker's door; see the rule above.

    Args:
        me, topology, send, waiter, shared, incarnation, extensions: as for `Client`.
        config: how the group adds up.

    Raises:
        ConfigError: this machine, or its build of torch, does not have the engine.
    """

    def __init__(
        self,
        me: Address,
        topology: Topology,
        send: Callable[[Address, m.Message], None],
        waiter: Waiter,
        shared: bool,
        incarnation: int,
        extensions: Sequence[ClientExtension],
        config: TorchCollectiveConfig,
    ) -> None:
        super().__init__(me, topology, send, waiter, shared, incarnation, extensions)
        job = config.job
        check_engine(job.cluster.engine)
        self._engine = job.cluster.engine
        self._store, self._address = config.store, config.address
        self._divide = job.reduce is Reduce.kMean
        self._hidden = job.grads is Grads.kHidden
        self._group: TorchCollective | None = None
        self._parts: dict[int, Part] = {}
        self._next: int | None = None  # the bucket whose turn it is; None: no reduction is under way
        self._works: list[_Sum] = []

    def fetch(self) -> None:
        """Wait for current values of all slices; the first time, also for the other workers of the group."""
        super().fetch()
        if self._group is None:
            self._group = self._join()

    def _join(self) -> TorchCollective:
        if self._engine is Engine.kNccl and self.device.type != "cuda":
            raise ConfigError("cluster.engine", self._engine, "needs a model on a GPU, and this one is on the CPU")
        rank, size = self.me.index, self.group_size
        at = self.device.index or 0
        return TorchCollective(self._engine, self._store, rank, size, DEADLINE, device=at, address=self._address)

    # --- a sum ---------------------------------------------------------------------------------------------------

    def push(
        self,
        step: int,
        ordinal: int,
        bucket: Bucket,
        weight: float,
        present: int,
        body: torch.Tensor,
        fresh: bool = False,
    ) -> None:
        """Take part in the sum of a bucket. The body must stay until the mean is back, or the step committed."""
        self._parts[bucket.id] = (weight, present, body)
        if not self._hidden:  # else a later push may replace it until the step is committed
            self._start(step, ordinal, only_full=True)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int) -> None:
        """This worker's backward is over; `pushed` is a bitmap over all buckets."""
        # The server beside compares it with the others' commits: it can name who left a backward out.
        self._send(self.servers[self.me.index], m.BackwardEnd(step, ordinal, weight, b"", self._exits))
        self._end_sums(step, ordinal, weight)

    def _start(self, step: int, ordinal: int, only_full: bool) -> None:
        if self._next is None:
            self._next = len(self.map.buckets) - 1
            self._counts = torch.zeros(1 + self._piece_base[-1], dtype=torch.float64)
        while self._next >= 0 and not (only_full and self._next not in self._parts):
            bucket = self.map.buckets[self._next]
            self._next -= 1
            with self.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
                self._add(bucket, self._parts.pop(bucket.id, None))

    def _add(self, bucket: Bucket, part: Part | None) -> None:
        total = self.flats.view("mean", bucket)
        if part is None:
            total.zero_()
        else:
            weight, present, body = part
            first = 1 + self._piece_base[bucket.id]
            for i in range(len(bucket.pieces)):
                self._counts[first + i] = present >> i & 1
            if weight <= 0:
                total.zero_()
            elif self._divide and weight != 1.0:
                torch.mul(body, weight, out=total)
            else:
                total.copy_(body)
        self._all_reduce(total)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        made = tensor.to(self.device) if self._engine is Engine.kNccl else tensor
        try:
            self._works.append(_Sum(self._group.all_reduce(made), tensor, made))
        except CollectiveError as error:
            self._explain(error)

    def _end_sums(self, step: int, ordinal: int, weight: float) -> None:
        self._start(step, ordinal, only_full=False)
        self._counts[0] = max(weight, 0.0)
        self._all_reduce(self._counts)
        self._next = None

    def wait_means(self) -> tuple[dict[int, tuple[int, torch.Tensor]], int]:
        """The group's means of this backward, as `Client.wait_means` gives them.

        Raises:
            JobError: a server has said why the group's workers do not come together.
            PeerLost: another worker is gone, or did not take part within the engine's deadline.
        """
        works, self._works = self._works, []
        with self.spans.span("wait for means"):
            try:
                for work in works:
                    work.wait()
            except CollectiveError as error:
                self._explain(error)
        weight, *counts = self._counts.tolist()
        means = {}
        for bucket in self.map.buckets:
            here = counts[self._piece_base[bucket.id] : self._piece_base[bucket.id + 1]]
            present = sum(1 << i for i, count in enumerate(here) if count)
            if present:
                mean = self.flats.view("mean", bucket)
                if self._divide and weight > 0:
                    mean.div_(weight)
                means[bucket.id] = (present, mean)
        return means, 0

    def _explain(self, error: CollectiveError) -> None:
        with self._waiter.update():
            known = self._failure
        raise known or PeerLost(
            f"{error}; the workers of a group must run the same backwards, and none may be late by more than that"
        ) from error

    # --- a step --------------------------------------------------------------------------------------------------

    def _begin_commit(self, step: int, end: StepEnd) -> None:
        self.settle()
        super()._begin_commit(step, self._hand_in(step, end) if self._hidden else end)

    def _hand_in(self, step: int, end: StepEnd) -> StepEnd:
        """With `grads: kHidden` the gradients are added up only here, and handed in as they are."""
        for number, revision in enumerate(end.revisions):
            if revision == NO_REVISION:
                self._parts.pop(number, None)
        self._end_sums(step, 0, end.weight)
        self._parts.clear()
        means, _ = self.wait_means()
        there = 0
        for number, (present, mean) in means.items():
            bucket = self.map.buckets[number]
            there |= present << self._piece_base[number]
            if bucket.shard == self.me.index:
                self.edit(step, bucket, mean)
        return replace(end, revisions=(), edited=there)

    def leave(self) -> None:
        """From here on, connections may end."""
        super().leave()
        group, self._group = self._group, None
        if group is not None:
            group.close()
