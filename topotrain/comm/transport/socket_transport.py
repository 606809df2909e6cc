"""The common part of transports over sockets.

It has one listener per process, the handshakes, and the table of connections.

* An unproven peer cannot stop the job. Every handshake runs on a thread of its own with its own deadline, at most
  MAX_STRANGERS at once (further ones are refused with FULL), and a failed one leaves nothing behind.
* The thread of a handshake that succeeded becomes the reader of the connection.
* Of each pair of endpoints one side connects and the other accepts.
* A newer connection of the same peer replaces the older one.
* A peer with a lower incarnation number than one seen before is refused (FENCED).
"""

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
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
from topotrain.comm.transport.connection import Connection, SharedRegions
from topotrain.comm.transport.frame_writer import LINGER, ReaderThread
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.multi_socket import Channel, HandshakeSocket, MultiSocketChannel, PendingSockets
from topotrain.config.topology import Address
from topotrain.core.protocol import Message

MAX_STRANGERS = 64
BACKLOG = 128
_HEARING = DEADLINE  # seconds that a caller has for the handshake, before it has proven its identity


class SocketTransport:
    """A `Transport` over stream sockets.

    Subclasses listen, reach a peer, and choose which peers to accept.

    patience: seconds for which `connect` retries when the peer is FULL, or too slow in the handshake.
    pump: reads the connections; without it each is read on a thread of its own.
    lanes: sockets per connection.
    """

    schemes: tuple[str, ...] = ()

    def __init__(
        self,
        identity: Identity,
        memory: SharedRegions | None = None,
        patience: float = 10.0,
        pump: InlineReader | None = None,
        lanes: int = 1,
    ) -> None:
        self._pump = pump
        self._lanes, self._parking = lanes, PendingSockets()
        self._identity, self._regions, self._patience = identity, memory, patience
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._residents: dict[Address, Endpoint] = {}
        self._ways: dict[tuple[Address, Address], Connection] = {}
        self._connections: set[Connection] = set()
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._incarnations: dict[Address, int] = {}
        self._sent = self._received = 0
        self._listener: socket.socket | None = None
        self._doorman: threading.Thread | None = None
        self._url = ""
        self._refused: Counter[str] = Counter()
        self.admit: Callable[[Peer, bool], None] = lambda *_: None
        """Gets a proven caller, and whether it has a connection here already; may raise Refused."""

    # --- for the subclasses --------------------------------------------------------------------------------------

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket and its URL."""
        raise NotImplementedError

    def _reach(self, url: SplitResult, seconds: float) -> socket.socket:
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

    def _guard(self, connection: Connection, roads: list[Channel]) -> None:
        """Watch a new connection over these channels, until `_leave` gets its end."""

    # --- the contract --------------------------------------------------------------------------------------------

    def attach(self, me: Address, resident: Endpoint) -> str:
        """Make an endpoint reachable; all endpoints of a process share one URL."""
        with self._lock:
            if self._stop.is_set():
                raise TransportError("this transport is closed")
            if me in self._residents:
                raise TransportError(f"{me} is attached already")
            if self._listener is None:
                self._listener, self._url = self._listen()
                self._doorman = threading.Thread(target=self._accept, name=f"door {self._url}", daemon=True)
                self._doorman.start()
            self._residents[me] = resident
            return self._url

    def connect(self, me: Address, peer: Address, url: str, anew: bool = False) -> None:
        """Connect an attached endpoint to a peer, unless they are connected.

        anew: replace the present connection, which is known to be dead.
        """
        parts = urlsplit(url)
        if parts.scheme not in self.schemes:
            taken = " and ".join(f"{scheme}://" for scheme in self.schemes)
            raise TransportError(f"{url}: this transport takes {taken} addresses")
        until, pause = time.monotonic() + self._patience, 0.02
        while anew or (me, peer) not in self._ways:
            try:
                self._dial(me, peer, parts)
                return
            except (Refused, HandshakeTimeout) as error:
                busy = isinstance(error, HandshakeTimeout) or error.code == "FULL"
                if not busy or time.monotonic() + pause > until:
                    raise
            self._stop.wait(spread(pause))
            pause = min(2 * pause, 0.5)

    def attach_dialer(self, me: Address, resident: Endpoint) -> None:
        """Let an endpoint connect to others, without a listener by which others could connect to it."""
        with self._lock:
            self._residents[me] = resident

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Queue a message; with `wait`, a body waits for space.

        Raises ConnectionLost when there is no connection.
        """
        connection = self._ways.get((me, to))
        if connection is None:
            raise ConnectionLost(f"no connection from {me} to {to}")
        connection.send(message, wait)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received so far.

        Headers and fields count. A payload that travels as a reference to shared memory counts as the bytes it stands
        for. Handshakes do not count.
        """
        with self._lock:
            sent = self._sent + sum(c.sent for c in self._connections)
            return sent, self._received + sum(c.received for c in self._connections)

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
            return dict(self._refused)

    def close(self) -> None:
        """End all connections; queued messages are sent first.

        That takes at most LINGER seconds, if the peers take them.

        Endpoints are notified of each connection's end (`lost`) while this runs.
        """
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            connections, strangers = list(self._connections), dict(self._strangers)
        if self._listener is not None and self._doorman is not None:
            _hang_up(self._listener)  # wakes `accept`, closing alone would not
            self._doorman.join(LINGER)
            self._listener.close()
        for sock in strangers:
            _hang_up(sock)
        self._parking.close()
        for connection in connections:
            connection.shut()
        until = time.monotonic() + LINGER
        for connection in connections:
            if not connection.join(until - time.monotonic()):
                connection.cut("closed on this side; the peer did not take everything in time")
                connection.join(LINGER)
        for thread in strangers.values():
            if thread is not threading.current_thread():
                thread.join(LINGER)

    # --- coming in -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._stop.wait(0.05)  # out of descriptors: some will be closed; closing: the loop ends
                continue
            self._hear_apart(sock)

    def _hear_apart(self, sock: socket.socket) -> None:
        thread = ReaderThread(target=self._hear, args=(sock,), name="handshake", daemon=True)
        with self._lock:
            room = len(self._strangers) < MAX_STRANGERS and not self._stop.is_set()
            if room:
                self._strangers[sock] = thread
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread left
                    del self._strangers[sock]
                    room = False
            self._refused["FULL"] += not room
        if not room:
            refuse(sock, Refused("FULL", f"{MAX_STRANGERS} other handshakes are under way; try again"))
            sock.close()

    def _hear(self, sock: socket.socket) -> None:
        connection, kept = None, False
        try:
            until = time.monotonic() + _HEARING
            self._inspect(sock)
            line, binding = self._secure(sock, _HEARING)
            left = until - time.monotonic()
            peer, welcome = answer(line, self._identity, self._residents.__contains__, left, binding)
            try:
                if peer.lane.lanes != self._lanes:
                    raise Refused("CONFIG", f"a connection of {peer.lane.lanes} sockets, here it has {self._lanes}")
                if peer.lane.lane:
                    self._parking.put((peer.me, peer.address), peer.lane.bundle, peer.lane.lane, line)
                    line.sendall(welcome)
                else:
                    connection = self._enter([line], peer, welcome, sock)
                kept = True
            except Refused as refused:
                refuse(line, refused)
                raise
        except (TransportError, OSError) as error:
            with self._lock:
                self._refused[error.code if isinstance(error, Refused) else "STRANGER"] += 1
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
            if not kept:
                sock.close()
        if connection is not None and self._pump is not None:
            connection.greet()
            self._pump.add(connection)
        elif connection is not None:
            connection.run()

    # --- going out -----------------------------------------------------------------------------------------------

    def _dial(self, me: Address, peer: Address, url: SplitResult) -> None:
        if me not in self._residents:
            raise TransportError(f"{me} is not attached here")
        lines: list[HandshakeSocket] = []
        bundle = secrets.token_bytes(16)
        try:
            for number in reversed(range(self._lanes)):
                sock = self._open(peer, url)
                lines.insert(0, sock)
                until = time.monotonic() + DEADLINE
                lines[0], binding = self._secure(sock, DEADLINE, url)
                lane, left = SocketNumber(number, self._lanes, bundle), until - time.monotonic()
                proven = dial(lines[0], self._identity, me, peer, left, lane, binding)
            connection = self._enter(lines, proven)
        except BaseException:
            for line in lines:
                line.close()
            raise
        if self._pump is not None:
            self._pump.add(connection)
        else:
            connection.start()

    def _open(self, peer: Address, url: SplitResult) -> socket.socket:
        try:
            sock = self._reach(url, DEADLINE)
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

    def _enter(
        self, lines: list[HandshakeSocket], peer: Peer, greeting: bytes = b"", caller: socket.socket | None = None
    ) -> Connection:
        """Put a connection to a proven peer into the table.

        Everything sent from now on follows the greeting.

        With `caller`, the accepted socket, this side accepted, and only lane 0 is given: the others are parked.
        """
        way = (peer.me, peer.address)
        with self._lock:
            if self._stop.is_set():
                raise TransportError("this transport is closed")
            if peer.incarnation < self._incarnations.get(peer.address, 0):
                known = self._incarnations[peer.address]
                raise Refused("FENCED", f"{peer.address} of incarnation {peer.incarnation} was replaced by {known}")
            if caller is not None and _hung_up(caller):
                # It may have connected again meanwhile, and must not lose its new connection to the one it gave up.
                raise HandshakeAborted("the other side closed the connection before it was welcomed")
            if caller is not None:
                self.admit(peer, way in self._ways)
                lines = [*lines, *self._parking.take(way, peer.lane.bundle, self._lanes)]
            self._incarnations[peer.address] = peer.incarnation
            generation = self._identity.generation
            resident = self._residents[peer.me]
            roads = [self._shape(line, peer) for line in lines]
            road = MultiSocketChannel(roads, len(greeting)) if len(roads) > 1 else roads[0]
            connection = Connection(road, *way, resident, generation, self._regions, greeting, self._leave)
            older, self._ways[way] = self._ways.get(way), connection
            self._connections.add(connection)
            self._guard(connection, roads)
        if older is not None:
            older.cut("replaced by a newer connection of the same peer")
            older.join(LINGER)  # all its messages, and its end, are handled before the first message of the newer one
        return connection

    def _leave(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._sent += connection.sent
            self._received += connection.received
            way = (connection.me, connection.peer)
            if self._ways.get(way) is connection:
                del self._ways[way]


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


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        sock.shutdown(socket.SHUT_RDWR)
