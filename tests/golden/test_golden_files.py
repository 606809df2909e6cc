"""Files that an earlier release has written stay readable: a snapshot, a decision record, a recording, a report.

They were made by commit f0b23d79 in an empty folder, with `train.py` and the two job files that stand here:

    topotrain run --report report.json synchronous.conf train.py 2
    topotrain run --record job.record asynchronous.conf train.py 2

`asynchronous.safetensors` are the final values of the second job. A release that changes a format keeps a reader of
the one before, so these files are never made anew.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from process_pool import client
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.journey

HERE = Path(__file__).parent


class Reader:
    """Runs today's commands on a copy of the files."""

    def __init__(self, folder: Path, served_at: str, warm_at: str) -> None:
        self.folder = folder / "golden"
        shutil.copytree(HERE, self.folder, symlinks=True)
        self._served_at, self._warm_at = served_at, warm_at

    def topotrain(self, *words: str, served: bool = False) -> str:
        """What a command prints on stdout; with `served` its processes are forks of the tests' own."""
        forks = ("--forkserver", self._served_at) if served else ()
        command = [*client(self._warm_at), "-m", "topotrain", words[0], *forks, *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.folder)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def values(self, file: str) -> Mapping[str, Tensor]:
        return load_file(self.folder / file)


@pytest.fixture
def golden(tmp_path: Path, served_at: str, warm_at: str) -> Reader:
    return Reader(tmp_path, served_at, warm_at)


def test_a_job_continues_from_its_snapshot_and_ends_with_its_values(golden: Reader) -> None:
    """It ends with the same values as the job that was not interrupted.

    Users' scripts read a report, and no command does. So its fields stay, and new ones may come.
    """
    whole, told = golden.values("synchronous/final.safetensors"), json.loads((HERE / "report.json").read_text())
    words = ("--resume", "synchronous", "--report", "again.json", "synchronous.conf", "train.py", "2")
    golden.topotrain("run", *words, served=True)
    assert_close(golden.values("synchronous/final.safetensors"), whole, rtol=1e-5, atol=1e-5)
    again = json.loads((golden.folder / "again.json").read_text())
    assert again["metrics"] == pytest.approx(told["metrics"], abs=1e-4) and again["steps"] == told["steps"] == 12
    assert fields(told) <= fields(again)


def fields(report: Any, path: str = "") -> set[str]:
    """The names of the values in a report without those of processes; a list has those of its first entry."""
    inner = report.items() if isinstance(report, dict) else [("[]", each) for each in report[:1]]
    inner = [(name, value) for name, value in inner if " " not in name]
    found = set()
    for name, value in inner:
        found |= {f"{path}.{name}"} | (fields(value, f"{path}.{name}") if isinstance(value, dict | list) else set())
    return found


def test_a_recorded_job_runs_again_to_its_values(golden: Reader) -> None:
    golden.topotrain("replay", "job.record", "train.py", "2", served=True)
    replayed, recorded = golden.values("job.record.replay/final.safetensors"), golden.values("asynchronous.safetensors")
    assert_close(replayed, recorded, rtol=1e-5, atol=1e-5)


def test_the_history_of_a_job_is_shown(golden: Reader) -> None:
    shown = json.loads(golden.topotrain("watch", "synchronous", "--once", "--json"))
    assert (shown["state"], shown["step"]) == ("ended", 12)
    golden.topotrain("watch", "synchronous", "--html", "page.html")
    assert "synchronous" in (golden.folder / "page.html").read_text()
