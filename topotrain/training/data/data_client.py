"""The client of the data service in server (0,0): which batches a worker reads, and how far its data is applied.

Rule: one question at a time, and the reply to just this one; what answers an earlier one is no answer.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_extension import ClientAccess, ClientExtension
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest, Lease, LeaseRelease, LeaseRequest
from topotrain.training.data.lease_queue import LEAVES

T = TypeVar("T", bound=m.Message)


class DataClient(ClientExtension):
    """What a loader asks of the servers (`distributed_loader.Desk`).

    Args:
        bounded: the job has a `max_staleness`.
    """

    messages = (Lease, m.GroupIdle, m.AppliedBatchesReply, DrawnBatches)

    def __init__(self, bounded: bool) -> None:
        self._bounded = bounded
        self._answers: Callable[[m.Message], bool] = lambda _: False  # to the last question
        self._replies: list[m.Message] = []
        self.leaves = False
        """The group leaves the job, and is not to wait for batches that others may leave."""
        self.drawing: Callable[[int, int], None] = lambda epoch, chunk: None  # a draw is to be told, or awaited

    def bind(self, client: ClientAccess) -> None:
        """As `ClientExtension.bind`."""
        self._client, self._desk, self._home = client, client.desk, client.servers[0]

    def handle(self, sender: Address, message: m.Message) -> None:
        """A reply; kept if it answers the last question."""
        if self._answers(message):
            self._replies.append(message)

    # --- data ----------------------------------------------------------------------------------------------------

    def lease(self, epoch: int, ordinal: int, total: int, digest: int, passed: int, wait: bool) -> tuple[int, int, int]:
        """(lease, first, last); see message.Lease."""

        def answers(reply: Lease) -> bool:
            none_now = reply.first == reply.last
            return (reply.epoch, reply.ordinal) == (epoch, ordinal) and not (wait and none_now)

        if wait and self._bounded:
            self._client.tell(self._home, m.GroupIdle(epoch, ordinal, True))
        reply = self._ask(self._desk, LeaseRequest(epoch, ordinal, total, digest, passed, wait), Lease, answers)
        # The end of an epoch is told to whoever asks, but each worker asks for it once with `wait`: the fetches of a
        # group's workers must be as many.
        self.leaves = self.leaves or reply.lease == LEAVES
        if self._bounded and not self.leaves and (reply.rested or (wait and reply.last < 0)):
            self._end_rest(m.GroupIdle(epoch, ordinal, False))
        return reply.lease, reply.first, reply.last

    def _end_rest(self, rest: m.GroupIdle) -> None:
        """Others went on meanwhile; what this group has read is older than the job allows."""
        self._ask(self._home, rest, m.GroupIdle, lambda echo: echo == rest)
        self._client.fetch()

    def free(self, epoch: int, ordinal: int, first: int) -> None:
        """Give the rest of the epoch's leases back."""
        self._client.mention(self._desk, LeaseRelease(epoch, ordinal, first))

    def applied(self, stream: int) -> int:
        """How many batches of a data stream the servers have applied; of stream -1, how many steps of this group."""
        question = m.AppliedBatchesRequest(stream)
        return self._ask(self._home, question, m.AppliedBatchesReply, lambda at: at.stream == stream).count

    def put_draw(self, epoch: int, chunk: int, end: bool, sizes: Sequence[int], indices: Sequence[int]) -> None:
        """Tell the others of the job which samples the batches have."""
        self.drawing(epoch, chunk)
        self._client.tell(self._desk, DrawnBatches(epoch, chunk, end, tuple(sizes), tuple(indices)))

    def get_draw(self, epoch: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """(batch sizes, indices, end) of a run of batches that worker (0,0) drew."""
        self.drawing(epoch, chunk)
        question = DrawRequest(epoch, chunk)
        reply = self._ask(self._desk, question, DrawnBatches, lambda put: (put.epoch, put.chunk) == (epoch, chunk))
        return reply.sizes, reply.indices, reply.end

    def _ask(self, server: Address, question: m.Message, kind: type[T], answers: Callable[[T], bool]) -> T:
        """Ask and wait for the reply to just this question."""
        with self._client.waiter.update():
            self._replies.clear()
            self._answers = lambda reply: isinstance(reply, kind) and answers(reply)
        self._client.tell(server, question)
        self._client.wait_until(lambda: bool(self._replies))
        reply = self._replies[0]
        assert isinstance(reply, kind)
        return reply
