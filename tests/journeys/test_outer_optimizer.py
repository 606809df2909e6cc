"""Jobs with an outer optimizer: exact counts, deaths, snapshots, and other layouts before and after."""

from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, JobRunner
from killed_jobs import killed, resumed, terminated
from soak_cases import soaked

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
NESTEROV = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
APART = "nworker_groups: 3 nservers_per_group: 2 server_worker_separate: true"
ROUNDS = f"{APART} sync_freq: 7 {MEAN}"


@pytest.mark.parametrize("shard", soaked(["kLease"], ["kAuto"]))
def test_every_sample_counts_once(runner: JobRunner, shard: str) -> None:
    """Of 60 batches each group has made 20 steps, so its last round has fewer."""
    runner.run(ROUNDS, "ledger.py", extra=f"reduce: kSum shard: {shard}").check_ledger(2)


PAIR = f"nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true sync_freq: 5 {NESTEROV}"
SCHEDULED = PAIR.replace("type: kFixed", "type: kLinear linear_conf { change_freq: 20 final_lr: 0.1 }")


def test_a_job_that_is_asked_to_end_goes_on_with_the_same_bits(runner: JobRunner) -> None:
    """Its snapshot is one of a round, and has the state of both workers' Adam. The rate is that of the round."""
    program = ("resuming.py", "net", "--epochs", "5")
    undisturbed = runner.run(SCHEDULED, *program, name="undisturbed").final
    code, said, workspace = terminated(runner, SCHEDULED, *program, extra="snapshot_s: 0 checkpoint_freq: 4")
    found = latest(workspace)
    assert code == 143 and found is not None and 5 <= found.steps(0) < 12, said
    final = resumed(runner, workspace).final
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, final[name])]
    assert not different


@pytest.mark.parametrize(("before", "after"), soaked([(ALLREDUCE, ROUNDS)], [(ROUNDS, ALLREDUCE)]))
def test_a_snapshot_moves_between_an_outer_optimizer_and_allreduce(runner: JobRunner, before: str, after: str) -> None:
    """Every sample counts once, also those of which no round had told."""
    workspace = killed(runner, before, "ledger", "snapshot_s: 0.1 reduce: kSum", 14)
    assert latest(workspace) is not None
    conf = runner.folder / "other.conf"
    conf.write_text(f'name: "job"\nreduce: kSum\ncluster {{ {after} workspace: "{workspace}" }}\n')
    program = str(Path(__file__).parents[1] / "programs" / "resuming.py")
    cells = resumed(runner, workspace, str(conf), program, "ledger").final["cells"]
    assert torch.equal(cells, torch.full_like(cells, 3)), cells


STARTS_AGAIN = "group 1 starts again (incarnation 1)"


@pytest.mark.parametrize(
    ("victim", "step", "wishes", "cluster", "shard", "action"),
    soaked(
        [
            ("worker 1/0", "9", [], "", "kLease", STARTS_AGAIN),
            ("worker 1/0", "18", ["freeze"], "sync_freq: 20", "kAuto", STARTS_AGAIN),
            ("server 0/1", "4", [], "replicas: 2 transport: kTcp", "kAuto", "second copy"),
        ],
        [
            ("worker 1/0", "4", [], "", "kAuto", STARTS_AGAIN),
            ("worker 1/0", "4", [], "", "kLease", STARTS_AGAIN),
            ("worker 1/0", "4", ["freeze"], "", "kAuto", STARTS_AGAIN),
            ("worker 1/0", "9", [], "", "kAuto", STARTS_AGAIN),
        ],
    ),
)
def test_a_death_in_the_middle_of_a_round_costs_no_sample(
    runner: JobRunner, victim: str, step: str, wishes: list[str], cluster: str, shard: str, action: str
) -> None:
    """Of its last steps the worker has told none. The others wait for the round, and train on.

    An epoch has 8 steps of each worker, so that some of these steps are of epochs that are over.
    """
    words = (str(runner.folder / "job"), victim, "1", step, *wishes)
    rounds = ROUNDS if "sync_freq" not in cluster else ROUNDS.replace("sync_freq: 7", "")
    ended = runner.run(f"{rounds} {cluster}", "mortal.py", *words, extra=f"reduce: kSum shard: {shard}")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    assert incident["who"] == victim and action in incident["action"], incident


def test_a_loss_that_is_not_finite_ends_the_job_with_one_line_about_the_local_step(runner: JobRunner) -> None:
    """Its fifth step is the first one behind a round, of which the servers have told at once."""
    cluster = ROUNDS.replace("sync_freq: 7", "sync_freq: 4")
    ended = runner.run(cluster, "ledger.py", "--sick", "1", "--step-s", "0.3", code=1)
    words = (
        "the gradient of cells is not finite in 3 local steps of worker 1/0 in a row, the last of them step 7; nothing"
    )
    assert words in ended.err and "pushed" not in ended.err
    assert "Traceback" not in ended.err and "/topotrain/" not in ended.err
    assert ended.report["rounds"]["count"] == 1


DECOUPLED = f"{APART} sync_freq: 5 quorum: 2 transport: kTcp {MEAN}"


def test_every_sample_counts_once_where_no_worker_waits(runner: JobRunner) -> None:
    ended = runner.run(DECOUPLED, "ledger.py", "--slow", "1", "--step-s", "0.01", extra="reduce: kSum")
    ended.check_ledger(2)
    assert ended.report["samples"] == 240 * 2
    found = ended.report["rounds"]
    assert found["count"] == sum(found["members"].values()) and 2 <= max(map(int, found["members"])) <= 3
    assert [each["who"] for each in found["workers"]] == [f"worker {group}/0" for group in range(3)]
    assert found["lost_steps"] == 0 and all(each["steps"] and each["bytes_out"] for each in found["workers"])


@pytest.mark.parametrize("wishes", soaked([[]], [["freeze"]]))
def test_a_death_where_no_worker_waits_costs_no_sample(runner: JobRunner, wishes: list[str]) -> None:
    # The main worker holds its batches until the other one is back, or it could read all before the other has begun.
    words = (str(runner.folder / "job"), "worker 1/0", "1", "3", "back", *wishes)
    cluster = DECOUPLED.replace("nworker_groups: 3", "nworker_groups: 2").replace("quorum: 2", "quorum: 1")
    ended = runner.run(cluster, "mortal.py", *words, extra="reduce: kSum")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/0" and STARTS_AGAIN in incident["action"]
    assert 1 <= ended.report["rounds"]["lost_steps"] <= 3, "it had told of no step"


@pytest.mark.parametrize("compression", soaked(["kFp16"], ["kNone"]))
def test_a_coordinator_that_dies_leaves_no_round_open(runner: JobRunner, compression: str) -> None:
    """Its second copy has the windows that were open, but not the timer that would have ended them."""
    words = (str(runner.folder / "job"), "server 0/0", "1", "3")
    cluster = f"{DECOUPLED} replicas: 2 compression: {compression}"
    ended = runner.run(cluster, "mortal.py", *words, extra="reduce: kSum")
    ended.check_ledger(3)
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "server 0/0" and "second copy" in incident["action"]
    assert ended.report["rounds"]["count"] > 0


STREAMING = f"{APART} sync_freq: 6 fragments: 1 overlap: 3 transport: kTcp {MEAN}"


def test_steps_during_an_exchange_count_once(runner: JobRunner) -> None:
    runner.run(STREAMING, "ledger.py", extra="reduce: kSum").check_ledger(2)


def test_a_job_in_fragments_goes_on_from_its_snapshot(runner: JobRunner) -> None:
    cluster = PAIR.replace("sync_freq: 5", "sync_freq: 8 fragments: 4 overlap: 1 compression: kE3M0 transport: kTcp")
    workspace = killed(runner, cluster, "net", "snapshot_s: 0.1")
    found = latest(workspace)
    assert found is not None and found.version > 0
    final = resumed(runner, workspace).final
    assert all(torch.isfinite(value).all() for value in final.values())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("../../examples/embedding.py", "cluster.outer: must not be given where the model has tables"),
        ("assigning.py after", "tt.assign: cannot be used with cluster.outer"),
    ],
    ids=["tables", "tt.assign"],
)
def test_what_a_script_cannot_have_is_named(runner: JobRunner, program: str, words: str) -> None:
    ended = runner.run(ROUNDS, *program.split(), code=2)
    assert words in ended.out + ended.err


ADAM = f"nservers_per_group: 2 server_worker_separate: true sync_freq: 4 transport: kTcp {NESTEROV}"


@pytest.mark.parametrize(("quorum", "workers"), soaked([(1, 2)], [(0, 1), (1, 1)]))
def test_a_worker_that_comes_back_has_the_state_of_a_living_one(runner: JobRunner, quorum: int, workers: int) -> None:
    """Its Adam has made one step more than that of the other worker, which waits in the script meanwhile."""
    cluster = f"nworker_groups: 2 nworkers_per_group: {workers} quorum: {quorum} {ADAM}"
    ended = runner.run(cluster, "second_state.py", str(runner.folder), str(workers), extra="shard: kLease")
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/0", incident
    found = ended.report["rounds"]
    assert (found["states_taken"], found["states_missed"]) == (workers, 0), ended.err
    assert int((runner.folder / "steps").read_text()) == 5 + 1


def test_without_another_worker_the_state_is_fresh(runner: JobRunner) -> None:
    ended = runner.run(f"nworker_groups: 1 {ADAM}", "second_state.py", str(runner.folder), "0")
    found = ended.report["rounds"]
    assert (found["states_taken"], found["states_missed"]) == (0, 1)
    assert (runner.folder / "steps").read_text() == "1"
    assert "no other worker group could give its own" in ended.err
