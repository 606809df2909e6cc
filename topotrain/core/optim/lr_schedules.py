"""SINGA's seven learning-rate schedules.

A rate is a pure function of the step, because steps may repeat, jump or go back after a restart.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from topotrain.config.job import ChangeMethod, ConfigError, LRGen, Updater

_Conf = TypeVar("_Conf")
_FIELD = "updater.learning_rate"


def lr(updater: Updater, step: int) -> float:
    """Return the learning rate of `step`, counted from 0, before any `lr_scale`.

    Raises:
        ConfigError: the updater has no schedule or the user's own, or lacks the block that its type needs.
    """
    schedule = updater.learning_rate
    if schedule is None:
        raise ConfigError(_FIELD, None, "is required, such as learning_rate { type: kFixed base_lr: 0.1 }")
    method = _METHODS.get(schedule.type)
    if method is None:
        raise ConfigError(f"{_FIELD}.type", schedule.type, f"must be one of {', '.join(m.value for m in _METHODS)}")
    return method(schedule, step)


def _fixed(schedule: LRGen, step: int) -> float:
    return schedule.base_lr


def _linear(schedule: LRGen, step: int) -> float:
    """From base_lr to final_lr in change_freq steps, then final_lr."""
    conf = _needed(schedule.linear_conf, "linear_conf")
    # SINGA has no bound here, and goes on below zero.
    done = min(step / conf.change_freq, 1.0)
    return (1 - done) * schedule.base_lr + done * conf.final_lr


def _exponential(schedule: LRGen, step: int) -> float:
    """Halved every change_freq steps, continuously."""
    # Not 2 ** x, which overflows after 1,024 halvings.
    return float(schedule.base_lr * 0.5 ** (step / _needed(schedule.exponential_conf, "exponential_conf").change_freq))


def _inverse_t(schedule: LRGen, step: int) -> float:
    return schedule.base_lr / (1 + step / _needed(schedule.inverset_conf, "inverset_conf").final_lr)


def _inverse(schedule: LRGen, step: int) -> float:
    conf = _needed(schedule.inverse_conf, "inverse_conf")
    return float(schedule.base_lr * (1 + conf.gamma * step) ** -conf.pow)


def _step(schedule: LRGen, step: int) -> float:
    """Multiplied by gamma after every change_freq steps."""
    conf = _needed(schedule.step_conf, "step_conf")
    return float(schedule.base_lr * conf.gamma ** (step // conf.change_freq))


def _fixed_step(schedule: LRGen, step: int) -> float:
    """Return step_lr of the last entry reached by `step`, or of the first entry."""
    conf = _needed(schedule.fixedstep_conf, "fixedstep_conf")
    reached = sum(step >= start for start in conf.step)
    return conf.step_lr[max(reached - 1, 0)]


def _needed(conf: _Conf | None, name: str) -> _Conf:
    if conf is None:
        raise ConfigError(f"{_FIELD}.{name}", None, "is required by this type of schedule")
    return conf


_METHODS: Mapping[ChangeMethod, Callable[[LRGen, int], float]] = MappingProxyType(
    {
        ChangeMethod.kFixed: _fixed,
        ChangeMethod.kLinear: _linear,
        ChangeMethod.kExponential: _exponential,
        ChangeMethod.kInverseT: _inverse_t,
        ChangeMethod.kInverse: _inverse,
        ChangeMethod.kStep: _step,
        ChangeMethod.kFixedStep: _fixed_step,
    }
)
