"""The common part of transports over sockets.

It has one listener per process, the handshakes, and the table of connections.

* An unproven peer cannot stop the job. Every handshake runs on a thread of its own with its own deadline (see
  `listener`), and a failed one leaves nothing behind.
* Of each pair of endpoints one side connects and the other accepts.
* A newer connection of the same peer replaces the older one.
* A peer with a lower incarnation number than one seen before is refused (FENCED).
"""

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from topotrain.comm.backoff import spread
from topotrain.comm.security.handshake import (
    DEADLINE,
    HandshakeAborted,
    HandshakeTimeout,
    Identity,
    Peer,
    SocketNumber,
    answer,
    dial,
    refuse,
)
from topotrain.comm.transport import ConnectionLost, Endpoint, PeerUnreachable, Refused, TransportError
from topotrain.comm.transport.connection import Connection
from topotrain.comm.transport.frame_writer import LINGER, ReaderThread
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.listener import Listener
from topotrain.comm.transport.multi_socket import Channel, HandshakeSocket, MultiSocketChannel, PendingSockets
from topotrain.config.topology import Address
from topotrain.core.protocol import Message

if TYPE_CHECKING:  # it needs torch
    from topotrain.comm.transport.shared_memory import ProcessMemory

_T = TypeVar("_T")
_HEARING = DEADLINE  # seconds that a caller has for the handshake, before it has proven its identity


class PeerAdmission(Protocol):
    """A rule about the peers that may connect."""

    def admit(self, peer: Peer, connected: bool) -> None:
        """Raise Refused for a proven peer that may not connect.

        connected: it has a connection here already.
        """
        ...


class SocketTransport:
    """A `Transport` over stream sockets.

    Subclasses listen, reach a peer, and choose which peers to accept.

    patience: seconds for which `connect` retries when the peer is FULL, or ends the handshake, or is too slow in it.
    pump: reads the connections; without it each is read on a thread of its own.
    lanes: sockets per connection.
    """

    schemes: tuple[str, ...] = ()

    def __init__(
        self,
        identity: Identity,
        memory: "ProcessMemory | None" = None,
        patience: float = 10.0,
        pump: InlineReader | None = None,
        lanes: int = 1,
    ) -> None:
        self._pump = pump
        self._lanes, self._pending = lanes, PendingSockets()
        self._identity, self._regions, self._patience = identity, memory, patience
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._residents: dict[Address, Endpoint] = {}
        self._routes: dict[tuple[Address, Address], Connection] = {}
        self._connections: set[Connection] = set()
        self._incarnations: dict[Address, int] = {}
        self._sent: Counter[tuple[Address, Address]] = Counter()  # by connections that have ended
        self._received = 0
        self._listener: Listener | None = None
        self._url = ""
        self._refused: Counter[str] = Counter()
        self._admission: PeerAdmission | None = None

    # --- for the subclasses --------------------------------------------------------------------------------------

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket and its URL."""
        raise NotImplementedError

    def _open_socket(self, url: SplitResult, seconds: float) -> socket.socket:
        """Return a socket connected to the URL. Raises OSError."""
        raise NotImplementedError

    def _inspect(self, sock: socket.socket) -> None:
        """Prepare a connected socket.

        Raises TransportError when the system's data forbids its peer.
        """

    def _secure(
        self, sock: socket.socket, seconds: float, url: SplitResult | None = None
    ) -> tuple[HandshakeSocket, bytes]:
        """Return the socket to use instead of `sock`, and the binding of the proofs.

        url: the URL that was dialed; None on the side that accepted. Raises TransportError.
        """
        return sock, b""

    def _shape(self, line: HandshakeSocket, peer: Peer) -> Channel:
        """Return the channel to a proven peer; it may take over the one given."""
        return line

    def _watch_over(self, connection: Connection, channels: list[Channel]) -> None:
        """Watch the channels of a connection until `unregister` gets it. Raises OSError."""

    # --- the contract --------------------------------------------------------------------------------------------

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make an endpoint reachable; all endpoints of a process share one URL."""
        return self.attach_together({me: resident})

    def attach_together(self, residents: Mapping[Address, Endpoint], listens: bool = True) -> str:
        """Make endpoints reachable at one moment; return their URL.

        Where the URL is known in advance, peers dial while this runs. None of them may find only some of the endpoints.

        listens: False for endpoints that only connect to others. They have no URL.
        """
        with self._lock:
            if self._stop.is_set():
                raise TransportError("this transport is closed")
            for me in residents:
                if me in self._residents:
                    raise TransportError(f"{me} is attached already")
            opened = None
            if listens and self._listener is None:
                sock, self._url = self._listen()
                opened = self._listener = Listener(sock, self._handle, f"transport at {self._url}", thread=ReaderThread)
            self._residents.update(residents)
        if opened is not None:
            opened.start()
        return self._url

    def connect(self, me: Address, peer: Address, url: str, anew: bool = False) -> None:
        """Connect an attached endpoint to a peer, unless they are connected.

        anew: replace the present connection, which is known to be dead.
        """
        parts = urlsplit(url)
        if parts.scheme not in self.schemes:
            taken = " and ".join(f"{scheme}://" for scheme in self.schemes)
            raise TransportError(f"{url}: this transport takes {taken} addresses")

        def dial() -> None:
            if anew or (me, peer) not in self._routes:
                self._dial(me, peer, parts)

        retried(dial, self._patience, self._stop.wait)

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Queue a message; with `wait`, a body waits for space. Raises ConnectionLost."""
        # Without the lock: one lookup in a dict is atomic, and this runs for every message.
        connection = self._routes.get((me, to))
        if connection is None:
            raise ConnectionLost(f"no connection from {me} to {to}")
        connection.send(message, wait)

    def connected(self, me: Address, peer: Address) -> bool:
        """Whether there is a connection from an endpoint to a peer now."""
        return (me, peer) in self._routes

    def set_admission(self, admission: PeerAdmission) -> None:
        """Ask this rule about every peer that connects from now on."""
        self._admission = admission

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received so far.

        Headers and fields count. A payload that travels as a reference to shared memory counts as the bytes it stands
        for. Handshakes do not count.
        """
        with self._lock:
            # Under the lock: `unregister` moves the counts of a connection that ends into the sums.
            sent = self._sent.total() + sum(c.sent for c in self._connections)
            return sent, self._received + sum(c.received for c in self._connections)

    def sent(self) -> Counter[tuple[Address, Address]]:
        """Return the bytes of messages sent so far, by endpoint and peer; see `traffic`."""
        with self._lock:
            found = self._sent.copy()
            for connection in self._connections:
                found[connection.me, connection.peer] += connection.sent
            return found

    def leave(self, me: Address) -> None:
        """End the connections of one endpoint; queued messages are sent first."""
        with self._lock:
            connections = [connection for connection in self._connections if connection.me == me]
        for connection in connections:
            connection.shut()

    def refusals(self) -> dict[str, int]:
        """Return how often dialers were refused here, by code.

        "STRANGER" counts dialers without a valid handshake.
        """
        with self._lock:
            # The listener refuses beyond its limits, before there is a handshake.
            full = 0 if self._listener is None else self._listener.refused
            return {**self._refused, "FULL": self._refused["FULL"] + full}

    def close(self) -> None:
        """End all connections; queued messages are sent first, within LINGER seconds.

        Endpoints are notified of each connection's end (`lost`) while this runs.
        """
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            connections = list(self._connections)
        if self._listener is not None:
            self._listener.stop()
        self._pending.close()
        # All of them before the first wait: then the peers take their last messages at the same time.
        for connection in connections:
            connection.shut()
        until = time.monotonic() + LINGER
        for connection in connections:
            if not connection.join(until - time.monotonic()):
                connection.cut("closed on this side; the peer did not take everything in time")
                connection.join(LINGER)
        if self._listener is not None:
            self._listener.join(LINGER)

    # --- coming in -----------------------------------------------------------------------------------------------

    def _handle(self, sock: socket.socket) -> None:
        """Do the handshake with a dialer, and read its connection until it ends."""
        assert self._listener is not None
        try:
            connection = self._admit(sock)
        # The listener closes the socket, which was not released.
        except (TransportError, OSError) as error:
            with self._lock:
                self._refused[error.code if isinstance(error, Refused) else "STRANGER"] += 1
            return
        self._listener.release(sock)  # from now on it belongs to its connection, or waits for the other lanes
        if connection is not None and self._pump is not None:
            # The pump reads only when the script's thread waits, and the dialer waits for this greeting now.
            connection.send_greeting()
            self._pump.add(connection)
        elif connection is not None:
            # The thread of the handshake becomes the reader.
            connection.run()

    def _admit(self, sock: socket.socket) -> Connection | None:
        """Answer a dialer; return its connection, None for a lane that has to wait."""
        # One deadline for TLS and the handshake together.
        until = time.monotonic() + _HEARING
        self._inspect(sock)
        line, binding = self._secure(sock, _HEARING)
        left = until - time.monotonic()
        peer, welcome = answer(line, self._identity, self._residents, left, binding)
        assert self._listener is not None
        # First: a connection that its endpoint knows is not pushed out by a newcomer.
        self._listener.proven(sock)
        try:
            if peer.lane.lanes != self._lanes:
                raise Refused("CONFIG", f"a connection of {peer.lane.lanes} sockets, here it has {self._lanes}")
            # The dialer opens lane 0 last, so now all lanes are there.
            if not peer.lane.lane:
                return self._register([line], peer, welcome, sock)
            self._pending.put((peer.me, peer.address), peer.lane.bundle, peer.lane.lane, line)
            line.sendall(welcome)
            return None
        except Refused as refused:
            refuse(line, refused)
            raise

    # --- going out -----------------------------------------------------------------------------------------------

    def _dial(self, me: Address, peer: Address, url: SplitResult) -> None:
        if me not in self._residents:
            raise TransportError(f"{me} is not attached here")
        lines: list[HandshakeSocket] = []
        # New for each attempt: the other side closes the lanes of an attempt that was given up.
        bundle = secrets.token_bytes(16)
        try:
            # Lane 0 comes last: with it the other side has all lanes.
            for number in reversed(range(self._lanes)):
                sock = self._connected_socket(peer, url)
                # Before TLS, so that the socket is closed if TLS fails.
                lines.insert(0, sock)
                until = time.monotonic() + DEADLINE
                lines[0], binding = self._secure(sock, DEADLINE, url)
                lane, left = SocketNumber(number, self._lanes, bundle), until - time.monotonic()
                proven = dial(lines[0], self._identity, me, peer, left, lane, binding)
            connection = self._register(lines, proven)
        except BaseException:
            for line in lines:
                line.close()
            raise
        if self._pump is not None:
            self._pump.add(connection)
        else:
            connection.start()

    def _connected_socket(self, peer: Address, url: SplitResult) -> socket.socket:
        try:
            sock = self._open_socket(url, DEADLINE)
        except BlockingIOError as error:  # a local socket whose backlog is full
            raise Refused("FULL", f"{peer} at {url.geturl()} cannot take a connection now") from error
        except OSError as error:
            raise PeerUnreachable(f"cannot reach {peer} at {url.geturl()}: {error}") from error
        try:
            self._inspect(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    # --- both ----------------------------------------------------------------------------------------------------

    def _register(
        self, lines: list[HandshakeSocket], peer: Peer, greeting: bytes = b"", caller: socket.socket | None = None
    ) -> Connection:
        """Put a connection to a proven peer into the table.

        With `caller`, the accepted socket, this side accepted, and only lane 0 is given: the others are parked.
        """
        route = (peer.me, peer.address)
        older: Connection | None = None
        while True:
            with self._lock:
                self._check(peer, caller)
                found = self._routes.get(route)
                # `older` is still there only if this thread is its reader.
                if found is None or found is older:
                    return self._add(lines, peer, greeting, parked=caller is not None)
            # Outside the lock, which the reader of the older connection needs in `unregister`. The newer connection is
            # not in the table yet: the endpoint would send on it before it knows that the older one has ended, and the
            # peer would count a message that was also among those which are sent again.
            older = found
            older.cut("replaced by a newer connection of the same peer")
            if not older.join(LINGER):
                raise Refused("FULL", f"an earlier connection of {peer.address} has not ended yet")

    def _check(self, peer: Peer, caller: socket.socket | None) -> None:
        """Raise TransportError if a proven peer may not connect; `caller` is its socket."""
        # `close` may have copied the table already, and would miss this connection.
        if self._stop.is_set():
            raise TransportError("this transport is closed")
        # A process that was taken for dead and replaced must not come back.
        if peer.incarnation < self._incarnations.get(peer.address, 0):
            known = self._incarnations[peer.address]
            raise Refused("FENCED", f"{peer.address} of incarnation {peer.incarnation} was replaced by {known}")
        if caller is None:
            return
        if _hung_up(caller):
            # It may have connected again meanwhile, and must not lose its new connection to the one it gave up.
            raise HandshakeAborted("the other side closed the connection before it was welcomed")
        if self._admission is not None:
            self._admission.admit(peer, (peer.me, peer.address) in self._routes)

    def _add(self, lines: list[HandshakeSocket], peer: Peer, greeting: bytes, parked: bool) -> Connection:
        route = (peer.me, peer.address)
        if parked:
            lines = [*lines, *self._pending.claim(route, peer.lane.bundle, self._lanes)]
        generation = self._identity.generation
        resident = self._residents[peer.me]
        channels = [self._shape(line, peer) for line in lines]
        channel = MultiSocketChannel(channels, len(greeting)) if len(channels) > 1 else channels[0]
        connection = Connection(channel, *route, resident, generation, self._regions, greeting, self.unregister)
        # First: where the peer is gone already, it must not stay in the table, which no thread would take it out of.
        try:
            self._watch_over(connection, channels)
        except OSError as error:
            raise HandshakeAborted(f"the connection ended before it was in use: {error}") from None
        self._incarnations[peer.address] = peer.incarnation
        self._routes[route] = connection
        self._connections.add(connection)
        return connection

    def unregister(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            route = (connection.me, connection.peer)
            self._sent[route] += connection.sent
            self._received += connection.received
            # A newer connection of the peer may have taken its place.
            if self._routes.get(route) is connection:
                del self._routes[route]


def passes(error: TransportError) -> bool:
    """Whether the reason of a refusal passes, such as too many new connections."""
    return isinstance(error, HandshakeTimeout | HandshakeAborted) or (
        isinstance(error, Refused) and error.code == "FULL"
    )


def retried(attempt: Callable[[], _T], patience_s: float, pause: Callable[[float], object]) -> _T:
    """Retry `attempt` while the reason of its refusal passes; return its result.

    pause: waits for so many seconds between two tries.
    """
    until, seconds = time.monotonic() + patience_s, 0.02
    while True:
        try:
            return attempt()
        except TransportError as error:
            if not passes(error) or time.monotonic() + seconds > until:
                raise
        pause(spread(seconds))
        seconds = min(2 * seconds, 0.5)


def _hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed, with nothing left to read. Does not wait."""
    seconds = sock.gettimeout()
    sock.setblocking(False)  # a socket with a timeout waits for data, whatever flags the call has
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(seconds)
