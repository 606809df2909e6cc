"""One unit over several terms: it follows, is elected, steps down, and tells the next leader what it told the last."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folder_wipe import block
from launch_targets import wait_for
from unit_memberships import RUN, host_map, membership

from topotrain.comm.store import Store, StoreError, open_store, within
from topotrain.core.events import Event, Failed, Finished, StepDone, to_json
from topotrain.launch.job_requests import LEADER_LOST
from topotrain.launch.multinode import control_connection, node_membership, node_rendezvous, unit_membership
from topotrain.launch.multinode.control_connection import LeaderChanged, LeaderElected, News, UnitMessage
from topotrain.launch.multinode.election.leader_election import KEY, LeaderRecord
from topotrain.launch.multinode.node_info import JobEnd
from topotrain.launch.recovery.recovery_actions import AnswerRequest, GroupRequest, ResizeRequest

COUNT, DEADLINE_S = 3, 20.0
ALIVE_S = 0.8
HOSTS = host_map(COUNT)


class UnitStore:
    """The store as one unit reaches it: `away` raises StoreError for this unit alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False

    def __getattr__(self, name: str) -> object:
        found = getattr(self._store, name)

        def call(*args: object) -> object:
            if self.away:
                raise StoreError("away")
            return found(*args)

        return call


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (control_connection, node_membership, unit_membership):
        monkeypatch.setattr(module, "BEAT_S", 0.05)
    for module in (node_membership, unit_membership, node_rendezvous):
        monkeypatch.setattr(module, "ALIVE_S", ALIVE_S)
    monkeypatch.setattr(node_membership, "LOST_S", 1.0)
    monkeypatch.setattr(control_connection, "_RETRY_S", 0.02)


class Unit:
    """A unit, with its own view of the store."""

    def __init__(self, folder: Path, rank: int, recovers: bool = True) -> None:
        self.rank = rank
        self.store = UnitStore(open_store(folder.as_uri()))
        store: Store = self.store  # type: ignore[assignment]
        self.run = within(store, RUN)
        self.membership = membership(store, rank, HOSTS, recovers, saves=rank == 0)
        self.membership.begin(HOSTS)
        self.seen: list[News] = []
        self.taken: list[object] = []
        self.beat = threading.Event()

    @property
    def news(self) -> list[News]:
        self.seen += self.membership.control.news()
        return self.seen

    def cut(self) -> None:
        """Let no other unit reach this one, or the other way around."""
        for transport in self.membership.control._end._transports:  # type: ignore[union-attr]
            transport.close()

    def close(self) -> None:
        self.membership.close()


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Callable[..., list[Unit]]]:
    made: list[Unit] = []

    def make(recovers: bool = True) -> list[Unit]:
        made.extend(Unit(tmp_path / "store", rank, recovers) for rank in range(COUNT))
        for unit in made[1:]:
            unit.membership.control.report({"hello": unit.rank})
        wait_for(lambda: len(made[0].news) == COUNT - 1)
        wait_for(lambda: all(unit.membership.control.all_received for unit in made))
        made[0].seen.clear()
        return made

    yield make
    for unit in made:
        unit.close()


def leaders(units: list[Unit]) -> list[Unit]:
    return [unit for unit in units if unit.membership.leader is not None]


def test_one_of_the_others_is_elected_and_the_rest_follow_it(units: Callable[..., list[Unit]]) -> None:
    first, *others = units()
    first.close()
    wait_for(lambda: len(leaders(others)) == 1 and all(unit.news for unit in others))
    (leader,) = leaders(others)
    (follower,) = (unit for unit in others if unit is not leader)
    (elected,) = leader.news
    assert isinstance(elected, LeaderElected) and (elected.term, elected.former) == (2, 0)
    assert elected.lost.text == "unit 0 on h0 vanished without a word"
    assert follower.news == [LeaderChanged(2, leader.rank, False)]
    follower.membership.control.report({"n": 1})
    wait_for(lambda: UnitMessage(follower.rank, {"n": 1}) in leader.news)
    leader.membership.control.send(follower.rank, {"m": 1})
    wait_for(lambda: UnitMessage(leader.rank, {"m": 1}) in follower.news)


def test_what_units_have_told_the_former_leader_they_tell_the_next_one(units: Callable[..., list[Unit]]) -> None:
    first, one, two = units()
    for unit in (one, two):
        unit.membership.finish([Finished(f"worker 0/{unit.rank}", 1, 1, 0.0, 1, 0, 0)])
    wait_for(lambda: first.membership.reports.keys() == {1, 2})
    first.close()
    assert one.membership.wait(DEADLINE_S) == two.membership.wait(DEADLINE_S) == JobEnd(0)
    (leader,) = leaders([one, two])
    assert leader.membership.reports.keys() == {1, 2}


def test_a_failure_that_the_former_leader_did_not_come_to_ends_the_job(
    units: Callable[..., list[Unit]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_membership, "_PATIENCE_S", {"internal": 1000.0})
    first, one, two = units()
    one.membership.tell(Failed("worker 0/1", "internal", "odd", ""))
    monkeypatch.setattr(node_membership, "_PATIENCE_S", {})
    first.close()
    ends = [unit.membership.wait(DEADLINE_S) for unit in (one, two)]
    assert ends[0] == ends[1]
    assert ends[0] is not None and ends[0].failed is not None and ends[0].failed.text == "odd"


def test_the_news_of_an_election_comes_before_the_units_that_join(
    units: Callable[..., list[Unit]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader listens before its run loop knows of it, which may take a while on a busy machine."""
    first, one, two = units()
    held, heard = [], threading.Event()

    def hold(unit: Unit) -> None:
        put = unit.membership.control.queue.put

        def late(news: News) -> None:
            if isinstance(news, LeaderElected):
                held.append(unit)
                assert heard.wait(DEADLINE_S)
            put(news)

        monkeypatch.setattr(unit.membership.control.queue, "put", late)

    for unit in (one, two):
        hold(unit)
    first.close()
    wait_for(lambda: held and any(unit.news for unit in (one, two)))
    (leader,) = held
    follower = two if leader is one else one
    follower.membership.control.report({"joins": True})
    wait_for(lambda: follower.membership.control.all_received)  # the leader has the message
    heard.set()
    wait_for(lambda: len(leader.news) == 2)
    assert [type(news) for news in leader.news] == [LeaderElected, UnitMessage]


def test_a_signal_while_there_is_no_leader_ends_the_job_all_the_same(units: Callable[..., list[Unit]]) -> None:
    first, one, two = units()
    first.cut()
    first.close()
    one.membership.signalled(2)
    ends = [unit.membership.wait(DEADLINE_S) for unit in (one, two)]
    assert ends[0] == ends[1]
    assert ends[0] is not None and (ends[0].code, ends[0].text) == (130, "ended by SIGINT to unit 1 on h1")


def test_requests_go_to_the_leader_of_the_present_term_from_a_unit_and_from_the_store(
    units: Callable[..., list[Unit]],
) -> None:
    first, *others = units()
    store = within(open_store_of(others[0]), "jobs/j")

    def put(word: str, workers: int) -> None:
        store.set(f"requests/{word}", b'{"verb": "leave", "workers": %d, "within_s": 5}' % workers)
        store.set("asked", word.encode())

    def taken(unit: Unit, *expected: object) -> bool:
        unit.taken += unit.membership.requests.take()
        return len(unit.taken) == len(expected) and all(wish in unit.taken for wish in expected)

    told: list[dict[str, object]] = []
    others[0].membership.forwards.send(GroupRequest("leave", 1), told.append)
    put("ab", 1)
    wait_for(lambda: taken(first, GroupRequest("leave", 1), ResizeRequest("leave", 1, 5.0)))
    first.close()
    wait_for(lambda: len(leaders(others)) == 1 and all(unit.news for unit in others))
    (leader,) = leaders(others)
    (follower,) = (unit for unit in others if unit is not leader)
    assert told == [{"error": LEADER_LOST}]
    assert LEADER_LOST.encode() in store.watch("answers/ab", DEADLINE_S)
    assert follower.membership.forwards.has_leader and not leader.membership.forwards.has_leader
    again: list[dict[str, object]] = []
    follower.membership.forwards.send(GroupRequest("leave", 2), again.append)
    put("cd", 2)
    wait_for(lambda: taken(leader, GroupRequest("leave", 2), ResizeRequest("leave", 2, 5.0)))
    assert store.keys("requests/") == ["requests/cd"], "a request is carried out once"
    leader.membership.requests.answer(AnswerRequest("leave", 2, "has left"))
    wait_for(lambda: again == [{"group": 2, "text": "has left"}])


def test_an_end_that_is_in_the_record_counts_although_its_leader_is_gone(units: Callable[..., list[Unit]]) -> None:
    first, one, two = units()
    record = LeaderRecord.loaded(first.run.get(KEY))
    assert record is not None
    first.close()
    end = JobEnd(1, 2, "h2", Failed("worker 0/2", "program", "boom", ""))
    run = within(open_store_of(first), RUN)
    run.set(KEY, LeaderRecord(1, 0, HOSTS.units[0].word, record.url, record.beat + 9, end.to_text()).dumped())
    assert one.membership.wait(DEADLINE_S) == two.membership.wait(DEADLINE_S) == end
    time.sleep(1.5 * ALIVE_S)
    assert leaders([one, two]) == []


def open_store_of(unit: Unit) -> Store:
    return unit.store  # type: ignore[return-value]


def test_an_end_is_in_the_store_before_a_unit_is_told(units: Callable[..., list[Unit]]) -> None:
    first, one, _ = units()
    end = JobEnd(130, 0, "h0", text="ended by SIGINT")
    first.membership.signalled(2)
    told = one.membership.wait(DEADLINE_S)
    assert told is not None and told.code == end.code
    record = LeaderRecord.loaded(one.run.get(KEY))
    assert record is not None and JobEnd.loaded(record.end) == told


def test_a_leader_that_is_cut_off_from_everything_steps_down_and_then_follows(
    units: Callable[..., list[Unit]],
) -> None:
    first, *others = units()
    first.store.away = True
    first.cut()
    wait_for(lambda: first.membership.leader is None)
    assert first.news == [LeaderChanged(1, -1, True)]
    wait_for(lambda: len(leaders(others)) == 1)
    first.store.away = False
    wait_for(lambda: len(first.news) == 2)
    assert first.news[1] == LeaderChanged(2, leaders(others)[0].rank, False)
    wait_for(lambda: first.membership.control.silent_s < 0.5 and first.membership.control.all_received)


def test_a_leader_that_others_hear_from_goes_on_without_the_store(
    units: Callable[..., list[Unit]], tmp_path: Path
) -> None:
    """Its own store, and then that of all."""
    made = units()
    made[0].store.away = True
    time.sleep(2 * ALIVE_S)
    assert leaders(made) == made[:1]
    block(tmp_path / "store")
    time.sleep(2 * ALIVE_S)
    assert leaders(made) == made[:1]
    made[0].membership.control.send(2, {"n": 1})
    wait_for(lambda: UnitMessage(0, {"n": 1}) in made[2].news)
    made[1].membership.tell(Failed("worker 0/1", "program", "boom", ""))
    assert {unit.membership.wait(DEADLINE_S).code for unit in made} == {1}  # type: ignore[union-attr]


def test_where_a_death_ends_the_job_no_unit_is_elected(units: Callable[..., list[Unit]]) -> None:
    first, one, two = units(recovers=False)
    first.close()
    for unit in (one, two):
        end = unit.membership.wait(DEADLINE_S)
        assert end is not None and end.failed is not None
        assert end.failed.text == "unit 0 on h0 vanished without a word"
    assert leaders([one, two]) == []


def test_the_samples_of_a_unit_reach_the_leader_and_no_other_loop(units: Callable[..., list[Unit]]) -> None:
    first, second, third = units()
    step = StepDone("worker 0/1", 1.0, 1, 8, None, 0.0, 0, 0, 0)
    found: list[Event] = []
    assert (first.membership.leads, second.membership.leads) == (True, False)
    wait_for(lambda: second.membership.send_samples([to_json(step)]))

    def arrived() -> bool:
        found.extend(first.membership.take_samples())
        return found == [step]

    wait_for(arrived)
    assert not first.news and list(third.membership.take_samples()) == []
    assert not first.membership.send_samples([to_json(step)])
    # Nothing piles up for a leader that acknowledges nothing.
    second.cut()
    second.membership.send_samples([to_json(step)])
    assert not second.membership.send_samples([to_json(step)])
