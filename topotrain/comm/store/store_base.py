"""The interface of every store, and a view of a store under a common prefix.

The only operation that decides anything is `compare_and_set`. It is carried out once, also when a reply was lost and
the request was repeated.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix

PATIENCE = 30.0
"""Seconds for which an operation tries to reach a server that is away."""
KEEP_S = 7 * 86_400.0
"""Seconds for which a store keeps what a job has written last. A killed job does not remove its values."""


LEAVE_S, QUIET_S = 10.0, 2.0
"""Seconds for the last operations of a process, and those after which it shows that it waits for them."""


def leave(act: Callable[[], object], missing: str) -> None:
    """Carry out the last operations of a process with a store, which may be away.

    missing: the consequence of a failure, in words.
    """

    def carry_out() -> None:
        with suppress(StoreError):
            act()

    # A thread: the patience of a store counts for each operation, and some kinds have none.
    thread = threading.Thread(target=carry_out, name="leave the store", daemon=True)
    thread.start()
    thread.join(QUIET_S)
    if thread.is_alive():
        text = f"waiting for the store, for at most {LEAVE_S:g} s; without it {missing}"
        print(f"topotrain: {text}", file=sys.stderr, flush=True)
        thread.join(LEAVE_S - QUIET_S)


class Store(Protocol):
    """Values under keys, for several threads.

    A key is parts of [a-z0-9_.-] joined by "/", none beginning with a dot.

    A value is at most 1 MiB. `ttl` is in seconds: the value expires after that, unless it was written again. None: it
    stays. Every operation may raise StoreError, and ValueError for an invalid key, value or ttl. Only `watch` waits for
    anything other than the store itself.
    """

    def get(self, key: str) -> bytes | None:
        """Return the value, or None when there is none."""
        ...

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Write a value unconditionally."""
        ...

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        """Write the value if the present one is `expected`; return whether it did.

        `expected` None: there is no value. Atomic.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a value, if there is one."""
        ...

    def keys(self, prefix: str = "") -> list[str]:
        """Return all keys with a value that begin with `prefix`, sorted.

        It is not a snapshot: other processes write meanwhile.
        """
        ...

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """Wait for a value other than `known` and return it.

        Raises TimeoutError after `timeout` seconds.
        """
        ...

    def close(self) -> None:
        """Release what the store holds open; a `watch` of another thread ends.

        It ends with StoreError. Later operations raise StoreError, or still work where nothing is held open.
        """
        ...


class PrefixStore:
    """A view of a store: all its keys lie under `prefix` of another store.

    A value without a `ttl` stays for KEEP_S. owner: closing the view closes the other store, too. Raises ValueError for
    an invalid prefix.
    """

    def __init__(self, store: Store, prefix: str, owner: bool = False) -> None:
        check_key(prefix, "prefix")
        self._store, self._prefix, self._owner = store, prefix + "/", owner

    def get(self, key: str) -> bytes | None:
        return self._store.get(self._whole(key))

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self._store.set(self._whole(key), value, KEEP_S if ttl is None else ttl)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        return self._store.compare_and_set(self._whole(key), expected, value, KEEP_S if ttl is None else ttl)

    def delete(self, key: str) -> None:
        self._store.delete(self._whole(key))

    def keys(self, prefix: str = "") -> list[str]:
        check_prefix(prefix)
        return [key[len(self._prefix) :] for key in self._store.keys(self._prefix + prefix)]

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        return self._store.watch(self._whole(key), timeout, known)

    def close(self) -> None:
        if self._owner:
            self._store.close()

    def _whole(self, key: str) -> str:
        check_key(key)  # here, so that an error shows the key that the caller gave
        return self._prefix + key


def is_foreign(store: Store, key: str) -> bool:
    """Return whether the value under this key was written with another secret."""
    return key in store.keys(key) and store.get(key) is None


def within(store: Store, prefix: str) -> Store:
    """Return the part of a store under `prefix`. Closing it leaves the store open."""
    return PrefixStore(store, prefix)
