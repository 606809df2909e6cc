"""Claim ranks among processes that are started by hand, one process per rank.

* A process renews its claim every BEAT_S seconds. A claim that is not renewed expires after LIFE_S seconds.
* A process counts as alive only when it was seen to renew its claim. So the claim of a dead process is never mistaken
  for that of a live one.
"""

import json
import secrets
import threading
import time
from contextlib import suppress

from topotrain.comm.store.key_validation import StoreError
from topotrain.comm.store.store_base import Store

BEAT_S, LIFE_S = 0.5, 4.0
_PAUSE_S = 0.1


class RankTaken(StoreError):
    """Another process has claimed this rank, and is alive."""


class RankClaim:
    """One rank of a job, claimed by this process.

    Args:
        store: for these claims alone.
        number: the rank.
        text: text that the other processes may read.

    Raises:
        RankTaken: a live process has claimed the rank.
        StoreError: the store cannot be used.
    """

    def __init__(self, store: Store, number: int, text: str) -> None:
        self._store, self.number, self._text = store, number, text
        self._name, self._beats = secrets.token_hex(8), 0
        self._first: dict[int, bytes] = {}
        self._over = threading.Event()
        self._value = self._next()
        self._claim()
        self._thread = threading.Thread(target=self._renew, name=f"rank claim {number}", daemon=True)
        self._thread.start()

    def others(self) -> dict[int, str]:
        """Return the texts of the processes that were seen to renew their claims, by rank."""
        found = {}
        for key in self._store.keys("seats/"):
            value = self._store.get(key)
            if key == self._key or value is None:
                continue
            number = int(key.rpartition("/")[2])
            # A value that never changes may be that of a dead process.
            if self._first.setdefault(number, value) != value:
                found[number] = str(json.loads(value)["says"])
        return found

    def close(self) -> None:
        """Give the claim up."""
        self._over.set()
        self._thread.join()
        with suppress(StoreError):
            # Another process may have taken the rank while this one was stopped.
            if self._store.get(self._key) == self._value:
                self._store.delete(self._key)

    @property
    def _key(self) -> str:
        return f"seats/{self.number}"

    def _next(self) -> bytes:
        self._beats += 1
        return json.dumps({"name": self._name, "beats": self._beats, "says": self._text}).encode()

    def _claim(self) -> None:
        known: bytes | None = None
        while not self._store.compare_and_set(self._key, None, self._value, LIFE_S):
            there = self._store.get(self._key)
            # The claim was renewed while this process watched, so its owner is alive.
            if known is not None and there not in (None, known):
                raise RankTaken(f"{self._key} belongs to another process, which is alive")
            known = there or known
            time.sleep(_PAUSE_S)

    def _renew(self) -> None:
        while not self._over.wait(BEAT_S):
            value = self._next()
            with suppress(StoreError):  # the store is not needed while training goes on
                # If this process was stopped until its claim expired: claim again, unless another process has.
                for expected in (self._value, None):
                    if self._store.compare_and_set(self._key, expected, value, LIFE_S):
                        self._value = value
                        break
