"""The contract of every transport between endpoints.

An `Endpoint` has an `Address`. A `Transport` attaches endpoints and carries messages between them.

* Messages of one sender to one receiver arrive in order and once on the real transports. Only the simulated transport
  drops, duplicates or reorders them.
* `Endpoint.handle` may be called from several threads at once.
* `Endpoint.handle` never blocks on the network. It runs on a reader thread, and readers that wait for writers can
  deadlock two processes.
"""

from typing import TYPE_CHECKING, Protocol

from topotrain.config.topology import Address

if TYPE_CHECKING:  # a program that only needs the handshake (a store, the command line) does without torch
    import torch

    from topotrain.core.protocol import Message


class TransportError(Exception):
    """A connection that cannot be opened, or a refused peer. The text is for the user."""


class Refused(TransportError):
    """A refusal by the peer. `code` is VERSION, JOB, CONFIG, AUTH, FENCED or FULL."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class PeerUnreachable(TransportError):
    """No process answers at an address. It may not be listening yet."""


class ConnectionLost(TransportError):
    """A connection has ended, or broke while it was made: the peer has probably ended."""


class Endpoint(Protocol):
    """The receiver of the messages to one address."""

    def place(self, sender: Address, message: "Message", viewable: bool) -> "torch.Tensor | None":
        """Return the tensor that is to receive the body of this message.

        The tensor is 1-D and contiguous, and its size in bytes is the one of the schema: a payload of another size is
        refused before a byte of it is read. With `viewable` the transport can share the sender's memory instead: None
        then asks for a view, and a tensor asks for a copy into it. Without `viewable`, None refuses the message.
        """
        ...

    def handle(self, sender: Address, message: "Message") -> None:
        """Process a message. Its body is the placed tensor, or a view as 1-D uint8."""
        ...

    def lost(self, peer: Address, reason: str) -> None:
        """Note the end of a connection; once for each, also when the peer closed it."""
        ...


class MessageSender(Protocol):
    """Sends the messages of one endpoint."""

    def send(self, to: Address, message: "Message") -> None:
        """Send a message. Raises TransportError without a connection to the peer."""
        ...


class Transport(Protocol):
    """One kind of transport, as seen by one process."""

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make an endpoint reachable; return the URL that others connect to."""
        ...

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Connect an attached endpoint to a peer. Raises TransportError, such as Refused."""
        ...

    def send(self, me: Address, to: Address, message: "Message", wait: bool = False) -> None:
        """Queue a message.

        Raises TransportError when there is no connection to the peer (any more).

        It does not wait for the peer, unless `wait` is true. Then a message with a body waits until the bytes
        queued for this peer are few enough (`frame_writer.LIMIT`). That is for a worker's script, which produces as
        fast as it can. The script must hold no lock that its own `handle` takes. On a reader thread `wait` has no
        effect.
        """
        ...

    def connected(self, me: Address, peer: Address) -> bool:
        """Whether there is a connection from an endpoint to a peer now."""
        ...

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received so far."""
        ...

    def close(self) -> None:
        """End all connections, after queued messages as far as the peers take them."""
        ...
