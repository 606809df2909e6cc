"""What journeys need: a runner that runs jobs, and shells. What forks their processes is the session's
(../conftest.py)."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import JobRunner
from library_forkserver import OFFLINE, served_libraries
from shells import Shells, open_shells
from unit_hosts import HostNetwork, Units


@pytest.fixture
def runner(tmp_path: Path, served_at: str, warm_at: str) -> JobRunner:
    return JobRunner(tmp_path, served_at, warm_at)


@pytest.fixture(scope="session")
def loaded_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a forkserver that has imported transformers, accelerate and Lightning."""
    with served_libraries(tmp_path_factory.mktemp("forkserver")) as path:
        yield path


@pytest.fixture
def library_runner(tmp_path: Path, loaded_at: str, warm_at: str, monkeypatch: pytest.MonkeyPatch) -> JobRunner:
    """Runs jobs of these libraries."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    return JobRunner(tmp_path, loaded_at, warm_at)


@pytest.fixture
def shells(tmp_path: Path, warm_at: str) -> Iterator[Shells]:
    with open_shells(tmp_path, warm_at) as opened:
        yield opened


@pytest.fixture
def units(runner: JobRunner) -> Iterator[Units]:
    """Makes jobs whose units are started one by one."""
    made = Units(runner)
    yield made
    made.clean_up()


@pytest.fixture(scope="session")
def network() -> Iterator[HostNetwork]:
    with tempfile.TemporaryDirectory(prefix="tt-hosts-") as folder:
        built = HostNetwork(Path(folder))
        try:
            built.start()
        except (OSError, subprocess.CalledProcessError) as error:
            built.stop()
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
        try:
            yield built
        finally:
            built.stop()
