"""The attempts of a job over several units, from the view of one unit."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from topotrain.config.job import Job, OnFailure
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Event, Notice, Notifier, Saved, to_json
from topotrain.extensions.elastic.eligibility import absent_groups
from topotrain.extensions.replication.replica_placement import check
from topotrain.launch import EventListener
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.grace_period import hint
from topotrain.launch.multinode.control_connection import ControlConnection
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import HostMap
from topotrain.launch.multinode.node_membership import LeaderMembership, UnitMembership
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous
from topotrain.launch.multinode.reliable_messages import shortened
from topotrain.launch.multinode.restart_barrier import (
    RestartBarrier,
    RestartInfo,
    await_begin,
    await_ready,
    check_found,
    send_attempt,
)
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, recovery
from topotrain.launch.recovery.resume_point import ResumeSource
from topotrain.launch.run_loop import RunLoop


@dataclass(frozen=True, slots=True)
class AttemptAgreement:
    """The result of the units' agreement before the first attempt.

    origin: the source of snapshots to resume from. resume: the snapshot of the first attempt; "": the job starts at
        step 0.
    """

    job: Job
    hosts: HostMap
    workspace: Path
    origin: ResumeSource
    resume: str = ""


@dataclass(frozen=True, slots=True)
class LeaderConnection:
    """Sends the events of one attempt to unit 0."""

    control: ControlConnection
    attempt: int

    def emit(self, event: Event) -> None:
        """As `EventSink.emit`."""
        self.control.send(0, {"life": self.attempt, "event": shortened(json.loads(to_json(event)))})


@dataclass(slots=True)
class Attempts(Notifier):
    """The sequence of attempts, which unit 0 decides about and other units follow."""

    rendezvous: NodeRendezvous
    agreement: AttemptAgreement
    membership: UnitMembership
    stop: StopSignals
    on_event: EventListener
    saved: Saved | None = None
    job: Job = field(init=False)
    """The job of the present attempt, with its number of workers."""

    def __post_init__(self) -> None:
        self.job = self.agreement.job

    def first(self) -> RestartInfo | None:
        """Return the first attempt for this unit; None if the job has ended."""
        if not self.rendezvous.returns:
            absent = absent_groups(self.job, layout(self.job.cluster))
            attempt = AttemptInfo(resume=self.agreement.resume, absent=absent)
            return RestartInfo(attempt, self.agreement.hosts)
        # It joins a running job: the next attempt is the first one that includes it.
        return self._adopt(await_begin((), self.membership, self.stop, 0, self.agreement.workspace))

    def _adopt(self, begun: RestartInfo | None) -> RestartInfo | None:
        """Use the job of an attempt that unit 0 has begun."""
        if begun is not None and begun.job is not None:
            self.job = begun.job
        return begun

    def recovery(self, topology: Topology, began: float) -> RecoveryPolicy | None:
        """Return the policy by which unit 0 decides for all units; None in other units.

        Raises ConfigError.
        """
        # Only these workers report every step here; the others do so while a recovery is open.
        near = frozenset(map(str, topology.units[0].workers))
        return None if self.rendezvous.rank else recovery(self.agreement.job, topology, began, near)

    def follows(self, here: Topology, begun: RestartInfo) -> Follower | None:
        """Return the policy that follows unit 0; None if nothing restarts in this job."""
        if self.agreement.job.on_failure is not OnFailure.kContinue:
            return None
        residents = [str(who) for unit in here.units for who in (*unit.workers, *unit.servers)]
        return Follower(residents, LeaderConnection(self.membership.control, begun.attempt.number))

    def next(self, goes_on: RecoveryPolicy | None, run: RunLoop, begun: RestartInfo) -> RestartInfo | None:
        """Return the next attempt; None if the job ends instead. Raises ConfigError."""
        number, self.saved = begun.attempt.number, run.shutdown.saved or self.saved
        if goes_on is None:
            # All processes of this unit have ended: unit 0 waits for that of all units before it begins anything.
            self.membership.control.send(0, {"life": number, "ready": True})
            return self._adopt(await_begin(run.unread, self.membership, self.stop, number, self.agreement.workspace))
        assert isinstance(self.membership, LeaderMembership)
        resized, why = run.executor.resized, ""
        if resized is not None:
            self.job, why = resized, f"the job goes on with nworkers_per_group: {resized.cluster.nworkers_per_group}"
        topology, absent = layout(self.job.cluster, begun.hosts.numbers), goes_on.absent_groups
        # The barrier does not wait for a vanished unit that would have no processes.
        vacant = [u.rank for u in topology.units if not u.servers and absent.issuperset(w.group for w in u.workers)]
        barrier = RestartBarrier(number, range(1, len(topology.units)), vacant, self.rendezvous.patience)
        more = hint(self.saved)
        if not await_ready(barrier, run.unread, self.membership, self.stop, self, f"; {more}" if more else ""):
            return None
        hosts = self.rendezvous.regather(barrier.back, begun.hosts)
        topology = layout(self.job.cluster, hosts.numbers)
        # Replacements may run on hosts where a server and its backup would share a failure domain.
        check(self.job, topology)
        if resized is None:
            goes_on.begin_attempt(topology)
        else:
            goes_on.begin_resized(resized, topology)
        resume = self.agreement.origin.newest(self)
        check_found(resume, self.saved, self.job)
        attempt = AttemptInfo(number + 1, resume, goes_on.absent_groups, why)
        # Last: a unit that gets this message starts its processes.
        next_one = RestartInfo(attempt, hosts, self.job)
        send_attempt(self.membership, barrier, next_one)
        return next_one

    def notify(self, text: str) -> None:
        """As `Notifier.notify`."""
        self.on_event(Notice("launcher", text))
