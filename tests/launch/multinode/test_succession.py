"""What a new leader knows: the state of the one before it, what has happened since, and what other units tell it."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from reports import EventList

from topotrain.config.job import Cluster, Job, TransportChoice
from topotrain.config.topology import layout
from topotrain.core.events import (
    Agreed,
    Covered,
    Differs,
    Event,
    Exited,
    Failed,
    Finished,
    Frozen,
    Lost,
    Missed,
    Notice,
    Recovered,
    Repeatable,
    Repeated,
    Saved,
    Started,
    StepDone,
    Unrepeatable,
    Unsaved,
)
from topotrain.launch.multinode.attempts import Attempts
from topotrain.launch.multinode.control_connection import (
    ControlChannel,
    LeaderChanged,
    LeaderElected,
    News,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.decision_log import (
    PART,
    Decision,
    DecisionLog,
    LoggedPolicy,
    heard,
    lost_units,
)
from topotrain.launch.multinode.election.succession import EventReporter, Succession, Takeover
from topotrain.launch.multinode.follower import Follower
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.recovery.recovery_actions import (
    LOSE,
    FailJob,
    RequestSnapshot,
    ResizeRequest,
    RestartGroup,
    RestartResized,
)
from topotrain.launch.remote_units import RemoteUnits

DOWNPOUR = Cluster(nworker_groups=3, nworkers_per_group=2, server_worker_separate=True)
TWICE = Cluster(
    nworkers_per_group=2,
    server_worker_separate=True,
    nworkers_per_procs=2,
    nservers_per_group=3,
    transport=TransportChoice.kTcp,
    replicas=2,
)
SHUFFLES = 60


def hosts_of(cluster: Cluster) -> HostMap:
    count = len(layout(cluster).units)
    units = tuple(NodeInfo(rank, "h", 1, "m", "", "", count, False, f"{rank:x}") for rank in range(count))
    return HostMap((0,) * count, ("h",) * count, ("127.0.0.1",) * count, units=units)


def succession(cluster: Cluster, rank: int = 0, restarts: int = 3) -> Succession:
    hosts = hosts_of(cluster)
    return Succession(Job(cluster=cluster, restarts=restarts), rank, hosts.numbers, hosts)


def leader(cluster: Cluster, began: float, restarts: int = 3) -> Succession:
    made = succession(cluster, restarts=restarts)
    made.open(layout(cluster, made.first), began)
    return made


def policy(made: Succession) -> LoggedPolicy:
    assert made.policy is not None
    return made.policy


def names(cluster: Cluster) -> list[str]:
    return [str(who) for unit in layout(cluster).units for who in (*unit.workers, *unit.servers)]


def lost(who: str) -> Lost:
    return Lost(who, 7, f"{who} (pid 7) was killed by SIGKILL", "last words")


def silent(rank: int) -> Failed:
    return Failed(f"unit {rank}", "died", f"unit {rank} on h vanished without a word", "")


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


def some_event(rng: random.Random, cluster: Cluster) -> Event:
    who = rng.choice(names(cluster))
    group = rng.randrange(cluster.nworker_groups)
    choices: list[Event] = [
        Started(who, rng.randrange(1000)),
        Exited(who, 7, 0),
        lost(who),
        Failed(who, "peer", "lost server 0/0", ""),
        Finished(who, 1, 8, 0.0, 0, 0, 0),
        Agreed("server 0/0", group, LOSE, rng.choice(("", "nobody else reads"))),
        Covered(f"server 0/{rng.randrange(3)}", rng.randrange(3)),
        Saved("server 0/0", 1, 5, "p", "time"),
        Repeatable(who, rng.choice(("", "", "it leaves its loop early"))),
        Repeated(who, 7, 0.1),
        step(who),
        step(who),
        step(who),
    ]
    event = rng.choice(choices)
    of_worker = isinstance(event, StepDone | Repeatable | Repeated)
    return event if not of_worker or who.startswith("worker") else Started(who, 1)


def as_json(decisions: list[Decision]) -> list[Decision]:
    """As they arrive in another unit."""
    found: list[Decision] = json.loads(json.dumps(decisions))
    return found


def after(made: Succession, rng: random.Random, cluster: Cluster, began: float) -> list[object]:
    """What a policy does from here on, whatever happens."""
    found: list[object] = []
    for number in range(40):
        now = began + 1000.0 + number * 0.5
        match rng.randrange(8):
            case 0:
                rank = rng.randrange(len(layout(cluster).units))
                found += policy(made).on_unit_lost(rank, silent(rank), now)
            case 1:
                found += policy(made).poll(now)
            case _:
                event = some_event(rng, cluster)
                found += [action for action in policy(made).on_event(event, now) if action is not event]
        if policy(made).over:
            policy(made).begin_attempt()
    # The longest pause of others is of steps that are in no decision.
    return [replace(action, others_s=0.0) if isinstance(action, Recovered) else action for action in found]


@pytest.mark.parametrize("cluster", [DOWNPOUR, TWICE], ids=["downpour", "twice"])
def test_a_policy_that_receives_the_same_again_goes_on_as_the_one_before_it(cluster: Cluster) -> None:
    ended = 0
    for seed in range(SHUFFLES):
        rng = random.Random(seed)
        first = leader(cluster, 100.0, restarts=rng.choice((1, 3)))
        for who in names(cluster):
            policy(first).on_event(Started(who, 1), 100.0)
        now = 100.0
        for _ in range(rng.randrange(60)):
            now += rng.randrange(6) * 0.5  # exact, on all clocks
            match rng.randrange(8):
                case 0:
                    rank = rng.randrange(len(layout(cluster).units))
                    policy(first).on_unit_lost(rank, silent(rank), now)
                case 1:
                    policy(first).poll(now)
                case _:
                    policy(first).on_event(some_event(rng, cluster), now)
            first.decide((), now)
            if policy(first).over:
                policy(first).begin_attempt()
                first.decide((), now)
                ended += 1
        second = succession(cluster, rank=1, restarts=policy(first)._restarts._limit)
        elected = LeaderElected(2, -1, silent(0))
        words = {**second.join_words(0, running=True), "log": as_json(first.log.decisions)}
        # The clock of the other host says something else.
        second.log.extend(words["log"][:3], 7000.0 + (now - 100.0))
        second.take_over(Takeover(elected, words, 1, [1]), 7000.0 + now)
        began = policy(second)._began
        assert len(second.log) == len(first.log)
        one = after(first, random.Random(seed), cluster, 100.0)
        assert one == after(second, random.Random(seed), cluster, began), f"seed {seed}"
    assert ended > 10, "attempts must end, too"


def test_steps_and_snapshots_do_not_let_the_log_grow() -> None:
    made = leader(DOWNPOUR, 0.0)
    for who in names(DOWNPOUR):
        policy(made).on_event(Started(who, 1), 0.0)
    made.decide((), 0.0)
    for number in range(1000):
        for who in names(DOWNPOUR):
            if who.startswith("worker"):
                policy(made).on_event(step(who), float(number))
        policy(made).on_event(Saved("server 0/0", number, number, "p", "time"), float(number))
        policy(made).poll(float(number))
        made.decide((), 0.0)
    assert len(made.log) == 2
    assert len(made.log.decisions[1]["inputs"]) == 6, "the first steps"


# --- units that join ------------------------------------------------------------------------------------------------


def joins(made: Succession, told: list[tuple[int, Event]] = [], running: bool = True, life: int = 0) -> UnitMessage:  # noqa: B006
    words = made.join_words(life, running)
    words["told"] = [[number, json.loads(json_of(event))] for number, event in told]
    return UnitMessage(made.rank, json.loads(json.dumps(words)))


def json_of(event: Event) -> str:
    from topotrain.core.events import to_json

    return to_json(event)


def decision(*inputs: dict[str, object], commands: list[dict[str, object]] = []) -> Decision:  # noqa: B006
    return {"at": 1.0, "inputs": list(inputs), "commands": commands}


def test_the_longest_list_counts_and_units_get_what_they_lack() -> None:
    decisions = [decision(), decision(), decision(commands=[{"command": "end", "ranks": None, "values": {}}])]
    me, other = succession(DOWNPOUR, 1), succession(DOWNPOUR, 2)
    me.log.extend(decisions[:1], 1.0)
    other.log.extend(decisions, 1.0)
    takeover = Takeover(LeaderElected(2, 0, silent(0)), me.join_words(0, True), 1, [0, 1, 2])
    assert takeover.missing == {2}
    takeover.on_news(joins(other))
    assert takeover.missing == set()
    assert takeover.decisions == decisions
    assert [number for number, _ in takeover.unknown_to(1)] == [1, 2]
    assert list(takeover.unknown_to(2)) == []
    assert takeover.running == {1, 2}


class Sent(ControlChannel):
    """Keeps what is reported to the leader."""

    def __init__(self) -> None:
        self.words: list[dict[str, Any]] = []

    def report(self, words: Any) -> None:
        self.words.append(json.loads(json.dumps(words)))


def test_a_long_list_of_decisions_comes_in_parts() -> None:
    me, other, sent = succession(DOWNPOUR, 1), succession(DOWNPOUR, 2), Sent()
    decisions = [decision({"at": float(number), "poll": True}) for number in range(2 * PART + 1)]
    other.log.extend(decisions, 1.0)
    other.join(sent, 0, running=True)
    assert [len(words.get("part", words)["log"]) for words in sent.words] == [PART, PART, 1]
    takeover = Takeover(LeaderElected(2, 0, silent(0)), me.join_words(0, True), 1, [0, 1, 2])
    for words in sent.words:
        assert takeover.missing == {2}
        takeover.on_news(UnitMessage(2, words))
    assert takeover.missing == set() and takeover.decisions == decisions and takeover.later == []


def test_events_that_a_decision_follows_from_count_once() -> None:
    given = {"at": 1.0, "rank": 2, "life": 0, "number": 4, "event": json.loads(json_of(lost("worker 1/0")))}
    me, other = succession(DOWNPOUR, 1), succession(DOWNPOUR, 2)
    me.log.extend([decision(given)], 1.0)
    takeover = Takeover(LeaderElected(2, 0, silent(0)), me.join_words(0, True), 1, [0, 1, 2])
    takeover.on_news(joins(other, [(4, lost("worker 1/0")), (5, Exited("worker 1/0", 7, -9))]))
    assert list(takeover.events()) == [({"rank": 2, "life": 0, "number": 5}, Exited("worker 1/0", 7, -9))]


def test_units_that_are_lost_are_not_waited_for() -> None:
    me = succession(DOWNPOUR, 1)
    me.log.extend([decision({"at": 1.0, "lost": 3, "event": {}})], 1.0)
    takeover = Takeover(LeaderElected(2, 0, silent(0)), me.join_words(0, True), 1, range(5))
    assert takeover.missing == {2, 4}
    takeover.on_news(UnitVanished(2, silent(2)))
    returned = UnitReturned(2, hosts_of(DOWNPOUR).units[2])
    takeover.on_news(returned)
    assert takeover.missing == {4} and takeover.lost.keys() == {0, 2}
    assert takeover.later == [returned]
    assert lost_units([*me.log.decisions, decision({"hosts": [0]})]) == set(), "another attempt has all of them"


def test_a_unit_that_is_replaced_before_its_loss_is_noticed_is_not_waited_for() -> None:
    """Two units die at once, and both are started again: the next leader may never hear of the second loss."""
    me, other = succession(DOWNPOUR, 1), succession(DOWNPOUR, 2)
    takeover = Takeover(LeaderElected(2, 0, silent(0)), me.join_words(0, True), 1, range(4))
    takeover.on_news(joins(other))
    returned = [UnitReturned(rank, hosts_of(DOWNPOUR).units[rank]) for rank in (2, 3)]
    for each in returned:
        takeover.on_news(each)
    assert takeover.missing == set() and takeover.running == {1}
    assert takeover.lost[3].text == "unit 3 is gone, and unit 3 (pid 1 on h) has replaced it"
    assert takeover.later == returned


def test_an_event_that_a_unit_repeats_counts_once() -> None:
    made = leader(DOWNPOUR, 0.0)
    for who in names(DOWNPOUR):
        policy(made).on_event(Started(who, 1), 0.0)

    def receive(number: int, event: Event) -> list[type]:
        origin = {"rank": 1, "life": 0, "number": number}
        return [type(action) for action in policy(made).on_remote_event(origin, event, 1.0)]

    assert RestartGroup in receive(3, lost("worker 1/0"))
    for who in ("worker 1/0", "worker 1/1"):
        receive(4 + (who == "worker 1/1"), Started(who, 2))
    assert receive(3, lost("worker 1/0")) == [], "its successor is not lost"
    assert RestartGroup in receive(6, lost("worker 1/0"))


PAIR = Cluster(nworkers_per_group=2, server_worker_separate=True)


def test_a_change_of_the_number_of_workers_goes_on_under_the_next_leader() -> None:
    """Before its snapshot, after it, and when the job has begun with the other number."""
    first = leader(PAIR, 0.0)
    for who in names(PAIR):
        policy(first).on_event(Started(who, 1), 0.0)
    request = ResizeRequest("leave", 1, 30.0)
    assert [type(action) for action in policy(first).on_resize_request(request, 1.0)] == [RequestSnapshot]
    first.decide((), 1.0)

    def next_leader() -> Succession:
        made = succession(PAIR, rank=1)
        words = {**made.join_words(0, True), "log": as_json(first.log.decisions)}
        made.take_over(Takeover(LeaderElected(2, 0, silent(0)), words, 1, [1]), 1000.0)
        return made

    saved = Saved("server 0/0", 1, 5, "p", "end")
    other = next_leader()
    assert policy(other).on_resize_request(request, 1001.0)[0].error.endswith("try again when that is done")  # type: ignore[union-attr]
    for made, now in ((first, 2.0), (other, 1002.0)):
        assert any(isinstance(action, RestartResized) for action in policy(made).on_event(saved, now))
        assert policy(made).resized is not None and policy(made).job.cluster.nworkers_per_group == 2
    first.decide((), 2.0)
    resized = policy(next_leader()).resized
    assert resized is not None and resized.cluster.nworkers_per_group == 1
    policy(first).begin_resized(resized, layout(resized.cluster, first.hosts.numbers))
    first.decide((), 3.0)
    other = next_leader()
    assert policy(other).resized is None and policy(other).job == resized
    policy(first).begin_attempt(layout(resized.cluster, first.hosts.numbers))
    first.decide((), 4.0)
    assert policy(next_leader()).job == resized


def test_a_request_that_was_given_up_at_the_end_of_the_job_stays_given_up() -> None:
    first = leader(PAIR, 0.0)
    for who in names(PAIR):
        policy(first).on_event(Started(who, 1), 0.0)
    policy(first).on_resize_request(ResizeRequest("leave", 1, 30.0), 1.0)
    assert policy(first).on_stop_request()
    first.decide((), 1.0)
    made = succession(PAIR, rank=1)
    words = {**made.join_words(0, True), "log": as_json(first.log.decisions)}
    made.take_over(Takeover(LeaderElected(2, 0, silent(0)), words, 1, [1]), 1000.0)
    assert policy(made).on_event(Saved("server 0/0", 1, 5, "p", "end"), 1001.0) == [
        Saved("server 0/0", 1, 5, "p", "end")
    ]


def test_a_reporter_keeps_what_no_decision_follows_from() -> None:
    made = EventReporter(ControlChannel(1.0), 2, 3)
    for event in (Started("worker 1/0", 1), step("worker 1/0"), lost("worker 1/0")):
        made.emit(event)
    assert [number for number, _ in made.told] == [1, 3]
    made.settle(decision({"at": 1.0, "rank": 2, "life": 2, "number": 3, "event": {}}))
    assert [number for number, _ in made.told] == [1, 3], "of another attempt"
    made.settle(decision({"at": 1.0, "rank": 2, "life": 3, "number": 1, "event": {}}))
    assert [number for number, _ in made.told] == [3]
    assert heard([decision({"rank": 2, "life": 3, "number": 1}, {"rank": 2, "life": 3, "number": 9})], 3) == {2: 9}
    made.emit(Saved("server 0/0", 4, 70, "p", "time"))
    assert made.saved["number"] == 4 and [number for number, _ in made.told] == [3]
    made.emit(Saved("server 0/0", 5, 71, "p", "end"))
    assert made.saved["number"] == 5 and [number for number, _ in made.told] == [3, 5], "a request may wait for it"
    made._control.close()


def test_a_leader_that_was_deposed_forgets_what_no_other_unit_may_know() -> None:
    made = leader(DOWNPOUR, 0.0)
    policy(made).on_event(lost("worker 1/0"), 1.0)
    assert made.decide((), 1.0) is not None
    made.follow(-1)
    assert len(made.log) == 1, "nobody else leads, so it may be elected again"
    made.follow(2)
    assert len(made.log) == 0 and made.policy is None


def test_decisions_count_once_and_in_order() -> None:
    log = DecisionLog()
    for number in (0, 0, 2, 1, 1):
        log.add(number, {"at": float(number), "inputs": [], "commands": [number]}, 50.0)
    assert [each["commands"] for each in log.decisions] == [[0], [1]]
    assert log.began(60.0) == 49.0, "the earliest that fits"


# --- the other units in the run loop of one unit ----------------------------------------------------------------------

HOSTS = hosts_of(DOWNPOUR)
COUNT = len(HOSTS.units)


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
        self.succession = succession(DOWNPOUR, rank)
        channel: Any = self.channel
        self.reporter = EventReporter(channel, rank, 0)
        self.succession.begin(HOSTS, self.reporter)
        here = SimpleNamespace(units=[layout(DOWNPOUR, HOSTS.numbers).units[rank]], cluster=DOWNPOUR)
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
        return LeaderElected(term, 0, silent(0))

    def receive(self, *news: News) -> list[object]:
        self.channel.arrived += news
        return [action for actions in self.remote.receive() for action in actions]


@pytest.fixture
def units() -> list[Unit]:
    return [Unit(rank) for rank in range(COUNT)]


def joined(unit: Unit) -> UnitMessage:
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
    me.follower.on_event(lost("worker 1/0"), 1.0)
    found = me.receive(*map(joined, others))
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
    me.receive(me.elect(2), *map(joined, others))
    count = len(me.succession.log)
    decision = {"at": 1.0, "inputs": [], "commands": [{"command": "renew", "ranks": None, "values": {}}]}
    me.receive(UnitMessage(2, {"life": 0, "number": count, "decision": decision}))
    assert len(me.succession.log) == count and not me.commands.restarted


def test_a_unit_whose_work_is_done_joins_the_next_leader(units: list[Unit]) -> None:
    """It knows that nothing restarts any more, and the next leader may not."""
    done, leader, *others = units[1:]
    end = {"at": 9.0, "inputs": [], "commands": [{"command": "end", "ranks": None, "values": {}}]}
    done.succession.log.add(0, end, 9.0)
    assert leader.receive(leader.elect(2), *map(joined, others)) == []
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


# --- units that follow ----------------------------------------------------------------------------------------------


def following() -> tuple[Follower, list[Event]]:
    said = EventList()
    return Follower(["worker 0/1"], said), said


def test_what_unit_0_has_to_know_is_told_and_deaths_are_held() -> None:
    made, said = following()
    peer, program = Failed("worker 0/1", "peer", "lost", ""), Failed("worker 0/1", "program", "boom", "")
    held: list[Event] = [lost("worker 0/1"), peer, Unrepeatable("worker 0/1", "a loop", True)]
    passed: list[Event] = [Started("worker 0/1", 1), Frozen("worker 0/1", 1), program, Exited("worker 0/1", 1, 1)]
    passed += [Covered("server 0/1", 1), Differs("server 0/1", 1), Missed("server 0/1"), Unsaved("server 0/1", "why")]
    assert [word for event in held for word in made.on_event(event, 1.0)] == []
    assert [word for event in passed for word in made.on_event(event, 1.0)] == passed
    assert said == [*held, *passed]
    notice = Notice("worker 0/1", "hello")
    assert made.on_event(notice, 1.0) == [notice]
    assert said[-1] is not notice
    assert not made.complete
    made.end()
    assert made.complete
    # Nothing starts again from here on: what dies now ends the job.
    assert made.on_event(lost("worker 0/1"), 2.0) == [
        Failed("worker 0/1", "died", lost("worker 0/1").text, "last words")
    ]


def test_a_server_from_a_unit_that_is_gone_keeps_a_unit_that_is_alone() -> None:
    made, _ = following()
    tell_following(made, Started("server 0/1", 3), Exited("worker 0/1", 1, 0))
    made.on_connection(all_received=False, alone=True)
    assert not made.complete
    tell_following(made, Exited("server 0/1", 3, 0))
    assert made.complete


def tell_following(made: Follower, *events: Event) -> None:
    for event in events:
        made.on_event(event, 1.0)


def test_of_steps_the_first_is_told_and_the_others_when_they_are_wanted() -> None:
    made, said = following()
    for event in (Started("worker 0/1", 1), step("worker 0/1"), step("worker 0/1")):
        assert made.on_event(event, 1.0) == [event]
    assert said == [Started("worker 0/1", 1), step("worker 0/1")]
    made.listen(True)
    made.on_event(step("worker 0/1"), 1.0)
    made.listen(False)
    made.on_event(step("worker 0/1"), 1.0)
    assert len(said) == 3


def test_a_unit_that_is_cut_off_for_long_ends_by_itself() -> None:
    made, _ = following()
    made.on_event(Started("worker 0/1", 1), 1.0)
    made.on_event(lost("worker 0/1"), 1.0)
    made.on_connection(all_received=False, alone=False)
    assert made.suspicious
    assert made.poll(5.0) == []
    made.on_connection(all_received=False, alone=True)
    (give_up,) = made.poll(20.0)
    assert isinstance(give_up, FailJob)
    assert give_up.failures[0].who == "worker 0/1"
    # What unit 0 has heard it decides about, and who has ended well does not wait.
    made, _ = following()
    made.on_event(lost("worker 0/1"), 1.0)
    made.on_connection(all_received=True, alone=False)
    assert not made.suspicious
    made.on_connection(all_received=False, alone=True)
    assert made.poll(20.0) == []
    assert not made.complete
    made.on_event(Exited("worker 0/1", 1, 0), 21.0)
    assert made.complete
