"""Jobs whose server groups average, with a center or by chance: they train, count, and go on after a crash."""

import pytest
import torch
from job_runner import HOGWILD, JobRunner
from killed_jobs import killed, resumed

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

ELASTIC = f"{HOGWILD} nservers_per_group: 2 nservers_per_procs: 2 sync_freq: 3 agreement: kElastic"
GOSSIP = f"{HOGWILD} sync_freq: 2 agreement: kGossip transport: kTcp"


def test_groups_that_average_train(runner: JobRunner) -> None:
    """The result is the center, or the mean of all groups: better than the start, and finite."""
    ended = runner.run(ELASTIC, "small.py", extra="seed: 11")
    assert ended.report["metrics"]["loss"] < 1.6  # that of the untrained model is above
    assert sum(process["samples"] for process in ended.report["processes"]) == 96 * 6
    assert all(torch.isfinite(value).all() for value in ended.final.values() if value.is_floating_point())
    assert ended.report["server_groups_apart"]["exchanges"] > 0


def test_gossip_goes_on_from_a_snapshot_of_all_groups(runner: JobRunner) -> None:
    workspace = killed(runner, GOSSIP, "ledger", "snapshot_s: 0.02 reduce: kSum", 12)
    found = latest(workspace)
    assert found is not None and found.version > 0
    cells = resumed(runner, workspace).final["cells"]
    assert torch.allclose(cells * 3, torch.full_like(cells, 3), atol=1e-3), cells


def test_a_dead_server_ends_the_attempt_and_the_next_one_counts_every_sample_once(runner: JobRunner) -> None:
    words = (str(runner.folder / "job"), "server 1/0", "0", "4", "snapshot")
    ended = runner.run(GOSSIP, "mortal.py", *words, extra="reduce: kSum snapshot_s: 0.1")
    cells = ended.final["cells"]
    assert torch.allclose(cells * 3, torch.full_like(cells, 3), atol=1e-3), cells
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "server 1/0" and incident["action"] == "the whole job starts again"
    assert f"the whole job starts again from {ended.workspace}" in ended.err
