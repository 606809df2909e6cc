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
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

import torch

from topotrain.comm.transport import ConnectionLost, Endpoint, TransportError
from topotrain.comm.transport.connection import checked
from topotrain.comm.transport.frame import HEADER_BYTES
from topotrain.comm.transport.frame_writer import ReaderThread
from topotrain.config.topology import Address
from topotrain.core.protocol import Message, ProtocolError

LINGER = 2.0  # seconds that `close` gives the dispatchers for what is queued

_Work = Callable[[], None]


@dataclass(slots=True)
class _House:
    resident: Endpoint
    queue: "SimpleQueue[_Work | None]" = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None
    open: bool = True


@dataclass(eq=False, slots=True)
class _Way:
    """One connection: `open` until a message on it was refused."""

    ends: frozenset[Address]
    open: bool = True


class InProcessTransport:
    """The `Transport` of endpoints in one process; they all use the same object.

    manual: messages are delivered only by `deliver`, on the thread that calls it, until `release` starts dispatchers.
    """

    def __init__(self, manual: bool = False) -> None:
        self._manual = manual
        self._lock = threading.Lock()
        self._houses: dict[Address, _House] = {}
        self._ways: dict[frozenset[Address], _Way] = {}
        self._closed = False
        self._sent = self._received = 0

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make an endpoint reachable, and start its dispatcher."""
        with self._lock:
            if self._closed:
                raise TransportError("this transport is closed")
            if me in self._houses:
                raise TransportError(f"{me} is attached already")
            self._houses[me] = house = _House(resident)
            if not self._manual:
                self._dispatch(me, house)
        return f"local:{me.role.name.lower()}/{me.group}/{me.index}"

    def _dispatch(self, me: Address, house: _House) -> None:
        house.thread = ReaderThread(target=_dispatch, args=(house.queue,), name=f"to {me}", daemon=True)
        house.thread.start()

    def deliver(self) -> None:
        """Handle everything that is queued, also the messages that this queues."""
        while any(not house.queue.empty() for house in self._houses.values()):
            for house in self._houses.values():
                with suppress(Empty):
                    while (work := house.queue.get_nowait()) is not None:
                        work()

    def release(self) -> None:
        """Deliver by dispatchers from now on."""
        with self._lock:
            manual, self._manual = self._manual, False
            for me, house in self._houses.items() if manual else ():
                self._dispatch(me, house)

    def connect(self, me: Address, peer: Address, url: str) -> None:
        """Connect two attached endpoints; nothing happens when they are connected already."""
        ends = frozenset((me, peer))
        with self._lock:
            for address in (me, peer):
                if address not in self._houses:
                    raise TransportError(f"cannot reach {peer} at {url}: {address} is not attached here")
            self._ways.setdefault(ends, _Way(ends))

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Queue a message; never waits, because bodies are not copied.

        Raises ConnectionLost when there is no connection.
        """
        with self._lock:
            way = self._ways.get(frozenset((me, to)))
            if way is None:
                raise ConnectionLost(f"no connection from {me} to {to}")
            self._sent += _size(message)
            house = self._houses[to]
            house.queue.put(lambda: self._deliver(way, house, me, message))

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far.

        These are payloads, and a header for each message, though nothing is framed.
        """
        with self._lock:
            return self._sent, self._received

    def detach(self, me: Address) -> None:
        """Remove an endpoint as if its process had died.

        Its peers are notified, and its unhandled messages are lost.
        """
        with self._lock:
            house = self._houses[me]
            house.open = False
            for way in [way for way in self._ways.values() if me in way.ends]:
                self._end(way, "closed by the peer", me)
            del self._houses[me]
            house.queue.put(None)
        _join(house, LINGER)

    def close(self) -> None:
        """End all connections, after the queued messages were handled.

        That takes at most LINGER seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for way in list(self._ways.values()):
                self._end(way, "closed on this side")
            houses = list(self._houses.values())
            for house in houses:
                house.queue.put(None)
        until = time.monotonic() + LINGER
        for house in houses:
            _join(house, until - time.monotonic())

    def _deliver(self, way: _Way, house: _House, sender: Address, message: Message) -> None:
        if not (way.open and house.open):
            return
        try:
            if message.body is not None:
                message = replace(message, body=_received(house.resident, sender, message, message.body))
            with self._lock:
                self._received += _size(message)
            house.resident.handle(sender, message)
        except ProtocolError as error:
            self._break(way, str(error))
        except Exception as error:  # an error in the endpoint must not stop its dispatcher
            self._break(way, f"internal error: {type(error).__name__}: {error}")

    def _break(self, way: _Way, reason: str) -> None:
        with self._lock:
            way.open = False
            if way.ends in self._ways:
                self._end(way, reason)

    def _end(self, way: _Way, reason: str, by: Address | None = None) -> None:
        """Queue the notice of the end behind the messages under way."""
        del self._ways[way.ends]
        for me in way.ends:
            (peer,) = way.ends - {me} or {me}
            resident, text = self._houses[me].resident, "closed on this side" if me == by else reason
            self._houses[me].queue.put(partial(resident.lost, peer, text))


def _dispatch(queue: "SimpleQueue[_Work | None]") -> None:
    while (work := queue.get()) is not None:
        work()


def _join(house: _House, seconds: float) -> None:
    if house.thread is not None and house.thread is not threading.current_thread():
        house.thread.join(max(0.0, seconds))


def _received(resident: Endpoint, sender: Address, message: Message, body: torch.Tensor) -> torch.Tensor:
    view = body.detach().view(torch.uint8)
    target = resident.place(sender, message, True)
    if target is None:
        return view
    checked(target, message, view.numel()).view(torch.uint8).copy_(view)
    return target


def _size(message: Message) -> int:
    return HEADER_BYTES + (0 if message.body is None else message.body.nbytes)
