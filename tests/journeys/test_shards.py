"""`tt.data_parallel` by hand: shards meet over a directory, and one of them is killed.

Over Redis: compat/caffe2/test_parallelize.py.
"""

import os
import signal

import pytest
import torch
from job_runner import PROGRAMS, JobRunner
from shells import Shells, ended

pytestmark = pytest.mark.journey


def test_shards_end_with_the_parameters_of_topotrain_run_and_with_one_another(
    shells: Shells, runner: JobRunner
) -> None:
    for number in ("1", "0"):
        shells.python(str(PROGRAMS / "shards.py"), "--shard", number)
    expected = runner.run("nworkers_per_group: 2 nservers_per_group: 2", "shards.py", extra="reduce: kSum").final
    last, first = ended(shells.all, [-signal.SIGKILL, 1])
    for number in range(2):
        final = torch.load(shells.folder / f"file-{number}.pt")
        assert final.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(final[key], value, rtol=1e-6, atol=1e-6)
    assert (shells.folder / "file" / "final.safetensors").exists()
    assert "loss 0." in first
    # One more start over the same directory, which remembers two starts; its shard 1 was killed.
    assert "shard 1 is gone, the job cannot go on" in first or "lost server 0/1" in first
    assert "the server of shard 0: ready" in first
    assert "Traceback" not in first
    assert first.count("exit net of shard 0") == 2 and last.count("exit net of shard 1") == 1
    left = {name.partition(".room")[0] for name in os.listdir(shells.folder / "store")}
    assert left <= {"LOCK", "CLOCK", "jobs+parallelize", "jobs+parallelize+lobby+2+round", "jobs+parallelize+seats+1"}
