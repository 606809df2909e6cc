"""The control socket of a running job: a Unix socket for requests of its user.

The socket is in the job's run folder. A request and its answer are one line of JSON each, then the connection ends. An
answer may take as long as the requested action.
"""

import json
import math
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.config.private_files import FILE_MODE
from topotrain.launch.agent.forkserver import peer_uid
from topotrain.launch.recovery.recovery_actions import JOIN, LEAVE, AnswerRequest, GroupRequest, ResizeRequest

NAME = "control"
# Both limits keep clients from filling the launcher's memory, or taking all its descriptors.
CALLERS = 16
LINE = 512
"""Maximum number of bytes of a request."""
_ANSWER = 1 << 16


@dataclass(slots=True)
class _Caller:
    """A client of the control socket, and the request that it has sent."""

    channel: socket.socket
    wish: GroupRequest | ResizeRequest | None = None
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
            self.wish = _wish(self._received)
        return bool(data) and len(self._received) <= LINE


@dataclass(slots=True)
class PendingAnswer:
    """An answer that comes later, possibly from another attempt of the job.

    number: the number of the recovery after which the answer is due.
    """

    number: int
    data: dict[str, Any]
    _channel: socket.socket | None = None

    def send(self, error: str = "") -> None:
        """Send the answer, or the error. A second call does nothing."""
        if self._channel is not None:
            _send(self._channel, {"error": error} if error else self.data)
            self._channel.close()
            self._channel = None


class ControlSocket:
    """The listening side of a job's control socket.

    Args:
        folder: the job's run folder.
        selector: the selector of the launcher's loop. The loop calls what is registered there when data arrives.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._requests: list[GroupRequest | ResizeRequest] = []
        self._callers: dict[int, _Caller] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        os.fchmod(self._listener.fileno(), FILE_MODE)  # `bind` gives the file the same mode
        with _short(folder) as path:
            self._listener.bind(path)
        self._listener.listen(CALLERS)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            channel, _ = self._listener.accept()
            # The mode of the folder may have been changed by hand. What the kernel says about the peer cannot.
            if peer_uid(channel) != os.geteuid() or len(self._callers) >= CALLERS:
                channel.close()
                return
            channel.setblocking(False)
            caller = self._callers[channel.fileno()] = _Caller(channel)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._on_readable(caller))

    def _on_readable(self, caller: _Caller) -> None:
        before = caller.wish
        try:
            connected = caller.receive()
        except ValueError as error:
            self._reply(caller, {"error": f"the request cannot be read: {error}"})
            return
        if not connected:  # a request stays valid when its client disconnects
            self._end(caller)
        elif before is None and caller.wish is not None:
            self._requests.append(caller.wish)

    def receive(self) -> list[GroupRequest | ResizeRequest]:
        """Return the requests since the last call; their answers may come at any time."""
        found, self._requests = self._requests, []
        return found

    def answer(self, answer: AnswerRequest) -> None:
        """Answer all clients that made this request."""
        said = {"error": answer.error} if answer.error else {"group": answer.group, "text": answer.text}
        for caller in list(self._callers.values()):
            wish = caller.wish
            if isinstance(wish, GroupRequest) and (wish.verb, wish.group) == (answer.verb, answer.group):
                self._reply(caller, said)

    def refuse(self, wish: ResizeRequest, error: str) -> None:
        """Send the error to the client of this one request only."""
        for caller in list(self._callers.values()):
            if caller.wish is wish:
                self._reply(caller, {"error": error})

    def promise(self, wish: ResizeRequest, number: int, data: dict[str, Any]) -> PendingAnswer:
        """Keep the client's connection open when this socket closes; return its answer."""
        # If the client is gone by now, the promise has no channel and its answer goes nowhere.
        promise = PendingAnswer(number, data)
        for caller in list(self._callers.values()):
            if caller.wish is wish:
                self._forget(caller)
                promise = PendingAnswer(number, data, caller.channel)
        return promise

    def _reply(self, caller: _Caller, said: dict[str, Any]) -> None:
        _send(caller.channel, said)
        self._end(caller)

    def _end(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.channel.close()

    def _forget(self, caller: _Caller) -> None:
        # Before the socket is closed: then its number could not be found any more.
        self._selector.unregister(caller.channel)
        del self._callers[caller.channel.fileno()]

    def close(self) -> None:
        """Answer all waiting clients with an error, and close the socket."""
        for caller in list(self._callers.values()):
            self._reply(caller, {"error": "the job has ended, or the whole job restarts"})
        self._selector.unregister(self._listener)
        self._listener.close()


def _send(channel: socket.socket, said: dict[str, Any]) -> None:
    with suppress(OSError):
        # The socket does not block, and its buffer has room for one line. A client that has gone is no error.
        channel.send(json.dumps(said).encode() + b"\n")


def _wish(line: bytes) -> GroupRequest | ResizeRequest:
    """Parse a request. Raises ValueError."""
    try:
        said = json.loads(line)
        verb, within_s = said["verb"], said["within_s"]
        number = said["workers"] if "workers" in said else said["group"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a request: {error}") from None
    numbers = isinstance(number, int) and isinstance(within_s, int | float) and not isinstance(number, bool)
    if verb not in (JOIN, LEAVE) or not numbers or not 0 < within_s < math.inf:
        raise ValueError(f"not a request: {said}")
    return (ResizeRequest if "workers" in said else GroupRequest)(verb, number, float(within_s))


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that fits into a socket address."""
    # The path of a Unix socket is limited to about 100 bytes, and a workspace may have a longer one.
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/{NAME}"
    finally:
        os.close(number)


def ask(workspace: Path, wish: GroupRequest | ResizeRequest) -> dict[str, Any]:
    """Send a request to the job that runs in a workspace, and return its answer.

    The answer about a group is {"group": …, "text": …}. The answer about single workers is {"workers": …, "step": …,
    "text": …}: the new number of workers per group, and the step after which they continue.

    Raises:
        ConfigError: no job runs there, or the job refuses the request.
    """
    with ExitStack() as stack:
        channel = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            path = stack.enter_context(_short(workspace / "run"))
            channel.connect(path)
        except OSError:
            accepted = "must be the workspace of a job that `topotrain run` has started, and that runs on this machine"
            raise ConfigError("WORKSPACE", str(workspace), accepted) from None
        what = {"group": wish.group} if isinstance(wish, GroupRequest) else {"workers": wish.workers}
        said = {"verb": wish.verb, **what, "within_s": wish.within_s}
        try:
            channel.sendall(json.dumps(said).encode() + b"\n")
            answer = json.loads(_line(channel))
        except (OSError, ValueError):
            raise ConfigError("WORKSPACE", str(workspace), "the job there ended before it answered") from None
    if "error" in answer:
        option, number = ("--group", wish.group) if isinstance(wish, GroupRequest) else ("--workers", wish.workers)
        raise ConfigError(option, number, answer["error"])
    names = ("group", "text") if isinstance(wish, GroupRequest) else ("workers", "step", "text")
    return {name: answer[name] for name in names}


def _line(channel: socket.socket) -> bytes:
    said = b""
    while b"\n" not in said and len(said) < _ANSWER:
        data = channel.recv(4096)
        if not data:
            break
        said += data
    return said
