"""Execution of the recovery policy's actions, on this host and on others."""

import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from selectors import BaseSelector
from typing import Any

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import Event, Notice, Recovered, Saved, Unsaved
from topotrain.launch.agent.unit_process import UnitProcesses
from topotrain.launch.control_socket import ControlSocket
from topotrain.launch.grace_period import LEADER, WORDS
from topotrain.launch.job_requests import JobRequest
from topotrain.launch.job_shutdown import JobShutdown, LauncherContext
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.recovery.recovery_actions import (
    Action,
    AnswerRequest,
    AskServers,
    EndProcess,
    FailJob,
    PlaceReplica,
    ReportGone,
    RequestSnapshot,
    ResizeRefused,
    ResizeRequest,
    RestartGroup,
    RestartJob,
    RestartResized,
    StopJob,
    TakeSnapshot,
    refused,
)
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy


class ActionExecutor:
    """Executes the actions of a job's recovery policy.

    Args:
        topology: the layout of the job.
        recovery: the policy. A `Follower` where another unit decides; None where a death ends the job.
        units: the units of this host.
        shutdown: ends the job.
        host: the settings and resources of the launcher.
    """

    def __init__(
        self,
        topology: Topology,
        recovery: RecoveryPolicy | Follower | None,
        units: UnitProcesses,
        shutdown: JobShutdown,
        host: LauncherContext,
    ) -> None:
        self._topology, self._recovery = topology, recovery
        self._leads = recovery if isinstance(recovery, RecoveryPolicy) else None
        self._units, self._shutdown, self._connection = units, shutdown, host.connection
        self._succession, self._promises = host.succession, host.promises
        self._requests, self._forwards, self._signals = host.requests, host.forwards, host.signals
        self._snapshots: list[tuple[float, TakeSnapshot]] = []  # requests that wait, and until when
        self._replicated = topology.cluster.replicas > 1
        self._control: ControlSocket | None = None
        self._attempt = 0
        self._commands: list[dict[str, Any]] = []  # for units on other hosts, of the decision that is executed
        self._executing = self._steps_wanted = False
        self.released = False
        """Whether the units may end, because nothing can restart any more."""
        self.resized: Job | None = None
        """The job to restart as, with another layout."""

    def start(self, attempt: int, folder: Path, selector: BaseSelector) -> None:
        """Begin an attempt; `folder` is that of the control socket."""
        # Commands to other hosts carry this number from here on.
        self._attempt = attempt
        self._control = ControlSocket(folder, selector, self._requests)

    def lead(self, policy: RecoveryPolicy) -> None:
        """Execute the decisions of this policy on all hosts from now on."""
        self._recovery = self._leads = policy
        # This unit alone may have noted it, when it heard of no leader.
        self.released = False

    def close(self) -> None:
        """Close the control socket. A second call does nothing."""
        if self._control is not None:
            self._control.close()
            self._control = None
            # Forwarded requests are answered by the other unit.
            self._requests.close()

    def execute(self, actions: Iterable[Action]) -> Iterator[Event]:
        """Execute actions, and yield the events among them in their place."""
        self._executing = True
        yield from self._execute(actions)
        self._update()
        self._executing = False
        self._share()

    def _execute(self, actions: Iterable[Action]) -> Iterator[Event]:
        for action in actions:
            match action:
                case RestartGroup(group=group, incarnation=incarnation, why=why, worker=who, told=told):
                    # First: the survivors wait for it, and the new processes take longer.
                    if told:
                        names = map(str, self._topology.workers(group))
                        index = next((at for at, name in enumerate(names) if name == who), -1)
                        self.command_servers(group, "replaced", incarnation, index)
                    # The workers of a group may be in several units, and other units do not know them.
                    ranks = {self._topology.unit_of(worker) for worker in self._topology.workers(group)}
                    self.send("restart", ranks, group=group, incarnation=incarnation, why=why, who=who)
                case EndProcess(who=who):
                    self.send("dismiss", who=who)  # exactly one unit has this process
                case PlaceReplica(process=who, number=number, why=why, seats=seats, unit=unit):
                    self.send("seats", who=who, number=number, why=why, seats=seats, unit=unit)
                    if (
                        self._shutdown.saving or self._snapshots
                    ):  # the process that was asked for a snapshot may have died
                        self.request_snapshot()
                case RestartJob():
                    self.restart_job()
                case AskServers(wish=wish, group=group, incarnation=incarnation):
                    self.command_servers(group, wish, incarnation)
                case ReportGone(group=group, incarnation=incarnation):
                    self.command_servers(group, "away", incarnation)
                case AnswerRequest():
                    self._requests.answer(action)
                case RequestSnapshot():
                    self.request_snapshot(elsewhere=True)
                case ResizeRefused(wish=request, error=error):
                    self._requests.refuse(request, error)
                case RestartResized():
                    self._restart_resized(action)
                case FailJob(failures=failures):
                    self._shutdown.fail(failures)
                case Recovered(number=number):
                    yield action
                    # A promise outlives the attempt in which it was made: the number belongs to the job, not to the
                    # attempt.
                    for promise in self._promises:
                        if promise.number == number:
                            promise.send()
                case event:
                    yield event

    def _update(self) -> None:
        """Send the units what follows: they may end, or every step matters."""
        if self._recovery is not None and self._recovery.complete:
            self.release()
        if self._leads is not None and self._leads.wants_steps is not self._steps_wanted:
            self._steps_wanted = self._leads.wants_steps
            # Steps of other hosts are sent only while a recovery waits for them.
            self.send_remote("listen", on=self._steps_wanted)

    def release(self) -> None:
        """Let the units end, because nothing can restart any more."""
        if not self.released:
            self.released = True
            self.send("end")

    def send(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send a command to the units of these ranks, on all hosts; None: to all."""
        self._units.command(command, ranks, **values)
        self.send_remote(command, ranks, **values)

    def send_remote(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send a command to units on other hosts, if this unit decides for them."""
        if self._connection is None or self._leads is None:
            return
        places = None if ranks is None else sorted(ranks)
        self._commands.append({"command": command, "ranks": places, "values": values})
        if not self._executing:
            self._share()

    def _share(self) -> None:
        """Send the decision that was executed to all units, which may decide next."""
        commands, self._commands = self._commands, []
        decided = None if self._succession is None else self._succession.decide(commands, time.monotonic())
        if decided is not None and self._connection is not None:
            number, decision = decided
            # The attempt's number lets a unit ignore a command of an earlier attempt.
            for rank in self._connection.ranks:
                self._connection.send(rank, {"life": self._attempt, "number": number, "decision": decision})

    def command_servers(self, group: int, command: str, incarnation: int, index: int = -1) -> None:
        """Send a command to the coordinator of a worker group.

        index: the only worker concerned.
        """
        server = Address(Role.SERVER, self._topology.server_group_of(group), 0)
        process, rank = self._location_of(server)
        words = {"command": command, "group": group, "incarnation": incarnation, "index": index}
        self.send("tell", {rank}, who=process, words=words)

    def request_snapshot(self, elsewhere: bool = False) -> None:
        """Ask the process of the first server for a last snapshot.

        elsewhere: also if it is in a unit of another host. At the end of the job that unit asks it itself.
        """
        # The first server may have moved. Only the deciding unit has its place, and asks it.
        if self._replicated and isinstance(self._recovery, Follower):
            return
        process, rank = self._location_of(LEADER)
        # Without replicas the unit of the first server asks it at the end (`OtherUnits.saves`).
        send = self.send if self._replicated or elsewhere else self._units.command
        send("tell", {rank}, who=process, words=WORDS)

    def _location_of(self, server: Address) -> tuple[str, int]:
        """Return the process in which this server is active, and the rank of its unit."""
        if self._leads is not None:
            return self._leads.location_of(server)
        return str(server), self._topology.unit_of(server)

    def restart_job(self) -> None:
        """End everything at once, so that the whole job can restart."""
        # Other units first: they end their processes while this host ends its own.
        self.send_remote("renew")
        self._shutdown.restart()

    def _restart_resized(self, action: RestartResized) -> None:
        """Restart the job with another layout."""
        self.resized = action.job
        data = {"workers": action.job.cluster.nworkers_per_group, "step": action.step, "text": action.text}
        # The client gets its answer after the first step of the next attempt.
        self._promises.append(self._requests.promise(action.wish, action.number, data))
        self.restart_job()

    def receive(self) -> Iterator[Sequence[Action]]:
        """Yield the actions after each request of the user."""
        self._refuse_late_snapshots(time.monotonic())
        if self._leads is None and self._forwards is not None:
            # They wait while there is no leader, and while this unit is about to lead.
            for wish, client in self._requests.take_with_client() if self._forwards.has_leader else ():
                self._forwards.send(wish, client)
            return
        for request in self._requests.take():
            yield self._on_request(request)

    def _on_request(self, request: JobRequest) -> Sequence[Action]:
        error = "the job is ending" if self._shutdown.stopping or self._shutdown.saving else ""
        if isinstance(request, TakeSnapshot | StopJob):
            if error:
                self._requests.refuse(request, error)
                return []
            return self._stop(request) if isinstance(request, StopJob) else self._take_snapshot(request)
        if self._leads is None:
            error = "with on_failure: kStop the loss of a process ends the job; kContinue is needed"
        if isinstance(request, ResizeRequest):
            if error or self._leads is None:
                return [ResizeRefused(request, error)]
            return self._leads.on_resize_request(request, time.monotonic())
        if error or self._leads is None:
            return [refused(request, error)]
        return self._leads.on_group_request(request)

    def _stop(self, request: StopJob) -> Sequence[Action]:
        """End the job as after SIGTERM, on all hosts."""
        text = "the job is asked to end; a job that takes snapshots takes a last one first"
        self._requests.reply(request, {"text": text})
        # A second request before the first one is acted on must not count as a second signal, which saves nothing.
        if not self._signals.came:
            self._signals.ask(signal.SIGTERM)
        return [Notice("launcher", "asked to end by `topotrain jobs stop`")]

    def _take_snapshot(self, request: TakeSnapshot) -> Sequence[Action]:
        """Ask for a snapshot; the answer comes with it."""
        rank = self._location_of(LEADER)[1]
        # Without a unit that decides for all, only the unit of the first server can ask it.
        if self._leads is None and rank not in {unit.rank for unit in self._topology.units}:
            self._requests.refuse(request, f"ask on the host of unit {rank}, which has the first server")
            return []
        self._snapshots.append((time.monotonic() + request.within_s, request))
        self.request_snapshot(elsewhere=True)
        return []

    def on_event(self, event: Event) -> None:
        """Answer the commands that wait for a snapshot."""
        said: dict[str, Any]
        match event:
            # One that was due anyway may have been frozen before it was asked for.
            case Saved(number=number, step=step, path=path, why="end"):
                text = f"snapshot {number} has step {step}: {path}"
                said = {"snapshot": number, "step": step, "path": path, "text": text}
            case Unsaved(text=text):
                said = {"error": f"no snapshot can be taken: {text}"}
            case _:
                return
        waiting, self._snapshots = self._snapshots, []
        for _, request in waiting:
            self._requests.reply(request, said)

    def _refuse_late_snapshots(self, now: float) -> None:
        late = [request for until, request in self._snapshots if until <= now]
        self._snapshots = [(until, request) for until, request in self._snapshots if until > now]
        for request in late:
            error = f"no snapshot was complete within {request.within_s:g} s (--within); it may still come"
            self._requests.refuse(request, error)
