"""A unit's side of its children: which there are, what each is given, and the descriptors that lead to it.

Rule: here a child is only started and described; who listens to it, and when it must end, is decided in unit.py.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topotrain import textproto
from topotrain.job import Job
from topotrain.launch import forkserver
from topotrain.launch.lines import Lines, Raw
from topotrain.topology import Address, Role, Topology

MAIN = Address(Role.WORKER, 0, 0)
"""The worker whose output reaches the terminal."""


@dataclass(frozen=True, slots=True)
class Calls:
    """What is called in a worker and in a server process, and what a forkserver has loaded for it."""

    worker: str = "topotrain.front.process:run_worker"
    server: str = "topotrain.front.process:run_servers"
    preload: tuple[str, ...] = forkserver.PRELOAD


@dataclass(frozen=True, slots=True)
class Home:
    """What all children of a unit have in common.

    `sockets` is a short path of a folder for this user alone, which is removed when the job has ended, however it ends.
    """

    job: Job
    unit: int
    rendezvous: str
    run_dir: Path
    sockets: str
    hosts: tuple[int, ...] = ()
    host: str = "127.0.0.1"

    @property
    def logs(self) -> Path:
        return Path(self.job.workspace).absolute() / "logs"


@dataclass(slots=True)
class Child:
    """A worker process, or the process of a unit's servers.

    `events` come over its control channel; `outputs`, by stream name, are the pipes of the main worker alone, whose
    output the unit also writes to the log. The other children write to their log themselves.
    """

    residents: tuple[Address, ...]
    log: Path
    control: socket.socket
    events: Lines
    outputs: dict[str, Raw] = field(default_factory=dict)
    log_fd: int = -1
    pid: int = 0
    code: int | None = None
    failed: bool = False

    @property
    def who(self) -> str:
        """The first resident speaks for all."""
        return str(self.residents[0])

    def write_log(self, output: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end the job
            os.write(self.log_fd, output)

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


def start(
    client: forkserver.Client, home: Home, calls: Calls, residents: tuple[Address, ...], fds: tuple[int, ...]
) -> Child:
    """Ask the forkserver for one child. Raises OSError when the log cannot be written or the forkserver is gone."""
    home.logs.mkdir(parents=True, exist_ok=True)
    control, theirs = socket.socketpair()
    control.setblocking(False)
    serving = residents[0].role is Role.SERVER
    log = home.logs / _log_name(home.unit, residents[0])
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    child = Child(residents, log, control, Lines(control.fileno()))
    if MAIN in residents:
        child.log_fd = log_fd
        given = [_pipe(child, stream) for stream in ("stdout", "stderr")]
    else:
        given = [log_fd]
    try:
        client.spawn(
            forkserver.Request(
                who=child.who,
                call=calls.server if serving else calls.worker,
                spec=_spec(home, child, bool(fds)),
                control=theirs.fileno(),
                stdout=given[0],
                stderr=given[-1],
                fds=fds,
                ignore_sigint=serving,
            )
        )
    finally:
        theirs.close()
        for fd in given:
            os.close(fd)
    return child


def _log_name(unit: int, first: Address) -> str:
    return f"servers-unit-{unit}.log" if first.role is Role.SERVER else f"worker-{first.group}-{first.index}.log"


def _pipe(child: Child, stream: str) -> int:
    """The writing end of a pipe that the unit reads."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    child.outputs[stream] = Raw(ours)
    return theirs


def _spec(home: Home, child: Child, shared_memfd: bool) -> dict[str, Any]:
    def pairs(role: Role) -> list[list[int]]:
        return [[a.group, a.index] for a in child.residents if a.role is role]

    return {
        "who": child.who,
        "job": textproto.dumps(home.job),
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
        "incarnation": 0,
        "shared_memfd": shared_memfd,
        "log": str(child.log),
    }
