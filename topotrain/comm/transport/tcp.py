"""TCP: plain on this machine, under TLS 1.3 wherever another machine can reach.

The address decides, and no setting overrides it. A loopback address is served and dialed in the clear (tcp://). Any
other address is served and dialed only under TLS (tls://), and only with a secret. An address that stands for all
interfaces is refused, because it would listen on interfaces that were not asked for.
"""

import socket
from dataclasses import dataclass
from urllib.parse import SplitResult

from topotrain.comm.security.handshake import MAX_LANES, TOKEN_BYTES, Identity, Peer
from topotrain.comm.security.tls import Certificate, TlsChannel, client_side, server_side
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.connection import Connection
from topotrain.comm.transport.multi_socket import Channel, HandshakeSocket
from topotrain.comm.transport.peer_keepalive import LEASE_S, KeepaliveWatch
from topotrain.comm.transport.socket_transport import SocketTransport
from topotrain.comm.transport.tcp_socket import LAST_PORT, bind, is_loopback, literal, plain, prepare


class TcpTransport(SocketTransport):
    """The transport over TCP.

    Its listener takes the first free port from `start_port` on (0: any).

    Args:
        host: a literal address of this machine, or a name of it.
        lanes: sockets per connection.
        exact: `start_port` and no other.
        tls: on a loopback address, too; all others have it anyway.
        lease_s: seconds after which a host that does not answer counts as gone, see `peer_keepalive`.

    Raises:
        TransportError: host is not an address of this machine, or stands for several, or others can reach it and there
            is no secret (a token of zeros), or the package for TLS is missing.
    """

    schemes = ("tcp", "tls")

    def __init__(
        self,
        identity: Identity,
        start_port: int = 0,
        host: str = "127.0.0.1",
        patience: float = 10.0,
        lanes: int = 1,
        exact: bool = False,
        tls: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(identity, patience=patience, lanes=lanes)
        if not 1 <= lanes <= MAX_LANES:
            raise TransportError(f"lanes = {lanes}: must be 1 to {MAX_LANES}")
        if not 0 <= start_port <= LAST_PORT:
            raise TransportError(f"start_port = {start_port}: must be 0 to {LAST_PORT}")
        self._address = local_address(host)
        if not self._address.loopback and identity.token == bytes(TOKEN_BYTES):
            raise TransportError(
                f"host = {host!r}: other machines reach it, so the job needs a secret; its token is zeros"
            )
        self._certificate = Certificate.make() if tls or not self._address.loopback else None
        self._start_port, self._exact = start_port, exact
        self._watch = KeepaliveWatch(lease_s)

    def _listen(self) -> tuple[socket.socket, str]:
        last = self._start_port if self._exact else LAST_PORT
        # 0 lets the system choose a free one.
        ports = range(self._start_port, last + 1) if self._start_port else (0,)
        error: OSError | None = None
        for port in ports:
            try:
                sock = bind(self._address.family, self._address.address, port)
            except OSError as busy:
                error = busy
            else:
                scheme = "tcp" if self._certificate is None else "tls"
                return sock, f"{scheme}://{self._address}:{sock.getsockname()[1]}"
        if self._exact:
            raise TransportError(f"port {self._start_port} of {self._address} cannot be used: {error}")
        raise TransportError(f"no free port on {self._address} from {self._start_port} on: {error}")

    def _open_socket(self, url: SplitResult, seconds: float) -> socket.socket:
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise TransportError(f"{url.geturl()}: {error}") from error
        if not host or not port:
            raise TransportError(f"{url.geturl()}: must be {url.scheme}://ADDRESS:PORT")
        if url.scheme == "tcp" and not is_loopback(host):
            raise TransportError(
                f"{url.geturl()}: tcp:// is for loopback addresses such as 127.0.0.1, others have tls://"
            )
        return socket.create_connection((literal(host), port), timeout=seconds)

    def _inspect(self, sock: socket.socket) -> None:
        prepare(sock)

    def _secure(
        self, sock: socket.socket, seconds: float, url: SplitResult | None = None
    ) -> tuple[HandshakeSocket, bytes]:
        if url is None:
            return (sock, b"") if self._certificate is None else server_side(sock, self._certificate, seconds)
        return client_side(sock, seconds) if url.scheme == "tls" else (sock, b"")

    def _shape(self, line: HandshakeSocket, peer: Peer) -> Channel:
        if isinstance(line, TlsChannel):
            line.trust()
            # TLS stays as it is; only the socket below it may be replaced by an emulated link.
            line.relay(self._wrap(line.below, peer))
            return line
        assert isinstance(line, socket.socket)
        return self._wrap(line, peer)

    def _watch_over(self, connection: Connection, channels: list[Channel]) -> None:
        below = [channel.below if isinstance(channel, TlsChannel) else channel for channel in channels]
        socks = [sock for sock in below if isinstance(sock, socket.socket)]
        if not is_loopback(str(socks[0].getpeername()[0])):  # the own machine is reachable for as long as it runs
            self._watch.add(connection, socks)

    def unregister(self, connection: Connection) -> None:
        self._watch.remove(connection)
        super().unregister(connection)

    def close(self) -> None:
        """Close as `SocketTransport.close`."""
        super().close()
        # Last: while queued messages are sent, the watch still ends connections to unreachable hosts.
        self._watch.close()

    def _wrap(self, sock: socket.socket, peer: Peer) -> socket.socket:
        """Return the socket to go on with after the handshake."""
        return sock


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A literal address of this machine to listen at; loopback: only it reaches it."""

    family: socket.AddressFamily
    address: str
    loopback: bool

    def __str__(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address


def local_address(host: str) -> ListenAddress:
    """Return the local address of a host name; of several, the first usable one.

    Raises:
        TransportError: it is not an address of this machine, or stands for all of its interfaces.
    """
    try:
        answers = socket.getaddrinfo(literal(host), None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError) as error:
        raise TransportError(f"host = {host!r}: must be an address or a name of this machine ({error})") from error
    for *_, (found, *_) in answers:
        address = plain(str(found))
        # A link-local address means another host on each interface, so other hosts could not use its URL.
        if address is None:
            continue
        if address.is_unspecified:
            raise TransportError(f"host = {host!r}: stands for every interface; must be the address of one")
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        if not address.is_multicast and _is_here(family, str(address)):
            return ListenAddress(family, str(address), address.is_loopback)
    raise TransportError(f"host = {host!r}: must be an address of this machine, of one of its interfaces")


def _is_here(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            # Only an address of this machine can be bound; the check needs no privilege.
            probe.bind((address, 0))
        except OSError:
            return False
    return True
