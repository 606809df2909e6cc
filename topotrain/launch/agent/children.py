"""The child processes of a unit: their description, start and descriptors.

This module only starts and describes children. `supervisor.py` reads their events and ends them.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain.config import job_file
from topotrain.config.job import Job
from topotrain.config.private_files import close_folder, open_file
from topotrain.config.topology import Address, Role, Topology
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.pipes import LineReader, OutputReader

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
    """

    job: Job
    unit: int
    rendezvous: str
    run_dir: Path
    sockets: str
    hosts: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    life: AttemptInfo = AttemptInfo()

    @property
    def logs(self) -> Path:
        return Path(self.job.workspace).absolute() / "logs"


@dataclass(slots=True)
class Child:
    """A worker process, or the server process of a unit.

    events: the events from its control channel.
    outputs: by stream name, the pipes of the main worker. The unit also writes that output to the log. Other children
        write to their logs themselves.
    fds: the shared memfds, which belong to the unit.
    announced: the child has announced its end.
    doomed: the child must end, because another process replaces it.
    deaf_from: the time at which its channel ended while the process still ran.
    """

    residents: tuple[Address, ...]
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
    doomed: bool = False
    deaf_from: float | None = None

    @property
    def who(self) -> str:
        """The name of the first resident, which stands for all of them."""
        return str(self.residents[0])

    def write_log(self, output: bytes) -> OSError | None:
        """Append to the log.

        Returns the first error, and None after that.
        """
        try:
            while output:
                output = output[os.write(self.log_fd, output) :]
        except OSError as error:
            first, self.log_failed = not self.log_failed, True
            return error if first else None
        return None

    def close(self) -> None:
        self.control.close()
        for fd in [lines.fd for lines in self.outputs.values()] + [self.log_fd] * bool(self.outputs):
            os.close(fd)


def members(topology: Topology, rank: int) -> Iterator[tuple[tuple[Address, ...], tuple[int, ...]]]:
    """Yield the residents and the memfds of each process of a unit.

    Server processes come first, except where servers run inside the processes of their workers. Workers that share
    parameter values get the same memfd, which is empty and which the workers seal. It stays open in the unit, so that a
    restarted worker can map it again.
    """
    unit = topology.units[rank]
    if topology.inline:
        yield from ((pair, ()) for pair in zip(unit.workers, unit.servers, strict=True))
        return
    shared: dict[Address, tuple[int]] = {}
    for number, sharing in enumerate(topology.sharing(rank)):
        memory = os.memfd_create(f"values-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        shared.update(dict.fromkeys(sharing, (memory,)))
    if unit.servers:
        yield unit.servers, ()
    for worker in unit.workers:
        yield (worker,), shared.get(worker, ())


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child process to start.

    residents: the workers or servers in it. fds: the memfds that it gets. incarnation: that of its worker group.
    again: the reason of a restart; "" for the first start.
    seats: for a server process, the data of `ReplicaPlacement.to_data`.
    guest: the layout has this process in another unit, which is gone.
    """

    residents: tuple[Address, ...]
    fds: tuple[int, ...]
    incarnation: int = 0
    again: str = ""
    seats: list[list[int]] = field(default_factory=list)
    guest: bool = False


def start(client: forkserver.ForkserverClient, home: UnitConfig, calls: EntryPoints, birth: ChildSpec) -> Child:
    """Request one child from the forkserver.

    Raises OSError when the log cannot be written or the forkserver is gone.
    """
    close_folder(home.logs)
    control, theirs = socket.socketpair()
    control.setblocking(False)
    first = birth.residents[0]
    serving = first.role is Role.SERVER
    log = home.logs / _log_name(home.unit, first, birth)
    log_fd = _open_log(log, home, birth)
    child = Child(birth.residents, birth.fds, log, control, LineReader(control.fileno()))
    if MAIN in birth.residents:
        child.log_fd = log_fd
        given = [_pipe(child, stream) for stream in ("stdout", "stderr")]
    else:
        given = [log_fd]
    try:
        client.spawn(
            forkserver.ForkRequest(
                who=child.who,
                call=calls.server if serving else calls.worker,
                spec=_spec(home, child, birth.incarnation, birth.seats),
                control=theirs.fileno(),
                stdout=given[0],
                stderr=given[-1],
                fds=birth.fds,
                ignore_sigint=serving,
            )
        )
    finally:
        theirs.close()
        for fd in given:
            os.close(fd)
    return child


def _open_log(log: Path, home: UnitConfig, birth: ChildSpec) -> int:
    """Open the log of a child.

    All attempts of a resident write to one file. A line separates two attempts.
    """
    again = birth.again or home.life.why or ("the whole job starts again" if home.life.number else "")
    fd = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if again else os.O_TRUNC))
    if again:
        with contextlib.suppress(OSError):
            os.write(fd, f"--- {birth.residents[0]} starts again: {again} ---\n".encode())
    return fd


def _log_name(unit: int, first: Address, birth: ChildSpec) -> str:
    if birth.guest:
        return f"server-{first.group}-{first.index}-in-unit-{unit}.log"
    return f"servers-unit-{unit}.log" if first.role is Role.SERVER else f"worker-{first.group}-{first.index}.log"


def _pipe(child: Child, stream: str) -> int:
    """Return the writing end of a pipe that the unit reads."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    child.outputs[stream] = OutputReader(ours)
    return theirs


def _spec(home: UnitConfig, child: Child, incarnation: int, seats: list[list[int]]) -> dict[str, Any]:
    def pairs(role: Role) -> list[list[int]]:
        return [[a.group, a.index] for a in child.residents if a.role is role]

    return {
        "who": child.who,
        "job": job_file.dumps(home.job),
        "unit": home.unit,
        "workers": pairs(Role.WORKER),
        "servers": pairs(Role.SERVER),
        "rendezvous": home.rendezvous,
        "run_dir": str(home.run_dir),
        "sockets": home.sockets,
        "hosts": list(home.hosts),
        "host": home.host,
        "program": home.job.program,
        "args": list(home.job.args),
        "incarnation": incarnation,
        "seats": seats,
        "resume": home.life.resume,
        "shared_memfd": bool(child.fds),
        "log": str(child.log),
    }
