"""Events: what the processes of a job report, one line of JSON each.

Every listener may drop any event. Counters are cumulative, and times count from the first step of the reporting
process, so a listener that joins late or misses a line is still right. The first field of an event is the name of a
process: "worker 0/1" or "server 0/1" (group/index), or "unit 3".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, dataclass_transform

FAILURE_KINDS = ("program", "peer", "config", "died", "internal", "quarantine")


class Event:
    """The base class of all events."""

    __slots__ = ()


class EventSink(Protocol):
    """Receives the events of one process, from any thread."""

    def emit(self, event: Event) -> None:
        """Report an event."""
        ...


_CLASSES: dict[str, type[Event]] = {}
EVENTS: Mapping[str, type[Event]] = MappingProxyType(_CLASSES)
"""All classes of events, by the name that their JSON has."""
# The type of each field. `fields` makes a new tuple in each call, and CPython keeps 2000 freed tuples of each length.
_KINDS: dict[type[Event], Mapping[str, Any]] = {}


MOST_LOGGED_NAMES = 100
"""Names of values that a worker may log with `tt.log`. Displays keep a curve of each."""
_E = TypeVar("_E", bound=Event)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def event(cls: type[_E]) -> type[_E]:
    """Make a class a frozen dataclass. Its fields are the keys of its JSON."""
    made = dataclass(frozen=True, slots=True)(cls)
    _CLASSES[made.__name__] = made
    _KINDS[made] = {f.name: f.type for f in fields(made)}  # type: ignore[arg-type]
    return made


@event
class Serving(Event):
    """A server is reachable at these URLs."""

    who: str
    urls: tuple[str, ...]
    pid: int


@event
class Started(Event):
    """A process has started."""

    who: str
    pid: int


@event
class Connects(Event):
    """The program of a worker connects to the servers, as in `tt.prepare`."""

    who: str


@event
class StepDone(Event):
    """A worker has completed a step.

    All numbers are totals since the start, except `loss`, which is the last one that the worker has seen, and `recent`.

    time: seconds since its first step began. samples: the number of samples that it was given.
    staleness_mean, staleness_max: in versions, over all updates. bytes_out, bytes_in: message bodies and headers.
    bytes_link: those of `bytes_out` that were sent over TCP.
    own_s: median of the seconds from the end of one wait to the next commit. None: too few were measured.
    late: the number of steps that backup workers have made without this worker.
    threads: the number of PyTorch's threads in the process at present. 0: unknown.
    waited_s: seconds for which the script has waited for servers and other workers.
    staleness_p95: in versions; 95 of 100 updates were at most so stale. Above 63 it is rounded up to a power of 2.
    epoch: number of the epoch that is under way, from 0. -1: unknown.
    progress: the share of the job's samples that are done, as of `tt.progress`. -1: unknown.
    recent: the staleness of the updates of the last 10 seconds: mean, 95th percentile, maximum. (): unknown.
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
    bytes_link: int = 0
    waited_s: float = 0.0
    staleness_p95: float = 0.0
    epoch: int = -1
    progress: float = -1.0
    recent: tuple[float, ...] = ()


@event
class Skipped(Event):
    """A step changed no value because a gradient was not finite. It used up its batch.

    step: counted from 1. total: the number of steps that this process has skipped.
    by: the worker that computed the gradient. "": only the sum of its group is known.
    parameter: one of the parameters concerned. "": rows of a table.
    """

    who: str
    step: int
    total: int
    by: str
    parameter: str


@event
class Counted(Event):
    """A server's counts of samples at its end, or at the last snapshot.

    samples: for each worker of its group, the number of its samples that are in the values. Each sample counts once.
        Those of the snapshot that the job resumed from are included.
    """

    who: str
    samples: dict[str, int] = field(hash=False)


@event
class Metrics(Event):
    """Values that the program reported about the final parameters."""

    values: dict[str, float] = field(hash=False)


@event
class Logged(Event):
    """The last values that a script has logged with `tt.log`.

    time: seconds since the first step of the process began; 0: it has not begun. step: as in StepDone.
    """

    who: str
    time: float
    step: int
    values: dict[str, float] = field(hash=False)


@event
class Tested(Event):
    """An evaluation of the values of a step: means over the samples.

    kind: "test" or "validate". skipped: the number of evaluations that were left out because an earlier one still ran.
    """

    who: str
    kind: str
    step: int
    values: dict[str, float] = field(hash=False)
    skipped: int


@event
class Failed(Event):
    """A process cannot continue.

    kind: one of FAILURE_KINDS. "quarantine" means that the gradients of its worker group are repeatedly not finite;
        other groups can continue without it. traceback: "" where there is none.
    """

    who: str
    kind: str
    text: str
    traceback: str

    def __post_init__(self) -> None:
        if self.kind not in FAILURE_KINDS:
            raise ValueError(f"Failed.kind = {self.kind!r}: must be one of {', '.join(FAILURE_KINDS)}")


@event
class Finished(Event):
    """A worker's program has ended well. The totals are those of StepDone."""

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
    bytes_link: int = 0
    waited_s: float = 0.0
    staleness_p95: float = 0.0
    epoch: int = -1
    progress: float = -1.0


@event
class Notice(Event):
    """A text for the user. The job continues."""

    who: str
    text: str


@event
class LastingNotice(Notice):
    """A text about the result, which is shown again at the end of the job."""


class Notifier:
    """Shows texts to the user. The base class drops them."""

    def notify(self, text: str) -> None:
        """Show a text. The job continues."""


class EventNotifier(Notifier):
    """Reports each text as a Notice of one process.

    Args:
        sink: gets the events.
        process: its name in them.
    """

    def __init__(self, sink: EventSink, process: str) -> None:
        self._sink, self._process = sink, process

    def notify(self, text: str) -> None:
        self._sink.emit(Notice(self._process, text))


NO_NOTICES = Notifier()
"""For callers that show no texts."""


@event
class Output(Event):
    """A piece of a process's output. stream: "stdout" or "stderr"."""

    who: str
    stream: str
    text: str


@event
class Waits(Event):
    """A worker has waited this long for servers or other workers, and still waits."""

    who: str
    seconds: float


@event
class Ending(Event):
    """A process has completed its work. One that ends without this event is lost."""

    who: str


@event
class Exited(Event):
    """A process has ended. code: the exit code, or minus the number of the signal."""

    who: str
    pid: int
    code: int


@event
class Frozen(Event):
    """A signal such as SIGSTOP has stopped a process, which may be continued."""

    who: str
    pid: int


@event
class Thawed(Event):
    """A stopped process has been continued."""

    who: str
    pid: int


@event
class Lost(Event):
    """A process has ended without an announcement. log: the end of its log."""

    who: str
    pid: int
    text: str
    log: str


@event
class Unrepeatable(Event):
    """A worker's group cannot restart alone; the text gives the reason.

    job: the whole job cannot restart either.
    """

    who: str
    text: str
    job: bool


@event
class Repeatable(Event):
    """A worker's script can repeat a step with fewer workers of its group, or cannot.

    text: why it cannot. "": it can, as all its steps so far have shown.
    """

    who: str
    text: str


@event
class Repeated(Event):
    """A worker has made a step that its group had to repeat.

    step: its number, as in StepDone. waited_s: seconds since the end of the step before.
    """

    who: str
    step: int
    waited_s: float


@event
class Incident(Event):
    """A process was lost, and the job continues.

    number: counted over the job, from 0. what: the loss, as text. action: its consequence, as text.
    at_s: seconds since the start of the job.
    """

    number: int
    who: str
    what: str
    action: str
    at_s: float


@event
class Recovered(Event):
    """The workers that an incident had stopped train again.

    waited_s: seconds from the loss to the first step of the restarted workers.
    others_s: the longest time in between without a reported step of a worker of another group, or without a step of a
        worker of the same group that was not restarted; 0 without one.
        Workers report their steps four times a second, so up to a quarter of a second is no delay.
    """

    number: int
    waited_s: float
    others_s: float


@event
class Saved(Event):
    """A snapshot is on disk.

    path: its folder. step: the last step of worker group 0 in it.
    why: "time" (seconds have passed), "step" (the job's `checkpoint_freq`) or "end" (the job was asked to end).
    """

    who: str
    number: int
    step: int
    path: str
    why: str


@event
class Unsaved(Event):
    """A last snapshot cannot be taken; the text gives the reason."""

    who: str
    text: str


@event
class Agreed(Event):
    """A server's answer to a request about a worker group.

    wish: "leave", "lose" or "join". text: the reason of a refusal; "": the server agrees.
    """

    who: str
    group: int
    wish: str
    text: str


@event
class Left(Event):
    """A worker group is absent from here on, and the job continues.

    how: the reason, as text. at_s: seconds since the start of the job.
    """

    group: int
    how: str
    at_s: float


@event
class Joined(Event):
    """A worker group that was absent starts. at_s: seconds since the job's start."""

    group: int
    incarnation: int
    at_s: float


@event
class Bounded(Event):
    """A script limits the number of workers in its group; the text gives the reason.

    most: the limit. 0: the number cannot change.
    """

    who: str
    most: int
    text: str


@event
class Resized(Event):
    """The only worker group of a job has another number of workers from here on.

    number: counted with the incidents; its Recovered event reports when the job trains. step: the last one before the
    change. at_s: seconds since the start of the job.
    """

    number: int
    former: int
    workers: int
    step: int
    at_s: float


@event
class Covered(Event):
    """A backup replica of a server is complete. shadows: its index, from 0."""

    who: str
    shadows: int


@event
class Missed(Event):
    """A server has lost its connection to its backup replica or to the first server."""

    who: str


@event
class Differs(Event):
    """A backup replica differs from its primary, and is replaced. shadows: its index."""

    who: str
    shadows: int


@event
class Final(Event):
    """The final parameters are in a file. seconds: the duration of the job."""

    path: str
    seconds: float


@event
class Apart(Event):
    """The distance of a server from the other server groups, over all its exchanges.

    updates_mean, updates_max: updates of other groups that an exchange brought.
    share: the norm of what the exchanges added, divided by the norm of the values.
    """

    who: str
    exchanges: int
    updates_mean: float
    updates_max: int
    share: float


@event
class Rounds(Event):
    """The rounds of an outer optimizer, as the coordinator has counted them.

    members: the number of rounds with so many worker groups. age_mean, age_max: rounds of the fragment that were made
    between the values that a group had received and the round that counts its push.
    last: the last rounds, each as text: fragment, number of the round, and its groups. Empty: the job goes on.
    """

    who: str
    members: dict[str, int] = field(hash=False)
    age_mean: float
    age_max: int
    last: tuple[str, ...]


@event
class LocalSteps(Event):
    """The steps that a worker makes alone between rounds, as counted by its process.

    made: all steps. pending: those that are in no round, as far as the worker knows, and dropped: those that were lost
    in an exchange (`keep`). A step of the whole model counts as 1, and of one of n fragments as 1/n.
    waited_s: seconds for which the worker has waited for others.
    """

    who: str
    made: int
    pending: float
    dropped: float
    waited_s: float


@event
class StateTaken(Event):
    """A worker that is back has taken the state of its optimizer from another group.

    whole: it did. Otherwise no group could give one, and the state is an older one, or fresh.
    """

    who: str
    whole: bool


@event
class Resources(Event):
    """The use of its host by a process, as the launcher of the host has read it.

    memory_bytes: resident memory, with what it shares with other processes. cpu_s: seconds of all its threads.
    """

    who: str
    pid: int
    memory_bytes: int
    cpu_s: float


@event
class Traffic(Event):
    """Bytes that a worker or a server has sent, by the name of each receiver.

    They count since its process began. Messages inside a process do not count.
    """

    who: str
    sent: dict[str, int] = field(hash=False)


@event
class ServerLoad(Event):
    """The work of a server.

    updates: steps that it has applied since the job's start, or since it was resumed. version: that of its values.
    busy_s: seconds for which this process has handled messages to the server.
    """

    who: str
    updates: int
    version: int
    busy_s: float


@event
class Slices(Event):
    """The parts of parameters that a server is home to.

    names: of the parameters. first, count: for each, its first element here and the number of its elements here.
    left_out: the number of parts that are not listed.
    """

    who: str
    names: tuple[str, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    left_out: int = 0


@event
class ReplayReport(Event):
    """A server of a job that is replayed tells how far it is.

    what: "whole life": it has all messages of a process of `worker`, number `number`, that the recording has seen die.
    "reached": it stops at version `number`. "ended": it stops where the recording of an interrupted job does.
    "differs": the program does something else, as `text` says.
    """

    who: str
    what: str
    worker: str
    number: int
    text: str


@event
class Tabled(Event):
    """A server's part of a table at the end. bytes: values, optimizer state, index."""

    who: str
    table: str
    rows: int
    bytes: int


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def to_json(event: Event) -> str:
    """Return an event as one line without its end."""
    # A loss that is not finite becomes NaN or Infinity: the readers use Python's json module, too.
    values = {name: getattr(event, name) for name in _KINDS[type(event)]}
    return _ENCODER.encode({"event": type(event).__name__, **values})


def from_json(line: str) -> Event:
    """Return the event of a line. Raises ValueError that names the field."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no event: {error}") from None
    name = data.pop("event", None) if isinstance(data, dict) else None
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"no event: {line[:80]!r}")
    kinds = _KINDS[cls]
    # Exactly these: a line of another version must not become an event with defaults.
    if data.keys() != kinds.keys():
        raise ValueError(f"{name}: has the fields {sorted(data)}, must have {sorted(kinds)}")
    return cls(**{key: _checked(name, key, kinds[key], value) for key, value in data.items()})


def _is_int(value: Any) -> bool:
    # JSON's true is an int in Python, and no number of an event.
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
        tuple[int, ...]: lambda v: isinstance(v, list) and all(map(_is_int, v)),
        tuple[float, ...]: lambda v: isinstance(v, list) and all(map(_is_float, v)),
        dict[str, int]: lambda v: isinstance(v, dict) and all(map(_is_int, v.values())),
        dict[str, float]: lambda v: isinstance(v, dict) and all(map(_is_float, v.values())),
    }
)


def _checked(event: Any, name: str, kind: Any, value: Any) -> Any:
    if not _HOLDS[kind](value):
        raise ValueError(f"{event}.{name} = {value!r}: must be {getattr(kind, '__name__', kind)}")
    return tuple(value) if isinstance(value, list) else value
