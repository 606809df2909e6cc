"""Values of a process that are written again when the store has lost them.

* A value is written again only where there is none, so a value that another process has written since then stays.
* A value expires KEEP_S after the process has ended. While it runs, it renews its values now and then.
* A store that is away is asked again at the next look.
* Nothing waits for any of this.
"""

import threading
import time
from contextlib import suppress

from topotrain.comm.store.key_validation import StoreError
from topotrain.comm.store.store_base import KEEP_S, Store

LOOK_S = 1.0
"""Seconds between two checks that the values are still there."""
RENEW_S = 3600.0
"""Seconds between two renewals of the time for which the values are kept."""
_CLOSING_S = 1.0  # for a check that is under way; its store may be away


class MaintainedValues:
    """The values that one process maintains in `store` until `close`.

    Several threads may use it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, key: str, value: bytes) -> None:
        """Write a value unconditionally, and maintain it. Raises StoreError."""
        # First, so that an error reaches the caller, and a value that was never written is not maintained.
        self._store.set(key, value, KEEP_S)
        self.keep(key, value)

    def keep(self, key: str, value: bytes) -> None:
        """Maintain this value from now on; does not wait."""
        with self._lock:
            self._values[key] = value
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="kept values", daemon=True)
                self._thread.start()

    def drop(self, key: str) -> None:
        """Stop maintaining the value; the store keeps what it has."""
        with self._lock:
            self._values.pop(key, None)

    def close(self) -> None:
        """Stop maintaining all values."""
        with self._lock:  # `keep` may be starting the thread: one that has not started cannot be joined
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSING_S)

    def _run(self) -> None:
        due = time.monotonic() + RENEW_S
        while not self._closed.wait(LOOK_S):
            renews = time.monotonic() >= due
            with suppress(StoreError, OSError):  # OSError: the script has closed descriptors of this process
                self._check(renews)
                due = time.monotonic() + RENEW_S if renews else due

    def _check(self, renews: bool) -> None:
        with self._lock:
            # The latest first: a reader that finds an early value finds those that were written after it.
            values = list(reversed(self._values.items()))
        for key, value in values:
            if self._closed.is_set():
                return
            if renews or self._store.get(key) is None:
                # Not `set`: another process may have written a newer value since the look.
                self._store.compare_and_set(key, value if renews else None, value, KEEP_S)
