"""The lives of a job over several units, one after the other, as one of its units goes through them.

Rule: unit 0 decides, from what it hears of all; the others follow.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from topotrain.config.job import Job
from topotrain.config.topology import Topology, layout
from topotrain.core.events import Event, Notice, Saved, to_json
from topotrain.extensions.replication.replica_placement import check
from topotrain.launch import OnEvent
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals
from topotrain.launch.grace_period import hint
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import HostMap
from topotrain.launch.multinode.node_membership import NodeMembership
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous
from topotrain.launch.multinode.reliable_messages import shortened
from topotrain.launch.multinode.restart_barrier import (
    RestartBarrier,
    RestartInfo,
    await_begin,
    begin_anew,
    check_found,
    muster,
)
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, recovery
from topotrain.launch.recovery.resume_point import ResumeSource
from topotrain.launch.run_loop import RunLoop


@dataclass(frozen=True, slots=True)
class AttemptAgreement:
    """What the units have agreed on before they begin.

    origin: of the job's snapshots, as it was before that. resume: the one that the job begins with; "": none.
    """

    job: Job
    hosts: HostMap
    workspace: Path
    origin: ResumeSource
    resume: str = ""


@dataclass(slots=True)
class Attempts:
    """The lives of the job, one after the other, as this unit decides about them or follows."""

    hall: NodeRendezvous
    met: AttemptAgreement
    company: NodeMembership
    heard: StopSignals
    on_event: OnEvent
    saved: Saved | None = None

    def first(self) -> RestartInfo | None:
        """The life that this unit begins with; None: there is none any more."""
        if not self.hall.returns:
            return RestartInfo(AttemptInfo(resume=self.met.resume), self.met.hosts)
        return await_begin((), self.company, self.heard, 0, self.met.workspace)

    def recovery(self, topology: Topology, began: float) -> RecoveryPolicy | None:
        """What decides for all units, in unit 0. Raises ConfigError."""
        near = frozenset(map(str, topology.units[0].workers))
        return None if self.hall.rank else recovery(self.met.job, topology, began, near)

    def follows(self, here: Topology, begun: RestartInfo) -> Follower | None:
        """What leaves it to unit 0, in the others; None where nothing is to start again."""
        post, life = self.company.post, begun.life.number
        if post is None:
            return None

        def say(event: Event) -> None:
            post.say(0, {"life": life, "event": shortened(json.loads(to_json(event)))})

        return Follower([str(who) for unit in here.units for who in (*unit.workers, *unit.servers)], say)

    def next(self, goes_on: RecoveryPolicy | None, run: RunLoop, begun: RestartInfo) -> RestartInfo | None:
        """What follows when the job starts again as a whole; None: it ends instead. Raises ConfigError."""
        number, self.saved = begun.life.number, run.saved or self.saved
        if goes_on is None:
            assert self.company.post is not None
            self.company.post.say(0, {"life": number, "ready": True})
            return await_begin(run.unread, self.company, self.heard, number, self.met.workspace)
        goes_on.renewed()
        topology, missing = layout(self.met.job.cluster, begun.hosts.numbers), goes_on.missing
        vacant = [u.rank for u in topology.units if missing.issuperset(map(str, (*u.workers, *u.servers)))]
        made = RestartBarrier(number, range(1, len(topology.units)), vacant, self.hall.patience)
        more = hint(self.saved)
        if not muster(made, run.unread, self.company, self.heard, self._tell, f"; {more}" if more else ""):
            return None
        hosts = self.hall.regather(made.back, begun.hosts)
        topology = layout(self.met.job.cluster, hosts.numbers)
        check(self.met.job, topology)
        goes_on.stands(topology)
        resume = self.met.origin.newest(self._tell)
        check_found(resume, self.saved, self.met.job)
        life = AttemptInfo(number + 1, resume, goes_on.attendance.away)
        begin_anew(self.company, made, hosts, life)
        return RestartInfo(life, hosts)

    def _tell(self, text: str) -> None:
        self.on_event(Notice("launcher", text))
