"""A job in SINGA's configuration fields: frozen dataclasses, checked when made.

A field has its name (`import` is `import_` here) and its default from `job.proto`, and its check in its type. A `Job`
needs no further check, except that the counts of a cluster fit together (topology.py).
"""

import hashlib
import json
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any

from topotrain.config.combinations import Combination
from topotrain.config.field_checks import INT64, Checked, filled, number, pattern, whole, whole_or_zero
from topotrain.config.field_checks import ConfigError as ConfigError  # a module that reads or makes a job needs it


class UpdaterType(str, Enum):
    kSGD = "kSGD"
    kAdaGrad = "kAdaGrad"
    kRMSProp = "kRMSProp"
    kNesterov = "kNesterov"
    kAdaDelta = "kAdaDelta"
    kAdam = "kAdam"
    kAdamMax = "kAdamMax"
    kDelayedNesterov = "kDelayedNesterov"
    kUserUpdater = "kUserUpdater"


class ChangeMethod(str, Enum):
    kFixed = "kFixed"
    kInverseT = "kInverseT"
    kInverse = "kInverse"
    kExponential = "kExponential"
    kLinear = "kLinear"
    kStep = "kStep"
    kFixedStep = "kFixedStep"
    kUserChange = "kUserChange"


class Shard(str, Enum):
    kAuto = "kAuto"
    kStatic = "kStatic"
    kLease = "kLease"


class Reduce(str, Enum):
    kMean = "kMean"
    kSum = "kSum"


class Grads(str, Enum):
    kVisible = "kVisible"
    kHidden = "kHidden"


class Apply(str, Enum):
    kAtStep = "kAtStep"
    kOnArrival = "kOnArrival"


class Pull(str, Enum):
    kStep = "kStep"
    kLazy = "kLazy"


class OnFailure(str, Enum):
    kStop = "kStop"
    kContinue = "kContinue"


class NonFinite(str, Enum):
    kSkip = "kSkip"
    kFail = "kFail"
    kAllow = "kAllow"


class Correction(str, Enum):
    kAuto = "kAuto"
    kNone = "kNone"
    kRate = "kRate"
    kMomentum = "kMomentum"


class Placement(str, Enum):
    kManual = "kManual"
    kAuto = "kAuto"


class Schedule(str, Enum):
    kGPipe = "kGPipe"
    k1F1B = "k1F1B"


class Slicing(str, Enum):
    kElement = "kElement"
    kTensor = "kTensor"


class Agreement(str, Enum):
    kMaster = "kMaster"
    kRingAverage = "kRingAverage"
    kElastic = "kElastic"
    kGossip = "kGossip"


class Weigh(str, Enum):
    kSamples = "kSamples"
    kEqual = "kEqual"


class Merge(str, Enum):
    kMean = "kMean"
    kRadial = "kRadial"


class Keep(str, Enum):
    kAdd = "kAdd"
    kBlend = "kBlend"
    kDrop = "kDrop"


class Pace(str, Enum):
    kAuto = "kAuto"
    kSteps = "kSteps"
    kTime = "kTime"


class TransportChoice(str, Enum):
    kAuto = "kAuto"
    kShm = "kShm"
    kTcp = "kTcp"


class Engine(str, Enum):
    kAuto = "kAuto"
    kOwn = "kOwn"
    kGloo = "kGloo"
    kNccl = "kNccl"


class Algorithm(str, Enum):
    kAuto = "kAuto"
    kRing = "kRing"
    kTree = "kTree"
    kNaive = "kNaive"


class Compression(str, Enum):
    kNone = "kNone"
    kFp16 = "kFp16"
    kBf16 = "kBf16"
    kInt8 = "kInt8"
    kTopK = "kTopK"
    kE3M0 = "kE3M0"


Count = Annotated[int, whole(1)]
Steps = Annotated[int, whole(0)]
StepsOrAll = Annotated[int, whole(-1)]
Port = Annotated[int, whole(1, 65535)]
Seed = Annotated[int, whole(0, INT64)]
Number = Annotated[float, number("a number")]
NotNegative = Annotated[float, number("a number >= 0", least=0)]
Positive = Annotated[float, number("a number > 0", above=0)]
Lease = Annotated[float, number("seconds, 1 to 3600", least=1, most=3600)]
Fraction = Annotated[float, number("a number >= 0 and < 1", least=0, below=1)]
Share = Annotated[float, number("a number >= 0 and <= 1", least=0, most=1)]
Pattern = Annotated[str, pattern]
Name = Annotated[str, filled]
Dimension = Annotated[int, whole(-1, 1)]
Ratio = Annotated[float, number("a number > 0 and <= 1", above=0, most=1)]
Connections = Annotated[int, whole(1, 16)]
# A chain of replication has two members: a server and one replica.
Replicas = Annotated[int, whole(1, 2)]
# 0: chosen for the transport. The largest one is the largest body of a frame.
SliceBytes = Annotated[int, whole_or_zero(4096, 1 << 26)]


def shares_values(c: "Cluster") -> bool:
    """Whether worker groups share parameter values in memory (see `Topology.sharing`)."""
    # With more worker groups than server groups, some groups of a unit use the same values. With an outer optimizer
    # each group trains values of its own.
    return (
        c.outer is None
        and c.share_memory
        and c.nworkers_per_procs > c.nworkers_per_group
        and 0 < c.nserver_groups < c.nworker_groups
    )


def all_reduces(c: "Cluster") -> bool:
    """Whether one worker group has a server beside each worker, as collectives need."""
    # Equal counts per unit place worker i and server i in the same unit.
    counts = (c.nworkers_per_group, c.nworkers_per_procs) == (c.nservers_per_group, c.nservers_per_procs)
    return c.nworker_groups == c.nserver_groups == 1 and counts and not c.server_worker_separate


def _one_unit(c: "Cluster") -> bool:
    """Whether all workers and all servers run in one unit."""
    # `>=`: whether the counts divide each other is checked later, by `topology.validate`.
    workers = c.nworkers_per_procs >= c.nworker_groups * c.nworkers_per_group
    servers = c.nservers_per_procs >= c.nserver_groups * c.nservers_per_group
    return workers and servers and not (c.server_worker_separate and c.nserver_groups)


def _apart(c: "Cluster") -> int:
    """Return how many worker groups change the same values, each at its own pace."""
    # Without servers each group has values of its own.
    return c.nworker_groups if c.nserver_groups else 1


def _clips(u: "Updater | None") -> bool:
    # Equal bounds, as by default, mean no clipping.
    return u is not None and (u.clip_norm is not None or u.clip_low < u.clip_high)


FOREIGN = (Engine.kGloo, Engine.kNccl)
"""Engines of torch.distributed."""
_FIXED_STEP = "updater.learning_rate.fixedstep_conf"
_ALONE = "above 1 needs nworkers_per_group = 1"
UNSHARED = "needs share_memory: false, since worker groups of one unit use the same server group"

# Combinations that are refused and that the conf alone shows. Those that a package of its own excludes are in that
# package (`combinations`). How often a step runs backward (`kOnArrival`: once) and whether it uses a GradScaler
# (`kOnArrival`, `kHidden`: no) shows only in a running script.
COMBINATIONS = (
    Combination(
        "apply", lambda j: j.apply is Apply.kOnArrival and j.grads is not Grads.kHidden, "needs grads: kHidden"
    ),
    Combination(
        "apply",
        lambda j: j.apply is Apply.kOnArrival and _clips(j.updater),
        "needs an updater without clip_norm, clip_low and clip_high",
    ),
    Combination("apply", lambda j: j.apply is Apply.kOnArrival and shares_values(j.cluster), UNSHARED),
    Combination(
        "apply",
        lambda j: j.apply is Apply.kOnArrival and j.cluster.slicing is Slicing.kTensor,
        "needs slicing: kElement, since a tensor's parts arrive one after another",
    ),
    Combination(
        "apply",
        lambda j: j.apply is Apply.kOnArrival and max(j.cluster.n_push, j.cluster.n_fetch) > 1,
        "needs n_push = n_fetch = 1",
    ),
    Combination("pull", lambda j: j.pull is Pull.kLazy and shares_values(j.cluster), UNSHARED),
    Combination(
        "pull",
        lambda j: j.pull is Pull.kLazy and max(j.cluster.n_push, j.cluster.n_fetch) > 1,
        "needs n_push = n_fetch = 1",
    ),
    Combination("cluster.n_push", lambda c: c.n_push > 1 and c.nworkers_per_group > 1, _ALONE),
    Combination("cluster.n_fetch", lambda c: c.n_fetch > 1 and c.nworkers_per_group > 1, _ALONE),
    Combination(
        "cluster.shares",
        lambda c: c.shares and (len(c.shares) != c.nworkers_per_group or not any(c.shares)),
        "must be one share per worker of a group (nworkers_per_group), not all zero",
    ),
    Combination(
        "cluster.max_staleness",
        lambda c: c.max_staleness is not None and c.nserver_groups == 0 and c.nworker_groups > 1,
        "needs a server group: with nserver_groups = 0 no group waits for another",
    ),
    Combination(
        "cluster.transport",
        lambda c: c.transport is TransportChoice.kShm and c.link is not None and not _one_unit(c),
        "must be kAuto or kTcp with a link: each unit is then a host of its own, and units share no memory",
    ),
    Combination("updater.clip_low", lambda u: u.clip_low > u.clip_high, "must not be above clip_high"),
    Combination(f"{_FIXED_STEP}.step", lambda c: not c.step, "needs at least one step"),
    Combination(f"{_FIXED_STEP}.step", lambda c: list(c.step) != sorted(set(c.step)), "must rise from entry to entry"),
    Combination(f"{_FIXED_STEP}.step_lr", lambda c: len(c.step_lr) != len(c.step), "must have as many entries as step"),
    Combination(
        "correction",
        lambda j: j.correction in (Correction.kRate, Correction.kMomentum) and _apart(j.cluster) == 1,
        "must be kAuto or kNone where no two worker groups change the same values: needs nworker_groups above 1, and "
        "a server",
    ),
    Combination(
        "correction",
        lambda j: j.correction is Correction.kRate and j.cluster.nserver_groups > 1,
        "must be kMomentum or kNone with several server groups: a gradient's age is known within one of them only",
    ),
    Combination(
        "correction",
        lambda j: j.correction is Correction.kRate and j.apply is Apply.kOnArrival,
        "must be kMomentum or kNone with apply: kOnArrival: an update is made before its step is known as a whole",
    ),
)


def _rows(block: str) -> tuple[Combination, ...]:
    """Return the combinations that the blocks of this path refuse."""
    return tuple(row for row in COMBINATIONS if row.block == block)


@dataclass(frozen=True, slots=True)
class RMSProp(Checked):
    PATH = "updater.rmsprop_conf"
    rho: Fraction


@dataclass(frozen=True, slots=True)
class AdaDelta(Checked):
    PATH = "updater.adadelta_conf"
    rho: Fraction = 0.9


@dataclass(frozen=True, slots=True)
class Adam(Checked):
    PATH = "updater.adam_conf"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999


@dataclass(frozen=True, slots=True)
class AdamMax(Checked):
    PATH = "updater.adammax_conf"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999


@dataclass(frozen=True, slots=True)
class FixedStep(Checked):
    PATH = _FIXED_STEP
    TABLE = _rows(PATH)
    step: tuple[Steps, ...] = ()
    step_lr: tuple[NotNegative, ...] = ()


@dataclass(frozen=True, slots=True)
class Step(Checked):
    PATH = "updater.learning_rate.step_conf"
    change_freq: Count
    gamma: NotNegative = 1.0


@dataclass(frozen=True, slots=True)
class Linear(Checked):
    PATH = "updater.learning_rate.linear_conf"
    final_lr: NotNegative
    change_freq: Count


@dataclass(frozen=True, slots=True)
class Exponential(Checked):
    PATH = "updater.learning_rate.exponential_conf"
    change_freq: Count


@dataclass(frozen=True, slots=True)
class InverseT(Checked):
    PATH = "updater.learning_rate.inverset_conf"
    final_lr: Positive


@dataclass(frozen=True, slots=True)
class Inverse(Checked):
    PATH = "updater.learning_rate.inverse_conf"
    gamma: NotNegative = 1.0
    pow: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class LRGen(Checked):
    """A learning-rate schedule; lr_schedules.py computes it."""

    PATH = "updater.learning_rate"
    type: ChangeMethod = ChangeMethod.kUserChange
    user_type: str = ""
    base_lr: NotNegative = 0.01
    fixedstep_conf: FixedStep | None = None
    step_conf: Step | None = None
    linear_conf: Linear | None = None
    exponential_conf: Exponential | None = None
    inverse_conf: Inverse | None = None
    inverset_conf: InverseT | None = None


@dataclass(frozen=True, slots=True)
class Param(Checked):
    """Scales for the parameters with a name that matches; the first such block counts.

    match: a regular expression, searched for in the name.
    """

    PATH = "updater.param"
    lr_scale: NotNegative = 1.0
    wd_scale: NotNegative = 1.0
    match: Pattern = ""


@dataclass(frozen=True, slots=True)
class Updater(Checked):
    """The optimizer of a script that passes none; adapter.py builds it.

    Raises:
        ConfigError: a field has a value that is not accepted.
    """

    PATH = "updater"
    TABLE = _rows(PATH)
    type: UpdaterType = UpdaterType.kUserUpdater
    user_type: str = ""
    rmsprop_conf: RMSProp | None = None
    adadelta_conf: AdaDelta | None = None
    adam_conf: Adam | None = None
    adammax_conf: AdamMax | None = None
    learning_rate: LRGen | None = None
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    delta: Positive = 1e-8
    clip_low: Number = 0.0
    clip_high: Number = 0.0
    clip_norm: Positive | None = None
    param: tuple[Param, ...] = ()
    delay: Count = 1


@dataclass(frozen=True, slots=True)
class Partition(Checked):
    """The split of the modules with a name that matches; the first such block counts.

    match: a regular expression, searched for in the name. partition_dim: 0 samples, 1 features, -1 the whole module on
    one worker of the group: `location`, or any.
    """

    PATH = "partition"
    TABLE = _rows(PATH)
    match: Pattern = ""
    partition_dim: Dimension = 0
    location: Steps | None = None


@dataclass(frozen=True, slots=True)
class Link(Checked):
    """An emulated network between the units.

    bandwidth: Mbit/s in each direction of a unit. delay, jitter: milliseconds one way. loss: share of packets.
    """

    PATH = "cluster.link"
    bandwidth: Positive | None = None
    delay: NotNegative = 0.0
    jitter: NotNegative = 0.0
    loss: Fraction = 0.0


@dataclass(frozen=True, slots=True)
class Cluster(Checked):
    """The placement of workers and servers; `poll_time` is in milliseconds.

    Raises:
        ConfigError: a field has a value that is not accepted, or fields contradict each other.
    """

    PATH = "cluster"
    TABLE = _rows(PATH)
    nworker_groups: Count = 1
    nserver_groups: Steps = 1
    nworkers_per_group: Count = 1
    nservers_per_group: Count = 1
    nworkers_per_procs: Count = 1
    nservers_per_procs: Count = 1
    workspace: str = ""
    server_worker_separate: bool = False
    sync_freq: Count = 1
    start_port: Port = 6723
    share_memory: bool = True
    poll_time: Count = 100
    shares: tuple[NotNegative, ...] = ()
    slicing: Slicing = Slicing.kElement
    max_staleness: Steps | None = None
    n_push: Count = 1
    n_fetch: Count = 1
    agreement: Agreement = Agreement.kMaster
    transport: TransportChoice = TransportChoice.kAuto
    engine: Engine = Engine.kAuto
    algorithm: Algorithm = Algorithm.kAuto
    compression: Compression = Compression.kNone
    compression_ratio: Ratio = 0.01
    link: Link | None = None
    connections: Connections = 1
    slice_bytes: SliceBytes = 0
    lease_s: Lease = 2.0
    replicas: Replicas = 1
    backup: Steps = 0
    outer: Updater | None = None
    weigh: Weigh = Weigh.kSamples
    fragments: Count = 1
    overlap: Steps = 0
    keep: Keep = Keep.kAdd
    blend: Share = 0.5
    quorum: Steps = 0
    slack: Share = 0.9
    merge: Merge = Merge.kMean
    pace: Pace = Pace.kAuto
    moving_rate: Share = 0.0
    auto: bool = False

    @property
    def local_steps(self) -> int:
        """How many steps of a worker are one commit."""
        return self.n_push if self.outer is None else self.sync_freq // self.fragments

    @property
    def trains_in_exchange(self) -> bool:
        """Whether workers make steps between a push and the new values of a round."""
        return self.overlap > 0 or self.quorum > 0

    @property
    def paces_by_time(self) -> bool:
        """Whether slow workers push as often as the fastest one, after fewer steps."""
        return self.pace is Pace.kTime or (self.pace is Pace.kAuto and self.quorum > 0)


@dataclass(frozen=True, slots=True)
class Job(Checked):
    """One training job, such as Job(cluster=Cluster(nworkers_per_group=3)).

    Raises:
        ConfigError: a field has a value that is not accepted, or fields contradict each other.
    """

    PATH = ""
    TABLE = _rows(PATH)
    name: Name = "job"
    updater: Updater | None = None
    cluster: Cluster = field(default_factory=Cluster)
    train_steps: Steps = 0
    disp_freq: Steps = 0
    gpu: tuple[Steps, ...] = ()
    test_freq: Steps = 0
    test_steps: StepsOrAll = 0
    validate_freq: Steps = 0
    validate_steps: StepsOrAll = 0
    checkpoint_freq: Steps = 0
    checkpoint_path: tuple[str, ...] = ()
    warmup_steps: Steps = 0
    debug: bool = False
    checkpoint_after: Steps = 0
    disp_after: Steps = 0
    test_after: Steps = 0
    validate_after: Steps = 0
    resume: bool = False
    program: str = ""
    args: tuple[str, ...] = ()
    seed: Seed = 0
    per_worker_batch: bool = False
    shard: Shard = Shard.kAuto
    reduce: Reduce = Reduce.kMean
    grads: Grads = Grads.kVisible
    apply: Apply = Apply.kAtStep
    pull: Pull = Pull.kStep
    import_: str = ""
    on_failure: OnFailure = OnFailure.kContinue
    rendezvous: str = ""
    partition: tuple[Partition, ...] = ()
    placement: Placement = Placement.kManual
    microbatches: Count = 1
    schedule: Schedule = Schedule.kGPipe
    snapshot_s: NotNegative = 30.0
    restarts: Steps = 3
    nonfinite: NonFinite = NonFinite.kSkip
    start_groups: Steps = 0
    grace_s: NotNegative = 10.0
    correction: Correction = Correction.kAuto
    threads: Steps = 0

    @property
    def splits(self) -> bool:
        """Whether each worker group shares one model among its workers, by this file."""
        # A script may also ask for it, with `tt.place`.
        return bool(self.partition) or self.placement is Placement.kAuto

    @property
    def fixed_shares(self) -> bool:
        """Whether each worker group reads a part of the data that is fixed beforehand."""
        # Groups in step need no leases, and with fixed parts every run has the same bits.
        in_step = self.cluster.outer is not None and not self.cluster.quorum
        return self.shard is Shard.kStatic or (self.shard is Shard.kAuto and in_step)

    @property
    def workspace(self) -> str:
        """The folder of the job's files, `cluster.workspace` or one with the job's name."""
        return self.cluster.workspace or f"./workspace/{self.name.replace('/', '_')}"

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the fields that decide results."""
        # All processes of a job must agree on it, so it is in the handshake.
        text = json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


# Fields in which processes may differ without another result: places, names, display, and fields for the script only.
_NO_RESULT = frozenset(
    [
        "name",
        "cluster.workspace",
        "cluster.start_port",
        "cluster.poll_time",
        "cluster.lease_s",
        "cluster.replicas",
        "cluster.link",
        "program",
        "args",
        "disp_freq",
        "disp_after",
        "debug",
        "gpu",
        "rendezvous",
        "restarts",
        "start_groups",
        "snapshot_s",
        "grace_s",
        "threads",
    ]
    + [f"{what}_{how}" for what in ("test", "validate", "checkpoint") for how in ("freq", "steps", "after")]
)


# Fields that count only where they are set: jobs without them keep the digest from before the fields existed.
_NEWER = frozenset(
    ["partition", "placement", "microbatches", "schedule", "nonfinite", "correction", "updater.delay", "cluster.merge"]
    + [f"cluster.{name}" for name in ("backup", "outer", "weigh", "fragments", "overlap", "keep", "blend", "quorum")]
    + ["cluster.slack", "cluster.pace", "cluster.moving_rate", "cluster.auto"]
)


# Fields that have another name in the digest: the one that they had when the digests of jobs were first recorded.
_FORMER_NAMES = {"cluster.transport": "road"}


def _path(block: Any, of: "Field[Any]") -> str:
    return f"{block.PATH}.{of.name}" if block.PATH else of.name


def _decides(block: Any, of: "Field[Any]") -> bool:
    """Whether this field of a block is in the digest."""
    path = _path(block, of)
    return path not in _NO_RESULT and (path not in _NEWER or getattr(block, of.name) != of.default)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        decisive = [f for f in fields(value) if _decides(value, f)]
        return {_FORMER_NAMES.get(_path(value, f), f.name): _plain(getattr(value, f.name)) for f in decisive}
    return value
