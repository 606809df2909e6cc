"""The entry points of a job's processes, which the forkserver calls after a fork."""

import contextlib
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from topotrain.comm.router import RouterConfig
from topotrain.comm.store import open_store
from topotrain.config import job_file
from topotrain.config.job import OnFailure
from topotrain.config.private_files import open_file
from topotrain.config.topology import Address, Role
from topotrain.core.events import (
    Apart,
    Counted,
    Covered,
    Differs,
    Ending,
    Event,
    Failed,
    Finished,
    Missed,
    Serving,
    Waits,
)
from topotrain.core.protocol import Fail
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.checkpoint_reader import Manifest
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotWriter, writer_for
from topotrain.extensions.elastic.eligibility import refusal
from topotrain.extensions.elastic.leave import GroupLeaving, leave
from topotrain.extensions.elastic.resize_requests import ResizeRequests, ServerProcess
from topotrain.extensions.replication.replica_host import ReplicaSlot
from topotrain.extensions.replication.replica_placement import ReplicaSet, standings
from topotrain.launch.agent.workspace import SPANS, TOKEN_FILE, profiled_step
from topotrain.launch.runtime.child_channel import ChildChannel, exit_code
from topotrain.launch.runtime.final_snapshot import FinalSnapshot
from topotrain.launch.runtime.process_exit import ProcessExitHook
from topotrain.launch.runtime.process_host import WorkerConnections, serve
from topotrain.launch.runtime.sigterm import SigtermHandler
from topotrain.launch.runtime.worker_composition import WorkerConnector, prepare_extensions
from topotrain.training import api  # noqa: F401  # loaded before the fork: every worker needs it
from topotrain.training.context import Context, enter
from topotrain.training.final_parameters import NotSaved
from topotrain.training.finish_job import SpoiledResult, Unfinished, close, finish, is_complete, kind_of
from topotrain.training.worker_profile import ProfileRecorders

_SITE = "site-packages"
_LEFT = -1


def run_servers(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Run the servers of one unit; return the exit code."""
    seating = ReplicaCommands()
    addresses = [Address(Role.SERVER, group, index) for group, index in spec["servers"]]
    orders, farewell, termination = ResizeRequests(), FinalSnapshot(str(addresses[0])), SigtermHandler()

    def hear(command: dict[str, Any]) -> None:
        termination.hear(command)
        orders.hear(command)
        farewell.hear(command)
        seating.hear(command)

    control = ChildChannel(channel, hear)
    orders.emit = farewell.emit = control.emit
    profile = _recorders(spec, addresses[0])
    serving, trouble = _voices(control, addresses[0])
    # A launcher that started all processes sees who ends; of units elsewhere nothing is seen but lost connections.
    place = _place(spec)
    termination.take_over(place.job)
    watchful = PeerLossReporter(control, partial(_comes_back, place)) if spec["hosts"] else None
    farewell.writer = writer = _writer(place, addresses, control)
    seat = _seat(spec, control, seating)
    homes: list[ServerProcess] = []

    def opened(servers: ServerProcess) -> None:
        homes.append(servers)
        orders.open(servers)

    ears = (watchful, writer, opened, seat)
    tell = partial(_tell_distance, control)
    sent, received = serve(place, addresses, serving, trouble, profile.server, *ears, ended=tell)
    profile.leave()
    for servers in homes[-1:]:  # none, where this process was made for copies that the job no longer needed
        _tell_counts(control.emit, place, servers)
    for number, me in enumerate(addresses):
        # The process counts as a whole; its first server speaks for it.
        own = (sent, received) if number == 0 else (0, 0)
        control.emit(Finished(str(me), 0, 0, 0.0, 0, *own))
    return 0


def _tell_distance(control: ChildChannel, server: Server) -> None:
    found = server.distance
    if found.exchanges:
        control.emit(Apart(str(server.me), found.exchanges, found.mean, found.most, found.share))


class ReplicaCommands:
    """Receives the unit's commands about replica placement.

    It queues them until a consumer is set.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Mapping[int, ReplicaSet]] = SimpleQueue()

    def hear(self, command: dict[str, Any]) -> None:
        """Queue a command about placement. Called on the control channel's thread."""
        if command.get("command") == "seats":
            self._queue.put(standings(command["seats"]))

    def to(self, take: Callable[[Mapping[int, ReplicaSet]], None]) -> None:
        """Pass all commands to `take`, in order, on a separate thread."""

        def live() -> None:
            while True:
                take(self._queue.get())

        threading.Thread(target=live, name="orders", daemon=True).start()


def _seat(spec: dict[str, Any], control: ChildChannel, seating: ReplicaCommands) -> ReplicaSlot | None:
    """Return the replica settings of a server process; None without replication."""
    if not spec.get("seats"):
        return None

    def covered(server: Address, shadows: int) -> None:
        control.emit(Covered(str(server), shadows))

    def differs(server: Address, shadows: int) -> None:
        control.emit(Differs(str(server), shadows))

    def missed(server: Address) -> None:
        control.emit(Missed(str(server)))

    def despair(why: str) -> None:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)

    return ReplicaSlot(standings(spec["seats"]), seating.to, covered, differs, despair, missed)


class PeerLossReporter:
    """Reports to the unit that a server lost a peer too early.

    It implements `process_host.ConnectionObserver`.

    Args:
        control: the channel to the unit.
        comes_back: returns whether a lost worker will rejoin, so that its loss is not reported.
    """

    def __init__(self, control: ChildChannel, comes_back: Callable[[Address], bool]) -> None:
        self._control, self._comes_back = control, comes_back

    def came(self, server: Server, worker: Address) -> None:
        """Do nothing."""

    def gives_up(self, server: Server, worker: Address, why: Fail) -> None:
        """Do nothing: the worker's own unit receives the failure, too."""

    def lost(self, server: Server, peer: Address, reason: str) -> None:
        """Report a lost peer, unless it had no work left here."""
        if peer.role is Role.SERVER:
            over = not server.running
        else:
            over = peer.group not in server.groups or server.has_finished(peer) or self._comes_back(peer)
        if not over:
            self._control.emit(Failed(str(server.me), "peer", f"lost {peer}: {reason}", ""))


def _tell_counts(emit: Callable[[Event], None], place: RouterConfig, homes: ServerProcess) -> None:
    """Report the sample counts of the coordinators in this process."""
    found = {home.server.me: home.server for g in range(place.topology.worker_groups) if (home := homes.coordinator(g))}
    for me, server in found.items():
        emit(Counted(str(me), {str(who): count for who, count in server.samples.items()}))


def _comes_back(place: RouterConfig, worker: Address) -> bool:
    """Return whether a lost worker's group restarts.

    If it cannot restart, unit 0 decides what follows.
    """
    return place.job.on_failure is OnFailure.kContinue and not refusal(place.job, place.topology, worker.group)


def _voices(
    control: ChildChannel, first: Address
) -> tuple[Callable[[Address, tuple[str, ...]], None], Callable[[], None]]:
    """Return the callbacks of a process's servers: reachable, and failed."""

    def serving(me: Address, urls: tuple[str, ...]) -> None:
        control.emit(Serving(str(me), urls, os.getpid()))

    def trouble() -> None:
        text = traceback.format_exc()
        control.emit(Failed(str(first), "internal", text.strip().splitlines()[-1], text))
        os._exit(1)

    return serving, trouble


def _place(spec: dict[str, Any]) -> RouterConfig:
    job = job_file.loads(spec["job"], "the job")
    token = (Path(spec["run_dir"]) / TOKEN_FILE).read_bytes()
    store = open_store(spec["rendezvous"])
    place = RouterConfig.of(job, store, token, Path(spec["sockets"]), spec["incarnation"], spec["hosts"], spec["host"])
    return replace(place, resumed=Manifest.open(spec["resume"])) if spec.get("resume") else place


def _recorders(spec: dict[str, Any], who: Address) -> ProfileRecorders:
    run_dir = Path(spec["run_dir"])
    return ProfileRecorders(profiled_step(run_dir), run_dir / SPANS, who)


def _writer(place: RouterConfig, servers: Sequence[Address], control: ChildChannel) -> SnapshotWriter | None:
    """Return the writer of these servers' snapshots; None if the job takes none.

    The writer reports snapshots to the unit, which may ask for a last one.
    """
    resumed = None if place.resumed is None else place.resumed.path
    again = place.identity.incarnation > 0
    return writer_for(place.job, place.topology, servers, resumed, again, control.emit)


def run_worker(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Run one worker: the user's program in its job; return the exit code."""
    ((group, index),) = spec["workers"]
    farewell, termination = FinalSnapshot(str(Address(Role.WORKER, group, index))), SigtermHandler()

    def hear(command: dict[str, Any]) -> None:
        termination.hear(command)
        farewell.hear(command)

    control = ChildChannel(channel, hear)
    farewell.emit = control.emit
    place = _place(spec)
    termination.take_over(place.job)
    me = Address(Role.WORKER, group, index)
    shared = fds[0] if spec["shared_memfd"] else None
    profile = _recorders(spec, me)
    serving, trouble = _voices(control, Address(Role.SERVER, 0, me.index))
    beside = [Address(Role.SERVER, 0, me.index)] if place.topology.inline else []
    farewell.writer = writer = _writer(place, beside, control) if beside else None

    def long_wait(seconds: float) -> None:
        control.emit(Waits(str(me), seconds))

    connector = WorkerConnector(serving, trouble, profile.server, writer, long_wait)
    workspace, extensions = Path(place.job.workspace).absolute(), prepare_extensions()
    here = Context(place, me, workspace, control.emit, connector, extensions, shared, spans=profile.worker())
    here.resumed = place.resumed
    enter(here)
    # The main worker's error is shown with the job's end; on its stderr the terminal would have it twice.
    log = Path(spec["log"]) if here.is_main else None
    part = _Part(here, log, profile, [Address(Role.SERVER, group, index) for group, index in spec["servers"]])
    own_end = ProcessExitHook(part)
    own_end.watch()
    here.loop_ended = own_end.watch_c
    code = _guarded(here, log, lambda: _run_program(spec["program"], spec["args"]))
    own_end.forget()
    return part.leave(code)


@dataclass(frozen=True, slots=True)
class _Part:
    """The work of a worker in its job, to be completed before the process ends.

    servers: the servers in the same process.
    """

    here: Context
    log: Path | None
    profile: ProfileRecorders
    servers: Sequence[Address]

    def is_complete(self) -> bool:
        """Whether no work is under way that other processes would miss."""
        return is_complete(self.here)

    def end(self) -> int:
        """Complete the work, and return the exit code."""
        code = self.leave(0)
        self.here.emit(Ending(str(self.here.me)))
        return code

    def leave(self, code: int) -> int:
        """Complete the work after the program's exit code; return the process's."""
        if code == 0:
            code = _guarded(self.here, self.log, lambda: finish(self.here))
        self.profile.leave()
        close(self.here, finished=code == 0)
        roads = self.here.roads
        homes = roads.beside if code == 0 and isinstance(roads, WorkerConnections) else None
        if homes is not None:
            _tell_counts(self.here.emit, self.here.place, homes)
        for server in self.servers if code == 0 else ():
            self.here.emit(Finished(str(server), 0, 0, 0.0, 0, 0, 0))
        return 0 if code == _LEFT else code


def _run_program(program: str, args: Sequence[str]) -> None:
    sys.argv = [program, *args]
    sys.path[0:1] = [str(Path(program).resolve().parent)]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as leaving:
        code = exit_code(leaving.code)
        if code:
            trace = _users_part(leaving.__traceback__)
            raise RuntimeError(f"the program left with exit code {code}").with_traceback(trace) from None


def _guarded(here: Context, log: Path | None, do: Callable[[], None]) -> int:
    """Run `do`, and return an exit code.

    An exception is reported to the unit and written to `log` (None: to stderr). _LEFT is not an exit code: it means
    that the script was stopped because its group leaves the job.
    """
    try:
        do()
        return 0
    except GroupLeaving:
        leave(here)
        return _LEFT
    except BaseException as error:  # also KeyboardInterrupt: Ctrl-C of a user comes to the launcher, and not here
        kind = kind_of(error)
        if here.worker is not None or here.tables is not None:
            here.connect().exchange.leave()  # what the others hear from here on is no cause
        trace = "".join(traceback.format_exception(error.with_traceback(_users_part(error.__traceback__))))
        explained = isinstance(
            error, Unfinished | NotSaved | SpoiledResult
        )  # the lines of topotrain that met it explain nothing
        text = f"{error}\n" if explained else trace
        _write(text, log)
        if kind == "quarantine" and here.worker is not None:
            here.worker.leave_job()  # the report of a job that goes on has all of it
        told = explained or kind in ("config", "quarantine")
        words = str(error) if told else traceback.format_exception_only(error)[-1].strip()
        shown = _users_line(error.__traceback__) if explained or kind == "config" else text
        here.emit(Failed(str(here.me), kind, words, shown))
        return 2 if kind == "config" else 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts at the program's own first line.

    The calls before that are the same for all programs.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        trace = trace.tb_next
    return trace


def _users_line(trace: TracebackType | None) -> str:
    """Return the line of the program that caused a configuration error.

    The lines inside topotrain do not help the program's author.
    """
    ours = str(Path(__file__).parents[2])  # the folder topotrain/
    theirs = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(ours) and _SITE not in f.filename]
    return "".join(traceback.format_list(theirs[-1:]))


def _write(text: str, log: Path | None) -> None:
    if log is None:
        print(text, file=sys.stderr, end="", flush=True)
        return
    with (
        contextlib.suppress(OSError),
        os.fdopen(
            open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8", errors="backslashreplace"
        ) as file,
    ):
        file.write(text)
