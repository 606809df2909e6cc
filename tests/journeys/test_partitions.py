"""The store of a job dies while the job runs. Networks that are cut: tests.soak.partitions."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import redis_server
from unit_hosts import Units

pytestmark = pytest.mark.journey


def test_redis_is_not_needed_while_a_job_runs(units: Units, tmp_path: Path) -> None:
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    with ExitStack() as stack:
        url = stack.enter_context(redis_server.redis_server(tmp_path))
        job = units.paced("nworkers_per_group: 2 nservers_per_group: 2", 6, hosts=2, store=url)
        job.begin()
        stack.close()
        job.end_well()
    job.check_ledger(6)
    assert not any("Traceback" in said for said in job.said.values()), job.said  # of a thread whose store was closed
    assert not any("the end of the other units is unknown" in said for said in job.said.values())
