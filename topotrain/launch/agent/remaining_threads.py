"""What keeps a process alive whose program has ended: threads and processes that it has started and that go on.

Rule: Python waits for these before it ends, however long they take, and so do we: they may write results. But the user
hears of it.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Protocol

QUIET_S, REPEAT_S = 3.0, 60.0
"""Waiting is told after so many seconds, and then again every so many."""


class TellNotice(Protocol):
    """Shows a line to the user; called on a thread of its own."""

    def __call__(self, text: str) -> None: ...


class RemainingThreads:
    """Watches the end of this process.

    Args:
        tell: see there.
        quiet_s: how long it may take before something is told.
    """

    def __init__(self, tell: TellNotice, quiet_s: float = QUIET_S) -> None:
        self._tell, self._quiet_s = tell, quiet_s

    def watch(self) -> None:
        """From now on, while the process lives."""
        threading.Thread(target=self._look, name="remains", daemon=True).start()

    def watch_after_main(self) -> None:
        """From the moment in which the main thread has come to its end."""
        threading.Thread(target=self._look_after_main, name="remains", daemon=True).start()

    def _look_after_main(self) -> None:
        threading.main_thread().join()
        self._look()

    def _look(self) -> None:
        never = threading.Event()
        seconds = self._quiet_s
        while not never.wait(seconds):
            seconds = REPEAT_S
            what = " and ".join(_remains())
            if what:
                self._tell(f"its program has ended, but for {what}: the process waits for that (unless it is a daemon)")


def _remains() -> Iterator[str]:
    main, here = threading.main_thread(), threading.current_thread()
    for thread in threading.enumerate():
        if thread not in (main, here) and not thread.daemon:
            yield f"the thread {thread.name!r}"
    # Not `active_children`: it would reap them, which the main thread is about to do.
    processes = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    for process in sorted(processes, key=str):
        if not process.daemon:
            yield f"the process {process.name!r} (pid {process.pid})"
