"""The event loop of a launcher: it starts, watches and ends the units of one host.

There is one process per unit. No process is left behind: if the launcher itself is killed, the units and the forkserver
read the end of their stdin, and end.

* The end of the job is decided in `job_shutdown.py`.
* The leader decides about restarts. It receives the events of the other units and sends them commands
  (`remote_units.py`).
* Where a job survives process deaths, `RecoveryPolicy` receives every event first, and its actions are executed
  (`action_executor.py`): a group restarts, or this run ends so that another one follows.
"""

import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Exited, Failed, Left, Lost, Notice, Started, from_json
from topotrain.launch import (
    RUN_VARIABLE,
    JobOutcome,
    UnitPlace,
    choose_cause,
    exit_code,
)
from topotrain.launch.action_executor import ActionExecutor
from topotrain.launch.agent.children import AttemptInfo, EntryPoints
from topotrain.launch.agent.orphans import ForkserverProcess
from topotrain.launch.agent.pipes import ending, log_tail
from topotrain.launch.agent.unit_process import ProcessTable, UnitProcess, UnitProcesses, start_unit
from topotrain.launch.agent.workspace import ProcessList, unusable
from topotrain.launch.grace_period import grace
from topotrain.launch.job_shutdown import JobShutdown, LauncherContext
from topotrain.launch.multinode.control_connection import News
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.recovery.attempt_state import RETRY_S
from topotrain.launch.recovery.recovery_actions import Action
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy
from topotrain.launch.recovery.stall_detector import StallDetector
from topotrain.launch.remote_units import RemoteUnits


class RunLoop:
    """The event loop for the units of one host, from the first process to the last.

    Args:
        job: the job.
        topology: the layout, with the units that run here.
        host: the settings and resources of the launcher.
        recovery: decides about restarts. None where a death ends the job; a `Follower` where another unit decides.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        host: LauncherContext,
        recovery: RecoveryPolicy | Follower | None = None,
    ) -> None:
        self.job, self.topology = job, topology
        self._host = host
        self._connection = host.connection
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._units = UnitProcesses(self._selector)
        self._table = ProcessTable(topology)
        self._processes = ProcessList(topology, host.files.processes, own_forkserver=host.forkserver.own)
        self._stalls = StallDetector(self._table.workers)
        self.shutdown = JobShutdown(self._table, self._units, recovery, host)
        self.executor = ActionExecutor(topology, recovery, self._units, self.shutdown, host)
        self._remote = RemoteUnits(topology, recovery, self.executor, self.shutdown, host)
        self._paused = False

    @property
    def _recovery(self) -> RecoveryPolicy | Follower | None:
        return self._remote.recovery

    @property
    def unread(self) -> list[News]:
        """News for the next attempt of the job."""
        return self._remote.unread

    def start(self, calls: EntryPoints, places: Sequence[UnitPlace], attempt: AttemptInfo = AttemptInfo()) -> None:  # noqa: B008
        """Start the units at `places`.

        calls: the functions that child processes run. attempt: its number, and where it resumes. Raises ConfigError in
        the first attempt if the system refuses it. Later that counts as a loss.
        """
        # The mark is inherited by all processes of the job, and `sweep` finds them by it.
        environ = {**os.environ, RUN_VARIABLE: self._host.mark}
        self._selector.register(self._host.signals.woken, selectors.EVENT_READ, self._on_signal)
        if self._host.others is not None:
            self._selector.register(self._host.others.fileno(), selectors.EVENT_READ, self._on_decided)
        if self._connection is not None:
            self._selector.register(self._connection.fileno(), selectors.EVENT_READ, self._on_news)
        self._remote.begin(attempt.number)
        forkserver = self._host.forkserver
        try:
            address = forkserver.up(calls.preload, environ, again=attempt.number > 0)
            self.executor.start(attempt.number, self._host.files.control, self._selector)
            started = [self._start_unit(replace(each, forkserver=address), calls, attempt, environ) for each in places]
        except OSError as error:
            if not attempt.number:
                raise unusable(self.job, error) from None
            # Not at once: a limit of processes or memory may be over in a moment. A signal ends the wait.
            select.select([self._host.signals.woken], [], [], RETRY_S)
            self._on_event(Failed("launcher", "died", f"the job could not be started again: {error}", ""))
            return
        served = forkserver.process
        if served is not None:
            self._units.watch(served, lambda: self._on_forkserver_exit(served))
            self._processes(Started("forkserver", served.pid))
        for unit in started:
            self._on_event(Started(unit.who, unit.process.pid))
        # Otherwise the servers would wait for the first push of this group. One unit tells them.
        for group in [] if isinstance(self._recovery, Follower) else sorted(attempt.absent):
            self.executor.command_servers(group, "away", 0)
            if not attempt.number:
                self._host.on_event(Left(group, "is not there yet", 0.0))

    def _start_unit(
        self, place: UnitPlace, calls: EntryPoints, attempt: AttemptInfo, environ: dict[str, str]
    ) -> UnitProcess:
        unit = start_unit(place, calls, attempt, environ, self._host.files.logs / f"unit-{place.rank}.log")
        self._units.add(unit)
        self._selector.register(unit.lines.fd, selectors.EVENT_READ, lambda: self._on_lines(unit))
        self._units.watch(unit.process, lambda: self._on_unit_exit(unit))
        return unit

    def run(self) -> JobOutcome:
        """Run the loop until every unit has ended."""
        while self._units.running or self._is_needed():
            # A job that stops restarts nothing, so the policy's timers no longer count.
            due = [self.shutdown.due]
            if self._recovery is not None and not self.shutdown.stopping:
                due.append(self._recovery.due)
            limits = [at - time.monotonic() for at in due if at is not None]
            wait_s = min([self.job.cluster.poll_time / 1000, *limits])
            for key, _ in self._selector.select(max(0.0, wait_s)):
                if key.fd in self._selector.get_map():  # an earlier callback may have unregistered it
                    key.data()
            self._poll()
        return self._outcome()

    def _poll(self) -> None:
        """Do what is due by time, and what arrived requests ask for."""
        # The control socket only queues requests; they are handled here, outside the selector's callbacks.
        for actions in self.executor.receive():
            self._execute(actions)
        self.shutdown.poll(time.monotonic())
        self._units.write()
        self._remote.poll()
        self._host.samples.poll(time.monotonic())
        if self._recovery is not None and not self.shutdown.stopping:
            self._execute(self._recovery.poll(time.monotonic()))
        notice = self._stalls.poll(time.monotonic(), self.shutdown.missing)
        if notice is not None and not self.shutdown.stopping:
            self._host.on_event(notice)
        self._processes.save(self.shutdown.missing)
        if self._host.outlet.full is not self._paused:  # the program is paused while its output is not read
            self._paused = not self._paused
            self._units.command("hold", on=self._paused)

    def _outcome(self) -> JobOutcome:
        # Before `destroy`, which sets `stopping`.
        by_itself = self.shutdown.saving and not self.shutdown.stopping
        # The forkserver's exit is recorded by `destroy`, and belongs into the list of processes.
        self.destroy()
        self._processes.save(self.shutdown.missing)
        seconds, exits, pids = time.monotonic() - self._began, self._table.exits, self._table.pids
        # A job that was complete before its last snapshot has not ended by the signal.
        if self._host.signals.came and not by_itself:
            return JobOutcome(128 + self._host.signals.came[0], seconds, None, exits, pids)
        cause = choose_cause(self.shutdown.failures)
        return JobOutcome(exit_code(cause) if cause else 0, seconds, cause, exits, pids)

    def _on_lines(self, unit: UnitProcess) -> None:
        for line in unit.lines.read() or []:
            self._on_line(unit, line)
        # The end of the output is not the end of the process, which the pidfd reports.
        if not unit.lines.open:
            self._selector.unregister(unit.lines.fd)

    def _on_line(self, unit: UnitProcess, line: bytes) -> None:
        # A module that prints when it is imported, or a killed unit, leaves lines that are no events.
        try:
            event = from_json(line.decode())
        except ValueError as error:
            event = Notice(unit.who, f"sent an event that cannot be read: {error}")
        self._on_event(event)

    def _on_event(self, event: Event) -> None:
        if self._recovery is None or self.shutdown.stopping:
            # A job that stops recovers nothing, so every event is shown and recorded as it is.
            self._pass_on(event)
        else:
            self._execute(self._recovery.on_event(event, time.monotonic()))

    def _execute(self, actions: Iterable[Action]) -> None:
        for event in self.executor.execute(actions):
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if self.shutdown.again and isinstance(event, Failed | Lost):  # consequences of a known failure
            return
        # The table comes first: the shutdown looks there for workers that have not ended.
        self._table.on_event(event)
        self._processes(event)
        self._host.on_event(event)
        self._stalls.on_event(event, time.monotonic())
        self.shutdown.on_event(event)
        self.executor.on_event(event)

    def _on_unit_exit(self, unit: UnitProcess) -> None:
        # The pidfd may be readable before the pipe is empty, and the last events explain the end.
        for line in unit.lines.drain():
            self._on_line(unit, line)
        if unit.lines.fd in self._selector.get_map():
            self._selector.unregister(unit.lines.fd)
        # A follower that took the place of a lost unit starts nothing until it is needed, perhaps never.
        idle = isinstance(self._recovery, Follower) and self._recovery.complete
        # A unit may end with code 0 although some of its processes were not seen to end.
        code, left = unit.process.returncode, self._table.unended(unit.rank, self.shutdown.missing, started=idle)
        # Before a failure is reported: the policy then knows that the unit's processes have ended with it.
        self._on_event(Exited(unit.who, unit.process.pid, code))
        # Other units end with an error because of the first failure; only a signal is news then.
        if (code or left) and not self.shutdown.stopping and (code < 0 or not self.shutdown.failures):
            early = "" if code else f" before {', '.join(left)} had ended"
            text = f"{unit.who} (pid {unit.process.pid}) {ending(code)}{early}"
            self._on_event(Failed(unit.who, "died", text, log_tail(unit.log)))

    def _on_forkserver_exit(self, process: "subprocess.Popen[bytes] | ForkserverProcess") -> None:
        code = process.returncode
        if code is not None:
            self._processes(Exited("forkserver", process.pid, code))
        if not self.shutdown.stopping:
            text = f"forkserver (pid {process.pid}) {'has ended' if code is None else ending(code)}"
            # It has not loaded torch, and another start would not either, unless it was killed.
            forked = any(who.startswith(("worker", "server")) for who in self._table.pids)
            hopeless = not forked and (code is None or code > 0)
            text += " before it could start a process" * hopeless
            kind = "config" if hopeless else "died"
            self._on_event(Failed("forkserver", kind, text, log_tail(self._host.forkserver.log)))

    def _is_needed(self) -> bool:
        """Whether this unit must stay for other units."""
        # Its messages may still be on their way although its own processes have ended.
        away = self._connection is None or self._recovery is None
        return not (away or self.shutdown.stopping or self.executor.released)

    def _on_news(self) -> None:
        """Handle messages and disappearances of other units."""
        for actions in self._remote.receive():
            self._execute(actions)

    def _on_decided(self) -> None:
        others = self._host.others
        assert others is not None
        if others.saves and not others.over:
            # Read here, so that the descriptor is readable again when the end is decided.
            others.clear_wakeup()
            self._save(grace(self.job, signal.SIGTERM))
            return
        # The descriptor stays readable, and would keep the loop busy until the units have ended.
        self._selector.unregister(others.fileno())
        self.shutdown.stop()

    def _on_signal(self) -> None:
        if not self._host.signals.clear_wakeup():
            return
        came, others = self._host.signals.came, self._host.others
        # A later signal ends the wait for the last snapshot. Two that come at once are one.
        first = not self.shutdown.saving and not self.shutdown.stopping and signal.SIGINT not in came
        seconds = grace(self.job, came[0]) if first else 0.0
        if seconds:
            if others is not None:
                others.save(came[0])
            self._save(seconds)
            return
        if others is not None:
            others.signalled(came[0])
        # A user who sends a second signal does not want to wait for an orderly end.
        if len(came) > 1:
            self._units.kill()
        else:
            self.shutdown.stop()

    def _save(self, seconds: float) -> None:
        """Take a last snapshot within so many seconds, and end the job."""
        if self.shutdown.saving:
            return
        # Saving is noted first: a request to resize that comes now is refused.
        self.shutdown.save(seconds)
        if isinstance(self._recovery, RecoveryPolicy):
            self._execute(self._recovery.on_stop_request())
        self.executor.request_snapshot()

    def destroy(self) -> None:
        """Kill what is left, and close all resources. A second call does nothing."""
        self.shutdown.close()
        self.executor.close()
        self._selector.close()
        forkserver = self._host.forkserver
        # Loading torch takes longer than the rest of a start, so the next attempt gets this forkserver.
        if self.shutdown.again:
            forkserver.sweep()
            return
        served = forkserver.process
        code = forkserver.close()
        if served is not None and code is not None:
            self._processes(Exited("forkserver", served.pid, code))
