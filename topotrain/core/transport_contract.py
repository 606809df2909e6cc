"""What the core expects of a transport: how an endpoint is attached, and how a message gets there.

An `Endpoint` has an `Address`. A `Transport` attaches endpoints and carries messages between them. Messages of one
sender to one receiver arrive in order and once on the real transports; only the simulated one drops, doubles or
reorders them. `Endpoint.handle` may be called from several threads at once, and never blocks on the network: it runs on
a reader's thread, and a reader that waits for a writer is how two processes stop each other for ever.
"""

from typing import TYPE_CHECKING, Protocol

from topotrain.config.topology import Address

if TYPE_CHECKING:  # whoever only shakes hands (a store, the command line) does without torch
    import torch

    from topotrain.core.protocol import Message


class TransportError(Exception):
    """A road could not be opened, or a peer was refused; the text is for the user."""


class Refused(TransportError):
    """The peer at the other end refused us: `code` is VERSION, JOB, CONFIG, AUTH, FENCED or FULL."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class PeerUnreachable(TransportError):
    """Nobody answers at an address, as far as the system can tell: perhaps not yet."""


class ConnectionLost(TransportError):
    """The way to a peer is no more, or broke while it was made: the peer has probably ended."""


class Endpoint(Protocol):
    """Whoever lives at an address."""

    def place(self, sender: Address, message: "Message", viewable: bool) -> "torch.Tensor | None":
        """Where the body of this message (its fields are there, the body is not yet) is to be received.

        The answer is 1-D and contiguous, and its size in bytes is what the schema says: a payload of another size is
        refused before a byte of it is read. With `viewable` the road can show the sender's memory instead: None then
        asks for a view, a tensor asks for a copy into it. Without `viewable`, None refuses the message.
        """
        ...

    def handle(self, sender: Address, message: "Message") -> None:
        """Take a message. A body that came as a view is 1-D uint8, one that was placed is the placed tensor."""
        ...

    def lost(self, peer: Address, reason: str) -> None:
        """The connection to a peer ended. Called once per connection, also when the peer closed it on purpose."""
        ...


class Transport(Protocol):
    """One kind of road, as seen by one process."""

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make a resident reachable; returns the URL that others connect to."""
        ...

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Open the way from an attached resident to a peer. Raises WireError (Refused when the peer said no)."""
        ...

    def send(self, me: Address, to: Address, message: "Message", wait: bool = False) -> None:
        """Queue a message. Raises WireError when there is no way to the peer (any more).

        It does not wait for the peer, unless `wait` says that it may: then a message with a body waits until the bytes
        queued for this peer are few enough (`frame_writer.LIMIT`). That is for a worker's script, which produces as
        fast as it can; it must hold no lock that its own `handle` takes. On a reader's thread `wait` means nothing.
        """
        ...

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages sent and received so far."""
        ...

    def close(self) -> None:
        """End all connections; queued messages are sent first, as far as the peers take them."""
        ...
