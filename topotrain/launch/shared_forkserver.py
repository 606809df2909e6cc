"""A forkserver that all units of a job on one host share.

Loading torch takes longer than everything else that a start does, and takes a whole core. So the units that another
tool starts on a host share one forkserver. The first one starts it, before the units have met.

Its socket is in a folder of this user. The name of the folder depends on the job, and on everything that a fork
inherits or that changes an import. Units that differ in any of that have forkservers of their own.

* The forkserver belongs to none of its users: a killed unit takes only its own processes with it.
* It ends with its last user, however that ends. A named pipe tells: a user has it open for writing.
* Its environment has a blank mark, so that no job takes it for its own process. Each fork gets the mark of its job.
"""

import fcntl
import hashlib
import os
import resource
import secrets
import select
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.config.private_files import FILE_MODE, open_file, write_text
from topotrain.launch import RUN_VARIABLE, own_python
from topotrain.launch.agent import file_locks, forkserver, temporary_folders
from topotrain.launch.agent.orphans import BLANK_MARK, ForkserverProcess, end
from topotrain.launch.runtime import child_channel

END_S = 1.0
"""Seconds for which the last user waits for the forkserver's end. Then it kills the forkserver."""
_MOMENT_S = 0.01
_LISTENER = 3
_SOCKET, _PIPE, _GATE, _PID, _LOG = "s", "life", "gate", "pid", "log"
# What Python, the dynamic linker and the libraries of torch read when they are loaded. What a program reads itself
# comes with each request.
_READ_BY_IMPORTS = (
    *("PYTHON", "LD_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_", "OMP_", "KMP_", "GOMP_"),
    *("MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "GLIBC_", "LC_", "CUDA_MODULE_LOADING", "LANG", "TMPDIR"),
    *("HOME", "VIRTUAL_ENV"),
)
# Each forkserver has its own values of the numbers of threads. torchrun sets the variable of NCCL in its processes.
_READ_LATER = (*child_channel.THREADS, "TORCH_NCCL_")
_STATUS = ("Umask:", "Groups:", "CapEff:", "NoNewPrivs:", "Seccomp:", "Mems_allowed_list:")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


class SharedForkserver:
    """A user's share in a forkserver. `join` makes one."""

    def __init__(self, folder: Path, life: int, lock: int, preload: Sequence[str]) -> None:
        self._folder, self._life, self._lock, self._preload = folder, life, lock, preload
        self._process: ForkserverProcess | None = None
        self.path = str(folder / _SOCKET)
        self.log = folder / _LOG

    @property
    def process(self) -> ForkserverProcess | None:
        """The process of the forkserver; None after `leave`."""
        return self._process

    def up(self, environ: Mapping[str, str]) -> str:
        """Return the socket; start the forkserver if it does not run. Raises OSError."""
        with _gate(self._folder):
            # A forkserver that has died accepts no connection.
            if not _accepts(self.path):
                _start(self._folder, self._preload, environ)
            pid = int((self._folder / _PID).read_text())
        if self._process is None or self._process.pid != pid:
            self._release_process()
            self._process = ForkserverProcess(pid)
        return self.path

    def leave(self) -> int | None:
        """Give the share up, and wait for the forkserver's end if this was the last one.

        Returns its exit code, if it has ended and this process learns it. A second call does nothing.
        """
        if self._lock < 0:
            return None
        with ExitStack() as stack:
            # Another program may have cleaned the temporary folder up, or the user inside be stopped.
            with suppress(FileNotFoundError, TimeoutError):
                # One user after the other: of two that leave at once, one is the last.
                stack.enter_context(_gate(self._folder))
            os.close(self._life)
            last = _is_free(self._lock)
            if last:
                shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        self._lock = -1
        code = end(self._process, END_S) if last and self._process is not None else None
        self._release_process()
        return code

    def _release_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def join(
    job: str, environ: Mapping[str, str] = os.environ, preload: Sequence[str] = forkserver.PRELOAD
) -> SharedForkserver | None:
    """Join the forkserver of a job on this host, and start it if needed.

    job: a text that is the same for all units of the job, as from `LaunchInfo.scope`.

    Returns None where that is impossible, for example because another user has a folder of this name.
    """
    name = hashlib.sha256("\0".join([job, *preload, *_inherited(environ)]).encode()).hexdigest()[:16]
    shared = None
    try:
        shared = SharedForkserver(*_enter(name), preload)
        shared.up(environ)
    except (OSError, ConfigError, ValueError):
        if shared is not None:
            shared.leave()
        return None
    return shared


@contextmanager
def for_one_job() -> Iterator[SharedForkserver | None]:
    """Start a forkserver for a job of this process; as `join`."""
    shared = join(secrets.token_hex(16))
    try:
        yield shared
    finally:
        if shared is not None:
            shared.leave()


def _enter(name: str) -> tuple[Path, int, int]:
    """Return the folder, its pipe and its lock. Raises OSError or ConfigError."""
    while True:
        path, lock = temporary_folders.share(f"f{name}")
        try:
            with suppress(FileExistsError):
                os.mkfifo(path / _PIPE, FILE_MODE)
            # For reading, too: so it opens at once, and without a reader.
            life = os.open(path / _PIPE, os.O_RDWR)
        except FileNotFoundError:
            os.close(lock)
            continue
        # Once more, behind the pipe: a forkserver that finds the lock taken then finds the pipe open.
        again = temporary_folders.use(path)
        os.close(lock)
        if again is not None:
            return path, life, again
        os.close(life)


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """Keep other users from starting the forkserver or leaving it. Raises OSError."""
    gate = open_file(folder / _GATE, os.O_RDWR | os.O_CREAT)
    try:
        file_locks.take(gate, fcntl.LOCK_EX, folder / _GATE)
        yield
    finally:
        os.close(gate)


def _is_free(lock: int) -> bool:
    """Take an exclusive lock, also for a shared one held, if no other process has one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _accepts(path: str) -> bool:
    try:
        forkserver.ForkserverClient(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _start(folder: Path, preload: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start the forkserver; its socket accepts connections at once."""
    path = folder / _SOCKET
    path.unlink(missing_ok=True)
    environment = {**environ, **child_channel.THREADS, RUN_VARIABLE: BLANK_MARK}
    reading = os.open(folder / _PIPE, os.O_RDONLY)
    log = open_file(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            os.fchmod(listener.fileno(), FILE_MODE)  # `bind` gives the file the same mode
            listener.bind(str(path))
            listener.listen(128)
            command = [*own_python("topotrain.launch.shared_forkserver"), str(folder), *preload]
            files = enumerate((reading, log, log, listener.fileno()))
            streams = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in files]
            # Not subprocess: the forkserver may outlive this process, and nothing is to wait for it then.
            pid = os.posix_spawn(sys.executable, command, environment, file_actions=streams, setsid=True)
    finally:
        os.close(reading)
        os.close(log)
    write_text(folder / _PID, str(pid))


def _inherited(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that change an import, or that a fork inherits.

    Settings that come with each request are left out.
    """
    yield from (*own_python(""), os.getcwd(), str(os.getuid()), str(os.getgid()))
    for name in sorted(environ):
        if name.startswith(_READ_BY_IMPORTS) and not name.startswith(_READ_LATER):
            # Open MPI names its folder twice.
            yield f"{name}={':'.join(dict.fromkeys(environ[name].split(':')))}"
    # A scheduler may give each unit cores, memory and limits of its own.
    yield str(sorted(os.sched_getaffinity(0)))
    yield str(os.getpriority(os.PRIO_PROCESS, 0))
    yield str([resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")])
    for name in _NAMESPACES:
        with suppress(OSError):
            yield os.readlink(f"/proc/self/ns/{name}")
    with suppress(OSError):
        yield Path("/proc/self/cgroup").read_text()
    yield from (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(_STATUS))


def _is_over(pipe: int) -> bool:
    """Whether no process has the pipe open for writing."""
    ended = select.poll()
    ended.register(pipe, 0)
    return bool(ended.poll(0))


class SharedForkserverLoop(forkserver.ForkserverLoop):
    """The loop of a forkserver that ends when its folder is used by no unit."""

    def __init__(self, listener: socket.socket, stdin: int, folder: Path) -> None:
        super().__init__(listener, stdin)
        self._folder = folder

    def may_end(self) -> bool:
        """Remove the folder unless a unit uses it; return whether none does."""
        # A unit may have come after the last one that had the pipe open. It opens the pipe in a moment.
        if temporary_folders.remove(self._folder):
            return True
        time.sleep(_MOMENT_S)
        return False


def main(arguments: Sequence[str]) -> None:
    """Run a shared forkserver; `join` calls this with FOLDER [MODULE…]."""
    folder, *preload = arguments
    # An import is not interrupted by the end of stdin. Until the loop reads it, the kernel ends this process with
    # SIGIO when no user is left.
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)
    # For an end before that there is no signal.
    if _is_over(0) and temporary_folders.remove(Path(folder)):
        os._exit(0)
    forkserver.load(preload)
    fcntl.fcntl(0, fcntl.F_SETFL, flags)
    child = SharedForkserverLoop(socket.socket(fileno=_LISTENER), 0, Path(folder)).serve()
    if child is not None:
        child_channel.run_forked(child)
    os._exit(0)
