"""Seven schedules by their formulas, and as functions of the step alone."""

import random

import pytest

from topotrain.config.job import (
    ChangeMethod,
    ConfigError,
    Exponential,
    FixedStep,
    Inverse,
    InverseT,
    Linear,
    LRGen,
    Step,
    Updater,
)
from topotrain.core.optim.lr_schedules import lr

SCHEDULES: dict[ChangeMethod, tuple[LRGen, dict[int, float]]] = {
    gen.type: (gen, points)
    for gen, points in [
        (LRGen(ChangeMethod.kFixed, base_lr=0.1), {0: 0.1, 10**6: 0.1}),
        (
            LRGen(ChangeMethod.kLinear, base_lr=1.0, linear_conf=Linear(final_lr=0.2, change_freq=10)),
            {0: 1.0, 5: 0.6, 10: 0.2, 11: 0.2, 10**6: 0.2},  # never below final_lr
        ),
        (
            LRGen(ChangeMethod.kExponential, base_lr=1.0, exponential_conf=Exponential(change_freq=10)),
            {0: 1.0, 5: 2**-0.5, 10: 0.5, 30: 0.125, 10**5: 0.0},
        ),
        (
            LRGen(ChangeMethod.kInverseT, base_lr=1.0, inverset_conf=InverseT(final_lr=2.0)),
            {0: 1.0, 2: 0.5, 6: 0.25},
        ),
        (
            LRGen(ChangeMethod.kInverse, base_lr=1.0, inverse_conf=Inverse(gamma=0.5, pow=2.0)),
            {0: 1.0, 2: 0.25, 6: 0.0625},
        ),
        (
            LRGen(ChangeMethod.kStep, base_lr=1.0, step_conf=Step(change_freq=10, gamma=0.5)),
            {0: 1.0, 9: 1.0, 10: 0.5, 19: 0.5, 20: 0.25},  # stairs
        ),
        (
            LRGen(ChangeMethod.kFixedStep, fixedstep_conf=FixedStep(step=(5, 10, 20), step_lr=(0.3, 0.2, 0.1))),
            {0: 0.3, 5: 0.3, 9: 0.3, 10: 0.2, 19: 0.2, 20: 0.1, 10**6: 0.1},
        ),
    ]
}


def test_all_seven_are_here() -> None:
    assert SCHEDULES.keys() == set(ChangeMethod) - {ChangeMethod.kUserChange}


@pytest.mark.parametrize("method", SCHEDULES)
def test_the_formula(method: ChangeMethod) -> None:
    gen, points = SCHEDULES[method]
    for step, rate in points.items():
        assert lr(Updater(learning_rate=gen), step) == pytest.approx(rate, rel=1e-12), step


@pytest.mark.parametrize("method", SCHEDULES)
def test_defect_11_steps_may_come_in_any_order(method: ChangeMethod) -> None:
    updater = Updater(learning_rate=SCHEDULES[method][0])
    steps = list(range(40))
    in_order = [lr(updater, step) for step in steps]
    shuffled = random.Random(0).sample(steps * 2, len(steps) * 2)
    assert {step: lr(updater, step) for step in shuffled} == dict(zip(steps, in_order, strict=True))


@pytest.mark.parametrize("method", sorted(set(SCHEDULES) - {ChangeMethod.kFixed}))
def test_a_missing_block_is_named(method: ChangeMethod) -> None:
    with pytest.raises(ConfigError, match=r"updater\.learning_rate\.\w+_conf: is required"):
        lr(Updater(learning_rate=LRGen(method)), 0)


def test_no_schedule_and_a_users_schedule_are_named() -> None:
    with pytest.raises(ConfigError, match=r"updater\.learning_rate: is required"):
        lr(Updater(), 0)
    with pytest.raises(ConfigError, match="kUserChange: must be one of kFixed"):
        lr(Updater(learning_rate=LRGen()), 0)
