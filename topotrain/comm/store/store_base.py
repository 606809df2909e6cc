"""What every store promises, and a view of a store in which all keys begin alike.

Rule: the only operation that decides anything is `compare_and_set`; it happens once, also when an answer was lost and
the question was asked again.
"""

from typing import Protocol

from topotrain.comm.store.key_validation import check_key, check_prefix


class Store(Protocol):
    """Values under keys. A key is parts of [a-z0-9_.-] joined by "/", none beginning with a dot.

    A value is at most 1 MiB. `ttl` is in seconds: after that the value is gone, unless it was written anew; None: it
    stays. A store may be used by several threads. Every operation may raise StoreError, and ValueError for a key, value
    or ttl that is none. No operation but `watch` waits for anything other than the store itself.
    """

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none."""
        ...

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Write a value, whatever was there."""
        ...

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        """Write the value if the present one is `expected` (None: there is none); tells whether it did. Atomic."""
        ...

    def delete(self, key: str) -> None:
        """Remove a value, if there is one."""
        ...

    def keys(self, prefix: str = "") -> list[str]:
        """All keys with a value that begin with `prefix`, sorted. Not one moment's picture: others write meanwhile."""
        ...

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """Wait until there is a value other than `known`; returns it. Raises TimeoutError after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Let go of what the store holds open; what other threads are doing with it ends, a `watch` with StoreError.

        Every operation after that raises StoreError, or still works where nothing is held open.
        """
        ...


class PrefixStore:
    """A store whose keys all lie under `prefix` of another store.

    owner: closing the view closes the other store, too.

    Raises:
        ValueError: the prefix is no key.
    """

    def __init__(self, store: Store, prefix: str, owner: bool = False) -> None:
        check_key(prefix, "prefix")
        self._store, self._prefix, self._owner = store, prefix + "/", owner

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        return self._store.get(self._whole(key))

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """See `Store`."""
        self._store.set(self._whole(key), value, ttl)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        """See `Store`."""
        return self._store.compare_and_set(self._whole(key), expected, value, ttl)

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._store.delete(self._whole(key))

    def keys(self, prefix: str = "") -> list[str]:
        """See `Store`."""
        check_prefix(prefix)
        return [key[len(self._prefix) :] for key in self._store.keys(self._prefix + prefix)]

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """See `Store`."""
        return self._store.watch(self._whole(key), timeout, known)

    def close(self) -> None:
        """See `Store`."""
        if self._owner:
            self._store.close()

    def _whole(self, key: str) -> str:
        check_key(key)  # here, so that a refusal shows the key that the caller gave
        return self._prefix + key


def within(store: Store, prefix: str) -> Store:
    """The part of a store under `prefix`, as a store; `prefix` is a key. Closing it leaves the whole store open."""
    return PrefixStore(store, prefix)
