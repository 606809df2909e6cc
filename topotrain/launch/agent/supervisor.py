"""Supervisor of a unit: it starts and ends the unit's processes, without torch.

One thread runs one loop. The unit sends its children's events as JSON lines on stdout, and receives commands as JSON
lines on stdin. The end of stdin means that the launcher died, so the unit kills all its processes. A child never
outlives its unit: the forkserver kills the children of a closed connection, and each child watches its own channel.

Where the job survives process deaths (`on_failure: kContinue`), the unit reports a death as Lost, and the launcher
sends commands:

* "restart" restarts the workers of a group, or starts them for the first time.
* "dismiss" ends one process, for example one that was frozen for too long.
* "tell" passes a command on to one process.
* "seats" announces the placement of replicas, and may start a server process.
* "kill" ends all processes at once.
* "end" lets the unit end. Until then it stays, because its processes may be needed again.

A process that ends without an announcement is lost, with any exit code. A process without its channel is lost, too,
because it can no longer receive commands.

The unit reads the main worker's output only as fast as the launcher takes it, so a print blocks as under plain
`python`. "hold" pauses the reading while the launcher's own reader is behind. Events are always read, and nothing is
dropped.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from topotrain.config.job import OnFailure
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import (
    Ending,
    Event,
    Exited,
    Failed,
    Frozen,
    Lost,
    Notice,
    Output,
    Started,
    Thawed,
    from_json,
    to_json,
)
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domains
from topotrain.launch.agent import children, forkserver
from topotrain.launch.agent.children import Child, ChildSpec, EntryPoints, UnitConfig
from topotrain.launch.agent.group_restart import GroupRestart
from topotrain.launch.agent.pipes import LineReader, LineWriter, OutputReader, ending, log_tail
from topotrain.launch.agent.stop_signals import stop_signals
from topotrain.launch.grace_period import waits

GRACE_S = 1.5
"""Seconds from SIGTERM to SIGKILL."""
GIVE_UP_S = 1.0
"""Seconds from SIGKILL until the unit ends without waiting for its children. The closed connection kills them again."""
DEAF_S = 2.0
"""Seconds from the end of a child's channel until the child is killed: an ending process closes its files first."""
_BACKLOG_BYTES = 1 << 20
"""Bytes that the launcher has not read yet. With more, the unit stops reading the main worker's output."""
_STDIN, _STDOUT = 0, 1
_UNANNOUNCED = " before its work was done: did the program call os._exit, os.exec… or exit() of a C library?"
_DEAF = "has closed the channel to its unit and still runs: did the program call os.exec… or close all descriptors?"


class ShutdownStage(Enum):
    """The stages of a unit's shutdown."""

    RUNNING = 0
    ASKED = 1
    KILLED = 2
    LEFT = 3


class Supervisor:
    """The supervisor of the unit that `home` describes.

    `run` returns 0 when every child ended with code 0, else 1.
    """

    def __init__(
        self,
        home: UnitConfig,
        topology: Topology,
        calls: EntryPoints,
        client: forkserver.ForkserverClient,
        owns_forkserver: bool,
    ) -> None:
        self._home = home
        self._topology = topology
        self._calls = calls
        self._client = client
        self._owns_forkserver = owns_forkserver
        self._poll_s = home.job.cluster.poll_time / 1000
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._commands = LineReader(_STDIN)
        self._outbox = LineWriter(_STDOUT)
        self._held = self._pauses = False
        self._stage = ShutdownStage.RUNNING
        self._deadline: float | None = None
        self._continues = home.job.on_failure is OnFailure.kContinue
        self._needed = self._continues
        self._renewal = GroupRestart()
        twice = home.job.cluster.replicas > 1
        self._seats = ReplicaPlacement(domains(topology)).to_data() if twice else []
        self._empty: dict[str, tuple[int, str]] = {}  # server -> (number, reason) of a process to be replaced

    def run(self) -> int:
        os.set_blocking(_STDIN, False)
        os.set_blocking(_STDOUT, False)
        self._on_readable(_STDIN, self._commanded)
        self._on_readable(self._client.fileno(), self._answered)
        with stop_signals() as woken:
            self._on_readable(woken.fileno(), lambda: self._woken(woken))
            for residents, fds in children.members(self._topology, self._home.unit):
                self._begin(ChildSpec(residents, fds, seats=self._seats))
            while (self._living() or self._awaited()) and self._stage is not ShutdownStage.LEFT:
                self._turn()
            while (
                self._outbox.waiting and self._stage is ShutdownStage.RUNNING
            ):  # a stopped launcher may continue to read
                self._turn()
            self._flush(time.monotonic() + GIVE_UP_S)
        if self._continues and self._stage is ShutdownStage.RUNNING:  # the launcher knows how the job ended
            return 0
        return int(any(child.code != 0 for child in self._children))

    def _awaited(self) -> bool:
        """Whether the launcher may still send commands to this unit."""
        return self._needed and self._stage is ShutdownStage.RUNNING

    def _begin(self, birth: ChildSpec) -> None:
        first = birth.residents[0]
        if first.role is Role.WORKER and first.group in self._home.life.absent:
            self._renewal.later(birth)
        else:
            self._bear(birth)

    def _bear(self, birth: ChildSpec) -> None:
        child = children.start(self._client, self._home, self._calls, birth)
        self._children.append(child)
        self._listen(child)

    # The loop

    def _turn(self) -> None:
        wait_s = self._poll_s
        if self._deadline is not None:
            wait_s = max(0.0, min(wait_s, self._deadline - time.monotonic()))
        for key, _ in self._selector.select(wait_s):
            if key.fd in self._selector.get_map():  # an earlier callback may have unregistered it
                key.data()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._insist()
        self._end_the_deaf(time.monotonic())

    def _on_readable(self, fd: int, do: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, do)

    def _ignore(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _woken(self, woken: socket.socket) -> None:
        wait_s = waits(self._home.job) if signal.SIGINT not in woken.recv(64) else 0.0
        if self._stage is not ShutdownStage.RUNNING or not wait_s:
            self._stop()
        elif self._deadline is None:  # all processes may have been signaled: the launcher decides
            self._deadline = time.monotonic() + wait_s

    def _commanded(self) -> None:
        for line in self._commands.read() or []:
            command = json.loads(line)
            match command["command"]:
                case "stop":
                    self._stop()
                case "kill":
                    self._kill()
                case "end":
                    self._needed = False
                case "hold":
                    self._held = command["on"]
                    self._regulate()
                case "restart":
                    self._restart(command)
                case "seats":
                    self._reseat(command)
                case "dismiss":
                    self._dismiss([c for c in self._living() if c.who == command["who"] and not c.doomed])
                case "tell":
                    self._pass_on(command["who"], command["words"])
        if not self._commands.open:
            self._vanish()

    def _answered(self) -> None:
        answers = self._client.receive()
        if answers is None:
            self._orphaned()
            return
        for answer in answers:
            self._answer(answer)

    def _answer(self, answer: Mapping[str, Any]) -> None:
        if "exit" in answer:
            self._ended(self._child(answer["pid"]), answer["exit"])
            return
        if "frozen" in answer:
            child = self._child(answer["pid"])
            self._tell((Frozen if answer["frozen"] else Thawed)(child.who, child.pid))
            return
        child = next(c for c in self._children if c.who == answer["who"])
        if "error" in answer:
            self._fail(child, f"{child.who} could not be started: {answer['error']}")
            self._end(child, 1)
            return
        child.pid = answer["pid"]
        if child.doomed:  # dismissed before it was forked
            self._signal(child, signal.SIGKILL, group=True)
            return
        for resident in child.residents:
            self._tell(Started(str(resident), child.pid))
        if self._stage is not ShutdownStage.RUNNING:  # asked to stop before it was forked
            self._signal(child, signal.SIGTERM if self._stage is ShutdownStage.ASKED else signal.SIGKILL)

    def _child(self, pid: int) -> Child:
        return next(child for child in self._children if child.pid == pid)

    # Listening to a child

    def _listen(self, child: Child) -> None:
        self._on_readable(child.events.fd, lambda: self._heard(child, "", child.events))
        if not self._pauses:
            self._listen_to_output(child)

    def _listen_to_output(self, child: Child) -> None:
        for stream, output in child.outputs.items():
            if output.open:
                self._on_readable(output.fd, lambda s=stream, o=output: self._heard(child, s, o))  # type: ignore[misc]

    def _regulate(self) -> None:
        """Read the main worker's output, or pause until the launcher has caught up."""
        most = _BACKLOG_BYTES // 2 if self._pauses else _BACKLOG_BYTES
        pauses = self._held or len(self._outbox.waiting) > most
        if pauses is self._pauses:
            return
        self._pauses = pauses
        for child in self._living():
            if pauses:
                for output in child.outputs.values():
                    self._ignore(output.fd)
            else:
                self._listen_to_output(child)

    def _heard(self, child: Child, stream: str, source: LineReader | OutputReader) -> None:
        for line in source.read() or []:
            self._take(child, stream, line)
        if not source.open:
            self._ignore(source.fd)
            if source is child.events:
                child.deaf_from = time.monotonic()

    def _end_the_deaf(self, now: float) -> None:
        """Kill processes that lost their channel without announcing their end."""
        for child in self._living() if self._stage is ShutdownStage.RUNNING else []:
            deaf = child.deaf_from is not None and now >= child.deaf_from + DEAF_S
            if deaf and not (child.announced or child.failed or child.doomed):
                self._fail(child, f"{child.who} (pid {child.pid}) {_DEAF}")
                self._dismiss([child])

    def _take(self, child: Child, stream: str, line: bytes) -> None:
        if stream:
            self._keep_log(child, line)
            text = child.outputs[stream].text(line)
            if text:
                self._tell(Output(child.who, stream, text))
            return
        try:
            event = from_json(line.decode())
        except ValueError as error:
            self._tell(Notice(child.who, f"sent an event that cannot be read: {error}"))
            return
        if isinstance(event, Ending):
            child.announced = True
            return
        child.failed |= isinstance(event, Failed)
        self._tell(event)

    def _keep_log(self, child: Child, output: bytes) -> None:
        """Append to the log.

        A full disk does not end the job, and causes one notice.
        """
        error = child.write_log(output)
        if error is not None:
            self._tell(Notice(child.who, f"{child.log} lacks some of its output: {error.strerror}"))

    def _ended(self, child: Child, code: int) -> None:
        """Read the remaining data of an ended process, then report its end."""
        heard: list[tuple[str, LineReader | OutputReader]] = [*child.outputs.items(), ("", child.events)]
        for stream, source in heard:
            for line in source.drain():
                self._take(child, stream, line)
        known = child.failed or child.doomed or (code == 0 and child.announced)
        if not known and self._stage is ShutdownStage.RUNNING:
            self._fail(child, f"{child.who} (pid {child.pid}) {ending(code)}{'' if code else _UNANNOUNCED}")
        self._end(child, code)

    def _fail(self, child: Child, text: str) -> None:
        tail = log_tail(child.log)
        self._tell(Lost(child.who, child.pid, text, tail) if self._continues else Failed(child.who, "died", text, tail))

    def _end(self, child: Child, code: int) -> None:
        child.code = code
        for fd in (child.events.fd, *(output.fd for output in child.outputs.values())):
            self._ignore(fd)
        child.close()
        for resident in child.residents:
            self._tell(Exited(str(resident), child.pid, code))
        self._renew(child.residents[0].group)
        self._refill()

    # Replica placement

    def _reseat(self, command: Mapping[str, Any]) -> None:
        """Update the replica placement after the death of a server process.

        Starts a replacement if this unit is to host it.
        """
        if self._stage is not ShutdownStage.RUNNING:
            return
        self._seats = command["seats"]
        line = json.dumps({"command": "seats", "seats": self._seats}).encode() + b"\n"
        for child in self._living():
            if child.residents[0].role is Role.SERVER and child.who != command["who"]:
                with contextlib.suppress(OSError):
                    child.control.send(line)
        who, here = command["who"], command["unit"] == self._home.unit
        former = [child for child in self._children if child.who == who]
        self._dismiss([child for child in former if child.code is None])
        if here and former:
            self._empty[who] = command["number"], command["why"]
            self._refill()
        elif here:  # the unit of this server is gone
            residents = tuple(r for unit in self._topology.units for r in unit.servers if str(r) == who)
            self._seat(residents, command["number"], command["why"])

    def _refill(self) -> None:
        """Start a replacement for each lost server after the end of its former process."""
        for child in [c for c in self._children if c.who in self._empty and c.code is not None]:
            number, why = self._empty.pop(child.who)
            self._children.remove(child)
            if self._stage is ShutdownStage.RUNNING:
                self._seat(child.residents, number, why)

    def _seat(self, residents: tuple[Address, ...], number: int, why: str) -> None:
        guest = self._topology.unit_of(residents[0]) != self._home.unit
        self._bear(ChildSpec(residents, (), number, why, self._seats, guest))

    # Starting a group again

    def _restart(self, command: Mapping[str, Any]) -> None:
        """End the workers of a group, or one of them, and restart them.

        They restart when the last of their processes has ended.
        """
        if self._stage is not ShutdownStage.RUNNING:
            return
        group, who = command["group"], command["who"]
        self._dismiss(self._renewal.ask(group, command["incarnation"], command["why"], self._children, who))
        self._renew(group)

    def _dismiss(self, gone: Sequence[Child]) -> None:
        """Kill these children.

        The launcher knows the reason, so their ends are not reported as losses.
        """
        for child in gone:
            child.doomed = True
            self._signal(child, signal.SIGKILL, group=True)

    def _renew(self, group: int) -> None:
        if self._stage is not ShutdownStage.RUNNING:
            return
        former, births = self._renewal.due(group, self._children)
        for child in former:
            self._children.remove(child)
        for birth in births:
            self._bear(birth)

    def _pass_on(self, who: str, words: Mapping[str, Any]) -> None:
        """Pass a command on to the process of a resident.

        A process that is not ready yet reads the command later.
        """
        for child in self._living():
            if who in map(str, child.residents):
                with contextlib.suppress(OSError):
                    child.control.send(json.dumps(words).encode() + b"\n")

    # Ending

    def _living(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _stop(self) -> None:
        """Ask the children to end.

        A second call does nothing.
        """
        if self._stage is not ShutdownStage.RUNNING:
            return
        self._enter(ShutdownStage.ASKED, GRACE_S)
        for child in self._living():
            with contextlib.suppress(OSError):
                child.control.send(b'{"command": "stop"}\n')
            self._signal(child, signal.SIGTERM)
        if not any(child.pid for child in self._living()):  # none is forked yet: closing the connection prevents it
            self._enter(ShutdownStage.LEFT, 0)

    def _insist(self) -> None:
        """Proceed to the next stage when the time of a stage is over."""
        if self._stage is ShutdownStage.RUNNING:
            self._stop()
        elif self._stage is ShutdownStage.ASKED:
            self._kill()
        else:
            self._enter(ShutdownStage.LEFT, 0)

    def _kill(self) -> None:
        """Kill the children without asking them first."""
        self._enter(ShutdownStage.KILLED, GIVE_UP_S)
        for child in self._living():
            self._signal(child, signal.SIGKILL, group=True)

    def _enter(self, stage: ShutdownStage, patience_s: float) -> None:
        self._stage = stage
        self._deadline = time.monotonic() + patience_s

    def _signal(self, child: Child, number: int, group: bool = False) -> None:
        if child.pid:
            with contextlib.suppress(OSError):  # a forkserver that is gone is noticed by its end of file
                self._client.signal(child.pid, number, group)

    def _vanish(self) -> None:
        """End at once, because the launcher died."""
        self._enter(ShutdownStage.LEFT, 0)
        self._kill_groups()

    def _orphaned(self) -> None:
        """Report the death of the forkserver, with which its children died.

        Processes that the children had started may still run, so their groups are killed.
        """
        self._ignore(self._client.fileno())
        self._kill_groups()
        if self._stage is ShutdownStage.RUNNING:
            who = f"unit {self._home.unit}"
            # The launcher reports the death of a forkserver of the whole host itself: it knows the exit code.
            kind = "died" if self._owns_forkserver else "peer"
            self._tell(Failed(who, kind, f"{who} lost its forkserver, and with it its processes", ""))
        self._enter(ShutdownStage.KILLED, GIVE_UP_S)
        for child in self._living():
            self._ended(child, -signal.SIGKILL)

    def _kill_groups(self) -> None:
        """Kill the children's process groups without the forkserver.

        Call it only right after the death of the forkserver or the launcher, before the kernel can reuse a pid.
        """
        for child in self._living():
            if child.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)

    # Telling the launcher

    def _tell(self, event: Event) -> None:
        """Queue an event for the launcher."""
        self._outbox.put(to_json(event).encode())
        if self._outbox.waiting and _STDOUT not in self._selector.get_map():
            self._selector.register(_STDOUT, selectors.EVENT_WRITE, self._write)
        self._regulate()

    def _write(self) -> None:
        self._outbox.write()
        if not self._outbox.waiting:
            self._ignore(_STDOUT)
        self._regulate()

    def _flush(self, until: float) -> None:
        while self._outbox.waiting and time.monotonic() < until:
            self._selector.select(self._poll_s)
            self._outbox.write()
