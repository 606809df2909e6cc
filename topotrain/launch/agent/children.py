"""A unit's side of its children: which there are, what each is given, and the descriptors that lead to it.

Rule: here a child is only started and described; who listens to it, and when it must end, is decided in supervisor.py.
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
"""The worker whose output reaches the terminal."""


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """What is called in a worker and in a server process, and what a forkserver has loaded for it."""

    worker: str = "topotrain.launch.runtime.entry_points:run_worker"
    server: str = "topotrain.launch.runtime.entry_points:run_servers"
    preload: tuple[str, ...] = forkserver.PRELOAD


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """Which start of the whole job this is, from 0, and the manifest that it goes on from; "": the beginning.

    absent: worker groups that are not started with the others. why: this one, for the logs; "": something was lost.
    """

    number: int = 0
    resume: str = ""
    absent: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """What all children of a unit have in common.

    `sockets` is a short path of a folder for this user alone, which is removed when the job has ended, however
    it ends.
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
    """A worker process, or the process of a unit's servers.

    `events` come over its control channel; `outputs`, by stream name, are the pipes of the main worker alone, whose
    output the unit also writes to the log. The other children write to their log themselves. `fds` are memfds that it
    shares, which stay the unit's. `announced`: it has said that it is about to end. `doomed`: it must end, since
    another one takes its place. `deaf_from`: when its channel ended, before the process itself did.
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
        """The first resident speaks for all."""
        return str(self.residents[0])

    def write_log(self, output: bytes) -> OSError | None:
        """Add to the log; returns what went wrong, the first time that something does."""
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
    """The residents of each process of a unit, servers first (or beside their workers), with the memfds it gets.

    Workers that share parameter values get one and the same memfd, empty and to be sealed by them; it stays open here,
    so that a worker that is started again finds it.
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
    """A child to be made: who lives in it, the memfds that it gets, and the incarnation of its workers' group.

    again: why there is a second one; "" for the first. seats: of a server's process, as
    `seats.ReplicaPlacement.to_data` has them. guest: the layout has it in another unit, which is gone.
    """

    residents: tuple[Address, ...]
    fds: tuple[int, ...]
    incarnation: int = 0
    again: str = ""
    seats: list[list[int]] = field(default_factory=list)
    guest: bool = False


def start(client: forkserver.ForkserverClient, home: UnitConfig, calls: EntryPoints, birth: ChildSpec) -> Child:
    """Ask the forkserver for one child. Raises OSError when the log cannot be written or the forkserver is gone."""
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
    """The log of a job is one file per resident, however often its process was made; a line stands between two."""
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
    """The writing end of a pipe that the unit reads."""
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
