"""A read-only store for jobs with servers at configured addresses.

Each process that is started by hand has its own list of the servers' addresses. So a lookup needs no other process.
Writing is an error, unless the value is the one in the list.
"""

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from topotrain.comm.store.key_validation import StoreError, check_key
from topotrain.comm.transport.tcp_socket import LAST_PORT, InvalidHost, is_loopback, literal, resolve, url_of

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_KEY = re.compile(r"(?:server|listening)/(\d+)/(\d+)")
_ACCEPTED = "must be HOST:PORT, such as 10.0.0.1:7164 or [::1]:7164"


class StaticStore:
    """A `Store` of fixed URLs: server K of group G is at `server/G/K`.

    `listening/G/K` holds the same URL.

    Args:
        addresses: HOST:PORT of every server, group by group. A name is looked up when it is asked for.
        shards: servers in each group; 0: all are of one group.

    Raises:
        StoreError: an address is invalid, or the addresses do not fill whole groups.
    """

    def __init__(self, addresses: Sequence[str], shards: int = 0) -> None:
        if not addresses:
            raise StoreError("no server's address is known: at least one is needed")
        if shards and len(addresses) % shards:
            raise StoreError(f"{len(addresses)} addresses for groups of {shards} servers")
        self.addresses = tuple(addresses)
        self.shards = shards or len(addresses)
        self._parts = [split_address(address) for address in addresses]

    def place(self, group: int, index: int) -> tuple[str, int]:
        """Return the numeric address and the port of a server. Raises StoreError."""
        number = group * self.shards + index
        if index >= self.shards or number >= len(self._parts):
            raise StoreError(f"server {group}/{index} is not among {', '.join(self.addresses)}")
        host, port = self._parts[number]
        return numeric(host), port

    def get(self, key: str) -> bytes | None:
        """Return the URL under one of the two kinds of key, or raise StoreError."""
        check_key(key)
        found = _KEY.fullmatch(key)
        if found is None:
            raise StoreError(f"{key}: a list of addresses holds nothing but the servers'")
        host, port = self.place(int(found[1]), int(found[2]))
        # As `TcpTransport` decides by the address: TLS wherever another machine can reach.
        return url_of(host, port, "tcp" if is_loopback(host) else "tls").encode()

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """Return the URL at once. Raises StoreError for a value that will never be there."""
        value = self.get(key)
        if value is None or value == known:
            raise StoreError(f"{key} never changes: it is {known!r} in the list of addresses")
        return value

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Accept the value that the list has. Raises StoreError for any other."""
        held = self.get(key)
        if value != held:
            raise StoreError(f"{key} is {value!r}, but {held!r} in the list of addresses")

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        """Raise StoreError: a list of addresses cannot be written."""
        raise StoreError(f"{key}: a list of addresses cannot be written")

    def delete(self, key: str) -> None:
        """Raise StoreError: a list of addresses cannot be written."""
        raise StoreError(f"{key}: a list of addresses cannot be written")

    def keys(self, prefix: str = "") -> list[str]:
        """Raise StoreError: a list of addresses cannot be searched."""
        raise StoreError("a list of addresses cannot be searched")

    def close(self) -> None:
        """Do nothing: nothing is open."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises StoreError."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit():
        raise StoreError(f"address {address!r}: {_ACCEPTED}")
    if not 1 <= int(port) <= LAST_PORT:
        raise StoreError(f"address {address!r}: the port must be 1 to {LAST_PORT}")
    return bare, int(port)


def numeric(host: str) -> str:
    """Return a host's numeric address; of a name, the first one. Raises StoreError."""
    try:
        return str(ipaddress.ip_address(literal(host)))
    except ValueError:
        pass
    try:
        return resolve(host, 0)[1]
    except InvalidHost as error:
        raise StoreError(str(error)) from None
    except OSError as error:
        raise StoreError(f"host {host!r}: not an address, and the name is not known here ({error.strerror})") from None


def as_data(store: StaticStore) -> Mapping[str, object]:
    """Return the data from which another process makes the same store."""
    return {"addresses": list(store.addresses), "shards": store.shards}


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises StoreError without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            # Python has no call for the address of an interface. The name has at most 15 bytes (IFNAMSIZ).
            answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            why = f"must be a network interface of this machine with an IPv4 address, here are {names}"
            raise StoreError(why) from None
    # `struct ifreq`: 16 bytes of name, two of family and two of port, then the address.
    return socket.inet_ntoa(answer[20:24])
