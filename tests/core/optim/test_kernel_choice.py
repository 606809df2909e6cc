"""A kernel is taken only where it computes what the plain loop computes."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

from topotrain.config.job import ConfigError
from topotrain.core.optim import kernel_choice
from topotrain.core.optim.adapter import OptimizerSpec, SliceUpdate
from topotrain.core.optim.kernel_choice import STEPS, TOLERANCE, KernelVerdict, verdict

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUSED: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, {"momentum": 0.5, "dampening": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 1e-4}, {"maximize": True}],
    "AdamW": [{}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.1, "lr_decay": 1e-3}],
}


def group(cls: Any, **settings: Any) -> dict[str, Any]:
    """A parameter group's options, at a rate with which nothing could be seen."""
    return {**cls([torch.zeros(1)], **settings).param_groups[0], "lr": 1e-8}


def wrong(spoil: Callable[[torch.Tensor, torch.Tensor], object]) -> type[SGD]:
    """SGD whose fused kernel is wrong in one way: `spoil` gets (value, what it was before the plain loop)."""

    class Wrong(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            fused = [one["fused"] for one in self.param_groups]
            before = [[value.clone() for value in one["params"]] for one in self.param_groups]
            for one in self.param_groups:
                one["fused"] = False
            super().step(closure)
            for one, old, was in zip(self.param_groups, before, fused, strict=True):
                one["fused"] = was
                for value, start in zip(one["params"], old, strict=True):
                    if was:
                        spoil(value, start)

    return Wrong


def back(value: torch.Tensor, start: torch.Tensor, part: slice) -> None:
    value[part] = start[part]


NO_OP = wrong(lambda value, start: back(value, start, slice(None)))
WRONG = {
    "it does nothing": NO_OP,
    # As torch 2.13's in short floats.
    "it leaves out all whole vectors": wrong(lambda value, start: back(value, start, slice(len(value) // 16 * 16))),
    "it leaves out what is behind": wrong(lambda value, start: back(value, start, slice(len(value) // 64 * 64, None))),
    "it forgets the last element of a large tensor": wrong(
        lambda value, start: back(value, start, slice(-1, None)) if len(value) > 4096 else None
    ),
}


class NoDecay(SGD):
    """Its fused kernel knows no weight decay."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups:
            fused, decay = one["fused"], one["weight_decay"]
            one |= {"fused": False, "weight_decay": 0.0 if fused else decay}
            super().step(closure)
            one |= {"fused": fused, "weight_decay": decay}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_seen(cls: type[SGD], dtype: torch.dtype) -> None:
    assert verdict(cls, group(cls), dtype, "cpu") is KernelVerdict.WRONG
    assert kernel_choice.choose(cls, group(cls), [(dtype, "cpu")]) == {"fused": None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_option_is_tried_where_it_is_set(dtype: torch.dtype) -> None:
    assert verdict(NoDecay, group(NoDecay, weight_decay=1e-4), dtype, "cpu") is KernelVerdict.WRONG
    assert verdict(NoDecay, group(NoDecay), torch.float32, "cpu") is KernelVerdict.RIGHT


@pytest.mark.parametrize(
    ("name", "settings", "dtype"),
    [
        (name, each, dtype)
        for name, found in FUSED.items()
        for at, each in enumerate(found)
        for dtype in DTYPES[at % 2 :: 2]
    ],
)
def test_torchs_kernels_are_judged_by_what_they_do(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Whatever this torch has on this machine: steps of another size, other values and a longer run agree with it."""
    cls = getattr(torch.optim, name)
    chosen = kernel_choice.choose(cls, group(cls, **settings), [(dtype, "cpu")])["fused"]
    if name != "SGD" or dtype in (torch.float32, torch.float64):
        assert chosen is True, "the tolerance is too small for a right kernel"
    ends = []
    for kernel in (chosen, False):
        rng = torch.Generator().manual_seed(5)
        value = torch.rand(1000, generator=rng).add(0.5).to(dtype)
        optimizer = cls([value], lr=0.125, fused=kernel, foreach=False, **settings)
        for _ in range(STEPS):
            value.grad = torch.rand(1000, generator=rng).add(0.5).neg().to(dtype)
            optimizer.step()
        ends.append(value)
    mine, plain = ends
    assert float((mine - plain).abs().max() / plain.abs().max()) <= TOLERANCE * torch.finfo(dtype).eps


def test_a_group_without_a_step_to_be_seen_has_the_plain_loop() -> None:
    huge = group(torch.optim.Adagrad, initial_accumulator_value=1e12)
    assert verdict(torch.optim.Adagrad, huge, torch.bfloat16, "cpu") is KernelVerdict.UNSEEN
    assert kernel_choice.choose(torch.optim.Adagrad, huge, [(torch.bfloat16, "cpu")]) == {"fused": None}
    assert verdict(SGD, group(SGD), torch.complex64, "cpu") is KernelVerdict.UNSEEN


def test_each_kernel_is_tried_once_whatever_the_schedule_says() -> None:
    kernel_choice._try.cache_clear()
    for step in range(1, 20):
        settings = {"lr": 1.0 / step, "momentum": 0.9 - step / 100, "weight_decay": 1e-3 / step}
        assert verdict(SGD, group(SGD) | settings, torch.float32, "cpu") is KernelVerdict.RIGHT
        assert (
            verdict(Adam, group(Adam) | {"betas": (0.9 - step / 100, 0.99)}, torch.float32, "cpu")
            is KernelVerdict.RIGHT
        )
    assert kernel_choice._try.cache_info().misses == 2


def test_a_trial_draws_no_number_of_the_scripts() -> None:
    kernel_choice._try.cache_clear()
    before = torch.get_rng_state()
    assert verdict(Adam, group(Adam), torch.float32, "cpu") is KernelVerdict.RIGHT
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_that_the_script_names_must_be_right() -> None:
    named = group(NO_OP) | {"fused": True}
    with pytest.raises(ConfigError, match="fused = true: must be left out or False: in float32 on this machine"):
        kernel_choice.choose(NO_OP, named, [(torch.float32, "cpu")])
    assert kernel_choice.choose(NO_OP, group(NO_OP) | {"fused": False}, [(torch.float32, "cpu")]) == {}
    assert kernel_choice.choose(Adam, group(Adam) | {"fused": True}, [(torch.float32, "cpu")]) == {}


def test_an_option_that_comes_later_is_tried_then(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rules")
    module.NoDecay = NoDecay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rules", module)
    own = group(NoDecay)
    del own["params"]
    value = torch.ones(64)
    update = SliceUpdate(OptimizerSpec("my_rules:NoDecay", (own,), (0,)), [(0, 0, value)], "my_rules")
    assert update._parts[0].optimizer is not None
    assert update._parts[0].optimizer.param_groups[0]["fused"] is True
    text = '[{"lr":1.0,"weight_decay":0.5,"fused":null,"foreach":null}]'
    update.apply(text.encode(), {0: torch.zeros(64)})
    assert update._parts[0].optimizer.param_groups[0]["fused"] is None
    assert torch.equal(value, torch.full((64,), 0.5))
