"""Scripts that end their own process.

A script may call `os._exit`, `os.exec…`, or a C library that calls `exit`. If its loops are over, that is a normal end:
the worker signs off and delivers the result, then the process ends as the script asked. In the middle of a loop the
process just ends, and counts as lost, like a killed one.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from topotrain.training.context import ProcessOwner

# The type of glibc's exit functions. The second argument is the exit code.
_ExitFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
_libc = ctypes.CDLL(None)
_register, _unregister = _libc["__cxa_atexit"], _libc["__cxa_finalize"]


class JobPart(Protocol):
    """The work of a process in its job."""

    def is_complete(self) -> bool:
        """Whether no work is under way that other processes would miss."""
        ...

    def end(self) -> int:
        """Sign off and deliver the result; return the exit code. Reports errors itself."""
        ...


class ProcessExitHook(ProcessOwner):
    """Notices that the script ends this process, on its main thread.

    It is active from `watch` to `forget`.

    Args:
        part: the work to end before the process ends, at most once.
    """

    def __init__(self, part: JobPart) -> None:
        self._part, self._pid = part, os.getpid()
        self._watches = False
        self._exit, self._execv, self._execve = os._exit, os.execv, os.execve
        self._at_c_exit = _ExitFunction(self._c_exit)
        self._registered = False

    def watch(self) -> None:
        """Start watching."""
        self._watches = True
        # The other forms of exec call one of these two.
        _install(self._leave, self._replaced(self._execv), self._replaced(self._execve))

    def loop_ended(self) -> None:
        """Watch also for `exit` of a C library, from the end of each loop on.

        Only for a process that Python does not end itself.
        """
        # Exit functions run in reverse order of registration, so this one must be registered after those of torch,
        # which registers more of them while it trains. Python calls `exit` last, too, when its interpreter is gone:
        # then this function would run without one.
        if not self._watches or os.getpid() != self._pid:
            return
        function = ctypes.cast(self._at_c_exit, ctypes.c_void_p)
        if self._registered:
            # A job may have a million loops, so the function moves to the end and is not registered once more.
            # glibc calls a function that it unregisters: `_c_exit` must do nothing in that call.
            self._registered = False
            _unregister(function)
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._at_c_exit))  # C keeps the address of the function forever
        _register(function, None, function)  # the last argument names the function for `_unregister`
        self._registered = True

    def forget(self) -> None:
        """Stop watching, because the script is over. A second call does nothing."""
        if self._watches:
            self._watches = False
            _install(self._exit, self._execv, self._execve)

    def _complete(self) -> int:
        """Complete the process's work, if there is any; return the exit code."""
        # A process that the script has forked ends for itself, and not for the worker.
        # On another thread, or at `_exit` of a C library, the end is not seen, and the process counts as lost.
        here = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if not (self._watches and here and self._part.is_complete()):
            return 0
        # First: the end of the worker may call these functions itself.
        self.forget()
        return self._part.end()

    def _leave(self, status: int) -> NoReturn:
        self._exit(status or self._complete())

    def _replaced(self, usual: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def replace(*args: Any) -> NoReturn:
            code = self._complete()
            if code:
                self._exit(code)
            usual(*args)

        return replace

    def _c_exit(self, _: object, status: int) -> None:
        # `_unregister` calls this function, too, with `_registered` cleared.
        code = 0 if status or not self._registered else self._complete()
        if code:
            self._exit(code)


def _install(exit: Any, execv: Any, execve: Any) -> None:
    """Replace the functions by which a script ends its process."""
    os._exit, os.execv, os.execve = exit, execv, execve
