"""The child processes of a unit: how they start, restart and are signaled.

`supervisor.py` reads the events of the children.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.private_files import close_folder, open_file
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import Connects, Ending, Event, Failed
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domains
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.pipes import LineReader, LineWriter, OutputReader
from topotrain.launch.agent.workspace import log_name
from topotrain.launch.log_lines import LineStamps

MAIN = Address(Role.WORKER, 0, 0)
"""The main worker. Its output reaches the terminal."""


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """The functions that worker and server processes call.

    preload: the modules that a forkserver imports in advance.
    """

    worker: str = "topotrain.launch.runtime.entry_points:run_worker"
    server: str = "topotrain.launch.runtime.entry_points:run_servers"
    preload: tuple[str, ...] = forkserver.PRELOAD


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One attempt of the whole job.

    number: 0 for the first attempt.
    resume: the manifest of the snapshot that the attempt resumes from. "": the job starts at step 0.
    absent: the worker groups that do not start with the others.
    why: the reason of the attempt, for the logs; "": a process was lost.
    """

    number: int = 0
    resume: str = ""
    absent: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """The settings that all children of a unit share.

    sockets: a short path of a folder for this user alone, which is removed when the job ends, however it ends.
    threads: of each worker, as `worker_threads` returns it.
    link_mbit: the measured speed of the slowest link between units. 0: not measured.
    token: the secret of this start of the job, in hexadecimal. A later process must not depend on its file.
    stdin: that of the main worker; -1: none.
    """

    job: Job
    unit: int
    rendezvous: str
    run_dir: Path
    sockets: str
    hosts: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    attempt: AttemptInfo = AttemptInfo()
    threads: int = 0
    link_mbit: float = 0.0
    token: str = field(default="", repr=False)
    stdin: int = -1

    @property
    def logs(self) -> Path:
        return Path(self.job.workspace).absolute() / "logs"


@dataclass(slots=True)
class Child:
    """A worker process, or the server process of a unit.

    events: the events from its control channel.
    outputs: by stream name, the pipes of the main worker. The unit also writes that output to the log. Other children
        write to their logs themselves.
    stamps: for the lines that the unit writes to the log.
    fds: the shared memfds, which belong to the unit.
    announced: the child has announced its end.
    begun: the child, or one in its place before, has come to `tt.prepare`.
    doomed: the child must end, because another process replaces it.
    unreachable_since: the time at which its channel ended while the process still ran.
    commands: the commands to it, where the channel did not take them at once.
    """

    addresses: tuple[Address, ...]
    fds: tuple[int, ...]
    log: Path
    control: socket.socket
    events: LineReader
    outputs: dict[str, OutputReader] = field(default_factory=dict)
    log_fd: int = -1
    pid: int = 0
    code: int | None = None
    failed: bool = False
    log_failed: bool = False
    announced: bool = False
    begun: bool = False
    doomed: bool = False
    unreachable_since: float | None = None
    commands: LineWriter = field(init=False)
    stamps: LineStamps = field(init=False)

    def __post_init__(self) -> None:
        self.commands = LineWriter(self.control.fileno())
        self.stamps = LineStamps(self.who)

    @property
    def who(self) -> str:
        """The name of the first server or worker, which stands for all of them."""
        # The forkserver and the events name a process by one address, however many servers are in it.
        return str(self.addresses[0])

    @property
    def is_server(self) -> bool:
        return self.addresses[0].role is Role.SERVER

    def belongs_to(self, group: int) -> bool:
        """Whether this is a worker of the group."""
        return not self.is_server and self.addresses[0].group == group

    def on_event(self, event: Event) -> None:
        """Record how far the child has come."""
        self.begun |= isinstance(event, Connects)
        self.announced |= isinstance(event, Ending)
        self.failed |= isinstance(event, Failed)

    def on_fork(self, pid: int) -> None:
        """Record that the process exists."""
        self.pid = pid

    def on_channel_end(self, now: float) -> None:
        """Record that the child has closed its channel."""
        self.unreachable_since = now

    def doom(self) -> None:
        """Record that the unit ends this process, so its end is no loss."""
        self.doomed = True

    def command(self, words: Mapping[str, Any]) -> None:
        """Send a command to the process. A process that is not ready yet reads it later."""
        self.commands.put(json.dumps(words).encode())

    def write_log(self, output: bytes) -> OSError | None:
        """Append to the log; return the first error, and None after that.

        A full disk does not end the job.
        """
        output = self.stamps.stamped(output, time.time())
        try:
            while output:
                # A nearly full disk may take a part of the output only.
                output = output[os.write(self.log_fd, output) :]
        except OSError as error:
            # One notice is enough: the disk stays full for the following lines, too.
            first, self.log_failed = not self.log_failed, True
            return error if first else None
        return None

    def close(self, code: int) -> None:
        """Record the exit code, and close the descriptors."""
        self.code = code
        self.control.close()
        # Only the log of a child with outputs is still open here; all others belong to the child since the fork.
        for fd in [lines.fd for lines in self.outputs.values()] + [self.log_fd] * bool(self.outputs):
            os.close(fd)


def members(topology: Topology, rank: int) -> Iterator[tuple[tuple[Address, ...], tuple[int, ...]]]:
    """Yield the addresses and the memfds of each process of a unit.

    Server processes come first, except where servers run inside the processes of their workers. Workers that share
    parameter values get the same memfd, which is empty and which the workers seal.
    """
    unit = topology.units[rank]
    if topology.inline:
        yield from ((pair, ()) for pair in zip(unit.workers, unit.servers, strict=True))
        return
    shared: dict[Address, tuple[int]] = {}
    for number, sharing in enumerate(topology.sharing(rank)):
        # The size follows from the model, which no process knows yet.
        # The unit keeps it open, so that a restarted worker can map it again.
        memory = os.memfd_create(f"values-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        shared.update(dict.fromkeys(sharing, (memory,)))
    if unit.servers:
        yield unit.servers, ()
    for worker in unit.workers:
        yield (worker,), shared.get(worker, ())


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child process to start.

    addresses: the workers or servers in it. fds: the memfds that it gets. incarnation: that of its worker group.
    again: the reason of a restart; "" for the first start.
    seats: for a server process, the data of `ReplicaPlacement.to_data`.
    moved: the layout has this process in another unit, which is gone.
    """

    addresses: tuple[Address, ...]
    fds: tuple[int, ...]
    incarnation: int = 0
    again: str = ""
    seats: list[list[int]] = field(default_factory=list)
    moved: bool = False


def start(client: forkserver.ForkserverClient, unit: UnitConfig, calls: EntryPoints, spec: ChildSpec) -> Child:
    """Request one child from the forkserver.

    Raises OSError when the log cannot be written or the forkserver is gone.
    """
    # The script may have made the folder readable for others, or removed it, between two attempts.
    close_folder(unit.logs)
    control, theirs = socket.socketpair()
    # The unit has one thread, and no child may stop it by not reading.
    control.setblocking(False)
    first = spec.addresses[0]
    serving = first.role is Role.SERVER
    log = unit.logs / log_name(first, unit.unit, spec.moved)
    log_fd = _open_log(log, unit, spec)
    # Only the main worker's output passes through the unit, which also writes it to the log.
    shown = MAIN in spec.addresses
    fd = log_fd if shown else -1
    child = Child(spec.addresses, spec.fds, log, control, LineReader(control.fileno()), log_fd=fd)
    child.begun = bool(serving or spec.incarnation or unit.attempt.number)
    given = [_pipe(child, stream) for stream in ("stdout", "stderr")] if shown else [log_fd]
    try:
        client.spawn(
            forkserver.ForkRequest(
                who=child.who,
                call=calls.server if serving else calls.worker,
                spec=_spec(unit, child, spec.incarnation, spec.seats),
                control=theirs.fileno(),
                # A child without outputs of its own writes both streams to its log.
                stdout=given[0],
                stderr=given[-1],
                fds=spec.fds,
                ignore_sigint=serving,
                # The unit stamps the lines of the main worker, which the terminal gets without stamps.
                stamp="" if shown else child.who,
                stdin=unit.stdin if shown else -1,
            )
        )
    finally:
        # The child has its copies now. While the unit held one open, it would never read the end of file.
        theirs.close()
        for fd in given:
            os.close(fd)
    return child


def _open_log(log: Path, unit: UnitConfig, spec: ChildSpec) -> int:
    """Open the log of a child."""
    again = spec.again or unit.attempt.why or ("the whole job starts again" if unit.attempt.number else "")
    # All attempts of an address write to one file, so only the first one truncates it.
    fd = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if again else os.O_TRUNC))
    if again:
        # A full disk must not keep a process from restarting.
        with contextlib.suppress(OSError):
            header = f"--- {spec.addresses[0]} starts again: {again} ---\n".encode()
            os.write(fd, LineStamps(str(spec.addresses[0])).stamped(header, time.time()))
    return fd


def _pipe(child: Child, stream: str) -> int:
    """Return the writing end of a pipe that the unit reads."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    child.outputs[stream] = OutputReader(ours)
    return theirs


def _spec(unit: UnitConfig, child: Child, incarnation: int, seats: list[list[int]]) -> dict[str, Any]:
    def pairs(role: Role) -> list[list[int]]:
        return [[a.group, a.index] for a in child.addresses if a.role is role]

    return {
        "who": child.who,
        "job": job_file.dumps(unit.job),
        "unit": unit.unit,
        "workers": pairs(Role.WORKER),
        "servers": pairs(Role.SERVER),
        "rendezvous": unit.rendezvous,
        "run_dir": str(unit.run_dir),
        "token": unit.token,
        "sockets": unit.sockets,
        "hosts": list(unit.hosts),
        "host": unit.host,
        "link_mbit": unit.link_mbit,
        "program": unit.job.program,
        "args": list(unit.job.args),
        "incarnation": incarnation,
        "seats": seats,
        "resume": unit.attempt.resume,
        "shared_memfd": bool(child.fds),
        "threads": 0 if child.is_server else unit.threads,
        "log": str(child.log),
    }


class Children:
    """The children of a unit, and those that wait for their start.

    Args:
        client: the connection to the forkserver.
        unit: the settings of the unit.
        topology: the layout of the job.
        calls: the functions that children run.
    """

    def __init__(
        self, client: forkserver.ForkserverClient, unit: UnitConfig, topology: Topology, calls: EntryPoints
    ) -> None:
        self._client, self._unit, self._topology, self._calls = client, unit, topology, calls
        replicated = unit.job.cluster.replicas > 1
        self._seats = ReplicaPlacement(domains(topology)).to_data() if replicated else []
        self._all: list[Child] = []
        self._absent: list[ChildSpec] = []  # of groups that are absent at the start
        self._restarts: dict[tuple[int, str], tuple[int, str]] = {}  # (group, worker or "") -> incarnation, reason
        self._vacant: dict[str, tuple[int, str]] = {}  # server -> number and reason of a process to be replaced

    def start(self) -> Iterator[Child]:
        """Start the processes of the unit, besides those of absent groups."""
        for addresses, fds in members(self._topology, self._unit.unit):
            spec, first = ChildSpec(addresses, fds, seats=self._seats), addresses[0]
            if first.role is Role.WORKER and first.group in self._unit.attempt.absent:
                self._absent.append(spec)
            else:
                yield self._start(spec)

    def _start(self, spec: ChildSpec) -> Child:
        child = start(self._client, self._unit, self._calls, spec)
        self._all.append(child)
        return child

    @property
    def living(self) -> list[Child]:
        """The children that have not ended."""
        return [child for child in self._all if child.code is None]

    @property
    def ended_well(self) -> bool:
        """Whether all have ended with exit code 0."""
        return all(child.code == 0 for child in self._all)

    def with_pid(self, pid: int) -> Child:
        """Return the child with this process ID."""
        # The system may have given the ID of one that has ended to another.
        return next(child for child in self._all if child.pid == pid and child.code is None)

    def named(self, who: str) -> Child:
        """Return the child of this name."""
        return next(child for child in self._all if child.who == who)

    def command(self, who: str, words: Mapping[str, Any]) -> None:
        """Send a command to the process of an address."""
        for child in self.living:
            # A server process has several addresses, and a command may name any of them.
            if who in map(str, child.addresses):
                child.command(words)

    def signal(self, child: Child, number: int, group: bool = False) -> None:
        """Signal a child, or its process group."""
        if child.pid:
            with contextlib.suppress(OSError):  # a forkserver that is gone is noticed by its end of file
                self._client.signal(child.pid, number, group)

    def end(self, children: Iterable[Child]) -> None:
        """Kill these children."""
        for child in children:
            # The launcher knows the reason, so their ends are not reported as losses.
            child.doom()
            self.signal(child, signal.SIGKILL, group=True)

    def kill_groups(self) -> None:
        """Kill the children's process groups without the forkserver."""
        for child in self.living:
            # Only right after the death of the forkserver or the launcher: then the kernel has not reused a pid yet.
            if child.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)

    def restart(self, group: int, incarnation: int, why: str, who: str = "") -> list[Child]:
        """End the workers of a group, or one of them, and start new ones.

        They start when the last of the former processes has ended. Returns the children that were started at once.
        """
        # A later request replaces one that still waits: the group restarts once, with the newest incarnation.
        if not who:
            self._restarts = {key: value for key, value in self._restarts.items() if key[0] != group}
        self._restarts[group, who] = incarnation, why
        self.end(child for child in self._former(group, who) if child.code is None and not child.doomed)
        return self._restart_due(group)

    def _former(self, group: int, who: str) -> list[Child]:
        return [child for child in self._all if child.belongs_to(group) and who in ("", child.who)]

    def _restart_due(self, group: int) -> list[Child]:
        """Start the workers of a group after the end of its former processes."""
        started = []
        for key in [key for key in self._restarts if key[0] == group]:
            former = self._former(*key)
            # Old and new processes would share memory, so the last old one must be gone.
            if any(child.code is None for child in former):
                continue
            incarnation, why = self._restarts.pop(key)
            # A group that joins for the first time has no former processes to take the addresses from.
            first = [spec for spec in self._absent if spec.addresses[0].group == group]
            self._absent = [spec for spec in self._absent if spec not in first]
            # Before the new ones start: `named` and `with_pid` must find the new process of an address.
            self._all = [child for child in self._all if child not in former]
            places = [(child.addresses, child.fds) for child in former] + [(spec.addresses, spec.fds) for spec in first]
            for addresses, fds in places:
                started.append(self._start(ChildSpec(addresses, fds, incarnation, why)))
        return started

    def place_replica(self, who: str, unit: int, number: int, why: str, seats: list[list[int]]) -> list[Child]:
        """Update the replica placement after the death of a server process.

        Returns the replacement if this unit is to host it and it was started at once.
        """
        # Kept for processes that start later, which get no command about it.
        self._seats = seats
        for child in self.living:
            if child.is_server and child.who != who:
                # The lost process itself gets no command: its successor starts with the new placement.
                child.command({"command": "seats", "seats": seats})
        former = [child for child in self._all if child.who == who]
        # It may still run, for example frozen, and must not answer beside its replacement.
        self.end(child for child in former if child.code is None)
        if unit != self._unit.unit:
            return []
        if former:
            # The old process may still hold its memory and its port, so the new one waits for its end.
            self._vacant[who] = number, why
            return self._replace_due(running=True)
        # This unit never had the server: it replaces a server of a lost unit.
        addresses = tuple(r for each in self._topology.units for r in each.servers if str(r) == who)
        return [self._replace(addresses, number, why)]

    def _replace_due(self, running: bool) -> list[Child]:
        """Start the replacement of each lost server after its former process's end."""
        started = []
        for child in [c for c in self._all if c.who in self._vacant and c.code is not None]:
            number, why = self._vacant.pop(child.who)
            # The replacement has the same name, by which `named` must find it.
            self._all.remove(child)
            if running:
                started.append(self._replace(child.addresses, number, why))
        return started

    def _replace(self, addresses: tuple[Address, ...], number: int, why: str) -> Child:
        moved = self._topology.unit_of(addresses[0]) != self._unit.unit
        return self._start(ChildSpec(addresses, (), number, why, self._seats, moved))

    def on_exit(self, child: Child, running: bool) -> list[Child]:
        """Start the processes that have waited for the end of this one.

        running: the unit does not end. Returns the new children.
        """
        restarted = self._restart_due(child.addresses[0].group) if running else []
        return restarted + self._replace_due(running)
