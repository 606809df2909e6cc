"""What an optimizer on slices is made of, and what is refused by name (`test_optimizer_part` compares the bits)."""

import json
import sys
import types
from typing import Any

import pytest
import torch

from topotrain.config.job import Adam, ConfigError, LRGen, Param, RMSProp, Slicing, Step, Updater
from topotrain.core.optim import lr_schedules
from topotrain.core.optim.adapter import (
    OptimizerSpec,
    SliceUpdate,
    UnsupportedOptimizer,
    describe,
    hyper,
)
from topotrain.core.optim.slice_trial import check_parts
from topotrain.core.optim.updater_block import build, clip, follow_schedule, set_lr


def test_loaded_state_is_a_copy() -> None:
    value = torch.zeros(64)
    update = SliceUpdate(OptimizerSpec("torch.optim.SGD", ({"lr": 1.0, "momentum": 0.9},), (0,)), [(0, 0, value)])
    buffer = torch.ones(64)
    update.load_state(0, "momentum_buffer", buffer)
    buffer.zero_()
    assert torch.equal({n: v for _, n, v in update.state()}["momentum_buffer"], torch.ones(64))  # type: ignore[arg-type]


def test_fused_where_the_user_chose_nothing_and_only_there() -> None:
    def kernels(**choice: bool | None) -> tuple[bool | None, bool | None]:
        spec = describe(torch.optim.Adam(own := [torch.nn.Parameter(torch.zeros(64))], **choice), own)  # type: ignore[arg-type]
        made = SliceUpdate(spec, [(0, 0, torch.zeros(64))])._parts[0].optimizer
        assert made is not None
        return made.param_groups[0]["fused"], made.param_groups[0]["foreach"]

    own = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = torch.optim.Adam(own)
    update = SliceUpdate(describe(optimizer, own), [(0, 0, torch.zeros(64))])
    optimizer.param_groups[0]["lr"] = 0.5
    update.apply(hyper(optimizer), {0: torch.ones(64)})
    (group,) = update._parts[0].optimizer.param_groups
    assert group["fused"] is True and group["lr"] == 0.5, "hyper-parameters of a later step do not undo the choice"
    assert kernels() == (True, None)
    assert kernels(fused=False) == (False, None)
    assert kernels(foreach=True) == (None, True)
    assert kernels(foreach=False) == (None, False)


def test_a_key_without_gradient_is_skipped_and_gradients_are_not_changed() -> None:
    a, b = torch.ones(64), torch.ones(64)
    spec = OptimizerSpec("torch.optim.SGD", ({"lr": 1.0, "weight_decay": 0.5},), (0, 0))
    update = SliceUpdate(spec, [(7, 0, a), (9, 1, b)], clip=(-0.5, 0.5))
    grad = torch.full((64,), 2.0)
    update.apply(json.dumps([{"lr": 1.0, "weight_decay": 0.0}]).encode(), {7: grad})
    assert torch.equal(a, torch.full((64,), 0.5))
    assert torch.equal(b, torch.ones(64))
    assert torch.equal(grad, torch.full((64,), 2.0))
    update.apply(b"[{}]", {9: grad})
    assert torch.equal(a, torch.full((64,), 0.5)), "the gradient of the step before must not count again"
    with pytest.raises(KeyError):
        update.apply(b"[{}]", {8: grad})


def test_parameters_without_a_group_and_owners_without_work() -> None:
    spec = OptimizerSpec("torch.optim.SGD", ({"lr": 1.0}, {"lr": 2.0}), (-1, 1))
    frozen, value = torch.ones(64), torch.ones(64)
    update = SliceUpdate(spec, [(0, 0, frozen), (1, 1, value)])
    update.apply(b'[{"lr":1.0},{"lr":2.0}]', {0: torch.ones(64), 1: torch.ones(64)})
    assert torch.equal(frozen, torch.ones(64))
    assert torch.equal(value, torch.full((64,), -1.0))  # the lr of its own group, though group 0 has nothing here
    idle = SliceUpdate(spec, [(0, 0, frozen)])
    idle.apply(b"[{},{}]", {0: torch.ones(64)})
    assert list(idle.state()) == []
    with pytest.raises(ConfigError, match="2 groups"):
        update.apply(b"[{}]", {})


def test_whole_tensors_for_those_that_need_them() -> None:
    whole, copy = torch.nn.Parameter(torch.randn(8, 16)), torch.zeros(8, 16)
    copy.copy_(whole.detach())
    optimizer = torch.optim.Adafactor([whole], lr=0.1)
    with pytest.raises(UnsupportedOptimizer, match="kTensor"):
        describe(optimizer, [whole])
    update = SliceUpdate(describe(optimizer, [whole], Slicing.kTensor), [(0, 0, copy)])
    for seed in range(3):
        whole.grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        update.apply(hyper(optimizer), {0: whole.grad.reshape(-1)})  # flat gradients take the value's shape
    assert torch.equal(whole, copy)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Muon"])
def test_refused_by_name(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    own = [torch.nn.Parameter(torch.zeros(8, 8))]
    with pytest.raises(UnsupportedOptimizer, match=name) as caught:
        describe(getattr(torch.optim, name)(own), own)
    assert "kTensor" in caught.value.accepted


class OwnRule(torch.optim.SGD):
    """Stands for a user's class."""


def test_a_users_class_comes_only_from_the_jobs_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rules")
    module.OwnRule = OwnRule  # type: ignore[attr-defined]
    module.other = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rules", module)
    own = [torch.nn.Parameter(torch.zeros(64))]
    optimizer = OwnRule(own, lr=1.0)
    with pytest.raises(UnsupportedOptimizer, match="import"):
        describe(optimizer, own)
    spec = describe(optimizer, own, import_module="my_rules")
    assert spec.name == "my_rules:OwnRule"
    value = torch.zeros(64)
    SliceUpdate(spec, [(0, 0, value)], import_module="my_rules").apply(hyper(optimizer), {0: torch.ones(64)})
    assert torch.equal(value, -torch.ones(64))
    for name, module_name in [
        ("my_rules:OwnRule", ""),
        ("os:system", "my_rules"),
        ("my_rules:other", "my_rules"),
        ("torch.optim.LBFGS", ""),
        ("topotrain:Nothing", ""),
    ]:
        with pytest.raises(UnsupportedOptimizer):
            SliceUpdate(OptimizerSpec(name, ({},), (0,)), [(0, 0, value)], import_module=module_name)


class Largest(torch.optim.Optimizer):
    """Steps relative to the largest gradient of each tensor, or of all of them."""

    def __init__(self, own: Any, lr: float, of_all: bool) -> None:
        super().__init__(own, {"lr": lr, "of_all": of_all})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            sizes = [p.grad.abs().max() for p in group["params"]]
            for p, size in zip(group["params"], sizes, strict=True):
                p.add_(p.grad / (max(sizes) if group["of_all"] else size), alpha=-group["lr"])


def test_a_users_class_that_differs_on_parts_of_the_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rules")
    monkeypatch.setitem(sys.modules, "my_rules", module)
    module.OwnRule, module.Largest = OwnRule, Largest  # type: ignore[attr-defined]
    own = [torch.nn.Parameter(torch.zeros(8, 8))]
    drawn = torch.random.get_rng_state()

    def check(optimizer: torch.optim.Optimizer, slicing: Slicing = Slicing.kElement) -> None:
        check_parts(describe(optimizer, own, slicing, "my_rules"), slicing, "my_rules")

    check(OwnRule(own, lr=0.0, momentum=0.9))
    check(Largest(own, 0.0, False), Slicing.kTensor)
    with pytest.raises(UnsupportedOptimizer, match=r"my_rules:Largest.* on a slice of a tensor.*kTensor"):
        check(Largest(own, 0.0, False))
    with pytest.raises(UnsupportedOptimizer, match=r"my_rules:Largest.* each tensor alone"):
        check(Largest(own, 0.0, True), Slicing.kTensor)
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_a_tensor_that_is_no_parameter_is_refused() -> None:
    stranger = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="that the model does not have"):
        describe(torch.optim.SGD([stranger], lr=0.1), [])


def test_hyper_is_canonical_and_takes_what_schedulers_leave() -> None:
    own = [torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.Adam(own, lr=torch.tensor(0.5))
    before = hyper(optimizer)
    assert json.loads(before)[0]["lr"] == 0.5
    assert json.loads(before)[0]["betas"] == [0.9, 0.999]
    group = optimizer.param_groups[0]
    group["lr"] = 0.5
    optimizer.param_groups[0] = dict(reversed(group.items()))
    assert hyper(optimizer) == before
    optimizer.param_groups[0]["note"] = object()
    assert hyper(optimizer) == before
    optimizer.param_groups[0]["eps"] = object()
    with pytest.raises(UnsupportedOptimizer, match="eps"):
        hyper(optimizer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"name":"os.system(1)","groups":[{}],"assignment":[0]}',
        '{"name":"torch.optim.SGD","groups":[{}],"assignment":[1]}',
        '{"name":"torch.optim.SGD","groups":[{"lr":{}}],"assignment":[0]}',
        '{"name":"torch.optim.SGD","groups":[{"betas":[[1]]}],"assignment":[0]}',
    ],
)
def test_a_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        OptimizerSpec.from_text(text)


FIXED = LRGen(type="kFixed", base_lr=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("updater", "cls", "settings"),
    [
        (Updater(type="kSGD", momentum=0.9), "SGD", {"momentum": 0.9, "nesterov": False}),  # type: ignore[arg-type]
        (Updater(type="kNesterov", momentum=0.9), "SGD", {"momentum": 0.9, "nesterov": True}),  # type: ignore[arg-type]
        (Updater(type="kAdaGrad", delta=1e-4), "Adagrad", {"eps": 1e-4}),  # type: ignore[arg-type]
        (Updater(type="kRMSProp", rmsprop_conf=RMSProp(0.8)), "RMSprop", {"alpha": 0.8, "eps": 1e-8}),  # type: ignore[arg-type]
        (Updater(type="kAdaDelta"), "Adadelta", {"rho": 0.9}),  # type: ignore[arg-type]
        (Updater(type="kAdam", adam_conf=Adam(0.8, 0.9)), "Adam", {"betas": (0.8, 0.9)}),  # type: ignore[arg-type]
        (Updater(type="kAdamMax"), "Adamax", {"betas": (0.9, 0.999)}),  # type: ignore[arg-type]
    ],
)
def test_an_updater_block_builds_its_optimizer(updater: Updater, cls: str, settings: dict[str, Any]) -> None:
    block = Updater(
        type=updater.type,
        momentum=updater.momentum,
        delta=updater.delta,
        rmsprop_conf=updater.rmsprop_conf,
        adam_conf=updater.adam_conf,
        learning_rate=FIXED,
        weight_decay=0.01,
    )
    own = [("w", torch.nn.Parameter(torch.ones(4)))]
    optimizer = build(block, own)
    group = optimizer.param_groups[0]
    assert type(optimizer) is getattr(torch.optim, cls)
    assert group["lr"] == 0.1
    assert group["weight_decay"] == 0.01
    assert {name: group[name] for name in settings} == settings
    describe(optimizer, [p for _, p in own])


def test_scales_make_groups_and_follow_the_schedule() -> None:
    rate = LRGen(type="kStep", base_lr=1.0, step_conf=Step(change_freq=10, gamma=0.5))  # type: ignore[arg-type]
    scales = (Param(match="bias$", lr_scale=2, wd_scale=0), Param(match="b", lr_scale=7))
    updater = Updater(type="kSGD", weight_decay=0.5, learning_rate=rate, param=scales)  # type: ignore[arg-type]
    named = [(n, torch.nn.Parameter(torch.zeros(2))) for n in ("a.weight", "a.bias", "c.weight", "b.weight")]
    optimizer = build(updater, named)
    groups = optimizer.param_groups
    assert [[id(p) for p in g["params"]] for g in groups] == [
        [id(named[0][1]), id(named[2][1])],
        [id(named[1][1])],
        [id(named[3][1])],
    ]
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1.0, 0.5), (2.0, 0.0), (7.0, 0.5)]
    follow = build(updater, named)
    after_step, seen = follow_schedule(follow, updater), []
    for _ in range(12):
        seen.append(follow.param_groups[0]["lr"])
        after_step(follow, (), {})
    assert seen == [1.0] * 10 + [0.5] * 2, "each call moves on to the rate of the next step"
    for step in (25, 3):  # back again, too
        set_lr(optimizer, updater, step)
        assert [g["lr"] for g in groups] == [lr_schedules.lr(updater, step) * scale for scale in (1, 2, 7)]


def test_the_norm_is_clipped_before_the_elements() -> None:
    first, second, frozen = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    for given, expected in (
        ({"clip_norm": 5.0}, (3.0, -4.0)),
        ({"clip_low": -3.5, "clip_high": 2.5}, (2.5, -3.5)),
        ({"clip_norm": 5.0, "clip_low": -3.5, "clip_high": 3.5}, (3.0, -3.5)),
        ({}, (30.0, -40.0)),
    ):
        first.grad, second.grad = torch.tensor([30.0]), torch.tensor([-40.0])
        clip(Updater(**given), (first, second, frozen))  # type: ignore[arg-type]
        torch.testing.assert_close(torch.cat([first.grad, second.grad]), torch.tensor(expected))


@pytest.mark.parametrize(
    ("updater", "field"),
    [
        (Updater(learning_rate=FIXED), "updater.type"),
        (Updater(type="kSGD"), "updater.learning_rate"),  # type: ignore[arg-type]
        (Updater(type="kNesterov", learning_rate=FIXED), "updater.momentum"),  # type: ignore[arg-type]
        (Updater(type="kRMSProp", learning_rate=FIXED), "updater.rmsprop_conf"),  # type: ignore[arg-type]
    ],
)
def test_a_block_that_builds_nothing_says_which_field(updater: Updater, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(updater, [("w", torch.nn.Parameter(torch.zeros(1)))])
    assert caught.value.field == field
