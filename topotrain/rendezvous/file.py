"""A store in a directory: for the processes of one host, or of several that share a file system.

Rule: a reader sees a whole value or none, because values are written beside and renamed into place; writers take turns
by one lock file, because a rename alone cannot compare.

`watch` looks again and again, at intervals that grow to a quarter of a second. On a directory that may be shared
between hosts this is right: change notification (inotify) tells nothing of other hosts' writes, and nobody waits here
while training, only while starting or when a member has gone. Nothing is synced to disk: after a crash of the machine
the job starts again with an empty store.
"""

import fcntl
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from topotrain.rendezvous.keys import StoreError, check_key, check_value

LOCK_SECONDS = 10.0  # a writer holds the lock for microseconds; one that is stopped in there must not stop the job
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.25  # seconds between looks
_SLASH = "+"  # no key contains it: all values lie in one flat directory, so "a" and "a/b" can both exist
_LOCK = "LOCK"  # no key has capitals


class FileStore:
    """A `Store` in a directory that only this user may enter (mode 0700; made if missing).

    Raises:
        StoreError: the directory cannot be made or written, or is open to others.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self._directory.stat()
        except OSError as error:
            raise StoreError(f"rendezvous directory {directory}: {error}") from error
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise StoreError(f"rendezvous directory {directory}: must belong to this user with mode 0700")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise StoreError(f"rendezvous directory {directory}: cannot be written")

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none."""
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {key!r}: {error}") from error

    def set(self, key: str, value: bytes) -> None:
        """Write a value, whatever was there."""
        path = self._path(key)
        check_value(value)
        with self._locked():  # else it could fall between the look and the write of a compare_and_set
            self._write(path, value)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Write the value if the present one is `expected` (None: there is none); tells whether it did. Atomic."""
        path = self._path(key)
        check_value(value)
        with self._locked():
            if self.get(key) != expected:
                return False
            self._write(path, value)
            return True

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        """Wait until there is a value other than `known`; returns it. Raises TimeoutError after `timeout` seconds."""
        for _ in _looks(timeout):
            value = self.get(key)
            if value is not None and value != known:
                return value
        raise TimeoutError(f"nothing new under {key!r} in {self._directory} within {timeout} s")

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._directory / key.replace("/", _SLASH)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only writer, among processes and among threads (each opens the file anew)."""
        try:
            descriptor = os.open(self._directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot lock {self._directory}: {error}") from error
        try:
            for _ in _looks(LOCK_SECONDS):
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            else:
                raise StoreError(f"{self._directory / _LOCK} was held for {LOCK_SECONDS} s: is its holder stopped?")
            yield
        finally:
            os.close(descriptor)

    def _write(self, path: Path, value: bytes) -> None:
        name = ""
        try:
            descriptor, name = tempfile.mkstemp(prefix="TEMP-", dir=self._directory)
            with open(descriptor, "wb") as file:
                file.write(value)
            os.replace(name, path)
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise StoreError(f"cannot write {path}: {error}") from error


def _looks(seconds: float) -> Iterator[None]:
    """Yield at once, then at growing, jittered intervals, the last time at the deadline."""
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        yield
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, pause * random.uniform(0.5, 1.5)))
        pause = min(2 * pause, _LAST_PAUSE)
