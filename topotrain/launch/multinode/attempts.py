"""The attempts of a job over several units, from the view of one unit."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topotrain.config.job import Job, OnFailure
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Event, Notice, Notifier, Saved
from topotrain.extensions.elastic.eligibility import absent_groups
from topotrain.launch import EventListener
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.grace_period import hint
from topotrain.launch.multinode.control_connection import (
    LeaderChanged,
    LeaderElected,
    News,
    UnitMessage,
    UnitVanished,
)
from topotrain.launch.multinode.election.succession import (
    OF_A_REPORT,
    EventReporter,
    Succession,
    Takeover,
    is_shown,
    lead_notice,
)
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import HostMap, rejoined
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous
from topotrain.launch.multinode.restart_barrier import (
    Begin,
    RestartBarrier,
    RestartInfo,
    await_begin,
    await_joins,
    await_leader,
    await_ready,
    check_found,
    send_attempt,
)
from topotrain.launch.multinode.unit_membership import UnitMembership
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy
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


@dataclass(slots=True)
class Attempts(Notifier):
    """The sequence of attempts, which the leader decides about and other units follow."""

    rendezvous: NodeRendezvous
    agreement: AttemptAgreement
    membership: UnitMembership
    stop: StopSignals
    on_event: EventListener
    succession: Succession
    origin: ResumeSource
    saved: Saved | None = None
    attempt: int = 0
    """The number of the last attempt that this unit has begun."""
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
        begun = self._follow((), 0)
        assert not isinstance(begun, LeaderElected), "a unit that no attempt includes cannot lead"
        if begun is not None:
            # Snapshots in the workspace are of this job exactly if it goes on from one of them.
            self.origin = ResumeSource(self.agreement.workspace, begun.attempt.resume)
        return begun

    def policy(self, here: Topology, begun: RestartInfo) -> RecoveryPolicy | Follower | None:
        """Return the policy of this unit in an attempt; None if nothing restarts."""
        self.attempt = begun.attempt.number
        self.membership.begin(begun.hosts)
        self.succession.begin(begun.hosts)
        if self.agreement.job.on_failure is not OnFailure.kContinue or self.succession.policy is not None:
            return self.succession.policy
        residents = [str(who) for unit in here.units for who in (*unit.workers, *unit.servers)]
        rank, control = self.rendezvous.rank, self.membership.control
        reporter = EventReporter(control, rank, begun.attempt.number)
        self.succession.begin(begun.hosts, reporter)
        return Follower(residents, reporter)

    def next(self, run: RunLoop, begun: RestartInfo) -> RestartInfo | None:
        """Return the next attempt; None if the job ends instead. Raises ConfigError."""
        number, self.saved = begun.attempt.number, run.shutdown.saved or self.saved
        news: Sequence[News] = run.unread
        found: RestartInfo | LeaderElected | LeaderChanged | None
        while True:
            if self.succession.policy is not None:
                found = self._lead(news, number)
            else:
                # All processes of this unit have ended: the leader waits for that of all before it begins anything.
                self.membership.control.report({"life": number, "ready": True})
                found = self._follow(news, number)
            if isinstance(found, LeaderElected):
                news, number = self._take_over(found, number)
            elif isinstance(found, LeaderChanged):
                self._on_leader_changed(found, number)
                news = ()
            else:
                return found

    def _follow(self, news: Sequence[News], number: int) -> RestartInfo | LeaderElected | None:
        """Wait for the attempt after this one; return it, or that this unit leads instead."""
        while True:
            begun = await_begin(
                news, self.membership, self.stop, number, self.agreement.workspace, self.rendezvous.patience
            )
            news = ()
            if isinstance(begun, LeaderChanged):
                self._on_leader_changed(begun, number)
            elif isinstance(begun, Begin):
                self.succession.log.replace(begun.decisions, time.monotonic())
                self.job = begun.info.job or self.job
                return begun.info
            else:
                return begun

    def _on_leader_changed(self, news: LeaderChanged, number: int) -> None:
        self.succession.follow(news.rank)
        # A unit that waits to be included has nothing to report.
        if not self.rendezvous.returns or number:
            self.succession.join(self.membership.control, number, running=False)

    def _take_over(self, elected: LeaderElected, number: int) -> tuple[Sequence[News], int]:
        """Lead, with no process running here.

        Returns the news for the barrier, and the number of the last attempt of the job. If the job ends instead, or
        another unit leads, this unit does not lead.
        """
        rank, control = self.succession.rank, self.membership.control
        if not control.leads_in(elected.term):
            # The news that another unit leads is on its way.
            return (), number
        takeover = Takeover(elected, self.succession.join_words(number, running=False), rank, {rank, *control.ranks})
        if not await_joins(takeover, self.membership, self.stop, self, self.rendezvous.patience):
            return (), number
        self.on_event(lead_notice(takeover, rank))
        self.saved = takeover.saved or self.saved
        past = self.succession.take_over(takeover, time.monotonic())
        policy = self.succession.policy
        assert policy is not None
        # A former leader had decided to restart the job, or this unit has ended its processes by itself.
        shown: list[Event] = [action for action in past if isinstance(action, OF_A_REPORT)]
        for lost, failed in [] if policy.over else sorted(takeover.lost.items()):
            shown += [found for found in policy.on_unit_lost(lost, failed, time.monotonic()) if is_shown(found)]
        for event in shown:
            self.on_event(event)
        for each in sorted(takeover.joined.keys() - {rank}):
            for known, decision in takeover.unknown_to(each):
                control.send(each, {"life": takeover.joined[each]["life"], "number": known, "decision": decision})
        self._end_processes(takeover)
        joined = [UnitMessage(each, words) for each, words in takeover.joined.items() if "ready" in words]
        lost_units = [UnitVanished(each, failed) for each, failed in takeover.lost.items()]
        return [*joined, *lost_units, *takeover.later], takeover.attempt

    def answer(self) -> None:
        """Join a new leader, or answer the units that join this one.

        They get the decisions that they do not know. The work of this unit is done. Nothing restarts any more, and the
        decision that says so is among them.
        """
        for news in self.membership.control.news():
            if isinstance(news, LeaderChanged):
                self.succession.follow(news.rank)
                # With processes: a unit without any would let the whole job start again.
                self.succession.join(self.membership.control, self.attempt, running=True)
            elif isinstance(news, UnitMessage) and "joins" in news.words:
                for number in range(news.words["at"] + len(news.words["log"]), len(self.succession.log)):
                    decision = self.succession.log.decisions[number]
                    words = {"life": news.words["life"], "number": number, "decision": decision}
                    self.membership.control.send(news.rank, words)

    def _end_processes(self, takeover: Takeover) -> None:
        """Let the units that run end their processes, so that the whole job restarts."""
        decided = self.succession.decide([{"command": "renew", "ranks": None, "values": {}}], time.monotonic())
        assert decided is not None
        for rank in takeover.running:
            words = {"life": takeover.joined[rank]["life"], "number": decided[0], "decision": decided[1]}
            self.membership.control.send(rank, words)

    def _lead(self, news: Sequence[News], number: int) -> RestartInfo | LeaderElected | LeaderChanged | None:
        """Begin the next attempt when all units are ready; None if the job ends."""
        policy, leader, hosts = self.succession.policy, self.membership.leader, self.succession.hosts
        if policy is None or leader is None:
            # The news that another unit leads is on its way.
            return await_leader(news, self.membership, self.stop, self.rendezvous.patience)
        resized, why = policy.resized, ""
        if resized is not None:
            why = f"the job goes on with nworkers_per_group: {resized.cluster.nworkers_per_group}"
        self.job = resized or policy.job
        topology, absent = layout(self.job.cluster, hosts.numbers, hosts.link_mbit), policy.absent_groups
        # The barrier does not wait for a vanished unit that would have no processes.
        vacant = [u.rank for u in topology.units if not u.servers and absent.issuperset(w.group for w in u.workers)]
        others = [unit.rank for unit in topology.units if unit.rank != self.succession.rank]
        barrier = RestartBarrier(number, others, vacant, self.rendezvous.patience)
        more = hint(self.saved)
        ready = await_ready(barrier, news, self.membership, self.stop, self, f"; {more}" if more else "")
        if not isinstance(ready, bool):
            return ready
        hosts = rejoined(hosts, barrier.back)
        topology = layout(self.job.cluster, hosts.numbers, hosts.link_mbit)
        if resized is None:
            policy.begin_attempt(topology)
        else:
            policy.begin_resized(resized, topology)
        self.succession.decide((), time.monotonic())
        resume = self.origin.newest(self)
        check_found(resume, self.saved, self.job)
        attempt = AttemptInfo(number + 1, resume, policy.absent_groups, why)
        # Last: a unit that gets this message starts its processes.
        begun = RestartInfo(attempt, hosts, self.job)
        send_attempt(leader, barrier, begun, self.succession.log.decisions)
        return begun

    def notify(self, text: str) -> None:
        self.on_event(Notice("launcher", text))
