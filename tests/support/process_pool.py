"""Processes that are as `python …` would make them, but forked from one that has imported torch already.

To import torch and the compiler that its optimizers ask for takes five seconds of a core, more than most journeys
train. What is forked runs the words of its command line as Python does, in a session of its own. It is killed when
whoever asked for it is gone; but nobody cleans up behind it: whatever it leaves running is left. (A forkserver of ours
would end that; here it is for tests to find.)

Rule: the one that forks has a single thread and computes nothing.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import unpickle_audit

PRELOAD = (
    "torch",
    "torch._dynamo",
    "encodings.idna",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch.profiler._cupti_monitor",
    "typer._adapters",
    "topotrain.comm.store.file_store",
    "topotrain.compat.paddle.init",
    "topotrain.compat.tensorflow.train_api",
    "topotrain.extensions.assignment.assignment_server",
    "topotrain.extensions.drift.drift_server",
    "topotrain.extensions.host_sums.host_sum_server",
    "topotrain.extensions.in_place_recovery.group_members",
    "topotrain.extensions.tables.table_server",
    "topotrain.launch.agent.unit_main",
    "topotrain.launch.console_output",
    "topotrain.launch.local",
    "topotrain.launch.multinode.node",
    "topotrain.launch.runtime.entry_points",
    "topotrain.tools.advice.auto_rules",
    "topotrain.tools.cli.app",
    "topotrain.tools.cli.jobs",
    "topotrain.tools.monitor.job_monitor",
    "topotrain.tools.monitor.monitored_run",
    "topotrain.tools.monitor.result_tables",
    "topotrain.tools.monitor.trace_export",
)
THREADS = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # so that importing starts none
MOST_FDS = 64
_SIZE = struct.Struct("!I")


def client(warm_at: str) -> list[str]:
    """What stands for `python` in a command line: it is forked, and whoever runs this sees its streams and its end."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("process_pool_client.py")), warm_at]


def shell_environ(tools: Path, warm_at: str, served_at: str) -> dict[str, str]:
    """The environment of a shell that has our `python` and `topotrain`, which are put into a folder.

    Every command that starts a job asks the forkserver that is warm.
    """
    for name, words in {"python": "", "topotrain": " -m topotrain"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(client(warm_at))}{words} "$@"\n')
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    return {**os.environ, **path, "TOPOTRAIN_FORKSERVER": served_at}


# ---- those who ask ---------------------------------------------------------------------------------------------------


class Forked:
    """What is asked of a process: the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, warm_at: str, words: Sequence[str], cwd: Path, environ: Mapping[str, str], stderr: int | None = None
    ) -> None:
        """`words`: those after `python`. `stderr`: a file, by default where stdout goes."""
        reading, writing = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self.args, self.stdout, self.returncode = list(words), open(reading), None  # noqa: SIM115
        self.returncode: int | None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(warm_at)
        body = json.dumps({"words": self.args, "cwd": str(cwd), "environ": dict(environ)}).encode()
        socket.send_fds(
            self._connection, [_SIZE.pack(len(body))], [nothing, writing, writing if stderr is None else stderr]
        )
        self._connection.sendall(body)
        for fd in (nothing, writing):
            os.close(fd)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All it said; both its end and the end of its output are waited for."""
        until = None if timeout is None else time.monotonic() + timeout
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while True:
                left = None if until is None else until - time.monotonic()
                if not selector.select(left):
                    print(said.decode(errors="replace"))  # what the error has, and does not show
                    raise subprocess.TimeoutExpired(self.args, timeout or 0, said)
                more = os.read(self.stdout.fileno(), 65536)
                if not more:
                    break
                said += more
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        self.stdout.close()
        return said.decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(timeout):
                    self.returncode = int(self._answers.readline())
                    self._answers.close()
                    self._connection.close()
        return self.returncode


# ---- the one who forks -----------------------------------------------------------------------------------------------


@dataclass
class Warm:
    """Its process, the socket at which it is asked, and that of a forkserver of ours with the same modules."""

    process: "subprocess.Popen[bytes]"
    path: str
    served: str

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start(folder: Path, more: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Warm:
    """Both can be asked at once, and answer when everything is imported, PRELOAD and `more`.

    `folder` has a short path, is made, and is removed at the end; `environ` is in addition to ours.
    """
    served = folder / "forkserver"
    folder.mkdir(parents=True)
    served.mkdir(0o700)  # jobs have their own sockets there, too
    words, listeners = [sys.executable, __file__, str(folder)], []
    for at in (folder / "warm", served / "s"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(at))
        listener.listen(64)
        listeners.append(listener)
        words.append(str(listener.fileno()))
    everything = {**os.environ, **THREADS, "PYTHONPATH": str(Path(__file__).parents[2]), **(environ or {})}
    with listeners[0], listeners[1], open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*words, *PRELOAD, *more],
            env=everything,
            pass_fds=[listener.fileno() for listener in listeners],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    return Warm(process, str(folder / "warm"), str(served / "s"))


def serve(listener: socket.socket) -> dict[str, object] | None:
    """Fork for whoever asks until stdin ends. In what is forked, returns what was asked for."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(waker.fileno())
    asked: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (0, listener, woken):
        selector.register(source, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if 0 in ready:
            return None
        if woken in ready:
            woken.recv(4096)
            reap(asked, selector)
        for pid, connection in asked.items():
            if connection in ready:  # who asked is gone: a test that took too long
                selector.unregister(connection)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request, fds = receive(connection)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for held in (selector, listener, woken, waker, *asked.values()):
                    held.close()
                os.setsid()
                with connection:
                    connection.sendall(f"{os.getpid()}\n".encode())
                become(request, fds)
                return request
            for fd in fds:
                os.close(fd)
            asked[pid] = connection
            selector.register(connection, selectors.EVENT_READ)


def receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, _SIZE.size, MOST_FDS)
    with connection.makefile("rb") as file:
        return json.loads(file.read(_SIZE.unpack(head)[0])), fds


def reap(asked: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid not in asked:  # the forkserver: whoever asks it will see
            continue
        with asked.pop(pid) as connection:
            with suppress(KeyError):  # its end was seen
                selector.unregister(connection)
            with suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(request: Mapping[str, object], fds: Sequence[int]) -> None:
    """As a fresh process is: its signals, streams, folder and environment."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Out of the way first: a descriptor may have the number that another one shall get.
    numbers: Iterable[int] = request.get("fds", range(3))  # type: ignore[assignment]
    for number, fd in zip(numbers, [_moved(fd) for fd in fds], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[arg-type]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    if "numpy.random" in sys.modules:  # a fresh process would not share its random state with its siblings
        sys.modules["numpy"].random.seed()


def _moved(fd: int) -> int:
    found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(fd)
    return found


def run(words: Sequence[str]) -> None:
    """What Python does with the words behind `python`: -c CODE, -m MODULE or a script, and arguments."""
    first, *rest = words
    main = ModuleType("__main__")
    if first == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).resolve().parent)
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def guard_servers() -> None:
    """Server processes that are forked from here end as soon as they unpickle anything (unpickle_audit.py)."""
    process = sys.modules.get("topotrain.launch.runtime.entry_points")
    if process is not None:
        run_servers = process.run_servers

        def guarded(*args: object) -> int:
            unpickle_audit.in_servers()
            return run_servers(*args)  # type: ignore[no-any-return]

        process.run_servers = guarded  # type: ignore[attr-defined]


def warm_units(warm_at: str) -> None:
    """Units that a process from here starts are forked here, too."""
    module = sys.modules["topotrain.launch.agent.unit_process"]
    own_python = module.own_python
    module.own_python = lambda name: [*client(warm_at), *own_python(name)[1:]]  # type: ignore[attr-defined]


def main(folder: str, listening: int, serving: int, modules: Sequence[str]) -> None:
    forkserver = importlib.import_module("topotrain.launch.agent.forkserver")
    forkserver.load(modules)
    # What reading a job makes once in each process.
    importlib.import_module("topotrain.config.job_file").loads('cluster { workspace: "w" }')
    guard_servers()
    warm_units(f"{folder}/warm")
    gc.freeze()
    forking = os.fork()
    if not forking:
        os.close(listening)
        forkserver.main([f"{folder}/forkserver", str(serving)])
    os.close(serving)
    request = serve(socket.socket(fileno=listening))
    if request is not None:
        ending = importlib.import_module("topotrain.launch.runtime.child_channel")
        code = 0
        try:
            run(request["words"])  # type: ignore[arg-type]
        except SystemExit as leaving:
            code = ending.exit_code(leaving.code)
        # Python would destroy all modules, which takes half a second of a core and shows nothing.
        ending.end_process(code)
    os.waitpid(forking, 0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
