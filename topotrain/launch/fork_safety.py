"""Whether this process may be forked into the processes of a job.

A fork has the memory of a process and only one of its threads. A lock that another thread holds at that moment stays
locked in the fork, and CUDA does not work there at all.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.launch.runtime.child_channel import threads

HARMLESS = frozenset(
    {"ipykernel", "IPython", "jupyter_client", "zmq", "tornado", "debugpy", "pydevd", "_pydevd_bundle", "tqdm"}
)
"""Packages with threads that hold no lock which a worker needs: those of a notebook's kernel, and of progress bars."""
_DRIVER = "/dev/nvidia-uvm"  # the CUDA driver has it open, and a mere query for GPUs has not
_AUTOGRAD, _KERNEL_IO = "pt_autograd", "ZMQ"
_START = "restart the kernel, and call it before that happens"


def check(caller: str) -> None:
    """Raise ConfigError, about `caller`, unless this process may be forked."""
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        raise ConfigError(caller, name, "must be called on the main thread, which gets Ctrl-C")
    if _has_cuda():
        accepted = "CUDA has been used in this process, and cannot be used in its forks: only the function may use the "
        raise ConfigError(caller, None, f"{accepted}GPU. If a cell has used it, {_START}")
    foreign = list(_foreign_threads())
    if foreign:
        (name, where), *others = foreign
        also = "".join(f", and so does {other!r} ({there})" for other, there in others)
        accepted = (
            f"this thread runs ({where}){also}, and a lock that it holds would stay locked in the workers: end it first"
        )
        raise ConfigError(caller, name, accepted)
    if any(name.startswith(_AUTOGRAD) for name in _native_threads()):
        accepted = f"torch has threads for the gradients of GPUs, which its forks do not have: {_START}"
        raise ConfigError(caller, _AUTOGRAD, accepted)


def threads_of_forks(asked: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the field `threads` of a job with workers that are forks of this process.

    OpenMP waits forever for the threads of the process from which it was forked, unless it needs none of them. So a
    process with such threads has workers of one thread. Raises ConfigError where the user asks for more.

    Args:
        asked: `threads` of the job file; 0 where it is not set.
    """
    if all(name.startswith(_KERNEL_IO) for name in _native_threads()):
        return asked
    accepted = (
        "must be 1 here, or not set: torch has threads for arithmetic in this process, which its forks do not have; or "
    )
    if asked > 1:
        raise ConfigError("threads", asked, f"{accepted}{_START}")
    if not asked and threads(environ) > 1:
        raise ConfigError("OMP_NUM_THREADS", environ.get("OMP_NUM_THREADS"), f"{accepted}{_START}")
    return 1


def _has_cuda() -> bool:
    """Return whether CUDA was initialized in this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith(_DRIVER):
                return True
    return False


def _foreign_threads() -> Iterator[tuple[str, str]]:
    """Yield the name and the function of each thread that is not known to be harmless."""
    running = sys._current_frames()
    for thread in threading.enumerate():
        frame = running.get(thread.ident or 0)
        if thread is threading.main_thread() or frame is None:
            continue
        modules, where = set(), ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            modules.add(module.partition(".")[0])
            if module != threading.__name__ or not where:  # the last one is the function of the thread
                where = f"{module}.{frame.f_code.co_name}"
            frame = frame.f_back
        if not modules & HARMLESS:
            yield thread.name, where


def _native_threads() -> list[str]:
    """Return the names of this process's threads that Python has not started."""
    ours = {thread.native_id for thread in threading.enumerate()}
    found = []
    for entry in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if int(entry.name) not in ours:
                found.append((entry / "comm").read_text().strip())
    return found
