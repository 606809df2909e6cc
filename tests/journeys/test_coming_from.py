"""docs/coming-from.md: our side of every table is in the script below it, and every script trains as a job of two."""

import re
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import typer.main
from job_runner import JobRunner

from topotrain.config.job_file import loads
from topotrain.tools.cli.app import app

pytestmark = pytest.mark.journey

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
LAYOUT = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
IN_CLUSTER = ("compression",)  # fields of the page that are not the job's own
BEFORE = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import topotrain


def build_model():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
train = TensorDataset(inputs, inputs.argmax(dim=1))
model, loss_of, epochs = build_model(), nn.CrossEntropyLoss(), 2
job_name, task_index, trainer_id, shard_id = "worker", *[topotrain.rank()] * 3
first = float(loss_of(model(inputs), train.tensors[1]))
"""
AFTER = """
last = float(loss_of(model(inputs), train.tensors[1]))
assert last < 0.8 * first, (first, last)
"""


def fence(section: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE)
    return str(found)


def ours(section: str) -> list[str]:
    """The code in the right column of a section's table."""
    rows = re.findall(r"^\| .+ \| (.+) \|$", SECTIONS[section], re.MULTILINE)
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


def bare(code: str) -> str:
    """Without what depends on the width of a line."""
    return re.sub(r"\s", "", code).replace(",)", ")")


def conf(section: str) -> str:
    return fence(section, "") if section == "SINGA" else f"cluster {{ {LAYOUT} }}"


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, served_at: str, warm_at: str
) -> dict[str, "Future[subprocess.CompletedProcess[str]]"]:
    """All of them, two at a time."""

    def run(section: str) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path_factory.mktemp("here")
        (folder / "train.py").write_text(BEFORE + fence(section, "python") + AFTER)
        command = JobRunner(folder, served_at, warm_at).command("", str(folder / "train.py"))
        (folder / "job.conf").write_text(conf(section))
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    pool = ThreadPoolExecutor(2)
    found = {section: pool.submit(run, section) for section in SECTIONS}
    pool.shutdown(wait=False)
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_our_side_trains(runs: dict[str, "Future[subprocess.CompletedProcess[str]]"], section: str) -> None:
    done = runs[section].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_shows_what_the_script_says(section: str) -> None:
    script = bare(fence(section, "python"))
    commands = typer.main.get_command(app).commands
    codes = ours(section)
    assert len(codes) >= 3
    for code in codes:
        if code.startswith("topotrain "):
            assert code.split()[1] in commands, code
        elif "." in code and "(" in code:
            assert bare(code) in script, code
        elif re.search(r": k[A-Z]", code):
            loads(f"cluster {{ {code} }}" if code.startswith(IN_CLUSTER) else code, "the page")


def test_the_block_of_singa_is_read_as_it_is() -> None:
    job = loads(fence("SINGA", ""), "the page")
    assert (job.train_steps, job.cluster.nworkers_per_group, job.updater.momentum) == (8, 2, 0.9)
