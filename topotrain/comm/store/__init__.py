"""Stores in which processes find each other: a few small values under keys.

* A store is for starting up and for membership, never on the data path: training goes on while it is away.
* A value is bytes, at most 1 MiB.
* The only operation that decides anything is `compare_and_set`.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from topotrain.comm.store.key_validation import StoreError
from topotrain.comm.store.store_base import PATIENCE, PrefixStore, Store, within
from topotrain.comm.store.store_url import StoreUrl, parse

if TYPE_CHECKING:
    from topotrain.comm.store.discovery.environment import Meeting

__all__ = ["StoreService", "Store", "StoreError", "host_store", "open_existing", "open_store", "serve_store", "within"]


class StoreService(Protocol):
    """A tcp:// store that this process serves, on threads of its own."""

    url: str

    def close(self) -> None:
        """Close all connections; the values are lost."""
        ...


def open_store(
    url: str,
    secret: bytes | None = None,
    patience: float = PATIENCE,
    environ: Mapping[str, str] | None = None,
    meeting: "Meeting | None" = None,
) -> Store:
    """Open the store of a URL; the caller closes it.

    `file:///dir`, `tcp://host:port`, `redis://…`, `rediss://…` or `env://` (taken from this process's environment).
    With `?job=NAME` at its end, all keys lie under `jobs/NAME/`.

    Args:
        secret: 32 bytes for all stores but file://. None: `secret.load_secret` of the environment, when it is needed.
        patience: seconds for which an operation tries to reach a server that is away.
        environ: instead of the process's environment.
        meeting: how to wait for the store of rank 0, for env:// under torchrun.

    Raises:
        StoreError: the kind of store is unknown (the text lists the accepted ones), or it cannot be opened. Servers are
            only contacted at the first operation, except for env:// under torchrun.
    """
    address = parse(url)
    environ = os.environ if environ is None else environ
    if address.scheme == "env":
        from topotrain.comm.store.discovery.environment import find, named_url

        named = named_url(address, environ)
        inner: Store = (
            open_store(named, secret, patience, environ) if named else find(address, environ, secret, patience, meeting)
        )
    else:
        inner = _open(address, secret, patience, environ)
    return PrefixStore(inner, f"jobs/{address.job}", owner=True) if address.job else inner


def open_existing(
    url: str, secret: bytes | None = None, patience: float = PATIENCE, environ: Mapping[str, str] | None = None
) -> Store:
    """Open a store that other processes use; do not make its directory.

    Raises:
        StoreError: as `open_store`, or the directory does not exist.
    """
    address = parse(url)
    if address.scheme == "file" and not os.path.isdir(address.path):
        raise address.fail("this directory does not exist, so no job has met there")
    return open_store(url, secret, patience, environ)


def serve_store(host: str, port: int, secret: bytes) -> StoreService:
    """Serve a tcp:// store at an address of this machine until it is closed.

    port: 0 for any free one.

    Raises:
        StoreError: the port is taken, or the address does not belong to this machine, or means all addresses at once,
            or is reachable by others while the package for TLS is missing.
        ValueError: the secret does not have 32 bytes.
    """
    from topotrain.comm.store.tcp_store_server import TcpServer

    return TcpServer(host, port, secret)


def host_store(url: str, secret: bytes | None = None, environ: Mapping[str, str] | None = None) -> StoreService | None:
    """Serve the store of the URL where the unit of rank 0 should, else return None.

    A tcp:// URL (or one that env:// stands for) is served when its address belongs to this machine and no store is
    there yet. Under torchrun its own store has MASTER_PORT. So env:// serves at a free port, and publishes it to the
    other units through torch's store.

    Raises:
        StoreError: another program has the port, or the URL is invalid.
    """
    from topotrain.comm.store.discovery.environment import host

    return host(parse(url), os.environ if environ is None else environ, secret)


def _open(url: StoreUrl, secret: bytes | None, patience: float, environ: Mapping[str, str]) -> Store:
    """Open one kind of store."""
    # Each kind brings its own dependencies, so it is imported when it is wanted.
    if url.scheme == "file":
        from topotrain.comm.store.file_store import FileStore

        return FileStore(url.path)
    from topotrain.comm.security.secret import load_secret

    secret = load_secret(environ) if secret is None else secret
    if url.scheme == "tcp":
        from topotrain.comm.store.tcp_store import TcpStore

        return TcpStore(url.host, url.port, secret, patience)
    from topotrain.comm.store.redis_store import RedisStore

    return RedisStore(url, secret)
