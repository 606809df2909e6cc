"""SIGTERM handling in a process of a job.

The process's own unit sends SIGTERM together with the command "stop". Other senders may signal all processes of a job
at once (Slurm's `scancel`, the end of a control group). In that case the launcher is signaled too, and decides what
happens to the job. A last snapshot needs all processes for one more step. So the process waits after a signal without
the command for as long as the snapshot may take, and ends earlier if the command arrives.

* A script's own handler replaces this one.
* Processes that a script forks have the default handler.
"""

import _thread
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from topotrain.config.job import Job
from topotrain.launch.grace_period import waits


class SigtermHandler:
    """Ends this process at SIGTERM, after its unit's command or a time limit.

    `take_over` is called on the main thread, `hear` on the thread of the control channel.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seconds = 0.0
        self._asked = self._came = False
        self._word = threading.Event()
        self._mask: set[signal.Signals] | set[int] = set()

    def take_over(self, job: Job) -> None:
        """Install the handler.

        Without a last snapshot SIGTERM ends this process at once, and nothing is installed.
        """
        self._seconds = waits(job)
        if self._seconds:
            signal.signal(signal.SIGTERM, self._signaled)
            # Python forgets signals that come while it forks: the kernel keeps them until the fork can end at one.
            os.register_at_fork(before=self._keep, after_in_parent=self._let, after_in_child=self._fork)

    def hear(self, command: Mapping[str, Any]) -> None:
        """Handle the unit's command "stop", and ignore other commands."""
        if command.get("command") == "stop":
            self._asked = True
            self._word.set()

    def _signaled(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._came:
            self._came = True
            # Not by `threading`, whose locks the code that is interrupted here may hold.
            _thread.start_new_thread(self._wait, ())

    def _fork(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._signaled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let()

    def _keep(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _wait(self) -> None:
        self._word.wait(self._seconds)
        self._asked = True
        os.kill(self._pid, signal.SIGTERM)
