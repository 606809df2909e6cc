"""The workspace folder of a job on this host, and the list of its processes.

    workspace/lock            locked by the launcher as long as it runs; units that another tool starts share it
    workspace/lock-R          locked by unit R, where another tool starts it, with its pid and the name of the start
    workspace/run/            new for each start, for this user alone: job.conf, token, store/, spans/ for a profile,
                              recorded/ or replayed/ for the order of decisions
    workspace/processes.json  every process with its pid, written when all processes are up
    workspace/logs/           the output of the processes
    workspace/events.jsonl    the recording of the job's events (docs/watching.md)
    workspace/final.tmp       disk space reserved for the final parameters while the job runs

A unit that another tool starts has its run folder in the system's temporary folder, and writes processes-R.json.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from topotrain.config import job_file
from topotrain.config.job import ConfigError, Job
from topotrain.config.private_files import close_folder, make_folder, open_file, write_text
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import Covered, Event, Exited, Serving, Started
from topotrain.launch.agent.file_locks import LockTaken, locked

JOB_FILE = "job.conf"
TOKEN_FILE = "token"
TOKEN_BYTES = 32
STORE = "store"
LOGS = "logs"
PROCESSES_FILE = "processes.json"
SPANS = "spans"
RESERVED = "final.tmp"
RECORDED, REPLAYED = "recorded", "replayed"
"""Folders in the run directory: where processes record the order of decisions, and from where they replay it."""
_WANTED = "wanted"


def log_name(who: Address, unit: int, moved: bool = False) -> str:
    """Return the name in LOGS of the log of a worker, or of a unit's servers.

    moved: the server has moved to this unit from one that is gone.
    """
    if who.role is Role.WORKER:
        return f"worker-{who.group}-{who.index}.log"
    # The workspace may be shared: the lost unit has a log for the same server.
    return f"server-{who.group}-{who.index}-in-unit-{unit}.log" if moved else f"servers-unit-{unit}.log"


class RunFolder:
    """Files that a tool puts into the run directory of each start of a job.

    This class puts nothing there.
    """

    def fill(self, run_dir: Path) -> None:
        """Put them there, before any process of the job starts. Raises OSError."""


@contextlib.contextmanager
def claimed(job: Job) -> Iterator[Path]:
    """Lock the workspace for this launcher; ConfigError if in use or not writable."""
    path = Path(job.workspace).absolute()
    with contextlib.ExitStack() as stack:
        try:
            make_folder(path)
            # Held until the launcher ends. A killed one frees it, too.
            lock = stack.enter_context(locked(path / "lock", fcntl.LOCK_EX))
        except OSError as error:
            raise unusable(job, error) from None
        except LockTaken as taken:
            raise ConfigError("cluster.workspace", job.workspace, str(taken)) from None
        _sign(lock)
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):  # left by a killed process
                (path / RESERVED).unlink()


@contextlib.contextmanager
def claimed_by_unit(job: Job, rank: int, start: str) -> Iterator[Path]:
    """Lock the workspace for this job's units. Raises ConfigError as `claimed` does.

    start: the name of this start of the job, by which other units see whether they have the same folder.
    """
    path = Path(job.workspace).absolute()
    with contextlib.ExitStack() as stack:
        try:
            close_folder(path / LOGS)
            # Shared: several units of this job may run on one host. The second lock keeps two units of one rank apart.
            stack.enter_context(locked(path / "lock", fcntl.LOCK_SH))
            lock = stack.enter_context(locked(path / f"lock-{rank}", fcntl.LOCK_EX))
        except OSError as error:
            raise unusable(job, error) from None
        except LockTaken as taken:
            raise ConfigError("cluster.workspace", job.workspace, str(taken)) from None
        _sign(lock, start)
        # It is of an earlier start: its pids may belong to other processes by now.
        (path / f"processes-{rank}.json").unlink(missing_ok=True)
        yield path


def _sign(lock: int, start: str = "") -> None:
    with contextlib.suppress(OSError):  # the disk may be full; the kernel also knows the holder of the lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {start}".encode(), 0)


def is_shared(workspace: Path, start: str) -> bool:
    """Return whether unit 0 of this start of the job has claimed this folder."""
    try:
        return (workspace / "lock-0").read_text(errors="replace").split()[1:] == [start]
    except OSError:
        return False


def prepare(
    job: Job,
    workspace: Path,
    profile: int = 0,
    more: RunFolder = RunFolder(),  # noqa: B008
) -> str:
    """Make a new run directory, and return the URL of the job's rendezvous.

    profile: the step to profile, counted from 1; 0 for none. The processes write its spans to run/spans.
    more: is put there, too. Raises ConfigError.
    """
    run_dir = workspace / "run"
    try:
        # Addresses and tokens of an earlier job must not be found by this one.
        shutil.rmtree(run_dir, ignore_errors=True)
        make_folder(run_dir / STORE)
        close_folder(workspace / LOGS)
        (workspace / PROCESSES_FILE).unlink(missing_ok=True)
        # A new secret for each start: processes that an earlier job has left cannot join this one.
        write_run_files(run_dir, job, secrets.token_bytes(TOKEN_BYTES), profile)
        more.fill(run_dir)
    except OSError as error:
        raise unusable(job, error) from None
    return (run_dir / STORE).as_uri()


def write_run_files(run_dir: Path, job: Job, token: bytes, profile: int = 0) -> None:
    """Write the files that a run's processes need into its folder. Raises OSError."""
    write_text(run_dir / JOB_FILE, job_file.dumps(job))
    if profile:
        make_folder(run_dir / SPANS)
        write_text(run_dir / SPANS / _WANTED, str(profile))
    with os.fdopen(open_file(run_dir / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(token)


def unusable(job: Job, error: OSError) -> ConfigError:
    """Return the refusal of a job that cannot be started because of this error."""
    if error.filename is None:  # a limit of the system, such as that of processes
        return ConfigError("", None, f"the processes of the job cannot be started: {error.strerror}")
    accepted = f"must be a folder that can be written ({error.filename}: {error.strerror})"
    return ConfigError("cluster.workspace", job.workspace, accepted)


def profiled_step(run_dir: Path) -> int:
    """Return the step that the job profiles, counted from 1; 0 for none."""
    wanted = run_dir / SPANS / _WANTED
    return int(wanted.read_text()) if wanted.exists() else 0


@dataclass(slots=True)
class ProcessEntry:
    """One process in processes.json.

    rank: counts workers; for a unit, units. exit: as in subprocess.
    second: the index of the server's backup replica that was complete last, counted from 0.
    """

    roles: list[str]
    unit: int | None = None
    rank: int | None = None
    pid: int | None = None
    workers: list[list[int]] = field(default_factory=list)
    servers: list[list[int]] = field(default_factory=list)
    address: list[str] = field(default_factory=list)
    exit: int | None = None
    second: int | None = None

    def start(self, pid: int) -> None:
        """Record the pid of a new process, and clear the data of a former one."""
        if self.pid != pid:
            # Serving may come before Started, because the two travel on different ways.
            self.pid, self.address, self.exit = pid, [], None

    def on_event(self, event: Event) -> bool:
        """Record an event of this process; return whether it changes the entry."""
        match event:
            case Started(pid=pid):
                self.start(pid)
            case Serving(pid=pid, urls=urls):
                self.start(pid)
                # A server process reports each of its servers.
                self.address += [url for url in urls if url not in self.address]
            case Exited(code=code):
                self.exit = code
            case Covered(shadows=shadows):
                self.second = shadows
            case _:
                return False
        return True


class ProcessList:
    """Maintains processes.json from the job's events.

    The file is written when all processes are up, and at each change after that.

    Args:
        topology: the layout, with the units to list.
        path: the file.
        own_forkserver: the job has its own forkserver, which is listed with its processes.
    """

    def __init__(self, topology: Topology, path: Path, own_forkserver: bool = True) -> None:
        self._path = path
        self._topology = topology
        self._entries = [ProcessEntry(["launcher"], pid=os.getpid())]
        self._entries += [ProcessEntry(["forkserver"])] if own_forkserver else []
        for unit in topology.units:
            self._entries.append(ProcessEntry([f"unit {unit.rank}"], unit.rank, unit.rank))
            if unit.servers:
                self._entries.append(self._entry(unit.rank, unit.servers))
            self._entries.extend(self._entry(unit.rank, (worker,)) for worker in unit.workers)
        self._by_role = {role: entry for entry in self._entries for role in entry.roles}
        self._changed = False

    def __call__(self, event: Event) -> None:
        entry = self._by_role.get(getattr(event, "who", "")) or self._add_replacement(event)
        self._changed |= entry is not None and entry.on_event(event)

    def _add_replacement(self, event: Event) -> ProcessEntry | None:
        """Add a server of a lost unit that restarts in the one unit listed here."""
        if not isinstance(event, Started) or not event.who.startswith("server "):
            return None
        group, _, index = event.who.removeprefix("server ").partition("/")
        # Only a unit that another tool started gets here, and its list has one unit.
        rank = self._topology.units[0].rank
        entry = self._by_role[event.who] = ProcessEntry([event.who], rank, servers=[[int(group), int(index)]])
        self._entries.append(entry)
        return entry

    def save(self, missing: Collection[str] = ()) -> None:
        """Write the file after a change, when all processes but the missing ones are up."""
        if not self._changed or any(e.pid is None and not set(e.roles) <= set(missing) for e in self._entries):
            return
        self._changed = False
        # A reader of the file never sees half of it. A full disk does not end the job.
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            write_text(temporary, json.dumps([asdict(entry) for entry in self._entries], indent=1) + "\n")
            os.replace(temporary, self._path)

    def _entry(self, unit: int, addresses: tuple[Address, ...]) -> ProcessEntry:
        first = addresses[0]
        pairs = [[address.group, address.index] for address in addresses]
        roles = [str(address) for address in addresses]
        if first.role is Role.SERVER:
            return ProcessEntry(roles, unit, servers=pairs)
        return ProcessEntry(roles, unit, first.group * self._topology.workers_per_group + first.index, workers=pairs)
