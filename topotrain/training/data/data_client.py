"""The client of the data service in server (0,0): leases, draws, applied batches.

A worker has one request at a time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.server.gradients.gradient_source import SAME_BATCHES
from topotrain.training.data.data_messages import (
    DrawnBatches,
    DrawRequest,
    Lease,
    LeaseRelease,
    LeaseRequest,
    PassBegun,
)
from topotrain.training.data.lease_queue import LEAVES
from topotrain.training.data.sampling import Chunk

T = TypeVar("T", bound=m.Message)
_MOST_PUT = 1024  # passes of which a late message may tell


class DrawObserver:
    """An action before a draw is sent or awaited. The method does nothing here."""

    def draw(self, epoch: int, chunk: int) -> None:
        """Worker (0,0) sends a chunk of the epoch's draw next, or another awaits it."""


class DataClient(ClientExtension):
    """Requests of a loader to the servers.

    Args:
        bounded: other groups may wait for the steps of this one.
    """

    messages = (Lease, m.GroupIdle, m.AppliedBatchesReply, DrawnBatches, DrawRequest)

    def __init__(self, bounded: bool) -> None:
        self._bounded = bounded
        self._answers: Callable[[m.Message], bool] = lambda _: False  # whether a message replies to the last request
        self._replies: list[m.Message] = []
        self.leaves = False
        """The group leaves the job, and is not to wait for batches that others may leave."""
        self.done_by_others = 0
        """As the last lease has it."""
        self.most = -1
        """As `LeaseRequest` has it."""
        self.since = -1
        """The first pass that the script still reads. -1: the one that it draws from."""
        self._observer = DrawObserver()
        self._put: dict[int, int] = {}  # by epoch, the last chunk that this worker has drawn

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel, self._values = channel, values
        self._first_server, self._coordinator = channel.first_server, channel.servers[0]

    def handle(self, sender: Address, message: m.Message) -> None:
        """Keep a reply to the last request."""
        if isinstance(message, DrawRequest):
            # This worker waits for the other one in a step.
            if message.chunk > self._put.get(message.epoch, -1):
                words = (
                    f"worker {message.worker} of the group is at the end of its batches, and has left out the step of"
                )
                self._channel.on_failure(sender, m.Fail(f"{words} this worker; {SAME_BATCHES}"))
            return
        # A reply to an earlier request, delivered once more, is dropped.
        if self._answers(message):
            self._replies.append(message)

    def observe(self, observer: DrawObserver) -> None:
        """Call this observer before each later draw."""
        self._observer = observer

    def lease(
        self, epoch: int, ordinal: int, total: int, digest: int, passed: int, wait: bool, uncounted: int = -1
    ) -> tuple[int, int, int]:
        """(lease, first, last); see message.Lease."""

        def answers(reply: Lease) -> bool:
            # The reply to the same request without `wait`, which may come late or twice.
            none_now = reply.first == reply.last
            return (reply.epoch, reply.ordinal) == (epoch, ordinal) and not (wait and none_now)

        # While this group waits for a lease, its clock must not hold up the others.
        if wait and self._bounded:
            self._channel.send(self._coordinator, m.GroupIdle(epoch, ordinal, True))
        request = LeaseRequest(epoch, ordinal, total, digest, passed, wait, uncounted, self.most)
        reply = self._ask(self._first_server, request, Lease, answers)
        # Without `wait` only a lease that the group had to wait for ends its idle time. With `wait` the end of an epoch
        # does, for which each worker asks once: all workers of a group must fetch equally often.
        self.leaves = self.leaves or reply.lease == LEAVES
        self.done_by_others = reply.done_by_others
        if self._bounded and not self.leaves and (reply.rested or (wait and reply.last < 0)):
            self._end_idle(m.GroupIdle(epoch, ordinal, False))
        return reply.lease, reply.first, reply.last

    def _end_idle(self, idle: m.GroupIdle) -> None:
        """End the idle time of this group, and fetch the present values."""
        # The other groups went on meanwhile, so the values here are older than `max_staleness` allows.
        self._ask(self._coordinator, idle, m.GroupIdle, lambda echo: echo == idle)
        self._values.fetch()

    def free(self, epoch: int, ordinal: int, first: int) -> None:
        """Give the rest of the epoch's leases back, without waiting."""
        # The script leaves its loop here, perhaps at the end of the process: an ended connection is no error.
        self._channel.try_send(self._first_server, LeaseRelease(epoch, ordinal, first))

    def applied(self, stream: int) -> int:
        """Batches of a stream that the servers have applied; of -1, the group's steps."""
        return self.progress(stream).count

    def progress(self, stream: int) -> m.AppliedBatchesReply:
        """The progress of the servers in a stream."""
        question = m.AppliedBatchesRequest(stream)
        return self._ask(self._coordinator, question, m.AppliedBatchesReply, lambda at: at.stream == stream)

    def put_draw(self, epoch: int, chunk: int, drawn: Chunk, keep: bool = False) -> None:
        """Send the samples of batches to the other workers of the job.

        keep: as in DrawnBatches.
        """
        self._observer.draw(epoch, chunk)
        self._put[epoch] = chunk
        self._put.pop(epoch - _MOST_PUT, None)
        sizes, indices, end = drawn
        self._channel.send(self._first_server, DrawnBatches(epoch, chunk, end, tuple(sizes), tuple(indices), keep))

    def begin_pass(self, *what: int, **more: Any) -> None:
        """Send `PassBegun`. The job fails if another worker reads something else."""
        self._channel.send(self._first_server, PassBegun(*what, **more))

    def get_draw(self, epoch: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """(batch sizes, indices, end) of a run of batches that worker (0,0) drew."""
        self._observer.draw(epoch, chunk)
        question = DrawRequest(epoch, chunk, since=min(self.since, epoch))
        reply = self._ask(
            self._first_server, question, DrawnBatches, lambda put: (put.epoch, put.chunk) == (epoch, chunk)
        )
        return reply.sizes, reply.indices, reply.end

    def _ask(self, server: Address, question: m.Message, kind: type[T], answers: Callable[[T], bool]) -> T:
        """Send a request and wait for the reply to just this one."""
        with self._channel.waiter.update():
            # Under exclusive access: a late reply to the last request may be arriving now.
            self._replies.clear()
            self._answers = lambda reply: isinstance(reply, kind) and answers(reply)
        self._channel.send(server, question)
        self._channel.wait_until(lambda: bool(self._replies))
        reply = self._replies[0]
        assert isinstance(reply, kind)
        return reply
