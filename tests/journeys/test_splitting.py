"""One model over the workers of a group, through real processes: the result is that of the unsplit job.

In step it is the same up to rounding: sums over features and samples are taken in another order.
"""

import json
import resource
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch
from job_runner import Ended, JobRunner
from programs import cut
from safetensors import safe_open
from safetensors.torch import load_file
from soak_cases import soak_only, soaked

from topotrain.launch.agent import forkserver

pytestmark = pytest.mark.journey

WORKERS, EACH, WIDTH, MOST = 4, 8, 2688, 840 << 20  # layers of a worker, their width; bytes that a process may have
TWO = "nworkers_per_group: 2"
APART = TWO + " server_worker_separate: true"
LOOKS = "train_steps: 12 test_freq: 5 test_steps: -1 checkpoint_freq: 6"
HYBRID = 'partition { match: "^fc$" partition_dim: 1 }'
PIPELINE = """
partition { match: "conv|norm" partition_dim: -1 location: 0 }
partition { match: "fc|out" partition_dim: -1 location: 1 }
"""


def same(found: Ended, expected: Ended) -> None:
    assert found.final.keys() == expected.final.keys()
    for name, value in expected.final.items():
        assert found.final[name].shape == value.shape
        torch.testing.assert_close(found.final[name], value, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_convolutions_by_samples_and_the_rest_by_features(runner: JobRunner) -> None:
    plain = runner.run(APART, "cut.py", name="plain")
    found = runner.run(APART, "cut.py", extra=HYBRID)
    same(found, plain)
    assert found.report["metrics"] == plain.report["metrics"]
    model = cut.Net()
    model.load_state_dict(found.final)  # by plain PyTorch


def test_a_pipeline_computes_what_one_worker_does_and_a_look_leaves_no_trace(runner: JobRunner) -> None:
    """The norm sees the whole batch, which shares of it do not. All workers look, in eval mode and by tt.state_dict."""
    whole = runner.run("", "cut.py", name="whole")
    looked = runner.run(f"{APART} transport: kTcp", "cut.py", "--tagged", "--look", "state")
    same(looked, whole)
    last = load_file(runner.folder / "state")
    assert alike(last, looked.final)
    cut.Net().load_state_dict(last)  # by plain PyTorch


MICRO = ("--no-norm", "--loss", "--tagged")
WAYS = {
    "by the conf": ((), f"{PIPELINE} microbatches: 1", APART),
    "that only the forward names": (("--said",), "", TWO),
    "micro batches, and masks of the whole batch": (MICRO, f"microbatches: 3 schedule: k1F1B {PIPELINE}", TWO),
    "all of them before one goes back": (MICRO, f"microbatches: 3 schedule: kGPipe {PIPELINE}", TWO),
}


@soak_only
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_a_pipeline(runner: JobRunner, way: str) -> None:
    words, extra, cluster = WAYS[way]
    whole = runner.run("", "cut.py", *[word for word in words if word.startswith(("--no", "--loss"))], name="whole")
    same(runner.run(cluster, "cut.py", *words, extra=extra), whole)


@soak_only
def test_two_groups_that_do_not_wait_for_each_other(runner: JobRunner) -> None:
    cluster = f"nworker_groups: 2 {APART} nservers_per_group: 2"
    found = runner.run(cluster, "cut.py", extra=f"{HYBRID} correction: kNone")  # a short job needs all its momentum
    assert found.report["metrics"]["accuracy"] > 0.3
    assert all(torch.isfinite(value).all() for value in found.final.values())
    assert sum(process["samples"] for process in found.report["processes"]) == cut.SAMPLES * cut.EPOCHS


@pytest.mark.parametrize(
    ("args", "extra", "words"),
    soaked(
        [(["--look", "state", "--one-looks"], HYBRID, "is in tt.state_dict: all workers of a group must call it")],
        [
            (["--wrong"], HYBRID, "model = 'fc': is in parts on /worker:0 to /worker:1 of its group"),
            ([], 'partition { match: "^foo$" partition_dim: 1 }', "partition[0].match = '^foo$': matches no module"),
        ],
    ),
)
def test_what_cannot_be_is_refused(runner: JobRunner, args: list[str], extra: str, words: str) -> None:
    assert words in runner.run(TWO, "cut.py", *args, extra=extra, code=2).err


def stored(ended: Ended, step: int) -> dict[str, torch.Tensor]:
    return load_file(ended.workspace / f"step-{step}.safetensors")


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_tested_and_written_while_it_trains_and_begun_from_a_file(runner: JobRunner) -> None:
    """A pipeline of the whole batch has the bits of one process, and so have its checkpoints."""
    whole = runner.run("", "cut.py", "--trainer", extra=LOOKS, name="whole")
    found = runner.run(TWO, "cut.py", "--trainer", extra=f"{LOOKS} {PIPELINE}")
    for step in (0, 6, 12):
        assert alike(stored(found, step), stored(whole, step)), step
    assert alike(stored(found, 12), found.final)
    cut.Net().load_state_dict(stored(found, 6))  # by plain PyTorch
    curve = {test["step"]: test for test in found.report["tests"]}
    assert list(curve) == [0, 5, 10, 12]
    for expected in whole.report["tests"]:  # beside the training one may be left out
        assert curve[expected["step"]] == pytest.approx(expected, rel=1e-5)
    assert "test @ step 5" in found.out
    again = f'train_steps: 1 checkpoint_freq: 1 checkpoint_path: "{found.workspace}/step-6.safetensors" {HYBRID}'
    begun = runner.run(TWO, "cut.py", "--trainer", extra=again, name="again")
    assert alike(stored(begun, 0), stored(found, 6))  # onto another split


@soak_only
def test_a_model_larger_than_any_process_may_be(tmp_path: Path) -> None:
    """No process may have more than MOST bytes of its own, Python and torch included: none could make the whole model.

    Memory that workers and servers share is not counted in it; there a worker has its own part, too.
    """
    assert WORKERS * EACH * WIDTH**2 * 4 > MOST
    sizes = ["--workers", str(WORKERS), "--each", str(EACH), "--width", str(WIDTH)]
    with closing(forkserver.start(tmp_path / "forkserver.log")) as served:
        runner = JobRunner(tmp_path, served.path)
        resource.prlimit(served.process.pid, resource.RLIMIT_DATA, (MOST, MOST))  # what it forks has the same limit
        cluster = f"nworkers_per_group: {WORKERS} nservers_per_group: {WORKERS}"
        command = runner.command(cluster, "deep.py", *sizes, extra="snapshot_s: 0")  # whose copies count, too
        limited = ["prlimit", f"--data={MOST}", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "job.json").read_text())["metrics"]
    assert metrics["limit"] == MOST
    assert metrics["loss"] < 0.9 * metrics["before"]
    final = tmp_path / "job" / "final.safetensors"
    assert final.stat().st_size > MOST
    with safe_open(final, "pt") as file:
        assert len(file.keys()) == WORKERS * EACH == metrics["stored"]
        last = file.get_tensor(f"layers.{WORKERS * EACH - 1}.weight")
    assert metrics["sum"] == last.double().sum().item()  # of what tt.state_dict gave in the midst of it
