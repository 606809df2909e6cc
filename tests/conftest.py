"""What holds for every test: one compute thread per process (their number changes bits), no deadline by the clock."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; child processes inherit it

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, settings

# A shared machine is slow at times; a failing example is printed in a form that can be run again.
settings.register_profile("topotrain", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("topotrain")


@pytest.fixture(scope="session")
def served_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a forkserver, with torch loaded once for all the jobs of all tests."""
    from topotrain.launch import forkserver  # here, for most tests start no job

    log = tmp_path_factory.mktemp("forkserver") / "forkserver.log"
    with closing(forkserver.start(log)) as served:
        yield served.path
