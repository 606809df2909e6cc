"""Records which functions of topotrain handle the death of one worker, in every process of a job.

Python imports this module at its start because its folder is on PYTHONPATH. `TRACE_FOLDER` names the folder of the
records, and `TRACE_WORKER` the worker. A process writes one line for each function, at its first call: the time, the
kind of process, and the function. A call counts if one of its arguments is about the death: an event, an action or a
command that names the worker, its address, or a message about its return. Calls that it makes count, too.
"""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

FOLDER, WORKER = os.environ.get("TRACE_FOLDER"), os.environ.get("TRACE_WORKER", "")
ROUTINE = ("StepDone", "Output", "Notice", "Finished", "Waits", "Serving", "Ending")  # every worker sends these
MESSAGES = ("WorkerRejoined", "RestartRequest", "AppliedBatchesOfStreams")


class Record:
    """The functions of this process that were called for the death."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.died = self.in_script = False
        self.of_thread = threading.local()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or "/topotrain/" not in path or "/tests/" in path:
            return
        stack = self.of_thread.__dict__.setdefault("stack", [False])
        if event == "return":
            if len(stack) > 1:
                stack.pop()
            return
        stack.append(self.concerns(frame, stack[-1]))
        if stack[-1]:
            self.note(path, frame.f_code.co_qualname)

    def concerns(self, frame: FrameType, before: bool) -> bool:
        code = frame.f_code
        if code.co_name == "_reap":  # in the forkserver: a child has died
            self.died = True
            return True
        if code.co_name == "run_forked":
            return self.died
        if code.co_name == "run_program":
            self.in_script = True  # the script of a restarted worker is the script of any worker
            self.of_thread.stack[:] = [False] * len(self.of_thread.stack)
            if self.died:
                self.note(code.co_filename, code.co_qualname)
            return False
        if code.co_name == "lost" and str(frame.f_locals.get("peer")) == WORKER:
            return True
        for name in code.co_varnames[: code.co_argcount]:
            found = about(frame.f_locals.get(name), self.died)
            if found is not None:
                return found
        return before

    def note(self, path: str, function: str) -> None:
        name = f"{path.rpartition('/topotrain/')[2]}:{function}"
        if name not in self.seen:
            self.seen.add(name)
            line = f"{time.monotonic():.6f} {os.getpid()} {name}\n"
            fd = os.open(f"{FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(fd, line.encode())
            os.close(fd)


def about(value: Any, died: bool) -> bool | None:
    """Whether an argument is about the death; None if it does not tell."""
    kind = type(value).__name__
    if kind in ROUTINE:
        return False
    if kind in MESSAGES or kind in ("Incident", "Recovered", "RestartGroup"):
        return True
    if kind in ("Lost", "Exited", "Started", "Failed"):
        return value.who == WORKER and (kind != "Started" or died_before(value))
    if kind == "Child":
        return None if value.code is None else value.who == WORKER
    if kind == "Address" and died:
        return None
    if isinstance(value, dict) and ("exit" in value or value.get("command") == "restart"):
        return True
    if isinstance(value, dict) and value.get("who") == WORKER and "pid" in value:
        return died_before(value)
    return None


_started = set()


def died_before(started: Any) -> bool:
    """Whether this start of the worker is a restart."""
    pid = started["pid"] if isinstance(started, dict) else started.pid
    _started.add(pid)
    return len(_started) > 1


if FOLDER:
    record = Record()
    threading.setprofile(record.profile)
    sys.setprofile(record.profile)
