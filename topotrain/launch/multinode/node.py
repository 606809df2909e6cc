"""One unit of a job over several hosts, started by another tool.

The unit meets the others, runs its processes, and ends with them. Every unit ends with the same exit code and the same
cause.
"""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from topotrain.comm.security.secret import job_key, load_secret
from topotrain.comm.store import Store, StoreError, StoreService, host_store, open_store
from topotrain.comm.store.discovery.environment import Meeting
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry, UnknownJob
from topotrain.comm.store.store_url import parse
from topotrain.comm.transport import TransportError
from topotrain.config import job_file
from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import ConfigError, Job, OnFailure
from topotrain.config.python_module import find_module, module_of
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Counted, Event, Notice
from topotrain.launch import AlwaysTaken, EventListener, JobOutcome, JobWatch, Outlet, UnitPlace
from topotrain.launch.agent import temporary_folders
from topotrain.launch.agent.children import EntryPoints
from topotrain.launch.agent.forkserver_handle import ForkserverHandle
from topotrain.launch.agent.stop_signals import signals
from topotrain.launch.agent.workspace import LOGS, claimed_by_unit, is_shared, write_run_files
from topotrain.launch.control_socket import linked_folder
from topotrain.launch.grace_period import LEADER
from topotrain.launch.job_shutdown import DECIDE_S, LauncherContext, RunFiles
from topotrain.launch.launchers.env_tables import DEFAULT_ID, LaunchInfo
from topotrain.launch.launchers.foreground_tool import StopRequested, interruptible
from topotrain.launch.multinode.attempts import AttemptAgreement, Attempts
from topotrain.launch.multinode.control_connection import ControlAccess
from topotrain.launch.multinode.election.succession import Succession
from topotrain.launch.multinode.link_measurement import MEETING_KEY, LinkMeasurement
from topotrain.launch.multinode.node_info import EndedBeforeStart, HostMap, JobEnd, with_job
from topotrain.launch.multinode.node_membership import StoreKeys, UnitContext, UnitReport
from topotrain.launch.multinode.node_rendezvous import (
    MEETING_S,
    QUIET_S,
    JobRestarted,
    NodeRendezvous,
    RendezvousNotice,
    forget,
    forget_attempts,
    outlast,
)
from topotrain.launch.multinode.restart_barrier import RestartInfo
from topotrain.launch.multinode.shared_samples import SharedSamples
from topotrain.launch.multinode.unit_membership import UnitMembership
from topotrain.launch.recovery.resume_point import SHARED, ResumeSource, asked_for, seal, seen
from topotrain.launch.run_loop import RunLoop
from topotrain.launch.shared_forkserver import SharedForkserver, join

STORE_S = 3.0
"""Seconds for which an operation tries to reach an unavailable store, before it is retried later."""
_OPEN = "{} has neither encryption nor authentication: between hosts use it on a network of your own only"

Watching = Callable[[Job, Topology], AbstractContextManager[tuple[EventListener, Outlet]]]
"""Opens the displays of a unit and the outlet of its program, given the job and the whole layout."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """How the job ended for one unit, with the same code and cause as in every unit.

    leads: this unit has led the job at its end, and has the reports of all units.
    """

    outcome: JobOutcome
    end: JobEnd
    job: Job | None = None
    topology: Topology | None = None
    rank: int = 0
    leads: bool = False


@dataclass(slots=True)
class Node:
    """One unit of a job on this host.

    start: the rank of the unit, and the rendezvous of all units.
    given: the job, if this unit was started with one.
    watching: opens the unit's displays.
    environ: the environment with the secrets.
    calls: the functions that child processes run; only tests change it.
    shared: the share in the forkserver of the units on this host, to be left at the end. None: `run` joins.
    notice: shows what the unit waits for at the rendezvous. None: by lines on stderr.
    forkserver, watch: as for `LocalLauncher`.
    """

    start: LaunchInfo
    given: Job | None
    watching: Watching
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    calls: EntryPoints = field(default_factory=EntryPoints)
    forkserver: str = ""
    notice: RendezvousNotice | None = None
    shared: SharedForkserver | None = None
    watch: JobWatch = field(default_factory=JobWatch)
    _outlet: Outlet = field(init=False, default_factory=AlwaysTaken)

    def run(self) -> NodeResult:
        """Run the unit to its end, and leave no process of it behind.

        Raises:
            ConfigError: a setting is wrong. Nothing was started.
            StoreError: the other units were not found; nothing was started.
        """
        url = parse(self.start.rendezvous)
        rank, name = self.start.rank, url.job or self.start.id or DEFAULT_ID
        secret = load_secret(self.environ)
        with ExitStack() as stack:
            if not self.forkserver and self.shared is None:
                # Before the units meet, which gives it the time to load torch.
                self.shared = join(self.start.scope(self.environ), os.environ, self.calls.preload)
            if self.shared is not None:
                stack.callback(self.shared.leave)
            served: StoreService | None = None
            if rank == 0:
                served = host_store(self.start.rendezvous, secret, self.environ)
                if served is not None:
                    # An early callback, so it runs late: the others still use the store.
                    stack.callback(served.close)
            notice = self.notice or RendezvousNotice(rank, self.start.nprocs)
            root = self._open(secret, notice)
            stack.callback(root.close)
            rendezvous = NodeRendezvous(root, name, rank, self.start.nprocs, secret, self.start.patience, notice)
            stack.callback(rendezvous.close)
            try:
                # Only before the start; afterwards the run loop receives the signals.
                with interruptible(), ExitStack() as waiting:
                    # However the meeting ends, the next line on the terminal is another's.
                    waiting.callback(notice.end)
                    agreement = self._meet(rendezvous, root, served, stack, secret)
            except EndedBeforeStart as over:
                return self._give_up(rendezvous, over.end)
            except StopRequested as came:
                text = f"ended by signal {came.number} to unit {rank}"
                return self._give_up(rendezvous, JobEnd(128 + came.number, rank, text=text))
            except ConfigError as error:
                self._give_up(rendezvous, JobEnd(2, rank, text=f"unit {rank} refused the job: {error}"))
                raise
            return self._run_to_end(rendezvous, root, agreement, secret)

    def _open(self, secret: bytes, notice: RendezvousNotice) -> Store:
        """Open the whole store."""
        meeting = Meeting(self.start.patience or MEETING_S, notice)
        return open_store(with_job(self.start.rendezvous, ""), secret, STORE_S, self.environ, meeting)

    def _meet(
        self, rendezvous: NodeRendezvous, root: Store, served: StoreService | None, stack: ExitStack, secret: bytes
    ) -> AttemptAgreement:
        rank = self.start.rank
        while True:
            try:
                rendezvous.enter(rendezvous.introduce(self.start.host, self.start.rendezvous))
                job = rendezvous.bring(self.given) if rendezvous.opens else rendezvous.take(self.given)
                rendezvous.check(job)
                _check_program(job)
                workspace = stack.enter_context(claimed_by_unit(job, rank, rendezvous.run_id))
                if not rendezvous.opens:
                    hosts = rendezvous.learn() if rendezvous.returns else self._measured(rendezvous, job, secret)
                    # A unit that rejoins gets its snapshot with the next attempt; this one is of the job's start.
                    resume = "" if rendezvous.returns else seen(workspace, *rendezvous.chosen())
                    return AttemptAgreement(job, hosts, workspace, ResumeSource(workspace, resume), resume)
                resume = asked_for(job, workspace)
                origin = ResumeSource(workspace, resume)
                # Before `gather`: the units read it when the hosts are published.
                rendezvous.choose(Path(resume).name, seal(resume))
                hosts = rendezvous.gather(self._shown(served), served is not None)
                measurement = self._links(rendezvous, job, hosts, secret)
                with measurement.taking_part():
                    hosts = rendezvous.publish(replace(hosts, link_mbit=measurement.agreed()))
                self._register(root, self._record(rendezvous, job, hosts))
                return AttemptAgreement(job, hosts, workspace, origin, resume)
            except JobRestarted:
                # All of it once more: another start of the job has replaced this one.
                rendezvous.close()

    def _links(self, rendezvous: NodeRendezvous, job: Job, hosts: HostMap, secret: bytes) -> LinkMeasurement:
        rank, topology = self.start.rank, layout(job.cluster, hosts.numbers)
        return LinkMeasurement(rendezvous.run, rank, topology, hosts.addresses[rank], secret)

    def _measured(self, rendezvous: NodeRendezvous, job: Job, secret: bytes) -> HostMap:
        """Measure the links of this unit, and return the hosts with the agreed speed."""
        with self._links(rendezvous, job, rendezvous.learn(MEETING_KEY), secret).taking_part():
            return rendezvous.learn()

    def _shown(self, served: StoreService | None) -> str:
        """Return the store's URL for units that were started with env:// only."""
        if parse(self.start.rendezvous).scheme != "env":
            # All units were started with this URL.
            return ""
        named = self.environ.get("TOPOTRAIN_RENDEZVOUS", "")
        return served.url if served is not None else named or "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**self.environ)

    def _record(self, rendezvous: NodeRendezvous, job: Job, hosts: HostMap) -> JobRecord:
        """Return the job's entry in the store's list."""
        addresses = tuple(dict.fromkeys(hosts.addresses))
        return JobRecord(rendezvous.id, job.name, started=time.time(), units=self.start.nprocs, hosts=addresses)

    def _register(self, root: Store, record: JobRecord) -> None:
        registry = Registry(root)
        with suppress(UnknownJob):
            registry.end(record.id, "failed")  # an earlier start; its units are all gone by now
        registry.add(record)

    def _give_up(self, rendezvous: NodeRendezvous, end: JobEnd) -> NodeResult:
        """Report to the other units that the job ends before its start."""
        if rendezvous.heartbeat is not None:  # only a member of the job may end it
            with suppress(StoreError):
                # Another unit may have ended the job before, and its reason counts.
                rendezvous.run.compare_and_set("end", None, end.dumped())
            if rendezvous.opens:
                # The store may end with this process. Units that were started with it may still be on their way.
                outlast(rendezvous.run, self.start.rank, self.start.nprocs if end.code < 128 else 0)
        return NodeResult(JobOutcome(end.code, 0.0, end.failed), end, rank=self.start.rank)

    def _run_to_end(
        self, rendezvous: NodeRendezvous, root: Store, agreement: AttemptAgreement, secret: bytes
    ) -> NodeResult:
        """Run all attempts of this unit, and agree with the other units on the end."""
        rank, job, hosts = self.start.rank, agreement.job, agreement.hosts
        topology = layout(job.cluster, hosts.numbers, hosts.link_mbit)
        with ExitStack() as stack:
            membership = stack.enter_context(closing(self._join(rendezvous, root, agreement, topology, secret)))
            # In this order: while the displays wait for a reader at the end, Ctrl-C raises KeyboardInterrupt again.
            on_event, self._outlet = stack.enter_context(self.watching(job, topology))
            stop = stack.enter_context(signals())
            notes = UnitReport()

            def record(event: Event) -> None:
                notes(event)
                on_event(event)

            if topology.torch_collective and len(set(hosts.numbers)) > 1 and rendezvous.opens:
                record(Notice("launcher", _OPEN.format(job.cluster.engine.value)))
            began = time.monotonic()
            succession = Succession(job, rank, hosts.numbers, hosts)
            attempts = Attempts(rendezvous, agreement, membership, stop, record, succession, agreement.origin)
            try:
                folder = stack.enter_context(linked_folder(agreement.workspace, rank))
                host = self._context(attempts, folder, on_event)
                stack.enter_context(closing(host.forkserver))
                if wants_snapshots(job) and not is_shared(agreement.workspace, rendezvous.run_id):
                    record(Notice("launcher", _not_shared(job, agreement.workspace, rank)))
                if rendezvous.opens:
                    succession.open(topology, began)
                outcome, again = self._run_attempts(attempts, host, secret)
                for promise in host.promises:
                    promise.send("the job ended before it trained again")
            # The other units must not wait for this one until its silence counts as its loss.
            except BaseException as error:
                refused, where = isinstance(error, ConfigError), f"unit {rank} on {hosts.names[rank]}"
                text = f"{where} cannot go on: {error}" if refused else f"{where} failed: {error!r}"
                self._give_up(rendezvous, JobEnd(2 if refused else 1, rank, hosts.names[rank], text=text))
                raise
            end = _agree(attempts, outcome, notes, again)
            # A user who has sent a signal does not wait for a reader of the output.
            if stop.came:
                self._outlet.hurry()
            # Only now have all units delivered their reports.
            for event in _reported(membership, rank, notes):
                on_event(event)
            self._leave(rendezvous, root, membership, end)
            whole = replace(outcome, code=end.code, cause=end.failed, seconds=time.monotonic() - began)
            return NodeResult(whole, end, job, topology, rank, membership.leader is not None)

    def _context(self, attempts: Attempts, folder: Path, on_sample: EventListener) -> LauncherContext:
        """Return the settings and resources that all attempts share.

        folder: that of the control socket. on_sample: receives events of other units, which are not in the report of
        this one.
        """
        rank, workspace, membership = self.start.rank, attempts.agreement.workspace, attempts.membership
        mark, logs = secrets.token_hex(16), workspace / LOGS
        forkserver = ForkserverHandle(self.forkserver, logs / f"forkserver-unit-{rank}.log", mark, self.shared)
        files = RunFiles(workspace / f"processes-{rank}.json", logs, folder)
        continues = attempts.agreement.job.on_failure is OnFailure.kContinue
        samples = SharedSamples(membership, on_sample)

        def on_event(event: Event) -> None:
            attempts.on_event(event)
            samples.note(event)

        return LauncherContext(
            on_event,
            files,
            attempts.stop,
            forkserver,
            mark,
            membership,
            membership.control if continues else None,
            attempts.succession if continues else None,
            self._outlet,
            requests=membership.requests,
            forwards=membership.forwards if continues else None,
            samples=samples,
        )

    def _run_attempts(self, attempts: Attempts, host: LauncherContext, secret: bytes) -> tuple[JobOutcome, bool]:
        """Run the attempts of this unit, one after another.

        Returns the outcome of the last one, and whether the job was to restart after it.
        """
        outcome, again = JobOutcome(0, 0.0), True
        begun = attempts.first()
        while begun is not None:
            job = attempts.job
            # A new unit may run on another host, and workers may have left, which changes the layout.
            here = _only(layout(job.cluster, begun.hosts.numbers, begun.hosts.link_mbit), self.start.rank)
            run = RunLoop(job, here, host, attempts.policy(here, begun))
            outcome, again = self._run_attempt(run, attempts.rendezvous, begun, secret), run.shutdown.again
            # A signal, or the end of the job, may have come while the attempt ended.
            if not again or attempts.membership.over or attempts.stop.came:
                break
            begun = attempts.next(run, begun)
        return outcome, again

    def _join(
        self, rendezvous: NodeRendezvous, root: Store, agreement: AttemptAgreement, topology: Topology, secret: bytes
    ) -> UnitMembership:
        """Return the membership of this unit, with its control connections."""
        rank, job, hosts = self.start.rank, agreement.job, agreement.hosts
        stores = StoreKeys(rendezvous.run, rendezvous.shared, Registry(root), self._record(rendezvous, job, hosts))
        access = ControlAccess(rendezvous.run, rendezvous.run_id, secret, job.cluster.start_port, job.cluster.lease_s)
        assert rendezvous.me is not None
        moves = job.cluster.replicas > 1  # the first server may be in another unit, and the leader asks it
        context = UnitContext(
            stores,
            rank,
            rendezvous.me.word,
            access,
            rendezvous.verifier,
            job.on_failure is OnFailure.kContinue,
            not moves and LEADER in topology.units[rank].servers,
            _where(topology),
            {"job": job_file.dumps(job).encode(), "hosts": hosts.dumped()},
            self.watch,
            bool(agreement.resume),
        )
        try:
            return UnitMembership(context, hosts, rendezvous.opens)
        # This unit cannot listen at its address, so no other unit could reach it.
        except TransportError as error:
            self._give_up(
                rendezvous, JobEnd(2, rank, hosts.names[rank], text=f"unit {rank} cannot be reached: {error}")
            )
            accepted = f"must be an address of this machine ({error})"
            raise ConfigError("--host", hosts.addresses[rank], accepted) from error

    def _run_attempt(self, run: RunLoop, rendezvous: NodeRendezvous, begun: RestartInfo, secret: bytes) -> JobOutcome:
        """Run one attempt of this unit, from its first process to its last."""
        rank, hosts, number = self.start.rank, begun.hosts, begun.attempt.number
        # A key for each attempt: processes of different attempts cannot connect.
        key = job_key(secret, "unit", rendezvous.run_id, *([str(number)] if number else []))
        with ExitStack() as stack:
            run_dir = stack.enter_context(_private_folder())
            write_run_files(run_dir, run.job, key)
            # Named after the key: all units of this attempt on this host find the same folder.
            sockets = stack.enter_context(_shared_folder(key))
            id = f"{rendezvous.run_id}.{number}" if number else rendezvous.run_id
            # Addresses of the former attempt's processes must not be found.
            url, numbers = with_job(hosts.url or self.start.rendezvous, id), ",".join(map(str, hosts.numbers))
            place = UnitPlace(
                rank,
                self.start.nprocs,
                url,
                str(run_dir),
                hosts=numbers,
                host=hosts.addresses[rank],
                sockets=str(sockets),
                link_mbit=hosts.link_mbit,
            )
            try:
                run.start(self.calls, [place], begun.attempt)
                return run.run()
            finally:
                run.destroy()

    def _leave(self, rendezvous: NodeRendezvous, root: Store, membership: UnitMembership, end: JobEnd) -> None:
        """Leave the job. The leader also cleans up when all other units have left."""
        leader = membership.leader
        if leader is None:
            return
        outlast(rendezvous.run, self.start.rank)
        with suppress(StoreError):
            # Before keys are deleted: these maintain them, and would write them again.
            membership.close()
            leader.leave(end, "done" if end.code == 0 else "stopped" if end.failed is None else "failed")
            rendezvous.close()
            forget_attempts(root, rendezvous.run_id)
            if end.code:  # the user may ask why the job failed
                forget(rendezvous.run, but="end")
            else:
                forget(rendezvous.run)
                rendezvous.shared.delete("run")


def _only(topology: Topology, rank: int) -> Topology:
    """Return the layout with only the unit of this rank."""
    return replace(topology, units=(topology.units[rank],))


def _where(topology: Topology) -> dict[str, int]:
    """Return the unit of each process and unit name."""
    found = {str(who): unit.rank for unit in topology.units for who in (*unit.workers, *unit.servers)}
    return found | {f"unit {unit.rank}": unit.rank for unit in topology.units}


def _reported(membership: UnitMembership, rank: int, own: UnitReport) -> Iterator[Event]:
    """Yield the events of the other units, then the servers' counts of samples."""
    events = [event for other, told in sorted(membership.reports.items()) if other != rank for event in told]
    yield from (event for event in events if not isinstance(event, Counted))
    # A report drops the counts of a group when its workers start. So they come behind all starts, this unit's, too.
    yield from (event for event in (*events, *own.events) if isinstance(event, Counted))


def _agree(attempts: Attempts, outcome: JobOutcome, notes: UnitReport, again: bool) -> JobEnd:
    """Wait until all units agree how the job has ended. A signal ends the wait."""
    membership, stop = attempts.membership, attempts.stop
    # The job was about to restart and does not, which is no failure: only a signal, or a known end, explains it.
    if again:
        if stop.came and not membership.over:
            membership.signalled(stop.came[0])
    elif outcome.code == 0 and not membership.over:
        membership.finish(notes.events)
        _await_others(attempts)
        if stop.came and not membership.over:
            membership.signalled(stop.came[0])
    elif outcome.cause is not None and not membership.over:
        membership.tell(outcome.cause)
    end = membership.wait(DECIDE_S)
    if end is None:
        end = JobEnd(outcome.code or 1, failed=outcome.cause, text="no agreement on the end")
        if stop.came:
            # For the unit that leads next: this one has found no leader that it could tell.
            end = replace(end, text=f"ended by signal {stop.came[0]} to unit {attempts.rendezvous.rank}")
            with suppress(StoreError):
                attempts.rendezvous.run.compare_and_set("end", None, end.dumped())
    return end


def _await_others(attempts: Attempts) -> None:
    """Wait until the end of the job is decided, or a signal comes."""
    membership, stop = attempts.membership, attempts.stop
    with DefaultSelector() as selector:
        for number in (membership.fileno(), membership.control.fileno(), stop.woken.fileno()):
            selector.register(number, EVENT_READ)
        quiet_at: float | None = time.monotonic() + QUIET_S
        while not membership.over and not stop.came:
            selector.select(None if quiet_at is None else max(0.0, quiet_at - time.monotonic()))
            stop.clear_wakeup()
            # This unit may become the leader of units that are not done yet.
            attempts.answer()
            if quiet_at is not None and time.monotonic() >= quiet_at and not membership.over:
                # One notice is enough; from here on the wait has no limit.
                quiet_at = None
                attempts.notify("this unit has ended; the job ends when its other units have")


def _check_program(job: Job) -> None:
    where = f"on {os.uname().nodename}, looked for from {os.getcwd()}"
    module = module_of(job.program)
    if module is not None:
        find_module(module, f" {where}")
    elif not Path(job.program).is_file():
        raise ConfigError("program", job.program, f"must be a file on the host of every unit; there is none {where}")


def _not_shared(job: Job, workspace: Path, rank: int) -> str:
    """Say that the workspace is not unit 0's. Raises ConfigError if it must be."""
    seen = f"unit {rank} on {os.uname().nodename} does not find that of unit 0 there"
    if job.resume or job.checkpoint_freq:
        asked = "resume" if job.resume else "checkpoint_freq"
        raise ConfigError("cluster.workspace", str(workspace), f"cannot have snapshots ({asked}): {seen}; {SHARED}")
    return f"this job cannot go on from its snapshots: {workspace}: {seen}; {SHARED}"


@contextmanager
def _private_folder() -> Iterator[Path]:
    path, lock = temporary_folders.make()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def _shared_folder(key: bytes) -> Iterator[Path]:
    """Yield the folder shared by this start's units on this host. Raises ConfigError."""
    path, lock = temporary_folders.share(hashlib.sha256(b"folder" + key).hexdigest()[:16])
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
