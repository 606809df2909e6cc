"""Jobs with several models and optimizers through real processes: as plain PyTorch, and whatever happens to them."""

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, PROGRAMS, SANDBLASTER, JobRunner
from killed_jobs import killed, resumed
from soak_cases import soak_only, soaked

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

EPOCHS = 3
GOES_ON = "on_failure: kContinue reduce: kSum"


@pytest.mark.parametrize(
    ("cluster", "after"),
    soaked(
        [(SANDBLASTER, True)],
        [
            (HOGWILD, False),
            (ALLREDUCE, False),
            (DOWNPOUR, True),
            (SANDBLASTER, False),
            (ALLREDUCE, True),
            (DOWNPOUR, False),
            (HOGWILD, True),
        ],
    ),
)
def test_every_step_with_every_batch_counts_once_whenever_a_worker_dies(
    runner: JobRunner, cluster: str, after: bool
) -> None:
    words = ("--die", "1", "--at", "7", "--lived", str(runner.folder / "lived"), *(("--after",) if after else ()))
    extra = f"{GOES_ON} snapshot_s: 0.1"
    ended = runner.run(cluster, "pair.py", "ledger", "--epochs", str(EPOCHS), *words, extra=extra)
    assert ended.report["incidents"][0]["who"].startswith("worker")
    for name, cells in ended.final.items():
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), (name, cells)


SYNC = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
INLINE = "nworkers_per_group: 2 nservers_per_group: 2"


@pytest.mark.parametrize("cluster", soaked([INLINE], [SYNC]))
def test_a_gan_goes_on_with_the_same_bits(runner: JobRunner, cluster: str) -> None:
    """The main worker is killed between two steps with a batch, and the snapshot is of another moment."""
    undisturbed = runner.run(cluster, "pair.py", "gan", name="undisturbed").final
    workspace = killed(runner, cluster, "gan", program="pair.py")
    found = latest(workspace)
    assert found is not None and 0 < found.version <= 60 and found.version % 2 == 0
    ended = resumed(runner, workspace)
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, ended.final[name])]
    assert not different, (found.version, different)


@soak_only
@pytest.mark.parametrize(
    "after",
    [
        "nworker_groups: 2 nservers_per_group: 3 server_worker_separate: true",
        "nworkers_per_group: 3 nservers_per_group: 1 server_worker_separate: true",
    ],
)
def test_every_step_counts_once_on_another_layout(runner: JobRunner, after: str) -> None:
    workspace = killed(runner, SYNC, "ledger", "snapshot_s: 0.1 reduce: kSum", program="pair.py")
    conf = runner.folder / "other.conf"
    conf.write_text(f'name: "job"\nreduce: kSum\ncluster {{ {after} workspace: "{workspace}" }}\n')
    for name, cells in resumed(runner, workspace, str(conf), str(PROGRAMS / "pair.py"), "ledger").final.items():
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), (name, cells)
