"""The commit of a step: announced to all servers, and awaited until it is applied."""

from collections.abc import Callable

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.bitmaps import NO_REVISION, int_to_bits
from topotrain.core.client.client_extension import ClientExtension, ClientHooks
from topotrain.core.client.client_model import ClientModel
from topotrain.core.client.client_types import StepEnd, StepOutcome
from topotrain.core.client.gradient_exchange import GradientExchange
from topotrain.core.client.server_channel import ServerChannel
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.server.consistency import pairs


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

    def commit(self, step: int, end: StepEnd) -> StepOutcome:
        """Commit a step everywhere and wait until it is applied.

        With `fetch` it also waits for the new values.
        """
        self.begin(step, end)
        return self.finish(step, end)

    def begin(self, step: int, end: StepEnd) -> None:
        """Commit a step everywhere. `finish` or `finish_later` must follow."""
        self._values.settle()
        end = self._gradients.before_commit(step, end)
        for extension in self._hooks.before_commit:
            extension.before_commit(step, end)
        self._applied.clear()
        self._values.begin_step(step, end.fetch)
        for server in self._channel.servers:
            self._channel.send(server, self._commit_for(server, step, end))

    def finish_later(self, step: int, end: StepEnd, settled: Callable[[StepOutcome], None]) -> None:
        """Go on at once.

        `settled` gets the outcome when `ValuePull.settle` is called next, on its thread.
        """
        self._values.defer(lambda: settled(self.finish(step, end)))

    def finish(self, step: int, end: StepEnd) -> StepOutcome:
        """Wait until the step is applied. Raises JobError, PeerLost.

        With `fetch` it also waits for the new values.
        """
        with self._channel.spans.span("wait for apply"):
            self._channel.wait_until(lambda: self._overtaken(step) is not None or self._is_applied(step))
        late = self._overtaken(step)
        if late is not None:
            return late.catch_up()
        self._values.end_step(end.fetch)
        outcome = self._outcome()
        for extension in self._hooks.after_commit:
            extension.after_commit(end, outcome)
        return outcome

    def on_applied(self, sender: Address, message: m.Applied) -> None:
        """A server has applied, or skipped, a step."""
        known = self._applied.get(sender)
        if known is None or known.step < message.step:
            self._applied[sender] = message

    def _overtaken(self, step: int) -> ClientExtension | None:
        """The extension that knows that the group has made this step without this worker."""
        return next((extension for extension in self._hooks.missed if extension.missed(step)), None)

    def _is_applied(self, step: int) -> bool:
        return sum(applied.step == step for applied in self._applied.values()) == len(self._channel.servers)

    def _outcome(self) -> StepOutcome:
        replies = [self._applied[server] for server in self._channel.servers]
        return StepOutcome(
            version=replies[0].version,
            staleness=tuple(reply.staleness for reply in replies),
            found_inf=any(reply.found_inf for reply in replies),
            norm=replies[0].norm,
            snapshot=max(reply.snapshot for reply in replies),
            refused=tuple(pairs(replies[0].refused)),
            leaves=any(reply.leaves for reply in replies),
        )

    def _commit_for(self, server: Address, step: int, end: StepEnd) -> m.Commit:
        model = self._model
        buckets, (low, number) = model.map.buckets_of(server.index), model.reduced_by(server)
        first = model.first_piece[buckets[0].id if buckets else 0]
        pieces = sum(len(bucket.pieces) for bucket in buckets)
        mask = (1 << pieces) - 1
        revisions = end.revisions[low : low + number] if end.revisions else (NO_REVISION,) * number
        return m.Commit(
            step=step,
            backwards=end.backwards,
            weight=end.weight,
            inv_scale=end.inv_scale,
            check_finite=end.check_finite,
            clip_norm=end.clip_norm,
            clip_type=end.clip_type,
            fetch=end.fetch,
            revisions=bytes(revisions),
            edited=int_to_bits(end.edited >> first & mask, pieces),
            dropped=int_to_bits(end.dropped >> first & mask, pieces),
            hyper=end.hyper,
            marks=end.marks,
            exits=self._channel.exits,
            samples=end.samples,
        )
