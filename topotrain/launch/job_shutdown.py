"""The end of a job on one host: its cause, the last snapshot, and time limits.

* The first failure starts a short wait for its cause. A connection error may be reported before the death that caused
  it.
* After that wait all units of this host are asked to end. Units that do not end are killed.
* Where other units run on other hosts, all units first agree on what ends the job (`OtherUnits`).
"""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from topotrain.core.events import Event, Exited, Failed, Notice, Notifier, Saved, Unsaved
from topotrain.launch import AlwaysTaken, EventListener, Outlet, choose_cause
from topotrain.launch.agent.children import MAIN
from topotrain.launch.agent.forkserver_handle import ForkserverHandle
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.agent.supervisor import GRACE_S
from topotrain.launch.agent.unit_process import ProcessTable, UnitProcesses
from topotrain.launch.grace_period import hint
from topotrain.launch.job_requests import JobRequests, PendingAnswer
from topotrain.launch.multinode.control_connection import ControlChannel
from topotrain.launch.multinode.election.succession import Succession
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.forwarded_requests import ForwardedRequests
from topotrain.launch.multinode.shared_samples import Samples
from topotrain.launch.recovery.attempt_state import SERVERS_S
from topotrain.launch.recovery.recovery_policy import CAUSE_S, RecoveryPolicy

END_S = GRACE_S + 1.0
"""Seconds for units to end their children. Then the loop kills the units."""
DECIDE_S = 15.0
"""Seconds for all units to agree on a cause. Then the units of this host end without an agreement."""


class OtherUnits(Protocol):
    """The units of the job on other hosts. Without any, most methods do nothing."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the end of the job is decided."""
        ...

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        return False

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here. The call does not block."""
        ...

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot.

        It is True only in the unit of the first server, which takes that snapshot.
        """
        return False

    def clear_wakeup(self) -> None:
        """Clear the event for which `fileno` became readable."""
        return

    def save(self, number: int) -> None:
        """Report that a signal asks for an end after a last snapshot. It does not block."""
        return

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end; `more` is added. It does not block."""
        return

    def exclude(self) -> None:
        """End this unit: the job continues without it."""
        return


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of a run's files on this host.

    processes: the list of processes. logs: the folder of logs. control: the folder of the control socket.
    """

    processes: Path
    logs: Path
    control: Path


@dataclass(frozen=True, slots=True)
class LauncherContext(Notifier):
    """The settings and resources of a launcher that all attempts of its job share.

    on_event: receives every event, on the launcher's thread.
    files: the paths of the run's files.
    signals: the stop signals that this process has received.
    forkserver: of this host.
    mark: the run's mark, see RUN_VARIABLE.
    others: the units on other hosts, if there are any.
    connection: sends to and receives from the units on other hosts, where one unit decides about restarts for all.
    succession: what this unit needs in order to be that unit.
    outlet: where the program's output goes.
    promises: answers to clients that are due when the job trains again, possibly in another attempt.
    requests: of the user, which are not answered yet.
    forwards: forwards them, where another unit decides.
    samples: sends the displays of the leader what happens here.
    """

    on_event: EventListener
    files: RunFiles
    signals: StopSignals
    forkserver: ForkserverHandle
    mark: str
    others: OtherUnits | None = None
    connection: ControlChannel | None = None
    succession: Succession | None = None
    outlet: Outlet = field(default_factory=AlwaysTaken)
    promises: list[PendingAnswer] = field(default_factory=list)
    requests: JobRequests = field(default_factory=JobRequests)
    forwards: ForwardedRequests | None = None
    samples: Samples = field(default_factory=Samples)

    def notify(self, text: str) -> None:
        self.on_event(Notice("launcher", text))


class JobShutdown:
    """Decides when and how the units of this host end.

    Args:
        table: the processes of this host.
        units: the units of this host.
        recovery: decides about restarts, and knows which workers are absent.
        host: the settings and resources of the launcher.
    """

    def __init__(
        self,
        table: ProcessTable,
        units: UnitProcesses,
        recovery: RecoveryPolicy | Follower | None,
        host: LauncherContext,
    ) -> None:
        self._table, self._units, self._recovery = table, units, recovery
        self._others, self._on_event = host.others, host.on_event
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self.failures: list[Failed] = []
        self.stopping = self.saving = False
        self.again = False
        """Whether the whole job is to restart."""
        self.saved: Saved | None = None
        """The last reported snapshot, of this unit or another one."""

    def lead(self, policy: RecoveryPolicy, saved: Saved | None) -> None:
        """Note that this unit decides about restarts from now on.

        saved: the last snapshot that any unit knows.
        """
        self._recovery, self.saved = policy, saved or self.saved

    @property
    def missing(self) -> set[str]:
        """Workers that are absent and that the job does not wait for."""
        return set() if self._recovery is None else self._recovery.missing

    @property
    def due(self) -> float | None:
        """The time at which `poll` has to be called next; None: no timer runs."""
        return None if self._alarm is None else self._alarm[0]

    def poll(self, now: float) -> None:
        """Do what is due by time."""
        if self._alarm is not None and now >= self._alarm[0]:
            _, act = self._alarm
            self._alarm = None
            act()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        # One timer is enough: each stage of the end replaces that of the stage before it.
        self._alarm = time.monotonic() + seconds, act

    def on_event(self, event: Event) -> None:
        """Record an event of the job."""
        match event:
            case Failed():
                self._on_failed(event)
            case Saved(why=why):
                # Also of periodic snapshots: the user is shown from where the job can resume.
                self.saved = event
                if why == "end":
                    self.end_now()
            # The job ends all the same, without the last snapshot.
            case Unsaved():
                self.end_now()
            case Exited() if self._table.has_all_workers and not self.stopping:
                # Without all workers here the servers may serve workers of units elsewhere.
                # A running timer means that the end has begun already.
                if self._alarm is None and self._table.have_workers_ended(self.missing):
                    self._after(SERVERS_S, self._on_servers_stayed)
            case _:
                pass

    def _on_failed(self, failed: Failed) -> None:
        if self.stopping:  # failures while the job stops explain nothing
            return
        self.failures.append(failed)
        first = str(MAIN)  # another worker may find the same fault first, but the first worker's output is shown
        if failed.kind in ("program", "config") and (failed.who == first or first in self._table.exits):
            self._decide()  # nothing else can explain these
        # Later failures do not extend the wait: the cause has been reported by then, or never will be.
        elif len(self.failures) == 1:
            self._after(CAUSE_S, self._decide)

    def fail(self, failures: Iterable[Failed]) -> None:
        """End the job for one of these reasons, without waiting for others."""
        for failed in failures:
            self._on_event(failed)
            # Not `_on_failed`, which would wait for a cause: the policy has waited already.
            self.failures.append(failed)
        self._decide()

    def _decide(self) -> None:
        """End the job for the known cause, or agree on a cause with the other units."""
        cause = choose_cause(self.failures)
        if self._others is None or cause is None:
            self.stop()
        elif not self.stopping:
            # Without an agreement in time this host ends alone: its processes must not wait for an absent store.
            self._after(DECIDE_S, self.stop)
            # Another unit may know the cause of this one, so the units agree on one.
            self._others.tell(cause)

    def _on_servers_stayed(self) -> None:
        if not self._table.have_workers_ended(self.missing):  # a worker has restarted meanwhile
            return
        stayed = ", ".join(who for who in self._table.pids if who.startswith("server") and who not in self._table.exits)
        text = f"{stayed or 'a unit'} did not end within {SERVERS_S:g} s after the last worker"
        failed = Failed("launcher", "internal", text, "")
        self._on_event(failed)
        self._on_failed(failed)
        self.stop()

    def save(self, seconds: float) -> None:
        """Wait at most so many seconds for a last snapshot, and then end the job."""
        # `stopping` stays False: all processes are needed for one more step.
        self.saving = True
        self._after(seconds, self.end_now)
        if seconds:
            text = f"asked to end: one more snapshot is taken, for which there are {seconds:g} s"
            self._on_event(Notice("launcher", text))

    def end_now(self) -> None:
        """End the job: the last snapshot exists, or cannot be taken in time."""
        if not self.saving or self.stopping:
            return
        if self._others is not None:
            # The units end with the code of the signal; the text explains how to resume.
            self._others.signalled(signal.SIGTERM, hint(self.saved))
        self.stop()

    def stop(self) -> None:
        """Ask the units to end. A second call does nothing."""
        if not self.stopping:
            self.stopping = True
            self._after(END_S, self._units.kill)
            # After the timer is set: a unit that does not read its commands is killed all the same.
            self._units.command("stop")

    def restart(self) -> None:
        """End everything at once, so that the whole job can restart."""
        # `kill` instead of `stop`: the processes have nothing to save, and the snapshot on disk is what counts.
        self.again = self.stopping = True
        self._after(END_S, self._units.kill)
        self._units.command("kill")

    def close(self) -> None:
        """Kill what is left."""
        self.stopping = True
        self._units.close()
