"""The control socket of a running job: a Unix socket for requests of its user.

A request and its answer are one line of JSON each, then the connection ends. An answer may take as long as the
requested action. The socket of `topotrain run` is in the run folder of the workspace. A unit that another tool has
started has it in a folder of its own, because the workspace may be on a network, and a link to it in the workspace.
"""

import json
import os
import selectors
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.config.private_files import FILE_MODE
from topotrain.launch.agent import temporary_folders
from topotrain.launch.agent.forkserver import peer
from topotrain.launch.job_requests import JobRequest, JobRequests, from_text, to_data
from topotrain.launch.recovery.recovery_actions import GroupRequest, ResizeRequest, StopJob, TakeSnapshot

NAME = "control"
# Both limits keep clients from filling the launcher's memory, or taking all its descriptors.
CALLERS = 16
LINE = 512
"""Maximum number of bytes of a request."""
ANSWER_S = 600.0
"""Seconds for an answer, besides those of the request: a changed job may have to load its data first."""
LOOK_S = 5.0  # between two looks whether the launcher is stopped
_ANSWER = 1 << 16
_ANSWERS: Mapping[type[JobRequest], tuple[str, ...]] = MappingProxyType(
    {
        GroupRequest: ("group", "text"),
        ResizeRequest: ("workers", "step", "text"),
        TakeSnapshot: ("snapshot", "step", "path", "text"),
        StopJob: ("text",),
    }
)
"""The names in the answer to each kind of request."""


class NotHere(ConfigError):
    """No launcher and no unit of a job in this workspace runs on this machine."""


@dataclass(slots=True, eq=False)
class _Caller:
    """A client of the control socket, and the request that it has sent."""

    channel: socket.socket
    wish: JobRequest | None = None
    _received: bytes = b""

    def receive(self) -> bool:
        """Read what has arrived; return False if the connection has ended.

        Raises ValueError for a line that is no request.
        """
        try:
            data = self.channel.recv(LINE)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self._received += data
        # One request per connection: what comes after it only counts towards LINE.
        if b"\n" in self._received and data and len(self._received) <= LINE and self.wish is None:
            self.wish = from_text(self._received)
        return bool(data) and len(self._received) <= LINE

    def reply(self, said: dict[str, Any]) -> None:
        with suppress(OSError):
            # The socket does not block, and its buffer has room for one line. A client that has gone is no error.
            self.channel.send(json.dumps(said).encode() + b"\n")
        self.channel.close()


class ControlSocket:
    """The listening side of a job's control socket.

    Args:
        folder: the folder of the socket, which is on this machine.
        selector: the selector of the launcher's loop. The loop calls what is registered there when data arrives.
        requests: gets the requests.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector, requests: JobRequests) -> None:
        self._selector, self._requests = selector, requests
        self._callers: set[_Caller] = set()
        self._path = folder / NAME
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        os.fchmod(self._listener.fileno(), FILE_MODE)  # `bind` gives the file the same mode
        # That of the former attempt.
        self._path.unlink(missing_ok=True)
        with _short(folder) as path:
            self._listener.bind(f"{path}/{NAME}")
        self._listener.listen(CALLERS)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            channel, _ = self._listener.accept()
            # The mode of the folder may have been changed by hand. What the kernel says about the peer cannot.
            if peer(channel)[1] != os.geteuid() or len(self._callers) + self._requests.waiting >= CALLERS:
                channel.close()
                return
            channel.setblocking(False)
            caller = _Caller(channel)
            self._callers.add(caller)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_readable(caller))

    def _on_readable(self, caller: _Caller) -> None:
        try:
            connected = caller.receive()
        except ValueError as error:
            self._forget(caller)
            caller.reply({"error": f"the request cannot be read: {error}"})
            return
        # A request stays valid when its client disconnects, so nothing more is read from it.
        if caller.wish is not None:
            self._forget(caller)
            self._requests.add(caller.wish, caller.reply)
        elif not connected:
            self._forget(caller)
            caller.channel.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.channel)
        self._callers.discard(caller)

    def close(self) -> None:
        """Close the socket, and the connections of clients that have sent no request."""
        for caller in list(self._callers):
            self._forget(caller)
            caller.channel.close()
        self._selector.unregister(self._listener)
        self._listener.close()
        # The script may have removed the folder.
        with suppress(OSError):
            self._path.unlink()


@contextmanager
def linked_folder(workspace: Path, rank: int) -> Iterator[Path]:
    """Yield a folder for the socket of a unit, to which the workspace has a link."""
    folder, lock = temporary_folders.make()
    link = workspace / f"{NAME}-{rank}"
    try:
        # Of an earlier start.
        link.unlink(missing_ok=True)
        link.symlink_to(folder / NAME)
        yield folder
    finally:
        # Another process may have the rank by now.
        with suppress(OSError):
            if link.readlink() == folder / NAME:
                link.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a path of the folder that fits into a socket address."""
    # The path of a Unix socket is limited to about 100 bytes, and a workspace may have a longer one.
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def _connect(channel: socket.socket, workspace: Path) -> bool:
    """Connect to a launcher of the job on this machine, if there is one."""
    units = sorted(workspace.glob(f"{NAME}-*"))
    for found in (workspace / "run" / NAME, *units):
        # A link leads nowhere where the unit runs on another machine. A socket stays where its launcher was killed.
        try:
            with _short(found.parent) as path:
                channel.connect(f"{path}/{found.name}")
            return True
        except BlockingIOError:
            accepted = "has a job. Its launcher takes no more requests: is it stopped?"
            raise ConfigError("WORKSPACE", str(workspace), accepted) from None
        except OSError:
            continue
    return False


def ask(workspace: Path, wish: JobRequest) -> dict[str, Any]:
    """Send a request to the job in a workspace; return its answer, as in `_ANSWERS`.

    step: the last one of a snapshot, or before a change. workers: the new number per group. snapshot: its number.

    Raises:
        NotHere: no job runs there, as far as this machine knows.
        ConfigError: the job refuses the request, or does not answer.
    """
    with ExitStack() as stack:
        channel = stack.enter_context(socket.socket(socket.AF_UNIX))
        channel.settimeout(LOOK_S)
        if not _connect(channel, workspace):
            accepted = (
                "must be the workspace of a job with a launcher or a unit on this machine; from elsewhere use "
                "the URL of its store and --job NAME"
            )
            accepted += "" if workspace.is_dir() else "; there is no such folder"
            raise NotHere("WORKSPACE", str(workspace), accepted)
        try:
            channel.sendall(json.dumps(to_data(wish)).encode() + b"\n")
            answer = json.loads(_line(channel, wish))
        except TimeoutError as error:
            raise ConfigError("WORKSPACE", str(workspace), str(error)) from None
        except (OSError, ValueError):
            raise ConfigError("WORKSPACE", str(workspace), "the job there ended before it answered") from None
    return checked(wish, answer)


def checked(wish: JobRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request as data. Raises ConfigError if it is a refusal."""
    if "error" in answer:
        raise ConfigError(*_option_of(wish), answer["error"])
    return {name: answer[name] for name in _ANSWERS[type(wish)]}


def _option_of(wish: JobRequest) -> tuple[str, int | None]:
    """Return the option that an error is about, and its value."""
    match wish:
        case GroupRequest(group=group):
            return "--group", group
        case ResizeRequest(workers=workers):
            return "--workers", workers
        case _:
            return "", None


def _line(channel: socket.socket, wish: JobRequest) -> bytes:
    """Return the answer. Raises OSError, or TimeoutError with a text on the workspace."""
    said, pid, seconds = b"", peer(channel)[0], ANSWER_S + (0.0 if isinstance(wish, StopJob) else wish.within_s)
    until = time.monotonic() + seconds
    while b"\n" not in said and len(said) < _ANSWER:
        try:
            data = channel.recv(4096)
        except TimeoutError:
            if _is_stopped(pid):
                text = f"has a job. Its launcher (pid {pid}) is stopped: it gets the request after `kill -CONT {pid}`"
                raise TimeoutError(text) from None
            if time.monotonic() > until:
                text = f"has a job. Its launcher (pid {pid}) has not answered within {seconds:g} s: it may do so later"
                raise TimeoutError(text) from None
            continue
        if not data:
            break
        said += data
    return said


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False
