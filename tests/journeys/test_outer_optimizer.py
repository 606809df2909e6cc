"""Jobs with an outer optimizer: exact counts, deaths, snapshots, and other settings after them."""

import pytest
import torch
from job_runner import PROGRAMS, JobRunner
from killed_jobs import killed, resumed, terminated

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

MEAN = "outer { type: kSGD learning_rate { type: kFixed base_lr: 1 } }"
NESTEROV = "outer { type: kNesterov momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
DELAYED = (
    "outer { type: kDelayedNesterov delay: 3 momentum: 0.9 "
    "learning_rate { type: kLinear base_lr: 0.7 linear_conf { change_freq: 20 final_lr: 0.1 } } }"
)
APART = "nworker_groups: 3 nservers_per_group: 2 server_worker_separate: true"
ROUNDS = f"{APART} sync_freq: 7 {MEAN}"
PAIR = f"nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true sync_freq: 5 merge: kRadial {DELAYED}"
NET = ("resuming.py", "net", "--epochs", "5")


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_job_that_was_asked_to_end_ends_with_the_same_bits(runner: JobRunner) -> None:
    """Its snapshot is one of a round between two counts of the momentum, and has the state of both workers' Adam.

    The rate is that of the round.
    """
    undisturbed = runner.run(PAIR, *NET, name="undisturbed").final
    code, said, workspace = terminated(runner, PAIR, *NET, extra="snapshot_s: 0 checkpoint_freq: 4")
    found = latest(workspace)
    assert code == 143 and found is not None and 5 <= found.steps(0) < 12, said
    assert same_bits(resumed(runner, workspace).final, undisturbed)


def test_the_way_of_merging_fragments_may_change_with_a_snapshot(runner: JobRunner) -> None:
    fragments = "sync_freq: 8 fragments: 4 overlap: 1 compression: kE3M0 transport: kTcp"
    radial = PAIR.replace(DELAYED, NESTEROV).replace("sync_freq: 5", fragments)
    workspace = killed(runner, radial, "net", "snapshot_s: 0.1")
    found = latest(workspace)
    assert found is not None and found.version > 0
    conf = runner.folder / "other.conf"
    mean = radial.replace("merge: kRadial", "merge: kMean").replace("nservers_per_group: 2", "nservers_per_group: 1")
    conf.write_text(f'name: "job"\ncluster {{ {mean} workspace: "{workspace}" }}\n')
    final = resumed(runner, workspace, str(conf), str(PROGRAMS / "resuming.py"), "net").final
    assert all(torch.isfinite(value).all() for value in final.values())


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


def test_what_a_script_cannot_have_is_named(runner: JobRunner) -> None:
    ended = runner.run(ROUNDS, "assigning.py", "before", code=2)
    assert "tt.assign: cannot be used with cluster.outer" in ended.out + ended.err


ADAM = f"nservers_per_group: 2 server_worker_separate: true sync_freq: 4 transport: kTcp {NESTEROV}"


def test_a_worker_that_comes_back_has_the_state_of_a_living_one(runner: JobRunner) -> None:
    """Its Adam has made one step more than that of the other worker, which waits in the script meanwhile."""
    cluster = f"nworker_groups: 2 nworkers_per_group: 2 quorum: 1 {ADAM}"
    ended = runner.run(cluster, "second_state.py", str(runner.folder), "2", extra="shard: kLease")
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/0", incident
    found = ended.report["rounds"]
    assert (found["states_taken"], found["states_missed"]) == (2, 0), ended.err
    assert int((runner.folder / "steps").read_text()) == 5 + 1
