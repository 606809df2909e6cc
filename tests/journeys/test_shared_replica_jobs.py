"""Jobs with an outer optimizer whose groups have several workers: exact counts, a killed worker, snapshots."""

from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, JobRunner
from killed_jobs import killed, resumed, terminated
from soak_cases import soak_only, soaked

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
NESTEROV = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
TWO_BY_TWO = "nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
ROUNDS = f"{TWO_BY_TWO} sync_freq: 5 {MEAN}"


@soak_only
@pytest.mark.parametrize(
    ("cluster", "shard"),
    [
        ("quorum: 1 transport: kTcp", "kLease"),
        ("overlap: 2", "kAuto"),
        ("", "kAuto"),
        ("transport: kTcp", "kLease"),
    ],
)
def test_every_sample_counts_once(runner: JobRunner, cluster: str, shard: str) -> None:
    ended = runner.run(f"{ROUNDS} {cluster}", "ledger.py", extra=f"reduce: kSum shard: {shard}")
    ended.check_ledger(2)
    assert ended.report["samples"] == 240 * 2


@soak_only
def test_a_model_that_is_split_over_the_group_is_refused(runner: JobRunner) -> None:
    ended = runner.run(ROUNDS, "cut.py", "--tagged", code=2)
    words = "tt.device: splits the model as placement: kAuto does, which must be kManual with cluster.outer"
    assert words in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("cluster", soaked(["quorum: 1 transport: kTcp"], [""]))
def test_a_killed_worker_costs_no_sample_and_stops_no_other_group(runner: JobRunner, cluster: str) -> None:
    """Behind its 4th step the group has told of none. It starts again as a whole."""
    # With a quorum the main worker holds its batches, or it could read all before the others are back.
    wishes = ["back"] if cluster else []
    words = (str(runner.folder / "job"), "worker 1/1", "3", "4", *wishes)
    ended = runner.run(f"{ROUNDS} {cluster}", "mortal.py", *words, extra="reduce: kSum")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/1" and "group 1 starts again (incarnation 1)" in incident["action"], incident
    starts = {rank: Path(runner.folder, "job", f"starts-{rank}").read_text() for rank in range(4)}
    assert starts == {0: "x", 1: "x", 2: "xx", 3: "xx"}, "the other group went on"


@soak_only
def test_a_server_that_dies_costs_nothing_where_there_are_two_copies(runner: JobRunner) -> None:
    words = (str(runner.folder / "job"), "server 0/1", "3", "4")
    ended = runner.run(f"{ROUNDS} replicas: 2 transport: kTcp", "mortal.py", *words, extra="reduce: kSum")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "server 0/1" and "second copy" in incident["action"], incident


@soak_only
def test_groups_of_two_leave_and_come(runner: JobRunner) -> None:
    apart = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
    cluster = f"nworker_groups: 3 {apart} sync_freq: 5 quorum: 1 transport: kTcp {MEAN}"
    extra = "on_failure: kContinue reduce: kSum start_groups: 2"
    ended = runner.run(cluster, "coming.py", str(runner.folder / "job"), "2", extra=extra)
    ended.check_ledger(2)
    changes = [(change["group"], change["what"]) for change in ended.report["groups"]]
    joins = [(1, "joins (incarnation 1)"), (2, "joins (incarnation 1)")]
    assert changes == [(2, "is not there yet"), (1, "has left"), *joins]
    assert ended.report["samples"] == 960 * 2 and ended.report["incidents"] == []


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


@soak_only
@pytest.mark.parametrize("before", [ALLREDUCE, ALONE])
def test_a_snapshot_moves_to_groups_of_two(runner: JobRunner, before: str) -> None:
    workspace = killed(runner, before, "ledger", "snapshot_s: 0.1 reduce: kSum", 14)
    assert latest(workspace) is not None
    conf = runner.folder / "other.conf"
    conf.write_text(f'name: "job"\nreduce: kSum\ncluster {{ {ROUNDS} workspace: "{workspace}" }}\n')
    program = str(Path(__file__).parents[1] / "programs" / "resuming.py")
    cells = resumed(runner, workspace, str(conf), program, "ledger").final["cells"]
    assert torch.equal(cells, torch.full_like(cells, 3)), cells


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
