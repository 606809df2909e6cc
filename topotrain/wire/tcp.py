"""TCP on this machine.

Rule: loopback only. This road proves who the peer is but does not encrypt, so it refuses any address that other
machines can reach.
"""

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import SplitResult

from topotrain.wire import WireError
from topotrain.wire.auth import MAX_LANES, Identity, Peer
from topotrain.wire.emulated import Network
from topotrain.wire.sockets import BACKLOG, SocketWire

# The default of some systems (bbr) paces loopback to a third of its speed; cubic may need a privilege, reno does not.
_CONGESTION = (b"cubic", b"reno")
_LAST_PORT = 65535


class TcpWire(SocketWire):
    """The road over TCP; its listener takes the first free port from `start_port` on (0: any).

    With a `network`, what is said after the handshake goes through its links. lanes: sockets per connection.

    Raises:
        WireError: host is no loopback address.
    """

    scheme = "tcp"

    def __init__(
        self,
        identity: Identity,
        start_port: int = 0,
        host: str = "127.0.0.1",
        patience: float = 10.0,
        network: Network | None = None,
        lanes: int = 1,
    ) -> None:
        super().__init__(identity, patience=patience, lanes=lanes)
        if not 1 <= lanes <= MAX_LANES:
            raise WireError(f"lanes = {lanes}: must be 1 to {MAX_LANES}")
        if not 0 <= start_port <= _LAST_PORT:
            raise WireError(f"start_port = {start_port}: must be 0 to {_LAST_PORT}")
        self._host, self._family = _loopback(host)
        self._start_port = start_port
        self._network = network

    def _listen(self) -> tuple[socket.socket, str]:
        ports = range(self._start_port, _LAST_PORT + 1) if self._start_port else (0,)
        error: OSError | None = None
        for port in ports:
            sock = socket.socket(self._family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self._host, port))
                sock.listen(BACKLOG)  # two listeners may both bind, only one may listen: the port is ours from here
            except OSError as busy:
                sock.close()
                error = busy
            else:
                shown = f"[{self._host}]" if ":" in self._host else self._host
                return sock, f"tcp://{shown}:{sock.getsockname()[1]}"
        raise WireError(f"no free port on {self._host} from {self._start_port} on: {error}")

    def _reach(self, url: SplitResult, seconds: float) -> socket.socket:
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise WireError(f"{url.geturl()}: {error}") from error
        if not host or not port:
            raise WireError(f"{url.geturl()}: must be tcp://ADDRESS:PORT")
        return socket.create_connection((_loopback(host)[0], port), timeout=seconds)

    def _inspect(self, sock: socket.socket) -> None:
        prepare(sock)

    def _shape(self, sock: socket.socket, peer: Peer) -> socket.socket:
        return sock if self._network is None else self._network.shape(sock, peer.me, peer.address)


def prepare(sock: socket.socket) -> None:
    """Set a connected TCP socket up for loopback: no waiting for more bytes, and a congestion control that is fast."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in _CONGESTION:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def _loopback(host: str) -> tuple[str, socket.AddressFamily]:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise WireError(f"host = {host!r}: must be a loopback address such as 127.0.0.1") from error
    if not address.is_loopback:
        raise WireError(f"host = {host!r}: this version only uses loopback addresses such as 127.0.0.1, see the road")
    return str(address), socket.AF_INET6 if address.version == 6 else socket.AF_INET
