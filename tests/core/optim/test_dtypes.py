"""Models of every dtype, through every default: a job trains what the plain script trains.

The plain script is torch's plain loop (`foreach=False, fused=False`), never the kernel that a job has chosen.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import Trainer, building, job_of, plain, run_hosted, run_local, usual_loop
from torch import nn

from topotrain.config.job import Job, Updater
from topotrain.core.server.nonfinite import all_finite
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean
from topotrain.core.server.parameter_shard import norm_of

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
TURNS = cycle((*REAL, *COMPLEX, torch.float32))
APART = {  # of the final values, relative: how far a job's order of sums takes them from the plain script's
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 0.015,
    torch.float16: 0.004,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}


class Linear(nn.Module):
    """One matrix of a size that no vector divides, in any dtype, and a buffer of that dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(13, 11, dtype=dtype))
        self.register_buffer("shift", torch.zeros(11, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.shift


def batches(dtype: torch.dtype, count: int = 20, size: int = 13) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    w = torch.randn(13, 11, generator=chance, dtype=exact)
    xs = [torch.randn(size, 13, generator=chance, dtype=exact) for _ in range(count)]
    return [(x.to(dtype), (x @ w).to(dtype)) for x in xs]


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).abs().pow(2).mean() * 4


def optimizer(model: nn.Module, **kernels: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **kernels)


def plainly(model: nn.Module) -> torch.optim.Optimizer:
    """torch's plain loop."""
    return optimizer(model, foreach=False, fused=False)


def far(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return float((mine.to(wide) - theirs.to(wide)).norm() / theirs.to(wide).norm())


# --- whole jobs ---------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Job] = {
    "as it is": job_of(),
    "beside the workers": job_of("allreduce"),
    "one worker": job_of("one"),
    "units of two": job_of("two by two"),
    "hidden": job_of(grads="kHidden"),
    "on arrival": job_of(grads="kHidden", apply="kOnArrival"),
    "lazy": job_of(pull="kLazy"),
    "ring": job_of("allreduce", algorithm="kRing"),
    "tree": job_of("allreduce", algorithm="kTree"),
    "not looked at": job_of(nonfinite="kAllow"),
    "whole tensors": job_of(slicing="kTensor"),
}


def job_build(dtype: torch.dtype, made: Any = optimizer) -> Any:
    return building(lambda: Linear(dtype), made)


@pytest.mark.parametrize(("setting", "dtype"), list(zip(SETTINGS, TURNS)), ids=str)
def test_a_job_trains_what_the_plain_script_trains(setting: str, dtype: torch.dtype) -> None:
    script = usual_loop(batches(dtype), loss)
    job = run_local(SETTINGS[setting], job_build(dtype), script)
    wanted = plain(job_build(dtype, plainly), script)
    assert far(job.values["w"], wanted.values["w"]) < APART[dtype]
    assert float(wanted.values["w"].abs().max()) > 0.5


@pytest.mark.parametrize(("dtype", "grads"), list(zip(REAL + COMPLEX, cycle(["kVisible", "kHidden"]))), ids=str)
def test_servers_clip_as_the_plain_script_does(grads: str, dtype: torch.dtype) -> None:
    def clipped(t: Trainer) -> None:
        for batch in batches(dtype, 6):
            t.optimizer.zero_grad()
            t.backward(t.losses(loss, *batch))
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
            t.optimizer.step()

    job = run_local(
        job_of(grads=grads, updater=Updater(clip_norm=0.5)), job_build(dtype), usual_loop(batches(dtype, 6), loss)
    )
    wanted = plain(job_build(dtype, plainly), clipped)
    assert far(job.values["w"], wanted.values["w"]) < APART[dtype]


@pytest.mark.parametrize(
    ("dtype", "cluster"),
    [
        (torch.bfloat16, {"transport": "kTcp"}),
        (torch.complex64, {"transport": "kTcp", "compression": "kInt8"}),
    ],
    ids=str,
)
def test_between_processes_too(cluster: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Complex numbers travel uncompressed: no codec takes them."""
    script = usual_loop(batches(dtype, 8), loss)
    job = run_hosted(job_of(**cluster), job_build(dtype), script, tmp_path)
    wanted = plain(job_build(dtype, plainly), script)
    exact = "compression" not in cluster or dtype.is_complex
    assert far(job.values["w"], wanted.values["w"]) < (APART[dtype] if exact else 0.05)


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
def test_what_is_not_finite_is_found(dtype: torch.dtype) -> None:
    good = torch.full((65,), -3.0, dtype=dtype)
    assert all_finite(good) and all_finite(good[:0]) and all_finite(good[:1])
    wrong = [float("nan"), float("inf")]
    if dtype.is_complex:
        wrong = [complex(0, number) for number in wrong] + [complex(number, 0) for number in wrong]
    for number in wrong:
        for at in (0, 63, 64):
            spoiled = good.clone()
            spoiled[at] = number
            assert not all_finite(spoiled)
    largest = torch.full((65,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(largest)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (21.0, 21.0, 22.0), (1.0, 0.0, 1.0)])
def test_a_mean_in_float16_has_no_sum_that_is_too_large(weights: tuple[float, ...]) -> None:
    parts = {w: (weight, torch.full((65,), 30000.0, dtype=torch.float16)) for w, weight in enumerate(weights)}
    out = torch.empty(65, dtype=torch.float16)
    canonical_mean(parts, [[0, 1], [2]], out, ScratchBuffers())
    assert far(out, parts[0][1]) < 0.001


def test_a_norm_in_float16_may_be_larger_than_float16() -> None:
    assert norm_of(torch.full((100,), 60000.0, dtype=torch.float16), 2.0) == pytest.approx(600000.0)
    assert norm_of(torch.full((4,), 3 + 4j), 2.0) == 10.0
