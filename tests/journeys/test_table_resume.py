"""Jobs with tables whose processes are killed: they go on from a snapshot that has the rows, too."""

import os
import signal
from pathlib import Path

import pytest
import torch
from job_runner import Ended, JobRunner
from killed_jobs import begun, entries, resumed
from safetensors.torch import load_file
from test_resume import SYNC

from topotrain.extensions.tables.frontend.table_export import read_parts

pytestmark = [
    pytest.mark.journey,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch's own Adagrad makes such tensors
]

WORDS = ("resuming.py", "words", "--epochs", "2", "--at", "40")


def rows_of(workspace: Path, name: str, width: int) -> dict[int, list[float]]:
    parts = read_parts(workspace / "tables" / name, width)
    return {int(i): row.tolist() for ids, rows in parts for i, row in zip(ids, rows, strict=True)}


def different(undisturbed: Ended, final: dict[str, torch.Tensor]) -> list[str]:
    assert final.keys() == undisturbed.final.keys()
    return [name for name, tensor in undisturbed.final.items() if not torch.equal(tensor, final[name])]


def shot(runner: JobRunner, cluster: str, victim: str, *program: str, extra: str) -> tuple[str, Path]:
    """A job of which one process is killed when its main worker has taken 40 steps: what it said, and its workspace."""
    hold = runner.folder / "hold"
    hold.touch()
    command = runner.command(cluster, *program, "--hold", str(hold), extra=extra)
    process, heard = begun(command, runner.folder, "holding")
    workspace = runner.folder / "job"
    hold.unlink()  # who comes after it does not hold
    os.kill(next(entry["pid"] for entry in entries(workspace) if victim in entry["roles"]), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, heard + said
    return heard + said, workspace


def test_a_server_dies_and_the_bits_are_those_without_the_death(runner: JobRunner) -> None:
    undisturbed = runner.run(SYNC, *WORDS, name="undisturbed")
    rows = rows_of(undisturbed.workspace, "served", 6)
    said, workspace = shot(runner, SYNC, "server 0/1", *WORDS, extra="snapshot_s: 0 checkpoint_freq: 15")
    assert "the whole job starts again from /" in said and len(rows) == 40
    assert not different(undisturbed, load_file(workspace / "final.safetensors"))
    assert rows_of(workspace, "served", 6) == rows
    ended = resumed(runner, workspace / "manifests" / "step-30", "--set", "cluster.nservers_per_group=3")
    assert not different(undisturbed, ended.final)  # rows have found their new homes
    assert rows_of(ended.workspace, "served", 6) == rows
