"""Pulls: requests for values in numbered rounds, received in the buffer "params"."""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import typed


class ValueObserver:
    """Actions around a change of "params". Each method does nothing here."""

    def before_fetch(self) -> None:
        """Values are about to be asked for between two steps."""

    def before_values(self) -> None:
        """ "params" is about to be written."""

    def after_values(self) -> None:
        """ "params" has new values."""


class ValuePull:
    """The values that one worker waits for.

    A step's values are the round of its number; other rounds have negative numbers.
    """

    def __init__(self, channel: ServerChannel, model: ClientModel) -> None:
        self._channel, self._model = channel, model
        self._observer = ValueObserver()
        self._round: int | None = None
        self._here: set[int] = set()  # buckets of the awaited round
        self._awaited = 0
        self._in_part: int | None = None  # the awaited values are those of this optimizer's parameters; None: of all
        self._partial = False
        self._fetches = 0  # equal on all workers of the group, so that they are shown the same moment
        self.lazy = False
        self._early = False
        self._deferred: Callable[[], None] | None = None
        self.settling = False
        """Whether the worker waits in `settle`."""

    def open(self, streams: bool, lazy: bool, partial: bool = False) -> None:
        """The model is known.

        streams: gradients are applied on arrival, and values may come back before the step is committed.
        lazy: `pull: kLazy`, the servers announce each bucket when it is new.
        partial: the reply to a step has only the values that its optimizer changes.
        """
        # In a split model the servers send a worker only the buckets that it holds.
        self._awaited = len(self._model.held)
        self.lazy, self._partial = lazy, partial
        # In shared memory the reply to the commit announces the values, unless the pull is lazy.
        self._early = streams and (lazy or not self._model.windowed)

    def observe(self, observer: ValueObserver) -> None:
        """Call this observer around each later change of "params"."""
        self._observer = observer

    # --- rounds --------------------------------------------------------------------------------------------------

    def fetch(self, dropped: Callable[[], bool] = lambda: False) -> bool:
        """Wait for current values of all slices that this worker holds, in "params".

        dropped: whether the others of the group will not fetch, so that values may not come.

        Returns:
            Whether the values are here.
        """
        self.settle()
        # Negative, so that no round is one of a step.
        self._fetches += 1
        with self.receive_round(-1 - self._fetches, dropped):
            for server in self._channel.servers:
                self._channel.send(server, m.Fetch(self._fetches))
        return len(self._here) == self._awaited

    def fetch_final(self) -> None:
        """Worker (0,0): wait for the job's whole result, in the flat buffer "params"."""
        self._fetches += 1
        # Without splitting this is what the worker holds anyway.
        self._awaited = len(self._model.map.buckets)
        with self.receive_round(-1 - self._fetches):
            for server in self._channel.servers:
                self._channel.send(server, m.FinalRequest(-1 - self._fetches))
        self._awaited = len(self._model.held)

    @contextmanager
    def receive_round(self, number: int, dropped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """The block asks for values; at its end the round of this number is in "params".

        dropped: as in `fetch`.

        Raises JobError, PeerLost.
        """
        self._observer.before_fetch()
        self._observer.before_values()
        self._in_part = None
        self._expect(number)
        yield
        self._wait(dropped)
        self._observer.after_values()

    def expect_early(self, step: int) -> None:
        """A step's gradients are pushed: new values may come before its backward is over."""
        if self._early:
            self._expect(step)

    def begin_step(self, step: int, fetch: bool, optimizer: int = 0) -> None:
        """A step is about to be committed, with or without a pull of its values."""
        self._in_part = optimizer if self._partial else None
        if fetch:
            self._observer.before_values()
        if self._arrives(fetch):
            self._expect(step)

    def end_step(self, fetch: bool) -> None:
        """A step is applied; wait for its values."""
        if self._arrives(fetch):
            self._wait()
        if fetch:
            self._observer.after_values()

    def _arrives(self, fetch: bool) -> bool:
        """Whether values of a step are awaited."""
        # In shared memory the values are new when the step is applied. Lazily they are announced by bucket.
        return fetch and (self.lazy or not self._model.windowed)

    def _expect(self, number: int) -> None:
        # Values pushed early may be here already, and clearing them would lose them.
        if self._round != number:
            with self._channel.waiter.update():
                self._here.clear()
                self._round = number

    def is_here(self) -> bool:
        """Whether all values of the awaited round are here."""
        return len(self._here) == self._count_awaited()

    def _count_awaited(self) -> int:
        if self._in_part is None:
            return self._awaited
        spaces = self._model.map.spaces
        return sum(spaces[bucket.space].optimizer == self._in_part for bucket in self._model.held)

    def _wait(self, dropped: Callable[[], bool] = lambda: False) -> None:
        awaited = self._count_awaited()
        with self._channel.spans.span("wait for values"):
            self._channel.wait_until(lambda: len(self._here) == awaited or dropped())
        # From here on a value that is delivered twice cannot overwrite the parameters.
        self._round = None

    # --- lazy pulls ----------------------------------------------------------------------------------------------

    def defer(self, end: Callable[[], None]) -> None:
        """Let a commit return before its values are here. `settle` calls `end`."""
        self._deferred = end

    def settle(self) -> None:
        """Wait until a lazily committed step is applied, and all its values are here."""
        if self._deferred is not None:
            # Cleared first, so that an end that fails is not run again.
            end, self._deferred = self._deferred, None
            self.settling = True
            try:
                end()
            finally:
                self.settling = False

    @property
    def unsettled(self) -> bool:
        """Whether a lazily committed step has not come to its end."""
        return self.settling or self._deferred is not None

    def wait_for(self, buckets: Set[int]) -> None:
        """Wait for new values of these buckets (numbers), if a lazy step is to bring them."""
        # The first look takes no lock: until the round is over, buckets are only added.
        if self._deferred is not None and not buckets <= self._here:
            with self._channel.spans.span("wait for values"):
                self._channel.wait_until(lambda: buckets <= self._here)

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Values, viewable: bool) -> torch.Tensor | None:
        """Where values are to be received."""
        bucket = self._model.bucket(sender, message.bucket)
        if self._model.codec.is_coded(message, bucket):
            return None if viewable else self._model.codec.landing(message, bucket)
        # Values of another round must not overwrite the parameters.
        return self._model.flats.view("params" if message.round == self._round else "unwanted", bucket)

    def on_values(self, sender: Address, message: m.Values) -> None:
        """A bucket is here, or all buckets of a server (a negative number)."""
        with self._channel.spans.span("pull", round=message.round, bucket=message.bucket):
            # A value of an earlier round, delivered once more.
            if message.round != self._round:
                return
            if message.bucket < 0:
                # In shared memory one message announces all buckets of a server.
                self._here.update(self._model.held_by[sender.index])
            else:
                self._land(sender, message)

    def _land(self, sender: Address, message: m.Values) -> None:
        model, bucket = self._model, self._model.bucket(sender, message.bucket)
        if message.body is None and model.windowed:
            self._here.add(bucket.id)
            return
        body = present_body(message)
        if model.codec.is_coded(message, bucket):
            if bucket.id not in self._here:  # a difference that is delivered twice must not count twice
                model.codec.values(bucket, body)
        else:
            target = model.flats.view("params", bucket)
            # A transport receives into "params" itself; only views of the sender's memory are copied.
            if body.data_ptr() != target.data_ptr():
                target.copy_(typed(body, target))
            if message.version >= 0:  # final values have none, and no difference follows them
                model.codec.restart(bucket)
        self._here.add(bucket.id)
