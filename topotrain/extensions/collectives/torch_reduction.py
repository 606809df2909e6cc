"""Gradients that torch.distributed adds up (`cluster { engine: kGloo | kNccl }`).

All workers of the group start the same collectives in the same order. They are the sums of the buckets from the last to
the first, each as soon as it and all before it are full, with zeros where a worker has no gradient. Then follows one
vector with the sum of the weights and, for each piece, the number of workers that have it.

Each worker hands the gradient of its own server's shard to that server. The step, its commit and the new values go
through the servers as in other jobs. The flat buffers are host memory, so NCCL gets copies of them on the GPU.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from topotrain.config.job import ConfigError, Engine, Grads, Job, Reduce
from topotrain.config.sharding import Bucket
from topotrain.core import protocol as m
from topotrain.core.client.client_context import PeerLost, StepEnd
from topotrain.core.client.step_exchange import GradientExchange, Means
from topotrain.core.protocol import NO_REVISION
from topotrain.extensions.collectives.torch_backend import (
    DEADLINE,
    CollectiveError,
    CollectiveWork,
    TorchCollective,
    check_engine,
)

Contribution = tuple[float, int, torch.Tensor]  # weight, bitmap of pieces, gradient


@dataclass(frozen=True, slots=True)
class _PendingSum:
    """A sum in flight.

    `total` is on the host. The engine adds up in `made`, which for NCCL is on the GPU.
    """

    work: CollectiveWork
    total: torch.Tensor
    made: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        if self.made is not self.total:
            self.total.copy_(self.made)


@dataclass(frozen=True, slots=True)
class TorchCollectiveConfig:
    """The job, the store of the rendezvous, and the address, as for `TorchCollective`."""

    job: Job
    store: Any
    address: str = ""


class TorchReduction(GradientExchange):
    """One worker's part of the sums.

    Args:
        config: how the group adds up.

    Raises:
        ConfigError: this machine, or its build of torch, does not have the engine.
    """

    def __init__(self, config: TorchCollectiveConfig) -> None:
        check_engine(config.job.cluster.engine)
        self._engine = config.job.cluster.engine
        self._config = config
        self._divide = config.job.reduce is Reduce.kMean
        self._hidden = config.job.grads is Grads.kHidden
        self._device = torch.device("cpu")
        self._group: TorchCollective | None = None
        self._full: dict[int, Contribution] = {}
        self._next: int | None = None  # the next bucket in the order of the collectives; None: no sum has begun
        self._pending: list[_PendingSum] = []

    def start(self, device: torch.device) -> None:
        """Join the other workers of the group."""
        if self._engine is Engine.kNccl and device.type != "cuda":
            raise ConfigError("cluster.engine", self._engine, "needs a model on a GPU, and this one is on the CPU")
        self._device, config = device, self._config
        rank, size, at = self.channel.me.index, self.channel.group_size, device.index or 0
        group = TorchCollective(self._engine, config.store, rank, size, DEADLINE, device=at, address=config.address)
        self._group = group

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
        """Take part in the sum of a bucket."""
        self._full[bucket.id] = (weight, present, body)
        if not self._hidden:  # hidden gradients may be replaced by a later push, until the step is committed
            self._start_sums(step, ordinal, only_full=True)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int, absent: bool = False) -> None:
        # The server of this worker's shard compares it with the others' commits: it can name a worker that left a
        # backward out, while the collectives would only time out.
        server = self.channel.servers[self.channel.me.index]
        # The bits are empty, because no server adds up a part of this worker.
        self.channel.send(server, m.BackwardEnd(step, ordinal, weight, b"", self.channel.exits))
        self._end_sums(step, ordinal, weight)

    def _start_sums(self, step: int, ordinal: int, only_full: bool) -> None:
        if self._next is None:
            # All workers must start the same collectives in one order. Backward fills the last bucket first.
            self._next = len(self.model.map.buckets) - 1
            # One vector for all counts, since even a collective of a few bytes costs a round of messages.
            self._counts = torch.zeros(1 + self.model.first_piece[-1], dtype=torch.float64)
        while self._next >= 0 and not (only_full and self._next not in self._full):
            bucket = self.model.map.buckets[self._next]
            self._next -= 1
            with self.channel.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
                self._add(bucket, self._full.pop(bucket.id, None))

    def _add(self, bucket: Bucket, mine: Contribution | None) -> None:
        total = self.model.flats.view("mean", bucket)
        if mine is None:
            total.zero_()
        else:
            weight, present, body = mine
            first = 1 + self.model.first_piece[bucket.id]
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
        # NCCL adds up on the GPU, and `total` is host memory.
        made = tensor.to(self._device) if self._engine is Engine.kNccl else tensor
        try:
            self._pending.append(_PendingSum(self._group.all_reduce(made), tensor, made))
        except CollectiveError as error:
            self._raise(error)

    def _end_sums(self, step: int, ordinal: int, weight: float) -> None:
        self._start_sums(step, ordinal, only_full=False)
        # After the sums of all buckets, because the weights decide how those are divided.
        self._counts[0] = max(weight, 0.0)
        self._all_reduce(self._counts)
        self._next = None

    def wait_means(self) -> tuple[Means, int]:
        """As `GradientExchange.wait_means`.

        Raises:
            JobError: a server has sent the reason why the group's workers do not come together.
            PeerLost: another worker is gone, or did not take part within the engine's deadline.
        """
        pending, self._pending = self._pending, []
        with self.channel.spans.span("wait for means"):
            try:
                for one in pending:
                    one.wait()
            except CollectiveError as error:
                self._raise(error)
        weight, *counts = self._counts.tolist()
        means, first = {}, self.model.first_piece
        for bucket in self.model.map.buckets:
            here = counts[first[bucket.id] : first[bucket.id + 1]]
            present = sum(1 << i for i, count in enumerate(here) if count)
            if present:
                mean = self.model.flats.view("mean", bucket)
                if self._divide and weight > 0:
                    mean.div_(weight)
                means[bucket.id] = (present, mean)
        return means, 0

    def _raise(self, error: CollectiveError) -> None:
        """A server may know why another worker does not take part; its reason comes first."""
        # The transport's thread sets the failure under this lock.
        with self.channel.waiter.update():
            known = self.channel.failure
        raise known or PeerLost(
            f"{error}; the workers of a group must run the same backwards, and none may be late by more than that"
        ) from error

    # --- a step --------------------------------------------------------------------------------------------------

    def before_commit(self, step: int, end: StepEnd) -> StepEnd:
        """With `grads: kHidden` add up the gradients, and hand them in as they are."""
        if not self._hidden:
            return end
        # A push that the commit does not name does not count.
        for number, revision in enumerate(end.revisions):
            if revision == NO_REVISION:
                self._full.pop(number, None)
        self._end_sums(step, 0, end.weight)
        self._full.clear()
        means, _ = self.wait_means()
        edited = 0
        for number, (present, mean) in means.items():
            bucket = self.model.map.buckets[number]
            edited |= present << self.model.first_piece[number]
            if bucket.shard == self.channel.me.index:
                self.edit(step, bucket, mean)
        return replace(end, revisions=(), edited=edited)

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
