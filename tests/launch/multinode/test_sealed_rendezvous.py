"""A rendezvous on a Redis server that others can write to, without the job's secret."""

import re
from contextlib import closing

import pytest
import redis_server

from topotrain.comm.store import StoreError, open_store
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry
from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.launch.job_requests import StopJob
from topotrain.launch.multinode import node_rendezvous
from topotrain.launch.multinode.node_rendezvous import NodeRendezvous
from topotrain.launch.store_requests import ask_over_store

SECRET, OTHER = b"s" * 32, b"o" * 32
JOB = Job(name="j", program="train.py", args=("1",), cluster=Cluster(nworkers_per_group=2))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    with redis_server.redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def stranger(url):
    import redis

    with closing(redis.Redis.from_url(url)) as client:
        client.flushall()
        yield client


@pytest.fixture
def enter(url, stranger):
    """Make units that have entered the rendezvous."""
    opened = []

    def one(rank, secret=SECRET, patience=20.0):
        root = open_store(url, secret)
        unit = NodeRendezvous(root, "j", rank, 2, secret, patience)
        opened.append((unit, root))
        unit.enter(unit.introduce("", "file:///s"))
        return unit

    yield one
    for unit, root in opened:
        unit.close()
        root.close()


def test_a_forged_program_reaches_no_unit(enter, stranger):
    first, second = enter(0), enter(1)
    first.bring(JOB)
    (key,) = stranger.keys("topotrain/jobs/j.*/job")
    forged = job_file.dumps(Job(name="j", program="-m timeit", args=("evil()",), cluster=JOB.cluster))
    stranger.set(key, forged)
    stranger.set(b"topotrain/jobs/j/job", forged)  # for a unit 0 that is started without a job
    assert second.take(None) == JOB  # unit 0 has written it again


def test_a_unit_runs_the_program_of_its_own_command_line(enter):
    first, second = enter(0), enter(1)
    first.bring(JOB)
    mine = Job(name="j", program="/here/train.py", args=("2",), cluster=JOB.cluster)
    assert second.take(mine) == mine


@pytest.mark.parametrize("planted", ["run", "night"])
def test_keys_planted_before_the_start_do_not_keep_the_job_from_starting(enter, stranger, planted):
    stranger.set("topotrain/jobs/j/run", planted)
    stranger.set("topotrain/jobs/j/stop", "stop")
    first, second = enter(0), enter(1)
    first.bring(JOB)
    assert second.take(None) == JOB
    assert first.shared.get("stop") is None


def test_a_planted_heartbeat_of_an_ended_start_does_not_keep_the_next_from_starting(enter, stranger):
    first = enter(0)
    first.close()
    stranger.set(f"topotrain/jobs/j.{first.word}/alive/7", "1")
    assert enter(0, patience=2.0).word != first.word


def test_a_job_with_another_secret_keeps_its_name(enter, url):
    first = enter(0)
    with pytest.raises(ConfigError, match=r"job = 'j': runs already \(with another secret\)"):
        enter(0, OTHER, patience=0.5)
    with closing(open_store(url, SECRET)) as store:
        assert store.get("jobs/j/run") == first.word.encode()


def test_requests_with_another_secret_are_told_so(enter, url):
    enter(0)
    with closing(open_store(url, OTHER)) as store:
        registry = Registry(store)
        registry.add(JobRecord("j", "j"))
        with pytest.raises(StoreError, match="job 'j' has another secret than this process: TOPOTRAIN_TOKEN"):
            registry.stop("j")
        with pytest.raises(ConfigError, match="job 'j' has another secret than this process"):
            ask_over_store(url, "j", StopJob(), {"TOPOTRAIN_TOKEN": OTHER.hex()})


def test_a_unit_with_another_secret_is_told_so(enter, monkeypatch):
    monkeypatch.setattr(node_rendezvous, "_LOOK_S", 0.05)
    enter(0)
    said = re.escape("unit 0 did not come within 0.3 s (job 'j', unit 1): its value in the store is not of this")
    with pytest.raises(Exception, match=said + " unit's secret"):
        enter(1, OTHER, patience=0.3)
