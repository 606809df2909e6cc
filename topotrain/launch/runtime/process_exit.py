"""A script that ends its own process: by `os._exit`, by `os.exec…`, or by a C library that calls `exit`.

Rule: with its loops over, that is an end like any other: the worker says goodbye and brings the result home, then the
process ends as the script wants it. In the middle of a loop nothing is said, and the process is lost like one that was
killed. So it is, too, where no code of this process can see its end: at `_exit` of a C library, on another thread.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

_OnExit = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)


class JobPart(Protocol):
    """What a process does in its job."""

    def is_complete(self) -> bool:
        """Nothing is under way that others would miss."""
        ...

    def end(self) -> int:
        """Say goodbye and bring the result home; returns the exit code. What goes wrong is told, not raised."""
        ...


class ProcessExitHook:
    """Notices on the main thread of this process that the script ends it, from `watch` to `forget`.

    Args:
        part: what is ended before, at most once.
    """

    def __init__(self, part: JobPart) -> None:
        self._part, self._pid = part, os.getpid()
        self._watches = False
        self._exit, self._execv, self._execve = os._exit, os.execv, os.execve
        self._at_c_exit = _OnExit(self._c_exit)

    def watch(self) -> None:
        """Begin."""
        self._watches = True
        os._exit = self._leave
        os.execv = self._replaced(self._execv)  # the other forms call one of these two
        os.execve = self._replaced(self._execve)

    def watch_c(self) -> None:
        """From now on also notice `exit` of a C library. To be called again after each loop.

        What is registered last runs first, and what torch has made meanwhile is taken apart by then. Only for a process
        that Python does not end itself: `exit` is the last that it calls, too, when nothing of Python is left.
        """
        if self._watches and os.getpid() == self._pid:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._at_c_exit))  # C keeps its address for good
            ctypes.CDLL(None).on_exit(self._at_c_exit, None)

    def forget(self) -> None:
        """The script's part is over. Does nothing the second time."""
        if self._watches:
            self._watches = False
            os._exit, os.execv, os.execve = self._exit, self._execv, self._execve

    def _goodbye(self) -> int:
        """The exit code; 0 also where there is nothing to say."""
        here = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if not (self._watches and here and self._part.is_complete()):
            return 0
        self.forget()
        return self._part.end()

    def _leave(self, status: int) -> NoReturn:
        self._exit(status or self._goodbye())

    def _replaced(self, usual: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def replace(*args: Any) -> NoReturn:
            code = self._goodbye()
            if code:
                self._exit(code)
            usual(*args)

        return replace

    def _c_exit(self, status: int, _: object) -> None:
        code = 0 if status else self._goodbye()
        if code:
            self._exit(code)
