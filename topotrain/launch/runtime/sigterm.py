"""SIGTERM in a process of a job: from its unit, which says "stop" beside it, or from somebody who signals everybody.

Rule: what takes jobs away may signal all their processes at once (Slurm's `scancel`, the end of a control group). What
becomes of the job is the launcher's to say, which was signaled, too; for a last snapshot everybody is needed for one
more step. So the signal alone is waited out for as long as that may take; with the unit's word, whichever comes first,
the process ends. A script's own handler takes the place of this one, and processes that a script forks are not meant.
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
    """See above. `take_over` is called on the main thread, `hear` on that of the control channel."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seconds = 0.0
        self._asked = self._came = False
        self._word = threading.Event()
        self._mask: set[signal.Signals] | set[int] = set()

    def take_over(self, job: Job) -> None:
        """From now on; where the job ends at SIGTERM without a last snapshot, so does this process."""
        self._seconds = waits(job)
        if self._seconds:
            signal.signal(signal.SIGTERM, self._signaled)
            # Python forgets signals that come while it forks: the kernel keeps them until the fork can end at one.
            os.register_at_fork(before=self._keep, after_in_parent=self._let, after_in_child=self._fork)

    def hear(self, command: Mapping[str, Any]) -> None:
        """The unit's word; other commands are others'."""
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
