"""A worker's part of the messages about rounds."""

from topotrain.config.topology import Address
from topotrain.core.client.client_context import ClientModel, ServerChannel
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.protocol import Message, ProtocolError
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN, NextRound, StepTime


class RoundClient(ClientExtension):
    """Keeps the newest word of the coordinator about the next round.

    Args:
        fragments: their number.
    """

    messages = (NextRound,)

    def __init__(self, fragments: int) -> None:
        self._fragments, self._named, self._pushes = fragments, OWN_TURN, -1
        self._follows = False  # the worker is back, and has not pushed since
        self.fastest = 0.0
        """The seconds of a step of the fastest worker. 0: not known."""

    def bind(self, channel: ServerChannel, model: ClientModel, values: ValuePull) -> None:
        self._channel = channel

    def handle(self, sender: Address, message: Message) -> None:
        """Keep the newest: a transport may deliver a message once more, and late."""
        assert isinstance(message, NextRound)
        if message.fragment >= self._fragments:
            raise ProtocolError(f"{sender} names fragment {message.fragment} of {self._fragments}")
        if message.pushes > self._pushes:
            self._pushes, self.fastest = message.pushes, message.seconds
            self._follows = self._follows or message.back
            if self._follows and message.fragment != OWN_TURN:
                self._named = message.fragment

    @property
    def is_named(self) -> bool:
        """Whether a fragment was named since the last push."""
        return self._named != OWN_TURN

    def take_fragment(self, turn: int) -> int:
        """The fragment of a push: the one that was named, or that of the turn."""
        # Under exclusive access: a reader thread may be handling a message.
        with self._channel.waiter.update():
            named, self._named, self._follows = self._named, OWN_TURN, False
        return turn if named == OWN_TURN else named

    def tell_time(self, seconds: float) -> None:
        """Tell the coordinator the time of one of this worker's steps."""
        self._channel.send(self._channel.servers[0], StepTime(seconds))
