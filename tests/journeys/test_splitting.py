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
from programs import cut
from safetensors import safe_open
from shop import Ended, Shop

from topotrain.launch import forkserver

pytestmark = pytest.mark.journey

WORKERS, EACH, WIDTH, MOST = 3, 7, 2688, 560 << 20  # layers of a worker, their width; bytes that a process may have
TWO = "nworkers_per_group: 2"
APART = TWO + " server_worker_separate: true"
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


def test_convolutions_by_samples_and_the_rest_by_features(shop: Shop) -> None:
    plain = shop.run(APART, "cut.py", name="plain")
    found = shop.run(APART, "cut.py", extra=HYBRID)
    same(found, plain)
    assert found.report["metrics"] == plain.report["metrics"]
    model = cut.Net()
    model.load_state_dict(found.final)  # by plain PyTorch


@pytest.mark.parametrize("cluster", [f"{APART} road: kShm", f"{APART} road: kTcp", f"{TWO} nservers_per_group: 2"])
def test_a_pipeline_computes_what_one_worker_does(shop: Shop, cluster: str) -> None:
    """The norm sees the whole batch, which shares of it do not."""
    whole = shop.run("", "cut.py", name="whole")
    same(shop.run(cluster, "cut.py", "--tagged"), whole)
    same(shop.run(cluster, "cut.py", extra=f"{PIPELINE} microbatches: 1", name="conf"), whole)


def test_a_pipeline_that_only_the_forward_speaks_of(shop: Shop) -> None:
    same(shop.run(TWO, "cut.py", "--said", name="said"), shop.run("", "cut.py", name="whole"))


@pytest.mark.parametrize("schedule", ["kGPipe", "k1F1B"])
def test_micro_batches_and_masks_of_the_whole_batch(shop: Shop, schedule: str) -> None:
    """Dropout draws the masks that one process draws."""
    whole = shop.run("", "cut.py", "--no-norm", "--loss", name="whole")
    extra = f"microbatches: 3 schedule: {schedule}"
    same(shop.run(TWO, "cut.py", "--no-norm", "--loss", "--tagged", extra=f"{extra} {PIPELINE}"), whole)


def test_two_groups_that_do_not_wait_for_each_other(shop: Shop) -> None:
    cluster = f"nworker_groups: 2 {APART} nservers_per_group: 2"
    found = shop.run(cluster, "cut.py", extra=HYBRID)
    assert found.report["metrics"]["accuracy"] > 0.3
    assert all(torch.isfinite(value).all() for value in found.final.values())
    assert sum(process["samples"] for process in found.report["processes"]) == cut.SAMPLES * cut.EPOCHS


def test_made_on_the_meta_device(shop: Shop) -> None:
    """The values come from the modules' names, so they do not depend on the split."""
    extra = 'partition { match: "fc|out|conv|norm" location: 0 partition_dim: -1 }'
    same(
        shop.run(TWO, "cut.py", "--meta", extra=PIPELINE), shop.run(TWO, "cut.py", "--meta", extra=extra, name="other")
    )


@pytest.mark.parametrize(
    ("args", "extra", "words"),
    [
        (["--wrong"], HYBRID, "model = 'fc': is in parts on /worker:0 to /worker:1 of its group"),
        ([], 'partition { match: "^foo$" partition_dim: 1 }', "partition[0].match = '^foo$': matches no module"),
        ([], f"{HYBRID} checkpoint_freq: 5", "checkpoint_freq = 5"),
    ],
)
def test_what_cannot_be_is_said(shop: Shop, args: list[str], extra: str, words: str) -> None:
    assert words in shop.run(TWO, "cut.py", *args, extra=extra, code=2).err


def test_a_model_larger_than_any_process_may_be(tmp_path: Path) -> None:
    """No process may have more than MOST bytes of its own, Python and torch included: none could make the whole model.

    Memory that workers and servers share is not counted in it; there a worker has its own part, too.
    """
    assert WORKERS * EACH * WIDTH**2 * 4 > MOST
    sizes = ["--workers", str(WORKERS), "--each", str(EACH), "--width", str(WIDTH)]
    with closing(forkserver.start(tmp_path / "forkserver.log")) as served:
        shop = Shop(tmp_path, served.path)
        resource.prlimit(served.process.pid, resource.RLIMIT_DATA, (MOST, MOST))  # what it forks has the same limit
        command = shop.command(f"nworkers_per_group: {WORKERS} nservers_per_group: {WORKERS}", "deep.py", *sizes)
        limited = ["prlimit", f"--data={MOST}", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "job.json").read_text())["metrics"]
    assert metrics["limit"] == MOST
    assert metrics["loss"] < 0.9 * metrics["before"]
    final = tmp_path / "job" / "final.safetensors"
    assert final.stat().st_size > MOST
    with safe_open(final, "pt") as file:
        assert len(file.keys()) == WORKERS * EACH
