"""Spans of time in a process, kept for one step and written when the process ends.

The first word of a span's name is its phase ("wait for means" is a wait). Without a profile the recorder is SILENT,
which does nothing. Times are nanoseconds of a clock that all processes of a host share.
"""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

PHASES = ("forward", "backward", "push", "reduce", "apply", "pull", "wait")
"""Phases of a step. A span with another first word is in the trace and counts as "other"."""

STEP = "step"
"""The span of a worker's whole step, which contains its other spans."""

ROLLING = 50_000
"""Number of spans that a server keeps, because it does not know in advance which step will be the last."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity on a track (a thread or a server), in nanoseconds."""

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


class Clock(ABC):
    """The time of a process, and the names of its threads."""

    @abstractmethod
    def now(self) -> int:
        """Return nanoseconds, which all processes of a host count alike."""

    @abstractmethod
    def thread(self) -> str:
        """Return the name of the calling thread."""


class Recorder(Protocol):
    """Interface by which code reports its activities."""

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        """Return a context manager; the span lasts for its block."""
        ...

    def mark(self) -> None:
        """Begin a span with a name that is known only at its end, see `since`."""
        ...

    def since(self, name: str) -> None:
        """Record the span from the last mark to now, which is a new mark."""
        ...

    def step_done(self, step: int) -> None:
        """Note the end of a worker's step, counted from 1; 0 is the time before step 1."""
        ...


# One object for all spans: without a profile a span must cost next to nothing.
_NOTHING = nullcontext()


class _Silent:
    """Records nothing."""

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        return _NOTHING

    def mark(self) -> None:
        pass

    def since(self, name: str) -> None:
        pass

    def step_done(self, step: int) -> None:
        pass


SILENT: Recorder = _Silent()


class _Open:
    """A span in progress."""

    __slots__ = ("_name", "_numbers", "_recorder", "_rows", "_start")

    def __init__(
        self, recorder: "_Recording", rows: MutableSequence[Span], name: str, numbers: Mapping[str, int]
    ) -> None:
        # The rows of its begin: a span of another thread may end after its step, when the recorder has new rows.
        self._recorder, self._rows, self._name, self._numbers = recorder, rows, name, numbers

    def __enter__(self) -> None:
        self._start = self._recorder.clock.now()

    def __exit__(self, *_: object) -> None:
        end = self._recorder.clock.now()
        self._rows.append(Span(self._name, self._recorder.track(), self._start, end, self._numbers))


class _Recording:
    """Keeps spans. Several threads may record at once."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # No lock: appending to a list or a deque is atomic.
        self.rows: MutableSequence[Span] = []
        self.listening = True
        self._marked = clock.now()

    def track(self) -> str:
        """The track of a span that ends now."""
        return self.clock.thread()

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        return _Open(self, self.rows, name, numbers) if self.listening else _NOTHING

    def mark(self) -> None:
        self._marked = self.clock.now()

    def since(self, name: str) -> None:
        if self.listening:
            now = self.clock.now()
            self.rows.append(Span(name, self.track(), self._marked, now))
            self._marked = now

    def step_done(self, step: int) -> None:
        raise NotImplementedError


class WorkerRecorder(_Recording):
    """Keeps the spans of a worker's step `wanted`, or of its last step before that.

    Args:
        wanted: the step, counted from 1.
        clock: of the process.
    """

    def __init__(self, wanted: int, clock: Clock) -> None:
        super().__init__(clock)
        self._wanted = wanted
        self._began = clock.now()
        self._kept: MutableSequence[Span] = []

    def step_done(self, step: int) -> None:
        if not self.listening:
            return
        now = self.clock.now()
        if step:
            self.rows.append(Span(STEP, self.track(), self._began, now, {"step": step}))
            # Kept at each step: the script may end before the wanted one.
            self._kept = self.rows
        self.rows = []
        self._began = self._marked = now
        # After the wanted step nothing is recorded, so the rest of the job runs at full speed.
        self.listening = step < self._wanted

    def kept(self) -> list[Span]:
        """Return the spans of the last step that was finished, its own span last."""
        return list(self._kept)


class ServerRecorder(_Recording):
    """Keeps the last spans of a server until every group is past the step `wanted`.

    Args:
        wanted, clock: as for `WorkerRecorder`.
        name: the server's name.
        groups: the worker groups of the server.
    """

    def __init__(self, wanted: int, clock: Clock, name: str, groups: Iterable[int]) -> None:
        super().__init__(clock)
        self._name = name
        self.rows = deque(maxlen=ROLLING)
        self._wanted = wanted
        self._before = set(groups)  # groups that have not passed the step `wanted`

    def track(self) -> str:
        """The server, whichever thread it runs on."""
        # It handles one message at a time, so its spans are nested even if they are on several threads.
        return self._name

    def span(self, name: str, **numbers: int) -> AbstractContextManager[object]:
        if numbers.get("step", 0) > self._wanted and "group" in numbers:
            # Groups that do not wait pass the step at different times, and the last of them must still be seen.
            self._before.discard(numbers["group"])
            self.listening = self.listening and bool(self._before)
        return super().span(name, **numbers)

    def step_done(self, step: int) -> None:
        """Do nothing: a server has no steps of its own."""

    def kept(self) -> list[Span]:
        """Return the spans, oldest first."""
        # A span is appended at its end, so a span around others comes after them.
        return sorted(self.rows, key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """The spans of one process, named by its first worker or server as in events."""

    who: str
    pid: int
    spans: tuple[Span, ...]

    @property
    def serves(self) -> bool:
        """Whether this is a process of servers."""
        return self.who.startswith("server")


def to_json(process: ProcessSpans) -> str:
    """Return the file of one process."""
    rows = [[s.name, s.track, s.start, s.end, dict(s.numbers)] for s in process.spans]
    return json.dumps({"who": process.who, "pid": process.pid, "spans": rows}, separators=(",", ":"))


def from_json(text: str) -> ProcessSpans:
    """Read the form of `to_json`. Raises ValueError for another text."""
    try:
        data: dict[str, Any] = json.loads(text)
        spans = tuple(Span(str(n), str(t), int(a), int(b), dict(numbers)) for n, t, a, b, numbers in data["spans"])
        return ProcessSpans(str(data["who"]), int(data["pid"]), spans)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the spans of a process: {error!r}") from None
