"""Supervisor of a unit: it starts and ends the unit's processes, without torch.

One thread runs one loop. The unit sends its children's events as JSON lines on stdout, and receives commands as JSON
lines on stdin. A child never outlives its unit: the forkserver kills the children of a closed connection, and each
child watches its own channel. The command "stop" asks all processes to end, and "hold" pauses the reading of the main
worker's output.

Where the job survives process deaths (`on_failure: kContinue`), the unit reports a death as Lost, and the launcher
sends commands:

* "restart" restarts the workers of a group, or starts them for the first time.
* "dismiss" ends one process, for example one that was frozen for too long.
* "tell" passes a command on to one process.
* "seats" announces the placement of replicas, and may start a server process.
* "kill" ends all processes at once.
* "end" lets the unit end. Until then it stays, because its processes may be needed again.

A process that ends without an announcement is lost, with any exit code.
"""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from topotrain.config.job import OnFailure
from topotrain.config.topology import Topology
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
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.children import Child, Children, EntryPoints, UnitConfig
from topotrain.launch.agent.pipes import LineReader, LineWriter, OutputReader, ending, log_tail
from topotrain.launch.agent.stop_signals import stop_signals
from topotrain.launch.grace_period import waits
from topotrain.launch.runtime.process_resources import ResourceReader

GRACE_S = 1.5
"""Seconds from SIGTERM to SIGKILL."""
GIVE_UP_S = 1.0
"""Seconds from SIGKILL until the unit ends without waiting for its children. The closed connection kills them again."""
UNREACHABLE_S = 2.0
"""Seconds from the end of a child's channel until the child is killed: an ending process closes its files first."""
_BACKLOG_BYTES = 1 << 20
"""Bytes that the launcher has not read yet. With more, the unit stops reading the main worker's output."""
_STDIN, _STDOUT = 0, 1
_READ = selectors.EVENT_READ
_UNANNOUNCED = " before its work was done: did the program call os._exit, os.exec… or exit() of a C library?"
_HOPELESS = ". It has not come to tt.prepare, so another start would end alike"
# Signals that a process gets by its own code.
_FAULTS = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
_UNREACHABLE = (
    "has closed the channel to its unit and still runs: did the program call os.exec… or close all descriptors?"
)


class ShutdownStage(Enum):
    """The stages of a unit's shutdown."""

    RUNNING = 0
    ASKED = 1
    KILLED = 2
    LEFT = 3


class ShutdownTimer:
    """The stage of a unit's shutdown, and the time at which the next one begins."""

    def __init__(self) -> None:
        self.stage = ShutdownStage.RUNNING
        self.deadline: float | None = None

    @property
    def running(self) -> bool:
        """Whether the shutdown has not begun."""
        return self.stage is ShutdownStage.RUNNING

    @property
    def expired(self) -> bool:
        """Whether the time of the stage is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def limit(self, seconds: float) -> float:
        """Return the seconds until the stage is over, but at most so many."""
        return seconds if self.deadline is None else max(0.0, min(seconds, self.deadline - time.monotonic()))

    def enter(self, stage: ShutdownStage, patience_s: float) -> None:
        """Begin a stage that is over in so many seconds."""
        self.stage, self.deadline = stage, time.monotonic() + patience_s


class Supervisor:
    """Supervises a unit; `run` returns 0 when every child ended with code 0, else 1.

    Args:
        unit: the settings of the unit.
        topology: the layout of the job.
        calls: the functions that children run.
        client: the connection to the forkserver.
        owns_forkserver: the forkserver belongs to this unit alone.
    """

    def __init__(
        self,
        unit: UnitConfig,
        topology: Topology,
        calls: EntryPoints,
        client: forkserver.ForkserverClient,
        owns_forkserver: bool,
    ) -> None:
        self._unit, self._client, self._owns_forkserver = unit, client, owns_forkserver
        self._children = Children(client, unit, topology, calls)
        self._poll_s = unit.job.cluster.poll_time / 1000
        self._selector = selectors.DefaultSelector()
        self._commands, self._events = LineReader(_STDIN), LineWriter(_STDOUT)
        self._held = False  # the launcher's own reader is behind
        self._paused = False  # the main worker's output is not read at present
        self._shutdown = ShutdownTimer()
        self._resources = ResourceReader()
        self._continues = unit.job.on_failure is OnFailure.kContinue
        self._needed = self._continues  # the launcher may still send commands

    def run(self) -> int:
        # A launcher that is stopped must not stop the unit, which has to notice deaths.
        os.set_blocking(_STDIN, False)
        os.set_blocking(_STDOUT, False)
        self._selector.register(_STDIN, _READ, self._on_commands)
        self._selector.register(self._client.fileno(), _READ, self._on_answers)
        with stop_signals() as woken:
            # A signal only wakes this loop: its handler may not touch the selector or the children.
            self._selector.register(woken.fileno(), _READ, lambda: self._on_signal(woken))
            self._listen(self._children.start())
            while (
                self._children.living or (self._needed and self._shutdown.running)
            ) and self._shutdown.stage is not ShutdownStage.LEFT:
                self._poll()
            while self._events.waiting and self._shutdown.running:  # a stopped launcher may continue to read
                self._poll()
            # The last events explain the end, so the unit waits a moment for a slow reader.
            self._events.flush(GIVE_UP_S)
        if self._continues and self._shutdown.running:  # the launcher knows how the job ended
            return 0
        return int(not self._children.ended_well)

    def _poll(self) -> None:
        for key, _ in self._selector.select(self._shutdown.limit(self._poll_s)):
            if key.fd in self._selector.get_map():  # an earlier callback may have unregistered it
                key.data()
        if self._shutdown.expired:
            self._advance()
        self._end_unreachable(time.monotonic())
        self._report_resources(time.monotonic())
        for child in self._children.living:
            child.commands.write()

    def _unregister(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _on_signal(self, woken: socket.socket) -> None:
        # A scheduler sends SIGTERM and allows a last snapshot. A user sends SIGINT and wants the end at once.
        wait_s = waits(self._unit.job) if signal.SIGINT not in woken.recv(64) else 0.0
        # A second signal ends the wait for a last snapshot.
        if not self._shutdown.running or not wait_s:
            self._stop()
        elif self._shutdown.deadline is None:  # all processes may have been signaled: the launcher decides
            self._shutdown.enter(ShutdownStage.RUNNING, wait_s)

    def _on_commands(self) -> None:
        for line in self._commands.read() or []:
            self._on_command(json.loads(line))
        if not self._commands.open:  # the launcher died
            # The forkserver may have died with the launcher, so the unit kills the groups itself and waits for no exit.
            self._shutdown.enter(ShutdownStage.LEFT, 0)
            self._children.kill_groups()

    def _on_command(self, command: dict[str, Any]) -> None:
        match command.pop("command"):
            case "stop":
                self._stop()
            case "kill":
                self._kill()
            case "end":
                self._needed = False
            case "hold":
                # The launcher's own reader is behind, although the launcher still takes what this unit writes.
                self._held = command["on"]
                self._regulate()
            case "restart" if self._shutdown.running:
                # A restart that comes while the unit ends is ignored: the processes would be killed at once.
                self._listen(self._children.restart(**command))
            case "seats" if self._shutdown.running:
                self._listen(self._children.place_replica(**command))
            case "dismiss":
                self._children.end(c for c in self._children.living if c.who == command["who"] and not c.doomed)
            case "tell":
                self._children.command(command["who"], command["words"])

    def _on_answers(self) -> None:
        answers = self._client.receive()
        if answers is None:
            self._on_forkserver_lost()
            return
        for answer in answers:
            self._on_answer(answer)

    def _on_answer(self, answer: Mapping[str, Any]) -> None:
        if "exit" in answer:
            self._on_exit(self._children.with_pid(answer["pid"]), answer["exit"])
            return
        if "frozen" in answer:
            child = self._children.with_pid(answer["pid"])
            self._send((Frozen if answer["frozen"] else Thawed)(child.who, child.pid))
            return
        # An answer to a request comes before the pid is known, so it names the address.
        child = self._children.named(answer["who"])
        if "error" in answer:
            if not child.doomed:  # its restart is asked for once more already
                self._fail(child, f"{child.who} could not be started: {answer['error']}")
            self._close(child, 1)
            return
        child.on_fork(answer["pid"])
        if child.doomed:  # dismissed before it was forked
            self._children.signal(child, signal.SIGKILL, group=True)
            return
        for address in child.addresses:
            self._send(Started(str(address), child.pid))
        if not self._shutdown.running:  # asked to stop before it was forked
            asked = self._shutdown.stage is ShutdownStage.ASKED
            self._children.signal(child, signal.SIGTERM if asked else signal.SIGKILL)

    def _listen(self, children: Iterable[Child]) -> None:
        for child in children:
            # Events are read even while outputs are paused: they report failures.
            self._selector.register(child.events.fd, _READ, partial(self._on_readable, child, "", child.events))
            if not self._paused:
                self._listen_to_output(child)

    def _listen_to_output(self, child: Child) -> None:
        for stream, output in child.outputs.items():
            if output.open:
                self._selector.register(output.fd, _READ, partial(self._on_readable, child, stream, output))

    def _regulate(self) -> None:
        """Read the main worker's output, or pause until the launcher has caught up."""
        # With one threshold only, reading would stop and go on at every event.
        most = _BACKLOG_BYTES // 2 if self._paused else _BACKLOG_BYTES
        # Nothing is dropped: a full pipe blocks the program's `print`, as under plain `python`.
        pauses = self._held or len(self._events.waiting) > most
        if pauses is self._paused:
            return
        self._paused = pauses
        for child in self._children.living:
            if pauses:
                for output in child.outputs.values():
                    self._unregister(output.fd)
            else:
                self._listen_to_output(child)

    def _on_readable(self, child: Child, stream: str, source: LineReader | OutputReader) -> None:
        for line in source.read() or []:
            self._on_line(child, stream, line)
        if not source.open:
            self._unregister(source.fd)
            if source is child.events:
                # The process may be ending in order, and its exit is reported in a moment.
                child.on_channel_end(time.monotonic())

    def _end_unreachable(self, now: float) -> None:
        """Kill processes that lost their channel without announcing their end."""
        for child in self._children.living if self._shutdown.running else []:
            since = child.unreachable_since
            explained = child.announced or child.failed or child.doomed
            # Without its channel a process can receive no command, so it counts as lost although it runs.
            if since is not None and now >= since + UNREACHABLE_S and not explained:
                self._fail(child, f"{child.who} (pid {child.pid}) {_UNREACHABLE}")
                self._children.end([child])

    def _report_resources(self, now: float) -> None:
        """Report the memory and the processor time of the children, now and then."""
        # A launcher that is stopped reads nothing, and its old figures would be of no use to it.
        if self._shutdown.running and not self._events.waiting and self._resources.due(now):
            for found in self._resources.read((child.who, child.pid) for child in self._children.living if child.pid):
                self._send(found)

    def _on_line(self, child: Child, stream: str, line: bytes) -> None:
        if stream:
            error = child.write_log(line)
            if error is not None:
                self._send(Notice(child.who, f"{child.log} lacks some of its output: {error.strerror}"))
            text = child.outputs[stream].text(line)
            if text:
                self._send(Output(child.who, stream, text))
            return
        try:
            event = from_json(line.decode())
        except ValueError as error:
            self._send(Notice(child.who, f"sent an event that cannot be read: {error}"))
            return
        child.on_event(event)
        if not isinstance(event, Ending):  # it is for the unit alone
            self._send(event)

    def _on_exit(self, child: Child, code: int) -> None:
        """Read the remaining data of an ended process, then report its end."""
        # Its last events may still be in the pipe: they decide whether the exit was announced.
        sources: list[tuple[str, LineReader | OutputReader]] = [*child.outputs.items(), ("", child.events)]
        for stream, source in sources:
            # First the outputs, then the events: the output explains the failure that an event reports.
            for line in source.drain():
                self._on_line(child, stream, line)
        # A program may leave with code 0 in the middle of its work (`os._exit(0)`): then the announcement is missing.
        known = child.failed or child.doomed or (code == 0 and child.announced)
        if not known and self._shutdown.running:
            hopeless = not child.begun and (code >= 0 or -code in _FAULTS)
            text = f"{child.who} (pid {child.pid}) {ending(code)}{'' if code else _UNANNOUNCED}"
            self._fail(child, text + _HOPELESS * hopeless, "program" if hopeless else "died")
        self._close(child, code)

    def _fail(self, child: Child, text: str, kind: str = "died") -> None:
        tail, lost = log_tail(child.log), self._continues and kind == "died"
        # Lost lets the launcher restart; Failed makes it end the job.
        self._send(Lost(child.who, child.pid, text, tail) if lost else Failed(child.who, kind, text, tail))

    def _close(self, child: Child, code: int) -> None:
        for fd in (child.events.fd, *(output.fd for output in child.outputs.values())):
            self._unregister(fd)
        child.close(code)
        for address in child.addresses:
            self._send(Exited(str(address), child.pid, code))
        # Only now may processes start that wait for this end, such as the successor that maps the same memory.
        self._listen(self._children.on_exit(child, self._shutdown.running))

    def _stop(self) -> None:
        """Ask the children to end; a second call does nothing."""
        if not self._shutdown.running:
            return
        self._shutdown.enter(ShutdownStage.ASKED, GRACE_S)
        for child in self._children.living:
            # Before the signal: with it the process knows that its unit has sent the signal (`unit_commands`).
            child.command({"command": "stop"})
            self._children.signal(child, signal.SIGTERM)
        if not any(child.pid for child in self._children.living):
            # None is forked yet: closing the connection to the forkserver prevents it.
            self._shutdown.enter(ShutdownStage.LEFT, 0)

    def _advance(self) -> None:
        """Proceed to the next stage when the time of a stage is over."""
        if self._shutdown.running:
            self._stop()
        elif self._shutdown.stage is ShutdownStage.ASKED:
            self._kill()
        else:
            self._shutdown.enter(ShutdownStage.LEFT, 0)

    def _kill(self) -> None:
        """Kill the children without asking them first."""
        self._shutdown.enter(ShutdownStage.KILLED, GIVE_UP_S)
        for child in self._children.living:
            self._children.signal(child, signal.SIGKILL, group=True)

    def _on_forkserver_lost(self) -> None:
        """Report the death of the forkserver, with which its children died."""
        # Processes that the children had started may still run. The pids may be reused soon: kill the groups at once.
        self._unregister(self._client.fileno())
        self._children.kill_groups()
        if self._shutdown.running:
            who = f"unit {self._unit.unit}"
            # The launcher reports the death of a forkserver of the whole host itself: it knows the exit code.
            kind = "died" if self._owns_forkserver else "peer"
            self._send(Failed(who, kind, f"{who} lost its forkserver, and with it its processes", ""))
        # Before the exits below, which would otherwise be reported as losses of their own.
        self._shutdown.enter(ShutdownStage.KILLED, GIVE_UP_S)
        for child in self._children.living:
            # No forkserver is left to report these exits; the kernel has killed the children (PDEATHSIG).
            self._on_exit(child, -signal.SIGKILL)

    def _send(self, event: Event) -> None:
        """Queue an event for the launcher."""
        # Never blocks: a launcher that does not read must not keep the unit from noticing deaths.
        self._events.put(to_json(event).encode())
        if self._events.waiting and _STDOUT not in self._selector.get_map():
            self._selector.register(_STDOUT, selectors.EVENT_WRITE, self._write)
        self._regulate()

    def _write(self) -> None:
        self._events.write()
        if not self._events.waiting:
            self._unregister(_STDOUT)
        self._regulate()
