"""Models of every dtype, through every default: a job trains what the plain script trains.

The plain script is torch's plain loop (`foreach=False, fused=False`), never the kernel that a job has chosen.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from arrangement import building, job_of, plain, run_local, usual_loop
from torch import nn

from topotrain.job import Job
from topotrain.update import ELEMENTWISE, SliceUpdate, describe, hyper

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
APART = {  # of the final values, relative: how far a job's order of sums takes them from the plain script's
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 0.03,
    torch.float16: 0.005,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}
RATES = {"SGD": 0.05, "Adadelta": 5.0, "Adagrad": 0.1, "ASGD": 0.3, "RAdam": 0.2}
EPS = 1e-3  # in float16 torch's own 1e-8 is 0, and the plain loop divides by it


class Linear(nn.Module):
    """One matrix of a size that no vector divides, in any dtype, and a buffer of that dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(13, 11, dtype=dtype))
        self.register_buffer("shift", torch.zeros(11, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + self.shift


def batches(dtype: torch.dtype, count: int = 20, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    w = torch.randn(13, 11, generator=chance, dtype=exact)
    xs = [torch.randn(size, 13, generator=chance, dtype=exact) for _ in range(count)]
    return [(x.to(dtype), (x @ w).to(dtype)) for x in xs]


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).abs().pow(2).mean() * 4


def options(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"lr": RATES.get(name, 0.05)}
    return (
        settings
        | ({"momentum": 0.9} if name == "SGD" else {})
        | ({"eps": EPS} if name not in ("SGD", "ASGD", "Rprop") else {})
    )


def optimizer(name: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **options(name), **more)
    return made


def plainly(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """torch's plain loop."""
    known = optimizer(name, model).defaults
    return optimizer(name, model, **{kernel: False for kernel in ("foreach", "fused") if kernel in known})


def far(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return float((mine.to(wide) - theirs.to(wide)).norm() / theirs.to(wide).norm())


def of_all(model: nn.Module, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    with torch.no_grad():
        return sum(float(loss(model, *batch)) for batch in data) / len(data)


# --- the servers' update adapter ----------------------------------------------------------------------------------


def train(model: Linear, name: str, data: Sequence[tuple[torch.Tensor, torch.Tensor]], by_server: bool) -> None:
    """Some epochs; `by_server`: the optimizer that the script has made is stepped over slices, as a server does it."""
    own = optimizer(name, model) if by_server else plainly(name, model)
    flat = model.w.detach().view(-1)
    update = SliceUpdate(describe(own, [model.w]), [(k, 0, flat[k * 64 : k * 64 + 64]) for k in range(3)])
    for _ in range(4):
        for batch in data:
            own.zero_grad()
            loss(model, *batch).backward()
            if by_server:
                grad = model.w.grad
                assert grad is not None
                update.apply(hyper(own), {k: grad.view(-1)[k * 64 : k * 64 + 64] for k in range(3)})
            else:
                own.step()


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_trains_in_every_dtype_as_the_plain_loop_does(name: str, dtype: torch.dtype) -> None:
    data = batches(dtype)
    mine, theirs = Linear(dtype), Linear(dtype)
    before = of_all(mine, data)
    train(theirs, name, data, by_server=False)
    after = of_all(theirs, data)
    if not (after < before / 4 and torch.isfinite(theirs.w).all()):
        pytest.fail(f"the plain loop itself does not learn here: a loss of {before} becomes {after}")
    train(mine, name, data, by_server=True)
    assert of_all(mine, data) < before / 4
    assert far(mine.w.detach(), theirs.w.detach()) < 2 * APART[dtype]


# --- whole jobs ---------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Job] = {
    "as it is": job_of(),
    "beside the workers": job_of("allreduce"),
    "three groups": job_of("one"),
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
    return building(lambda: Linear(dtype), lambda model: made("SGD", model))


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_job_trains_what_the_plain_script_trains(setting: str, dtype: torch.dtype) -> None:
    script = usual_loop(batches(dtype), loss)
    job = run_local(SETTINGS[setting], job_build(dtype), script)
    wanted = plain(job_build(dtype, plainly), script)
    print(setting, dtype, far(job.values["w"], wanted.values["w"]))
    assert far(job.values["w"], wanted.values["w"]) < APART[dtype]
    assert float(wanted.values["w"].abs().max()) > 0.5
