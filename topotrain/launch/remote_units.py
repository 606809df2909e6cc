"""The other units of a job, for the event loop of a launcher.

In the leader the events of other units go to the recovery policy, and its decisions to the units. In a unit that
follows, the commands of the leader are carried out. A unit may change from one to the other at any time.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topotrain.config.topology import Topology
from topotrain.core.events import Event, Failed, Saved, Unsaved, from_json
from topotrain.launch.action_executor import ActionExecutor
from topotrain.launch.job_shutdown import JobShutdown, LauncherContext
from topotrain.launch.multinode.control_connection import (
    LeaderChanged,
    LeaderElected,
    News,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.decision_log import LoggedPolicy
from topotrain.launch.multinode.election.succession import OF_A_REPORT, Takeover, lead_notice, replaced
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.reliable_messages import Words
from topotrain.launch.recovery.recovery_actions import Action, FailJob
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy


class RemoteUnits:
    """The other units, in one attempt of the job.

    Args:
        topology: the layout, with the units that run here.
        recovery: decides about restarts; it changes when this unit leads another time than before.
        executor, shutdown: of this unit.
        host: the settings and resources of the launcher.
    """

    def __init__(
        self,
        topology: Topology,
        recovery: RecoveryPolicy | Follower | None,
        executor: ActionExecutor,
        shutdown: JobShutdown,
        host: LauncherContext,
    ) -> None:
        self._topology, self.recovery = topology, recovery
        self._executor, self._shutdown, self._host = executor, shutdown, host
        self._connection, self._succession = host.connection, host.succession
        self._takeover: Takeover | None = None
        self._attempt = 0
        self._unread: list[News] = []

    def begin(self, attempt: int) -> None:
        """Begin an attempt."""
        self._attempt = attempt

    @property
    def unread(self) -> list[News]:
        """News for the next attempt of the job."""
        if self._takeover is None:
            return self._unread
        # This attempt has ended before the takeover, which begins anew.
        me = self._topology.units[0].rank
        joined = [UnitMessage(rank, words) for rank, words in self._takeover.joined.items() if rank != me]
        lost = [UnitVanished(rank, failed) for rank, failed in self._takeover.lost.items()]
        return [self._takeover.elected, *joined, *lost, *self._takeover.later, *self._unread]

    def poll(self) -> None:
        """Pass the state of the connections to the policy, and its suspicion to them."""
        if self._connection is None or self.recovery is None:
            return
        if isinstance(self.recovery, Follower):
            self.recovery.on_connection(self._connection.all_received, self._connection.alone)
        self._connection.suspect(self.recovery.suspicious)

    def receive(self) -> Iterator[Sequence[Action]]:
        """Yield the actions that follow from messages, losses and returns of other units."""
        assert self._connection is not None
        for news in self._connection.news():
            yield from self._on_news(news)

    def _on_news(self, news: News) -> Iterator[Sequence[Action]]:
        match news:
            case LeaderElected():
                yield from self._on_elected(news)
            case LeaderChanged():
                self._on_leader_changed(news)
            case _ if self._takeover is not None:
                self._takeover.on_news(news)
                yield from self._take_over_if_complete(self._takeover)
            case UnitMessage(rank=rank, words=words) if words.get("life") == self._attempt and "ready" not in words:
                # Known even if it changes nothing here: this unit may lead the next attempt.
                if "decision" in words and self._succession is not None and isinstance(self.recovery, Follower):
                    self._succession.on_decision(words, time.monotonic())
                # The processes of a lost unit may have been restarted elsewhere, so its messages are ignored.
                lost = isinstance(self.recovery, RecoveryPolicy) and rank in self.recovery.lost_units
                if not self._shutdown.stopping and not lost:
                    yield self._on_message(rank, words)
            case UnitMessage():
                # It is for the barrier between attempts, or about the next attempt.
                self._unread.append(news)
            case UnitReturned():
                yield from self._on_unit_returned(news)
            case UnitVanished(rank=rank, failed=failed):
                self._unread.append(news)
                yield from self._on_unit_lost(rank, failed)

    def _on_elected(self, elected: LeaderElected) -> Iterator[Sequence[Action]]:
        if self._succession is None or self._connection is None or not self._connection.leads_in(elected.term):
            return  # the news that another unit leads is on its way
        me = self._succession.join_words(self._attempt, not self._shutdown.stopping)
        ranks = {self._succession.rank, *self._connection.ranks}
        self._takeover = Takeover(elected, me, self._succession.rank, ranks)
        yield from self._take_over_if_complete(self._takeover)

    def _on_leader_changed(self, news: LeaderChanged) -> None:
        if self._succession is None or self._connection is None:
            return
        self._takeover = None
        self._succession.follow(news.rank)
        if news.deposed:
            self._host.notify(f"unit {self._succession.rank} leads the job no longer: it was out of reach for too long")
            if not self._shutdown.stopping:
                # The other units count this one as lost, with its processes.
                self._shutdown.restart()
        else:
            self._succession.join(self._connection, self._attempt, running=not self._shutdown.stopping)

    def _take_over_if_complete(self, takeover: Takeover) -> Iterator[Sequence[Action]]:
        """Lead from now on, once all other units have joined or are lost."""
        # With its processes ended, this unit leads at the barrier before the next attempt.
        if takeover.missing or self._shutdown.stopping:
            return
        assert self._succession is not None
        # Its own processes have gone on since the election.
        takeover.update(self._succession.join_words(self._attempt, running=True))
        self._takeover, now = None, time.monotonic()
        yield [lead_notice(takeover, self._succession.rank)]
        own = list(takeover.unknown_to(self._succession.rank))
        past = self._succession.take_over(takeover, now)
        policy = self._succession.policy
        assert policy is not None
        for _, decision in own:
            yield self._carry_out(decision["commands"])
        self.recovery = policy
        self._executor.lead(policy)
        self._shutdown.lead(policy, takeover.saved)
        self._send_decisions(takeover)
        if self._shutdown.saving and self._topology.cluster.replicas > 1:
            # Only the unit that decides has the place of the first server.
            yield policy.on_stop_request()
            self._executor.request_snapshot()
        # They are in no report of a unit that is still there.
        yield [action for action in past if isinstance(action, OF_A_REPORT)]
        for rank in sorted(takeover.joined.keys() - takeover.running):
            self._unread.append(UnitMessage(rank, takeover.joined[rank]))
        if takeover.running != takeover.joined.keys() or (policy.over and self._shutdown.again):
            self._executor.restart_job()
        for origin, event in takeover.events():
            yield self._shown(policy.on_remote_event(origin, event, now), event)
        for rank, failed in sorted(takeover.lost.items()):
            self._unread.append(UnitVanished(rank, failed))
            yield from self._on_unit_lost(rank, failed)
        # The former leader did not come to it.
        yield [action for action in past if isinstance(action, FailJob)]
        for news in takeover.later:
            yield from self._on_news(news)

    def _send_decisions(self, takeover: Takeover) -> None:
        """Send each unit the decisions that it has not received."""
        assert self._connection is not None
        for rank in takeover.joined.keys() & set(self._connection.ranks):
            for number, decision in takeover.unknown_to(rank):
                life = takeover.joined[rank]["life"]
                self._connection.send(rank, {"life": life, "number": number, "decision": decision})

    def _on_unit_lost(self, rank: int, failed: Failed) -> Iterator[Sequence[Action]]:
        if isinstance(self.recovery, RecoveryPolicy) and not self._shutdown.stopping:
            yield self.recovery.on_unit_lost(rank, failed, time.monotonic())
            if not self._shutdown.stopping and self._connection is not None:  # if it still runs, it must end
                self._connection.send(rank, {"life": self._attempt, "outcast": True})

    def _on_unit_returned(self, news: UnitReturned) -> Iterator[Sequence[Action]]:
        """Handle a new unit at the rank of a lost one."""
        # First: the new process may be here before its predecessor's silence was noticed.
        yield from self._on_unit_lost(news.rank, replaced(news.rank, news.unit))
        server = None if self._connection is None else self._connection.server
        if self._shutdown.again:
            self._unread.append(news)
        elif not self._shutdown.stopping and server is not None:
            # Only a restart of the whole job can include it, and this job goes on.
            server.open(news.rank, news.unit.word)
            if self._topology.cluster.replicas > 1:  # its servers are needed if more are lost
                self._unread.append(news)
                text = f"{news.unit.who} waits until the whole job starts again: other units run its processes"
                self._host.notify(text)
            else:
                server.send(news.rank, {"life": self._attempt, "outcast": True})

    def _on_message(self, rank: int, words: Words) -> Sequence[Action]:
        """Handle an event of another unit, or a decision of the leader."""
        if isinstance(self.recovery, LoggedPolicy) and "event" in words:
            event = from_json(json.dumps(words["event"]))
            # The first server may be in the other unit, and this unit may have asked it for the last snapshot.
            if isinstance(event, Saved | Unsaved):
                self._shutdown.on_event(event)
                self._executor.on_event(event)
            origin = {"rank": rank, "life": words["life"], "number": words["number"]}
            return self._shown(self.recovery.on_remote_event(origin, event, time.monotonic()), event)
        if "outcast" in words:
            assert self._host.others is not None
            self._host.others.exclude()
        elif "decision" in words:
            return self._carry_out(words["decision"]["commands"])
        return ()

    def _shown(self, actions: Sequence[Action], event: Event) -> Sequence[Action]:
        """Return the actions without the event, which its unit has shown already."""
        return [action for action in actions if action is not event or isinstance(event, Failed)]

    def _carry_out(self, commands: Sequence[Mapping[str, Any]]) -> Sequence[Action]:
        """Carry out the commands of the leader that are for this unit."""
        rank = self._topology.units[0].rank
        for command in commands:
            if command["ranks"] is None or rank in command["ranks"]:
                self._carry_out_one(command["command"], command["values"])
        # No action, but a command such as "end" may complete this unit.
        return ()

    def _carry_out_one(self, command: str, values: Mapping[str, Any]) -> None:
        if not isinstance(self.recovery, Follower) or self._shutdown.stopping:
            return
        match command:
            case "renew":
                self._executor.restart_job()
            case "end":
                self.recovery.end()
            case "listen":
                self.recovery.listen(values["on"])
            case _:
                self._executor.send(command, **values)
