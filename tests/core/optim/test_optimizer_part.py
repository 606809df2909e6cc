"""Segments that are updated as one tensor have the bits of torch on whole tensors, and cost no call each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from torch.utils._python_dispatch import TorchDispatchMode

from topotrain.config.sharding import ALIGN
from topotrain.core.optim import fused_lists, kernel_rounds
from topotrain.core.optim.adapter import ELEMENTWISE, OptimizerSpec, SliceUpdate, describe, hyper
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.core.optim.fused_lists import FusedLists
from topotrain.core.optim.kernel_rounds import common_round

OPTIONS: Mapping[str, Sequence[dict[str, Any]]] = {
    "SGD": (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.7, "dampening": 0.3, "maximize": True},
    ),
    "Adam": ({}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True, "betas": (0.0, 0.9)}),
    "AdamW": ({}, {"amsgrad": True, "weight_decay": 0.3}),
    "Adagrad": ({}, {"initial_accumulator_value": 0.5, "weight_decay": 0.1, "lr_decay": 0.1}),
    "RMSprop": ({}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "Adadelta": ({}, {"weight_decay": 0.1}),
    "Adamax": ({}, {"weight_decay": 0.1}),
    "NAdam": ({}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ({}, {"weight_decay": 0.1}),
    "ASGD": ({}, {"t0": 2, "weight_decay": 0.1}),
    "Rprop": ({},),
    "DelayedNesterov": (
        {"delay": 1, "momentum": 0.8, "weight_decay": 0.01},
        {"delay": 3, "momentum": 0.8, "weight_decay": 0.01},
    ),
}
KINDS = {**{name: getattr(torch.optim, name) for name in ELEMENTWISE}, "DelayedNesterov": DelayedNesterov}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SHORT = (torch.bfloat16, torch.float16)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """In float16 some steps make a NaN, in the same places."""
    one, other = first.detach().reshape(-1), second.detach().reshape(-1)
    unknown = one.isnan()
    return torch.equal(unknown, other.isnan()) and torch.equal(one[~unknown], other[~unknown])


class Flat:
    """Parameters in one buffer as a server has them: aligned, with zeros between them, and cut into slices."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, cut: int) -> None:
        self.starts, end = [], 0
        for size in sizes:
            self.starts.append(end)
            end += -(-size // ALIGN) * ALIGN
        self.sizes, self.cut = sizes, cut
        self.values, self.gradients = torch.zeros(end, dtype=dtype), torch.zeros(end, dtype=dtype)

    def write(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
        for start, size, tensor in zip(self.starts, self.sizes, tensors, strict=True):
            flat[start : start + size] = 0 if tensor is None else tensor.detach().reshape(-1)

    def rows(self, flat: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """(key, parameter, slice) of every slice."""
        found = []
        for index, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            for lo in range(0, size, self.cut):
                found.append((len(found), index, flat[start + lo : start + min(size, lo + self.cut)]))
        return found


@dataclass(frozen=True)
class Plan:
    """A short training: an optimizer, its parameters, and which of them get gradients."""

    name: str
    options: dict[str, Any]
    kernel: dict[str, Any]
    dtype: torch.dtype
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    cut: int
    absent: tuple[tuple[int, ...], ...]  # by step: the parameters without a gradient
    copy_after: int
    by_entries: bool  # the copy is made of each entry by itself


@st.composite
def plans(draw: st.DrawFn, name: str) -> Plan:
    dtype = draw(st.sampled_from(DTYPES))
    kernels: list[dict[str, Any]] = [{}, *([{"foreach": False}] if name in ELEMENTWISE else [])]
    # In short floats the bits of torch's SGD with foreach depend on the other tensors of the call.
    if dtype not in SHORT and name in ELEMENTWISE:
        kernels.append({"foreach": True})
    # A script may not name torch's fused SGD in short floats, which is wrong on some machines (`kernel_choice`).
    if name in FUSED and not dtype.is_complex and not (name == "SGD" and dtype in SHORT):
        kernels.append({"fused": True})
    # 0 stands for a tensor without dimensions. In short floats torch computes with float32 numbers there, and a slice
    # has one dimension.
    least = 0 if dtype not in SHORT else 1
    sizes = draw(
        st.lists(st.integers(least, 40) | st.sampled_from([48, 63, 64, 65, 128, 160, 193]), min_size=1, max_size=7)
    )
    steps, some = draw(st.integers(2, 6)), st.lists(st.integers(0, len(sizes) - 1), max_size=2)
    return Plan(
        name,
        draw(st.sampled_from(OPTIONS[name])),
        draw(st.sampled_from(kernels)),
        dtype,
        tuple(sizes),
        tuple(draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))),
        draw(st.sampled_from([64, 128, 1 << 20])),
        tuple(tuple(draw(some)) if draw(st.booleans()) else () for _ in range(steps)),
        draw(st.integers(0, steps)),
        draw(st.booleans()),
    )


def step_whole(optimizer: torch.optim.Optimizer) -> None:
    """step(), one parameter at a time: torch's fused SGD fails on a first gradient that comes later than others."""
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in held:
        for other, _ in held:
            other.grad = None
        parameter.grad = gradient
        if gradient is not None:
            optimizer.step()


def with_kernels_of(update: SliceUpdate, optimizer: torch.optim.Optimizer) -> None:
    """The reference takes the kernels that topotrain chooses for the group, see docs/exactness.md."""
    theirs = update._parts[0].optimizer.param_groups
    for mine, chosen in zip(optimizer.param_groups, theirs, strict=True):
        mine.update({name: chosen[name] for name in ("fused", "foreach") if name in chosen})


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_the_bits_are_those_of_torch_on_whole_tensors(name: str, data: st.DataObject) -> None:
    plan = data.draw(plans(name))
    chance = torch.Generator().manual_seed(sum(plan.sizes))

    def draw(size: int) -> torch.Tensor:
        exact = torch.complex128 if plan.dtype.is_complex else torch.float64
        return torch.randn((size,) if size else (), generator=chance, dtype=exact).to(plan.dtype)

    whole = [torch.nn.Parameter(draw(size)) for size in plan.sizes]
    numbers = sorted(set(plan.groups))
    members = [[p for p, group in zip(whole, plan.groups, strict=True) if group == number] for number in numbers]
    rows = [{"params": each, "lr": 0.01 + 0.02 * number} for each, number in zip(members, numbers, strict=True)]
    optimizer = KINDS[plan.name](rows, **plan.options, **plan.kernel)
    spec = OptimizerSpec.from_text(describe(optimizer, whole).to_text())
    flat = Flat([max(size, 1) for size in plan.sizes], plan.dtype, plan.cut)
    flat.write(flat.values, whole)
    segments = flat.rows(flat.values)
    update = SliceUpdate(spec, segments)
    with_kernels_of(update, optimizer)
    views = flat.rows(flat.gradients)
    mappings: dict[tuple[int, ...], dict[int, torch.Tensor | None]] = {}
    for step, absent in enumerate(plan.absent):
        if step == plan.copy_after:  # a second copy of a server, or a job that is resumed
            copied = SliceUpdate(spec, segments)
            if plan.by_entries:
                for key, name, value in update.state():
                    copied.load_state(key, name, value)
            else:
                copied.load_state_dict(update.state_dict())
            update, mappings = copied, {}
        gradients = [None if index in absent else draw(size) for index, size in enumerate(plan.sizes)]
        for p, gradient in zip(whole, gradients, strict=True):
            p.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        flat.write(flat.gradients, gradients)
        # The same mapping again where the same parameters have gradients, as a server gives it.
        given = mappings.setdefault(
            tuple(sorted(set(absent))), {key: None if index in absent else view for key, index, view in views}
        )
        step_whole(optimizer)
        update.apply(hyper(optimizer), given)
        for p, start in zip(whole, flat.starts, strict=True):
            assert same(p, flat.values[start : start + p.numel()]), f"step {step}"
    state: dict[tuple[int, str], torch.Tensor | float] = {(key, name): value for key, name, value in update.state()}
    seen = 0
    for key, index, view in segments:
        lo = view.storage_offset() - flat.starts[index]
        for name, value in optimizer.state[whole[index]].items():
            if value is None:
                continue
            elements = isinstance(value, torch.Tensor) and value.shape == whole[index].shape and name != "step"
            numbers_only = not elements or (plan.sizes[index] == 0 and state[key, name].dim() == 0)  # type: ignore[union-attr]
            mine = torch.as_tensor(value) if numbers_only else value.reshape(-1)[lo : lo + view.numel()]
            assert same(mine, torch.as_tensor(state[key, name])), name
            seen += 1
    assert seen == len(state)
    used = torch.zeros(len(flat.values), dtype=torch.bool)
    for start, size in zip(flat.starts, flat.sizes, strict=True):
        used[start : start + size] = True
    assert not flat.values[~used].any(), "what lies between parameters must stay zero"


class Counter(TorchDispatchMode):
    """Counts the operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def made(name: str, sizes: Sequence[int], **options: Any) -> tuple[SliceUpdate, bytes, dict[int, torch.Tensor | None]]:
    """An update of parameters of these sizes in one bucket, its settings, and gradients."""
    own = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = getattr(torch.optim, name)(own, **options)
    flat = Flat(sizes, torch.float32, 1 << 20)
    flat.values.normal_()
    flat.write(flat.gradients, [torch.ones(size) for size in sizes])
    update = SliceUpdate(describe(optimizer, own), flat.rows(flat.values))
    return update, hyper(optimizer), {key: view for key, _, view in flat.rows(flat.gradients)}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_step_makes_as_many_calls_with_many_tensors_as_with_few(name: str) -> None:
    counts = []
    for tensors in (2, 40):
        update, text, gradients = made(name, [21] * tensors, **OPTIONS[name][-1])
        for _ in range(2):
            update.apply(text, gradients)
        with Counter() as counter:
            update.apply(text, gradients)
        counts.append(counter.count)
    assert counts[0] == counts[1] > 0


def test_a_fused_kernel_joins_tensors_of_full_rounds_only() -> None:
    update, text, gradients = made("Adam", [160, 480, 10, 64, 64])
    update.apply(text, gradients)
    group = update._parts[0].optimizer.param_groups[0]
    assert group["fused"]
    # Without vector instructions a kernel has no rounds.
    vectorized = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    assert common_round(torch.optim.Adam, group, [(torch.float32, "cpu")]) == (16 if vectorized else 1)
    assert [len(span.keys) for span in update._parts[0].spans] == ([3, 2] if vectorized else [5])


def test_a_momentum_that_begins_where_some_parameters_have_had_one() -> None:
    update, _, gradients = made("SGD", [64, 64], lr=0.1, momentum=0.9)
    plain = [torch.nn.Parameter(value.clone()) for value in update._values.values()]
    optimizer = torch.optim.SGD(plain, lr=0.1, momentum=0.9, fused=True)
    for step, momentum in enumerate((0.9, 0.0, 0.0, 0.9, 0.9, 0.9)):
        optimizer.param_groups[0]["momentum"] = momentum
        given = {0: gradients[0], 1: None} if step == 0 else gradients
        for key, p in enumerate(plain):
            p.grad = given[key]
        step_whole(optimizer)
        update.apply(hyper(optimizer), given)
        assert all(torch.equal(p, value) for p, value in zip(plain, update._values.values(), strict=True)), step


def test_a_schedule_of_momentum_needs_no_new_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch.optim.SGD([torch.zeros(3)], lr=0.1, momentum=0.9, fused=True).param_groups[0]
    kinds = [(torch.float32, "cpu")]
    first = common_round(torch.optim.SGD, group, kinds)

    def fail(*_: object) -> bool:
        raise AssertionError("a trial at every step of a schedule")

    monkeypatch.setattr(kernel_rounds, "_agrees", fail)
    assert common_round(torch.optim.SGD, {**group, "momentum": 0.85, "lr": 0.3}, kinds) == first


def test_settings_with_other_kernels_take_spans_apart() -> None:
    update, _, gradients = made("SGD", [21] * 5, lr=0.1)
    plain = [torch.nn.Parameter(value.clone()) for value in update._values.values()]
    optimizer = torch.optim.SGD(plain, lr=0.1, fused=True)
    for p, view in zip(plain, gradients.values(), strict=True):
        assert view is not None
        p.grad = view
    counts = []
    for momentum in (0.0, 0.0, 0.9, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        for view in gradients.values():
            assert view is not None
            view.normal_()
        optimizer.step()
        update.apply(hyper(optimizer), gradients)
        counts.append(len(update._parts[0].spans))
    assert all(torch.equal(p, value) for p, value in zip(plain, update._values.values(), strict=True))
    rounds = common_round(torch.optim.SGD, optimizer.param_groups[0], [(torch.float32, "cpu")])
    assert counts == [1, 1, *([1] * 3 if rounds == 1 else [5] * 3)]


def test_an_optimizer_without_such_a_kernel_does_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_torch(*_: object, **__: object) -> None:
        raise TypeError("no such argument")

    fused_lists._agrees.cache_clear()
    monkeypatch.setattr(torch, "_fused_sgd_", other_torch)
    optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1, fused=True)
    try:
        assert FusedLists(optimizer).step() is False
    finally:
        fused_lists._agrees.cache_clear()
