"""What a process did, and when: spans of time, kept for one step and handed over when the process ends.

Rule: whoever records knows no clock and no thread; both are given to the recorder by the floor that has them. The first
word of a span's name is its phase ("wait for means" is a wait), and PHASES names them all. Nobody asked for a profile:
then SILENT is told, which does nothing. Times are nanoseconds of a clock that all processes of a host share.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

PHASES = ("forward", "backward", "push", "reduce", "apply", "pull", "wait")
"""What a step is made of. A name that begins with another word is told in the trace and counted as "other"."""

STEP = "step"
"""The span that a worker's whole step is; everything else that it does stands inside."""

ROLLING = 50_000
"""How many spans a server keeps: it does not know beforehand which step will be the last."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that `track` (a thread, or a server) did from `start` to `end`, in nanoseconds."""

    name: str
    track: str
    start: int
    end: int
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """One of PHASES, or "other"."""
        first = self.name.partition(" ")[0]
        return first if first in PHASES else "other"


class Recorder(Protocol):
    """What those who do something tell of it."""

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        """From here to the end of the `with` block."""
        ...

    def mark(self) -> None:
        """Something begins here whose name only its end will tell; see `since`."""
        ...

    def since(self, name: str) -> None:
        """From the last mark to here, which is a mark again."""
        ...

    def step_done(self, step: int) -> None:
        """A worker has finished step `step`, counted from 1; 0 is what comes before the first."""
        ...


class _Silent:
    """Nobody listens."""

    _NOTHING = nullcontext()

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        return self._NOTHING

    def mark(self) -> None:
        pass

    def since(self, name: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass


SILENT: Recorder = _Silent()


class _Open:
    """A span that has begun; it goes to where its recorder kept spans when it began."""

    __slots__ = ("_name", "_numbers", "_recorder", "_rows", "_start")

    def __init__(
        self, recorder: "_Recording", rows: MutableSequence[Span], name: str, numbers: Mapping[str, int]
    ) -> None:
        self._recorder, self._rows, self._name, self._numbers = recorder, rows, name, numbers

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        end = self._recorder.clock()
        self._rows.append(Span(self._name, self._recorder.track(), self._start, end, self._numbers))


class _Recording:
    """Keeps spans. Several threads may tell at once: appending is one step of the interpreter."""

    def __init__(self, clock: Callable[[], int], track: Callable[[], str]) -> None:
        self.clock = clock
        self.track = track
        self.rows: MutableSequence[Span] = []
        self.listening = True
        self._marked = clock()

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        return _Open(self, self.rows, name, numbers) if self.listening else _Silent._NOTHING

    def mark(self) -> None:
        self._marked = self.clock()

    def since(self, name: str) -> None:
        if self.listening:
            now = self.clock()
            self.rows.append(Span(name, self.track(), self._marked, now))
            self._marked = now

    def step_done(self, step: int) -> None:
        raise NotImplementedError


class WorkerRecorder(_Recording):
    """Of a worker: keeps its step `wanted` (counted from 1), or its last one where it ends before.

    Args:
        wanted: the step.
        clock: nanoseconds.
        track: the name of the calling thread.
    """

    def __init__(self, wanted: int, clock: Callable[[], int], track: Callable[[], str]) -> None:
        super().__init__(clock, track)
        self._wanted = wanted
        self._began = clock()
        self._kept: MutableSequence[Span] = []

    def step_done(self, step: int) -> None:
        if not self.listening:
            return
        now = self.clock()
        if step:
            self.rows.append(Span(STEP, self.track(), self._began, now, {"step": step}))
            self._kept = self.rows
        self.rows = []
        self._began = self._marked = now
        self.listening = step < self._wanted

    def kept(self) -> list[Span]:
        """The spans of the step, its own span last; none if no step was finished."""
        return list(self._kept)


class ServerRecorder(_Recording):
    """Of a server: keeps what it did lately, and stops when every group is past the step `wanted` (counted from 1).

    Args:
        wanted, clock: as above.
        track: the server's name; it handles one message at a time, so that its spans stand inside one another.
        groups: the worker groups that it serves.
    """

    def __init__(self, wanted: int, clock: Callable[[], int], track: str, groups: Iterable[int]) -> None:
        super().__init__(clock, lambda: track)
        self.rows = deque(maxlen=ROLLING)
        self._wanted = wanted
        self._before = set(groups)

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        if numbers.get("step", 0) > self._wanted and "group" in numbers:
            self._before.discard(numbers["group"])
            self.listening = self.listening and bool(self._before)
        return super().span(name, **numbers)

    def step_done(self, step: int) -> None:
        """A server has no steps of its own."""

    def kept(self) -> list[Span]:
        """The spans, oldest first."""
        return sorted(self.rows, key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """What one process hands over. `who`: its first resident, as in events."""

    who: str
    pid: int
    spans: tuple[Span, ...]

    @property
    def serves(self) -> bool:
        """Whether this is a process of servers."""
        return self.who.startswith("server")


def to_json(process: ProcessSpans) -> str:
    """The file of one process."""
    rows = [[s.name, s.track, s.start, s.end, dict(s.numbers)] for s in process.spans]
    return json.dumps({"who": process.who, "pid": process.pid, "spans": rows}, separators=(",", ":"))


def from_json(text: str) -> ProcessSpans:
    """What `to_json` wrote. Raises ValueError for anything else."""
    try:
        data: dict[str, Any] = json.loads(text)
        spans = tuple(Span(str(n), str(t), int(a), int(b), dict(numbers)) for n, t, a, b, numbers in data["spans"])
        return ProcessSpans(str(data["who"]), int(data["pid"]), spans)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no spans of a process: {error!r}") from None
