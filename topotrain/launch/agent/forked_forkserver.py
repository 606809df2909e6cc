"""A forkserver that is a fork of this process, with its functions and variables.

Functions of a notebook or an interactive session exist in no file. A fork has them without any serialization: nothing
is sent to a process that it would turn into code.
"""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import socket
import stat
import sys
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from topotrain.config.private_files import FILE_MODE, open_file
from topotrain.launch.agent import temporary_folders
from topotrain.launch.agent.forkserver import ForkserverLoop
from topotrain.launch.agent.orphans import ForkserverProcess, end
from topotrain.launch.runtime import child_channel
from topotrain.launch.runtime.child_channel import ProcessMain

_END_S = 1.0


class ForkedForkserver:
    """A forkserver that was forked from this process; end it with `close`.

    Create it on the main thread: it ends when the thread that created it ends.

    Args:
        functions: what its children may run, besides functions of modules, by the name in a request.
    """

    def __init__(self, functions: Mapping[str, ProcessMain]) -> None:
        folder, self._lock = temporary_folders.make()
        self._folder = folder
        self.path = str(folder / "s")
        listener = socket.socket(socket.AF_UNIX)
        os.fchmod(listener.fileno(), FILE_MODE)  # `bind` gives the file the same mode
        listener.bind(self.path)
        listener.listen(128)
        stdin, self._stdin = os.pipe()
        # Text that is buffered now would be written by both processes.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        # No handler of this process may run in the fork before the fork has its own.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, which `fork_safety` has checked.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
            if self._pid == 0:
                _serve(listener, stdin, self._stdin, parent, folder, functions)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            listener.close()
            os.close(stdin)

    def close(self) -> None:
        """End the forkserver with all its children. A second call does nothing."""
        if self._lock < 0:
            return
        # The end of stdin is the order to end.
        os.close(self._stdin)
        with closing(ForkserverProcess(self._pid)) as process:
            end(process, _END_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        # Last: with the lock free, another process may remove the folder as well.
        os.close(self._lock)
        self._lock = -1


def _serve(
    listener: socket.socket, stdin: int, order: int, parent: int, folder: Path, functions: Mapping[str, ProcessMain]
) -> NoReturn:
    """Serve in the forked process. Each child of it continues here, too."""
    try:
        child_channel.die_with_parent()
        # It died before the kernel was asked to signal that.
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()  # Ctrl-C is for the launcher, which decides
        # What the notebook has registered for its end, such as the removal of its files, is not for its forks.
        atexit._clear()
        os.close(order)
        _separate(listener.fileno(), stdin, folder / "log")
        # What is loaded now stays shared, and the notebook's objects are not destroyed here.
        gc.freeze()
        child = ForkserverLoop(listener, stdin=0).serve()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
        if child is not None:
            child_channel.run_forked(child, functions)
        os._exit(0)
    finally:
        # Whatever happens, this process must not go on as the notebook.
        os._exit(1)


def _separate(listener: int, stdin: int, log: Path) -> None:
    """Give this process streams of its own, and close the sockets of the notebook."""
    errors = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stdin, 0)
    os.close(stdin)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(errors, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.close(errors)
    # A kernel that starts again needs its ports, and its frontend must see their end. Files stay open for the function.
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(entry)
            if fd > 2 and fd != listener and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
