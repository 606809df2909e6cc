"""Real jobs over models of other dtypes, and with other numbers of threads."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import SANDBLASTER, JobRunner
from process_pool import client
from safetensors import safe_open

pytestmark = pytest.mark.journey


def weights(path: Path) -> torch.Tensor:
    """As they stand in the job's file: complex128 as pairs, which its metadata names."""
    with safe_open(str(path), "pt") as file:
        w, said = file.get_tensor("w"), file.metadata()
    return torch.view_as_complex(w) if '"w"' in said.get("complex", "") else w


def test_a_snapshot_is_gone_on_from(runner: JobRunner) -> None:
    extra = "snapshot_s: 0 checkpoint_freq: 12"
    whole = runner.run(SANDBLASTER, "dtypes.py", "--dtype", "complex128", extra=extra)
    final = whole.workspace / "final.safetensors"
    wanted = weights(final)
    final.unlink()
    words = ["run", "--resume", str(whole.workspace / "manifests" / "step-12"), "--forkserver", runner.served_at]
    command = [*client(runner.warm_at), "-m", "topotrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=runner.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.equal(weights(final), wanted)


def test_the_report_says_how_many_threads_each_worker_has(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = {"worker 0/0", "worker 0/1", "worker 0/2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    chosen = runner.run(SANDBLASTER, "dtypes.py", "--threads", "3").report["threads"]
    assert chosen == dict.fromkeys(threads, 3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in os.environ
    divided = max(1, len(os.sched_getaffinity(0)) // 3)
    assert runner.run(SANDBLASTER, "dtypes.py").report["threads"] == dict.fromkeys(threads, divided)
