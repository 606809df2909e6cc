"""Temporary folders, one per start of a job, in the system's temporary folder.

A process that uses such a folder holds a lock on the folder itself, as systemd-tmpfiles looks for before it removes old
files. A folder with a free lock was left by a killed process, and is removed when another process makes a folder.
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
from topotrain.launch.agent import file_locks

PREFIX = "topotrain-"
_MARK = ".topotrain-folder"
"""The file that identifies such a folder. Folders of other programs with similar names stay untouched."""


def base() -> Path:
    """Return the parent of these folders."""
    # The path of a Unix socket has at most 107 bytes, and the names of folder and socket need the rest.
    return Path("/tmp" if len(tempfile.gettempdir()) > 60 else tempfile.gettempdir())


def make() -> tuple[Path, int]:
    """Make a folder for this user alone; return it with a descriptor to keep open."""
    sweep()
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base()))
        # Between `mkdtemp` and this lock another process may have swept the folder away.
        lock = use(path)
        if lock is not None:
            return path, lock


def share(name: str) -> tuple[Path, int]:
    """Open the folder of this name, and make it if it does not exist.

    Returns the path and the descriptor as `make` does. Raises ConfigError where the folder belongs to another user.
    """
    path = base() / f"{PREFIX}{name}"
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            info = path.lstat()
            # The name is predictable and /tmp is open to all: another user may have made it first.
            if info.st_uid != os.geteuid() or info.st_mode & 0o077 or not stat.S_ISDIR(info.st_mode):
                raise ConfigError("folder", str(path), "must belong to this user, with mode 0700")
        lock = use(path)
        if lock is not None:
            return path, lock


def use(path: Path) -> int | None:
    """Lock a folder in use; None where it was just removed. Raises OSError."""
    try:
        os.close(open_file(path / _MARK, os.O_RDWR | os.O_CREAT))
        lock = _open(path)
    except FileNotFoundError:
        return None
    try:
        file_locks.take(lock, fcntl.LOCK_SH, path)  # waits for one that is removing the folder
    except TimeoutError:
        os.close(lock)
        raise
    # A remover may have unlinked the folder after it was opened: then the lock protects nothing.
    if _names(path, lock):
        return lock
    os.close(lock)
    return None


def sweep() -> None:
    """Remove the folders that killed processes have left."""
    for path in base().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_unused(path)


def remove(path: Path) -> bool:
    """Remove a folder if it is not in use; return whether it is not."""
    try:
        _remove_unused(path)
    except BlockingIOError:
        return False
    except OSError:  # it is gone, or a program that cleans up has removed its lock
        return True
    return True


def _remove_unused(path: Path) -> None:
    """Remove a folder of this user; OSError if it is in use or has no lock file."""
    # `lstat`, because another user may have placed a symbolic link under this name.
    if path.lstat().st_uid != os.geteuid():
        return
    (path / _MARK).lstat()  # a folder without this file belongs to another program
    lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its path may name a newer folder by now, with a lock of its own.
        if _names(path, lock):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _names(path: Path, fd: int) -> bool:
    """Return whether the path still refers to the folder of this descriptor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False
