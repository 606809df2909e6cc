"""Jobs with an outer optimizer: exact counts, deaths, snapshots, and other settings after them."""

import json
import os
import signal
import subprocess

import pytest
import torch
from job_runner import PROGRAMS, Ended, JobRunner
from killed_jobs import killed, resumed, terminated
from safetensors.torch import load_file
from soak_cases import soak_only, soaked

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


@soak_only
def test_a_job_that_has_lost_a_server_ends_with_the_same_bits(runner: JobRunner) -> None:
    """The second copy of the server that dies has lost no sum and no count."""
    undisturbed = runner.run(PAIR, *NET, name="undisturbed").final
    command = runner.command(f"{PAIR} replicas: 2 transport: kTcp", *NET, name="died")
    pipe, to = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=pipe, stderr=to, text=True, cwd=runner.folder) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.strip() == "there":
                entries = json.loads((runner.folder / "died" / "processes.json").read_text())
                os.kill(next(entry["pid"] for entry in entries if "server 0/1" in entry["roles"]), signal.SIGKILL)
                break
        said += process.communicate(timeout=100)[0]
    assert process.returncode == 0, said
    assert same_bits(load_file(runner.folder / "died" / "final.safetensors"), undisturbed)
    (incident,) = json.loads((runner.folder / "died.json").read_text())["incidents"]
    assert incident["who"] == "server 0/1" and "second copy" in incident["action"]


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


STARTS_AGAIN = "group 1 starts again (incarnation 1)"
DECOUPLED = f"{APART} sync_freq: 5 quorum: 2 transport: kTcp {MEAN}"
TWO = DECOUPLED.replace("nworker_groups: 3", "nworker_groups: 2").replace("quorum: 2", "quorum: 1")
STREAMING = f"{APART} sync_freq: 6 fragments: 1 overlap: 3 transport: kTcp {MEAN}"


def died(runner: JobRunner, cluster: str, victim: str, *words: str, extra: str = "") -> Ended:
    """A job in which a process died once, with every sample counted once."""
    program = ("mortal.py", str(runner.folder / "job"), victim, "1", *words)
    ended = runner.run(cluster, *program, extra=f"reduce: kSum {extra}")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3
    (incident,) = ended.report["incidents"]
    action = "second copy" if victim.startswith("server") else STARTS_AGAIN
    assert incident["who"] == victim and action in incident["action"], incident
    return ended


@pytest.mark.parametrize(
    ("victim", "words", "cluster", "shard"),
    soaked(
        [("worker 1/0", ["9"], ROUNDS, "kLease")],
        [
            ("worker 1/0", ["18", "freeze"], f"{APART} sync_freq: 20 {MEAN}", "kAuto"),
            ("server 0/1", ["4"], f"{ROUNDS} replicas: 2 transport: kTcp", "kAuto"),
            *(
                ("worker 1/0", words, ROUNDS, shard)
                for words in (["4"], ["4", "freeze"])
                for shard in ("kAuto", "kLease")
            ),
        ],
    ),
)
def test_a_death_in_the_middle_of_a_round_costs_no_sample(
    runner: JobRunner, victim: str, words: list[str], cluster: str, shard: str
) -> None:
    """Of its last steps the worker has told none. The others wait for the round, and train on.

    An epoch has 8 steps of each worker, so that some of these steps are of epochs that are over.
    """
    died(runner, cluster, victim, *words, extra=f"shard: {shard}")


@pytest.mark.parametrize("wishes", soaked([[]], [["freeze"]]))
def test_a_death_where_no_worker_waits_costs_no_sample(runner: JobRunner, wishes: list[str]) -> None:
    # The main worker holds its batches until the other one is back, or it could read all before the other has begun.
    found = died(runner, TWO, "worker 1/0", "3", "back", *wishes).report["rounds"]
    assert 1 <= found["lost_steps"] <= 3, "it had told of no step"
    assert found["count"] == sum(found["members"].values())
    assert [each["who"] for each in found["workers"]] == ["worker 0/0", "worker 1/0"]
    assert all(each["steps"] and each["bytes_out"] for each in found["workers"])


@pytest.mark.parametrize("compression", soaked(["kFp16"], ["kNone"]))
def test_a_coordinator_that_dies_leaves_no_round_open(runner: JobRunner, compression: str) -> None:
    """Its second copy has the windows that were open, but not the timer that would have ended them."""
    ended = died(runner, f"{DECOUPLED} replicas: 2 compression: {compression}", "server 0/0", "3")
    assert ended.report["rounds"]["count"] > 0


@soak_only
@pytest.mark.parametrize(
    ("cluster", "extra"), [(ROUNDS, "shard: kLease"), (ROUNDS, "shard: kAuto"), (DECOUPLED, ""), (STREAMING, "")]
)
def test_every_sample_counts_once(runner: JobRunner, cluster: str, extra: str) -> None:
    """Of 60 batches each group has made 20 steps, so its last round has fewer."""
    runner.run(cluster, "ledger.py", extra=f"reduce: kSum {extra}").check_ledger(2)


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


@pytest.mark.parametrize(
    ("program", "words"),
    soaked(
        [("assigning.py after", "tt.assign: cannot be used with cluster.outer")],
        [("../../examples/embedding.py", "cluster.outer: must not be given where the model has tables")],
    ),
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


@soak_only
def test_without_another_worker_the_state_is_fresh(runner: JobRunner) -> None:
    ended = runner.run(f"nworker_groups: 1 {ADAM}", "second_state.py", str(runner.folder), "0")
    found = ended.report["rounds"]
    assert (found["states_taken"], found["states_missed"]) == (0, 1)
    assert (runner.folder / "steps").read_text() == "1"
    assert "no other worker group could give its own" in ended.err
