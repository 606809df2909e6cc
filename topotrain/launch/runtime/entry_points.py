"""The entry points of a job's processes, which the forkserver calls after a fork."""

import builtins
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.store import open_store
from topotrain.config import job_file
from topotrain.config.job import OnFailure
from topotrain.config.python_module import module_of
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client_context import JobError
from topotrain.core.events import (
    Apart,
    Counted,
    Covered,
    Differs,
    Ending,
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
from topotrain.extensions.replication.replica_host import HostedServer, ReplicaSlot
from topotrain.extensions.replication.replica_placement import ReplicaSet, parse_placement
from topotrain.launch import import_from_working_folder
from topotrain.launch.agent.workspace import RECORDED, REPLAYED, SPANS, profiled_step
from topotrain.launch.log_lines import LineStamps
from topotrain.launch.runtime import event_records
from topotrain.launch.runtime.child_channel import ChildChannel, end_process, exit_code
from topotrain.launch.runtime.host_reports import HostReports
from topotrain.launch.runtime.prepare_composition import prepare_extensions
from topotrain.launch.runtime.process_exit import ProcessExitHook
from topotrain.launch.runtime.process_host import HostObserver, HostOptions, serve
from topotrain.launch.runtime.unit_commands import FinalSnapshot, SigtermHandler
from topotrain.launch.runtime.worker_connections import WorkerConnections, WorkerConnector
from topotrain.training import api  # noqa: F401  # loaded before the fork: every worker needs it
from topotrain.training.context import Context, enter
from topotrain.training.final_parameters import NotSaved
from topotrain.training.finish_job import SpoiledResult, Unfinished, close, finish, is_complete, kind_of
from topotrain.training.misuse_checks import name_nearest, notice_unprepared
from topotrain.training.worker_profile import ProfileRecorders

if TYPE_CHECKING:
    from topotrain.extensions.decision_record.process_order import ProcessOrder

_SITE = "site-packages"
_LEFT = -1


def run_servers(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Run the servers of one unit; return the exit code."""
    import_from_working_folder()
    addresses = [Address(Role.SERVER, group, index) for group, index in spec["servers"]]
    control = _control(spec, channel)
    slot = LaunchedSlot(spec["seats"], control) if spec.get("seats") else None
    sigterm, snapshot = SigtermHandler(), FinalSnapshot(str(addresses[0]), control)
    requests = ResizeRequests(control)
    # Before the servers exist: the handlers queue commands that come meanwhile.
    control.start(sigterm, requests, snapshot, *([slot] if slot is not None else []))
    profile = _recorders(spec, addresses[0])
    place = _place(spec)
    sigterm.take_over(place.job)
    observer = ServerObserver(control, addresses[0], requests, place, apart=bool(spec["hosts"]))
    writer = _writer(place, addresses, control)
    snapshot.open(writer)
    options = HostOptions(observer, profile, writer, _order(spec, control))
    sent, received, link = serve(place, addresses, options, slot)
    profile.leave()
    if observer.servers is not None:  # this process may have been made for replicas that the job no longer needed
        _report_counts(control, place, observer.servers)
    for number, me in enumerate(addresses):
        # The process counts as a whole, with its first server.
        own = (sent, received, link) if number == 0 else (0, 0, 0)
        control.emit(Finished(str(me), 0, 0, 0.0, 0, own[0], own[1], bytes_link=own[2]))
    return 0


class UnitObserver(HostObserver):
    """Reports to the unit what happens in this process.

    Args:
        control: the channel to the unit.
        server: the first server of the process.
        worker: the worker of the process, if it is a worker's.
    """

    def __init__(self, control: ChildChannel, server: Address, worker: Address | None = None) -> None:
        self._control, self._server, self._worker = control, server, worker

    def on_serving(self, server: Address, urls: tuple[str, ...]) -> None:
        self._control.emit(Serving(str(server), urls, os.getpid()))

    def on_failure(self) -> None:
        text = traceback.format_exc()
        self._control.emit(Failed(str(self._server), "internal", text.strip().splitlines()[-1], text))
        os._exit(1)

    def on_long_wait(self, seconds: float) -> None:
        self._control.emit(Waits(str(self._worker), seconds))


class ServerObserver(UnitObserver):
    """Reports to the unit what happens in a process of servers.

    It implements `process_host.ConnectionObserver`.

    Args:
        control, first: as for `UnitObserver`.
        requests: the requests about worker groups, which the servers answer.
        place: the settings of the process.
        apart: units may be elsewhere, so lost workers are reported. A launcher sees the ends of its own workers.
    """

    def __init__(
        self, control: ChildChannel, first: Address, requests: ResizeRequests, place: RouterConfig, apart: bool
    ) -> None:
        super().__init__(control, first)
        self._requests, self._place, self._apart = requests, place, apart
        self.connections = self if apart else None
        self.servers: ServerProcess | None = None
        self._reports = HostReports(place)

    def on_open(self, servers: ServerProcess) -> None:
        self.servers = servers
        self._requests.open(servers)

    def on_turn(self, servers: Mapping[Address, HostedServer], router: Router, last: bool = False) -> None:
        """Report the work of the servers, now and then."""
        now = time.monotonic()
        for event in self._reports.counts(servers, now):
            self._control.emit(event)
        if self._reports.due(now, last):
            for event in self._reports.servers(servers, router):
                self._control.emit(event)

    def on_done(self, server: Server) -> None:
        """Report the distance between server groups."""
        found = server.exchange.distance
        if found.exchanges:
            self._control.emit(Apart(str(server.me), found.exchanges, found.mean, found.most, found.share))

    def on_joined(self, server: Server, worker: Address) -> None:
        """Do nothing."""

    def on_failed(self, server: Server, worker: Address, why: Fail) -> None:
        """Do nothing: the worker's own unit receives the failure, too."""

    def on_lost(self, server: Server, peer: Address, reason: str) -> None:
        """Report a lost peer, unless it had no work left here."""
        if peer.role is Role.SERVER:
            over = not server.running
        else:
            # A finished worker closes its connection in order, and a restarting one comes back.
            over = (
                not self._apart or peer.group not in server.groups or server.has_finished(peer) or self._restarts(peer)
            )
        if not over:
            self._control.emit(Failed(str(server.me), "peer", f"lost {peer}: {reason}", ""))

    def _restarts(self, worker: Address) -> bool:
        """Return whether a lost worker's group restarts."""
        place = self._place
        if place.job.on_failure is not OnFailure.kContinue:
            return False
        # A group that cannot restart alone is reported: unit 0 decides what follows.
        return not refusal(place.job, place.topology, worker.group)


class LaunchedSlot(ReplicaSlot):
    """The slot of a process with replicated servers that a launcher started.

    Args:
        placement: the placement when the process begins, as from `ReplicaPlacement.to_data`.
        control: the channel to the unit.
    """

    def __init__(self, placement: list[list[int]], control: ChildChannel) -> None:
        super().__init__(parse_placement(placement))
        self._control = control
        # The placement may change while the process still imports and binds.
        self._queue: SimpleQueue[Mapping[int, ReplicaSet]] = SimpleQueue()

    def on_command(self, command: Mapping[str, Any]) -> None:
        """Queue a command about placement."""
        if command.get("command") == "seats":
            self._queue.put(parse_placement(command["seats"]))

    def next_placement(self) -> Mapping[int, ReplicaSet]:
        return self._queue.get()

    def on_standby_complete(self, server: Address, standby: int) -> None:
        self._control.emit(Covered(str(server), standby))

    def on_standby_differs(self, server: Address, standby: int) -> None:
        self._control.emit(Differs(str(server), standby))

    def on_disconnect(self, server: Address) -> None:
        self._control.emit(Missed(str(server)))

    def end_process(self, reason: str) -> None:
        print(reason, file=sys.stderr, flush=True)
        os._exit(1)


def _report_counts(control: ChildChannel, place: RouterConfig, servers: ServerProcess) -> None:
    """Report the sample counts of the coordinators in this process."""
    groups = range(place.topology.worker_groups)
    found = {each.server.me: each.server for g in groups if (each := servers.coordinator(g))}
    for me, server in found.items():
        control.emit(Counted(str(me), {str(worker): count for worker, count in server.steps.samples.items()}))
        for event in (event for extension in server.hooks.reporting for event in extension.events()):
            control.emit(event)


def _control(spec: dict[str, Any], channel: socket.socket) -> ChildChannel:
    event_records.log_to(Path(spec["log"]), spec["who"])
    return ChildChannel(channel, spec["who"])


def _place(spec: dict[str, Any]) -> RouterConfig:
    job = job_file.loads(spec["job"], "the job")
    token = bytes.fromhex(spec["token"])
    store = open_store(spec["rendezvous"])
    topology = layout(job.cluster, spec["hosts"], spec["link_mbit"])
    place = RouterConfig.of(topology, job, store, token, Path(spec["sockets"]), spec["incarnation"], spec["host"])
    return replace(place, resumed=Manifest.open(spec["resume"])) if spec.get("resume") else place


def _recorders(spec: dict[str, Any], who: Address) -> ProfileRecorders:
    run_dir = Path(spec["run_dir"])
    return ProfileRecorders(profiled_step(run_dir), run_dir / SPANS, who)


def _order(spec: dict[str, Any], control: ChildChannel) -> "ProcessOrder | None":
    """Return what records, or replays, the order of decisions; None in most jobs."""
    run_dir = Path(spec["run_dir"])
    if not (run_dir / RECORDED).is_dir() and not (run_dir / REPLAYED).is_dir():
        return None
    from topotrain.extensions.decision_record.process_order import FolderRecording, FolderReplay

    replayed = run_dir / REPLAYED
    return FolderReplay(replayed, control) if replayed.is_dir() else FolderRecording(run_dir / RECORDED)


def _writer(place: RouterConfig, servers: Sequence[Address], control: ChildChannel) -> SnapshotWriter | None:
    """Return the writer of these servers' snapshots; None if the job takes none."""
    resumed = None if place.resumed is None else place.resumed.path
    again = place.identity.incarnation > 0
    return writer_for(place.job, place.topology, servers, resumed, again, control)


def run_worker(
    spec: dict[str, Any], channel: socket.socket, fds: Sequence[int], function: Callable[[], object] | None = None
) -> int:
    """Run one worker: the user's program in its job; return the exit code.

    function: the program, if it is a function of this process.
    """
    ((group, index),) = spec["workers"]
    me, server = Address(Role.WORKER, group, index), Address(Role.SERVER, 0, index)
    control, sigterm = _control(spec, channel), SigtermHandler()
    snapshot = FinalSnapshot(str(me), control)
    control.start(sigterm, snapshot)
    place = _place(spec)
    # Before anything that takes long: SIGTERM during the start must wait for the launcher's decision, too.
    sigterm.take_over(place.job)
    profile = _recorders(spec, me)
    writer = _writer(place, [server], control) if place.topology.inline else None
    snapshot.open(writer)
    order = _order(spec, control)
    choices = None if order is None else order.choices(me, place.identity.incarnation)
    # No connection is opened yet: the script may take long before it prepares, or never prepare.
    here = Context(
        place,
        me,
        Path(place.job.workspace).absolute(),
        control,
        WorkerConnector(HostOptions(UnitObserver(control, server, me), profile, writer, order)),
        prepare_extensions(choices),
        fds[0] if spec["shared_memfd"] else None,
        resumed=place.resumed,
        spans=profile.worker(),
    )
    enter(here)
    if here.is_main:
        notice_unprepared(here)
    # The main worker's error is shown with the job's end; on its stderr the terminal would have it twice.
    log = Path(spec["log"]) if here.is_main else None
    servers = [Address(Role.SERVER, group, index) for group, index in spec["servers"]]
    work = WorkerPart(here, control, log, profile, servers)
    hook = ProcessExitHook(work)
    hook.watch()
    here.owned_by(hook)
    with ProgramGuard(here, log) as guard:
        if function is None:
            run_program(spec["program"], spec["args"])
        else:
            run_script(function)
    # From here on an exit is the runtime's own, and not the script's.
    hook.forget()
    return work.leave(guard.code)


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The work of a worker in its job, to be completed before the process ends.

    servers: the servers in the same process.
    """

    here: Context
    control: ChildChannel
    log: Path | None
    profile: ProfileRecorders
    servers: Sequence[Address]

    def is_complete(self) -> bool:
        """Whether no work is under way that other processes would miss."""
        return is_complete(self.here)

    def end(self) -> int:
        """Complete the work, and return the exit code."""
        code = self.leave(0)
        self.control.emit(Ending(str(self.here.me)))
        return code

    def leave(self, code: int) -> int:
        """Complete the work after the program's exit code; return the process's."""
        # A failed script delivers no result.
        if code == 0:
            with ProgramGuard(self.here, self.log) as guard:
                finish(self.here)
            code = guard.code
        self.profile.leave()
        close(self.here, finished=code == 0)
        connections = self.here.connections
        servers = connections.inline_server if code == 0 and isinstance(connections, WorkerConnections) else None
        if servers is not None:
            _report_counts(self.control, self.here.place, servers)
        for server in self.servers if code == 0 else ():
            self.control.emit(Finished(str(server), 0, 0, 0.0, 0, 0, 0))
        return 0 if code == _LEFT else code


def run_program(program: str, args: Sequence[str]) -> None:
    """Run a script, or a module as `python -m` does.

    It finds what `python` gives it: `sys.argv`, `sys.path`, and the module `__main__`, also after its end. The process
    is a fork of one that imports nothing from a folder of the user.
    """
    module = module_of(program)
    sys.argv = [program if module is None else "-m", *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if module else str(Path(program).resolve().parent))
    main = sys.modules["__main__"] = ModuleType("__main__")
    run_script(lambda: exec(_code(program, module, vars(main)), vars(main)))


def _code(program: str, module: str | None, names: dict[str, Any]) -> Any:
    """Return the code of a program, and set the names that Python sets before it runs."""
    path = os.path.abspath(program)
    loader: Any = SourceFileLoader("__main__", path)
    names |= {"__file__": path, "__cached__": None, "__annotations__": {}, "__builtins__": builtins}
    if module is None:
        names["__loader__"] = loader
        # A compiled script is run as such, and a source file must not leave a compiled one behind.
        if path.endswith(".pyc"):
            return SourcelessFileLoader("__main__", path).get_code("__main__")
        return loader.source_to_code(Path(path).read_bytes(), path)
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None  # the launcher has found it
    sys.argv[0] = str(spec.origin)
    names |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
    names |= {"__file__": spec.origin, "__cached__": spec.cached}
    return spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def run_script(script: Callable[[], object]) -> None:
    """Call a script; a process that it has forked ends here, for itself.

    Raises RuntimeError where the script left with an exit code for a failure.
    """
    pid, code, trace = os.getpid(), 0, None
    try:
        script()
    except SystemExit as leaving:
        code, trace = exit_code(leaving.code), leaving.__traceback__
    except BaseException as error:
        forked, own = os.getpid() != pid, sys.excepthook is not sys.__excepthook__
        if forked or (own and not isinstance(error, GroupLeaving)):
            _call_hook(error)
        # The guard reports it, so a usual hook would print it twice.
        if not forked:
            raise
        code = 1
    if os.getpid() != pid:
        end_process(code)
    if code:
        raise RuntimeError(f"the program left with exit code {code}").with_traceback(_users_part(trace)) from None


def _call_hook(error: BaseException) -> None:
    """Call the hook for an exception that a script does not catch."""
    try:
        trace = _users_part(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()


class ProgramGuard:
    """Turns an exception inside the block into an exit code.

    The exception is reported to the unit and written to `log` (None: to stderr).
    """

    def __init__(self, here: Context, log: Path | None) -> None:
        self._here, self._log = here, log
        self.code = 0
        """The exit code. _LEFT is not one: the script was stopped because its group leaves the job."""

    def __enter__(self) -> "ProgramGuard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # The script was stopped on purpose, in the middle of a loop.
        if isinstance(error, GroupLeaving):
            leave(self._here)
            self.code = _LEFT
        elif error is not None:  # also KeyboardInterrupt: Ctrl-C of a user comes to the launcher, and not here
            self.code = self._report(error)
        return True

    def _report(self, error: BaseException) -> int:
        here, kind = self._here, kind_of(error)
        if here.worker is not None or here.tables is not None:
            here.connect().exchange.leave()  # errors that the others report from here on are consequences
        # The report ends the job, and the script's functions at exit come after it: SIGKILL limits their time.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        name_nearest(error)
        trace = "".join(traceback.format_exception(error.with_traceback(_users_part(error.__traceback__))))
        # The traceback of these errors has only lines of topotrain, which explain nothing.
        explained = isinstance(error, Unfinished | NotSaved | SpoiledResult)
        text = f"{error}\n" if explained else trace
        self._write(text)
        if kind == "quarantine" and here.worker is not None:
            here.worker.leave_job()  # the report of a job that goes on has all of it
        # A `JobError` has words for the user. The log has the traceback.
        plain = explained or kind == "config" or isinstance(error, JobError)
        words = str(error) if plain else traceback.format_exception_only(error)[-1].strip()
        shown = _users_line(error.__traceback__) if plain else text
        here.emit(Failed(str(here.me), kind, words, shown))
        return 2 if kind == "config" else 1

    def _write(self, text: str) -> None:
        if self._log is None:
            print(text, file=sys.stderr, end="", flush=True)
            return
        whole = f"{text.rstrip()}\n".encode("utf-8", "backslashreplace")
        event_records.append(self._log, LineStamps(str(self._here.me)).stamped(whole, time.time()))


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts at the program's own first line."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _users_line(trace: TracebackType | None) -> str:
    """Return the line of the program that caused a configuration error."""
    # Lines inside topotrain or a library do not help the program's author.
    ours = str(Path(__file__).parents[2])  # the folder topotrain/
    theirs = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(ours) and _SITE not in f.filename]
    return "".join(traceback.format_list(theirs[-1:]))
