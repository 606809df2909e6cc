"""The time of a worker's exchanges, which the servers need for grace windows."""

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel, ServerChannel, StepEnd
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.extensions.outer_optimizer.grace.window_messages import ExchangeTime


class ExchangeTimes(ClientExtension):
    """Measures each exchange, and tells the coordinator with the next one."""

    def __init__(self) -> None:
        self._step = -1  # of the exchange that is under way, or was last
        self._began = 0.0
        self._missing: set[Address] = set()  # servers that have not replied
        self._measured: ExchangeTime | None = None

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel = channel

    def begin(self) -> None:
        """The worker begins to push."""
        self._began = self._channel.now()

    def before_commit(self, step: int, end: StepEnd) -> None:
        with self._channel.waiter.update():
            measured, self._measured = self._measured, None
            self._step, self._missing = step, set(self._channel.servers)
        if measured is not None:
            self._channel.send(self._channel.servers[0], measured)

    def on_applied(self, sender: Address, message: m.Applied) -> None:
        # Here, and not when the worker takes the values: that may be a whole step later.
        if message.step != self._step or sender not in self._missing:
            return
        self._missing.discard(sender)
        if not self._missing:
            self._measured = ExchangeTime(message.step, max(0.0, self._channel.now() - self._began))
