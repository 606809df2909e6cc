"""The launcher's handles of its units' processes, and the table of all processes."""

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config.private_files import open_file
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Exited, Started
from topotrain.launch import TABLE, UnitPlace, arguments, own_python
from topotrain.launch.agent.children import AttemptInfo, EntryPoints
from topotrain.launch.agent.orphans import ForkserverProcess, end
from topotrain.launch.agent.pipes import LineReader, LineWriter


@dataclass(slots=True)
class UnitProcess:
    """A running unit: its process, its events, and the log of its stderr."""

    rank: int
    process: "subprocess.Popen[bytes]"
    lines: LineReader
    log: Path
    commands: LineWriter = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdin is not None
        # A stopped unit does not read its commands, and must not block the loop that kills it.
        os.set_blocking(self.process.stdin.fileno(), False)
        self.commands = LineWriter(self.process.stdin.fileno())

    @property
    def who(self) -> str:
        return f"unit {self.rank}"

    def command(self, command: str, **values: Any) -> None:
        """Send a command to the unit; `supervisor.py` lists the commands."""
        self.commands.put(json.dumps({"command": command, **values}).encode())

    def close(self) -> None:
        """End the process, and close its pipes."""
        end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start_unit(
    place: UnitPlace, calls: EntryPoints, attempt: AttemptInfo, environ: Mapping[str, str], log: Path
) -> UnitProcess:
    """Start the unit at `place`. Raises OSError."""
    option, variable = TABLE["rendezvous"]
    words = arguments(place)
    if "@" in place.rendezvous:  # all users of this host can read a command line, and a URL may contain a password
        at = words.index(option)
        del words[at : at + 2]
        environ = {**environ, variable: place.rendezvous}
    # Its own stdin has the commands. The script's is that of this process, as under `python`.
    script_stdin = os.dup(0)
    command = [*own_python("topotrain.launch.agent.unit_main"), *words, "--stdin", str(script_stdin)]
    command += ["--worker-call", calls.worker, "--server-call", calls.server]
    command += ["--life", str(attempt.number), "--resume", attempt.resume]
    command += ["--absent", ",".join(map(str, sorted(attempt.absent))), "--why", attempt.why]
    with os.fdopen(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        try:
            # A session of its own: Ctrl-C in the terminal reaches the launcher only, which decides about its units.
            process = subprocess.Popen(
                command, env=environ, start_new_session=True, bufsize=0, pass_fds=[script_stdin], **pipes
            )
        finally:
            os.close(script_stdin)
    assert process.stdout is not None
    # The loop reads all units, so no read may wait for one of them.
    os.set_blocking(process.stdout.fileno(), False)
    return UnitProcess(place.rank, process, LineReader(process.stdout.fileno()), log)


class UnitProcesses:
    """The units that run on this host.

    Args:
        selector: of the launcher's loop. The loop calls the data of a descriptor when it becomes readable.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._units: list[UnitProcess] = []
        self._pidfds: list[int] = []

    @property
    def running(self) -> bool:
        """Whether a unit has not ended yet."""
        return any(unit.process.returncode is None for unit in self._units)

    def add(self, unit: UnitProcess) -> None:
        """Add a unit that was started."""
        self._units.append(unit)

    def watch(self, process: "subprocess.Popen[bytes] | ForkserverProcess", ended: Callable[[], None]) -> None:
        """Let the loop call `ended` once, after the end of a process."""
        # Not SIGCHLD: a signal has one handler per process, and a program that embeds the launcher may have its own.
        pidfd = os.pidfd_open(process.pid)
        self._pidfds.append(pidfd)

        def once() -> None:
            # A pidfd stays readable after the end, so it would be reported again and again.
            self._selector.unregister(pidfd)
            # Reaps it at once; it has ended, so this does not block.
            process.wait()
            ended()

        self._selector.register(pidfd, selectors.EVENT_READ, once)

    def command(self, command: str, ranks: Collection[int] | None = None, **values: Any) -> None:
        """Send a command to the units of these ranks; None: to all."""
        for unit in self._units:
            if ranks is None or unit.rank in ranks:
                unit.command(command, **values)

    def write(self) -> None:
        """Write the commands that the pipes of their units did not take at once."""
        for unit in self._units:
            unit.commands.write()

    def kill(self) -> None:
        """Kill all units. Their processes end with them."""
        for unit in self._units:
            unit.process.kill()

    def close(self) -> None:
        """Kill all units, and close their pipes. A second call does nothing."""
        self.kill()
        for unit in self._units:
            unit.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        # A descriptor number may be reused, so a second call must not close it again.
        self._pidfds.clear()


class ProcessTable:
    """The pids and exit codes of the processes in the units of a layout."""

    def __init__(self, topology: Topology) -> None:
        self._residents = {unit.rank: {str(who) for who in (*unit.workers, *unit.servers)} for unit in topology.units}
        self.workers = {str(worker) for unit in topology.units for worker in unit.workers}
        self.has_all_workers = len(self.workers) == topology.worker_groups * topology.workers_per_group
        self.pids: dict[str, int] = {}
        self.exits: dict[str, int] = {}

    def on_event(self, event: Event) -> None:
        """Record the start or the end of a process."""
        match event:
            case Started(who=who, pid=pid):
                self.pids[who] = pid
                # A restarted process: the exit code is that of the one before it.
                self.exits.pop(who, None)
            case Exited(who=who, code=code):
                self.exits[who] = code
            case _:
                pass

    def have_workers_ended(self, missing: Collection[str]) -> bool:
        """Whether all workers have ended, besides those that are missing."""
        return self.workers - set(missing) <= self.exits.keys()

    def unended(self, rank: int, missing: Collection[str], started: bool) -> list[str]:
        """Return the processes of a unit that were not seen to end.

        started: only those that were seen to start.
        """
        found = self._residents.get(rank, set()) - set(missing) - self.exits.keys()
        return sorted(found & self.pids.keys() if started else found)
