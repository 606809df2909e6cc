"""A topotrain store as a torch.distributed store, and redis:// as an init_method.

The interface is torch's, the guarantees are those of `Store`: everything that decides is a compare-and-set. Any key of
torch is mapped to a valid key of a store, and no two keys are mapped to the same one.
"""

import atexit
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from urllib.parse import parse_qsl, urlencode, urlsplit

from torch import distributed
from torch._C._distributed_c10d import Store as TorchStoreBase  # torch.distributed exports it, but not to mypy

from topotrain.comm.backoff import spread
from topotrain.comm.store import Store, StoreError, open_store, within
from topotrain.comm.store.discovery.generations import join

LONGEST = 64
"""Characters of an encoded key of torch; a longer one is replaced by its SHA-256, cut to 160 bits."""
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05  # seconds between two attempts to count
_ALIVE: list["TorchStore"] = []
"""All stores of the process: C++ keeps only its half of a store that is written in Python alive."""


def encode(key: str) -> str:
    """Encode a key of torch as a key of a store; different keys stay different."""
    text = "k" + re.sub(r"[^a-z0-9.-]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), key)
    return text if len(text) <= LONGEST else "s" + hashlib.sha256(key.encode()).hexdigest()[:40]


class TorchStore(TorchStoreBase):
    """A `torch.distributed.Store` in `store`, where its keys begin with `prefix`.

    `timeout` and `set_timeout` are torch's (300 seconds at first). Every wait for a key takes at most that long.

    Args:
        ttl: seconds after which a value that was not written again expires; None: it stays.

    Raises:
        distributed.DistStoreError: by every operation: the key did not come in time, or the store cannot be used.
    """

    timeout: timedelta  # torch's property; its type stubs leave it out

    def __init__(self, store: Store, prefix: str = "", ttl: float | None = None) -> None:
        super().__init__()
        self._store, self._prefix, self._ttl = store, prefix, ttl
        # Never removed: C++ may call a store until the process ends.
        _ALIVE.append(self)

    def where(self) -> str:
        """Return the beginning of all keys."""
        return self._prefix

    def clone(self) -> "TorchStore":
        """Return another one over the same store, which any number of threads may use."""
        other = type(self)(self._store, self._prefix, self._ttl)
        other.set_timeout(self.timeout)
        return other

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, whatever was there."""
        with _as_store_errors():
            self._store.set(self._key(key), _raw(value), self._ttl)

    def get(self, key: str) -> bytes:
        """Return the value, as soon as there is one."""
        return self._await(key, time.monotonic() + self.timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Add to a number kept as decimal digits (0 at first); return the sum. Atomic."""
        whole, pause = self._key(key), _FIRST_PAUSE
        with _as_store_errors():
            while True:
                seen = self._store.get(whole)
                try:
                    total = int(seen or b"0") + value
                except ValueError:
                    raise distributed.DistStoreError(f"add({key!r}): its value {seen!r} is not a number") from None
                if self._store.compare_and_set(whole, seen, str(total).encode(), self._ttl):
                    return total
                # Others count, too: without jitter all would collide again.
                time.sleep(spread(pause, 0, 1))
                pause = min(2 * pause, _LAST_PAUSE)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there is a value under each key, now."""
        with _as_store_errors():
            return all(self._store.get(self._key(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until there is a value under each key."""
        until = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        for key in keys:
            self._await(key, until)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write the desired value if the present one is the expected one ("": none).

        Return the value afterwards, or the expected one if there is none.
        """
        whole, expected, desired = self._key(key), _raw(expected_value), _raw(desired_value)
        with _as_store_errors():
            if self._store.compare_and_set(whole, expected, desired, self._ttl):
                return desired
            # torch means "no value" by an empty expected value.
            if not expected and self._store.compare_and_set(whole, None, desired, self._ttl):
                return desired
            present = self._store.get(whole)
            return expected if present is None else present

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        with _as_store_errors():
            there = self._store.get(self._key(key)) is not None
            self._store.delete(self._key(key))
            return there

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        with _as_store_errors():
            return len(self._store.keys(self.where()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value, or write them where there is none. Atomic."""
        whole, more = self._key(key), _raw(value)
        with _as_store_errors():
            while True:
                seen = self._store.get(whole)
                if self._store.compare_and_set(whole, seen, (seen or b"") + more, self._ttl):
                    return
                time.sleep(spread(_LAST_PAUSE, 0, 1))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values, as soon as all are there."""
        until = time.monotonic() + self.timeout.total_seconds()
        return [self._await(key, until) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values")
        for key, value in zip(keys, values):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set exist."""
        return True

    # C++ calls these two by other names than Python.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _key(self, key: str) -> str:
        return self.where() + encode(key)

    def _await(self, key: str, until: float) -> bytes:
        with _as_store_errors():
            left = max(0.0, until - time.monotonic())
            try:
                return self._store.watch(self._key(key), left)
            except TimeoutError:
                raise distributed.DistStoreError(f"{key!r} was not set in time") from None


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: object
) -> Iterator[tuple[TorchStore, int, int]]:
    """Yield the store of this start, the rank and the world size.

    It serves `init_process_group(init_method="redis://…")`.

    torch puts rank and world_size into the URL's query when they are given as arguments.

    Raises:
        ValueError: rank or world_size is missing or impossible.
        distributed.DistStoreError: the store cannot be reached, or not all ranks came in time.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    rank, size = _number(query, "rank"), _number(query, "world_size")
    if not 0 <= rank < size:
        raise _refusal(f"rank = {rank}: must be from 0 to world_size - 1 = {size - 1}")
    with _as_store_errors():
        whole = open_store(parts._replace(query=urlencode(query)).geturl())
        base = within(whole, f"torch/{size}")
        try:
            name = join(base, rank, size, timeout.total_seconds())
        except TimeoutError as error:
            raise distributed.DistStoreError(str(error)) from None
    store = TorchStore(within(base, name))
    store.set_timeout(timeout)
    if rank == 0:
        atexit.register(_sweep, within(base, name), os.getpid())
    yield store, rank, size
    # torch resumes this generator only to make the group anew, for which all ranks must come again.
    raise RuntimeError(f"{parts.scheme}:// cannot be used for a second rendezvous: start the processes again")


def _sweep(store: Store, pid: int) -> None:
    """Delete the values when rank 0 ends, as they vanish with a store of torch's own."""
    with suppress(StoreError):
        # Not where a process that rank 0 has forked ends.
        for key in store.keys("") if os.getpid() == pid else ():
            store.delete(key)


def _number(query: dict[str, str], name: str) -> int:
    text = query.pop(name, "")
    if not text:
        raise _refusal(f"{name} is missing: give it to init_process_group, or in the URL as ?{name}=…")
    if not text.isascii() or not text.isdecimal():
        raise _refusal(f"{name} = {text!r}: must be a whole number, 0 or more")
    return int(text)


def _refusal(why: str) -> ValueError:
    return ValueError(f"init_process_group with a redis:// URL: {why}")


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextmanager
def _as_store_errors() -> Iterator[None]:
    """Turn StoreError into torch's error, which torch's own code expects of a store."""
    try:
        yield
    except StoreError as error:
        raise distributed.DistStoreError(str(error)) from None
