"""The exchange of one worker's step: gradients, means of its group, commit.

`GradientExchange` is the contract of the gradients. `ServerReduction` sends them to servers, which add them up.
`StepCommit` announces a step to the servers and waits until all have applied it.
"""

from collections.abc import Callable
from dataclasses import fields

import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import VALUE_CHANGE, ClientModel, ServerChannel, StepEnd, StepOutcome
from topotrain.core.client.client_extension import ClientHooks
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import typed
from topotrain.core.protocol import NO_REVISION, bits_to_int, check_bits, int_to_bits, refused_pairs

Means = dict[int, tuple[int, torch.Tensor]]
"""Bucket number -> bitmap of its pieces, and their mean as a 1-D view that stays until the next push."""


Join = Callable[[StepEnd], StepEnd]


class GradientExchange:
    """How the workers of a group add up the gradients of a backward, or of a step.

    A subclass has `push`, `end_backward` and `wait_means`. The other methods do nothing, or the same in all.
    """

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull, hooks: ClientHooks) -> None:
        """The client of this worker is made of these."""
        self.channel, self.model, self.values, self.hooks = channel, model, values, hooks

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

    @property
    def keeps(self) -> bool:
        """Whether means may stay where they are added up, until `ask_means`."""
        return False

    def begin_backward(self, lazy: bool) -> None:
        """A backward begins. lazy: its means are not sent (needs `keeps`)."""

    def ask_means(self) -> Means:
        """Wait for the means of the last backward, which was lazy.

        Empty: they are lost, as the group has gone on without this worker. Raises JobError, PeerLost.
        """
        return {}

    absent: tuple[int, ...] = ()
    """The workers that the last means have named as absent (`BackwardReduced`)."""

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int, absent: bool = False) -> None:
        """This worker's backward is over; `pushed` is a bitmap over all buckets.

        absent: as in `BackwardEnd`.
        """
        raise NotImplementedError

    def wait_means(self) -> tuple[Means, int]:
        """Wait for the group's means of this backward.

        The number is a bitmap of the pieces with a mean that is in "grad" already, or in a lazy backward those with a
        mean. Raises JobError, PeerLost.
        """
        raise NotImplementedError

    def before_commit(self, step: int, end: StepEnd) -> StepEnd:
        """The worker is about to commit a step. Returns the commit that servers get."""
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
        self._lazy = False  # the present backward is
        self._kept: tuple[int, int, int] = (-1, -1, 0)  # of the last lazy one: step, ordinal, bits of pieces
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
        # Before the first message of this backward, whose means may come at any time from then on.
        self._backward = (step, ordinal)
        # Before the push: with gradients applied on arrival its values may come back at once.
        self.values.expect_early(step)
        bits = int_to_bits(present, len(bucket.pieces))
        with self.channel.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
            body = self.model.codec.push(bucket, weight, present, body)
            message = m.Push(step, ordinal, bucket.id, weight, bits, fresh, self._lazy, body=body)
            self.channel.send(self.model.reducer_of(bucket), message)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int, absent: bool = False) -> None:
        # Again, for a backward without any push.
        self._backward = (step, ordinal)
        for server in self.model.reducers:
            lo, count = self.model.reduced_by(server)
            # Each server gets only the part of the bitmap with the buckets that it adds up.
            bits = int_to_bits(pushed >> lo & (1 << count) - 1, count)
            end = m.BackwardEnd(step, ordinal, weight, bits, self.channel.exits, absent, self._lazy)
            self.channel.send(server, end)

    @property
    def keeps(self) -> bool:
        # In shared memory a mean costs nothing, and in a collective it is here before the server has it.
        return not self.model.windowed and not self.model.sends_own_shard

    def begin_backward(self, lazy: bool) -> None:
        self._lazy = lazy

    def ask_means(self) -> Means:
        step, ordinal, bits = self._kept
        first = self.model.first_piece
        wanted = [each for each in self.model.held if bits >> first[each.id] & (1 << len(each.pieces)) - 1]
        self._backward = step, ordinal
        for shard in sorted({bucket.shard for bucket in wanted}):
            self.channel.send(self.channel.servers[shard], m.MeanRequest(step, ordinal))
        with self.channel.spans.span("wait for means"):
            self.channel.wait_until(lambda: len(self._means) == len(wanted) or self.hooks.overtaken(step) is not None)
        with self.channel.waiter.update():
            self._backward = None
            # The end of the backward may have come once more.
            self._reduced.clear()
            means, self._means = self._means, {}
        return means if len(means) == len(wanted) else {}

    def wait_means(self) -> tuple[Means, int]:
        step = -1 if self._backward is None else self._backward[0]
        with self.channel.spans.span("wait for means"):
            self.channel.wait_until(lambda: self._all_reduced() or self.hooks.overtaken(step) is not None)
        # Under the waiter: a reader thread may handle a repeated mean in this moment.
        with self.channel.waiter.update():
            if not self._all_reduced():
                # The step is dropped. Some of its means may be here, and the script gets none of them.
                self._means.clear()
                self._reduced.clear()
            # From here on a mean that is delivered twice is dropped.
            backward, self._backward = self._backward, None
            written = self._written()
            if self._lazy and backward is not None:
                self._kept = (*backward, written)
            self.absent = next((done.absent for done in self._reduced.values()), ())
            self._reduced.clear()
            means, self._means = self._means, {}
        return means, written

    def _all_reduced(self) -> bool:
        if len(self._reduced) < len(self.model.reducers):
            return False
        # A bucket to which no worker contributed has no mean, so the servers send the number of means.
        return len(self._means) == sum(bits_to_int(done.contributed).bit_count() for done in self._reduced.values())

    def _written(self) -> int:
        bits = 0
        for server, done in self._reduced.items():
            if done.written:
                bits |= bits_to_int(done.written) << self.model.first_piece[self.model.reduced_by(server)[0]]
        return bits

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.ReducedGradient, viewable: bool) -> torch.Tensor | None:
        """Where a mean is to be received."""
        # A mean in memory that this worker can see is read there.
        if viewable:
            return None
        bucket = self.model.bucket(sender, message.bucket)
        if self.model.codec.is_coded(message, bucket):
            return self.model.codec.landing(message, bucket)
        # A mean that is delivered once more must not overwrite a later one.
        return self.model.flats.view("mean" if self._is_awaited(message) else "unwanted", bucket)

    def on_mean(self, sender: Address, message: m.ReducedGradient) -> None:
        """The mean of a bucket is here."""
        if not self._is_awaited(message):
            return
        bucket, body = self.model.bucket(sender, message.bucket), present_body(message)
        check_bits(message.present, len(bucket.pieces), sender, f"the pieces of bucket {bucket.id}")
        if self.model.codec.is_coded(message, bucket):
            body = self.model.codec.mean(bucket, body)
        else:
            # Bodies arrive as bytes. The dtype is that of the parameters.
            body = typed(body, self.model.flats.view("params", bucket))
        self._means[bucket.id] = (bits_to_int(message.present), body)

    def on_reduced(self, sender: Address, message: m.BackwardReduced) -> None:
        """A server has sent the means of all its buckets of a backward."""
        if self._is_awaited(message):
            buckets = self.model.reduced_by(sender)[1]
            check_bits(message.contributed, buckets, sender, "the buckets of a backward")
            self._reduced[sender] = message

    def _is_awaited(self, message: m.ReducedGradient | m.BackwardReduced) -> bool:
        # A transport may deliver a message twice, and the second one after the backward has ended.
        return self.model.is_open and (message.step, message.ordinal) == self._backward


class StepCommit:
    """Commits the steps of one worker."""

    def __init__(
        self,
        channel: ServerChannel,
        model: ClientModel,
        values: ValuePull,
        gradients: GradientExchange,
        hooks: ClientHooks,
    ) -> None:
        self._channel, self._model, self._values = channel, model, values
        self._gradients, self._hooks = gradients, hooks
        self._applied: dict[Address, m.Applied] = {}
        self._begun: tuple[int, bool] | None = None  # step, and whether its values are awaited
        self._join: tuple[int, int] | None = None  # (step, ordinal) of the last backward that others make without it

    def commit(self, step: int, end: StepEnd) -> StepOutcome:
        """Commit a step and wait until it is applied, and with `fetch` for its values."""
        self.begin(step, end)
        return self.finish(step, end)

    def change(self, step: int) -> StepOutcome:
        """Commit a change of values that extensions have sent; fetch the values.

        The outcome is `late` if the group drops the change, or the step after it: others may not fetch then.
        """
        outcome = self.commit(step, VALUE_CHANGE)
        if outcome.late or self._values.fetch(lambda: self._hooks.overtaken(step + 1) is not None):
            return outcome
        late = self._hooks.overtaken(step + 1)
        assert late is not None
        return late.catch_up()

    def begin(self, step: int, end: StepEnd) -> None:
        """Commit a step everywhere. `finish` or `finish_later` must follow."""
        # A lazily committed step ends first: its replies and its values are kept in the same places.
        self._values.settle()
        # Sums that are made only now must be complete before the servers get the commit.
        end = self._gradients.before_commit(step, end)
        for extension in self._hooks.before_commit:
            extension.before_commit(step, end)
        # Replies to earlier steps may arrive twice, and must not count for this one.
        self._applied.clear()
        self._begun = step, end.fetch
        # Before the commit is sent, because values may come back at once.
        self._values.begin_step(step, end.fetch, end.optimizer)
        self._send(step, end)

    def _send(self, step: int, end: StepEnd) -> None:
        for server in self._channel.servers:
            self._channel.send(server, self._commit_for(server, step, end))

    def finish_later(self, step: int, end: StepEnd, settled: Callable[[StepOutcome], None]) -> None:
        """Go on at once. `settled` gets the outcome in the next `ValuePull.settle`."""
        self._values.defer(lambda: settled(self.finish(step, end)))

    def finish(self, step: int, end: StepEnd, join: Join | None = None) -> StepOutcome:
        """Wait until the step is applied. Raises JobError, PeerLost.

        With `fetch` it also waits for the new values.

        join: takes part in a backward that others of the group make, and returns the commit that counts instead.
        """

        def joins() -> bool:
            return join is not None and self._join == (step, end.backwards)

        with self._channel.spans.span("wait for apply"):
            while True:
                self._channel.wait_until(
                    lambda: self._hooks.overtaken(step) is not None or self._is_applied(step) or joins()
                )
                if join is None or not joins() or self._hooks.overtaken(step) is not None:
                    break
                end = join(end)
                self._send(step, end)
        # The servers drop a commit that comes too late, so no reply to it will come.
        late = self._hooks.overtaken(step)
        if late is not None:
            return late.catch_up()
        self._values.end_step(end.fetch)
        outcome = self._outcome()
        for extension in self._hooks.after_commit:
            extension.after_commit(end, outcome)
        return outcome

    def is_over(self) -> bool:
        """Whether `finish` of the step that was begun last would return at once."""
        channel = self._channel
        channel.waiter.look()
        if self._begun is None or channel.failure is not None:
            return True
        step, fetch = self._begun
        with channel.waiter.update():
            overtaken = self._hooks.overtaken(step) is not None
            return overtaken or (self._is_applied(step) and (not fetch or self._values.is_here()))

    def on_applied(self, sender: Address, message: m.Applied) -> None:
        """A server has applied, or skipped, a step."""
        known = self._applied.get(sender)
        # A reply that is delivered twice must not replace that of a later step.
        if known is None or known.step < message.step:
            self._applied[sender] = message
            for extension in self._hooks.on_applied:
                extension.on_applied(sender, message)

    def on_join(self, sender: Address, message: m.JoinBackward) -> None:
        """Others of the group are in a backward that this worker's commit leaves out."""
        # Each server says so by itself, and some when the worker has joined already.
        if self._values.lazy:
            words = "a worker cannot make fewer backwards in a step than others of its group with pull: kLazy"
            self._channel.on_failure(sender, m.Fail(f"{words}: use pull: kStep, or let it make a backward of zero"))
        elif self._begun is not None and message.step == self._begun[0]:
            self._join = max(self._join or (0, 0), (message.step, message.ordinal))

    def _is_applied(self, step: int) -> bool:
        # All shards, since a step is applied on all of them or on none.
        return sum(applied.step == step for applied in self._applied.values()) == len(self._channel.servers)

    def _outcome(self) -> StepOutcome:
        replies = [self._applied[server] for server in self._channel.servers]
        return StepOutcome(
            version=replies[0].version,
            staleness=tuple(reply.staleness for reply in replies),
            found_inf=any(reply.found_inf for reply in replies),
            # All shards have the same norm: it is that of the decision.
            norm=replies[0].norm,
            snapshot=max(reply.snapshot for reply in replies),
            # From the decision, too, so that one shard's reply has the pairs of all shards.
            refused=tuple(refused_pairs(replies[0].refused)),
            leaves=any(reply.leaves for reply in replies),
        )

    def _commit_for(self, server: Address, step: int, end: StepEnd) -> m.Commit:
        model = self._model
        buckets, (low, number) = model.map.buckets_of(server.index), model.reduced_by(server)
        first = model.first_piece[buckets[0].id if buckets else 0]
        pieces = sum(len(bucket.pieces) for bucket in buckets)
        # The bitmaps are over all pieces. Each server gets its own part.
        mask = (1 << pieces) - 1
        revisions = end.revisions[low : low + number] if end.revisions else (NO_REVISION,) * number
        mine = {
            "revisions": bytes(revisions),
            "edited": int_to_bits(end.edited >> first & mask, pieces),
            "dropped": int_to_bits(end.dropped >> first & mask, pieces),
        }
        same = {each.name: getattr(end, each.name) for each in fields(end)}
        return m.Commit(step=step, exits=self._channel.exits, **same | mine)
