"""Jobs with an outer optimizer whose groups have several workers: exact counts, a killed worker, snapshots."""

from pathlib import Path

import pytest
import torch
from job_runner import JobRunner
from killed_jobs import killed, resumed, terminated
from seeds import soak_only

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
NESTEROV = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
TWO_BY_TWO = "nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
ROUNDS = f"{TWO_BY_TWO} sync_freq: 5 {MEAN}"


def test_a_job_that_is_asked_to_end_goes_on_with_the_same_bits(runner: JobRunner) -> None:
    cluster, program = f"{TWO_BY_TWO} sync_freq: 5 {NESTEROV}", ("resuming.py", "net", "--epochs", "5")
    undisturbed = runner.run(cluster, *program, name="undisturbed").final
    code, said, workspace = terminated(runner, cluster, *program, extra="snapshot_s: 0 checkpoint_freq: 4")
    found = latest(workspace)
    assert code == 143 and found is not None, said
    final = resumed(runner, workspace).final
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, final[name])]
    assert not different


ALONE = f"nworker_groups: 3 nservers_per_group: 2 server_worker_separate: true sync_freq: 7 {MEAN}"


def written(folder: Path, rank: int) -> list[str]:
    """What a worker has had behind each step since its last start."""
    return (folder / f"alike-{rank}").read_text().rpartition("start\n")[2].split()


def test_the_workers_of_a_group_have_the_same_values_and_states_also_after_a_death(runner: JobRunner) -> None:
    """Worker 1/1 is killed in its second epoch."""
    runner.run(f"{TWO_BY_TWO} sync_freq: 5 {NESTEROV}", "alike.py", str(runner.folder), "4", "3", "17")
    for first, second in ((0, 1), (2, 3)):
        lines = written(runner.folder, first)
        assert len(lines) > 10 and lines == written(runner.folder, second)
    assert (runner.folder / "alike-2").read_text().count("start") == 2


def test_new_workers_of_a_group_take_the_optimizer_of_its_first_worker(runner: JobRunner) -> None:
    """A snapshot of three workers alone has a state of worker 1/0, and none of worker 1/1."""
    workspace = killed(runner, f"{ALONE.replace(MEAN, NESTEROV)}", "net", "snapshot_s: 0.1", 14)
    conf, folder = runner.folder / "other.conf", runner.folder
    cluster = f"{TWO_BY_TWO} sync_freq: 5 {NESTEROV}"
    conf.write_text(f'name: "job"\ncluster {{ {cluster} workspace: "{workspace}" }}\n')
    resumed(runner, workspace, str(conf), str(Path(__file__).parents[1] / "programs" / "alike.py"), str(folder), "3")
    for first, second in ((0, 1), (2, 3)):
        lines = written(folder, first)
        assert lines and lines == written(folder, second)


@soak_only
def test_a_model_that_is_split_over_the_group_is_refused(runner: JobRunner) -> None:
    ended = runner.run(ROUNDS, "cut.py", "--tagged", code=2)
    words = "tt.device: splits the model as placement: kAuto does, which must be kManual with cluster.outer"
    assert words in ended.err
    assert "Traceback" not in ended.err
