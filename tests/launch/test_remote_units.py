"""The other units in the run loop of one unit: what it does when it is elected, or finds another leader."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.core.events import Event, Failed, Lost, Started
from topotrain.launch.multinode.attempts import Attempts
from topotrain.launch.multinode.control_connection import LeaderChanged, LeaderElected, News, UnitMessage
from topotrain.launch.multinode.election.succession import EventReporter, Succession
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.recovery.recovery_actions import RestartGroup
from topotrain.launch.remote_units import RemoteUnits

CLUSTER = Cluster(nworker_groups=3, nworkers_per_group=2, server_worker_separate=True)
COUNT = len(layout(CLUSTER).units)
HOSTS = HostMap(
    (0,) * COUNT,
    ("h",) * COUNT,
    ("127.0.0.1",) * COUNT,
    units=tuple(NodeInfo(rank, "h", 1, "m", "", "", COUNT, False, f"{rank:x}") for rank in range(COUNT)),
)
LOST = Failed("unit 0", "died", "unit 0 on h vanished without a word", "")


class Channel:
    """The connections of a unit; what it sends is kept."""

    def __init__(self, rank: int) -> None:
        self.rank, self.term, self.leader = rank, 1, 0
        self.arrived: list[News] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.reported: list[dict[str, Any]] = []

    @property
    def ranks(self) -> list[int]:
        return [each for each in range(COUNT) if each != self.rank] if self.leader == self.rank else [self.leader]

    def leads_in(self, term: int) -> bool:
        return self.leader == self.rank and self.term == term

    def news(self) -> list[News]:
        found, self.arrived = self.arrived, []
        return found

    def send(self, rank: int, words: dict[str, Any]) -> None:
        self.sent.append((rank, words))

    def report(self, words: dict[str, Any]) -> None:
        if self.leader != self.rank:
            self.reported.append(words)


class Commands:
    """In the place of the executor: keeps what it is to do."""

    def __init__(self) -> None:
        self.led: list[object] = []
        self.restarted = 0

    def lead(self, policy: object) -> None:
        self.led.append(policy)

    def restart_job(self) -> None:
        self.restarted += 1


class Unit:
    """One unit of the job in its first attempt, with its processes."""

    def __init__(self, rank: int) -> None:
        self.channel, self.commands = Channel(rank), Commands()
        self.succession = Succession(Job(cluster=CLUSTER), rank, HOSTS.numbers, HOSTS)
        channel: Any = self.channel
        self.reporter = EventReporter(channel, rank, 0)
        self.succession.begin(HOSTS, self.reporter)
        here = SimpleNamespace(units=[layout(CLUSTER, HOSTS.numbers).units[rank]], cluster=CLUSTER)
        self.ended: list[int] = []
        shutdown = SimpleNamespace(stopping=False, again=False, saving=False, lead=lambda policy, saved: None)
        shutdown.restart = lambda: self.ended.append(rank)
        host = SimpleNamespace(connection=channel, succession=self.succession, notify=lambda text: None)
        residents = [str(who) for who in (*here.units[0].workers, *here.units[0].servers)]
        self.follower = Follower(residents, self.reporter)
        made: Any = (here, self.follower, self.commands, shutdown, host)
        self.remote = RemoteUnits(*made)
        self.remote.begin(0)

    def elect(self, term: int) -> LeaderElected:
        self.channel.term, self.channel.leader = term, self.channel.rank
        return LeaderElected(term, 0, LOST)

    def receive(self, *news: News) -> list[object]:
        self.channel.arrived += news
        return [action for actions in self.remote.receive() for action in actions]


@pytest.fixture
def units() -> list[Unit]:
    return [Unit(rank) for rank in range(COUNT)]


def joins(unit: Unit) -> UnitMessage:
    return UnitMessage(unit.channel.rank, json.loads(json.dumps(unit.succession.join_words(0, True))))


def started(unit: Unit) -> None:
    for who in unit.remote._topology.units[0].workers:
        unit.follower.on_event(Started(str(who), 7), 0.0)


def test_what_happens_here_between_an_election_and_the_takeover_counts(units: list[Unit]) -> None:
    me, *others = units[1:]
    for unit in units[1:]:
        started(unit)
    assert me.receive(me.elect(2)) == []
    # The other units have not joined yet.
    event: Event = Lost("worker 1/0", 7, "worker 1/0 (pid 7) was killed by SIGKILL", "")
    me.follower.on_event(event, 1.0)
    found = me.receive(*map(joins, others))
    assert me.commands.led == [me.succession.policy]
    assert any(isinstance(action, RestartGroup) and action.group == 1 for action in found), found


def test_a_unit_that_another_one_has_followed_by_now_does_not_take_over(units: list[Unit]) -> None:
    """Its run loop was slow: it has been elected, and unit 0 has been elected again."""
    me = units[1]
    elected = me.elect(2)
    me.channel.term, me.channel.leader = 3, 0
    me.receive(elected, LeaderChanged(3, 0, True))
    assert me.commands.led == [] and me.succession.policy is None
    assert me.channel.sent == []
    assert me.ended == [1], "the other units count it as lost"


def test_a_leader_takes_no_decision_from_a_unit(units: list[Unit]) -> None:
    me, *others = units[1:]
    me.receive(me.elect(2), *map(joins, others))
    count = len(me.succession.log)
    decision = {"at": 1.0, "inputs": [], "commands": [{"command": "renew", "ranks": None, "values": {}}]}
    me.receive(UnitMessage(2, {"life": 0, "number": count, "decision": decision}))
    assert len(me.succession.log) == count and not me.commands.restarted


def test_a_unit_whose_work_is_done_joins_the_next_leader(units: list[Unit]) -> None:
    """It knows that nothing restarts any more, and the next leader may not."""
    done, leader, *others = units[1:]
    end = {"at": 9.0, "inputs": [], "commands": [{"command": "end", "ranks": None, "values": {}}]}
    done.succession.log.add(0, end, 9.0)
    assert leader.receive(leader.elect(2), *map(joins, others)) == []
    done.channel.term, done.channel.leader = 2, 2
    done.channel.arrived.append(LeaderChanged(2, 2, False))
    attempts: Any = SimpleNamespace(
        membership=SimpleNamespace(control=done.channel), succession=done.succession, attempt=0
    )
    Attempts.answer(attempts)
    (words,) = done.channel.reported
    leader.receive(UnitMessage(1, json.loads(json.dumps(words))))
    assert leader.commands.led and not leader.commands.restarted
    assert leader.follower.complete, "it has carried out what the former leader decided"
