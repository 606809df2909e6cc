"""What journeys need: a shop that runs jobs, and shells. What forks their processes is the session's
(../conftest.py)."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import Shop
from shells import Shells, open_shells
from unit_hosts import Town


@pytest.fixture
def shop(tmp_path: Path, served_at: str, warm_at: str) -> Shop:
    return Shop(tmp_path, served_at, warm_at)


@pytest.fixture
def shells(tmp_path: Path, warm_at: str) -> Iterator[Shells]:
    with open_shells(tmp_path, warm_at) as opened:
        yield opened


@pytest.fixture(scope="session")
def town() -> Iterator[Town]:
    with tempfile.TemporaryDirectory(prefix="tt-hosts-") as folder:
        built = Town(Path(folder))
        try:
            built.build()
        except (OSError, subprocess.CalledProcessError) as error:
            built.pull_down()
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        try:
            yield built
        finally:
            built.pull_down()
