"""Jobs that merge by radial averages and have delayed momentum: deaths, snapshots, and other settings after them."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import JobRunner
from killed_jobs import killed, resumed, terminated
from safetensors.torch import load_file

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

DELAYED = "outer { type: kDelayedNesterov delay: 3 momentum: 0.9 learning_rate { type: kFixed base_lr: 0.7 } }"
PAIR = "nworker_groups: 2 nservers_per_group: 2 server_worker_separate: true sync_freq: 5 merge: kRadial"
PROGRAM = ("resuming.py", "net", "--epochs", "5")


def test_a_job_goes_on_with_the_same_bits_between_two_counts_of_the_momentum(runner: JobRunner) -> None:
    """The state of the outer optimizer has the sum of one or two differences, and their number."""
    undisturbed = runner.run(f"{PAIR} {DELAYED}", *PROGRAM, name="undisturbed").final
    code, said, workspace = terminated(runner, f"{PAIR} {DELAYED}", *PROGRAM, extra="snapshot_s: 0 checkpoint_freq: 1")
    found = latest(workspace)
    assert code == 143 and found is not None and found.steps(0) > 3, said
    final = resumed(runner, workspace).final
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, final[name])]
    assert not different


def test_the_way_of_merging_may_change_with_a_snapshot(runner: JobRunner) -> None:
    workspace = killed(runner, f"{PAIR} {DELAYED}", "net", "snapshot_s: 0.1")
    found = latest(workspace)
    assert found is not None and found.version > 0
    conf = runner.folder / "other.conf"
    mean = PAIR.replace("merge: kRadial", "merge: kMean").replace("nservers_per_group: 2", "nservers_per_group: 1")
    conf.write_text(f'name: "job"\ncluster {{ {mean} {DELAYED} workspace: "{workspace}" }}\n')
    program = str(Path(__file__).parents[1] / "programs" / "resuming.py")
    final = resumed(runner, workspace, str(conf), program, "net").final
    assert all(torch.isfinite(value).all() for value in final.values())


def test_a_server_with_a_second_copy_may_die(runner: JobRunner) -> None:
    """The job ends with the bits of one in which no process dies: no sum and no count is lost."""
    cluster = f"{PAIR} {DELAYED} replicas: 2 transport: kTcp"
    undisturbed = runner.run(cluster, *PROGRAM, name="undisturbed").final
    command = runner.command(cluster, *PROGRAM)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=runner.folder,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.strip() == "there":
            entries = json.loads((runner.folder / "job" / "processes.json").read_text())
            os.kill(next(entry["pid"] for entry in entries if "server 0/1" in entry["roles"]), signal.SIGKILL)
            break
    said += process.communicate(timeout=100)[0]
    assert process.returncode == 0, said
    died = load_file(runner.folder / "job" / "final.safetensors")
    assert all(torch.equal(tensor, died[name]) for name, tensor in undisturbed.items())
    (incident,) = json.loads((runner.folder / "job.json").read_text())["incidents"]
    assert incident["who"] == "server 0/1" and "second copy" in incident["action"]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("merge: kRadial", "cluster.merge = kRadial: must be kMean without cluster.outer"),
        ("merge: kMedian", "cluster.merge = 'kMedian': must be one of kMean, kRadial"),
    ],
)
def test_what_is_no_way_of_merging(runner: JobRunner, block: str, said: str) -> None:
    ended = runner.run(block, "ledger.py", code=2)
    assert said in ended.out + ended.err
