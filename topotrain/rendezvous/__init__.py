"""Where processes that do not know each other yet meet: a few small values under agreed keys.

Rule: the store is for starting up and for membership, never on the data path: training goes on while it is away. A
value is bytes, at most 1 MiB; the only operation that decides anything is `compare_and_set`.
"""

from typing import Protocol
from urllib.parse import unquote, urlsplit

from topotrain.rendezvous.keys import StoreError

__all__ = ["Store", "StoreError", "open_store"]

_ACCEPTED = "file:///ABSOLUTE/DIRECTORY"


class Store(Protocol):
    """Values under keys. A key is parts of [a-z0-9_.-] joined by "/", none beginning with a dot.

    Every operation may raise StoreError, and ValueError for a key or value that is none.
    """

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """Write a value, whatever was there."""
        ...

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Write the value if the present one is `expected` (None: there is none); tells whether it did. Atomic."""
        ...

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """Wait until there is a value other than `known`; returns it. Raises TimeoutError after `timeout` seconds."""
        ...


def open_store(url: str) -> Store:
    """The store of a URL. Raises StoreError, which says what is accepted."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise StoreError(f"rendezvous {url!r}: unknown kind {parts.scheme!r}, accepted: {_ACCEPTED}")
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise StoreError(f"rendezvous {url!r}: must be {_ACCEPTED}")
    from topotrain.rendezvous.file import FileStore  # each kind brings its own dependencies

    return FileStore(unquote(parts.path))
