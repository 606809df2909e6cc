"""The connections of units to unit 0: messages once and in order, loss, strangers, and what is decided over them."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from folder_wipe import block
from launch_targets import wait_for
from reports import TextList
from unit_memberships import RUN, SECRET, host_map, introduced, membership

from topotrain.comm.store import Store, StoreError, maintained_values, open_store, within
from topotrain.comm.transport import Refused
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import Address, Role
from topotrain.core.events import Failed, Saved
from topotrain.core.protocol import ProtocolError
from topotrain.launch.agent.children import AttemptInfo
from topotrain.launch.agent.stop_signals import StopSignals, signals
from topotrain.launch.multinode import control_connection as control_module
from topotrain.launch.multinode import node_membership as company_module
from topotrain.launch.multinode import reliable_messages, restart_barrier, unit_membership
from topotrain.launch.multinode.control_connection import (
    ControlAccess,
    ControlChannel,
    ControlClient,
    ControlServer,
    LeaderElected,
    News,
    NewsQueue,
    UnitMessage,
    UnitReturned,
    UnitVanished,
)
from topotrain.launch.multinode.election.leader_election import KEY, LeaderElection, LeaderRecord
from topotrain.launch.multinode.election.succession import Takeover
from topotrain.launch.multinode.node_info import HostMap, NodeInfo
from topotrain.launch.multinode.node_membership import LeaderMembership
from topotrain.launch.multinode.reliable_messages import (
    MESSAGE_BYTES,
    PART_BYTES,
    ReliableEnd,
    UnitPart,
    Words,
    shortened,
)
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

DEADLINE_S = 20.0
OTHER_SECRET = bytes(31) + b"x"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "BEAT_S", 0.05)
    monkeypatch.setattr(control_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(company_module, "BEAT_S", 0.05)
    monkeypatch.setattr(unit_membership, "BEAT_S", 0.05)
    monkeypatch.setattr(maintained_values, "LOOK_S", 0.05)


def unread(rank: int, words: Words) -> bool:
    """Leaves all messages to the run loop."""
    return False


class Client(ControlClient):
    """A unit that follows unit 0, with its news."""

    def __init__(self, access: ControlAccess, word: str, term: int) -> None:
        self.received = NewsQueue()
        super().__init__(access, 1, word, unread, self.received, term)
        self.start()

    def close(self) -> None:
        super().close()
        self.received.close()


class Pair:
    """The connections of unit 0, which leads, and unit 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(folder.as_uri())
        self.news = NewsQueue()
        self.first = ControlServer(self.access(), self.news)
        self.listen()
        self.first.start(unread, {1: "a"})
        self.second = self.client("a")

    def access(self, secret: bytes = SECRET) -> ControlAccess:
        return ControlAccess(within(self.store, "run"), "j.1", secret)

    def client(self, word: str, secret: bytes = SECRET, term: int = 1) -> "Client":
        return Client(self.access(secret), word, term)

    def listen(self, term: int = 1) -> None:
        self.first.listen("127.0.0.1")
        self.store.set(f"run/{KEY}", LeaderRecord(term, 0, "0", self.first.url).dumped())

    @property
    def url(self) -> str:
        return self.first.url

    @property
    def listening(self) -> list[TcpTransport]:
        return self.first._transports

    def cut(self) -> None:
        """Break all connections."""
        for transport in self.listening:
            for connection in list(transport._connections):
                connection.cut("a test")

    def close(self) -> None:
        self.second.close()
        self.first.close()
        self.news.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with closing(Pair(tmp_path / "pair")) as made:
        yield made


def news(source: Pair | Client | ControlChannel, count: int) -> list[News]:
    queue = source.news if isinstance(source, Pair) else source.received if isinstance(source, Client) else source.queue
    found: list[News] = []
    wait_for(lambda: found.extend(queue.take()) or len(found) >= count)  # type: ignore[func-returns-value]
    return found


def words(found: list[News]) -> list[Words]:
    return [each.words for each in found if isinstance(each, UnitMessage)]


def test_messages_go_both_ways_once_and_in_order_over_broken_connections_and_without_the_store(pair: Pair) -> None:
    for number in range(30):
        pair.first.send(1, {"n": number, "text": "x" * 100_000})
        pair.second.send(0, {"m": number})
        if number % 3 == 0:
            pair.cut()
            time.sleep(0.01 * (number % 4))
    assert [each["n"] for each in words(news(pair.second, 30))] == list(range(30))
    assert [each["m"] for each in words(news(pair, 30))] == list(range(30))
    wait_for(lambda: pair.first.all_received and pair.second.all_received)
    pair.first.send(2, {"n": 0})  # there is no such unit
    assert pair.news.take() == pair.second.received.take() == []
    assert (pair.first.ranks, pair.second.ranks) == ([1], [0])
    block(pair.folder)
    with pytest.raises(StoreError):
        pair.store.get("run/leader")
    pair.cut()
    pair.first.send(1, {"n": 1})
    assert words(news(pair.second, 1)) == [{"n": 1}]
    pair.first.close()
    wait_for(lambda: pair.second.silence_s(0) > 0.5)


def test_a_unit_of_another_term_is_refused_and_receives_nothing(pair: Pair) -> None:
    pair.second.close()
    with closing(pair.client("a", term=2)) as later:
        pair.store.set(f"run/{KEY}", LeaderRecord(2, 0, "0", pair.url).dumped())  # it dials a leader of the first term
        pair.first.send(1, {"n": 1})
        later.send(0, {"m": 1})
        wait_for(lambda: pair.listening[0].refusals().get("STRANGER", 0) > 2)
        assert later.received.take() == pair.news.take() == []


def test_a_leader_without_its_lease_sends_heartbeats_and_no_decision(pair: Pair, tmp_path: Path) -> None:
    """As after a long pause of its process: there may be another leader, which only the store knows."""
    election = LeaderElection(0, "0", 1000.0, True, time.monotonic())
    election.on_read(None, time.monotonic())
    with closing(NewsQueue()) as queue, closing(ControlServer(pair.access(), queue, 2, election)) as server:
        server.listen("127.0.0.1")
        pair.store.set(f"run/{KEY}", LeaderRecord(2, 0, "0", server.url).dumped())
        server.start(unread, {1: "b"})
        with closing(pair.client("b", term=2)) as unit:
            server.send(1, {"n": 0})
            assert words(news(unit, 1)) == [{"n": 0}]
            election._renewed_at -= 2000.0
            server.send(1, {"n": 1})
            time.sleep(0.5)
            assert unit.silence_s(0) < 0.4
            assert unit.received.take() == []
            proposal = election.proposal(server.url, False, time.monotonic())
            assert proposal is not None
            election.on_written(proposal, time.monotonic())
            assert words(news(unit, 1)) == [{"n": 1}]


def test_a_new_process_receives_nothing_that_was_sent_to_its_predecessor(pair: Pair) -> None:
    pair.second.close()
    pair.first.send(1, {"n": 0})
    with closing(pair.client("b")) as late:
        late.send(0, {"m": 0})  # refused: nothing has told unit 0 of this process
        wait_for(lambda: not late.all_received)
        assert pair.news.take() == []
        pair.first.open(1, "b")
        assert pair.store.watch("run/welcome/1.b", DEADLINE_S) == b"1"
        pair.first.send(1, {"n": 1})
        assert words(news(late, 1)) == [{"n": 1}]
        assert words(news(pair, 1)) == [{"m": 0}]
        with closing(pair.client("a")) as former:  # it was only silent: it gets what was sent to it, and counts no more
            assert words(news(former, 1)) == [{"n": 0}]
            former.send(0, {"m": 1})
            wait_for(lambda: former.all_received)
            assert pair.news.take() == []


def test_a_process_with_another_secret_or_of_another_job_is_refused(pair: Pair) -> None:
    with closing(pair.client("a", OTHER_SECRET)) as stranger:
        stranger.send(0, {"end": "now"})
        wait_for(
            lambda: pair.listening[0].refusals().get("STRANGER", 0) > 2
        )  # it finds unit 0's proof wrong, and hangs up
        assert pair.news.take() == []
    other = ControlAccess(within(pair.store, "run"), "k.1", SECRET).transport(1)
    me = Address(Role.WORKER, 1, 1)
    with closing(other):
        other.attach_together({me: pair.second}, listens=False)
        with pytest.raises(Refused, match="another job"):
            other.connect(me, Address(Role.SERVER, 0, 0), pair.url)


# --- units that are looked after ------------------------------------------------------------------------------------


HOSTS = replace(host_map(), served=True)


class Leader:
    """Unit 0, which leads."""

    def __init__(self, store: Store) -> None:
        self.unit = membership(store, 0, HOSTS)
        assert self.unit.leader is not None
        self.role: LeaderMembership = self.unit.leader

    def close(self) -> None:
        self.unit.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def test_a_silent_unit_is_news_to_unit_0_and_ends_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company_module, "LOST_S", 0.3)
    run = within(store, RUN)
    for rank in (0, 1):  # unit 1 has no connection, but a heartbeat in the store
        run.set(f"alive/{rank}", b"1")
    with closing(Leader(store)) as made:
        (found,) = news(made.unit.control, 1)
        assert isinstance(found, UnitVanished)
        assert (found.rank, found.failed.text) == (2, "unit 2 on h2 vanished without a word")
        time.sleep(0.5)
        assert made.unit.control.news() == []  # it is told once, and unit 1 is not lost
        assert not made.unit.over
        for word, secret in (("f", OTHER_SECRET), ("c", SECRET)):
            unit = introduced(2, word, "h3", secret=secret)
            run.set("back/2", unit.dumped())
            time.sleep(0.2)
        assert news(made.unit.control, 1) == [UnitReturned(2, unit)]
        # While a process is known to have lost a peer, a silent unit is not waited for as long.
        monkeypatch.setattr(company_module, "LOST_S", 1000.0)
        monkeypatch.setattr(company_module, "ALIVE_S", 0.3)
        made.role.expect(HostMap((0, 0, 1), ("h0", "h1", "h3"), ("127.0.0.1",) * 3, units=HOSTS.units), [1, 2])
        made.unit.control.suspect(True)
        (found,) = news(made.unit.control, 1)
        assert isinstance(found, UnitVanished)
        assert found.failed.text == "unit 2 on h3 vanished without a word"
        made.role.end_without(2, "has not come back")
        end = made.unit.wait(DEADLINE_S)
        assert end is not None
        assert end.failed is not None
        assert end.failed.text == "unit 2 on h3 has not come back"
        assert json.loads(run.watch("end", DEADLINE_S))["unit"] == 2


def test_a_unit_with_a_connection_and_without_the_store_is_not_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company_module, "LOST_S", 0.3)
    with closing(Leader(store)) as first, closing(membership(store, 1, HOSTS)) as second:
        (found,) = news(first.unit.control, 1)  # nothing has a heartbeat in the store
        assert isinstance(found, UnitVanished) and found.rank == 2
        time.sleep(0.5)
        assert first.unit.control.news() == []
        assert not second.over


def test_unit_0_is_not_to_be_done_without_where_it_serves_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company_module, "LOST_S", 0.3)
    run = within(store, RUN)
    run.set("alive/0", b"1")
    with closing(membership(store, 1, HOSTS)) as made:
        assert made.wait(1.0) is None, "it has a heartbeat"
        run.delete("alive/0")
        end = made.wait(DEADLINE_S)
        assert end is not None
        assert end.unit == 0


# --- the next life ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Leader, UnitMembership]]:
    """Units 0 and 1."""
    store = open_store((tmp_path / "store").as_uri())
    first, second = Leader(store), membership(store, 1, HOSTS)
    yield first, second
    for each in (first, second):
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


def test_all_begin_the_next_attempt_from_the_same_snapshot(
    two: tuple[Leader, UnitMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    hosts = HostMap((0, 1), ("h0", "h1"), ("10.0.0.1", "10.0.0.2"))
    made, told = RestartBarrier(4, [1], (), 60.0), TextList()
    second.control.report({"life": 4, "ready": True})
    assert await_ready(made, (), first.unit, quiet, told, "") is True
    path = snapshot(tmp_path / "w", 3)
    decisions = [{"at": 1.0, "inputs": [], "commands": []}]
    job = Job(name="ours", cluster=Cluster(nworkers_per_group=3))
    sent = RestartInfo(AttemptInfo(5, str(path), frozenset({2}), "why"), hosts, job)
    send_attempt(first.role, made, sent, decisions)
    assert await_begin((), second, quiet, 4, tmp_path / "w", 60.0) == Begin(sent, decisions)
    assert told == []


def test_an_attempt_begins_however_many_decisions_there_are(
    two: tuple[Leader, UnitMembership], tmp_path: Path, quiet: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former leader has sent a part of them, and did not come to the rest."""
    monkeypatch.setattr(reliable_messages, "MESSAGE_BYTES", 128 << 10)
    first, second = two
    decisions = [{"at": float(number), "inputs": [], "commands": ["x" * 1000]} for number in range(350)]
    made = RestartBarrier(4, [1], (), 60.0)
    first.role.control.send(1, {"life": 5, "part": {"at": 0, "log": decisions[7:100]}})
    send_attempt(first.role, made, RestartInfo(AttemptInfo(5), HostMap((), (), ())), decisions)
    begun = await_begin((), second, quiet, 4, tmp_path / "w", 60.0)
    assert isinstance(begun, Begin) and begun.decisions == decisions


@pytest.mark.parametrize("other", [None, '{"another": 1}'])
def test_a_snapshot_that_a_unit_does_not_see_is_told(
    two: tuple[Leader, UnitMembership], tmp_path: Path, quiet: StopSignals, other: str | None
) -> None:
    first, second = two
    attempt = AttemptInfo(1, str(snapshot(tmp_path / "w", 3)))
    send_attempt(first.role, RestartBarrier(0, [1], (), 60.0), RestartInfo(attempt, HostMap((), (), ())))
    if other is not None:
        snapshot(tmp_path / "else", 3, other)
    with pytest.raises(ConfigError, match=r"has no snapshot 000003 as the leader sees it.*one workspace that all"):
        await_begin((), second, quiet, 0, tmp_path / "else", 60.0)
    with pytest.raises(ConfigError, match="has no snapshot, though server 0/0 has taken number 7"):
        check_found("", Saved("server 0/0", 7, 70, "p", "time"), Job())
    check_found("", None, Job())


def test_a_unit_that_does_not_come_back_ends_the_job(
    two: tuple[Leader, UnitMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    told = TextList()
    lost = UnitVanished(1, Failed("unit 1", "died", "?", ""))
    assert not await_ready(RestartBarrier(0, [1], (), 0.1), [lost], first.unit, quiet, told, "; go on with it")
    assert told == ["unit 1 is gone: the job waits 0.1 s for another `topotrain unit --rank 1`"]
    end = second.wait(DEADLINE_S)
    assert end is not None
    assert end.failed is not None
    assert end.failed.text.endswith(
        "vanished without a word, and within 0.1 s no replacement was started; go on with it"
    )
    assert await_begin((), second, quiet, 0, tmp_path, 60.0) is None


@pytest.mark.parametrize("what", ["end its processes", "join the unit that leads"])
def test_a_unit_that_is_there_and_does_nothing_ends_the_job(
    two: tuple[Leader, UnitMembership], quiet: StopSignals, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its threads answer, and its run loop is blocked."""
    monkeypatch.setattr(restart_barrier, "LATE_S", 0.1)
    first, second = two
    told = TextList()
    if "join" in what:
        elected = LeaderElected(1, -1, Failed("", "died", "", ""))
        takeover = Takeover(elected, {"log": [], "life": 4, "ready": True}, 0, {0, 1})
        assert not await_joins(takeover, first.unit, quiet, told, 0.1)
    else:
        assert await_ready(RestartBarrier(4, [1], (), 0.1), (), first.unit, quiet, told, "") is None
    assert told == [f"the job waits for unit 1 to {what}, for at most 0.1 s"]
    end = second.wait(DEADLINE_S)
    assert end is not None and end.failed is not None
    said = f"unit 1 on h1 answers, and did not {what} within 0.1 s: is its launcher or its disk hung?"
    assert end.failed.text == said


def test_a_unit_that_finds_no_leader_any_more_ends(
    two: tuple[Leader, UnitMembership], quiet: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_barrier, "LATE_S", 0.1)
    assert await_leader((), two[1], quiet, 0.1) is None
    assert two[1].end is not None
    assert two[1].end.text == "unit 1 on h1 has found no leader of the job for 0.1 s"


def test_a_unit_that_the_others_do_without_ends(
    two: tuple[Leader, UnitMembership], tmp_path: Path, quiet: StopSignals
) -> None:
    first, second = two
    first.role.control.send(1, {"life": 0, "outcast": True})
    assert await_begin((), second, quiet, 0, tmp_path, 60.0) is None
    assert second.end is not None
    assert second.end.text == "the job goes on without unit 1 on h1, which was silent for too long"


def vanished(rank: int) -> Failed:
    return Failed(f"unit {rank}", "died", f"unit {rank} on h vanished without a word", "")


def ready(rank: int, life: int = 1) -> UnitMessage:
    return UnitMessage(rank, {"life": life, "ready": True})


def back(rank: int, word: str = "w") -> UnitReturned:
    return UnitReturned(rank, NodeInfo(rank, "h", 1, "m", "", "", 3, False, word))


def test_all_are_waited_for_and_vanished_units_for_a_time() -> None:
    made = RestartBarrier(1, (1, 2), (), 60.0)
    made.on_news(ready(1, life=0), 5.0)  # of a life that is over
    assert made.missing == {1, 2}
    made.on_news(ready(1), 6.0)
    made.on_news(UnitVanished(2, vanished(2)), 7.0)
    assert (made.missing, made.gone, made.due) == ({2}, [2], 67.0)
    made.on_news(back(2), 20.0)
    made.on_news(UnitVanished(2, vanished(2)), 20.1)  # the one before it
    assert (made.missing, made.gone, made.due) == (set(), [], None)
    assert made.back[2].word == "w"


def test_units_that_were_silent_for_a_while_and_that_vanish_while_others_are_waited_for() -> None:
    made = RestartBarrier(0, (1, 2), (), 60.0)
    made.on_news(UnitVanished(2, vanished(2)), 7.0)
    made.on_news(ready(2, 0), 9.0)  # the same process
    made.on_news(UnitVanished(1, vanished(1)), 10.0)
    assert (made.missing, made.gone, made.there) == ({1}, [1], {2})


def test_a_unit_without_processes_is_not_waited_for_once_it_is_gone() -> None:
    made = RestartBarrier(0, (1, 2), (2,), 60.0)
    made.on_news(ready(1, 0), 7.0)
    assert made.missing == {2}
    made.on_news(UnitVanished(2, vanished(2)), 8.0)
    assert made.missing == set()
    assert made.there == {1}


# --- messages -------------------------------------------------------------------------------------------------------


def received(end: ReliableEnd, parts: list[UnitPart]) -> list[Words]:
    return [words for part in parts if (words := end.receive(part)) is not None]


def test_what_is_no_message_is_refused() -> None:
    for text in (b"", b"[]", b"\xff", b"{", b"[" * 10**5):
        with pytest.raises(ProtocolError):
            ReliableEnd().receive(UnitPart(1, 0, False, text))
    end, most = ReliableEnd(), MESSAGE_BYTES // PART_BYTES
    for number in range(1, most + 1):
        assert end.receive(UnitPart(number, 0, True, b"x" * PART_BYTES)) is None
    with pytest.raises(ProtocolError, match="at most"):
        end.receive(UnitPart(most + 1, 0, True, b"x"))


def test_units_with_any_losses_of_connections_receive_all_messages_once_and_in_order() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ends, sent, found = (ReliableEnd(), ReliableEnd()), ([], []), ([], [])  # type: ignore[var-annotated]
        ways: list[list[UnitPart]] = [[], []]  # to each end
        for _ in range(60):
            side = rng.randrange(2)
            match rng.randrange(4):
                case 0:
                    sent[side].append({"n": len(sent[side]), "text": "x" * rng.choice((1, 2 * PART_BYTES))})
                    ways[1 - side] += ends[side].send(sent[side][-1])
                    assert ends[side].waiting
                case 1:  # what is on its way is lost from some point on; both send again
                    for way in (0, 1):
                        del ways[way][rng.randrange(len(ways[way]) + 1) :]
                        ways[way] += ends[1 - way].unacknowledged()
                case _ if ways[side]:
                    part = ways[side].pop(0)
                    found[side].extend(received(ends[side], [part]))
                    if part.number:
                        ways[1 - side].append(ends[side].acknowledgement())
                case _:
                    pass
        for side in (0, 1):
            for part in [*ways[side], *ends[1 - side].unacknowledged()]:
                found[side].extend(received(ends[side], [part]))
            ends[1 - side].receive(ends[side].acknowledgement())
        assert found == (sent[1], sent[0]), seed
        assert not ends[0].waiting and not ends[1].waiting, seed
    assert shortened({"log": "y" * 10**6 + "end", "pid": 3})["log"].endswith("yend")
