"""The table of a store that has its values in the memory of one process."""

import heapq
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from topotrain.comm.store.key_validation import StoreError

MAX_TOTAL = 256 << 20
"""Bytes of all keys and values."""
REMEMBERED = 1 << 16
"""How many of the latest writes are remembered by their number, in case one is repeated."""


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    until: float  # by the monotonic clock, which does not jump; inf: stays


class MemoryTable:
    """Values under keys, for several threads. Keys and values have been checked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._ends: list[tuple[float, str]] = []
        self._total = 0
        self._done: OrderedDict[bytes, bool] = OrderedDict()
        self._watchers: dict[str, list[int]] = {}

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        with self._lock:
            return self._present(key)

    def set(self, key: str, value: bytes, life: int, once: bytes) -> bool:
        """Write a value for `life` milliseconds (0: it stays). StoreError when it is full."""
        with self._lock:
            # A repeated request must not overwrite a value that was written since.
            if once not in self._done:
                self._write(key, value, life)
            return self._remember(once, True)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, life: int, once: bytes) -> bool:
        """Write the value if the present one is `expected`. Raises StoreError when full."""
        with self._lock:
            if once in self._done:
                # The reply to the first attempt was lost, and the client asks again.
                return self._done[once]
            same = self._present(key) == expected
            if same:
                self._write(key, value, life)
            return self._remember(once, same)

    def delete(self, key: str, once: bytes) -> bool:
        """Remove a value."""
        with self._lock:
            if once not in self._done:
                self._drop(key)
            return self._remember(once, True)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        with self._lock:
            return sorted(key for key in self._entries if key.startswith(prefix) and self._present(key) is not None)

    @contextmanager
    def watching(self, key: str) -> Iterator[int]:
        """Give an eventfd that is written after each write to the key."""
        change = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._lock:
            self._watchers.setdefault(key, []).append(change)
        try:
            yield change
        finally:
            with self._lock:
                others = self._watchers[key]
                others.remove(change)
                if not others:
                    del self._watchers[key]
            os.close(change)

    def _present(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.until <= time.monotonic() else entry.value

    def _write(self, key: str, value: bytes, life: int) -> None:
        now = time.monotonic()
        # Expired values are removed here, so the table needs no thread.
        while self._ends and self._ends[0][0] <= now:
            _, gone = heapq.heappop(self._ends)
            # The key may have been written again with a longer lifetime.
            if gone in self._entries and self._entries[gone].until <= now:
                self._drop(gone)
        old = self._entries.get(key)
        # A new key counts with its own length, too.
        grown = len(value) - (len(old.value) if old else -len(key))
        if self._total + grown > MAX_TOTAL:
            raise StoreError(f"the store is full: {MAX_TOTAL >> 20} MiB")
        self._total += grown
        entry = self._entries[key] = _Entry(value, now + life / 1000 if life else float("inf"))
        if life:
            self._note(entry.until, key)
        for change in self._watchers.get(key, ()):
            os.eventfd_write(change, 1)

    def _note(self, until: float, key: str) -> None:
        """Remember an expiry."""
        # Most entries belong to values that were written again: rebuilt now, the list stays proportional to the table.
        if len(self._ends) > 2 * len(self._entries) + 64:
            self._ends = [(entry.until, name) for name, entry in self._entries.items() if entry.until < float("inf")]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (until, key))

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._total -= len(key) + len(entry.value)

    def _remember(self, once: bytes, answer: bool) -> bool:
        self._done[once] = answer
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        return answer
