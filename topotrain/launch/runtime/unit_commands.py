"""Handlers of the unit's commands to one of its processes.

Commands arrive on the channel's own thread, possibly before there is anything to apply them to. Each handler picks its
own commands and ignores the others.

SIGTERM belongs to the command "stop", which the unit sends with it. Other senders may signal all processes of a job at
once (Slurm's `scancel`, the end of a control group). In that case the launcher is signaled too, and decides what
happens to the job. A last snapshot needs all processes for one more step. So the process waits after a signal without
the command for as long as the snapshot may take, and ends earlier if the command arrives.
"""

import _thread
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from topotrain.config.job import Job
from topotrain.core.events import Unsaved
from topotrain.launch.grace_period import waits
from topotrain.launch.runtime.child_channel import ChildChannel

if TYPE_CHECKING:  # its import loads torch, which the handlers of the other commands do not need
    from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotWriter

SNAPSHOT = "snapshot"


class FinalSnapshot:
    """Handles the command for a last snapshot, which the first server's process gets.

    Args:
        name: of the process.
        control: the channel to the unit.
    """

    def __init__(self, name: str, control: ChildChannel) -> None:
        self._name, self._control = name, control
        self._writer: SnapshotWriter | None = None

    def open(self, writer: "SnapshotWriter | None") -> None:
        """Use this writer of snapshots; None if the job writes none."""
        self._writer = writer

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Reply with Saved or Unsaved."""
        if command.get("command") != SNAPSHOT:
            return
        if self._writer is None:
            # Each command gets a reply: the launcher waits for it before the job ends.
            self._control.emit(Unsaved(self._name, "there are no values yet, or the job takes no snapshots"))
        else:
            self._writer.end()


class SigtermHandler:
    """Ends this process at SIGTERM, after its unit's command or a time limit.

    `take_over` is called on the main thread, `on_command` on the thread of the control channel.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._seconds = 0.0
        self._asked = self._came = False
        self._stop = threading.Event()
        self._mask: set[signal.Signals] | set[int] = set()

    def take_over(self, job: Job) -> None:
        """Install the handler, if the job allows a last snapshot."""
        self._seconds = waits(job)
        # Otherwise SIGTERM ends this process at once. A handler of the script replaces this one later.
        if self._seconds:
            signal.signal(signal.SIGTERM, self._signaled)
            # Python forgets signals that come while it forks: the kernel keeps them until the fork can end at one.
            os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._fork)

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Handle the unit's command "stop"."""
        if command.get("command") == "stop":
            self._asked = True
            self._stop.set()

    def _signaled(self, number: int, frame: FrameType | None) -> None:
        # The signal belongs to the command, or the time is over: it acts as if there were no handler.
        if self._asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self._came:
            # A second signal while the first one waits changes nothing.
            self._came = True
            # Not by `threading`: the code that is interrupted here may hold its locks.
            _thread.start_new_thread(self._wait, ())

    def _fork(self) -> None:
        # A script may have replaced the handler, and then its own stays in the fork.
        if signal.getsignal(signal.SIGTERM) == self._signaled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()

    def _block(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _wait(self) -> None:
        self._stop.wait(self._seconds)
        # Set before the signal: the handler then lets it end the process.
        self._asked = True
        os.kill(self._pid, signal.SIGTERM)
