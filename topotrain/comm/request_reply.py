"""Requests and replies of the services beside a job: stores and session tasks.

* A connection begins with the handshake of the transports, with a key of the service's own.
* At an address that other machines can reach it goes through TLS 1.3. Both sides know from the address whether it does.
* Everything after that travels in the frames of the transports, with their checks.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from topotrain.comm.security.handshake import DEADLINE, Identity, answer, dial
from topotrain.comm.security.secret import job_key
from topotrain.comm.transport import ConnectionLost, TransportError
from topotrain.comm.transport.frame import BODY, Header
from topotrain.comm.transport.frame_reader import EndOfStream, FrameReader
from topotrain.comm.transport.listener import Listener
from topotrain.comm.transport.multi_socket import HandshakeSocket
from topotrain.comm.transport.tcp_socket import bind, is_loopback, keep_alive, prepare, resolve
from topotrain.config.topology import Address, Role
from topotrain.core.message_limits import MAX_BODY, MAX_META, ProtocolError

if TYPE_CHECKING:
    from topotrain.comm.security.tls import Certificate

CLIENT, SERVER = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
ClientHandler = Callable[["RequestChannel"], None]
_GENERATION = 0  # services have none
_JOINED = 1 << 16  # bytes of a payload that are copied behind their header, to leave in one packet with it
_PIECE = 1 << 20  # bytes of a payload for which memory is allocated at once
_CLOSING_S = 5.0  # for the threads of a closing server


class Frame(NamedTuple):
    """One frame of a service; the meaning of `kind` is the service's own."""

    kind: int
    meta: bytes
    payload: bytearray


class RequestChannel:
    """Frames over a proven socket. One thread at a time uses it."""

    def __init__(self, sock: HandshakeSocket) -> None:
        self._sock = sock
        self._reader = FrameReader(sock, with_fds=False)
        self._number_out = 0

    def send(self, seconds: float, kind: int, meta: bytes = b"", payload: bytes | memoryview = b"") -> None:
        """Send a frame; no system call on the way may take longer than `seconds`.

        Raises:
            ConnectionLost: the connection has broken.
            ValueError: the frame is larger than a frame may be.
        """
        if len(meta) > MAX_META or len(payload) > MAX_BODY:
            raise ValueError(f"a frame of {len(meta)} + {len(payload)} bytes: at most {MAX_META} and {MAX_BODY}")
        self._number_out += 1
        # A frame without a payload must not have the flag, see `Header.unpack`.
        flags = BODY if payload else 0
        head = Header(flags, kind, len(meta), len(payload), _GENERATION, self._number_out).pack() + meta
        try:
            self._sock.settimeout(seconds)
            if len(payload) <= _JOINED:
                self._sock.sendall(head + payload)
            else:
                self._sock.sendall(head)
                self._sock.sendall(payload)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, begin: float | None, seconds: float, most: int = MAX_BODY) -> Frame | None:
        """Return the next frame, or None when the other side has closed between two.

        Args:
            begin: seconds in which the frame must begin; None: any time.
            seconds: for each system call after its first byte.
            most: bytes of its payload.

        Raises:
            ConnectionLost: the connection has broken or was too slow, or its bytes are no such frame.
        """
        try:
            # An idle connection may wait for ever; a frame that has begun may not.
            self._sock.settimeout(begin)
            if not self._reader.wait():
                return None
            self._sock.settimeout(seconds)
            header, meta = self._reader.frame(_GENERATION)
            if header.flags not in (0, BODY) or header.payload > most:
                raise ProtocolError(f"a frame of flags {header.flags} and {header.payload} bytes: at most {most}")
            return Frame(header.kind, meta, self._payload(header.payload))
        except (OSError, EndOfStream, ProtocolError) as error:
            raise ConnectionLost(str(error)) from error

    def _payload(self, size: int) -> bytearray:
        # Grown piece by piece: a header may announce 64 MiB and nothing follow.
        came = bytearray()
        while len(came) < size:
            piece = bytearray(min(size - len(came), _PIECE))
            self._reader.read_into(memoryview(piece))
            came += piece
        return came

    @property
    def pending(self) -> bool:
        """Whether bytes of a next frame have been read already."""
        return self._reader.pending

    def fileno(self) -> int:
        """Return the socket's number, for a selector."""
        return self._sock.fileno()

    def shutdown(self) -> None:
        """End what another thread does on this connection."""
        with suppress(OSError):  # it may be down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's end."""
        # Without a shutdown: after a fork the other process still uses the connection.
        self._sock.close()


def service_identity(service: str, secret: bytes) -> Identity:
    """Return the identity that both sides prove. ValueError for an invalid secret."""
    # Services have no incarnations, no generation and no config.
    return Identity(f"topotrain {service}", job_key(secret, service), 0, 0, "")


def connect(host: str, port: int, proof: Identity) -> RequestChannel:
    """Connect to a service.

    Raises OSError where no process answers, TransportError where it refuses this one or is no such service.
    """
    _, address = resolve(host, port)
    sock = socket.create_connection((address, port), timeout=DEADLINE)
    try:
        return RequestChannel(_prove_client(sock, proof))
    except BaseException:
        sock.close()
        raise


def _prove_client(sock: socket.socket, proof: Identity) -> HandshakeSocket:
    prepare(sock)
    keep_alive(sock)
    # The address that was reached decides, not the name that was given: the name may mean another one by now.
    if is_loopback(str(sock.getpeername()[0])):
        dial(sock, proof, CLIENT, SERVER)
        return sock
    from topotrain.comm.security.tls import client_side

    until = time.monotonic() + DEADLINE
    channel, binding = client_side(sock)
    dial(channel, proof, CLIENT, SERVER, until - time.monotonic(), binding=binding)
    channel.trust()
    return channel


def _prove_server(
    sock: socket.socket, proof: Identity, certificate: "Certificate | None"
) -> tuple[HandshakeSocket, bytes]:
    """Return the socket to a proven client, and the welcome that it waits for."""
    until = time.monotonic() + DEADLINE  # one deadline for TLS and the handshake together
    prepare(sock)
    keep_alive(sock)
    if certificate is None:
        _, welcome = answer(sock, proof, {SERVER})
        return sock, welcome
    from topotrain.comm.security.tls import server_side

    channel, binding = server_side(sock, certificate)
    _, welcome = answer(channel, proof, {SERVER}, until - time.monotonic(), binding)
    channel.trust()
    return channel, welcome


def _certificate_for(address: str, secret: bytes) -> "Certificate | None":
    """Return a server's certificate, or None where only this machine can reach it."""
    if is_loopback(address):
        return None
    found = ipaddress.ip_address(address.partition("%")[0])
    # Clients of a server that listens at all addresses at once could not know whether to expect TLS.
    if found.is_unspecified or found.is_multicast:
        raise TransportError("name one address, at which others reach this machine")
    if not any(secret):
        raise TransportError("other machines reach it, so it needs a secret, not zeros")
    from topotrain.comm.security.tls import Certificate

    return Certificate.make()


class RequestServer:
    """A service at a TCP address, from `start` until `close`.

    An unproven peer cannot stop it. A handshake has its own thread, two seconds and 512 bytes.

    Args:
        service: the name that its clients give, too; both derive their key from it.
        host: an address of this machine. port: 0 for any that is free.
        serve: serves a proven client until its end, on a thread of its own. most: connections at once.

    Raises:
        OSError: the address cannot be listened at.
        TransportError: the address means all addresses at once, or other machines can reach it and there is no secret
            (zeros), or TLS is not installed.
        ValueError: the secret does not have 32 bytes.
    """

    def __init__(self, service: str, host: str, port: int, secret: bytes, serve: ClientHandler, most: int) -> None:
        self._identity, self._serve = service_identity(service, secret), serve
        family, address = resolve(host, port)
        self._certificate = _certificate_for(address, secret)
        sock = bind(family, address, port)
        self.port = int(sock.getsockname()[1])
        self._listener = Listener(sock, self._handle, f"{service} {host}:{self.port}", most)

    def start(self) -> None:
        """Begin to accept connections."""
        self._listener.start()

    def close(self) -> None:
        """Close all connections and end all threads."""
        self._listener.stop()
        # A handler may be in the middle of a reply.
        self._listener.join(_CLOSING_S)

    def _handle(self, sock: socket.socket) -> None:
        """Serve a client, once it has proven itself."""
        with suppress(OSError, TransportError):  # the end of one client concerns no other
            proven, welcome = _prove_server(sock, self._identity, self._certificate)
            # From here on it no longer counts among the few that may be unproven.
            self._listener.proven(sock)
            proven.sendall(welcome)
            self._serve(RequestChannel(proven))
