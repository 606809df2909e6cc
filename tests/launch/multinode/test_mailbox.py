"""What units say to each other while a job runs: through a store that may be slow, wiped or away, and once each."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from topotrain.comm.store import Store, open_store, serve_store, within
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Failed, Saved
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals, signals
from topotrain.launch.multinode import mailbox as post_module
from topotrain.launch.multinode import node_membership as company_module
from topotrain.launch.multinode.mailbox import Mailbox, News, UnitMessage, UnitReturned, UnitVanished
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.node_membership import NodeMembership, StoreKeys
from topotrain.launch.multinode.reliable_messages import Words
from topotrain.launch.multinode.restart_barrier import (
    RestartBarrier,
    RestartInfo,
    await_begin,
    begin_anew,
    check_found,
    muster,
)

DEADLINE_S = 20.0
SECRET = bytes(32)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_module, "BEAT_S", 0.1)
    monkeypatch.setattr(company_module, "BEAT_S", 0.05)


@pytest.fixture(params=["file", "tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same store once more."""
    served = serve_store("127.0.0.1", 0, SECRET) if request.param == "tcp" else None
    url = served.url if served is not None else (tmp_path / "store").as_uri()
    made: list[Store] = []

    def open_() -> Store:
        made.append(open_store(url, SECRET, patience=0.2))
        return made[-1]

    yield open_
    for store in made:
        store.close()
    if served is not None:
        served.close()


class Pair:
    """Unit 0 and unit 1."""

    def __init__(self, opened: Callable[[], Store], word: str = "w") -> None:
        self.store, self.opened = opened(), opened
        self.first = Mailbox(within(opened(), "run"), 0, {1: word}, 5.0)
        self.second = Mailbox(within(opened(), "run"), 1, {0: word}, 5.0)

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(opened: Callable[[], Store]) -> Iterator[Pair]:
    made = Pair(opened)
    yield made
    made.close()


def news(post: Mailbox, count: int) -> list[News]:
    found: list[News] = []
    until = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < until, found
        found += post.news()
        time.sleep(0.002)
    return found


def words(found: list[News]) -> list[Words]:
    return [each.words for each in found if isinstance(each, UnitMessage)]


def test_words_go_both_ways_once_and_soon(pair: Pair, opened: Callable[[], Store]) -> None:
    took = []
    for number in range(10):
        began = time.monotonic()
        pair.second.say(0, {"n": number})
        assert words(news(pair.first, 1)) == [{"n": number}]
        pair.first.say(1, {"back": number})
        assert words(news(pair.second, 1)) == [{"back": number}]
        took.append(time.monotonic() - began)
        time.sleep(0.01)
    assert sorted(took)[5] < 0.5  # there and back; a folder is looked at every quarter of a second


def test_words_that_were_wiped_out_are_written_again(pair: Pair) -> None:
    pair.first.say(1, {"n": 0})
    assert words(news(pair.second, 1)) == [{"n": 0}]
    for number in range(1, 6):
        for key in pair.store.keys("run/"):
            pair.store.delete(key)
        pair.first.say(1, {"n": number})
        pair.second.say(0, {"m": number})
        for key in pair.store.keys("run/"):
            pair.store.delete(key)
        assert words(news(pair.second, 1)) == [{"n": number}]
        assert words(news(pair.first, 1)) == [{"m": number}]
    until = time.monotonic() + DEADLINE_S
    while not (pair.first.all_told and pair.second.all_told):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert pair.first.news() == pair.second.news() == []


def test_a_store_that_is_away_for_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pair = Pair(lambda: open_store(folder.as_uri()))
    try:
        pair.first.say(1, {"n": 0})
        news(pair.second, 1)
        shutil.rmtree(folder)
        folder.write_text("no folder")
        pair.first.say(1, {"n": 1})
        pair.second.say(0, {"m": 1})
        time.sleep(0.3)
        assert not pair.first.all_told
        assert not pair.first.alone
        folder.unlink()
        assert words(news(pair.second, 1)) == [{"n": 1}]
        assert words(news(pair.first, 1)) == [{"m": 1}]
    finally:
        pair.close()


def test_nobody_hears_what_was_said_to_the_one_before(pair: Pair) -> None:
    pair.second.close()
    pair.first.say(1, {"n": 0})
    pair.first.open(1, "another")
    late = Mailbox(within(pair.opened(), "run"), 1, {0: "another"}, 5.0)
    pair.first.say(1, {"n": 1})
    try:
        assert words(news(late, 1)) == [{"n": 1}]
        late.say(0, {"m": 1})
        assert words(news(pair.first, 1)) == [{"m": 1}]
    finally:
        late.close()


def test_junk_on_a_page_is_passed_over(pair: Pair) -> None:
    pair.store.set("run/up/1.w", b'{"heard": "x"}')
    pair.store.set("run/bell", b"x")
    time.sleep(0.2)
    pair.second.say(0, {"m": 1})
    assert words(news(pair.first, 1)) == [{"m": 1}]


# --- units that are looked after ------------------------------------------------------------------------------------


def company(store: Store, rank: int = 0) -> NodeMembership:
    stores = StoreKeys(within(store, "jobs/j.1"), within(store, "jobs/j"), Registry(store), JobRecord("j", "j"))
    hosts = HostMap((0, 1, 2), ("h0", "h1", "h2"), ("",) * 3)
    return NodeMembership(stores, rank, hosts, False, {1: "a", 2: "b"} if rank == 0 else {0: "a"}, hear)


def hear(raw: bytes) -> NodeInfo:
    unit = NodeInfo.loaded(raw)
    if unit.proof != "right":
        raise ConfigError("secret", None, "is another one")
    return unit


def test_a_silent_unit_is_news_to_unit_0_and_ends_nothing(
    opened: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company_module, "LOST_S", 0.3)
    store = opened()
    run = within(store, "jobs/j.1")
    for rank in (0, 1):
        run.set(f"alive/{rank}", b"1")
    made = company(store)
    try:
        assert made.post is not None
        (found,) = news(made.post, 1)
        assert isinstance(found, UnitVanished)
        assert (found.rank, found.failed.text) == (2, "unit 2 on h2 vanished without a word")
        time.sleep(0.5)
        assert made.post.news() == []  # it is told once
        assert not made.over
        for word, proof in (("x", "wrong"), ("c", "right")):
            unit = NodeInfo(2, "h3", 1, "m", "10.0.0.3", proof, 3, False, word)
            run.set("back/2", unit.dumped())
            time.sleep(0.2)
        assert news(made.post, 1) == [UnitReturned(2, unit)]
        # While somebody is known to have lost a peer, nobody is waited for as long.
        monkeypatch.setattr(company_module, "LOST_S", 1000.0)
        made.expect(HostMap((0, 1, 2), ("h0", "h1", "h3"), ("",) * 3), [1, 2])
        made.post.suspicious = True
        (found,) = news(made.post, 1)
        assert isinstance(found, UnitVanished)
        assert found.failed.text == "unit 2 on h3 vanished without a word"
        made.nobody_came(2, 3.0, "; more")
        end = made.wait(DEADLINE_S)
        assert end is not None
        assert end.failed is not None
        assert end.failed.text.endswith("vanished without a word, and within 3 s no replacement was started; more")
        assert json.loads(run.get("end") or b"")["unit"] == 2
    finally:
        made.close()


def test_unit_0_is_not_to_be_done_without(opened: Callable[[], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company_module, "LOST_S", 0.3)
    made = company(opened(), rank=1)
    try:
        end = made.wait(DEADLINE_S)
        assert end is not None
        assert end.unit == 0
    finally:
        made.close()


# --- the next life ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[NodeMembership, NodeMembership]]:
    """Units 0 and 1."""
    made = [company(open_store((tmp_path / "store").as_uri()), rank) for rank in (0, 1)]
    yield made[0], made[1]
    for each in made:
        each.close()


@pytest.fixture
def quiet() -> Iterator[StopSignals]:
    """No signal comes."""
    with signals() as heard:
        yield heard


def snapshot(workspace: Path, number: int, text: str = "{}") -> Path:
    path = workspace / "manifests" / f"{number:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(text)
    return path


def test_all_begin_the_next_life_from_the_same_snapshot(
    two: tuple[NodeMembership, NodeMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    hosts = HostMap((0, 1), ("h0", "h1"), ("10.0.0.1", "10.0.0.2"))
    made, told = RestartBarrier(4, [1], (), 60.0), list[str]()
    assert first.post is not None
    assert second.post is not None
    second.post.say(0, {"life": 4, "ready": True})
    assert muster(made, (), first, quiet, told.append, "")
    path = snapshot(tmp_path / "w", 3)
    begin_anew(first, made, hosts, AttemptInfo(5, str(path), frozenset({2})))
    begun = await_begin((), second, quiet, 4, tmp_path / "w")
    assert begun == RestartInfo(AttemptInfo(5, str(path), frozenset({2})), hosts)
    assert told == []


@pytest.mark.parametrize("other", [None, '{"another": 1}'])
def test_a_snapshot_that_a_unit_does_not_see_is_told(
    two: tuple[NodeMembership, NodeMembership], tmp_path: Path, quiet: StopSignals, other: str | None
) -> None:
    first, second = two
    begin_anew(
        first, RestartBarrier(0, [1], (), 60.0), HostMap((), (), ()), AttemptInfo(1, str(snapshot(tmp_path / "w", 3)))
    )
    if other is not None:
        snapshot(tmp_path / "else", 3, other)
    with pytest.raises(ConfigError, match=r"has no snapshot 000003 as unit 0 sees it.*one workspace that all of them"):
        await_begin((), second, quiet, 0, tmp_path / "else")
    with pytest.raises(ConfigError, match="has no snapshot, though server 0/0 has taken number 7"):
        check_found("", Saved("server 0/0", 7, 70, "p", "time"), Job())
    check_found("", None, Job())


def test_a_unit_that_does_not_come_back_ends_the_job(
    two: tuple[NodeMembership, NodeMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    told = list[str]()
    lost = UnitVanished(1, Failed("unit 1", "died", "?", ""))
    assert not muster(RestartBarrier(0, [1], (), 0.1), [lost], first, quiet, told.append, "; go on with it")
    assert told == ["unit 1 is gone: the job waits 0.1 s for another `topotrain unit --rank 1`"]
    end = second.wait(DEADLINE_S)
    assert end is not None
    assert end.failed is not None
    assert end.failed.text.endswith("no replacement was started; go on with it")
    assert await_begin((), second, quiet, 0, tmp_path) is None


def test_a_unit_that_the_others_do_without_ends(
    two: tuple[NodeMembership, NodeMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    assert first.post is not None
    first.post.say(1, {"life": 0, "outcast": True})
    assert await_begin((), second, quiet, 0, tmp_path) is None
    assert second.end is not None
    assert second.end.text == "the job goes on without unit 1 on h1, which was silent for too long"
