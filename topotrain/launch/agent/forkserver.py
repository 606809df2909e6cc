"""The forkserver of a host: it has torch loaded, and makes every worker and server process of the host by fork.

Rule: no tensor operation and no thread before a fork, for a fork after OpenMP hangs. It is asked over a Unix socket in
a private folder, and every request is one byte with file descriptors: a memfd with the JSON text, then whatever the
child is to have. A child lives as long as three others: this process (PDEATHSIG), its requester (whose closed
connection kills it) and whoever holds the channel that the child watches. The end of our stdin ends us all, and no
signal that can be ignored does.
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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config.private_files import FILE_MODE, open_file
from topotrain.launch.agent import temporary_folders
from topotrain.launch.runtime import child_channel

# Making an optimizer imports torch._dynamo, which takes longer than everything else that a child does first.
PRELOAD = ("torch", "torch._dynamo", "topotrain.launch.runtime.entry_points")
_MOST_FDS = 64


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A process to make: `call` is "module:function", called as function(spec, control: socket, fds: list[int])."""

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


class ForkserverClient:
    """A connection to the forkserver. Its children live no longer than the connection."""

    def __init__(self, path: str) -> None:
        """Raises OSError where nobody listens, PermissionError where the listener is another user's."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        if _peer_uid(self._socket) != os.getuid():
            self._socket.close()
            raise PermissionError(f"the forkserver at {path} belongs to another user")
        self._rest = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, request: ForkRequest) -> None:
        """Ask for a process; `receive` gives {"who", "pid"} or {"who", "error"}, later {"pid", "exit"}.

        Before its end comes {"pid", "frozen": true} whenever a signal has stopped it, and false when it goes on.
        """
        body = {name: getattr(request, name) for name in ("who", "call", "spec", "cwd", "environ", "ignore_sigint")}
        self._ask(body, (request.control, request.stdout, request.stderr, *request.fds))

    def signal(self, pid: int, number: int, group: bool = False) -> None:
        """Signal a child of ours, or its process group. The forkserver does it: to its parent a pid is never stale."""
        self._ask({"signal": number, "pid": pid, "group": group}, ())

    def receive(self) -> list[dict[str, Any]] | None:
        """What was answered (blocks until something is); None when the forkserver is gone."""
        try:
            data = self._socket.recv(65536)
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def close(self) -> None:
        self._socket.close()

    def _ask(self, body: Mapping[str, Any], fds: Sequence[int]) -> None:
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
    """Of the directory, see `temporary`."""

    @property
    def path(self) -> str:
        return _socket_path(self.directory)

    def close(self, patience_s: float = 1.0) -> int:
        """End it with all its children; returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
        return self.process.returncode


def start(log: Path, preload: Sequence[str] = PRELOAD, environ: Mapping[str, str] | None = None) -> OwnedForkserver:
    """Start a forkserver; it can be connected to at once, and answers when `preload` is imported.

    Call it from a thread that lives as long as the job: until torch is loaded the forkserver dies with that thread.
    """
    made, lock = temporary_folders.make()
    directory = str(made)
    listener = socket.socket(socket.AF_UNIX)
    # Bound here, not there: from now on a unit can connect, however long importing torch takes.
    os.fchmod(listener.fileno(), FILE_MODE)  # which its name gets, too
    listener.bind(_socket_path(directory))
    listener.listen(128)
    command = [sys.executable, "-m", "topotrain.launch.agent.forkserver", directory, str(listener.fileno()), *preload]
    environment = {**(os.environ if environ is None else environ), **child_channel.THREADS}
    with listener, os.fdopen(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    return OwnedForkserver(process, directory, lock)


def _socket_path(directory: str) -> str:
    return os.path.join(directory, "s")


def _peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


class ForkserverLoop:
    """The forkserver's loop. `serve` returns None at the end of stdin, and a Birth in every child it makes."""

    def __init__(self, listener: socket.socket, life: int) -> None:
        self._listener = listener
        self._life = life
        self._selector = selectors.DefaultSelector()
        self._owners: dict[int, socket.socket] = {}
        self._woken, self._waker = socket.socketpair()
        for waking in (self._woken, self._waker):
            waking.setblocking(False)
        self._ended = False

    def serve(self) -> child_channel.ForkedChild | None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):  # whoever signals everybody: its starter ends it
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._waker.fileno())
        for source in (self._listener, self._life, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        while not self._ended:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    birth = self._answer(key.fileobj)
                    if birth is not None:
                        return birth
                else:
                    self._ended = not os.read(self._life, 64)
        for pid in self._owners:
            _kill_group(pid)
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if _peer_uid(connection) == os.getuid():
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            connection.close()

    def _answer(self, connection: socket.socket) -> child_channel.ForkedChild | None:
        """Do what one request asks. In a child that is made here, returns its Birth."""
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._forget(connection)
            return None
        with open(fds[0], "rb") as file:
            file.seek(0)
            body = json.load(file)
        if "signal" in body:
            self._signal(connection, body)
            return None
        parent = os.getpid()
        # A newborn keeps a SIGTERM until it can die of it: we ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
        except OSError as error:
            _reply(connection, {"who": body["who"], "error": str(error)})
            pid = -1
        if pid == 0:
            self._abandon()
            return child_channel.ForkedChild(body, fds[1:], parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for fd in fds[1:]:
            os.close(fd)
        if pid > 0:
            self._owners[pid] = connection
            _reply(connection, {"who": body["who"], "pid": pid})
        return None

    def _signal(self, connection: socket.socket, body: Mapping[str, Any]) -> None:
        pid = body["pid"]
        if self._owners.get(pid) is connection:
            if body["group"]:
                _kill_group(pid, body["signal"])
            else:
                os.kill(pid, body["signal"])

    def _forget(self, connection: socket.socket) -> None:
        """A requester is gone: its children are killed, and reaped as any other."""
        self._selector.unregister(connection)
        connection.close()
        for pid, owner in self._owners.items():
            if owner is connection:
                _kill_group(pid)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while (changed := _waited(os.WSTOPPED | os.WCONTINUED)) is not None:
            frozen = changed.si_code == os.CLD_STOPPED
            _reply(self._owners[changed.si_pid], {"pid": changed.si_pid, "frozen": frozen})
        # Left waitable first: while the dead child keeps its pid, its process group is certainly its own.
        while (dead := _waited(os.WEXITED | os.WNOWAIT)) is not None:
            _kill_group(dead.si_pid)
            _, status = os.waitpid(dead.si_pid, 0)
            owner = self._owners.pop(dead.si_pid)
            _reply(owner, {"pid": dead.si_pid, "exit": os.waitstatus_to_exitcode(status)})

    def _abandon(self) -> None:
        """In a child: let go of everything that is the forkserver's."""
        signal.set_wakeup_fd(-1)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()
        self._owners.clear()


def _waited(what: int) -> os.waitid_result | None:
    """A child of which there is such news; None: of nobody."""
    try:
        return os.waitid(os.P_ALL, 0, what | os.WNOHANG)
    except ChildProcessError:
        return None


def _reply(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a requester that is gone will be noticed by its end of file
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal the child and whatever it started; a child that has not made its group yet, alone."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return


def main(arguments: Sequence[str]) -> None:
    """`python -m topotrain.launch.agent.forkserver FOLDER LISTENING_FD [MODULE…]`: what `start` runs."""
    directory, listening, *preload = arguments
    os.environ.update(child_channel.THREADS)
    # Nobody reads our stdin while torch is imported; until then the starter's death reaches us as a signal.
    child_channel.die_with_parent(True)
    for module in preload:
        importlib.import_module(module)
    child_channel.die_with_parent(False)
    gc.collect()
    gc.freeze()  # what is loaded now stays shared between the children
    birth = ForkserverLoop(socket.socket(fileno=int(listening)), life=0).serve()
    if birth is not None:
        child_channel.live(birth)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
