"""TCP sockets: addresses that other machines reach, listening, and options."""

import ipaddress
import socket
from contextlib import suppress

from topotrain.comm.transport import TransportError
from topotrain.comm.transport.listener import BACKLOG

# The default of some systems (bbr) paces loopback to a third of its speed. Every kernel has reno, it needs no
# privilege, and where nothing is lost it takes about an eighth less processor time than cubic.
_LOOPBACK_CONGESTION = b"reno"
_LOCALHOST = {"localhost": "127.0.0.1"}  # the one name that needs no lookup
LAST_PORT = 65535
_IDLE, _EVERY, _TRIES = 15, 5, 3  # keepalive: seconds of silence before the first probe, between probes, and probes


class InvalidHost(TransportError):
    """A text that cannot be the name of a host."""


def literal(host: str) -> str:
    """Return the address that `localhost` stands for; every other host as it is."""
    return _LOCALHOST.get(host, host)


def plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address that means the same on every machine.

    None for a name, and for an address that names an interface, too.
    """
    try:
        address = ipaddress.ip_address(literal(host))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        # The system connects ::ffff:127.0.0.1 to 127.0.0.1, which Python 3.11 does not call a loopback address.
        return None if address.scope_id else address.ipv4_mapped or address
    return address


def is_loopback(host: str) -> bool:
    """Whether this is a literal address that only this machine reaches."""
    # A name does not count: its meaning may change between this check and the connection.
    address = plain(host)
    return address is not None and address.is_loopback


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the first address of a host.

    Raises OSError when its name is not found, InvalidHost when it cannot be a name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        # Python's IDNA codec raises it, for an empty or overlong part of a name.
        raise InvalidHost(f"{host!r} is not a host name") from None
    return found[0][0], str(found[0][4][0])


def url_of(host: str, port: int, scheme: str = "tcp") -> str:
    """Return the URL of an address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError, and then leaves none open."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Else the port of a process that has just ended is taken for a minute (TIME_WAIT).
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
        sock.listen(BACKLOG)  # two sockets may both bind, only one may listen: the port is taken from here on
    except OSError:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """Set a connected socket up: no delay, and on loopback fast congestion control."""
    # Nagle's algorithm would hold back a small frame until the peer has acknowledged the one before it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # On a real network the system's choice stays: it may have been made for that network.
    if not is_loopback(str(sock.getsockname()[0])):
        return
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice the death of a silent peer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TRIES)
