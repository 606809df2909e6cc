"""Jobs with several models and optimizers through real processes: as plain PyTorch, and whatever happens to them."""

import subprocess
import sys

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, PROGRAMS, SANDBLASTER, JobRunner
from safetensors.torch import load_file

pytestmark = pytest.mark.journey

EPOCHS = 3
GOES_ON = "on_failure: kContinue reduce: kSum"


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, all values together."""
    assert a.keys() == b.keys()
    mine, theirs = (torch.cat([values[name].double().reshape(-1) for name in sorted(a)]) for values in (a, b))
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE], ids=["Sandblaster", "AllReduce"])
def test_a_gan_is_what_plain_pytorch_makes_of_it(runner: JobRunner, cluster: str) -> None:
    several = runner.run(cluster, "pair.py", "plain", "--calls", name="calls").final
    one = runner.run(cluster, "pair.py", "plain", name="one").final
    assert all(torch.equal(several[name], one[name]) for name in one)
    saved = runner.folder / "plain.safetensors"
    subprocess.run([sys.executable, str(PROGRAMS / "pair.py"), "plain", "--save", str(saved)], check=True, timeout=100)
    assert far(one, load_file(saved)) < 1e-5


@pytest.mark.parametrize("after", [False, True], ids=["between", "behind"])
@pytest.mark.parametrize("cluster", [SANDBLASTER, ALLREDUCE, DOWNPOUR, HOGWILD], ids=["S", "A", "D", "H"])
def test_every_step_with_every_batch_counts_once_whenever_a_worker_dies(
    runner: JobRunner, cluster: str, after: bool
) -> None:
    words = ("--die", "1", "--at", "7", "--lived", str(runner.folder / "lived"), *(("--after",) if after else ()))
    extra = f"{GOES_ON} snapshot_s: 0.1"
    ended = runner.run(cluster, "pair.py", "ledger", "--epochs", str(EPOCHS), *words, extra=extra)
    assert ended.report["incidents"][0]["who"].startswith("worker")
    for name, cells in ended.final.items():
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), (name, cells)
