"""Locks on files of a workspace, and the process that holds a taken lock.

Only the user of a workspace can open its lock file.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from topotrain.config.private_files import open_file

LOCK_S = 5.0  # its holder needs a moment, but may be stopped
_MOMENT_S = 0.01
_LOCKS = Path("/proc/locks")


class LockTaken(Exception):
    """A lock is held by another process; the text names it, about the workspace."""


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[int]:
    """Yield a descriptor of the file, locked for the length of the block.

    how: fcntl.LOCK_EX or fcntl.LOCK_SH. Raises OSError or LockTaken.
    """
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            # A lock of `flock` belongs to the open file, so the lock of a killed process ends, too.
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockTaken(_taken(fd)) from None
        yield fd
    finally:
        os.close(fd)


def take(fd: int, how: int, name: Path) -> None:
    """Wait for the lock of a descriptor, at most LOCK_S seconds. Raises TimeoutError."""
    until = time.monotonic() + LOCK_S
    # A blocking flock has no deadline.
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        if time.monotonic() > until:
            raise TimeoutError(f"{name} was locked for {LOCK_S:g} s: is the holder of its lock stopped?")
        time.sleep(_MOMENT_S)


def is_held(path: Path) -> bool:
    """Return whether a process of this host holds a lock on the file.

    Nothing is locked meanwhile.
    """
    try:
        inode = os.stat(path).st_ino
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(_inode(line) == inode for line in lines)


def _inode(line: str) -> int:
    """Return the inode of a lock of `flock` in /proc/locks; 0 for other locks."""
    words = line.split()  # such as 7: FLOCK ADVISORY WRITE 4711 08:02:3145 0 EOF
    return int(words[5].rpartition(":")[2]) if len(words) > 5 and words[1] == "FLOCK" else 0


def _taken(fd: int) -> str:
    # A holder in another container is listed with a pid that does not exist here. On a file system of several
    # hosts this kernel shows no holder at all.
    here = [pid for pid in _holders(fd) if os.path.exists(f"/proc/{pid}")]
    if here:
        return f"is in use by another job (launcher pid {here[0]}): choose another folder or wait for its end"
    # The kernel shows no holder: this pid may be that of an ended launcher.
    said = os.pread(fd, 32, 0).decode(errors="replace").partition(" ")[0] or "unknown"
    elsewhere = f"its lock is held on another host or in another container (last launcher here: pid {said})"
    return f"is in use by another job: {elsewhere}: choose another folder or wait for its end"


def _holders(fd: int) -> list[int]:
    """Return the processes of this host that hold a lock on a descriptor's file."""
    info, found = os.fstat(fd), []
    with contextlib.suppress(OSError):
        for line in _LOCKS.read_text(encoding="ascii").splitlines():
            # Only inodes are compared: btrfs and overlayfs show another device here than `fstat` does.
            if _inode(line) == info.st_ino:
                found.append(int(line.split()[4]))
    # The kernel shows 0 or -1 for a process outside of this pid namespace.
    return [pid for pid in found if pid > 0]
