"""Messages that one server sends, and those that it handles later."""

from collections.abc import Callable, Iterable, Iterator

from topotrain.config.topology import Address
from topotrain.core.protocol import Message
from topotrain.core.server.server_extension import ExtensionHooks

Out = list[tuple[Address, Message]]
Deliver = Callable[[Address, Message], None]


class MessageQueue:
    """Sends the messages of one server, in order.

    Args:
        me: the server.
        hooks: its extensions.
        deliver: takes each message at once; None: `out` collects them.
    """

    def __init__(self, me: Address, hooks: ExtensionHooks, deliver: Deliver | None) -> None:
        self._me, self._hooks, self._deliver = me, hooks, deliver
        self.out: Out = []
        self._pending: Out = []

    def begin(self) -> None:
        """Collect what is sent from here on: the answers to one message."""
        self.out = []

    def send(self, to: Address, message: Message) -> None:
        """Send a message; one to this server itself is handled after the message in hand."""
        for extension in self._hooks.may_send:
            if not extension.may_send(to, message):
                return
        for extension in self._hooks.on_sent.get(type(message), ()):
            extension.on_sent(to, message)
        if to == self._me:
            self._pending.append((to, message))
        elif self._deliver is not None:
            self._deliver(to, message)
        else:
            self.out.append((to, message))

    def send_all(self, messages: Iterable[tuple[Address, Message]]) -> None:
        """Send these messages, in their order."""
        for to, message in messages:
            self.send(to, message)

    def send_each(self, receivers: Iterable[Address], message: Message) -> None:
        """Send a message to several receivers."""
        for to in receivers:
            self.send(to, message)

    def handle_later(self, messages: Iterable[tuple[Address, Message]]) -> None:
        """Handle these (sender, message) later: they came too early."""
        self._pending += messages

    @property
    def empty(self) -> bool:
        """Whether the server has handled all that has come."""
        return not self._pending

    def pending(self) -> Iterator[tuple[Address, Message]]:
        """Yield the (sender, message) to handle now.

        Messages that are added meanwhile are among them.
        """
        while self._pending:
            yield self._pending.pop(0)
