"""Folders below the system's folder for temporary files, each for one start of a job.

Rule: a process that uses such a folder holds a lock on a file in it. A folder whose lock no process holds was left by
one that was killed, and the next process that makes a folder removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.config.private_files import FOLDER_MODE, open_file

PREFIX = "topotrain-"
_LOCK = ".topotrain-lock"
"""By this file a folder is known; one of another program that has a like name is left alone."""


def base() -> Path:
    """Where these folders are; Unix sockets live in them, whose paths may have 107 bytes."""
    return Path("/tmp" if len(tempfile.gettempdir()) > 60 else tempfile.gettempdir())


def make() -> tuple[Path, int]:
    """A new folder for this user alone, and the descriptor that is to stay open as long as it is used."""
    sweep()
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base()))
        lock = use(path)
        if lock is not None:
            return path, lock


def share(name: str) -> tuple[Path, int]:
    """The folder of this name, made by whichever process comes first; the descriptor as in `make`.

    Raises ConfigError where another user's folder has the name.
    """
    path = base() / f"{PREFIX}{name}"
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            info = path.lstat()
            if info.st_uid != os.geteuid() or info.st_mode & 0o077 or not stat.S_ISDIR(info.st_mode):
                raise ConfigError("folder", str(path), "must belong to this user, with mode 0700")
        lock = use(path)
        if lock is not None:
            return path, lock


def use(path: Path) -> int | None:
    """Lock a folder that is used; None where another process has just removed it. Raises OSError."""
    try:
        lock = open_file(path / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)  # waits for one that is removing the folder
    if _names(path / _LOCK, lock):
        return lock
    os.close(lock)
    return None


def sweep() -> None:
    """Remove what processes that were killed have left; nothing else is touched."""
    for path in base().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_unused(path)


def _remove_unused(path: Path) -> None:
    """Raises OSError for a folder that is used, and for one that is none of ours."""
    if path.lstat().st_uid != os.geteuid():
        return
    lock = open_file(path / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _names(path / _LOCK, lock):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _names(path: Path, fd: int) -> bool:
    """The path still leads to the file of this descriptor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False
