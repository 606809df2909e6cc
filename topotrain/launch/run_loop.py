"""The event loop of a launcher: it starts, watches and ends the units of one host.

There is one process per unit.

* The first failure starts a short wait for its cause. A connection error may be reported before the death that caused
  it.
* After that wait the loop asks all processes to end, and kills those that do not.
* Where other units run on other hosts, all units first agree on what ends the job (`OtherUnits`).
* Unit 0 decides about restarts. It receives the events of the other units and sends them commands
  (`ControlConnection`).
* `destroy` leaves no process behind. If the launcher itself is killed, the units and the forkserver read the end of
  their stdin, and end.
* Where a job survives process deaths, `RecoveryPolicy` receives every event first, and the loop executes its actions: a
  group restarts, or this run ends so that another one follows.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import Event, Exited, Failed, Left, Lost, Notice, Saved, Started, Unsaved, from_json
from topotrain.launch import (
    RUN_VARIABLE,
    AlwaysTaken,
    JobOutcome,
    OnEvent,
    Outlet,
    UnitPlace,
    choose_cause,
    exit_code,
)
from topotrain.launch.agent.children import MAIN, AttemptInfo, EntryPoints
from topotrain.launch.agent.forkserver_handle import ForkserverHandle
from topotrain.launch.agent.pipes import ending, log_tail
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.agent.supervisor import GRACE_S
from topotrain.launch.agent.unit_process import UnitProcess, begin
from topotrain.launch.agent.workspace import ProcessList
from topotrain.launch.control_socket import ControlSocket, PendingAnswer
from topotrain.launch.grace_period import LEADER, WORDS, grace, hint
from topotrain.launch.multinode.control_connection import (
    ControlClient,
    ControlConnection,
    ControlServer,
    News,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.reliable_messages import Words
from topotrain.launch.recovery.elastic_groups import AnswerRequest, AskServers, GroupRequest, ReportGone
from topotrain.launch.recovery.recovery_actions import EndProcess, FailJob, PlaceReplica, RestartGroup, RestartJob, Word
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy
from topotrain.launch.recovery.resize import RequestSnapshot, ResizeRefused, ResizeRequest, RestartResized
from topotrain.launch.recovery.stall_detector import StallDetector

CAUSE_S = 1.0
"""Seconds for which the loop waits for the cause of a first failure."""
END_S = GRACE_S + 1.0
"""Seconds for units to end their children. Then the loop kills the units."""
SERVERS_S = 20.0
"""Seconds for the servers to end after the last worker."""
DECIDE_S = 15.0
"""Seconds for all units to agree on a cause. Then the units of this host end without an agreement."""


class OtherUnits(Protocol):
    """The units of the job that run on other hosts."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the end of the job is decided."""
        ...

    @property
    def over(self) -> bool:
        """Whether the end of the job is decided."""
        ...

    def tell(self, cause: Failed) -> None:
        """Report why the job cannot go on here.

        The call does not block.
        """
        ...

    @property
    def saves(self) -> bool:
        """Whether the job is to end after a last snapshot.

        It is True only in the unit of the first server, which takes that snapshot.
        """
        ...

    def heard(self) -> None:
        """Clear the event for which `fileno` became readable."""
        ...

    def save(self, number: int) -> None:
        """Report that a signal asks the job to end after a last snapshot.

        The call does not block.
        """
        ...

    def signalled(self, number: int, more: str = "") -> None:
        """Report that a signal asks the job to end.

        The call does not block. more: text to add to the report.
        """
        ...

    def cast_out(self) -> None:
        """End this unit: the job continues without it."""
        ...


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of a run's files on this host.

    processes: the list of processes. logs: the folder of logs. door: the folder of the control socket; None where the
        job takes no requests because another tool starts its units.
    """

    processes: Path
    logs: Path
    door: Path | None = None


class RunLoop:
    """The event loop for the units of one host, from the first process to the last.

    Args:
        job: the job.
        topology: the layout, with the units that run here.
        on_event: is called with every event, on the caller's thread.
        grounds: the paths of the run's files.
        signals: the stop signals that this process has received.
        kept: the forkserver.
        mark: the run's mark, see RUN_VARIABLE.
        company: the units on other hosts, if there are any.
        recovery: decides about restarts. None where a death ends the job; a `Follower` where another unit decides.
        control: sends to and receives from the units on other hosts, where one unit decides about restarts for all.
        outlet: where the program's output goes.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        on_event: OnEvent,
        grounds: RunFiles,
        signals: StopSignals,
        kept: ForkserverHandle,
        mark: str,
        company: OtherUnits | None = None,
        recovery: RecoveryPolicy | Follower | None = None,
        control: ControlConnection | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        self.job = job
        self.topology = topology
        self._on_event = on_event
        self._grounds = grounds
        self._signals = signals
        self._kept = kept
        self._mark = mark
        self._company = company
        self._recovery = recovery
        self._control = control
        self._outlet = outlet or AlwaysTaken()
        self._holds = False
        self._life = 0
        self._listened = False
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._units: list[UnitProcess] = []
        self._pidfds: list[int] = []
        self._failures: list[Failed] = []
        self._exits: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._workers = {str(worker) for unit in topology.units for worker in unit.workers}
        self._is_whole = len(self._workers) == topology.worker_groups * topology.workers_per_group
        self._standstill = StallDetector(self._workers)
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._stopping = False
        self._released = False
        self._saving = False
        self.saved: Saved | None = None
        """The last reported snapshot, of this unit or another one."""
        self.unread: list[News] = []
        """Messages for the next attempt of the job."""
        self._door: ControlSocket | None = None
        self.again = False
        """Whether the whole job is to restart."""
        self.relaid: Job | None = None
        """The job to restart as, with another layout."""
        self.promised: PendingAnswer | None = None
        """The answer to the client that asked for the resize, due when the job trains again."""

    def begin(self, calls: EntryPoints, places: Sequence[UnitPlace], life: AttemptInfo = AttemptInfo()) -> None:  # noqa: B008
        """Start the units at `places`.

        calls: the functions that child processes run. life: the number of the attempt and where it resumes.
        """
        environ = {**os.environ, RUN_VARIABLE: self._mark}
        self._selector.register(self._signals.woken, selectors.EVENT_READ, self._signalled)
        if self._company is not None:
            self._selector.register(self._company.fileno(), selectors.EVENT_READ, self._decided)
        if self._control is not None:
            self._selector.register(self._control.fileno(), selectors.EVENT_READ, self._came)
        self._life = life.number
        served_at = self._kept.up(calls.preload, environ, again=life.number > 0)
        self._processes = ProcessList(self.topology, self._grounds.processes, own_forkserver=self._kept.own)
        if self._grounds.door is not None:
            self._door = ControlSocket(self._grounds.door, self._selector, self._wished)
        served = self._kept.process
        if served is not None:
            self._watch_process(served, lambda: self._forkserver_ended(served))
            self._processes(Started("forkserver", served.pid))
        for place in places:
            self._start_unit(replace(place, forkserver=served_at), calls, life, environ)
        for group in sorted(life.absent):
            self._tell_servers(group, "away", incarnation=0)
            if not life.number:
                self._on_event(Left(group, "is not there yet", 0.0))

    def _start_unit(self, place: UnitPlace, calls: EntryPoints, life: AttemptInfo, environ: dict[str, str]) -> None:
        unit = begin(place, calls, life, environ, self._grounds.logs / f"unit-{place.rank}.log")
        self._units.append(unit)
        self._selector.register(unit.lines.fd, selectors.EVENT_READ, lambda: self._heard(unit))
        self._watch_process(unit.process, lambda: self._unit_ended(unit))
        self._tell(Started(unit.who, unit.process.pid))

    def _watch_process(self, process: "subprocess.Popen[bytes]", ended: Callable[[], None]) -> None:
        pidfd = os.pidfd_open(process.pid)
        self._pidfds.append(pidfd)

        def once() -> None:
            self._selector.unregister(pidfd)
            process.wait()
            ended()

        self._selector.register(pidfd, selectors.EVENT_READ, once)

    def watch(self) -> JobOutcome:
        """Run the loop until every unit has ended."""
        while any(unit.process.returncode is None for unit in self._units) or self._is_needed():
            due = [self._alarm[0]] if self._alarm is not None else []
            if self._recovery is not None and self._recovery.due is not None and not self._stopping:
                due.append(self._recovery.due)
            wait_s = min([self.job.cluster.poll_time / 1000, *(at - time.monotonic() for at in due)])
            for key, _ in self._selector.select(max(0.0, wait_s)):
                if key.fd in self._selector.get_map():
                    key.data()
            if self._alarm is not None and time.monotonic() >= self._alarm[0]:
                _, do = self._alarm
                self._alarm = None
                do()
            if self._control is not None:
                self._exchange_state(self._control)
            if self._recovery is not None and not self._stopping:
                self._obey(self._recovery.turn(time.monotonic()))
            still = self._standstill.turn(time.monotonic(), self._missing)
            if still is not None and not self._stopping:
                self._on_event(still)
            self._processes.save(self._missing)
            self._regulate()
        return self._outcome()

    def _outcome(self) -> JobOutcome:
        by_itself = self._saving and not self._stopping
        self.destroy()
        self._processes.save(self._missing)
        seconds = time.monotonic() - self._began
        if self._signals.came and not by_itself:
            return JobOutcome(128 + self._signals.came[0], seconds, None, self._exits, self._pids)
        cause = choose_cause(self._failures)
        return JobOutcome(exit_code(cause) if cause else 0, seconds, cause, self._exits, self._pids)

    # Hearing

    def _regulate(self) -> None:
        """Pause the program while its output is not read, and resume it later."""
        if self._outlet.full is not self._holds:
            self._holds = not self._holds
            self._send_here("hold", on=self._holds)

    def _heard(self, unit: UnitProcess) -> None:
        for line in unit.lines.read() or []:
            self._tell(from_json(line.decode()))
        if not unit.lines.open:
            self._selector.unregister(unit.lines.fd)

    def _tell(self, event: Event) -> None:
        if self._recovery is None or self._stopping:
            self._pass_on(event)
        else:
            self._obey(self._recovery.heard(event, time.monotonic()))

    def _obey(self, words: Sequence[Word]) -> None:
        """Execute the actions of the recovery policy."""
        for word in words:
            match word:
                case RestartGroup():
                    self._regroup(word)
                case EndProcess(who=who):
                    self._send("dismiss", who=who)  # exactly one unit has this process
                case PlaceReplica(who=who, number=number, why=why, seats=seats, unit=unit):
                    self._send("seats", who=who, number=number, why=why, seats=seats, unit=unit)
                    if self._saving:  # the process that was asked for a snapshot may have died
                        self._ask_to_save()
                case RestartJob():
                    self._renew()
                case AskServers(wish=wish, group=group, incarnation=incarnation):
                    self._tell_servers(group, wish, incarnation=incarnation)
                case ReportGone(group=group, incarnation=incarnation):
                    self._tell_servers(group, "away", incarnation=incarnation)
                case AnswerRequest():
                    if self._door is not None:
                        self._door.answer(word)
                case RequestSnapshot():
                    self._ask_to_save()
                case ResizeRefused(wish=wish, error=error):
                    if self._door is not None:
                        self._door.refuse(wish, error)
                case RestartResized():
                    self._relay(word)
                case FailJob(failures=failures):
                    for failed in failures:
                        self._on_event(failed)
                    self._failures += failures
                    self._decide()
                case event:
                    self._pass_on(event)
        if self._recovery is not None and self._recovery.complete:
            self._release()
        if isinstance(self._recovery, RecoveryPolicy) and self._recovery.listens is not self._listened:
            self._listened = self._recovery.listens
            self._say("listen", on=self._listened)

    def _release(self) -> None:
        """Let the units end, because nothing can restart any more."""
        if not self._released:
            self._released = True
            self._send("end")

    def _send(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send a command to these units, on this host and others.

        ranks: the units; None: all.
        """
        self._send_here(command, ranks, **values)
        self._say(command, ranks, **values)

    def _send_here(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        for unit in self._units:
            if ranks is None or unit.rank in ranks:
                unit.command(command, **values)

    def _say(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send a command to units on other hosts, if this unit decides for them.

        ranks: the units; None: all.
        """
        if self._control is None or not isinstance(self._recovery, RecoveryPolicy):
            return
        for rank in self._control.ranks:
            if ranks is None or rank in ranks:
                self._control.send(rank, {"life": self._life, "command": command, **values})

    # Other units

    def _is_needed(self) -> bool:
        """Whether this unit must stay for other units.

        It may have messages to send or to receive although its own processes have ended.
        """
        return not (self._control is None or self._recovery is None or self._stopping or self._released)

    def _exchange_state(self, control: ControlConnection) -> None:
        """Pass the state of the connections to the policy, and its suspicion to them."""
        if isinstance(self._recovery, Follower) and isinstance(control, ControlClient):
            self._recovery.told(control.all_received, control.alone)
        if self._recovery is not None:
            control.suspect(self._recovery.suspects)

    def _came(self) -> None:
        """Handle messages and disappearances of other units."""
        assert self._control is not None
        for news in self._control.news():
            match news:
                case UnitMessage(rank=rank, words=words) if words.get("life") == self._life and "ready" not in words:
                    if not self._stopping and not self._is_void(rank):
                        self._read(words)
                case UnitMessage():
                    self.unread.append(news)
                case UnitReturned():
                    self._came_back(news)
                case UnitVanished(rank=rank, failed=failed):
                    self.unread.append(news)
                    self._lost_unit(rank, failed)

    def _is_void(self, rank: int) -> bool:
        """Whether the job continues without that unit.

        Its processes may have been restarted elsewhere.
        """
        return isinstance(self._recovery, RecoveryPolicy) and rank in self._recovery.gone

    def _lost_unit(self, rank: int, failed: Failed) -> None:
        if isinstance(self._recovery, RecoveryPolicy) and not self._stopping:
            self._obey(self._recovery.vanished(rank, failed, time.monotonic()))
            if not self._stopping and self._control is not None:  # if it still runs, it must end
                self._control.send(rank, {"life": self._life, "outcast": True})

    def _came_back(self, news: UnitReturned) -> None:
        """Handle a new unit at the rank of a lost one.

        Only a restart of the whole job can include it.
        """
        what = f"unit {news.rank} is gone, and {news.unit.who} has replaced it"
        self._lost_unit(news.rank, Failed(f"unit {news.rank}", "died", what, ""))
        if self.again:
            self.unread.append(news)
            return
        if self._stopping:
            return
        assert isinstance(self._control, ControlServer)
        self._control.open(news.rank, news.unit.word)
        if self.job.cluster.replicas > 1:  # its servers are needed if more are lost
            self.unread.append(news)
            text = f"{news.unit.who} waits until the whole job starts again: other units run its processes"
            self._on_event(Notice("launcher", text))
        else:
            self._control.send(news.rank, {"life": self._life, "outcast": True})

    def _read(self, words: Words) -> None:
        """Handle an event of another unit, or a command of unit 0."""
        if isinstance(self._recovery, RecoveryPolicy):
            event = from_json(json.dumps(words["event"]))
            if isinstance(event, Saved):
                self.saved = event
            if isinstance(event, Unsaved) or (isinstance(event, Saved) and event.why == "end"):
                self._ends_now()  # this does nothing unless this unit has asked for it
            said = self._recovery.heard(event, time.monotonic())
            # The other unit has shown this event already, and has it in its own report.
            self._obey([word for word in said if word is not event or isinstance(event, Failed)])
            return
        assert isinstance(self._recovery, Follower)
        if "outcast" in words:
            assert self._company is not None
            self._company.cast_out()
            return
        values = {key: value for key, value in words.items() if key not in ("life", "command")}
        match words["command"]:
            case "renew":
                self._renew()
            case "end":
                self._recovery.end()
            case "listen":
                self._recovery.listen(values["on"])
            case command:
                self._send(command, **values)
        self._obey(())

    def _wished(self, wish: GroupRequest | ResizeRequest) -> None:
        """Handle a request from the control socket."""
        error = "the job is ending" if self._stopping or self._saving else ""
        if not isinstance(self._recovery, RecoveryPolicy):
            error = "with on_failure: kStop the loss of a process ends the job; kContinue is needed"
        if isinstance(wish, ResizeRequest):
            self._obey([ResizeRefused(wish, error)] if error else self._decider.resize(wish, time.monotonic()))
        else:
            no = AnswerRequest(wish.verb, wish.group, "", error)
            self._obey([no] if error else self._decider.wish(wish, time.monotonic()))

    @property
    def _decider(self) -> RecoveryPolicy:
        assert isinstance(self._recovery, RecoveryPolicy)
        return self._recovery

    def _tell_servers(self, group: int, command: str, **values: Any) -> None:
        """Send a command to the coordinator of a worker group."""
        server = Address(Role.SERVER, self.topology.server_group_of(group), 0)
        home, rank = self._home_of(server)
        words = {"command": command, "group": group, **values}
        self._send("tell", {rank}, who=home, words=words)

    def _home_of(self, server: Address) -> tuple[str, int]:
        """Return the process in which this server is active, and the rank of its unit."""
        if isinstance(self._recovery, RecoveryPolicy):
            return self._recovery.speaks(server)
        return str(server), self.topology.unit_of(server)

    def _ask_to_save(self) -> None:
        """Ask the process of the first server for a last snapshot.

        A follower of a replicated job does not ask: the server may have moved, and the deciding unit asks it.
        """
        twice = self.job.cluster.replicas > 1
        if twice and isinstance(self._recovery, Follower):  # the deciding unit asks it
            return
        home, rank = self._home_of(LEADER)
        send = self._send if twice else self._send_here
        send("tell", {rank}, who=home, words=WORDS)

    @property
    def _missing(self) -> set[str]:
        """Workers that are absent and that the job does not wait for."""
        return set() if self._recovery is None else self._recovery.missing

    def _regroup(self, word: RestartGroup) -> None:
        ranks = {self.topology.unit_of(worker) for worker in self.topology.workers(word.group)}
        values = {"group": word.group, "incarnation": word.incarnation, "why": word.why, "who": word.who}
        self._send("restart", ranks, **values)

    def _relay(self, word: RestartResized) -> None:
        """Restart the job with another layout.

        The client that asked for it gets its answer after the first step.
        """
        self.relaid = word.job
        if self._door is not None:
            data = {"workers": word.job.cluster.nworkers_per_group, "step": word.step, "text": word.text}
            self.promised = self._door.promise(word.wish, word.number, data)
        self._renew()

    def _renew(self) -> None:
        """End everything at once, so that the caller of `watch` can restart the job."""
        self._say("renew")
        self.again = self._stopping = True
        self._alarm = (time.monotonic() + END_S, self._kill)
        self._send_here("kill")

    def _pass_on(self, event: Event) -> None:
        if self.again and isinstance(event, Failed | Lost):  # consequences of a known failure
            return
        self._processes(event)
        self._on_event(event)
        self._standstill.heard(event, time.monotonic())
        match event:
            case Failed():
                self._failed(event)
            case Started(who=who, pid=pid):
                self._pids[who] = pid
                self._exits.pop(who, None)
            case Saved():
                self.saved = event
                if event.why == "end":
                    self._ends_now()
            case Unsaved():
                self._ends_now()
            case Exited(who=who, code=code):
                self._exits[who] = code
                ended = self._workers - self._missing <= self._exits.keys()
                if self._is_whole and not self._stopping and ended:  # servers may serve workers of units elsewhere
                    self._alarm = self._alarm or (time.monotonic() + SERVERS_S, self._servers_stayed)
            case _:
                pass

    def _unit_ended(self, unit: UnitProcess) -> None:
        for line in unit.lines.drain():
            with contextlib.suppress(ValueError):  # a killed unit may leave an incomplete line
                self._tell(from_json(line.decode()))
        if unit.lines.fd in self._selector.get_map():
            self._selector.unregister(unit.lines.fd)
        code, left = unit.process.returncode, self._unheard(unit.rank)
        self._tell(Exited(unit.who, unit.process.pid, code))
        if (code or left) and not self._stopping and (code < 0 or not self._failures):
            early = "" if code else f" before {', '.join(left)} had ended"
            text = f"{unit.who} (pid {unit.process.pid}) {ending(code)}{early}"
            self._tell(Failed(unit.who, "died", text, log_tail(unit.log)))

    def _unheard(self, rank: int) -> list[str]:
        """Return the processes of a unit that were not seen to end."""
        there = [unit for unit in self.topology.units if unit.rank == rank]
        residents = {str(who) for unit in there for who in (*unit.workers, *unit.servers)}
        if isinstance(self._recovery, Follower) and self._recovery.complete:
            # A unit that took the place of a lost one starts nothing until it is needed, perhaps never.
            residents &= self._pids.keys()
        return sorted(residents - self._missing - self._exits.keys())

    def _forkserver_ended(self, process: "subprocess.Popen[bytes]") -> None:
        self._processes(Exited("forkserver", process.pid, process.returncode))
        if not self._stopping:
            text = f"forkserver (pid {process.pid}) {ending(process.returncode)}"
            self._tell(Failed("forkserver", "died", text, log_tail(self._kept.log)))

    # Ending

    def _failed(self, failed: Failed) -> None:
        if self._stopping:  # failures while the job stops explain nothing
            return
        self._failures.append(failed)
        first = str(MAIN)  # another worker may find the same fault first, but the first worker's output is shown
        if failed.kind in ("program", "config") and (failed.who == first or first in self._exits):
            self._decide()  # nothing else can explain these
        elif len(self._failures) == 1:
            self._alarm = (time.monotonic() + CAUSE_S, self._decide)

    def _decide(self) -> None:
        """End the job for the known cause, or agree on a cause with the other units."""
        cause = choose_cause(self._failures)
        if self._company is None or cause is None:
            self._stop()
        elif not self._stopping:
            self._alarm = (time.monotonic() + DECIDE_S, self._stop)
            self._company.tell(cause)

    def _decided(self) -> None:
        assert self._company is not None
        if self._company.saves and not self._company.over:
            self._company.heard()
            self._save(grace(self.job, signal.SIGTERM))
            return
        self._selector.unregister(self._company.fileno())
        self._stop()

    def _servers_stayed(self) -> None:
        if not self._workers - self._missing <= self._exits.keys():  # a worker has restarted meanwhile
            return
        stayed = ", ".join(who for who in self._pids if who.startswith("server") and who not in self._exits)
        text = f"{stayed or 'a unit'} did not end within {SERVERS_S:g} s after the last worker"
        self._pass_on(Failed("launcher", "internal", text, ""))
        self._stop()

    def _signalled(self) -> None:
        self._signals.woken.recv(64)
        came = self._signals.came
        seconds = grace(self.job, came[0]) if len(came) == 1 and not self._stopping else 0.0
        if seconds:
            if self._company is not None:
                self._company.save(came[0])
            self._save(seconds)
            return
        if came and self._company is not None:
            self._company.signalled(came[0])
        if len(came) > 1:
            self._kill()
        elif came:
            self._stop()

    def _save(self, seconds: float) -> None:
        """Take a last snapshot and end the job.

        seconds: the time limit, after which the job ends without it.
        """
        if self._saving:
            return
        self._saving = True
        if isinstance(self._recovery, RecoveryPolicy):
            self._obey(self._recovery.ends())
        self._alarm = (time.monotonic() + seconds, self._ends_now)
        text = f"asked to end: one more snapshot is taken, for which there are {seconds:g} s"
        self._on_event(Notice("launcher", text))
        self._ask_to_save()

    def _ends_now(self) -> None:
        """End the job: the last snapshot exists, or cannot be taken in time."""
        if not self._saving or self._stopping:
            return
        if self._company is not None:
            self._company.signalled(signal.SIGTERM, hint(self.saved))
        self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._alarm = (time.monotonic() + END_S, self._kill)
        self._send_here("stop")

    def _kill(self) -> None:
        for unit in self._units:
            unit.process.kill()

    def destroy(self) -> None:
        """Kill the remaining processes and close all resources.

        A forkserver that the next attempt needs stays. A second call does nothing.
        """
        self._stopping = True
        self._kill()
        for unit in self._units:
            unit.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        if self._door is not None:
            self._door.close()
            self._door = None
        self._selector.close()
        if self.again:
            self._kept.sweep()
            return
        served = self._kept.process
        code = self._kept.close()
        if served is not None and code is not None:
            self._processes(Exited("forkserver", served.pid, code))
