"""Threads and processes that keep a process alive after its program has ended.

Python waits for non-daemon threads and processes before it ends, however long they take, because they may write
results. The job waits, too, and the user gets a notice.
"""

import sys
import threading
from collections.abc import Iterator

from topotrain.core.events import Notifier

QUIET_S, REPEAT_S = 3.0, 60.0
"""Seconds of waiting before the first notice, and between later ones."""


class RemainingThreads:
    """Reports what delays the end of this process.

    Args:
        notifier: shows the notice. It is called on a thread of its own.
        quiet_s: seconds of waiting before the first notice.
    """

    def __init__(self, notifier: Notifier, quiet_s: float = QUIET_S) -> None:
        self._notifier, self._quiet_s = notifier, quiet_s

    def watch(self) -> None:
        """Start now, until the process ends."""
        threading.Thread(target=self._watch, name="remains", daemon=True).start()

    def watch_after_main(self) -> None:
        """Start when the main thread has ended."""
        threading.Thread(target=self._watch_after_main, name="remains", daemon=True).start()

    def _watch_after_main(self) -> None:
        # Only then does Python wait for the other threads, without a notice.
        threading.main_thread().join()
        self._watch()

    def _watch(self) -> None:
        # A daemon thread: it ends with the process, so the event is never set.
        never = threading.Event()
        seconds = self._quiet_s
        while not never.wait(seconds):
            seconds = REPEAT_S
            what = " and ".join(_remains())
            if what:
                self._notifier.notify(
                    f"its program has ended, but for {what}: the process waits for that (unless it is a daemon)"
                )


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
