"""`tt.data_parallel` by hand: shards meet over a directory, in the soak over Redis, too, and one of them is killed."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from job_runner import PROGRAMS, JobRunner
from redis_server import MISSING, PASSWORD, redis_server
from seeds import SOAK
from shells import Shells, ended

pytestmark = pytest.mark.journey

LAYOUT = "nworkers_per_group: 2 nservers_per_group: 2"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a server of its own; 0 where there is none, and in `make test`: compat/caffe2/test_parallelize.py."""
    if not SOAK or MISSING or find_spec("redis") is None:
        yield 0
        return
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as url:
        yield urlsplit(url).port or 0


def test_shards_end_with_the_parameters_of_topotrain_run_and_with_one_another(
    shells: Shells, runner: JobRunner, redis: int
) -> None:
    handlers = ["--file", "store", *(["--redis", str(redis)] if redis else []), "--dies"]
    shells.environ["REDIS_PASSWORD"] = PASSWORD
    for number in ("1", "0"):
        shells.python(str(PROGRAMS / "shards.py"), "--shard", number, *handlers)
    expected = runner.run(LAYOUT, "shards.py", extra="reduce: kSum").final
    last, first = ended(shells.all, [-signal.SIGKILL, 1])
    for name in ("file", "redis") if redis else ("file",):
        for number in range(2):
            final = torch.load(shells.folder / f"{name}-{number}.pt")
            assert final.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(final[key], value, rtol=1e-6, atol=1e-6)
        assert (shells.folder / name / "final.safetensors").exists()
        assert f"{name}: loss 0." in first
    # One more start over the same directory, which remembers two starts; its shard 1 was killed.
    assert "shard 1 is gone, the job cannot go on" in first or "lost server 0/1" in first
    assert "the server of shard 0: ready" in first
    assert "Traceback" not in first
    starts = 3 if redis else 2
    assert first.count("exit net of shard 0") == starts
    assert last.count("exit net of shard 1") == starts - 1
    left = {name.partition(".room")[0] for name in os.listdir(shells.folder / "store")}
    assert left <= {"LOCK", "CLOCK", "jobs+parallelize", "jobs+parallelize+lobby+2+round", "jobs+parallelize+seats+1"}
