"""Files and folders for this user alone; files are opened without waiting.

A file that topotrain makes has mode 0600 before its first byte is written, and a folder 0700, whatever the umask is.
Functions raise OSError, also for a path that is not a regular file.
"""

import os
import stat
from contextlib import suppress
from errno import EINVAL, EISDIR, ENXIO
from pathlib import Path
from typing import TextIO

FILE_MODE, FOLDER_MODE = 0o600, 0o700
_CHUNK_BYTES = 4 << 20

_KINDS = (
    (stat.S_ISFIFO, "named pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def make_folder(path: Path | str) -> None:
    """Make a folder and its parents for this user alone; an existing one is kept."""
    path = Path(path)
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent)
    # Not `os.makedirs`, which gives missing parents the default mode.
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        # Another process of the job has just made it.
        if not path.is_dir():
            raise
        return
    # The umask has taken bits away.
    if stat.S_IMODE(os.stat(path).st_mode) != FOLDER_MODE:
        os.chmod(path, FOLDER_MODE)


def close_folder(path: Path | str) -> None:
    """Make a folder as `make_folder`, and close an existing one to other users."""
    make_folder(path)
    # A symbolic link is left as it is: its target was not made for this job.
    info = os.lstat(path)
    if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o077:
        # It is another user's, or on a file system without modes.
        with suppress(PermissionError):
            os.chmod(path, FOLDER_MODE)


def open_file(path: Path | str, flags: int) -> int:
    """Return a descriptor of a regular file; never waits.

    With O_CREAT in `flags` the file is made for this user alone, and an existing file is closed to other users.
    """
    try:
        # Another process may have made a named pipe of this name. Without O_NONBLOCK its opening could wait for ever.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, FILE_MODE)
    except OSError as error:
        # A socket, or a named pipe that nothing reads. The error then names the kind.
        if error.errno == ENXIO:
            _check_kind(path, os.stat(path))
        raise
    try:
        info = os.fstat(fd)
        _check_kind(path, info)
        # Only opening must not wait, reading and writing may.
        os.set_blocking(fd, True)
        if flags & os.O_CREAT and stat.S_IMODE(info.st_mode) != FILE_MODE:
            # It is another user's, or on a file system without modes.
            with suppress(PermissionError):
                os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_kind(path: Path | str, info: os.stat_result) -> None:
    if stat.S_ISREG(info.st_mode):
        return
    if stat.S_ISDIR(info.st_mode):
        raise OSError(EISDIR, "is a folder, must be a file", str(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(info.st_mode)), "special file")
    raise OSError(EINVAL, f"is a {kind}, must be a file", str(path))


def open_for_reading(path: Path | str) -> int:
    """Return a regular file's descriptor for reading."""
    return open_file(path, os.O_RDONLY)


def create_text(path: Path | str) -> TextIO:
    """Make or empty a text file for this user alone."""
    return os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8")


def write_text(path: Path | str, text: str) -> None:
    """Write a whole file for this user alone."""
    with create_text(path) as file:
        file.write(text)


def read_bytes(path: Path | str, most: int = -1) -> bytes:
    """Return the content of a regular file, at most its first `most` bytes."""
    with os.fdopen(open_for_reading(path), "rb") as file:
        return file.read(most)


def read_text(path: Path | str) -> str:
    """Return the content of a regular file as UTF-8. Raises UnicodeDecodeError."""
    with os.fdopen(open_for_reading(path), "r", encoding="utf-8") as file:
        return file.read()


def copy_file(path: Path | str, to: Path | str) -> None:
    """Copy a regular file into one for this user alone."""
    content = read_bytes(path)
    with os.fdopen(open_file(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(content)


def write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all the data at this offset of a file."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest[:_CHUNK_BYTES], at)
        rest, at = rest[count:], at + count


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
