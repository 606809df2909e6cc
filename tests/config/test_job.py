"""A Job checks itself, field by field and across fields, and its digest is what processes must agree on."""

import dataclasses
import itertools
import pickle
import re
from contextlib import nullcontext
from typing import Any

import pytest

from topotrain.config.combinations import contributed, contributed_to
from topotrain.config.job import (
    COMBINATIONS,
    Cluster,
    ConfigError,
    FixedStep,
    Job,
    Link,
    LRGen,
    OnFailure,
    Param,
    Partition,
    Pull,
    Reduce,
    RMSProp,
    Updater,
)
from topotrain.config.job_file import loads
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
        (lambda: Cluster(shares=(10**400,)), "must be a number >= 0"),
        (lambda: Job(name=""), "name = '': must be a text that is not empty"),
        (lambda: Cluster(slice_bytes=100), "cluster.slice_bytes = 100: must be 0, or a whole number, 4096 to 67108864"),
        (lambda: Cluster(lease_s=0.5), "cluster.lease_s = 0.5: must be seconds, 1 to 3600"),
        (lambda: Job(args="x"), "args = 'x': must be a list"),  # type: ignore[arg-type]
        (lambda: Updater(clip_norm=0), "updater.clip_norm = 0: must be a number > 0"),
        (lambda: Updater(param=(Param(match="("),)), "updater.param.match = '\\(': must be a regular expression"),
        (lambda: RMSProp(rho=1.0), "updater.rmsprop_conf.rho = 1.0: must be a number >= 0 and < 1"),
        (lambda: Partition(partition_dim=2), "partition.partition_dim = 2: must be a whole number, -1 to 1"),
        (
            lambda: Job(partition=(Partition(),), cluster=Cluster(algorithm="kRing")),  # type: ignore[arg-type]
            "cluster.algorithm = kRing: must be kAuto, straight to each server, where one model is split",
        ),
    ],
)
def test_a_value_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


ROWS = (*COMBINATIONS, *contributed())
FEATURES = {
    "OUTER": "outer.type=kSGD outer.learning_rate={type:kFixed,base_lr:0.7}",
    "NESTEROV": "OUTER outer.type=kNesterov outer.momentum=0.9",
    "DELAYED": "OUTER outer.type=kDelayedNesterov outer.momentum=0.9",
    "ARRIVAL": "grads=kHidden apply=kOnArrival",
    "MEMORY": "nworker_groups=2 nworkers_per_procs=2",
    "PAIR": "nworkers_per_group=2 nservers_per_group=2",
    "GROUPS": "nworker_groups=2 nserver_groups=2",
    "SPLIT": 'partition={match:"fc",partition_dim:1}',
    "SPARE": "grads=kHidden per_worker_batch=true nworkers_per_group=3",
    "BACKUP": "SPARE backup=1",
    "COPIES": "nservers_per_group=2 transport=kTcp replicas=2",
    "RATE": "outer.learning_rate",
    "RATES": "outer.learning_rate.fixedstep_conf.step_lr",
    "STEPS": "updater.learning_rate.fixedstep_conf",
}
"""Words of the examples, for fields that belong together or have a long path."""
SCHEDULES = {
    "linear": ("kLinear", "{change_freq:5,final_lr:0.1}"),
    "exponential": ("kExponential", "{change_freq:5}"),
    "inverset": ("kInverseT", "{final_lr:0.1}"),
    "inverse": ("kInverse", "{gamma:0.1,pow:0.5}"),
    "step": ("kStep", "{change_freq:5}"),
    "fixedstep": ("kFixedStep", "{step:0,step_lr:0.1}"),
}
AUTOMATIC = (
    "nworker_groups=2 nserver_groups=2 nworkers_per_group=2 nservers_per_group=2 nworkers_per_procs=2 "
    "nservers_per_procs=2 server_worker_separate=true sync_freq=2 shares=[1] max_staleness=0 n_push=2 n_fetch=2 "
    "agreement=kRingAverage engine=kGloo algorithm=kRing compression=kInt8 compression_ratio=0.5 replicas=2 "
    "placement=kAuto start_groups=1 SPLIT"
)
# [the named field:] what is refused [| what makes it allowed]. The named field is otherwise that of the last value,
# and without this value the rest is allowed.
EXAMPLES = [
    *"""
apply=kOnArrival | grads=kHidden
updater.clip_norm=1 ARRIVAL ; updater.clip_high=1 ARRIVAL ; MEMORY ARRIVAL | share_memory=false
slicing=kTensor ARRIVAL ; n_push=2 ARRIVAL ; n_fetch=2 ARRIVAL
MEMORY pull=kLazy | share_memory=false
n_push=2 pull=kLazy ; n_fetch=2 pull=kLazy ; nworkers_per_group=2 n_push=2 ; nworkers_per_group=2 n_fetch=2
shares=[1,1] | nworkers_per_group=2 ; shares=[0]
nserver_groups=0&nworker_groups=2 max_staleness=0 | nserver_groups=1
nworkers_per_group=2 link={} transport=kShm | nworkers_per_group=1
updater.clip_low: updater.clip_high=-1 | updater.clip_low=-1
STEPS.step: updater.learning_rate={fixedstep_conf:{}} | STEPS={step:0,step_lr:1}
STEPS.step=[5,5] | STEPS.step=[5,6] STEPS.step_lr=[1,1]
STEPS.step_lr: STEPS.step=[5] | STEPS.step_lr=[1]
correction=kRate | nworker_groups=2
GROUPS correction=kRate | correction=kMomentum
nworker_groups=2 ARRIVAL correction=kRate | correction=kMomentum
RATE: outer.type=kSGD | OUTER ; outer.type: RATE={type:kFixed,base_lr:0.7} | OUTER
OUTER outer.user_type=mine ; OUTER RATE.type=kUserChange ; OUTER RATE.user_type=mine ; OUTER RATE.base_lr=0
OUTER RATE.type=kFixedStep&RATE.fixedstep_conf.step=[0,1]&RATES=[1,0] | RATES=[1,2]
OUTER outer.momentum=1 | outer.momentum=0.99
outer.momentum: OUTER outer.type=kNesterov | NESTEROV
outer.momentum: OUTER outer.type=kDelayedNesterov | DELAYED
OUTER outer.type=kAdam outer.momentum=0.9 ; OUTER outer.delay=2 | DELAYED
updater.type=kDelayedNesterov ; updater.delay=2
OUTER outer.delta=0.1 | outer.type=kAdam ; NESTEROV outer.delta=1e-6 ; DELAYED outer.delta=0.1
OUTER outer.clip_norm=1 ; outer.clip_low: OUTER outer.clip_high=1
outer.rmsprop_conf: OUTER outer.type=kRMSProp | outer.rmsprop_conf={rho:0.9}
OUTER outer.rmsprop_conf={rho:0.9} | outer.type=kRMSProp ; OUTER outer.adadelta_conf={rho:0.8} | outer.type=kAdaDelta
OUTER outer.adam_conf={beta1:0.8} | outer.type=kAdam ; OUTER outer.adammax_conf={beta1:0.8} | outer.type=kAdamMax
weigh=kEqual | OUTER ; reduce=kSum OUTER weigh=kEqual ; merge=kRadial | OUTER ; OUTER merge=kRadial reduce=kSum
fragments=2 | OUTER sync_freq=2
OUTER fragments=2&sync_freq=3 | sync_freq=4 ; OUTER fragments=4&sync_freq=2 | sync_freq=4
overlap=1 | OUTER sync_freq=2 ; OUTER sync_freq=4&fragments=2&overlap=2 | overlap=1
keep=kDrop | OUTER overlap=1 sync_freq=9 ; keep=kBlend | OUTER quorum=1
quorum=1 | OUTER ; OUTER quorum=2 | nworker_groups=2 ; slack=0.5 | OUTER quorum=1
OUTER sync_freq=2&quorum=1 overlap=1 ; blend=0.1 | OUTER overlap=1 sync_freq=2 keep=kBlend
pace=kSteps | OUTER ; OUTER pace=kTime | quorum=1 ; OUTER pace=kTime | pace=kSteps
OUTER nworker_groups=2&nserver_groups=2 | nserver_groups=1 ; OUTER nserver_groups=0
OUTER share_memory=false ; OUTER backup=1 ; OUTER nworkers_per_group=2&n_push=2 | n_push=1 ; OUTER n_fetch=2
OUTER max_staleness=0 ; OUTER agreement=kGossip
OUTER engine=kGloo | engine=kOwn ; OUTER engine=kNccl ; OUTER algorithm=kRing
OUTER apply=kOnArrival ; OUTER grads=kHidden ; OUTER pull=kLazy ; OUTER correction=kRate ; OUTER microbatches=4
OUTER schedule=k1F1B ; OUTER warmup_steps=1 ; OUTER SPLIT ; OUTER partition={partition_dim:-1,location:1}
OUTER placement=kAuto ; OUTER updater.clip_norm=1 ; updater.clip_low: OUTER updater.clip_high=1
engine=kGloo ARRIVAL | engine=kOwn
nworkers_per_group=2 engine=kGloo | nservers_per_group=2 ; link={} engine=kGloo | engine=kOwn
nworkers_per_group=2 algorithm=kRing | nservers_per_group=2 ; engine=kNccl algorithm=kTree | engine=kOwn
algorithm=kRing compression=kFp16 ; MEMORY compression=kInt8 | share_memory=false
backup=1 | SPARE ; SPARE nworker_groups=2 backup=1
BACKUP nservers_per_group=3&engine=kGloo | engine=kOwn ; BACKUP nservers_per_group=3&algorithm=kRing | algorithm=kAuto
BACKUP compression=kFp16 ; BACKUP grads=kVisible ; BACKUP apply=kOnArrival ; BACKUP pull=kLazy
BACKUP per_worker_batch=false ; BACKUP shard=kLease | shard=kStatic ; BACKUP SPLIT ; BACKUP placement=kAuto
BACKUP&updater.clip_high=1 updater.clip_norm=1
agreement=kGossip | GROUPS ; GROUPS&agreement=kGossip&moving_rate=0.5 | agreement=kElastic
partition.location: partition={location:0} | partition={location:0,partition_dim:-1}
partition={partition_dim:-1,location:1} | nworkers_per_group=2
SPLIT ARRIVAL ; SPLIT pull=kLazy ; SPLIT n_push=2 ; placement=kAuto n_fetch=2
SPLIT engine=kGloo | engine=kOwn ; SPLIT algorithm=kRing
cluster.outer: auto=true OUTER
replicas: COPIES on_failure=kStop ; replicas: COPIES transport=kAuto ; replicas: COPIES GROUPS | nserver_groups=1
replicas: COPIES nservers_per_group=1 ; replicas: COPIES nservers_per_procs=2 ; replicas: COPIES PAIR&algorithm=kRing
replicas: COPIES link={bandwidth:10} ; replicas: COPIES BACKUP
""".strip()
    .replace("\n", " ; ")
    .split(" ; "),
    *(
        f"RATE.{name}_conf: OUTER RATE.type={kind} | RATE.{name}_conf={conf}"
        for name, (kind, conf) in SCHEDULES.items()
    ),
    *(f"OUTER RATE.{name}_conf={conf} | RATE.type={kind}" for name, (kind, conf) in SCHEDULES.items()),
    *(f"auto=true {value}" for value in AUTOMATIC.split()),
]


def written_out(word: str) -> list[str]:
    """The assignments that a word of an example stands for, with whole paths."""
    if word in FEATURES or "&" in word:
        return [each for part in FEATURES.get(word, word.replace("&", " ")).split() for each in written_out(part)]
    first = re.match(r"\w+", word)[0]  # type: ignore[index]
    path = FEATURES.get(first, first)
    inside = path.partition(".")[0] not in {*Job.__dataclass_fields__, "cluster"}
    return ["cluster." * inside + path + word[len(first) :]]


def error_of(words: list[str]) -> ConfigError | None:
    try:
        loads("", overrides=[each for word in words for each in written_out(word)])
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("example", EXAMPLES)
def test_fields_that_exclude_each_other(example: str) -> None:
    """The error names a field, and none of the values could be left out and still be refused for the same reason."""
    *named, rest = example.split(": ")
    refused, *instead = (part.split() for part in rest.split(" | "))
    error = error_of(refused)
    assert error is not None
    assert error.field == written_out(named[0] if named else refused[-1])[-1].partition("=")[0]
    assert error_of(refused + instead[0] if instead else refused[:-1]) is None
    for at in range(len(refused)):
        fewer = error_of(refused[:at] + refused[at + 1 :])
        assert fewer is None or (fewer.field, fewer.accepted) != (error.field, error.accepted), refused[at]


def test_every_row_has_an_example_and_belongs_to_a_block() -> None:
    found = [error_of(example.split(": ")[-1].split(" | ")[0].split()) for example in EXAMPLES]
    assert {(error.field, error.accepted) for error in found if error} == {(row.field, row.accepted) for row in ROWS}
    tables = [[*cls.TABLE, *contributed_to(cls.PATH)] for cls in (Job, Cluster, Updater, FixedStep, Partition)]
    assert sorted(row.field for table in tables for row in table) == sorted(row.field for row in ROWS)


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
    assert (Job(name="a/b").workspace, Job(cluster=Cluster(workspace="w")).workspace) == ("./workspace/a_b", "w")


SAME = [
    Job(name="other"),
    Job(program="x.py", args=("1",)),
    Job(disp_freq=3, disp_after=2, test_freq=1),
    Job(cluster=Cluster(workspace="w", start_port=9000, poll_time=5)),
]
OTHER = [
    "seed=1",
    "shard=kLease",
    "updater={}",
    "updater={momentum:0.9}",
    "slicing=kTensor",
    "GROUPS agreement=kElastic",
    "GROUPS agreement=kElastic moving_rate=0.3",
    "GROUPS agreement=kGossip",
    "max_staleness=0",
    'partition={match:"fc"}',
    'partition={match:"fc",partition_dim:-1}',
    "placement=kAuto",
    "microbatches=2",
    "nonfinite=kFail",
    "correction=kNone nworker_groups=2",
    "nworker_groups=2",
]


def test_the_digest_follows_what_decides_results_and_nothing_else() -> None:
    assert {job.digest() for job in SAME} == {Job().digest()}
    others = [loads("", overrides=[each for word in other.split() for each in written_out(word)]) for other in OTHER]
    assert len({job.digest() for job in [Job(), *others]}) == len(OTHER) + 1


def test_digests_are_those_of_earlier_versions() -> None:
    job = Job(on_failure=OnFailure.kStop)  # the default of then
    assert job.digest() == "c5a0bca33a3934f68d9ed048d193d399ee84cdb2fe74dbaaabc28f874f77dddd"
    schedule = LRGen(type="kFixedStep", fixedstep_conf=FixedStep(step=(1,), step_lr=(0.1,)))  # type: ignore[arg-type]
    updater = Updater(type="kSGD", learning_rate=schedule, param=(Param(match="b"),))  # type: ignore[arg-type]
    cluster = Cluster(start_port=9000, poll_time=5, lease_s=1.0, link=Link(delay=1.0), nworkers_per_group=3)
    job = Job(name="n", program="p.py", args=("1",), updater=updater, cluster=cluster, grace_s=1.0)
    assert job.digest() == "8bedd4e2316cfe073f4de1f50ac516ade2675ba7ad068fe1608755c65f54328c"
    backup = Cluster(nworkers_per_group=3, backup=1)
    job = Job(grads="kHidden", per_worker_batch=True, cluster=backup)  # type: ignore[arg-type]
    assert job.digest() == "8d27225053e41705d359b7fb27479722a05a826f4bb725ff19eae4dd80f72b61"
