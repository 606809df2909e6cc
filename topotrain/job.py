"""A job in the words of SINGA's configuration: frozen dataclasses, checked once, when they are made.

Rule: a field is named as in `job.proto` (`import` is `import_` here, a Python keyword), has the same default, and its
type carries its check; what several fields forbid together stands in one table per class. Whoever holds a `Job` need
not check it again. Whether the counts of a cluster divide each other is the layout's question (topology.py).
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin

INT32 = 2**31 - 1
INT64 = 2**63 - 1


class ConfigError(ValueError):
    """A setting that cannot be: the field's path, its value (None: none), what would be accepted, and the place."""

    def __init__(self, field: str, value: object, accepted: str, where: str = "") -> None:
        super().__init__(field, value, accepted, where)
        self.field = field
        self.value = value
        self.accepted = accepted
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        name = self.field if self.value is None else f"{self.field} = {_shown(self.value)}"
        return f"{place}{name}: {self.accepted}" if name else f"{place}{self.accepted}"

    def at(self, where: str) -> "ConfigError":
        """The same error, told with a place such as "job.conf:3:5"."""
        return ConfigError(self.field, self.value, self.accepted, where)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


class UpdaterType(str, Enum):
    kSGD = "kSGD"
    kAdaGrad = "kAdaGrad"
    kRMSProp = "kRMSProp"
    kNesterov = "kNesterov"
    kAdaDelta = "kAdaDelta"
    kAdam = "kAdam"
    kAdamMax = "kAdamMax"
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


class Slicing(str, Enum):
    kElement = "kElement"
    kTensor = "kTensor"


class Agreement(str, Enum):
    kMaster = "kMaster"
    kRingAverage = "kRingAverage"


class Road(str, Enum):
    kAuto = "kAuto"
    kShm = "kShm"
    kTcp = "kTcp"


_Rule = Callable[[str, Any], Any]


def _whole(least: int, most: int = INT32) -> _Rule:
    accepted = f"must be a whole number >= {least}" if most >= INT32 else f"must be a whole number, {least} to {most}"

    def check(path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(path, value, accepted)
        return value

    return check


def _number(accepted: str, holds: Callable[[float], bool]) -> _Rule:
    def check(path: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and holds(value)):
            raise ConfigError(path, value, f"must be {accepted}")
        return float(value)

    return check


def _one_of(kind: type[Enum], refused: Sequence[Enum] = ()) -> _Rule:
    names = ", ".join(str(member.value) for member in kind if member not in refused)

    def check(path: str, value: Any) -> Enum:
        try:
            member = kind(value)
        except ValueError:
            raise ConfigError(path, value, f"must be one of {names}") from None
        if member in refused:
            raise ConfigError(path, member, f"not available yet, accepted now: {names}")
        return member

    return check


def _instance(kind: type) -> _Rule:
    accepted = {bool: "true or false", str: "a text"}.get(kind, f"a {kind.__name__}")

    def check(path: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ConfigError(path, value, f"must be {accepted}")
        return value

    return check


def _many(rule: _Rule) -> _Rule:
    def check(path: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(path, value, "must be a list")
        return tuple(rule(f"{path}[{index}]", item) for index, item in enumerate(value))

    return check


def _pattern(path: str, value: Any) -> str:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ConfigError(path, value, f"must be a regular expression ({error})") from None
    return str(value)


def _job_name(path: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(path, value, "must be a text that is not empty")
    return value


Count = Annotated[int, _whole(1)]
Steps = Annotated[int, _whole(0)]
StepsOrAll = Annotated[int, _whole(-1)]
Port = Annotated[int, _whole(1, 65535)]
Seed = Annotated[int, _whole(0, INT64)]
Number = Annotated[float, _number("a number", lambda x: True)]
NotNegative = Annotated[float, _number("a number >= 0", lambda x: x >= 0)]
Positive = Annotated[float, _number("a number > 0", lambda x: x > 0)]
Fraction = Annotated[float, _number("a number >= 0 and < 1", lambda x: 0 <= x < 1)]
Pattern = Annotated[str, _pattern]
Name = Annotated[str, _job_name]
ApplyNow = Annotated[Apply, _one_of(Apply, [Apply.kOnArrival])]
PullNow = Annotated[Pull, _one_of(Pull, [Pull.kLazy])]
OnFailureNow = Annotated[OnFailure, _one_of(OnFailure, [OnFailure.kContinue])]


@cache
def _rule(kind: Any) -> _Rule:
    """The check of a field's type: what Annotated carries, or what the type itself says."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast(_Rule, inner[1])
    if origin is tuple:
        return _many(_rule(inner[0]))
    if type(None) in inner:
        rule = _rule(inner[0])
        return lambda path, value: None if value is None else rule(path, value)
    return _one_of(kind) if issubclass(kind, Enum) else _instance(kind)


class _Checked:
    """Applies each field's rule (which may turn a list into a tuple, a name into an enum), then the class's table."""

    __slots__ = ()
    PATH: ClassVar[str]
    TABLE: ClassVar[Sequence[tuple[str, Callable[[Any], object], str]]] = ()

    def __post_init__(self) -> None:
        prefix = self.PATH + "." if self.PATH else ""
        for f in fields(self):  # type: ignore[arg-type]
            kind: Any = f.type
            object.__setattr__(self, f.name, _rule(kind)(prefix + f.name.rstrip("_"), getattr(self, f.name)))
        for name, refused, accepted in self.TABLE:
            if refused(self):
                raise ConfigError(prefix + name, getattr(self, name), accepted)


@dataclass(frozen=True, slots=True)
class RMSProp(_Checked):
    PATH = "updater.rmsprop_conf"
    rho: Fraction


@dataclass(frozen=True, slots=True)
class AdaDelta(_Checked):
    PATH = "updater.adadelta_conf"
    rho: Fraction = 0.9


@dataclass(frozen=True, slots=True)
class Adam(_Checked):
    PATH = "updater.adam_conf"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999


@dataclass(frozen=True, slots=True)
class AdamMax(_Checked):
    PATH = "updater.adammax_conf"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999


@dataclass(frozen=True, slots=True)
class FixedStep(_Checked):
    PATH = "updater.learning_rate.fixedstep_conf"
    TABLE = (
        ("step", lambda c: not c.step, "needs at least one step"),
        ("step", lambda c: list(c.step) != sorted(set(c.step)), "must rise from entry to entry"),
        ("step_lr", lambda c: len(c.step_lr) != len(c.step), "must have as many entries as step"),
    )
    step: tuple[Steps, ...] = ()
    step_lr: tuple[NotNegative, ...] = ()


@dataclass(frozen=True, slots=True)
class Step(_Checked):
    PATH = "updater.learning_rate.step_conf"
    change_freq: Count
    gamma: NotNegative = 1.0


@dataclass(frozen=True, slots=True)
class Linear(_Checked):
    PATH = "updater.learning_rate.linear_conf"
    final_lr: NotNegative
    change_freq: Count


@dataclass(frozen=True, slots=True)
class Exponential(_Checked):
    PATH = "updater.learning_rate.exponential_conf"
    change_freq: Count


@dataclass(frozen=True, slots=True)
class InverseT(_Checked):
    PATH = "updater.learning_rate.inverset_conf"
    final_lr: Positive


@dataclass(frozen=True, slots=True)
class Inverse(_Checked):
    PATH = "updater.learning_rate.inverse_conf"
    gamma: NotNegative = 1.0
    pow: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class LRGen(_Checked):
    """A learning-rate schedule; schedule.py computes it."""

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
class Param(_Checked):
    """Scales for the parameters whose name the regular expression `match` is found in; the first such block counts."""

    PATH = "updater.param"
    lr_scale: NotNegative = 1.0
    wd_scale: NotNegative = 1.0
    match: Pattern = ""


@dataclass(frozen=True, slots=True)
class Updater(_Checked):
    """The optimizer of a script that passes none; update.py builds it."""

    PATH = "updater"
    TABLE = (("clip_low", lambda u: u.clip_low > u.clip_high, "must not be above clip_high"),)
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


@dataclass(frozen=True, slots=True)
class Cluster(_Checked):
    """Where workers and servers stand. Counts are counts; `poll_time` is in milliseconds."""

    PATH = "cluster"
    TABLE = (
        (
            "shares",
            lambda c: c.shares and (len(c.shares) != c.nworkers_per_group or not any(c.shares)),
            "must be one share per worker of a group (nworkers_per_group), not all zero",
        ),
        ("n_push", lambda c: c.n_push > 1 and c.nworkers_per_group > 1, "above 1 needs nworkers_per_group = 1"),
        ("n_fetch", lambda c: c.n_fetch > 1 and c.nworkers_per_group > 1, "above 1 needs nworkers_per_group = 1"),
        (
            "max_staleness",
            lambda c: c.max_staleness is not None and c.nserver_groups == 0 and c.nworker_groups > 1,
            "needs a server group: with nserver_groups = 0 no group waits for another",
        ),
    )
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
    road: Road = Road.kAuto


@dataclass(frozen=True, slots=True)
class Job(_Checked):
    """One training job: `Job(cluster=Cluster(nworkers_per_group=3))` is what a file with that block gives."""

    PATH = ""
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
    apply: ApplyNow = Apply.kAtStep
    pull: PullNow = Pull.kStep
    import_: str = ""
    on_failure: OnFailureNow = OnFailure.kStop

    @property
    def workspace(self) -> str:
        """The folder of everything the job writes: `cluster.workspace`, or one named after the job."""
        return self.cluster.workspace or f"./workspace/{self.name.replace('/', '_')}"

    def digest(self) -> str:
        """SHA-256 (hex) of the fields that decide results; processes of one job must agree on it."""
        text = json.dumps(_plain(self, _NO_RESULT), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


# What a process may be told differently without another result: places, names, display, and what only the script reads.
_NO_RESULT = frozenset(
    ["name", "workspace", "start_port", "poll_time", "program", "args", "disp_freq", "disp_after", "debug", "gpu"]
    + [f"{what}_{how}" for what in ("test", "validate", "checkpoint") for how in ("freq", "steps", "after")]
)


def _plain(value: Any, without: frozenset[str]) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item, without) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name), without) for f in fields(value) if f.name not in without}
    return value
