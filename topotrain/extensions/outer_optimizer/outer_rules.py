"""Combinations of job fields that an outer optimizer excludes."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from topotrain.config.combinations import Combination
from topotrain.config.job import (
    FOREIGN,
    Agreement,
    Algorithm,
    Apply,
    ChangeMethod,
    Correction,
    Grads,
    Keep,
    Merge,
    Pace,
    Placement,
    Pull,
    Reduce,
    Schedule,
    Updater,
    UpdaterType,
    Weigh,
)

_TYPES = ", ".join(kind.value for kind in UpdaterType if kind is not UpdaterType.kUserUpdater)
_USUAL = ", ".join(kind.value for kind in UpdaterType if kind is not UpdaterType.kDelayedNesterov)
_NESTEROV = (UpdaterType.kNesterov, UpdaterType.kDelayedNesterov)
_DELTA = next(field.default for field in fields(Updater) if field.name == "delta")


def _of_outer(field: str, refused: Callable[[Updater], object], accepted: str) -> Combination:
    """Refuse values of a field of the outer optimizer."""
    return Combination(f"cluster.outer.{field}", lambda c: c.outer and refused(c.outer), accepted, "cluster")


def _with_outer(field: str, refused: Callable[[Any], object], accepted: str) -> Combination:
    """Refuse values of a field of the job or the cluster with an outer optimizer."""
    inside = "cluster" if field.startswith("cluster.") else ""
    outer: Callable[[Any], object] = (lambda c: c.outer) if inside else (lambda j: j.cluster.outer)
    return Combination(field, lambda b: outer(b) and refused(b), f"{accepted} with cluster.outer", inside)


_CONSTANT = "a schedule such as learning_rate { type: kFixed base_lr: 0.7 }"

_CONF_OF = {
    ChangeMethod.kLinear: ("linear_conf", "{ change_freq: 100 final_lr: 0.1 }"),
    ChangeMethod.kExponential: ("exponential_conf", "{ change_freq: 100 }"),
    ChangeMethod.kInverseT: ("inverset_conf", "{ final_lr: 100 }"),
    ChangeMethod.kInverse: ("inverse_conf", "{ gamma: 0.1 pow: 0.5 }"),
    ChangeMethod.kStep: ("step_conf", "{ change_freq: 100 gamma: 0.5 }"),
    ChangeMethod.kFixedStep: ("fixedstep_conf", "{ step: 0 step: 100 step_lr: 0.7 step_lr: 0.3 }"),
}
"""The block that each type of schedule needs, and one that is accepted. Its steps are rounds."""


_CONF_OF_TYPE = {
    UpdaterType.kRMSProp: "rmsprop_conf",
    UpdaterType.kAdaDelta: "adadelta_conf",
    UpdaterType.kAdam: "adam_conf",
    UpdaterType.kAdamMax: "adammax_conf",
}
_WITHOUT_DELTA = (UpdaterType.kSGD, *_NESTEROV)
"""Types that add nothing to a root."""


def _only_of_type(kind: UpdaterType) -> Combination:
    """Refuse the block of one type with another type."""
    name = _CONF_OF_TYPE[kind]
    accepted = f"must not be given without type: {kind.value}, which alone uses it"
    return _of_outer(name, lambda u: getattr(u, name) is not None and u.type is not kind, accepted)


def _only_of_schedule(kind: ChangeMethod) -> Combination:
    """Refuse the block of one schedule with another schedule."""
    name, _ = _CONF_OF[kind]
    return _of_outer(
        f"learning_rate.{name}",
        lambda u: u.learning_rate and u.learning_rate.type is not kind and getattr(u.learning_rate, name) is not None,
        f"must not be given without learning_rate.type: {kind.value}, which alone uses it",
    )


def _needs_conf(kind: ChangeMethod) -> Combination:
    """Refuse a schedule without the block that its type needs."""
    name, example = _CONF_OF[kind]
    return _of_outer(
        f"learning_rate.{name}",
        lambda u: u.learning_rate and u.learning_rate.type is kind and getattr(u.learning_rate, name) is None,
        f"is required by {kind.value}, such as {example}",
    )


COMBINATIONS = (
    _of_outer("type", lambda u: u.type is UpdaterType.kUserUpdater, f"must be one of {_TYPES}"),
    _of_outer("user_type", lambda u: u.user_type, "must not be given: the servers run one of SINGA's updaters"),
    _of_outer("learning_rate", lambda u: u.learning_rate is None, f"is required: {_CONSTANT}"),
    _of_outer(
        "learning_rate.type",
        lambda u: u.learning_rate is not None and u.learning_rate.type is ChangeMethod.kUserChange,
        f"must be one of {', '.join(kind.value for kind in (ChangeMethod.kFixed, *_CONF_OF))}: {_CONSTANT}",
    ),
    *map(_needs_conf, _CONF_OF),
    *map(_only_of_schedule, _CONF_OF),
    _of_outer(
        "learning_rate.user_type",
        lambda u: u.learning_rate and u.learning_rate.user_type,
        "must not be given: the servers follow one of SINGA's schedules",
    ),
    _of_outer(
        "learning_rate.base_lr",
        lambda u: u.learning_rate and not u.learning_rate.base_lr > 0,
        "must be a number > 0: with 0 no round changes the values",
    ),
    _of_outer(
        "learning_rate.fixedstep_conf.step_lr",
        lambda u: (rates := u.learning_rate and u.learning_rate.fixedstep_conf) and not min(rates.step_lr) > 0,
        "must be numbers > 0: with 0 no round changes the values",
    ),
    _of_outer(
        "momentum",
        lambda u: u.momentum >= 1,
        "must be a number >= 0 and < 1: with 1 or more the steps of the servers grow without bound",
    ),
    _of_outer(
        "momentum",
        lambda u: u.type in _NESTEROV and not u.momentum,
        "must be > 0 and < 1 for kNesterov and kDelayedNesterov",
    ),
    _of_outer(
        "momentum",
        lambda u: u.type not in (UpdaterType.kSGD, *_NESTEROV) and u.momentum,
        "must be 0 for types other than kSGD, kNesterov and kDelayedNesterov, which do not use it",
    ),
    _of_outer(
        "delay",
        lambda u: u.delay != 1 and u.type is not UpdaterType.kDelayedNesterov,
        "must be 1 without type: kDelayedNesterov",
    ),
    Combination(
        "updater.type",
        lambda j: j.updater and j.updater.type is UpdaterType.kDelayedNesterov,
        f"must be one of {_USUAL}: kDelayedNesterov is a type of cluster.outer",
        "",
    ),
    Combination(
        "updater.delay",
        lambda j: j.updater and j.updater.delay != 1,
        "must be 1: it belongs to type kDelayedNesterov of cluster.outer",
        "",
    ),
    _of_outer(
        "rmsprop_conf",
        lambda u: u.type is UpdaterType.kRMSProp and u.rmsprop_conf is None,
        "is required by kRMSProp, such as { rho: 0.9 }",
    ),
    *map(_only_of_type, _CONF_OF_TYPE),
    _of_outer(
        "delta",
        lambda u: u.type in _WITHOUT_DELTA and u.delta != _DELTA,
        f"must be {_DELTA} for kSGD, kNesterov and kDelayedNesterov, which do not use it",
    ),
    _of_outer("clip_norm", lambda u: u.clip_norm is not None, "must not be given: clip gradients in the script"),
    _of_outer("clip_low", lambda u: u.clip_low < u.clip_high, "must not be below clip_high: clip in the script"),
    Combination(
        "cluster.weigh",
        lambda c: c.weigh is not Weigh.kSamples and not c.outer,
        "must be kSamples without cluster.outer: there is nothing to weigh",
    ),
    Combination(
        "cluster.weigh",
        lambda j: j.cluster.weigh is not Weigh.kSamples and j.reduce is not Reduce.kMean,
        "must be kSamples with reduce: kSum: differences are added up, and no weight is used",
        "",
    ),
    Combination(
        "cluster.merge",
        lambda c: c.merge is not Merge.kMean and not c.outer,
        "must be kMean without cluster.outer: there is nothing to merge",
    ),
    Combination(
        "reduce",
        lambda j: j.cluster.merge is Merge.kRadial and j.reduce is not Reduce.kMean,
        "must be kMean with cluster.merge: kRadial: its length is a mean",
        "",
    ),
    Combination("cluster.fragments", lambda c: c.fragments > 1 and not c.outer, "must be 1 without cluster.outer"),
    Combination(
        "cluster.sync_freq",
        lambda c: c.outer and c.sync_freq % c.fragments,
        "must be a multiple of fragments: one fragment is exchanged after every sync_freq / fragments steps",
    ),
    Combination("cluster.overlap", lambda c: c.overlap and not c.outer, "must be 0 without cluster.outer"),
    Combination(
        "cluster.overlap",
        lambda c: c.outer and c.overlap > c.sync_freq // c.fragments - 1,
        "must be at most sync_freq / fragments - 1: one exchange at a time",
    ),
    Combination(
        "cluster.keep",
        lambda c: c.keep is not Keep.kAdd and not c.trains_in_exchange,
        "must be kAdd with overlap: 0 and quorum: 0, where no step is made during an exchange",
    ),
    Combination("cluster.quorum", lambda c: c.quorum and not c.outer, "must be 0 without cluster.outer"),
    Combination(
        "cluster.quorum", lambda c: c.quorum > c.nworker_groups, "must be at most nworker_groups; 0: all that are there"
    ),
    Combination(
        "cluster.slack",
        lambda c: c.slack != 0.9 and not c.quorum,
        "must be 0.9 with quorum: 0, where each round waits for all workers",
    ),
    Combination(
        "cluster.overlap",
        lambda c: c.overlap and c.quorum,
        "must be 0 with cluster.quorum, where new values are taken as soon as they are there",
    ),
    Combination(
        "cluster.blend", lambda c: c.blend != 0.5 and c.keep is not Keep.kBlend, "must be 0.5 without keep: kBlend"
    ),
    Combination(
        "cluster.pace",
        lambda c: c.pace is not Pace.kAuto and not c.outer,
        "must be kAuto without cluster.outer: there are no rounds",
    ),
    Combination(
        "cluster.pace",
        lambda c: c.pace is Pace.kTime and not c.quorum,
        "must be kAuto or kSteps with quorum: 0, where all workers push after the same number of steps",
    ),
    _with_outer("cluster.nserver_groups", lambda c: c.nserver_groups != 1, "must be 1"),
    _with_outer(
        "cluster.share_memory", lambda c: not c.share_memory, "must not be given, since each worker has its own values,"
    ),
    _with_outer("cluster.backup", lambda c: c.backup, "must be 0"),
    _with_outer("cluster.n_push", lambda c: c.n_push != 1, "must be 1, and sync_freq counts the local steps,"),
    _with_outer("cluster.n_fetch", lambda c: c.n_fetch != 1, "must be 1, and sync_freq counts the local steps,"),
    _with_outer("cluster.max_staleness", lambda c: c.max_staleness is not None, "must not be given"),
    _with_outer("cluster.agreement", lambda c: c.agreement is not Agreement.kMaster, "must not be given"),
    _with_outer("cluster.engine", lambda c: c.engine in FOREIGN, "must be kAuto or kOwn"),
    _with_outer("cluster.algorithm", lambda c: c.algorithm is not Algorithm.kAuto, "must be kAuto"),
    _with_outer("apply", lambda j: j.apply is not Apply.kAtStep, "must be kAtStep"),
    _with_outer("grads", lambda j: j.grads is not Grads.kVisible, "must be kVisible"),
    _with_outer("pull", lambda j: j.pull is not Pull.kStep, "must be kStep"),
    _with_outer(
        "correction", lambda j: j.correction in (Correction.kRate, Correction.kMomentum), "must be kAuto or kNone"
    ),
    _with_outer("microbatches", lambda j: j.microbatches != 1, "must be 1, since no model is split,"),
    _with_outer("schedule", lambda j: j.schedule is not Schedule.kGPipe, "must not be given, since no model is split,"),
    _with_outer("warmup_steps", lambda j: j.warmup_steps, "must be 0"),
    _with_outer("partition", lambda j: j.partition, "must not be given"),
    _with_outer("placement", lambda j: j.placement is not Placement.kManual, "must be kManual"),
    _with_outer(
        "updater.clip_norm",
        lambda j: j.updater is not None and j.updater.clip_norm is not None,
        "must not be given, and the script clips by torch.nn.utils.clip_grad_norm_,",
    ),
    _with_outer(
        "updater.clip_low",
        lambda j: j.updater is not None and j.updater.clip_low < j.updater.clip_high,
        "must not be below clip_high, and the script clips by torch.nn.utils.clip_grad_value_,",
    ),
)
