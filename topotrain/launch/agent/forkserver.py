"""The forkserver of a host: it loads torch and forks worker and server processes.

No tensor operation and no thread may come before a fork, because a fork after OpenMP hangs. Requests arrive over a Unix
socket in a private folder. A request is one byte with file descriptors: a memfd with the JSON text, then the
descriptors for the child.

* A child dies with the forkserver (PDEATHSIG).
* The forkserver kills a child when the connection of its requester closes.
* A child ends when the control channel that it watches closes.
* The forkserver and all its children end at the end of its stdin.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config.private_files import FILE_MODE, open_file
from topotrain.launch import own_python
from topotrain.launch.agent import temporary_folders
from topotrain.launch.agent.orphans import end
from topotrain.launch.agent.pipes import LineWriter
from topotrain.launch.runtime import child_channel

# Making an optimizer imports torch._dynamo, which takes longer than everything else that a child does first.
PRELOAD = ("torch", "torch._dynamo", "topotrain.launch.runtime.entry_points")
_MOST_FDS = 64


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A process to fork.

    call: "module:function", called as function(spec, control: socket, fds: list[int]).
    stamp: the name that its lines get, with the time; "": they get none. stdin: -1: it reads the end of file.
    """

    who: str
    call: str
    spec: Mapping[str, Any]
    control: int
    stdout: int
    stderr: int
    fds: tuple[int, ...] = ()
    cwd: str = field(default_factory=os.getcwd)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ignore_sigint: bool = False
    stamp: str = ""
    stdin: int = -1


class ForkserverClient:
    """A connection to the forkserver; its children live no longer than it."""

    def __init__(self, path: str) -> None:
        """Connect to the forkserver. Raises OSError, also where it is another user's."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        # The request carries the environment and descriptors, so it must not reach another user's process.
        if peer(self._socket)[1] != os.getuid():
            self._socket.close()
            raise PermissionError(f"the forkserver at {path} belongs to another user")
        self._rest = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, request: ForkRequest) -> None:
        """Request a process.

        `receive` returns its name with its pid or an error, and later {"pid", "exit"}. Before the exit it may return
        {"pid", "frozen": true} when a signal has stopped the process, and false when the process continues.
        """
        names = ("who", "call", "spec", "cwd", "environ", "ignore_sigint", "stamp")
        body = {name: getattr(request, name) for name in names}
        stdin = () if request.stdin < 0 else (request.stdin,)
        fds = (request.control, request.stdout, request.stderr, *stdin, *request.fds)
        self._ask({**body, "stdin": len(stdin)}, fds)

    def signal(self, pid: int, number: int, group: bool = False) -> None:
        """Signal a child of this connection, or its process group."""
        # The forkserver sends it, because a pid is never stale to its parent.
        self._ask({"signal": number, "pid": pid, "group": group}, ())

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the next answers, or None if the forkserver is gone. Blocks until then."""
        try:
            data = self._socket.recv(65536)
        except OSError:
            return None
        # An answer may arrive in two parts.
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def close(self) -> None:
        self._socket.close()

    def _ask(self, body: Mapping[str, Any], fds: Sequence[int]) -> None:
        # The kernel drops descriptors that the receiver has no space for, without an error.
        if 1 + len(fds) > _MOST_FDS:
            raise ValueError(f"{len(fds)} descriptors for one process: at most {_MOST_FDS - 1} are possible")
        # A memfd takes a specification of any size, and one byte with descriptors cannot be received in parts.
        memory = os.memfd_create("request")
        try:
            with open(memory, "w", closefd=False) as file:
                json.dump(body, file)
            socket.send_fds(self._socket, [b"?"], [memory, *fds])
        finally:
            os.close(memory)


@dataclass(slots=True)
class OwnedForkserver:
    """A forkserver that this process started and owns."""

    process: subprocess.Popen[bytes]
    directory: str
    lock: int
    """The lock of the directory, see `temporary_folders`."""

    @property
    def path(self) -> str:
        return _socket_path(self.directory)

    def close(self, patience_s: float = 1.0) -> int | None:
        """End the forkserver and its children; return its exit code, as `orphans.end`."""
        assert self.process.stdin is not None
        # The end of stdin is the order to end.
        self.process.stdin.close()
        code = end(self.process, patience_s)
        # A killed forkserver has not removed its folder.
        shutil.rmtree(self.directory, ignore_errors=True)
        # Last: with the lock free, another process may remove the folder as well.
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
        return code


def start(log: Path, preload: Sequence[str] = PRELOAD, environ: Mapping[str, str] | None = None) -> OwnedForkserver:
    """Start a forkserver; its socket accepts connections at once.

    Clients get answers when `preload` is imported. Call it from a thread that runs as long as the job: until torch is
    loaded, the forkserver dies with that thread.
    """
    made, lock = temporary_folders.make()
    directory = str(made)
    listener = socket.socket(socket.AF_UNIX)
    # Bound here, not in the forkserver: a unit can connect at once, however long the import of torch takes.
    os.fchmod(listener.fileno(), FILE_MODE)  # `bind` gives the file the same mode
    listener.bind(_socket_path(directory))
    listener.listen(128)
    command = [*own_python("topotrain.launch.agent.forkserver"), directory, str(listener.fileno()), *preload]
    environment = {**(os.environ if environ is None else environ), **child_channel.THREADS}
    with listener, os.fdopen(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            env=environment,
            pass_fds=[listener.fileno()],
            # Ctrl-C in the terminal must not reach it: the launcher decides, and then closes its stdin.
            start_new_session=True,
        )
    return OwnedForkserver(process, directory, lock)


def _socket_path(directory: str) -> str:
    return os.path.join(directory, "s")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the ids of process, user and group at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, group = struct.unpack("3i", credentials)
    return pid, user, group


class ForkserverLoop:
    """The forkserver's event loop.

    `serve` returns None at the end of stdin. In each forked child it returns a ForkedChild.
    """

    def __init__(self, listener: socket.socket, stdin: int) -> None:
        self._listener = listener
        self._stdin = stdin
        self._selector = selectors.DefaultSelector()
        self._owners: dict[int, socket.socket] = {}
        self._woken, self._waker = socket.socketpair()
        for waking in (self._woken, self._waker):
            waking.setblocking(False)
        self._ended = False

    def serve(self) -> child_channel.ForkedChild | None:
        # Processes that a killed child leaves become children of this process, and not zombies of a PID 1 that waits
        # for its own children only.
        child_channel.adopt_orphans()
        # A handler that does nothing: only with a handler is the number of the signal written to the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):  # only the end of stdin ends the forkserver
            signal.signal(number, signal.SIG_IGN)
        # Between a check for dead children and `select` a signal would be missed without this descriptor.
        signal.set_wakeup_fd(self._waker.fileno())
        for source in (self._listener, self._stdin, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        while not self._ended:
            for key, ready in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    if ready & selectors.EVENT_WRITE:
                        self._write(key.fileobj)
                    child = self._answer(key.fileobj)
                    if child is not None:
                        return child
                else:
                    self._ended = not os.read(self._stdin, 64) and self.may_end()
        # The children would die with this process, too, but the processes that they have started would not.
        for pid in self._owners:
            _kill_group(pid)
        return None

    def may_end(self) -> bool:
        """Return whether the end of stdin ends this loop."""
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer(connection)[1] == os.getuid():
            # A requester that is stopped does not read its answers, and must not block the forkserver.
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, LineWriter(connection.fileno()))
        else:
            connection.close()

    def _answer(self, connection: socket.socket) -> child_channel.ForkedChild | None:
        """Execute one request. In a forked child, return its ForkedChild."""
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
        except BlockingIOError:
            return None
        except OSError:
            data, fds = b"", []
        if not data:
            self._forget(connection)
            return None
        with open(fds[0], "rb") as file:
            # The descriptor is shared with the requester, and stands where that has stopped writing.
            file.seek(0)
            body = json.load(file)
        if "signal" in body:
            self._signal(connection, body)
            return None
        # The child compares it with its parent's pid, to notice a forkserver that has died meanwhile.
        parent = os.getpid()
        # The forkserver ignores SIGTERM. A new child blocks it until it has the default handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
        except OSError as error:
            self._reply(connection, {"who": body["who"], "error": str(error)})
            pid = -1
        if pid == 0:
            self._abandon()
            return child_channel.ForkedChild(body, fds[1:], parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # The forkserver keeps none of them: an open copy of a control channel would hide the end of its other side.
        for fd in fds[1:]:
            os.close(fd)
        if pid > 0:
            # Only the connection that asked for a process may signal it.
            self._owners[pid] = connection
            self._reply(connection, {"who": body["who"], "pid": pid})
        return None

    def _reply(self, connection: socket.socket, answer: Mapping[str, Any]) -> None:
        # `_forget` has closed the connection of a requester that is gone.
        if connection.fileno() >= 0:
            self._selector.get_key(connection).data.put(json.dumps(answer).encode())
            self._write(connection)

    def _write(self, connection: socket.socket) -> None:
        """Write the answers that wait, and watch for the space that the others need."""
        answers = self._selector.get_key(connection).data
        answers.write()
        events = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(answers.waiting)
        self._selector.modify(connection, events, answers)

    def _signal(self, connection: socket.socket, body: Mapping[str, Any]) -> None:
        pid = body["pid"]
        if self._owners.get(pid) is connection:
            if body["group"]:
                _kill_group(pid, body["signal"])
            else:
                os.kill(pid, body["signal"])

    def _forget(self, connection: socket.socket) -> None:
        """Close the connection of a requester that is gone, and kill its children."""
        self._selector.unregister(connection)
        connection.close()
        for pid, owner in self._owners.items():
            if owner is connection:
                # It stays in `_owners`: `_reap` removes it with its exit.
                _kill_group(pid)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Emptied before the children are checked: a signal that comes meanwhile wakes the loop once more.
            self._woken.recv(4096)
        while (changed := _waited(os.WSTOPPED | os.WCONTINUED)) is not None:
            frozen = changed.si_code == os.CLD_STOPPED
            if changed.si_pid in self._owners:
                self._reply(self._owners[changed.si_pid], {"pid": changed.si_pid, "frozen": frozen})
        # WNOWAIT keeps the dead child waitable: while it keeps its pid, the process group is certainly its own.
        while (dead := _waited(os.WEXITED | os.WNOWAIT)) is not None:
            owner = self._owners.pop(dead.si_pid, None)
            if owner is not None:
                # Processes that the child has started, such as those of a DataLoader, end with it.
                _kill_group(dead.si_pid)
            # Only now is the pid free, and so after the last signal to its group.
            _, status = os.waitpid(dead.si_pid, 0)
            if owner is not None:
                self._reply(owner, {"pid": dead.si_pid, "exit": os.waitstatus_to_exitcode(status)})

    def _abandon(self) -> None:
        """Close the forkserver's resources in a forked child."""
        # The signals of the child must not wake the forkserver.
        signal.set_wakeup_fd(-1)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        # Garbage collection in the child must not close descriptors later, when their numbers belong to other files.
        self._waker.close()
        self._owners.clear()


def _waited(what: int) -> os.waitid_result | None:
    """Return a child with such a state change; None if there is none."""
    try:
        return os.waitid(os.P_ALL, 0, what | os.WNOHANG)
    except ChildProcessError:
        return None


def _kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a child and all processes of its group."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Before its `setsid` a child leads no group, and is signaled alone.
            send(pid, number)
            return


def load(modules: Sequence[str]) -> None:
    """Import modules. Their objects stay shared with the forks of this process."""
    # Imports make a hundred thousand objects and hardly any garbage: collections take a fifth of the time of an import
    # of torch. Nor is there one at the end, which would cost more than the few megabytes that it finds.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # A child destroys what it makes itself: torch would unregister its operators, 40 ms of a core in each child.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()
    gc.enable()


def main(arguments: Sequence[str]) -> None:
    """Run a forkserver; `start` calls this with FOLDER LISTENING_FD [MODULE…]."""
    directory, listening, *preload = arguments
    # The forkserver does not read stdin while it imports torch. Until then the kernel signals its parent's death.
    child_channel.die_with_parent()
    load(preload)
    # From here on the end of stdin is noticed. The kernel's signal would come at the end of the parent's thread, even
    # if the parent goes on.
    child_channel.die_with_parent(0)
    child = ForkserverLoop(socket.socket(fileno=int(listening)), stdin=0).serve()
    if child is not None:
        child_channel.run_forked(child)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)
