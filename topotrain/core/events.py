"""Events that a process reports: frozen dataclasses, each one line of JSON.

An event is data, and losing one does no harm. Counters are totals, and times count from the process's own first step,
so a reader that starts late, or misses a line, has correct numbers. The first field of most events names the process
that the event is about: "worker 0/1" or "server 0/1" (group/index), or "unit 3".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_args

KINDS = ("program", "peer", "config", "died", "internal", "quarantine")


@dataclass(frozen=True, slots=True)
class Serving:
    """A process can be reached at these URLs."""

    who: str
    urls: tuple[str, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """A process runs and knows its settings."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has made `step` steps on `samples` samples.

    All numbers are totals since the start, except `loss`.

    Attributes:
        time: seconds since the worker's first step began.
        loss: the last loss that the worker has seen, or None.
        staleness_mean, staleness_max: counted in versions, over all updates so far.
        bytes_out, bytes_in: bytes of message bodies and headers.
        own_s: median of the seconds that the worker itself needs for a step, from the end of one wait to its next
            commit. None: too few were measured.
        late: the number of steps for which the worker's gradient came too late (with backup workers).
        threads: the number of threads with which PyTorch computes in the worker's process now. 0: not known.
    """

    who: str
    time: float
    step: int
    samples: int
    loss: float | None
    staleness_mean: float
    staleness_max: int
    bytes_out: int
    bytes_in: int
    own_s: float | None = None
    late: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step of a worker has changed no value, because a gradient was not finite.

    The batch of the step is used up.

    Attributes:
        step: the number of the step, from 1.
        total: the skipped steps of this process so far.
        by: the worker with the gradient. Empty: only the sum of the group is known.
        parameter: a parameter with such a gradient. Empty: rows of a table.
    """

    who: str
    step: int
    total: int
    by: str
    parameter: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a server at its end, or at the snapshot with which the job ends.

    Attributes:
        samples: by name of a worker of its group, the number of the worker's samples that are in the values. Samples of
            the snapshot from which the job was resumed are included.
    """

    who: str
    samples: dict[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Values that the program reported about the final parameters."""

    values: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Tested:
    """Results of an evaluation of the values of a step: means over the samples.

    Attributes:
        kind: "test" or "validate".
        skipped: the number of evaluations that were left out until then, because an earlier one still ran.
    """

    who: str
    kind: str
    step: int
    values: dict[str, float] = field(hash=False)
    skipped: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A process cannot continue.

    Attributes:
        kind: the kind of the cause, one of KINDS. "quarantine": the gradients of the process's worker group are not
            finite again and again, and other groups could continue without it.
        traceback: the traceback, or "".
    """

    who: str
    kind: str
    text: str
    traceback: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Failed.kind = {self.kind!r}: must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker's program has ended without an error. Totals are as in StepDone."""

    who: str
    steps: int
    samples: int
    staleness_mean: float
    staleness_max: int
    bytes_out: int
    bytes_in: int
    own_s: float | None = None
    late: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Notice:
    """A text that the user should read. The job continues."""

    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a process to `stream`, "stdout" or "stderr"."""

    who: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Waits:
    """A worker has waited for messages for `seconds`, and continues to wait."""

    who: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ending:
    """A process has done its work and is about to end.

    The end of a process without this event is a loss.
    """

    who: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has ended. A negative code is the signal that ended it."""

    who: str
    pid: int
    code: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A process was stopped by a signal such as SIGSTOP, and may be continued."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class Thawed:
    """A process that was stopped has been continued."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A process has ended without a reason. Other events report the consequences.

    Attributes:
        log: the end of the process's output.
    """

    who: str
    pid: int
    text: str
    log: str


@dataclass(frozen=True, slots=True)
class Unrepeatable:
    """A worker's group cannot be restarted alone, for the reason in `text`.

    Attributes:
        job: the job as a whole cannot be restarted, either.
    """

    who: str
    text: str
    job: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """A process or connection was lost, and the job continues.

    Attributes:
        number: the incidents of a job have numbers from 0.
        what, action: the loss, and the reaction to it, in words.
        at_s: seconds since the job's start.
    """

    number: int
    who: str
    what: str
    action: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """The workers that incident `number` had stopped train again.

    Attributes:
        waited_s: seconds from the loss to the first step of the restarted workers.
        others_s: the longest time in between for which a worker of another group reported no step. 0: there is no other
            group. Workers report steps four times a second, so values up to 0.25 mean no wait.
    """

    number: int
    waited_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Snapshot `number` is complete in the folder `path`.

    Attributes:
        step: the last step of worker group 0 in it.
        why: "time" (seconds have passed), "step" (the job's `checkpoint_freq`), "end" (the job was asked to end).
    """

    who: str
    number: int
    step: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A job that was asked to end cannot take a last snapshot; `text` says why."""

    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """A server's reply to a request to change a worker group.

    Attributes:
        wish: "leave", "lose" or "join".
        text: the reason of a refusal. Empty: agreed.
    """

    who: str
    group: int
    wish: str
    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """A worker group is absent from `at_s` seconds after the job's start on.

    The job continues. `how` is the reason.
    """

    group: int
    how: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """An absent worker group starts, `at_s` seconds after the job's start."""

    group: int
    incarnation: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Bounded:
    """A worker group of this script can have `most` workers, for the reason in `text`.

    0: no other number than now.
    """

    who: str
    most: int
    text: str


@dataclass(frozen=True, slots=True)
class Resized:
    """The only worker group of a job has another number of workers after step `step`.

    Attributes:
        number: counted with the incidents. Its Recovered reports when the job trains again.
        former, workers: the numbers of workers before and after.
        at_s: seconds since the job's start.
    """

    number: int
    former: int
    workers: int
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Covered:
    """Standby number `shadows` of a server has the whole state. The first is 0."""

    who: str
    shadows: int


@dataclass(frozen=True, slots=True)
class Missed:
    """A server has lost the connection to its standby or to the coordinator.

    The server does not know the cause.
    """

    who: str


@dataclass(frozen=True, slots=True)
class Differs:
    """Standby number `shadows` of a server differs from its primary, and is replaced."""

    who: str
    shadows: int


@dataclass(frozen=True, slots=True)
class Final:
    """The final parameters are in the file `path`. The job took `seconds`."""

    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Apart:
    """Distance of a server from the other server groups, over all exchanges.

    Attributes:
        updates_mean, updates_max: updates of other groups in one exchange.
        share: the norm of the additions, divided by the norm of the values.
    """

    who: str
    exchanges: int
    updates_mean: float
    updates_max: int
    share: float


@dataclass(frozen=True, slots=True)
class Tabled:
    """Rows of a table on a server at the job's end.

    Attributes:
        bytes: bytes of values, optimizer state and index.
    """

    who: str
    table: str
    rows: int
    bytes: int


Event = (
    Serving
    | Started
    | StepDone
    | Skipped
    | Counted
    | Metrics
    | Tested
    | Failed
    | Finished
    | Notice
    | Output
    | Waits
    | Ending
    | Exited
    | Frozen
    | Thawed
    | Lost
    | Unrepeatable
    | Incident
    | Recovered
    | Saved
    | Unsaved
    | Agreed
    | Left
    | Joined
    | Bounded
    | Resized
    | Covered
    | Missed
    | Differs
    | Final
    | Apart
    | Tabled
)

_CLASSES: Mapping[str, type[Event]] = MappingProxyType({c.__name__: c for c in get_args(Event)})


def to_json(event: Event) -> str:
    """Return the event as one line, without a line end.

    NaN and Infinity are written as Python's json does.
    """
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    return json.dumps({"event": type(event).__name__, **values}, separators=(",", ":"))


def from_json(line: str) -> Event:
    """Return the event of a line.

    Raises:
        ValueError: `to_json` has not written the line. The text names the field.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no event: {error}") from None
    name = data.pop("event", None) if isinstance(data, dict) else None
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"no event: {line[:80]!r}")
    kinds = {f.name: f.type for f in fields(cls)}
    if data.keys() != kinds.keys():
        raise ValueError(f"{name}: has the fields {sorted(data)}, must have {sorted(kinds)}")
    return cls(**{key: _checked(name, key, kinds[key], value) for key, value in data.items()})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_HOLDS: Mapping[Any, Callable[[Any], bool]] = MappingProxyType(
    {
        str: lambda v: isinstance(v, str),
        bool: lambda v: isinstance(v, bool),
        int: _is_int,
        float: _is_float,
        float | None: lambda v: v is None or _is_float(v),
        tuple[str, ...]: lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        dict[str, int]: lambda v: isinstance(v, dict) and all(map(_is_int, v.values())),
        dict[str, float]: lambda v: isinstance(v, dict) and all(map(_is_float, v.values())),
    }
)


def _checked(event: Any, name: str, kind: Any, value: Any) -> Any:
    if not _HOLDS[kind](value):
        raise ValueError(f"{event}.{name} = {value!r}: must be {getattr(kind, '__name__', kind)}")
    return tuple(value) if isinstance(value, list) else value
