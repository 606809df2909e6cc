"""Real jobs over models of other dtypes, and with other numbers of threads."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, SANDBLASTER, JobRunner
from process_pool import client
from safetensors import safe_open
from soak_cases import soak_only, soaked

pytestmark = pytest.mark.journey

EPOCHS = 3
APART = {"float64": 1e-12, "bfloat16": 0.03, "float16": 0.005, "complex64": 1e-5, "complex128": 1e-12}


def plain(name: str) -> torch.Tensor:
    """The weights that torch's plain loop finds, in one ordinary process."""
    dtype = getattr(torch, name)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    chance = torch.Generator().manual_seed(3)
    x = torch.randn(240, 13, generator=chance, dtype=exact)
    y = x @ torch.randn(13, 11, generator=chance, dtype=exact)
    w = torch.zeros(13, 11, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.05, momentum=0.9, foreach=False, fused=False)
    for _ in range(EPOCHS):
        for inputs, targets in zip(x.to(dtype).split(20), y.to(dtype).split(20), strict=True):
            optimizer.zero_grad()
            ((inputs @ w - targets).abs().pow(2).mean() * 4).backward()
            optimizer.step()
    return w.detach().to(exact)


def weights(path: Path) -> torch.Tensor:
    """As they stand in the job's file: complex128 as pairs, which its metadata names."""
    with safe_open(str(path), "pt") as file:
        w, said = file.get_tensor("w"), file.metadata()
    return torch.view_as_complex(w) if '"w"' in said.get("complex", "") else w


@pytest.mark.parametrize(
    ("dtype", "cluster", "extra"),
    soaked(
        [("complex64", SANDBLASTER + " compression: kInt8 share_memory: false", "grads: kHidden")],
        [
            ("float16", ALLREDUCE, ""),
            ("bfloat16", SANDBLASTER, ""),
            ("float64", SANDBLASTER + " compression: kNone share_memory: false", "grads: kHidden"),
            ("complex64", ALLREDUCE + " engine: kGloo", ""),
            ("complex128", SANDBLASTER, ""),
        ],
    ),
)
def test_it_trains_what_the_plain_loop_trains(runner: JobRunner, dtype: str, cluster: str, extra: str) -> None:
    ended = runner.run(cluster, "dtypes.py", "--dtype", dtype, extra=extra)
    wanted = plain(dtype)
    found = weights(ended.workspace / "final.safetensors").to(wanted.dtype)
    assert (found - wanted).norm() < APART[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", soaked(["complex128"], ["complex64", "float16"]))
def test_a_snapshot_is_gone_on_from(runner: JobRunner, dtype: str) -> None:
    extra = "snapshot_s: 0 checkpoint_freq: 12"
    whole = runner.run(SANDBLASTER, "dtypes.py", "--dtype", dtype, extra=extra)
    final = whole.workspace / "final.safetensors"
    wanted = weights(final)
    final.unlink()
    words = ["run", "--resume", str(whole.workspace / "manifests" / "step-12"), "--forkserver", runner.served_at]
    command = [*client(runner.warm_at), "-m", "topotrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=runner.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.equal(weights(final), wanted)


@soak_only
def test_asynchronous_groups_average_complex_buffers(runner: JobRunner) -> None:
    ended = runner.run(DOWNPOUR, "dtypes.py", "--dtype", "complex64")
    assert ended.report["metrics"]["loss"] < 2


def test_the_report_says_how_many_threads_each_worker_has(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {"worker 0/0", "worker 0/1", "worker 0/2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    chosen = runner.run(SANDBLASTER, "dtypes.py", "--threads", "3").report["threads"]
    assert chosen == dict.fromkeys(threads, 3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in os.environ
    divided = max(1, len(os.sched_getaffinity(0)) // 3)
    assert runner.run(SANDBLASTER, "dtypes.py").report["threads"] == dict.fromkeys(threads, divided)
