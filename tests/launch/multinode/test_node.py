"""Units that nobody's launcher watches over: they meet in a store, run as one job, and end together, however it ends.

Here every unit is a process, and parts are played in place of training.
"""

import json
import os
import select
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import unit_hosts
from folder_wipe import block, wipe
from free_ports import free_port
from seeds import soaked

from tests.support.launch_targets import parts, wait_for
from tests.support.lost_write import lose_one
from tests.support.unit_memberships import RUN, host_map, membership
from topotrain.comm.store import StoreError, maintained_values, open_store, within
from topotrain.comm.store.discovery.job_registry import Registry
from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.core.events import (
    Exited,
    Failed,
    Finished,
    Incident,
    LocalSteps,
    Notice,
    Resources,
    Rounds,
    Serving,
    Started,
    StateTaken,
    StepDone,
    from_json,
)
from topotrain.launch import JobOutcome
from topotrain.launch.agent.stop_signals import signals
from topotrain.launch.launchers.env_tables import LaunchInfo, start_of, started_by
from topotrain.launch.multinode import node, node_rendezvous
from topotrain.launch.multinode import node_membership as company_module
from topotrain.launch.multinode.node_info import HostMap, JobEnd, NodeInfo, hosts_of
from topotrain.launch.multinode.node_membership import UnitReport
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous, forget, outlast
from topotrain.tools.cli import app as cli

WORD = "7" * 64
DEADLINE_S = 60.0
TWO, THREE = {"nworkers_per_group": 2}, {"nworkers_per_group": 3}


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("TOPOTRAIN_RANK=1 TOPOTRAIN_NPROCS=3 RANK=0 WORLD_SIZE=9", ("topotrain", 1, 3, "default")),
        (
            "RANK=2 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=Ab/7 SLURM_PROCID=0 SLURM_NTASKS=1",
            ("torchrun", 2, 4, "torchrun-ab-7"),
        ),
        ("SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_JOB_ID=12 SLURM_STEP_ID=0", ("slurm", 5, 6, "slurm-12-0")),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=2", ("mpirun", 1, 2, "default")),
        ("PMI_RANK=0 PMI_SIZE=1", ("pmi", 0, 1, "default")),
        ("JOB_COMPLETION_INDEX=3 TOPOTRAIN_NPROCS=4", ("kubernetes", 3, 4, "default")),
        ("JOB_COMPLETION_INDEX=1 TOPOTRAIN_FIRST_RANK=2 TOPOTRAIN_NPROCS=4", ("kubernetes", 3, 4, "default")),
        ("RANK=0 PMI_RANK=1 PMI_SIZE=2", ("pmi", 1, 2, "default")),
    ],
)
def test_a_launchers_variables_say_which_unit_this_is(variables, expected):
    environ = dict(word.split("=") for word in variables.split())
    start = start_of(environ, rendezvous="file:///s")
    assert (start.launcher, start.rank, start.nprocs, start.id) == expected
    assert started_by(environ) == expected[0]


def test_an_argument_wins_over_a_variable():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TOPOTRAIN_HOST": "10.0.0.2"}
    assert start_of(environ) == LaunchInfo(1, 2, "env://", "10.0.0.2", "torchrun")
    assert start_of(environ, rank=0, rendezvous="file:///s", host="h") == LaunchInfo(0, 2, "file:///s", "h", "torchrun")
    assert start_of({**environ, "TOPOTRAIN_RENDEZVOUS": "tcp://b:2"}).rendezvous == "tcp://b:2"


@pytest.mark.parametrize(
    ("given", "environ", "words"),
    [
        ({}, {}, ["--rank", "RANK and WORLD_SIZE", "SLURM_PROCID and SLURM_NTASKS", "JOB_COMPLETION_INDEX"]),
        ({"rank": 0}, {"RANK": "0"}, ["--nprocs", "TOPOTRAIN_NPROCS"]),
        ({"rank": 3, "nprocs": 3}, {}, ["--rank = 3", "0 to 2"]),
        ({"rank": 0, "nprocs": 0}, {}, ["--nprocs = 0"]),
        *(
            ({"rank": 0, "nprocs": 1, "rendezvous": "env://"}, {"TOPOTRAIN_HOST": host}, ["--host", host, "interface"])
            for host in ("0.0.0.0", "::", "224.0.0.1")
        ),
        ({}, {"RANK": "one", "WORLD_SIZE": "2"}, ["RANK = 'one'", "number"]),
        ({"rank": 0, "nprocs": 1, "rendezvous": "env://"}, {"TOPOTRAIN_MEETING_S": "soon"}, ["TOPOTRAIN_MEETING_S"]),
        ({"rank": 0, "nprocs": 1}, {}, ["--rendezvous", "TOPOTRAIN_RENDEZVOUS", "MASTER_ADDR"]),
    ],
)
def test_what_is_not_told_is_asked_for(given, environ, words):
    with pytest.raises(ConfigError) as error:
        start_of(environ, **given)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rank 0 --nprocs 2 --rendezvous foo", ["rendezvous 'foo'", "tcp://HOST:PORT"]),
        ("a.conf train.py --rank 0", ["--rank behind train.py is given to it", "--rank: must be given"]),
        ("gone.conf --rank 0 --nprocs 1 --rendezvous file:///s t.py", ["gone.conf", "cannot be read"]),
    ],
)
def test_a_typo_is_refused_at_once(tmp_path, monkeypatch, capsys, words, said):
    for name in os.environ:
        if name.startswith(("TOPOTRAIN", "SLURM")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOPOTRAIN_TOKEN", WORD)
    monkeypatch.chdir(tmp_path)
    for name in ("a.conf", "train.py"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["unit", *words.split()])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in err for word in said), err


# ---- small things ----------------------------------------------------------------------------------------------------


def test_an_end_travels():
    end = JobEnd(2, 1, "h", Failed("worker 0/1", "config", "no", "trace"))
    assert JobEnd.loaded(end.dumped()) == end
    assert JobEnd.loaded(JobEnd(130, text="stopped").dumped()) == JobEnd(130, text="stopped")
    assert JobEnd.loaded(b"nonsense").code == 1
    assert JobEnd.loaded(b"[]").code == 1
    long = JobEnd(1, failed=Failed("a", "died", "x" * 10**6, "y" * 10**6))
    assert len(long.dumped()) < 1 << 17


def test_hosts_are_numbered_in_the_order_of_ranks():
    def hosts(*units, served=False):
        made = [NodeInfo(n, f"host{at}", 1, at, address, "", 2, given) for n, (at, address, given) in enumerate(units)]
        return hosts_of(made, "", served)

    several = hosts(("b", "10.0.0.1", False), ("a", "10.0.0.2", False), ("b", "10.0.0.1", False))
    assert several.numbers == (0, 1, 0)
    assert several.addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.1")
    assert HostMap.loaded(several.dumped()) == several
    alone = hosts(("b", "10.0.0.1", False), ("b", "10.0.0.9", True), served=True)
    assert alone.addresses == ("127.0.0.1", "10.0.0.9")
    with pytest.raises(ConfigError, match=r"--host of unit 1 = '127\.0\.0\.1'.*to an address at which"):
        hosts(("b", "10.0.0.1", False), ("a", "127.0.0.1", False))
    with pytest.raises(ConfigError, match=r"on the machine of unit 1, with another TMPDIR: give both the same, or"):
        hosts(("b boot net 8:1", "127.0.0.1", False), ("b boot net 8:2", "127.0.0.1", False))
    with pytest.raises(StoreError):
        HostMap.loaded(b"{}")


def test_notes_keep_the_last_of_what_repeats():
    notes = UnitReport()
    serving = Serving("server 0/0", ("tcp://a:1",), 4)
    steps = [StepDone("worker 0/0", float(number), number, 5, None, 0.0, 0, 1, 1) for number in (1, 2)]
    rounds = [Rounds("server 0/0", {"1": number}, 0.0, 0, ()) for number in (2, 3)]
    once = [LocalSteps("worker 0/0", 5, 0.0, 0.0, 0.0), StateTaken("worker 0/0", True)]
    finished = Finished("worker 0/0", 2, 9, 0.0, 0, 1, 1)
    for event in (serving, *steps, *rounds, *once, Notice("a", "b"), finished):
        notes(event)
    assert notes.events == [serving, steps[1], rounds[1], *once, finished]


# ---- meeting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def quick(monkeypatch):
    """Nobody is waited for, and silence is short."""
    monkeypatch.setattr(node_rendezvous, "MEETING_S", 0.3)
    monkeypatch.setattr(node_rendezvous, "_LOOK_S", 0.05)
    monkeypatch.setattr(node_rendezvous, "ALIVE_S", 0.3)
    monkeypatch.setattr(node_rendezvous, "BEAT_S", 0.1)


@pytest.fixture
def entered(store):
    """Has a unit enter the store."""
    made = []

    def enter(rank, nprocs=2, secret=bytes(32)):
        one = NodeRendezvous(store, "j", rank, nprocs, secret)
        one.enter(one.introduce("", "file:///s"))
        made.append(one)
        return one

    yield enter
    for each in made:
        each.close()


def test_two_units_meet(store, entered):
    job = Job(name="j", cluster=Cluster(nworkers_per_group=2))
    first, second = entered(0), entered(1)
    assert first.bring(job) == job == second.take(None)
    hosts = first.publish(first.gather("", False))
    assert second.learn() == hosts
    assert hosts.numbers == (0, 0)
    assert hosts.addresses == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"JOB\.conf.*differs"):
        second.take(Job(seed=9))
    first.check(job)
    with pytest.raises(ConfigError, match="--nprocs = 2: must be 1"):
        first.check(Job())
    for each in (first, second):
        each.close()
    assert store.keys("jobs/j." + first.word + "/alive") == []


def test_the_job_may_have_been_submitted(store, entered):
    store.set("jobs/j/job", job_file.dumps(Job(name="sent")).encode())
    first = entered(0)
    assert first.bring(None).name == "sent"


def test_who_is_missing_is_named(entered, quick, capfd, monkeypatch):
    monkeypatch.setattr(node_rendezvous, "QUIET_S", 0.0)
    first = entered(0, nprocs=3)
    with pytest.raises(StoreError, match=r"units 1, 2 did not come within 0\.3 s"):
        first.publish(first.gather("", False))
    assert "unit 0 of 3 waits at the rendezvous for units 1, 2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"secret": bytes(31) + b"x"}, "unit 1 .* has another secret than unit 0"),
        ({"nprocs": 3}, "--nprocs of unit 1 = 3"),
    ],
)
def test_units_that_were_told_different_things(entered, other, words):
    first, _ = entered(0), entered(1, **other)
    with pytest.raises(ConfigError, match=words):
        first.publish(first.gather("", False))


def test_a_rank_and_a_name_are_given_once(entered, quick, monkeypatch):
    entered(0), entered(1)
    monkeypatch.setattr(node_rendezvous, "MEETING_S", 10)
    with pytest.raises(ConfigError, match=r"--rank = 1: is taken: unit 1 \(pid"):
        entered(1)
    with pytest.raises(ConfigError, match="job = 'j': runs already"):
        entered(0)


def test_a_dead_start_is_forgotten_and_its_keys_are_not_taken_for_new_ones(store, quick, monkeypatch, entered):
    dead, old = entered(0), entered(1)
    dead.bring(Job(name="old"))
    dead.publish(dead.gather("", False))
    for each in (dead, old):
        each.close()
    monkeypatch.setattr(node_rendezvous, "MEETING_S", 20)
    met = []
    early = threading.Thread(target=lambda: met.append(entered(1)))  # sees the dead one first
    early.start()
    first = entered(0)
    early.join(20)
    assert met[0].word == first.word != dead.word
    assert store.keys(f"jobs/j.{dead.word}/") == []
    for each in (first, *met):
        each.close()
    forget(store)
    assert store.keys() == []


def agreed(entered):
    """Two units that have met, with what they say of themselves to each other."""
    job = Job(name="j", cluster=Cluster(nworkers_per_group=2))
    first, second = entered(0), entered(1)
    first.bring(job)
    second.take(None)
    first.publish(first.gather("", False))
    second.learn()
    return first, second


def test_a_unit_that_comes_back_after_the_store_was_wiped_finds_the_job(entered, tmp_path, monkeypatch):
    monkeypatch.setattr(maintained_values, "LOOK_S", 0.05)
    monkeypatch.setattr(node_rendezvous, "MEETING_S", 20)
    first, dead = agreed(entered)
    dead.close()
    wipe(tmp_path / "store")
    met = []
    back = threading.Thread(target=lambda: met.append(entered(1)))
    back.start()
    said = NodeInfo.loaded(first.run.watch("back/1", 20))
    first.run.set(node_rendezvous.welcome_key(1, said.word), b"1")
    back.join(20)
    assert met[0].returns
    assert met[0].take(None).name == "j"
    assert met[0].learn().numbers == (0, 0)


@pytest.mark.parametrize("key", ["", "/run", "/host/1", "/job", "/hosts"])
def test_units_meet_though_the_store_is_wiped_meanwhile_or_loses_one_write(entered, tmp_path, monkeypatch, key):
    monkeypatch.setattr(maintained_values, "LOOK_S", 0.05)
    monkeypatch.setattr(node_rendezvous, "_LOOK_S", 0.2)
    monkeypatch.setattr(node_rendezvous, "MEETING_S", 20)
    lost = lose_one(monkeypatch, key) if key else []
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(entered, 1)
        first, second = entered(0), entering.result(20)
        if not key:
            wipe(tmp_path / "store")
        taken = pool.submit(lambda: (second.take(None), second.learn(), second.chosen()))
        first.bring(Job(name="j", cluster=Cluster(nworkers_per_group=2)))
        first.choose("000007", "5ea1")
        hosts = first.publish(first.gather("", False))
        assert taken.result(20)[1:] == (hosts, ("000007", "5ea1"))
    assert len(lost) == bool(key)


def test_two_units_of_one_rank_do_not_train_where_the_store_has_lost_the_first_claim(entered, quick, monkeypatch):
    lose_one(monkeypatch, "/host/1")
    first, early, late = entered(0), entered(1), entered(1)
    first.publish(first.gather("", False))
    with pytest.raises(ConfigError, match=r"--rank = 1: is taken: unit 1 \(pid"):
        early.learn()
    assert late.learn().units[1] == late.me


# ---- company ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def company(store):
    """Makes the membership of one unit; `saves` is the rank of the unit with the first server, and unit 0 leads."""
    made = []

    def make(rank=0, units=3, saves=0):
        made.append(membership(store, rank, host_map(units), recovers=False, saves=rank == saves))
        return made[-1], within(store, RUN)

    yield make
    for each in made:
        each.close()


def test_the_first_end_counts(company):
    (a, _), (b, _) = company(0), company(1)
    b.tell(Failed("worker 0/1", "program", "boom", ""))
    end = a.wait(10)
    assert end == b.wait(10)
    assert (end.code, end.unit, end.host, end.failed.text) == (1, 1, "h1", "boom")
    b.signalled(signal.SIGINT)
    assert b.wait(0) == end
    assert a.over and b.over


def test_an_end_that_a_unit_has_written_before_it_was_a_member_ends_all(company):
    (a, run), (b, _) = company(0), company(1)
    end = JobEnd(2, 2, "h2", text="unit 2 refused the job")
    run.set("end", end.dumped())
    assert a.wait(10) == b.wait(10) == end


def test_a_unit_that_ends_the_job_before_its_start_stays_for_those_that_come():
    beats = iter([[], ["alive/0", "alive/2"], ["alive/0", "alive/1"], ["alive/0"]])
    outlast(SimpleNamespace(keys=lambda start: next(beats), get=lambda key: b"1"), 0, 3)
    assert next(beats, None) is None


def test_a_lost_peer_waits_for_an_explanation(company):
    (a, run), (b, _) = company(0), company(1)
    for rank in range(3):
        run.set(f"alive/{rank}", b"1")
    b.tell(Failed("worker 0/1", "peer", "lost worker 0/0", ""))
    a.tell(Failed("worker 0/0", "died", "was killed", ""))
    assert a.wait(10).failed.text == "was killed"
    assert b.wait(10) == a.end


def test_who_is_missing_explains_a_lost_peer(company, monkeypatch):
    monkeypatch.setattr(company_module, "BEAT_S", 0.1)
    a, run = company(0)
    for rank in (0, 2):
        run.set(f"alive/{rank}", b"1")
    a.tell(Failed("worker 0/0", "peer", "lost worker 0/1", ""))
    end = a.wait(10)
    assert (end.unit, end.host, end.failed.text) == (1, "h1", "unit 1 on h1 vanished without a word")


def test_jobs_stop_ends_it(company, store):
    a, _ = company(0)
    store.set("jobs/j/stop", b"stop")
    assert select.select([a], [], [], 10)[0] and a.saves and not a.over
    a.signalled(15, "saved")
    end = a.wait(10)
    assert end.code == 143
    assert "jobs stop" in end.text and end.text.endswith("; saved")


@pytest.mark.parametrize(("asked", "takes"), [(0, 1), (1, 0), (1, 2), (2, 2)])
def test_a_wish_for_a_last_snapshot_reaches_the_unit_that_takes_it(company, asked, takes):
    units = [company(rank, saves=takes)[0] for rank in range(3)]
    units[asked].save(signal.SIGTERM)
    wait_for(lambda: units[takes].saves)
    # The unit that leads ends the job if that one has not done so in time.
    wait_for(lambda: units[0].saves)
    assert [each.saves for each in units] == [rank in (0, takes) for rank in range(3)]
    units[takes].signalled(signal.SIGTERM, "snapshot 3")
    name = f"ended by SIGTERM to unit {asked} on h{asked}; snapshot 3"
    assert {each.wait(10).text for each in units} == {name}


def test_an_end_that_is_wiped_out_is_written_again(company, monkeypatch):
    monkeypatch.setattr(maintained_values, "LOOK_S", 0.05)
    one, run = company(0)
    one.tell(Failed("worker 0/1", "program", "boom", ""))
    said = run.watch("end", 20)
    forget(run)
    assert run.watch("end", 20) == said
    one.close()
    forget(run)
    assert run.get("end") is None


def test_a_jobs_entry_in_the_list_that_is_wiped_out_is_made_again(company, store, monkeypatch):
    monkeypatch.setattr(company_module, "BEAT_S", 0.05)
    monkeypatch.setattr(company_module, "_REGISTER_EVERY_S", 0.1)
    company(0)
    for _ in range(2):
        store.watch("registry/j", 20)
        forget(store)
    store.watch("registry/j", 20)


def test_without_a_store_and_the_others_a_unit_that_is_done_ends_alone_and_says_so(company, monkeypatch, tmp_path):
    monkeypatch.setattr(company_module, "BEAT_S", 0.05)
    monkeypatch.setattr(company_module, "AWAY_S", 0.3)
    block(tmp_path / "store")
    first, second = company(0, units=2)[0], company(1, units=2)[0]  # the second finds no address to connect to
    for each, what in ((first, "the store"), (second, "unit 0")):
        each.finish([])
        end = each.wait(10)
        assert end.code == 0
        assert f"{what} was out of reach for 0.3 s at the end" in end.text


def test_a_unit_that_cannot_reach_unit_0_for_long_ends_with_its_own_cause(company, monkeypatch):
    monkeypatch.setattr(company_module, "AWAY_S", 0.1)
    for tell, text in (
        (lambda one: one.tell(Failed("worker 0/1", "died", "was killed", "")), "was killed"),
        (lambda one: one.signalled(signal.SIGTERM), "ended by SIGTERM to unit 1 on h1"),
    ):
        one, run = company(1)  # there is no unit 0, but a heartbeat of it
        run.set("alive/0", b"1")
        wait_for(lambda one=one: one.control.alone)
        tell(one)
        end = one.wait(5)
        assert (end.unit, end.failed.text if end.failed else end.text) == (1, text)


# ---- whole units -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(mark, monkeypatch):
    """With the secret of the units."""
    monkeypatch.setenv("TOPOTRAIN_TOKEN", WORD)
    return mark


class Unit(unit_hosts.Unit):
    """One unit in a process of its own."""

    def __init__(self, rank, warm_at, words):
        super().__init__(warm_at, words, Path.cwd(), WORD)
        self.rank = rank
        self.told = None
        self.events = []

    def until(self, kind, who):
        for line in self.process.stdout:
            self.events.append(from_json(line))
            if isinstance(self.events[-1], kind) and self.events[-1].who == who:
                return self.events[-1]
        raise AssertionError(f"{self.events} {super().end()}")

    def end(self):
        code, out, self.err = super().end(DEADLINE_S)
        for line in out.splitlines():
            if line.startswith('{"ended"'):
                self.told = json.loads(line)["ended"]
            else:
                self.events.append(from_json(line))
        return code


@pytest.fixture
def units(tmp_path, mark, warm_at):
    (tmp_path / "play.py").touch()
    started = []

    def start(rank, args=(), nprocs=3, counts=THREE, url="", bare=False, name="w"):
        url = url or (tmp_path / "store").as_uri() + "?job=play"
        text = "" if bare else json.dumps(counts)
        words = [str(tmp_path / name), str(rank), str(nprocs), url, text, *args]
        started.append(Unit(rank, warm_at, ["-m", "tests.support.unit_targets", *words]))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.mark.journey
def test_units_in_any_order_are_one_job(units, tmp_path):
    job = [units(rank, bare=rank > 0) for rank in (2, 1, 0)]
    assert [each.end() for each in job] == [0, 0, 0], [each.err for each in job]
    heard = {event.who for event in job[-1].events if isinstance(event, Serving)}
    assert heard == {"worker 0/0", "worker 0/1", "worker 0/2", "server 0/0"}  # unit 0 knows the whole job's events
    assert {event.who for event in job[0].events if isinstance(event, Exited)} == {"worker 0/2", "unit 2"}
    assert (tmp_path / "w" / "processes-2.json").exists()
    store = open_store((tmp_path / "store").as_uri())
    assert store.keys("jobs/") == []
    assert [record.state for record in Registry(store).list()] == ["done"]


@pytest.mark.journey
@pytest.mark.parametrize("asked", soaked([{"checkpoint_freq": 5}], [{}]))
def test_snapshots_without_a_shared_workspace_are_no_surprise_at_a_restart(units, tmp_path, asked):
    other = tmp_path / "other"
    (other / "w").mkdir(parents=True)
    (other / "play.py").touch()
    (other / "w" / "lock-0").write_text("4711 play.before")  # of an earlier job there
    job = [units(rank, nprocs=2, counts=TWO | asked, name=name) for rank, name in enumerate(("w", "other/w"))]
    codes, told = [each.end() for each in job], f"{other / 'w'}: unit 1 on {socket.gethostname()} does not find"
    if asked:
        assert codes == [2, 2]
        assert "cannot have snapshots (checkpoint_freq): unit 1 on" in job[0].told["text"]
        return
    assert codes == [0, 0], [each.err for each in job]
    noticed = [[event.text for event in each.events if isinstance(event, Notice)] for each in job]
    assert not any("snapshots" in text for text in noticed[0])
    assert sum(told in text for text in noticed[1]) == 1


def incidents(unit):
    return [(event.who, event.action) for event in unit.events if isinstance(event, Incident)]


@pytest.mark.journey
def test_units_of_a_host_share_a_forkserver_and_survive_its_death(units, tmp_path):
    def listed(rank):
        path = tmp_path / "w" / f"processes-{rank}.json"
        entries = json.loads(path.read_text()) if path.exists() else []
        return [entry["pid"] for entry in entries if entry["roles"] == ["forkserver"]]

    roles = parts(worker_0_0="life", worker_0_1="life", server_0_0="life")
    job = [units(rank, roles, nprocs=2, counts={**TWO, "restarts": 1}) for rank in range(2)]
    wait_for(lambda: listed(0) and listed(1))
    (pid,) = {*listed(0), *listed(1)}
    for each in job:  # none may start the next life before there is a sign of the first one
        each.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "w" / "logs" / "lives").touch()
    for each in job:
        each.process.send_signal(signal.SIGCONT)
    assert [each.end() for each in job] == [0, 0], [each.err for each in job]
    ((who, action),) = incidents(job[0])
    assert who == "forkserver" and action.startswith("the whole job starts again")
    assert listed(0) == listed(1) != [pid]


ENDLESS = parts(worker_0_0="stay", worker_0_1="stay", server_0_0="stay")


@pytest.mark.journey
def test_the_unit_that_leads_hears_what_the_processes_of_others_use_and_a_signal_to_one_ends_all(units):
    job = [units(rank, ENDLESS, nprocs=2, counts={**TWO, "restarts": 1}) for rank in range(2)]
    used = job[0].until(Resources, "worker 0/1")
    assert used.memory_bytes > 1 << 20
    starts = {event.who: event.pid for event in job[0].events if isinstance(event, Started)}
    assert used.pid == starts["worker 0/1"]
    job[1].until(Resources, "worker 0/1")
    os.killpg(job[0].process.pid, signal.SIGINT)
    assert [each.end() for each in job] == [130, 130]
    # None of it goes back.
    assert not [event for event in job[1].events if isinstance(event, Resources) and event.who != "worker 0/1"]
    assert {each.told["text"] for each in job} == {f"ended by SIGINT to unit 0 on {socket.gethostname()}"}


@pytest.mark.journey
def test_sigterm_to_any_unit_ends_all_after_a_last_snapshot(units):
    roles = parts(worker_0_0="stay", worker_0_1="stay", server_0_0="saves")
    job = [units(rank, roles, nprocs=2, counts={**TWO, "grace_s": 100.0}) for rank in range(2)]
    for each in job:
        each.until(Serving, f"worker 0/{each.rank}")
    job[1].process.send_signal(signal.SIGTERM)
    assert {each.end() for each in job} == {143}
    (text,) = {each.told["text"] for each in job}
    assert text.startswith(f"ended by SIGTERM to unit 1 on {socket.gethostname()}; snapshot 3 has step 70")


@pytest.mark.journey
def test_a_unit_that_vanishes_with_the_store_is_named(units, monkeypatch):
    """One notices it by a lost peer, one by the store's silence."""
    monkeypatch.setenv("TOPOTRAIN_TEST_HASTY", "1")
    url = f"tcp://127.0.0.1:{free_port()}?job=play"
    args = parts(worker_0_0="stay", worker_0_1="stay", worker_0_2="witness", server_0_0="stay")
    job = [units(rank, args, counts={**THREE, "restarts": 3}, url=url) for rank in range(3)]
    for each in job[:2]:
        each.until(Serving, f"worker 0/{each.rank}")
    witness = job[2].until(Notice, "worker 0/2").text
    job[0].process.send_signal(signal.SIGKILL)
    Path(witness).write_text("go")
    assert [each.end() for each in job[1:]] == [1, 1]
    named = f"unit 0 on {socket.gethostname()} vanished without a word, and the store with it"
    named += "; with a store at redis:// or file:// another unit would lead the job, and it would go on"
    assert [each.told["text"] for each in job[1:]] == [named] * 2


@pytest.mark.journey
def test_a_job_that_does_not_fit_is_refused_by_all(units):
    # The store is that of unit 0, which refuses the job before the others have come.
    url = f"tcp://127.0.0.1:{free_port()}/?job=play"
    job = [units(rank, nprocs=2, counts=THREE, url=url) for rank in range(2)]
    assert [each.end() for each in job] == [2, 2]
    assert any("--nprocs = 2: must be 3, the number of units of this job" in each.err for each in job)


@pytest.mark.journey
def test_ctrl_c_while_waiting_for_the_others(units, tmp_path):
    one = units(0)
    run = tmp_path / "store"
    wait_for(lambda: list(run.glob("jobs+play.*+alive+0")) if run.exists() else None)
    two = units(1)
    wait_for(lambda: list(run.glob("jobs+play.*+alive+1")))
    os.killpg(one.process.pid, signal.SIGINT)
    assert [one.end(), two.end()] == [130, 130]
    assert "ended by signal 2 to unit 0" in two.told["text"]


def test_a_unit_whose_part_is_done_says_that_it_waits_for_the_others(monkeypatch):
    ours, theirs = socket.socketpair()
    said = []

    class Others:
        over = False
        control = SimpleNamespace(fileno=theirs.fileno)

        def fileno(self):
            return ours.fileno()

        def finish(self, events):
            assert events == ()

        def wait(self, seconds):
            return JobEnd(0, 0)

    others = Others()

    def hear(text):
        said.append(text)
        others.over = True
        theirs.send(b"!")

    monkeypatch.setattr(node, "QUIET_S", 0.01)
    with ours, theirs, signals() as heard:
        attempts = SimpleNamespace(membership=others, stop=heard, notify=hear, answer=lambda: None)
        end = node._agree(attempts, JobOutcome(0, 1.0), SimpleNamespace(events=()), False)
    assert end == JobEnd(0, 0)
    assert said == ["this unit has ended; the job ends when its other units have"]


def test_a_signal_that_no_leader_has_heard_of_is_left_in_the_store(company, monkeypatch):
    """The unit ends after a while; the unit that leads next reads it."""
    first, run = company(rank=0)
    membership = SimpleNamespace(over=False, wait=lambda seconds: None, signalled=lambda number: None)
    rendezvous = SimpleNamespace(run=run, rank=2)
    attempts = SimpleNamespace(membership=membership, stop=SimpleNamespace(came=[15]), rendezvous=rendezvous)
    end = node._agree(attempts, JobOutcome(143, 1.0), SimpleNamespace(events=()), True)
    assert (end.code, end.text) == (143, "ended by signal 15 to unit 2")
    assert first.wait(DEADLINE_S) == end
