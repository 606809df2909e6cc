"""The units of a job that run on this machine: one process per unit, and one loop that hears them all.

Rule: the first failure starts a short wait for its cause (who loses a peer is heard before the peer's end is), then
everything is asked to end, then made to. Where other units run elsewhere, what ends the job is agreed upon with them
first (`Company`). Whatever happens here, `destroy` leaves no process behind; and if this process is killed, the units
and the forkserver find the end of their stdin.
"""

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from topotrain.events import Event, Exited, Failed, Started, from_json
from topotrain.job import Job
from topotrain.launch import (
    RUN_VARIABLE,
    TABLE,
    OnEvent,
    Outcome,
    Place,
    arguments,
    choose_cause,
    exit_code,
    forkserver,
)
from topotrain.launch.children import MAIN, Calls
from topotrain.launch.lines import Lines, ending, log_tail
from topotrain.launch.sweep import sweep
from topotrain.launch.unit import GRACE_S
from topotrain.launch.workspace import Processes
from topotrain.topology import Topology

CAUSE_S = 1.0
"""How long after a first failure we listen for its cause."""
END_S = GRACE_S + 1.0
"""How long units may take to end their children before they are killed themselves."""
SERVERS_S = 20.0
"""How long servers may take to end after the last worker."""
DECIDE_S = 15.0
"""How long the company may take to agree on a cause before this machine's units end without it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Company(Protocol):
    """The units of the job that run elsewhere."""

    def fileno(self) -> int:
        """Readable when the job's end has been decided."""
        ...

    @property
    def over(self) -> bool:
        """The job's end has been decided."""
        ...

    def tell(self, cause: Failed) -> None:
        """This is why the job cannot go on here; does not wait."""
        ...

    def signalled(self, number: int) -> None:
        """A signal asks the job to end; does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Grounds:
    """Where the files of a run are on this machine: the list of processes, and the logs."""

    processes: Path
    logs: Path
    forkserver_log: Path


@dataclass(slots=True)
class _Unit:
    rank: int
    process: "subprocess.Popen[bytes]"
    lines: Lines
    log: Path

    @property
    def who(self) -> str:
        return f"unit {self.rank}"

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), b'{"command": "stop"}\n')


@dataclass(slots=True)
class Signals:
    """Which of the signals that end a job came, and a socket that becomes readable when one does."""

    came: list[int]
    woken: socket.socket


class Run:
    """Some units of one started job, from the first process to the last.

    Args:
        job, topology: the job; of the layout, the units that run here.
        on_event: hears every event, on the caller's thread.
        grounds: see there.
        signals: as `signals` gives them.
        served_at: the socket of a forkserver that is running already; "": the run has its own.
        company: the units that run elsewhere, if there are any.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        on_event: OnEvent,
        grounds: Grounds,
        signals: Signals,
        served_at: str,
        company: Company | None = None,
    ) -> None:
        self._served_at = served_at
        self._job = job
        self._topology = topology
        self._on_event = on_event
        self._grounds = grounds
        self._signals = signals
        self._company = company
        self._began = time.monotonic()
        self._mark = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._processes = Processes(topology, grounds.processes, own_forkserver=not served_at)
        self._forkserver: forkserver.Running | None = None
        self._units: list[_Unit] = []
        self._pidfds: list[int] = []
        self._failures: list[Failed] = []
        self._exits: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._workers = {str(worker) for unit in topology.units for worker in unit.workers}
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._stopping = False

    def begin(self, calls: Calls, places: Sequence[Place]) -> None:
        """Start the units at `places`."""
        environ = {**os.environ, RUN_VARIABLE: self._mark}
        self._selector.register(self._signals.woken, selectors.EVENT_READ, self._signalled)
        if self._company is not None:
            self._selector.register(self._company.fileno(), selectors.EVENT_READ, self._decided)
        served_at = self._served_at or self._serve(calls, environ)
        for place in places:
            self._start_unit(replace(place, forkserver=served_at), calls, environ)

    def _serve(self, calls: Calls, environ: dict[str, str]) -> str:
        """Start the run's own forkserver; returns its socket."""
        log = self._grounds.forkserver_log
        self._forkserver = served = forkserver.start(log, calls.preload, environ)
        self._watch_process(served.process, lambda: self._forkserver_ended(log))
        self._processes(Started("forkserver", served.process.pid))
        return served.path

    def _start_unit(self, place: Place, calls: Calls, environ: dict[str, str]) -> None:
        option, variable = TABLE["rendezvous"]
        words = arguments(place)
        if "@" in place.rendezvous:  # everybody on this machine can read a command line, and a URL may have a password
            at = words.index(option)
            del words[at : at + 2]
            environ = {**environ, variable: place.rendezvous}
        command = [sys.executable, "-m", "topotrain.launch.unit", *words]
        command += ["--worker-call", calls.worker, "--server-call", calls.server]
        log = self._grounds.logs / f"unit-{place.rank}.log"
        with open(log, "wb") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            process = subprocess.Popen(command, env=environ, start_new_session=True, bufsize=0, **pipes)
        assert process.stdout is not None
        unit = _Unit(place.rank, process, Lines(process.stdout.fileno()), log)
        self._units.append(unit)
        os.set_blocking(unit.lines.fd, False)
        self._selector.register(unit.lines.fd, selectors.EVENT_READ, lambda: self._heard(unit))
        self._watch_process(process, lambda: self._unit_ended(unit))
        self._tell(Started(unit.who, process.pid))

    def _watch_process(self, process: "subprocess.Popen[bytes]", ended: Callable[[], None]) -> None:
        pidfd = os.pidfd_open(process.pid)
        self._pidfds.append(pidfd)

        def once() -> None:
            self._selector.unregister(pidfd)
            process.wait()
            ended()

        self._selector.register(pidfd, selectors.EVENT_READ, once)

    def watch(self) -> Outcome:
        """Until every unit has ended."""
        while any(unit.process.returncode is None for unit in self._units):
            wait_s = self._job.cluster.poll_time / 1000
            if self._alarm is not None:
                wait_s = max(0.0, min(wait_s, self._alarm[0] - time.monotonic()))
            for key, _ in self._selector.select(wait_s):
                if key.fd in self._selector.get_map():
                    key.data()
            if self._alarm is not None and time.monotonic() >= self._alarm[0]:
                _, do = self._alarm
                self._alarm = None
                do()
            self._processes.save()
        return self._outcome()

    def _outcome(self) -> Outcome:
        self.destroy()
        self._processes.save()
        seconds = time.monotonic() - self._began
        if self._signals.came:
            return Outcome(128 + self._signals.came[0], seconds, None, self._exits, self._pids)
        cause = choose_cause(self._failures)
        return Outcome(exit_code(cause) if cause else 0, seconds, cause, self._exits, self._pids)

    # Hearing

    def _heard(self, unit: _Unit) -> None:
        for line in unit.lines.read() or []:
            self._tell(from_json(line.decode()))
        if not unit.lines.open:
            self._selector.unregister(unit.lines.fd)

    def _tell(self, event: Event) -> None:
        self._processes(event)
        self._on_event(event)
        match event:
            case Failed():
                self._failed(event)
            case Started(who=who, pid=pid):
                self._pids[who] = pid
            case Exited(who=who, code=code):
                self._exits[who] = code
                if self._company is None and not self._stopping and self._workers <= self._exits.keys():
                    self._alarm = self._alarm or (time.monotonic() + SERVERS_S, self._servers_stayed)
            case _:
                pass

    def _unit_ended(self, unit: _Unit) -> None:
        for line in unit.lines.drain():
            with contextlib.suppress(ValueError):  # a killed unit may leave half a line
                self._tell(from_json(line.decode()))
        if unit.lines.fd in self._selector.get_map():
            self._selector.unregister(unit.lines.fd)
        code = unit.process.returncode
        self._tell(Exited(unit.who, unit.process.pid, code))
        if code and not self._stopping and (code < 0 or not self._failures):
            text = f"{unit.who} (pid {unit.process.pid}) {ending(code)}"
            self._tell(Failed(unit.who, "died", text, log_tail(unit.log)))

    def _forkserver_ended(self, log: Path) -> None:
        assert self._forkserver is not None
        process = self._forkserver.process
        self._processes(Exited("forkserver", process.pid, process.returncode))
        if not self._stopping:
            text = f"forkserver (pid {process.pid}) {ending(process.returncode)}"
            self._tell(Failed("forkserver", "died", text, log_tail(log)))

    # Ending

    def _failed(self, failed: Failed) -> None:
        if self._stopping:  # what fails while it is asked to end explains nothing
            return
        self._failures.append(failed)
        first = str(MAIN)  # whoever finds the same fault sooner must not silence the one whose words are shown
        if failed.kind in ("program", "config") and (failed.who == first or first in self._exits):
            self._decide()  # nothing explains these
        elif len(self._failures) == 1:
            self._alarm = (time.monotonic() + CAUSE_S, self._decide)

    def _decide(self) -> None:
        """It is known why the job cannot go on here; elsewhere there may be a reason for that."""
        cause = choose_cause(self._failures)
        if self._company is None or cause is None:
            self._stop()
        elif not self._stopping:
            self._alarm = (time.monotonic() + DECIDE_S, self._stop)
            self._company.tell(cause)

    def _decided(self) -> None:
        assert self._company is not None
        self._selector.unregister(self._company.fileno())
        self._stop()

    def _servers_stayed(self) -> None:
        stayed = ", ".join(who for who in self._pids if who.startswith("server") and who not in self._exits)
        text = f"{stayed or 'a unit'} did not end within {SERVERS_S:g} s after the last worker"
        self._tell(Failed("launcher", "internal", text, ""))
        self._stop()

    def _signalled(self) -> None:
        self._signals.woken.recv(64)
        if self._signals.came and self._company is not None:
            self._company.signalled(self._signals.came[0])
        if len(self._signals.came) > 1:
            self._kill()
        elif self._signals.came:
            self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._alarm = (time.monotonic() + END_S, self._kill)
        for unit in self._units:
            unit.ask_to_stop()

    def _kill(self) -> None:
        for unit in self._units:
            unit.process.kill()

    def destroy(self) -> None:
        """End whatever is left; a second time finds nothing."""
        self._stopping = True
        self._kill()
        for unit in self._units:
            unit.process.wait()
            for pipe in (unit.process.stdin, unit.process.stdout):
                assert pipe is not None
                pipe.close()
        if self._forkserver is not None:
            code = self._forkserver.close()
            self._processes(Exited("forkserver", self._forkserver.process.pid, code))
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        self._selector.close()
        sweep(self._mark)


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Take over the signals that end a job, those that are not ignored, on the main thread alone."""
    woken, waker = socket.socketpair()
    came: list[int] = []
    with woken, waker:
        waker.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield Signals(came, woken)
            return
        former = {number: signal.getsignal(number) for number in _SIGNALS}
        taken = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
        former_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            for number in taken:
                signal.signal(number, lambda number, _: came.append(number))
            yield Signals(came, woken)
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)
