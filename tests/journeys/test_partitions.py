"""The network between two hosts is cut, or the store of a job is lost: a short version of `tests.soak.partitions`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis_server
from soak_cases import soak_only, soaked
from unit_hosts import HostNetwork, Units, hastily

from tests.soak.partitions import EPOCHS, Ground, trial
from topotrain.comm.store.store_url import parse

pytestmark = pytest.mark.journey

HASTILY = hastily(0.5, 2.0, lost_s=5.0, away_s=2.0)


@pytest.fixture
def ground(network: HostNetwork, tmp_path: Path) -> Ground:
    return Ground(network, tmp_path, HASTILY)


@soak_only
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("flap", "AllReduce"), ("one way", "Downpour"), ("wiped", "Downpour"), ("gone", "AllReduce")],
)
def test_no_sample_is_lost_or_counted_twice(ground: Ground, kind: str, layout: str) -> None:
    found = trial(ground, kind, layout, 1)
    assert not found.wrong, f"{found.wrong}\n{found.said}"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a Redis server, and how it dies."""
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    with ExitStack() as stack:
        yield stack.enter_context(redis_server.redis_server(tmp_path)), stack.close


@pytest.mark.parametrize("end", soaked(["killed"], ["flushed"]))
def test_redis_is_not_needed_while_a_job_runs(units: Units, redis: tuple[str, Callable[[], None]], end: str) -> None:
    url, kill = redis
    job = units.paced("nworkers_per_group: 2 nservers_per_group: 2", EPOCHS, hosts=2, store=url)
    job.begin()
    if end == "killed":
        kill()
    else:
        flush(url)
    job.end_well()
    job.check_ledger(EPOCHS)
    assert not any("Traceback" in said for said in job.said.values()), job.said  # of a thread whose store was closed
    assert not any("the end of the other units is unknown" in said for said in job.said.values())


def flush(url: str) -> None:
    import redis

    parts = parse(url)
    with redis.Redis(parts.host, parts.port, password=parts.password) as client:
        client.flushall()
