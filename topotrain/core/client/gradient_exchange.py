"""The exchange of gradients between the workers of a group, for one worker.

`GradientExchange` is the contract. `ServerReduction` sends gradients to servers, which add them up.
"""

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.bitmaps import bits_to_int, int_to_bits
from topotrain.core.client.client_model import ClientModel
from topotrain.core.client.client_types import StepEnd, present_body
from topotrain.core.client.server_channel import ServerChannel
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.schema import typed
from topotrain.core.protocol.message_validation import check_bits

Means = dict[int, tuple[int, torch.Tensor]]
"""Bucket number -> bitmap of its pieces, and their mean as a 1-D view that stays until the next push."""


class GradientExchange:
    """How the workers of a group add up the gradients of a backward, or of a step.

    A subclass has `push`, `end_backward` and `wait_means`. The other methods do nothing, or the same in all.
    """

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        """The client of this worker is made of these."""
        self.channel, self.model, self.values = channel, model, values

    def start(self, device: torch.device) -> None:
        """All workers of the group have the first values of a model on this device."""

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
        """Contribute a bucket's local gradient.

        The body must stay until the mean is here, or the step committed.

        present: bitmap of the bucket's pieces. fresh: in shared memory, the mean may be written into "grad".
        """
        raise NotImplementedError

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int) -> None:
        """This worker's backward is over; `pushed` is a bitmap over all buckets."""
        raise NotImplementedError

    def wait_means(self) -> tuple[Means, int]:
        """Wait for the group's means of this backward.

        Also returns a bitmap over all pieces, of the means that are in "grad" already. Raises JobError, PeerLost.

        The number is a bitmap over all pieces: those whose mean is in "grad" already. Raises JobError, PeerLost.
        """
        raise NotImplementedError

    def before_commit(self, step: int, end: StepEnd) -> StepEnd:
        """The worker is about to commit a step. Returns what the servers are told of it."""
        return end

    def edit(self, step: int, bucket: Bucket, body: torch.Tensor) -> None:
        """Send a bucket's gradient as the script left it."""
        with self.channel.spans.span("push (edit)", step=step + 1, bucket=bucket.id):
            self.channel.send(self.model.server_of(bucket), m.GradientOverride(step, bucket.id, body=body))

    def set_rates(self, hyper: bytes) -> None:
        """Set the hyper-parameters of later gradients that are applied on arrival."""
        for server in self.channel.servers:
            self.channel.send(server, m.StepRates(hyper))

    def place(self, sender: Address, message: m.ReducedGradient, viewable: bool) -> torch.Tensor | None:
        """Where a server's mean is to be received."""
        return None

    def on_mean(self, sender: Address, message: m.ReducedGradient) -> None:
        """A server has sent the mean of a bucket."""

    def on_reduced(self, sender: Address, message: m.BackwardReduced) -> None:
        """A server has sent the means of all its buckets of a backward."""

    def close(self) -> None:
        """The worker leaves."""


class ServerReduction(GradientExchange):
    """The servers add up: buckets are pushed to them, and they reply with the means."""

    def __init__(self) -> None:
        self._backward: tuple[int, int] | None = None  # (step, ordinal) of the awaited means
        self._means: Means = {}
        self._reduced: dict[Address, m.BackwardReduced] = {}

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
        """Send a bucket's local gradient to the server that adds it up."""
        self._backward = (step, ordinal)
        self.values.expect_early(step)
        bits = int_to_bits(present, len(bucket.pieces))
        with self.channel.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
            body = self.model.codec.push(bucket, weight, present, body)
            message = m.Push(step, ordinal, bucket.id, weight, bits, fresh, body=body)
            self.channel.send(self.model.reducer_of(bucket), message)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int) -> None:
        """As `GradientExchange.end_backward`."""
        self._backward = (step, ordinal)
        for server in self.model.reducers:
            lo, count = self.model.reduced_by(server)
            bits = int_to_bits(pushed >> lo & (1 << count) - 1, count)
            self.channel.send(server, m.BackwardEnd(step, ordinal, weight, bits, self.channel.exits))

    def wait_means(self) -> tuple[Means, int]:
        """As `GradientExchange.wait_means`."""
        with self.channel.spans.span("wait for means"):
            self.channel.wait_until(self._all_reduced)
        with self.channel.waiter.update():
            self._backward = None
            written = self._written()
            self._reduced.clear()
            means, self._means = self._means, {}
        return means, written

    def _all_reduced(self) -> bool:
        if len(self._reduced) < len(self.model.reducers):
            return False
        return len(self._means) == sum(bits_to_int(done.contributed).bit_count() for done in self._reduced.values())

    def _written(self) -> int:
        bits = 0
        for server, done in self._reduced.items():
            if done.written:
                bits |= bits_to_int(done.written) << self.model.first_piece[self.model.reduced_by(server)[0]]
        return bits

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.ReducedGradient, viewable: bool) -> torch.Tensor | None:
        """Where a mean is to be received.

        A mean in memory that this worker can see needs no other place.
        """
        if viewable:
            return None
        bucket = self.model.bucket(sender, message.bucket)
        if self.model.codec.is_coded(message, bucket):
            return self.model.codec.landing(message, bucket)
        return self.model.flats.view("mean", bucket)

    def on_mean(self, sender: Address, message: m.ReducedGradient) -> None:
        """The mean of a bucket is here."""
        if not self._is_awaited(message):
            return
        bucket, body = self.model.bucket(sender, message.bucket), present_body(message)
        check_bits(message.present, len(bucket.pieces), f"{sender}: the pieces of bucket {bucket.id}")
        if self.model.codec.is_coded(message, bucket):
            body = self.model.codec.mean(bucket, body)
        else:
            body = typed(body, self.model.flats.view("params", bucket))
        self._means[bucket.id] = (bits_to_int(message.present), body)

    def on_reduced(self, sender: Address, message: m.BackwardReduced) -> None:
        """A server has sent the means of all its buckets of a backward."""
        if self._is_awaited(message):
            buckets = self.model.reduced_by(sender)[1]
            check_bits(message.contributed, buckets, f"{sender}: the buckets of a backward")
            self._reduced[sender] = message

    def _is_awaited(self, message: m.ReducedGradient | m.BackwardReduced) -> bool:
        # A transport may deliver a message twice, and the second one after the backward has ended.
        return self.model.is_open and (message.step, message.ordinal) == self._backward
