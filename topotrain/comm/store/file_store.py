"""A store in a directory, on one host or on a shared file system.

* A reader sees a whole value or none, because values are written beside and renamed into place.
* Writers take turns by one lock file, because a rename alone cannot compare.

`watch` polls, while a job starts or when a member has gone, never during training. After a crash of the machine a store
may be empty.

A file holds 8 bytes, the lifetime of its value in milliseconds (0: for ever), then the value. Its age is judged by one
clock only, that of the file system: the time at which it was written against the time that a file touched now gets.
On a shared file system both come from its server, so clocks of hosts may differ. Two things are assumed:

* The server's clock does not jump. Otherwise a value lasts longer or shorter by as much.
* Touching a file asks the server, as NFS does. On a file system that stamps with the clock of each host, a ttl is only
  right when these clocks agree.
"""

import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topotrain.comm.backoff import spread
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix, check_ttl, check_value
from topotrain.config.private_files import make_folder, open_file, open_for_reading

LOCK_SECONDS = 10.0  # a writer holds the lock for microseconds; one that is stopped in there must not stop the job
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.25  # seconds between looks
_SLASH = "+"  # no key contains it: all values lie in one flat directory, so "a" and "a/b" can both exist
_LOCK, _CLOCK, _TEMPORARY = "LOCK", "CLOCK", "TEMP-"  # no key has capitals
_LIFE = struct.Struct("<Q")


class FileStore:
    """A `Store` in a directory that only this user may enter.

    The directory is made if it is missing. If it was removed meanwhile, the next write makes it again, empty.

    Raises:
        StoreError: the directory cannot be made or written, or is open to others.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._closed = False
        self._make()

    def get(self, key: str) -> bytes | None:
        return self._read(self._path(key), whole=True)

    def set(self, key: str, value: bytes, ttl: float | None = None) -> None:
        path, life = self._path(key), check_ttl(ttl)
        check_value(value)
        with self._locked():  # else it could fall between the read and the write of a compare_and_set
            self._write(path, value, life)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes, ttl: float | None = None) -> bool:
        path, life = self._path(key), check_ttl(ttl)
        check_value(value)
        with self._locked():
            if self._read(path, whole=True) != expected:
                return False
            self._write(path, value, life)
            return True

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._locked():
            self._remove(path)

    def keys(self, prefix: str = "") -> list[str]:
        check_prefix(prefix)
        # File names have _SLASH where keys have a slash.
        beginning = prefix.replace("/", _SLASH)
        try:
            names = [name for name in os.listdir(self._directory) if name.startswith(beginning)]
        except FileNotFoundError:  # removed meanwhile
            return []
        except OSError as error:
            raise StoreError(f"cannot list {self._directory}: {error}") from error
        found = []
        for name in names:
            if name in (_LOCK, _CLOCK) or name.startswith(_TEMPORARY):
                continue
            if self._read(self._directory / name, whole=False) is None:
                # No process runs for the store, so this removes the files of expired values.
                self._sweep(self._directory / name)
            else:
                found.append(name.replace(_SLASH, "/"))
        return sorted(found)

    def watch(self, key: str, timeout: float, known: bytes | None = None) -> bytes:
        # Change notification (inotify) does not report the writes of other hosts to a shared directory.
        for _ in _polls(timeout):
            value = self.get(key)
            if value is not None and value != known:
                return value
            if self._closed:
                raise StoreError(f"store {self._directory}: was closed")
        raise TimeoutError(f"nothing new under {key!r} in {self._directory} within {timeout} s")

    def close(self) -> None:
        """See `Store`. Between operations no file is open."""
        self._closed = True

    def _make(self) -> None:
        try:
            make_folder(self._directory)
            info = self._directory.stat()
        except OSError as error:
            raise StoreError(f"rendezvous directory {self._directory}: {error}") from error
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise StoreError(f"rendezvous directory {self._directory}: must belong to this user with mode 0700")
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise StoreError(f"rendezvous directory {self._directory}: cannot be written")

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._directory / key.replace("/", _SLASH)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only writer, among processes and threads (each opens the file anew)."""
        # Tried again and again: a blocking flock has no deadline, and a stopped holder would stop the job.
        for _ in _polls(LOCK_SECONDS):
            # Opened each time: a directory that was removed and made again has another lock file.
            descriptor = self._lock_file()
            try:
                if self._try_lock(descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)
        raise StoreError(f"{self._directory / _LOCK} was held for {LOCK_SECONDS} s: is its holder stopped?")

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"cannot lock {self._directory}: {error}") from error
        # A lock file without a name excludes no other process any more.
        return os.fstat(descriptor).st_nlink > 0

    def _lock_file(self) -> int:
        path, flags = self._directory / _LOCK, os.O_CREAT | os.O_RDWR
        try:
            try:
                return open_file(path, flags)
            except FileNotFoundError:
                self._make()
                return open_file(path, flags)
        except OSError as error:
            raise StoreError(f"cannot lock {self._directory}: {error}") from error

    def _read(self, path: Path, whole: bool) -> bytes | None:
        """Return the value (b"" unless `whole`), or None when it is missing or expired."""
        try:
            with os.fdopen(open_for_reading(path), "rb") as file:
                head = file.read(_LIFE.size)
                value = file.read() if whole else b""
                # Of the open file: its name may have a newer value by now.
                written = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        if len(head) < _LIFE.size:
            raise StoreError(f"{path} was not written by a store of this version")
        (life,) = _LIFE.unpack(head)
        return None if life and self._now() - written >= life * 1_000_000 else value

    def _now(self) -> int:
        """Return the time of the file system, in ns."""
        path = self._directory / _CLOCK
        try:
            descriptor = open_file(path, os.O_CREAT | os.O_RDWR)
            try:
                # The file system sets the time, and not this host's clock.
                os.utime(descriptor)
                return os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot touch {path}: {error}") from error

    def _write(self, path: Path, value: bytes, life: int) -> None:
        name = ""
        try:
            # In the same folder: a rename is atomic within one file system only.
            descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._directory)
            with open(descriptor, "wb") as file:
                file.write(_LIFE.pack(life) + value)
            # Not synced to disk: after a crash of the machine the job starts again anyway.
            os.replace(name, path)
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise StoreError(f"cannot write {path}: {error}") from error

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove {path}: {error}") from error

    def _sweep(self, path: Path) -> None:
        """Remove the file of an expired value, unless a new one was written."""
        with self._locked():
            if self._read(path, whole=False) is None:
                self._remove(path)


def _polls(seconds: float) -> Iterator[None]:
    """Yield at once, then at growing, jittered intervals, and at the deadline."""
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        yield
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, spread(pause)))
        pause = min(2 * pause, _LAST_PAUSE)
