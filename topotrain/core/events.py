"""What a process may tell: frozen events, each one line of JSON.

Rule: an event is data that anybody may drop. Nothing here decides or remembers. Counters are cumulative and times count
from the teller's own first step, so that a listener that joins late, or misses a line, is still right. `who` is
"worker 0/1" or "server 0/1" (group/index), or "unit 3".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_args

KINDS = ("program", "peer", "config", "died", "internal", "quarantine")


@dataclass(frozen=True, slots=True)
class Serving:
    """A process listens: its addresses as URLs."""

    who: str
    urls: tuple[str, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """A process is up and knows its place."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A worker has done `step` steps, `time` seconds after its first step began, and was given `samples` samples.

    Staleness is counted in versions, over all updates so far; bytes are those of message bodies and headers. All
    numbers are totals since the start, except `loss`: the last one that the worker has seen, None if it has seen none.

    own_s: median of the seconds that the worker itself takes for a step, from the end of one wait to its next commit;
    None: too few were measured. late: steps that backup workers have made without it, for it came too late.
    threads: that PyTorch computes with in the worker's process, at this moment; 0: not told.
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
    """Step `step` (from 1) of worker `who` has changed no value: some gradient was not finite. Its batch is used up.

    total: this process's skipped steps so far. by: the worker whose gradient it was, "" where only the sum of its group
    is known. parameter: one of which it is true, "" for rows of a table.
    """

    who: str
    step: int
    total: int
    by: str
    parameter: str


@dataclass(frozen=True, slots=True)
class Counted:
    """What server `who` has counted at its end, or at the snapshot with which the job ends.

    samples: of each worker of its group, by name, how many of its samples are in the values, each once; with those of
    the snapshot that the job went on from.
    """

    who: str
    samples: dict[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the program reported about the final parameters."""

    values: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Tested:
    """What the values of step `step` gave on the data of `kind`, "test" or "validate": means over its samples.

    `skipped` evaluations were left out until then, because an earlier one still ran.
    """

    who: str
    kind: str
    step: int
    values: dict[str, float] = field(hash=False)
    skipped: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The teller cannot go on. `kind` is one of KINDS: whose fault it is; `traceback` is empty where there is none.

    "quarantine": its worker group's, whose gradients are not finite again and again; others could go on without it.
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
    """A worker's program has ended well; totals as in StepDone."""

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
    """Something the user should read; the job goes on."""

    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of what a process wrote to `stream`, "stdout" or "stderr"."""

    who: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Waits:
    """Worker `who` has waited for `seconds` for what servers or other workers have to say, and waits on."""

    who: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ending:
    """A process has done all that it had to do, and is about to end: an end without this word is a loss."""

    who: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process is gone; a negative code is the signal that ended it."""

    who: str
    pid: int
    code: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A process was stopped by a signal, SIGSTOP for example; it may be continued."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class Thawed:
    """A process that was stopped has been continued."""

    who: str
    pid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The process of `who` is gone without saying why; `log` is the end of what it wrote. Others say what follows."""

    who: str
    pid: int
    text: str
    log: str


@dataclass(frozen=True, slots=True)
class Unrepeatable:
    """A worker's group cannot be started again by itself, nor, if `job`, the job as a whole; the text says why."""

    who: str
    text: str
    job: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """Something was lost, `at_s` seconds after the job's start, and the job goes on.

    `what` happened, and what is done about it, `action`, are words. Incidents of a job have numbers from 0.
    """

    number: int
    who: str
    what: str
    action: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """What incident `number` had stopped trains again.

    waited_s: from the loss to the first step of those that were started again. others_s: meanwhile the longest time
    that a worker of another group was without a sign of a step; 0 where there is no other group. Workers tell of their
    steps four times a second, so that anything up to a quarter of a second is no wait at all.
    """

    number: int
    waited_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Snapshot `number` is on disk in the folder `path`, taken behind step `step` of worker group 0.

    why: "time" (seconds have passed), "step" (the job's `checkpoint_freq`), "end" (the job was asked to end).
    """

    who: str
    number: int
    step: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A job that was asked to end cannot take a last snapshot; the text says why."""

    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """A server's answer to what is wished of a worker group: "leave", "lose" or "join"; text: why not, "": agreed."""

    who: str
    group: int
    wish: str
    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """A worker group is not there, `at_s` seconds after the job's start, and the job goes on; `how` says why."""

    group: int
    how: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker group that was not there starts, `at_s` seconds after the job's start."""

    group: int
    incarnation: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Bounded:
    """A worker group of this script can have `most` workers; 0: no other number than it has. The text says why."""

    who: str
    most: int
    text: str


@dataclass(frozen=True, slots=True)
class Resized:
    """The one worker group of a job had `former` workers and has `workers` from here on; it goes on behind step `step`.

    at_s: seconds after the job's start. number: counted with the incidents; its Recovered tells when the job trains.
    """

    number: int
    former: int
    workers: int
    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Covered:
    """The so-manieth second copy of server `who` has everything from now on; it was number 0 at the start."""

    who: str
    shadows: int


@dataclass(frozen=True, slots=True)
class Missed:
    """The way from server `who` to its second copy, or to the first server, has ended, and why is not known to it."""

    who: str


@dataclass(frozen=True, slots=True)
class Differs:
    """The so-manieth second copy of server `who` was found to be another than the first; it is made anew."""

    who: str
    shadows: int


@dataclass(frozen=True, slots=True)
class Final:
    """The final parameters are in the file `path`; the job took `seconds`."""

    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Apart:
    """At the job's end: how far server `who` was from the other server groups, over all its exchanges with them.

    updates_mean, updates_max: updates of other groups that an exchange brought. share: the norm of what it added over
    that of the values.
    """

    who: str
    exchanges: int
    updates_mean: float
    updates_max: int
    share: float


@dataclass(frozen=True, slots=True)
class Tabled:
    """At the job's end server `who` held so many rows of a table, in so many bytes: values, optimizer state, index."""

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
    """One line without its end; a loss that is no number stays NaN or Infinity, as Python's json writes them."""
    values = {f.name: getattr(event, f.name) for f in fields(event)}
    return json.dumps({"event": type(event).__name__, **values}, separators=(",", ":"))


def from_json(line: str) -> Event:
    """The event of a line. Raises ValueError, naming what is wrong, for anything `to_json` did not write."""
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
