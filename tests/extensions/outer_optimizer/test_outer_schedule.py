"""Outer learning rates that change: the step of SINGA's schedule is the number of the round of the fragment."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import test_same_bits
import torch
from in_process_job import mlp, run_local, vectors
from test_fragments import Islands, adamw
from test_same_bits import assert_same_bits, building, by_hand, job, script
from torch import nn

from topotrain.config.job import (
    ChangeMethod,
    ConfigError,
    Exponential,
    FixedStep,
    Inverse,
    InverseT,
    Keep,
    LRGen,
    Step,
    Updater,
    UpdaterType,
)
from topotrain.config.job import Linear as LinearConf
from topotrain.core.optim.lr_schedules import lr
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds
from topotrain.extensions.outer_optimizer.outer_schedule import OuterSchedule

SCHEDULES = {
    "linear": LRGen(type=ChangeMethod.kLinear, base_lr=0.7, linear_conf=LinearConf(change_freq=3, final_lr=0.1)),
    "step": LRGen(type=ChangeMethod.kStep, base_lr=0.7, step_conf=Step(change_freq=2, gamma=0.3)),
    "fixed step": LRGen(
        type=ChangeMethod.kFixedStep, fixedstep_conf=FixedStep(step=(0, 1, 3), step_lr=(0.7, 0.2, 0.05))
    ),
    "exponential": LRGen(type=ChangeMethod.kExponential, base_lr=0.7, exponential_conf=Exponential(change_freq=2)),
    "inverse": LRGen(type=ChangeMethod.kInverse, base_lr=0.7, inverse_conf=Inverse(gamma=0.5, pow=0.75)),
    "inverse t": LRGen(type=ChangeMethod.kInverseT, base_lr=0.7, inverset_conf=InverseT(final_lr=2.0)),
}


def nesterov(schedule: LRGen) -> Updater:
    return Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=schedule)


class BySchedule(torch.optim.SGD):
    """torch's SGD with a rate that is set before each step, by hand."""

    def __init__(self, parameters: Any, rates: Updater) -> None:
        super().__init__(parameters, lr=1.0, momentum=0.9, nesterov=True)
        self.rates, self.rounds = rates, 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = lr(self.rates, self.rounds)
        self.rounds += 1
        super().step(closure)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_job_has_the_bits_of_rates_that_are_set_by_hand(name: str, groups: int) -> None:
    outer, batches = nesterov(SCHEDULES[name]), vectors(groups * 14)
    torch.manual_seed(1)
    agreed = mlp()
    parts, loss = [batches[group::groups] for group in range(groups)], nn.functional.cross_entropy
    by_hand()(agreed, adamw, BySchedule(agreed.parameters(), outer), loss, parts, 3)
    found = run_local(scheduled(groups, outer), building(mlp, adamw), script(batches, groups))
    assert_same_bits(found.values, dict(agreed.named_parameters()))


def scheduled(groups: int, outer: Updater, **cluster: Any) -> Any:
    made = job(groups, 3, nservers_per_group=2, **cluster)
    return replace(made, cluster=replace(made.cluster, outer=outer))


def test_each_fragment_counts_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, batches = nesterov(SCHEDULES["linear"]), vectors(2 * 18)
    rule = (outer, lambda parameters: BySchedule(parameters, outer))
    monkeypatch.setitem(test_same_bits.OUTER, "scheduled", rule)
    islands = Islands(2, 3, "scheduled", Keep.kAdd, 0.5)
    for number in range(18):
        islands.step(batches[2 * number : 2 * number + 2])
        islands.push()
        islands.take(False)
    assert [each.rounds for each in islands.outer] == [6, 6, 6]
    # The reference pushes what is left in two more rounds.
    for _ in range(2):
        islands.push(last=True)
        islands.rounds += 1
    found = run_local(scheduled(2, outer, fragments=3), building(mlp, adamw), script(batches, 2))
    assert_same_bits(found.values, dict(islands.agreed.named_parameters()))


def test_a_constant_rate_is_not_touched() -> None:
    constant = OuterSchedule(nesterov(LRGen(type=ChangeMethod.kFixed, base_lr=0.7)))
    assert constant.settings(b"as it was sent", "", 0, 5) == b"as it was sent"


SPEC = json.dumps(
    {"optimizers": [["torch.optim.SGD", 2], ["torch.optim.SGD", 1]], "groups": [{}, {}, {}], "assignment": [0, 1, 2]}
)


def test_rates_of_parameters_are_scaled() -> None:
    """`lr_scale` of the block's `param` holds in each round, and for the fragment of the round alone."""
    hyper = json.dumps([{"lr": 0.7, "lr_scale": 1.0}, {"lr": 1.4, "lr_scale": 2.0}, {"lr": 0.7, "lr_scale": 1.0}])
    schedule = OuterSchedule(nesterov(SCHEDULES["step"]))
    rates = [group["lr"] for group in json.loads(schedule.settings(hyper.encode(), SPEC, 0, 2))]
    assert rates == [0.7 * 0.3, 0.7 * 0.3 * 2.0, 0.7]
    rates = [group["lr"] for group in json.loads(schedule.settings(hyper.encode(), SPEC, 1, 4))]
    assert rates == [0.7, 1.4, 0.7 * 0.3**2]


def test_a_resumed_job_goes_on_at_its_round() -> None:
    server = SimpleNamespace(groups=(0, 1), state=SimpleNamespace(known=SimpleNamespace(schema=None)))
    made = scheduled(2, nesterov(SCHEDULES["step"]), fragments=3)
    resumed = OuterRounds(server, made, None, (4, 4, 3))  # type: ignore[arg-type]
    assert resumed.facts() == {"rounds": [4, 4, 3]}
    assert resumed.history.add(2, (0, 1)).number == 3
    assert resumed.facts() == {"rounds": [4, 4, 4]}
    other = OuterRounds(server, made, None, (4, 4))  # type: ignore[arg-type]
    assert other.facts() == {"rounds": [0, 0, 0]}, "of another number of fragments"
    copy = OuterRounds(server, made)  # type: ignore[arg-type]
    copy.load_state_dict(resumed.state_dict())
    assert copy.facts() == resumed.facts()


@pytest.mark.parametrize("kind", [kind for kind in ChangeMethod if kind not in (ChangeMethod.kFixed,)])
def test_a_schedule_needs_its_block(kind: ChangeMethod) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.outer\.learning_rate\.") as refused:
        scheduled(1, nesterov(LRGen(type=kind, base_lr=0.7)))
    if kind is ChangeMethod.kUserChange:
        assert "learning_rate.type = kUserChange: must be one of kFixed, kLinear" in str(refused.value)
    else:
        assert f"is required by {kind.value}, such as" in str(refused.value)
