"""Jobs with several models and optimizers through real processes: as plain PyTorch, and whatever happens to them."""

import pytest
import torch
from job_runner import SANDBLASTER, JobRunner
from killed_jobs import killed, resumed

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

EPOCHS = 3
GOES_ON = "on_failure: kContinue reduce: kSum"


def test_every_step_with_every_batch_counts_once_whenever_a_worker_dies(runner: JobRunner) -> None:
    words = ("--die", "1", "--at", "7", "--lived", str(runner.folder / "lived"))
    extra = f"{GOES_ON} snapshot_s: 0.1"
    ended = runner.run(SANDBLASTER, "pair.py", "ledger", "--epochs", str(EPOCHS), *words, extra=extra)
    assert ended.report["incidents"][0]["who"].startswith("worker")
    for name, cells in ended.final.items():
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), (name, cells)


INLINE = "nworkers_per_group: 2 nservers_per_group: 2"


def test_a_gan_goes_on_with_the_same_bits(runner: JobRunner) -> None:
    """The main worker is killed between two steps with a batch, and the snapshot is of another moment."""
    undisturbed = runner.run(INLINE, "pair.py", "gan", name="undisturbed").final
    workspace = killed(runner, INLINE, "gan", program="pair.py")
    found = latest(workspace)
    assert found is not None and 0 < found.version <= 60 and found.version % 2 == 0
    ended = resumed(runner, workspace)
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, ended.final[name])]
    assert not different, (found.version, different)
