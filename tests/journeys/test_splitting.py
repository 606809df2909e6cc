"""One model over the workers of a group, through real processes: the result is that of the unsplit job.

In step it is the same up to rounding: sums over features and samples are taken in another order.
"""

import pytest
import torch
from job_runner import Ended, JobRunner
from programs import cut
from safetensors.torch import load_file

pytestmark = pytest.mark.journey

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


def test_what_cannot_be_is_refused(runner: JobRunner) -> None:
    assert (
        "is in tt.state_dict: all workers of a group must call it"
        in runner.run(TWO, "cut.py", "--look", "state", "--one-looks", extra=HYBRID, code=2).err
    )


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
