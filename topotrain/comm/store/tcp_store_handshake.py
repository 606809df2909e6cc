"""Connect a store server and its clients, with proof that both know the secret.

* Before the handshake of the transports (security) has succeeded, only fixed-size fields are read, and none is trusted.
* The key of the handshake is derived from the secret for stores alone.
* At an address that other machines can reach the handshake goes through TLS 1.3, and proves the certificate, too. Both
  sides know from the address whether it does.
"""

import ipaddress
import socket
from typing import TYPE_CHECKING

from topotrain.comm.security.handshake import Identity, answer, dial
from topotrain.comm.security.secret import job_key
from topotrain.comm.store.key_validation import StoreError
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.multi_socket import HandshakeSocket
from topotrain.config.topology import Address, Role

if TYPE_CHECKING:
    from topotrain.comm.security.tls import Certificate

CLIENT, SERVER = Address(Role.WORKER, 0, 0), Address(Role.SERVER, 0, 0)
_NAME = "topotrain store"
_IDLE, _EVERY, _TRIES = 15, 5, 3  # keepalive: seconds of silence before the first probe, between probes, and probes


def identity(secret: bytes) -> Identity:
    """Return the identity that both sides of a store prove.

    Raises ValueError for a secret of a wrong length.
    """
    return Identity(_NAME, job_key(secret, "store"), 0, 0, "")


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the first address of a host.

    Raises OSError when its name is not found, StoreError when it is invalid.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise StoreError(f"store {shown(host, port)}: {host!r} is not a host name") from None
    return found[0][0], str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def shown(host: str, port: int) -> str:
    """Return the URL of a store at this address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def prepare(sock: socket.socket) -> None:
    """Set a connected socket up.

    Small frames leave at once, and the death of a silent peer is noticed.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TRIES)


def bound(family: socket.AddressFamily, address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at the address.

    Raises OSError, and then leaves none open.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def certificate_for(host: str, address: str, port: int, secret: bytes) -> "Certificate | None":
    """Return a server's certificate, or None where only this machine can reach it.

    Raises:
        StoreError: the address means all addresses at once (clients could not know whether to expect TLS), or other
            machines can reach it and there is no secret (zeros), or TLS is not installed.
    """
    if is_loopback(address):
        return None
    literal = ipaddress.ip_address(address.partition("%")[0])
    if literal.is_unspecified or literal.is_multicast:
        raise StoreError(f"store {shown(host, port)}: name one address, at which others reach this machine")
    if not any(secret):
        raise StoreError(f"store {shown(host, port)}: other machines reach it, so it needs a secret, not zeros")
    from topotrain.comm.security.tls import Certificate

    try:
        return Certificate.make()
    except TransportError as error:
        raise StoreError(f"store {shown(host, port)}: {error}") from error


def come_in(sock: socket.socket, proof: Identity, certificate: "Certificate | None") -> HandshakeSocket:
    """Take a client's handshake; return the socket to talk to it.

    Raises TransportError, OSError.
    """
    prepare(sock)
    line: HandshakeSocket = sock
    binding = b""
    if certificate is not None:
        from topotrain.comm.security.tls import server_side

        channel, binding = server_side(sock, certificate)
        line = channel
    _, welcome = answer(line, proof, lambda wanted: wanted == SERVER, binding=binding)
    if certificate is not None:
        channel.trust()
    line.sendall(welcome)
    return line


def go_in(sock: socket.socket, proof: Identity) -> HandshakeSocket:
    """Introduce this client to the server; return the socket to talk to it.

    Raises TransportError, OSError.
    """
    prepare(sock)
    if is_loopback(str(sock.getpeername()[0])):
        dial(sock, proof, CLIENT, SERVER)
        return sock
    from topotrain.comm.security.tls import client_side

    channel, binding = client_side(sock)
    dial(channel, proof, CLIENT, SERVER, binding=binding)
    channel.trust()
    return channel
