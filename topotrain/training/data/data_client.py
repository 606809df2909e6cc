"""A worker's door to the desk in server (0,0): which batches it reads, how far its data is applied, and what it leaves
there for the process that may take its place.

Rule: one question at a time, and the reply to just this one; what answers an earlier one is no answer.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_types import Waiter
from topotrain.extensions.resume import worker_state_store
from topotrain.training.data.lease_queue import LEAVES

T = TypeVar("T", bound=m.Message)


class ClientAccess(Protocol):
    """How a part of a worker's door speaks and waits (`client.Client`)."""

    @property
    def me(self) -> Address: ...

    @property
    def waiter(self) -> Waiter: ...

    def tell(self, to: Address, message: m.Message) -> None:
        """Send a message."""
        ...

    def mention(self, to: Address, message: m.Message) -> None:
        """Send what may be said while an iterator is collected: with the job over, there is nobody to tell."""
        ...

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what was asked for. Raises JobError, PeerLost."""
        ...

    def fetch(self) -> None:
        """Wait for current values of the whole model."""
        ...


class DataClient:
    """What a loader asks of the servers (`distributed_loader.Desk`), and where a worker's state is kept.

    Args:
        voice: see there.
        desk: server (0,0).
        home: the coordinator of the worker's servers.
        bounded: the job has a `max_staleness`.
    """

    def __init__(self, voice: ClientAccess, desk: Address, home: Address, bounded: bool) -> None:
        self._voice, self._desk, self._home, self._bounded = voice, desk, home, bounded
        self._answers: Callable[[m.Message], bool] = lambda _: False  # to the last question
        self._replies: list[m.Message] = []
        self._arrivals: dict[int, worker_state_store.PartialState] = {}
        self._deposited: dict[int, torch.Tensor | None] = {}
        self.leaves = False
        """The group leaves the job, and is not to wait for batches that others may leave."""
        self.drawing: Callable[[int, int], None] = lambda epoch, chunk: None  # a draw is to be told, or awaited

    def take(self, message: m.Message) -> None:
        """What a server says, if it is for us."""
        if isinstance(message, m.WorkerStatePart):
            self._take_deposit(message)
        elif self._answers(message):
            self._replies.append(message)

    # --- data ----------------------------------------------------------------------------------------------------

    def lease(self, epoch: int, ordinal: int, total: int, digest: int, passed: int, wait: bool) -> tuple[int, int, int]:
        """(lease, first, last); see message.Lease."""

        def answers(reply: m.Lease) -> bool:
            none_now = reply.first == reply.last
            return (reply.epoch, reply.ordinal) == (epoch, ordinal) and not (wait and none_now)

        if wait and self._bounded:
            self._voice.tell(self._home, m.GroupIdle(epoch, ordinal, True))
        reply = self._ask(self._desk, m.LeaseRequest(epoch, ordinal, total, digest, passed, wait), m.Lease, answers)
        # The end of an epoch is told to whoever asks, but each worker asks for it once with `wait`: the fetches of a
        # group's workers must be as many.
        self.leaves = self.leaves or reply.lease == LEAVES
        if self._bounded and not self.leaves and (reply.rested or (wait and reply.last < 0)):
            self._end_rest(m.GroupIdle(epoch, ordinal, False))
        return reply.lease, reply.first, reply.last

    def _end_rest(self, rest: m.GroupIdle) -> None:
        """Others went on meanwhile; what this group has read is older than the job allows."""
        self._ask(self._home, rest, m.GroupIdle, lambda echo: echo == rest)
        self._voice.fetch()

    def free(self, epoch: int, ordinal: int, first: int) -> None:
        """Give the rest of the epoch's leases back."""
        self._voice.mention(self._desk, m.LeaseRelease(epoch, ordinal, first))

    def applied(self, stream: int) -> int:
        """How many batches of a data stream the servers have applied; of stream -1, how many steps of this group."""
        question = m.AppliedBatchesRequest(stream)
        return self._ask(self._home, question, m.AppliedBatchesReply, lambda at: at.stream == stream).count

    def put_draw(self, epoch: int, chunk: int, end: bool, sizes: Sequence[int], indices: Sequence[int]) -> None:
        """Tell the others of the job which samples the batches have."""
        self.drawing(epoch, chunk)
        self._voice.tell(self._desk, m.DrawnBatches(epoch, chunk, end, tuple(sizes), tuple(indices)))

    def get_draw(self, epoch: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """(batch sizes, indices, end) of a run of batches that worker (0,0) drew."""
        self.drawing(epoch, chunk)
        question = m.DrawRequest(epoch, chunk)
        reply = self._ask(self._desk, question, m.DrawnBatches, lambda put: (put.epoch, put.chunk) == (epoch, chunk))
        return reply.sizes, reply.indices, reply.end

    def _ask(self, server: Address, question: m.Message, kind: type[T], answers: Callable[[T], bool]) -> T:
        """Ask and wait for the reply to just this question."""
        with self._voice.waiter.update():
            self._replies.clear()
            self._answers = lambda reply: isinstance(reply, kind) and answers(reply)
        self._voice.tell(server, question)
        self._voice.wait_until(lambda: bool(self._replies))
        reply = self._replies[0]
        assert isinstance(reply, kind)
        return reply

    # --- what the next process of this worker needs ----------------------------------------------------------------

    def deposit(self, number: int, data: torch.Tensor) -> None:
        """Leave this worker's state at server (0,0): 1-D uint8 that nobody changes. See `message.WorkerStatePart`."""
        for part in worker_state_store.cut(self._voice.me, number, data):
            self._voice.tell(self._desk, part)

    def deposited(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the process before this one left: its state when its last epoch began, and what had changed since."""
        with self._voice.waiter.update():
            self._arrivals.clear()
            self._deposited.clear()
        self._voice.tell(self._desk, m.WorkerStateRequest())
        self._voice.wait_until(lambda: self._deposited.keys() >= {worker_state_store.EPOCH, worker_state_store.SINCE})
        return self._deposited[worker_state_store.EPOCH], self._deposited[worker_state_store.SINCE]

    def _take_deposit(self, message: m.WorkerStatePart) -> None:
        if not message.parts:
            if message.number in (worker_state_store.EPOCH, worker_state_store.SINCE):
                self._deposited[message.number] = None
            return
        if message.body is None:
            raise m.ProtocolError("Deposit without a body")
        whole = self._arrivals.setdefault(message.number, worker_state_store.PartialState()).take(message, message.body)
        if whole is not None:
            self._deposited[message.number] = whole
