"""The transport inside a process: a queue and one dispatcher thread per endpoint.

It keeps the promises of the other transports:

* `send` never runs the receiver's code.
* Messages of a sender arrive in order.
* An endpoint is notified of each lost peer once.
* A body is read when the message is handled, not when it is sent.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

import torch

from topotrain.comm.transport import ConnectionLost, Endpoint, TransportError
from topotrain.comm.transport.connection import copied
from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.comm.transport.frame_writer import ReaderThread
from topotrain.config.topology import Address
from topotrain.core.protocol import Message, ProtocolError

LINGER = 2.0  # seconds that `close` gives the dispatchers for what is queued

_Work = Callable[[], None]


class _Inbox:
    """The queue of one endpoint, and the thread that empties it once it is started."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.open = endpoint, True
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def put(self, work: _Work | None) -> None:
        """Queue work; None ends the thread after what is queued."""
        self._queue.put(work)

    def start(self, me: Address) -> None:
        self._thread = ReaderThread(target=self._run, name=f"to {me}", daemon=True)
        self._thread.start()

    def run_queued(self) -> None:
        """Do what is queued on the calling thread."""
        with suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                work()

    def drop(self) -> None:
        """Handle no more messages, not even queued ones."""
        self.open = False

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class _Link:
    """One connection: `open` until a message on it was refused."""

    def __init__(self, ends: frozenset[Address]) -> None:
        self.ends, self.open = ends, True

    def close(self) -> None:
        self.open = False


class InProcessTransport:
    """The `Transport` of endpoints in one process; they all use the same object.

    manual: messages are delivered only by `deliver`, on the thread that calls it, until `release` starts dispatchers.
    """

    def __init__(self, manual: bool = False) -> None:
        self._manual = manual
        self._lock = threading.Lock()
        self._inboxes: dict[Address, _Inbox] = {}
        self._links: dict[frozenset[Address], _Link] = {}
        self._closed = False
        self._sent = self._received = 0

    def attach(self, me: Address, endpoint: Endpoint) -> str:
        """Make an endpoint reachable, and start its dispatcher."""
        with self._lock:
            if self._closed:
                raise TransportError("this transport is closed")
            if me in self._inboxes:
                raise TransportError(f"{me} is attached already")
            self._inboxes[me] = inbox = _Inbox(endpoint)
            if not self._manual:
                inbox.start(me)
        return f"local:{me.role.name.lower()}/{me.group}/{me.index}"

    def deliver(self) -> None:
        """Handle everything that is queued, also the messages that this queues."""
        while any(not inbox.empty for inbox in self._inboxes.values()):
            for inbox in self._inboxes.values():
                inbox.run_queued()

    def release(self) -> None:
        """Deliver by dispatchers from now on."""
        with self._lock:
            manual, self._manual = self._manual, False
            for me, inbox in self._inboxes.items() if manual else ():
                inbox.start(me)

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Connect two attached endpoints; nothing happens when they are connected already."""
        ends = frozenset((me, peer))
        with self._lock:
            for address in (me, peer):
                if address not in self._inboxes:
                    raise TransportError(f"cannot reach {peer} at {url}: {address} is not attached here")
            self._links.setdefault(ends, _Link(ends))

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Queue a message; never waits. Raises ConnectionLost."""
        with self._lock:
            link = self._links.get(frozenset((me, to)))
            if link is None:
                raise ConnectionLost(f"no connection from {me} to {to}")
            self._sent += _size(message)
            inbox = self._inboxes[to]
            # Under the lock, so that messages of two threads of one sender keep the order of their calls.
            inbox.put(lambda: self._deliver(link, inbox, me, message))

    def connected(self, me: Address, peer: Address) -> bool:
        """Whether two endpoints of this process are connected."""
        return frozenset((me, peer)) in self._links

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far: payloads, and a header for each."""
        with self._lock:
            return self._sent, self._received

    def detach(self, me: Address) -> None:
        """Remove an endpoint as if its process had died.

        Its peers are notified, and its unhandled messages are lost.
        """
        with self._lock:
            inbox = self._inboxes[me]
            inbox.drop()
            for link in [link for link in self._links.values() if me in link.ends]:
                self._end(link, "closed by the peer", me)
            del self._inboxes[me]
            inbox.put(None)
        # Outside the lock, which the dispatcher takes for each message.
        inbox.join(LINGER)

    def close(self) -> None:
        """Handle the queued messages, in at most LINGER seconds, and end all connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for link in list(self._links.values()):
                self._end(link, "closed on this side")
            inboxes = list(self._inboxes.values())
            for inbox in inboxes:
                inbox.put(None)
        until = time.monotonic() + LINGER
        for inbox in inboxes:
            inbox.join(until - time.monotonic())

    def _deliver(self, link: _Link, inbox: _Inbox, sender: Address, message: Message) -> None:
        if not (link.open and inbox.open):
            return
        try:
            if message.body is not None:
                message = replace(message, body=_received(inbox.endpoint, sender, message, message.body))
            with self._lock:
                self._received += _size(message)
            inbox.endpoint.handle(sender, message)
        except ProtocolError as error:
            self._break(link, str(error))
        except Exception as error:  # an error in the endpoint must not stop its dispatcher
            self._break(link, f"internal error: {type(error).__name__}: {error}")

    def _break(self, link: _Link, reason: str) -> None:
        with self._lock:
            # Messages of this link that are queued already must not be handled, as on a socket.
            link.close()
            if link.ends in self._links:
                self._end(link, reason)

    def _end(self, link: _Link, reason: str, by: Address | None = None) -> None:
        """Queue the notice of the end behind the messages that have been sent."""
        del self._links[link.ends]
        for me in link.ends:
            # An endpoint may be connected to itself.
            (peer,) = link.ends - {me} or {me}
            endpoint, text = self._inboxes[me].endpoint, "closed on this side" if me == by else reason
            self._inboxes[me].put(partial(endpoint.lost, peer, text))


def _received(endpoint: Endpoint, sender: Address, message: Message, body: torch.Tensor) -> torch.Tensor:
    view = body.detach().view(torch.uint8)
    target = endpoint.place(sender, message, True)
    return view if target is None else copied(target, message, view)


def _size(message: Message) -> int:
    return HEADER_BYTES + (0 if message.body is None else message.body.nbytes)
