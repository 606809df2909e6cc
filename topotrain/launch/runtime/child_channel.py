"""The start of a child process, and its control channel to its unit.

The forkserver forks a child, which then calls its entry point. The control channel is a stream socket.

* The child sends events as JSON lines, and receives commands as JSON lines. The last event announces its end.
* The end of file means that the unit is gone, and ends the child. A program that has closed the channel ends it, too.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TextIO

from topotrain.config.job import ConfigError
from topotrain.core.events import Ending, Event, EventNotifier, Failed, to_json
from topotrain.launch import RUN_VARIABLE
from topotrain.launch.agent.remaining_threads import RemainingThreads
from topotrain.launch.log_lines import LineStamps, text_stream
from topotrain.launch.runtime import event_records

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for servers and libraries of a script. `worker_threads` divides the cores among the workers' torch."""
_OMP = "OMP_NUM_THREADS"
_MOST_THREADS = 4096
CHECK_S = 1.0
"""Seconds between two checks whether the channel's descriptor still refers to the channel."""
CLOSED = (
    "topotrain: the program has closed descriptors that it did not open (os.closerange, os.close?), so this "
    "process no longer reaches its job: it ends here"
)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)
_getenv = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(("getenv", _libc))


class CommandHandler(Protocol):
    """Handles commands such as {"command": "stop"}, on the channel's thread."""

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Handle a command, or ignore it if it is for another handler."""
        ...


class ChildChannel:
    """The control channel of a child to its unit; `emit` may be called on any thread.

    Args:
        channel: the socket.
        name: of the process.
    """

    def __init__(self, channel: socket.socket, name: str = "") -> None:
        self._channel, self._name = channel, name
        self._lock = threading.Lock()
        self._handlers: Sequence[CommandHandler] = ()

    def start(self, *handlers: CommandHandler) -> None:
        """Start the thread that receives commands, and passes each to all handlers."""
        self._handlers = handlers
        # A daemon: it waits for as long as the unit runs, and must not keep the process.
        threading.Thread(target=self._receive, name="control", daemon=True).start()

    def emit(self, event: Event) -> None:
        """Send an event to the unit, and log it."""
        event_records.record(event, self._name)
        if event_records.is_silenced(event):
            return
        line = to_json(event).encode() + b"\n"
        # Two threads that send at the same time would mix their lines. A lost unit is no error here: the receiving
        # thread ends this process.
        with self._lock, contextlib.suppress(OSError):
            self._channel.sendall(line)

    def _receive(self) -> None:
        try:
            for line in _lines(self._channel):
                command = json.loads(line)
                for handler in self._handlers:
                    handler.on_command(command)
        except _Closed:
            _report_closed()
            os._exit(1)
        # Without its unit no process receives the events of this one or restarts it.
        leave_with_group()


class _Closed(Exception):
    """The program has closed the channel to the unit."""


def _lines(channel: socket.socket) -> Iterator[bytes]:
    rest = b""
    # A program that closes all descriptors frees this number, and its next file may get it.
    file = _file(channel.fileno())
    readable = select.poll()
    readable.register(channel, select.POLLIN)
    while True:
        # Not recv alone: it would block forever if the program has closed the descriptor meanwhile.
        ready = readable.poll(CHECK_S * 1000)
        if _file(channel.fileno()) != file:
            raise _Closed
        if not ready:
            continue
        try:
            data = channel.recv(4096)
        except OSError:
            return
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _file(fd: int) -> tuple[int, int] | None:
    """Return device and inode of a descriptor's file; None if it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _report_closed() -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{CLOSED}\n".encode())


def leave_with_group() -> None:
    """End this process and its whole group, such as DataLoader workers."""
    # Only as the leader of the group: another one may be that of a test runner or a shell.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


ProcessMain = Callable[[dict[str, Any], socket.socket, Sequence[int]], int]
"""The main function of a process: it gets the specification, the channel to the unit, and further descriptors."""


def call(
    target: str,
    spec: dict[str, Any],
    channel: socket.socket,
    fds: Sequence[int],
    functions: Mapping[str, ProcessMain] = MappingProxyType({}),
) -> int:
    """Call "module:function", or one of `functions`; return its exit code.

    An exception is printed and sent to the unit as Failed. Its kind is "config" for a ConfigError, with exit code 2,
    and otherwise "internal", with exit code 1.
    """
    try:
        if "torch" in sys.modules:  # it was loaded before the fork, with the forkserver's one thread
            sys.modules["torch"].set_num_threads(spec.get("threads") or threads(os.environ))
        function = functions.get(target)
        if function is None:
            module, _, name = target.partition(":")
            function = getattr(importlib.import_module(module), name)
        return int(function(spec, channel, fds) or 0)
    except SystemExit as leaving:
        return exit_code(leaving.code)
    # Exceptions of the user's program are caught further inside, so this is topotrain's own.
    except BaseException as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, end="", flush=True)
        wrong = isinstance(error, ConfigError)
        summary = str(error) if wrong else traceback.format_exception_only(error)[-1].strip()
        failed = Failed(spec.get("who", target), "config" if wrong else "internal", summary, text)
        # Directly, without a ChildChannel: the function may have failed before it made one.
        with contextlib.suppress(OSError):
            channel.sendall(to_json(failed).encode() + b"\n")
        return 2 if wrong else 1


def threads(environ: Mapping[str, str]) -> int:
    """Return the number of threads for arithmetic in this process.

    It is OMP_NUM_THREADS (the first number of a list), or 1 without it. Raises ConfigError for another value.
    """
    said = environ.get(_OMP, THREADS[_OMP])
    first = said.partition(",")[0].strip()
    if not (first.isascii() and first.isdigit() and 1 <= int(first) <= _MOST_THREADS):
        raise ConfigError(_OMP, said, f"must be a whole number from 1 to {_MOST_THREADS}, or not set, for 1")
    return int(first)


def exit_code(code: object) -> int:
    """Return the exit code of `sys.exit(code)`; a text is printed to stderr."""
    if code is None:
        return 0
    if isinstance(code, int):
        # The kernel keeps eight bits: `sys.exit(256)` ends with code 0.
        return code & 0xFF
    print(code, file=sys.stderr, flush=True)
    return 1


@dataclass(frozen=True, slots=True)
class ForkedChild:
    """A forked process that has not become its child yet.

    request: the forkserver's request. fds: its descriptors [control, stdout, stderr, …], of which the fourth is stdin
    where the request has one. parent: the forkserver's pid.
    """

    request: dict[str, Any]
    fds: list[int]
    parent: int


def run_forked(child: ForkedChild, functions: Mapping[str, ProcessMain] = MappingProxyType({})) -> NoReturn:
    """Turn a forked process into the requested one, run it, and end it.

    functions: as for `call`.
    """
    code = 1
    try:
        for fd in child.fds:  # a program that replaces this one (os.exec…) must not hold them open
            os.set_inheritable(fd, False)
        _become(child)
        control, fds = child.fds[0], child.fds[3 + child.request["stdin"] :]
        # The file is compared at the end, when the program may have closed the descriptor.
        channel, file = socket.socket(fileno=control), _file(control)
        code = call(child.request["call"], child.request["spec"], channel, fds, functions)
        if _file(control) == file:
            _announce(child.request["who"], channel)
        else:
            _report_closed()
    finally:
        end_process(code)


def _announce(who: str, channel: socket.socket) -> None:
    """Announce the end of this process to the unit."""
    control = ChildChannel(channel, who)
    control.emit(Ending(who))
    # Threads and processes of the program may delay the end, which the user should know.
    RemainingThreads(EventNotifier(control, who)).watch()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Set the signal that the kernel sends when the parent thread ends; 0: none."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Let descendants of this process become its children when their parents end."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _become(child: ForkedChild) -> None:
    request = child.request
    # Forks do not inherit the setting.
    die_with_parent()
    # The forkserver died before the kernel was asked to signal that.
    if os.getppid() != child.parent:
        os._exit(1)
    os.setsid()  # a group of its own: the terminal's Ctrl-C comes once, through the launcher
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Blocked by the forkserver until the default handler is there.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignore_sigint"] else signal.default_int_handler)
    # The kernel's limit for a name is 15 bytes.
    _libc.prctl(_PR_SET_NAME, request["who"].encode()[:15])
    # Without a stdin a script reads the end of file: the forkserver's own is its order to end.
    stdin = child.fds[3] if request["stdin"] else os.open(os.devnull, os.O_RDONLY)
    _open_streams(stdin, child.fds[1], child.fds[2], request["stamp"])
    asked = request["environ"]
    _mark(asked.get(RUN_VARIABLE, ""))
    # The forkserver's own environment is that of the moment at which it started.
    os.environ.clear()
    os.environ.update(asked if _OMP in asked else {**THREADS, **asked})
    os.chdir(request["cwd"])
    if "numpy.random" in sys.modules:  # a fresh process would not share its random state with its siblings
        sys.modules["numpy"].random.seed()


def _mark(mark: str) -> None:
    """Give this process the mark of its job, by which `sweep` finds it."""
    # /proc shows the environment as it was at the last exec, at the same place in memory. Only text of the same length
    # may be written there.
    place = _getenv(RUN_VARIABLE.encode())
    if place and len(os.environ.get(RUN_VARIABLE, "")) == len(mark):
        ctypes.memmove(place, mark.encode(), len(mark))


def _open_streams(stdin: int, stdout: int, stderr: int, stamp: str) -> None:
    for fd, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    former: Any = sys.__stdin__  # as the locale says
    encoding, errors = (None, None) if former is None else (former.encoding, former.errors)
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, errors=errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    stamps = LineStamps(stamp)  # of both streams, which share a log
    for name, fd in (("stdout", 1), ("stderr", 2)):
        # Line by line, as in a terminal: a log must have the last lines of a killed process.
        stream = text_stream(fd, stamps) if stamp else _plain_stream(fd)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()


def _plain_stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def end_process(code: int) -> NoReturn:
    """End like Python, but without destroying modules."""
    try:
        # As Python at its end: this waits for the threads that are no daemons.
        threading._shutdown()  # type: ignore[attr-defined]
        # A function that runs at exit may call this, too: it has no other means to set the exit code.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            # `os._exit` flushes nothing.
            stream.flush()
    except Exception:
        traceback.print_exc()
    finally:
        # Torch and daemon threads do not always survive the destruction of modules.
        os._exit(code)
