"""A Job checks itself, field by field and across fields, and its digest is what processes must agree on."""

import dataclasses
import itertools
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from topotrain.config.combinations import Combination, contributed, contributed_to
from topotrain.config.job import (
    COMBINATIONS,
    AdaDelta,
    Adam,
    AdamMax,
    Agreement,
    Cluster,
    Compression,
    ConfigError,
    Exponential,
    FixedStep,
    Inverse,
    InverseT,
    Job,
    Linear,
    Link,
    LRGen,
    OnFailure,
    Param,
    Partition,
    Pull,
    Reduce,
    RMSProp,
    Shard,
    Slicing,
    Step,
    Updater,
)
from topotrain.config.topology import layout


def test_errors_name_field_value_and_what_would_be_accepted() -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(nworker_groups=0)
    error = caught.value
    assert (error.field, error.value, error.accepted) == ("cluster.nworker_groups", 0, "must be a whole number >= 1")
    assert str(error) == "cluster.nworker_groups = 0: must be a whole number >= 1"
    assert str(error.at("job.conf:3:5")) == f"job.conf:3:5: {error}"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(nserver_groups=-1), "cluster.nserver_groups = -1: must be a whole number >= 0"),
        (lambda: Cluster(nworkers_per_group=True), "nworkers_per_group = true: must be a whole"),
        (lambda: Cluster(nworkers_per_group=2.0), "nworkers_per_group = 2.0: must be a whole"),  # type: ignore[arg-type]
        (lambda: Cluster(nworkers_per_group=2**31), "must be a whole number >= 1"),
        (lambda: Cluster(start_port=70000), "start_port = 70000: must be a whole number, 1 to 65535"),
        (lambda: Cluster(share_memory=1), "share_memory = 1: must be true or false"),  # type: ignore[arg-type]
        (lambda: Cluster(workspace=None), "workspace: must be a text"),  # type: ignore[arg-type]
        (
            lambda: Cluster(agreement="kMasters"),  # type: ignore[arg-type]
            "agreement = 'kMasters': must be one of kMaster, kRingAverage, kElastic, kGossip",
        ),
        (lambda: Cluster(shares="12"), "shares = '12': must be a list"),  # type: ignore[arg-type]
        (lambda: Cluster(nworkers_per_group=2, shares=(1, -1)), r"shares\[1\] = -1: must be a number >= 0"),
        (lambda: Cluster(shares=(float("nan"),)), "must be a number >= 0"),
        (lambda: Cluster(shares=(10**400,)), "must be a number >= 0"),
        (lambda: Job(name=""), "name = '': must be a text that is not empty"),
        (lambda: Job(seed=2**63), "seed = "),
        (lambda: Cluster(slice_bytes=100), "cluster.slice_bytes = 100: must be 0, or a whole number, 4096 to 67108864"),
        (lambda: Cluster(lease_s=0.5), "cluster.lease_s = 0.5: must be seconds, 1 to 3600"),
        (lambda: Job(cluster=None), "cluster: must be a Cluster"),  # type: ignore[arg-type]
        (lambda: Job(args="x"), "args = 'x': must be a list"),  # type: ignore[arg-type]
        (lambda: Updater(clip_norm=0), "updater.clip_norm = 0: must be a number > 0"),
        (lambda: Updater(param=(Param(match="("),)), "updater.param.match = '\\(': must be a regular expression"),
        (lambda: RMSProp(rho=1.0), "updater.rmsprop_conf.rho = 1.0: must be a number >= 0 and < 1"),
        (lambda: LRGen(base_lr=-0.1), "updater.learning_rate.base_lr = -0.1: must be"),
        (lambda: Partition(partition_dim=2), "partition.partition_dim = 2: must be a whole number, -1 to 1"),
        (lambda: Partition(match="*"), "partition.match = '\\*': must be a regular expression"),
        (lambda: Job(microbatches=0), "microbatches = 0: must be a whole number >= 1"),
        (
            lambda: Job(**SPLIT, cluster=RING),  # type: ignore[arg-type]
            "cluster.algorithm = kRing: must be kAuto, straight to each server, where one model is split",
        ),
    ],
)
def test_a_value_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


ROWS = (*COMBINATIONS, *contributed())
IN_MEMORY = Cluster(nworker_groups=2, nworkers_per_procs=2)
UNSHARED = dataclasses.replace(IN_MEMORY, share_memory=False)
PAIR = {"nworkers_per_group": 2, "nservers_per_group": 2}
TWO_COPIES = {"nworker_groups": 2, "nserver_groups": 2}
RING = Cluster(algorithm="kRing", **PAIR)  # type: ignore[arg-type]
ON_ARRIVAL = {"apply": "kOnArrival", "grads": "kHidden"}
SPLIT = {"partition": (Partition(match="fc", partition_dim=1),)}
SPARE = {"nworkers_per_group": 3, "backup": 1}
BACKUP = {"grads": "kHidden", "per_worker_batch": True, "cluster": Cluster(**SPARE)}  # type: ignore[arg-type]
AT_1 = {"partition": (Partition(partition_dim=-1, location=1),)}


def outer(**changes: Any) -> dict[str, Any]:
    """The fields of a cluster with an outer optimizer."""
    fields = {"type": "kSGD", "learning_rate": LRGen(type="kFixed", base_lr=0.7)} | changes  # type: ignore[arg-type]
    return {"outer": Updater(**fields)}


def with_rates(*rates: float) -> LRGen:
    """A schedule with these rates, each for ten rounds."""
    conf = FixedStep(step=tuple(range(0, 10 * len(rates), 10)), step_lr=rates)
    return LRGen(type="kFixedStep", fixedstep_conf=conf)  # type: ignore[arg-type]


OUTER = {"cluster": Cluster(**outer())}
RADIAL = {"cluster": Cluster(merge="kRadial", **outer())}  # type: ignore[arg-type]
DELAYED = outer(type="kDelayedNesterov", momentum=0.9)["outer"]
PAIR_OF_OUTER = {"cluster": Cluster(nworker_groups=2, **outer())}

AUTO = {"cluster": Cluster(auto=True)}
COPIES = {"replicas": 2, "nservers_per_group": 2, "transport": "kTcp"}
CHOSEN: list[dict[str, Any]] = [
    *({name: 2} for name in ("nworker_groups", "nserver_groups", "nworkers_per_group", "nservers_per_group")),
    *({"nworkers_per_procs": 2}, {"nservers_per_procs": 2}, {"server_worker_separate": True}, {"sync_freq": 2}),
    *({"shares": (1.0,)}, {"max_staleness": 0}, {"n_push": 2}, {"n_fetch": 2}, {"agreement": "kRingAverage"}),
    *({"engine": "kGloo"}, {"algorithm": "kRing"}, {"compression": "kInt8"}, {"compression_ratio": 0.5}),
    *(COPIES, outer()),
]
"""Fields that `auto` decides, each alone."""
AUTOMATIC = [
    (Cluster, {**given, "auto": True} if given is not COPIES else {"replicas": 2, "auto": True}, given)
    for given in CHOSEN
]

# Of each row of ROWS, in order: the class, a refused combination, and a neighbor of it that is allowed.
SCHEDULES = [
    (
        Cluster,
        outer(learning_rate=LRGen(type=kind)),  # type: ignore[arg-type]
        outer(learning_rate=LRGen(type=kind, **{f"{kind[1:].lower()}_conf": conf})),  # type: ignore[arg-type]
    )
    for kind, conf in (
        ("kLinear", Linear(change_freq=5, final_lr=0.1)),
        ("kExponential", Exponential(change_freq=5)),
        ("kInverseT", InverseT(final_lr=0.1)),
        ("kInverse", Inverse(gamma=0.1, pow=0.5)),
        ("kStep", Step(change_freq=5)),
        ("kFixedStep", FixedStep(step=(0,), step_lr=(0.1,))),
    )
]
"""An outer schedule without the block of its type, and with it."""
OTHER_SCHEDULES = [
    (
        Cluster,
        outer(learning_rate=dataclasses.replace(allowed["outer"].learning_rate, type="kFixed")),  # type: ignore[arg-type]
        allowed,
    )
    for _, _, allowed in SCHEDULES
]
"""An outer schedule with the block of another type, and with that of its own."""
OTHER_TYPES = [
    (Cluster, outer(**{name: conf}), outer(type=kind, **{name: conf}))
    for kind, name, conf in (
        ("kRMSProp", "rmsprop_conf", RMSProp(rho=0.9)),
        ("kAdaDelta", "adadelta_conf", AdaDelta(rho=0.8)),
        ("kAdam", "adam_conf", Adam(beta1=0.8)),
        ("kAdamMax", "adammax_conf", AdamMax(beta1=0.8)),
    )
]
"""An outer optimizer with the block of another type, and with that of its own."""

EXAMPLES: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (Job, {"apply": "kOnArrival"}, ON_ARRIVAL),
    (Job, ON_ARRIVAL | {"updater": Updater(clip_norm=1)}, ON_ARRIVAL | {"updater": Updater()}),
    (Job, ON_ARRIVAL | {"cluster": IN_MEMORY}, ON_ARRIVAL | {"cluster": UNSHARED}),
    (Job, ON_ARRIVAL | {"cluster": Cluster(slicing="kTensor")}, ON_ARRIVAL),  # type: ignore[arg-type]
    (Job, ON_ARRIVAL | {"cluster": Cluster(n_push=2)}, ON_ARRIVAL),
    (Job, {"pull": "kLazy", "cluster": IN_MEMORY}, {"pull": "kLazy", "cluster": UNSHARED}),
    (Job, {"pull": "kLazy", "cluster": Cluster(n_fetch=2)}, {"pull": "kLazy"}),
    (Cluster, {"n_push": 2, "nworkers_per_group": 2}, {"n_push": 2}),
    (Cluster, {"n_fetch": 2, "nworkers_per_group": 2}, {"n_fetch": 2}),
    (Cluster, {"shares": (1, 1)}, {"shares": (1, 1), "nworkers_per_group": 2}),
    (
        Cluster,
        {"max_staleness": 0, "nserver_groups": 0, "nworker_groups": 2},
        {"max_staleness": 0, "nworker_groups": 2},
    ),
    (Cluster, {"transport": "kShm", "link": Link(), "nworkers_per_group": 2}, {"transport": "kShm", "link": Link()}),
    (Updater, {"clip_low": 1.0, "clip_high": -1.0}, {"clip_low": -1.0, "clip_high": 1.0}),
    (FixedStep, {}, {"step": (0,), "step_lr": (1.0,)}),
    (FixedStep, {"step": (5, 5), "step_lr": (1, 1)}, {"step": (5, 6), "step_lr": (1, 1)}),
    (FixedStep, {"step": (5,)}, {"step": (5,), "step_lr": (1,)}),
    (Job, {"correction": "kRate"}, {"correction": "kRate", "cluster": Cluster(nworker_groups=2)}),
    (
        Job,
        {"correction": "kRate", "cluster": Cluster(nworker_groups=2, nserver_groups=2)},
        {"correction": "kMomentum", "cluster": Cluster(nworker_groups=2, nserver_groups=2)},
    ),
    (
        Job,
        {"correction": "kRate", "cluster": Cluster(nworker_groups=2), "apply": "kOnArrival", "grads": "kHidden"},
        {"correction": "kMomentum", "cluster": Cluster(nworker_groups=2), "apply": "kOnArrival", "grads": "kHidden"},
    ),
    (Cluster, outer(type="kUserUpdater"), outer()),
    (Cluster, outer(user_type="mine"), outer()),
    (Cluster, outer(learning_rate=None), outer()),
    (Cluster, outer(learning_rate=LRGen(type="kUserChange")), outer()),  # type: ignore[arg-type]
    *SCHEDULES,
    *OTHER_SCHEDULES,
    (
        Cluster,
        outer(learning_rate=LRGen(type="kFixed", base_lr=0.7, user_type="mine")),  # type: ignore[arg-type]
        outer(),
    ),
    (Cluster, outer(learning_rate=LRGen(type="kFixed", base_lr=0.0)), outer()),  # type: ignore[arg-type]
    (Cluster, outer(learning_rate=with_rates(0.7, 0.0)), outer(learning_rate=with_rates(0.7, 0.3))),
    (Cluster, outer(momentum=1.0), outer(momentum=0.99)),
    (Cluster, outer(type="kNesterov"), outer(type="kNesterov", momentum=0.9)),
    (Cluster, outer(type="kAdam", momentum=0.9), outer(type="kAdam")),
    (Cluster, outer(type="kNesterov", momentum=0.9, delay=2), outer(type="kDelayedNesterov", momentum=0.9, delay=2)),
    (Job, {"updater": DELAYED}, {"cluster": Cluster(outer=DELAYED)}),
    (Job, {"updater": Updater(delay=2)}, {"updater": Updater(delay=1)}),
    (Cluster, outer(type="kRMSProp"), outer(type="kRMSProp", rmsprop_conf=RMSProp(rho=0.9))),
    *OTHER_TYPES,
    (Cluster, outer(type="kNesterov", momentum=0.9, delta=1e-6), outer(type="kAdam", delta=1e-6)),
    (Cluster, outer(clip_norm=1.0), outer()),
    (Cluster, outer(clip_low=-1.0, clip_high=1.0), outer()),
    (Cluster, {"weigh": "kEqual"}, outer() | {"weigh": "kEqual"}),
    (
        Job,
        {"reduce": "kSum", "cluster": Cluster(weigh="kEqual", **outer())},  # type: ignore[arg-type]
        {"reduce": "kMean", "cluster": Cluster(weigh="kEqual", **outer())},  # type: ignore[arg-type]
    ),
    (Cluster, {"merge": "kRadial"}, outer() | {"merge": "kRadial"}),
    (Job, RADIAL | {"reduce": "kSum"}, OUTER | {"reduce": "kSum"}),
    (Cluster, {"fragments": 2, "sync_freq": 2}, outer() | {"fragments": 2, "sync_freq": 2}),
    (Cluster, outer() | {"fragments": 2, "sync_freq": 3}, outer() | {"fragments": 2, "sync_freq": 4}),
    (Cluster, {"overlap": 1}, outer() | {"overlap": 1, "sync_freq": 2}),
    (
        Cluster,
        outer() | {"overlap": 2, "sync_freq": 4, "fragments": 2},
        outer() | {"overlap": 1, "sync_freq": 4, "fragments": 2},
    ),
    (Cluster, outer() | {"keep": "kDrop", "sync_freq": 9}, outer() | {"keep": "kDrop", "overlap": 1, "sync_freq": 9}),
    (Cluster, {"quorum": 1}, outer() | {"quorum": 1}),
    (Cluster, outer() | {"quorum": 2}, outer() | {"quorum": 2, "nworker_groups": 2}),
    (Cluster, outer() | {"slack": 0.5}, outer() | {"slack": 0.5, "quorum": 1}),
    (Cluster, outer() | {"overlap": 1, "sync_freq": 2, "quorum": 1}, outer() | {"sync_freq": 2, "quorum": 1}),
    (
        Cluster,
        outer() | {"blend": 0.1, "overlap": 1, "sync_freq": 2},
        outer() | {"blend": 0.1, "overlap": 1, "sync_freq": 2, "keep": "kBlend"},
    ),
    (Cluster, {"pace": "kSteps"}, outer() | {"pace": "kSteps"}),
    (Cluster, outer() | {"pace": "kTime"}, outer() | {"pace": "kTime", "quorum": 1}),
    (Cluster, outer() | {"nserver_groups": 2, "nworker_groups": 2}, outer() | {"nworker_groups": 2}),
    (Cluster, outer() | {"share_memory": False}, outer()),
    (Cluster, outer() | {"backup": 1}, outer()),
    (Cluster, outer() | {"n_push": 2}, outer() | {"sync_freq": 2}),
    (Cluster, outer() | {"n_fetch": 2}, outer() | {"sync_freq": 2}),
    (Cluster, outer() | {"max_staleness": 0}, outer()),
    (Cluster, outer() | {"agreement": "kRingAverage"}, outer() | {"agreement": "kMaster"}),
    (Cluster, outer() | {"engine": "kGloo"}, outer() | {"engine": "kOwn"}),
    (Cluster, outer() | {"algorithm": "kRing"}, outer() | {"algorithm": "kAuto"}),
    (Job, OUTER | {"apply": "kOnArrival"}, OUTER),
    (Job, OUTER | {"grads": "kHidden"}, OUTER),
    (Job, OUTER | {"pull": "kLazy"}, OUTER),
    (Job, PAIR_OF_OUTER | {"correction": "kRate"}, PAIR_OF_OUTER),
    (Job, OUTER | {"microbatches": 4}, OUTER),
    (Job, OUTER | {"schedule": "k1F1B"}, OUTER),
    (Job, OUTER | {"warmup_steps": 1}, OUTER),
    (Job, OUTER | SPLIT, OUTER),
    (Job, OUTER | {"placement": "kAuto"}, OUTER),
    (Job, OUTER | {"updater": Updater(clip_norm=1)}, OUTER | {"updater": Updater()}),
    (Job, OUTER | {"updater": Updater(clip_low=-1, clip_high=1)}, OUTER | {"updater": Updater()}),
    (Job, ON_ARRIVAL | {"cluster": Cluster(engine="kGloo", **PAIR)}, ON_ARRIVAL | {"cluster": RING}),  # type: ignore[arg-type]
    (Cluster, {"engine": "kGloo", "nworkers_per_group": 2}, {"engine": "kGloo", **PAIR}),
    (Cluster, {"engine": "kGloo", "link": Link(), **PAIR}, {"algorithm": "kRing", "link": Link(), **PAIR}),
    (Cluster, {"algorithm": "kRing", "nworkers_per_group": 2}, {"algorithm": "kRing", **PAIR}),
    (Cluster, {"engine": "kNccl", "algorithm": "kTree", **PAIR}, {"engine": "kOwn", "algorithm": "kTree", **PAIR}),
    (Cluster, {"compression": "kFp16", "algorithm": "kRing", **PAIR}, {"compression": "kFp16", **PAIR}),
    (
        Cluster,
        {"compression": "kInt8", "nworker_groups": 2, "nworkers_per_procs": 2},
        {"compression": "kInt8", "nworker_groups": 2, "nworkers_per_procs": 2, "share_memory": False},
    ),
    (Cluster, {"backup": 1}, {"backup": 1, "nworkers_per_group": 2}),
    (Cluster, SPARE | {"nworker_groups": 2}, SPARE),
    (Cluster, SPARE | {"engine": "kGloo", "nservers_per_group": 3}, SPARE | {"nservers_per_group": 3}),
    (Cluster, SPARE | {"algorithm": "kRing", "nservers_per_group": 3}, SPARE | {"engine": "kOwn"}),
    (Cluster, SPARE | {"compression": "kFp16"}, SPARE),
    (Job, BACKUP | {"grads": "kVisible"}, BACKUP),
    (Job, BACKUP | {"apply": "kOnArrival"}, BACKUP),
    (Job, BACKUP | {"pull": "kLazy"}, BACKUP),
    (Job, BACKUP | {"per_worker_batch": False}, BACKUP),
    (Job, BACKUP | {"shard": "kLease"}, BACKUP | {"shard": "kStatic"}),
    (Job, BACKUP | SPLIT, BACKUP),
    (Job, BACKUP | {"placement": "kAuto"}, BACKUP),
    (Job, BACKUP | {"updater": Updater(clip_norm=1)}, BACKUP | {"updater": Updater(clip_low=-1, clip_high=1)}),
    (Cluster, {"agreement": "kGossip"}, TWO_COPIES | {"agreement": "kGossip"}),
    (
        Cluster,
        TWO_COPIES | {"agreement": "kGossip", "moving_rate": 0.5},
        TWO_COPIES | {"agreement": "kElastic", "moving_rate": 0.5},
    ),
    (Partition, {"location": 0}, {"location": 0, "partition_dim": -1}),
    (Job, AT_1, AT_1 | {"cluster": Cluster(nworkers_per_group=2)}),
    (Job, SPLIT | ON_ARRIVAL, SPLIT | {"grads": "kHidden"}),
    (Job, SPLIT | {"pull": "kLazy"}, {"pull": "kLazy"}),
    (Job, SPLIT | {"cluster": Cluster(n_push=2)}, SPLIT),
    (Job, {"placement": "kAuto", "cluster": Cluster(n_fetch=2)}, {"placement": "kAuto"}),
    (Job, SPLIT | {"cluster": Cluster(engine="kGloo", **PAIR)}, SPLIT | {"cluster": Cluster(engine="kOwn", **PAIR)}),  # type: ignore[arg-type]
    (Job, SPLIT | {"cluster": RING}, SPLIT | {"cluster": Cluster(**PAIR)}),
    *AUTOMATIC,
    (Job, SPLIT | AUTO, SPLIT),
    (Job, {"placement": "kAuto"} | AUTO, {"placement": "kAuto"}),
    (Job, {"start_groups": 1} | AUTO, {"start_groups": 1}),
    (Job, {"cluster": Cluster(**COPIES), "on_failure": "kStop"}, {"cluster": Cluster(**COPIES)}),  # type: ignore[arg-type]
    (Cluster, COPIES | {"transport": "kAuto"}, COPIES),
    (Cluster, COPIES | {"nworker_groups": 2, "nserver_groups": 2}, COPIES | {"nworker_groups": 2}),
    (Cluster, COPIES | {"nservers_per_group": 1}, COPIES),
    (Cluster, COPIES | {"nservers_per_procs": 2}, COPIES),
    (Cluster, COPIES | PAIR | {"algorithm": "kRing"}, COPIES | PAIR),
    (Cluster, COPIES | {"link": Link(bandwidth=10.0)}, COPIES),
    (Cluster, COPIES | SPARE, COPIES | {"nworkers_per_group": 3}),
]


@pytest.fixture
def everything_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of values that are not available yet count already."""
    monkeypatch.setattr(Cluster.__dataclass_fields__["compression"], "type", Compression)


@pytest.mark.usefixtures("everything_available")
@pytest.mark.parametrize(
    ("row", "example"), list(zip(ROWS, EXAMPLES, strict=True)), ids=lambda x: getattr(x, "field", "")
)
def test_fields_that_exclude_each_other(row: Combination, example: tuple[type, dict[str, Any], dict[str, Any]]) -> None:
    cls, refused, allowed = example
    cls(**allowed)
    with pytest.raises(ConfigError) as caught:
        cls(**refused)
    assert (caught.value.field, caught.value.accepted) == (row.field, row.accepted)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (
            outer(adam_conf=Adam(beta1=0.8)),
            "cluster.outer.adam_conf = { beta1: 0.8 }: must not be given without type: ",
        ),
        (
            outer(learning_rate=LRGen(type="kFixed", base_lr=1.0, step_conf=Step(change_freq=5))),  # type: ignore[arg-type]
            "cluster.outer.learning_rate.step_conf = { change_freq: 5 }: must not be given without learning_rate.type:",
        ),
        (outer(delta=0.5), "cluster.outer.delta = 0.5: must be 1e-08 for kSGD"),
        (outer() | {"fragments": 4, "sync_freq": 2}, "cluster.sync_freq = 2: must be a multiple of fragments"),
    ],
)
def test_what_an_outer_optimizer_would_ignore_is_named_as_a_job_file_has_it(
    refused: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(**refused)
    assert str(caught.value).startswith(words), caught.value


@pytest.mark.parametrize(
    ("cls", "refused", "line"),
    [
        (Cluster, outer() | {"algorithm": "kRing"}, "cluster.algorithm = kRing: must be kAuto with cluster.outer"),
        (Cluster, outer() | {"engine": "kGloo"}, "cluster.engine = kGloo: must be kAuto or kOwn with cluster.outer"),
        (Cluster, outer() | {"backup": 1}, "cluster.backup = 1: must be 0 with cluster.outer"),
        (Cluster, outer() | {"max_staleness": 0, "nserver_groups": 0, "nworker_groups": 2}, "with cluster.outer"),
        (Cluster, outer() | {"n_push": 2, "nworkers_per_group": 2}, "local steps, with cluster.outer"),
        (
            Cluster,
            outer() | {"agreement": "kGossip"},
            "cluster.agreement = kGossip: must not be given with cluster.outer",
        ),
        (Job, OUTER | {"apply": "kOnArrival"}, "apply = kOnArrival: must be kAtStep with cluster.outer"),
        (Job, OUTER | {"correction": "kRate"}, "correction = kRate: must be kAuto or kNone with cluster.outer"),
        (Job, OUTER | {"microbatches": 4}, "microbatches = 4: must be 1, since no model is split, with cluster.outer"),
        (Job, OUTER | AT_1, "must not be given with cluster.outer"),
        (Cluster, outer(momentum=1.5), "cluster.outer.momentum = 1.5: must be a number >= 0 and < 1: with 1 or more"),
        (
            Cluster,
            outer(learning_rate=LRGen(type="kFixed", base_lr=0)),  # type: ignore[arg-type]
            "cluster.outer.learning_rate.base_lr = 0.0: must be a number > 0: with 0 no round changes the values",
        ),
    ],
)
def test_where_an_outer_optimizer_is_the_reason_the_line_says_so(cls: type, refused: dict[str, Any], line: str) -> None:
    """Each of these fields has needs of its own, too, which would not help here."""
    with pytest.raises(ConfigError) as caught:
        cls(**refused)
    assert line in str(caught.value)


@pytest.mark.parametrize("keep", ["kBlend", "kDrop"])
def test_steps_of_an_exchange_may_be_lost_on_request(keep: str) -> None:
    """With one fragment, too: the documentation promises that batches count once for `keep: kAdd` alone."""
    for exchange in ({"overlap": 1, "sync_freq": 2}, {"quorum": 1}):
        assert Cluster(**outer(), **exchange, keep=keep).fragments == 1  # type: ignore[arg-type]
    promise = "With `keep: kAdd` and `fragments: 1` each batch counts exactly once"
    assert promise in (Path(__file__).parents[2] / "docs" / "islands.md").read_text()


@pytest.mark.usefixtures("everything_available")
@pytest.mark.parametrize(
    ("cls", "refused", "field"),
    [
        (Cluster, {"shares": (0.0,)}, "cluster.shares"),
        (Job, ON_ARRIVAL | {"updater": Updater(clip_low=-1, clip_high=1)}, "apply"),
        (Cluster, outer(type="kDelayedNesterov"), "cluster.outer.momentum"),
        (Cluster, outer() | {"nserver_groups": 0}, "cluster.nserver_groups"),
        (Cluster, outer() | {"sync_freq": 2, "fragments": 4}, "cluster.sync_freq"),
        (Cluster, outer() | {"engine": "kNccl", **PAIR}, "cluster.engine"),
        (Cluster, {"keep": "kDrop"}, "cluster.keep"),
        (Cluster, {"slack": 0.5}, "cluster.slack"),
        (Cluster, {"blend": 0.1}, "cluster.blend"),
        (Cluster, outer(type="kDelayedNesterov", momentum=0.9, delta=0.1), "cluster.outer.delta"),
    ],
)
def test_more_of_what_is_excluded(cls: type, refused: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**refused)
    assert caught.value.field == field


def test_every_row_belongs_to_a_block() -> None:
    tables = [[*cls.TABLE, *contributed_to(cls.PATH)] for cls in (Job, Cluster, Updater, FixedStep, Partition)]
    assert sorted(row.field for table in tables for row in table) == sorted(row.field for row in ROWS)


@pytest.mark.usefixtures("everything_available")
def test_values_count_as_shared_where_the_layout_shares_them() -> None:
    seen = set()
    for groups, servers, team, per_unit in itertools.product((1, 2, 4), (0, 1, 2, 4), (1, 2), (1, 2, 4, 8)):
        cluster = Cluster(groups, servers, nworkers_per_group=team, nworkers_per_procs=per_unit)
        try:
            topology = layout(cluster)
        except ConfigError:
            continue
        shared = any(topology.sharing(unit.rank) for unit in topology.units)
        seen.add(shared)
        with pytest.raises(ConfigError, match="share_memory: false") if shared else nullcontext():
            Job(cluster=cluster, pull=Pull.kLazy)
    assert seen == {True, False}


def test_names_and_lists_become_enums_and_tuples() -> None:
    job = Job(reduce="kSum", args=["a"], cluster=Cluster(shares=[1, 3], nworkers_per_group=2))  # type: ignore[arg-type]
    assert job.reduce is Reduce.kSum
    assert job.args == ("a",)
    assert job.cluster.shares == (1.0, 3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(job)) == job


def test_workspace_is_named_after_the_job_unless_given() -> None:
    assert Job(name="a/b").workspace == "./workspace/a_b"
    assert Job(name="a", cluster=Cluster(workspace="w")).workspace == "w"


SAME = [
    Job(name="other"),
    Job(program="x.py", args=("1",)),
    Job(disp_freq=3, disp_after=2, test_freq=1),
    Job(cluster=Cluster(workspace="w", start_port=9000, poll_time=5)),
]
OTHER = [
    Job(seed=1),
    Job(reduce=Reduce.kSum),
    Job(shard=Shard.kLease),
    Job(per_worker_batch=True),
    Job(warmup_steps=1),
    Job(updater=Updater()),
    Job(updater=Updater(momentum=0.9)),
    Job(cluster=Cluster(nworker_groups=2)),
    Job(cluster=Cluster(slicing=Slicing.kTensor)),
    Job(cluster=Cluster(agreement=Agreement.kRingAverage)),
    Job(cluster=Cluster(2, 2, agreement=Agreement.kElastic)),
    Job(cluster=Cluster(2, 2, agreement=Agreement.kElastic, moving_rate=0.3)),
    Job(cluster=Cluster(2, 2, agreement=Agreement.kGossip)),
    Job(cluster=Cluster(max_staleness=0)),
    Job(partition=(Partition(match="fc"),)),
    Job(partition=(Partition(match="fc", partition_dim=-1),)),
    Job(placement="kAuto"),  # type: ignore[arg-type]
    Job(microbatches=2),
    Job(schedule="k1F1B"),  # type: ignore[arg-type]
]


def test_the_digest_follows_what_decides_results_and_nothing_else() -> None:
    assert {job.digest() for job in SAME} == {Job().digest()}
    assert len({job.digest() for job in [Job(), *OTHER]}) == len(OTHER) + 1


@pytest.mark.journey
def test_the_digest_is_the_same_in_another_process() -> None:
    code = "from topotrain.config.job import Job; print(Job(seed=1).digest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == Job(seed=1).digest()


def test_a_job_that_is_not_split_has_the_digest_that_it_had_before_splitting() -> None:
    job = Job(on_failure=OnFailure.kStop)  # the default of then
    assert job.digest() == "c5a0bca33a3934f68d9ed048d193d399ee84cdb2fe74dbaaabc28f874f77dddd"


def test_digests_of_jobs_with_nested_blocks_do_not_change() -> None:
    schedule = LRGen(type="kFixedStep", fixedstep_conf=FixedStep(step=(1,), step_lr=(0.1,)))  # type: ignore[arg-type]
    updater = Updater(type="kSGD", learning_rate=schedule, param=(Param(match="b"),))  # type: ignore[arg-type]
    cluster = Cluster(start_port=9000, poll_time=5, lease_s=1.0, link=Link(delay=1.0), nworkers_per_group=3)
    job = Job(name="n", program="p.py", args=("1",), updater=updater, cluster=cluster, grace_s=1.0)
    assert job.digest() == "8bedd4e2316cfe073f4de1f50ac516ade2675ba7ad068fe1608755c65f54328c"
    backup = Cluster(nworkers_per_group=3, backup=1)
    job = Job(grads="kHidden", per_worker_batch=True, cluster=backup)  # type: ignore[arg-type]
    assert job.digest() == "8d27225053e41705d359b7fb27479722a05a826f4bb725ff19eae4dd80f72b61"


@pytest.mark.parametrize(
    ("job", "splits"),
    [
        (Job(), False),
        (Job(microbatches=4), False),
        (Job(partition=(Partition(),)), True),
        (Job(placement="kAuto"), True),  # type: ignore[arg-type]
    ],
)
def test_a_job_is_split_by_a_partition_block_or_by_kauto(job: Job, splits: bool) -> None:
    assert job.splits is splits


def test_every_enum_value_is_its_name() -> None:
    assert all(member.value == member.name for kind in (Shard, Reduce, OnFailure, Slicing) for member in kind)
