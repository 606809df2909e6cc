"""Writes the recording of a job, on a thread, so that the launcher waits for no disk.

Samples are written of each process and kind once in an interval, which grows with the age of the job. Other events are
written at once, and only where one kind repeats hundreds of times they count as samples.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread

from topotrain.core.events import NO_NOTICES, Event, Notifier
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import (
    NOT_RECORDED,
    SAMPLES,
    Recorded,
    RecordingEnd,
    RecordingError,
    RecordingHeader,
    TimedEvent,
    to_line,
)
from topotrain.tools.recording.recording_file import Key, NewestSamples, RecordingFile, RecordingFollower, sample_key

WRITE_S = 0.25
SLOT_S = 0.5
"""Seconds for which samples are held: of each process and kind only the last one counts."""
SAMPLES_PER_S = 150
"""With more processes the slots are longer, so that all together have this many samples per second."""
WHOLE_S = 60.0
"""Up to this age of a job each slot is recorded. At n times this age it is one of n slots."""
WHOLE_EVENTS = 500
"""Events of a kind that are all recorded. Further ones count as samples."""
_CLOSE_S = 5.0  # for the last lines; the disk may not answer
_MOST_WAITING = 20_000
"""Events that wait for the disk. Of more the oldest ones are dropped."""
_TICK = 1e-6


class SampleSlots:
    """Holds samples until they are due.

    age: seconds for which earlier starts of the job were recorded.
    """

    def __init__(self, age: float = 0.0) -> None:
        self._age = age
        self._held: dict[Key, TimedEvent] = {}
        self._known: set[Key] = set()
        self._counts: Counter[str] = Counter()
        self._interval_ends = self._slot_ends = math.inf  # they begin with a sample

    def add(self, timed: TimedEvent) -> list[TimedEvent]:
        """Hold a sample, or return an event behind the held samples of its process."""
        event, key = timed.event, sample_key(timed)
        name = type(event).__name__
        self._counts[name] += 1
        if not isinstance(event, Event):
            return [*self.flush(), timed]
        if name not in SAMPLES and self._counts[name] <= WHOLE_EVENTS:
            who = getattr(event, "who", None)
            return [*(self.flush() if who is None else self._take(who)), timed]
        self._known.add(key)
        if math.inf in (self._slot_ends, self._interval_ends):
            slot = max(SLOT_S, len(self._known) / SAMPLES_PER_S)
            interval = slot * max(1.0, (self._age + timed.at) / WHOLE_S)
            self._slot_ends = min(self._slot_ends, timed.at + slot)
            self._interval_ends = min(self._interval_ends, timed.at + interval)
        # Removed first: the dictionary is then in the order of time.
        self._held.pop(key, None)
        self._held[key] = timed
        return []

    def due(self, now: float) -> list[TimedEvent]:
        """Return the held samples to record, if their interval is over."""
        return self.flush() if now >= self._interval_ends else []

    def newest(self, now: float, whole: bool = False) -> list[TimedEvent]:
        """Return the samples that stay held, if a slot is over. whole: in any case."""
        if not whole and now < self._slot_ends:
            return []
        self._slot_ends = math.inf
        return list(self._held.values())

    def flush(self) -> list[TimedEvent]:
        found, self._held = list(self._held.values()), {}
        self._interval_ends = self._slot_ends = math.inf
        return found

    def _take(self, who: str) -> list[TimedEvent]:
        keys = [key for key in self._held if key[1] == who]
        return [self._held.pop(key) for key in keys]


class RecordingWriter:
    """Writes the events of a start of a job, and keeps their history, on a thread.

    Args:
        path: of the file.
        header: of the start. `resumed`: an existing recording is continued.
        clock: returns seconds that never decrease.
        notifier: is told once when the file cannot be written. It is called on the thread of the writer.
        detailed: the history gets all samples, for the curves of exports. Else it gets those of the file and the newest
            ones.
        began: when the job began, by the clock; None: now.
    """

    def __init__(
        self,
        path: Path,
        header: RecordingHeader,
        clock: Callable[[], float],
        notifier: Notifier = NO_NOTICES,
        detailed: bool = False,
        began: float | None = None,
    ) -> None:
        self._path, self._clock, self._notifier, self._detailed = path, clock, notifier, detailed
        self.history = JobHistory()
        """With the earlier starts of the job. It has no job until these are read, and is replaced then."""
        self._header, self._newest = header, NewestSamples(path)
        self._began, self._last = clock() if began is None else began, 0.0
        self._waiting = deque([TimedEvent(0.0, header)], _MOST_WAITING)
        self._file: RecordingFile | None = None
        self._owed: list[TimedEvent] = []
        """Headers that could not be written yet."""
        self._told = False
        self._closing, self._wakes, self._asked, self._flushed = Flag(), Flag(), Flag(), Flag()
        self._lock = Lock()
        self._thread = Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def write(self, event: Recorded) -> None:
        """Take an event, on any thread. This never waits for the disk."""
        if isinstance(event, NOT_RECORDED) or self._closing.is_set():
            return
        with self._lock:
            # No two events have the same time: a follower finds its place by it.
            self._last = max(self._clock() - self._began, self._last + _TICK)
            self._waiting.append(TimedEvent(self._last, event))

    def close(self, code: int | None = None) -> None:
        """Write what is left, and the end of the job."""
        self.write(RecordingEnd(code))
        self._closing.set()
        self._wakes.set()
        self._thread.join(_CLOSE_S)

    def flush(self, within_s: float = 1.0) -> None:
        """Wait until all events are in the file, but not long."""
        if not self._closing.is_set():
            self._flushed.clear()
            self._asked.set()
            self._wakes.set()
            self._flushed.wait(within_s)

    def _run(self) -> None:
        history, closes = self._earlier(), False
        slots, known = SampleSlots(history.elapsed_s), -1.0
        while not closes:
            self._wakes.wait(WRITE_S)
            self._wakes.clear()
            closes, asked = self._closing.is_set(), self._asked.is_set()
            self._asked.clear()
            come, due = self._take(slots)
            newest = slots.newest(self._clock() - self._began, whole=asked or closes)
            # Samples that were held when the newest ones were asked for are known already.
            for timed in come if self._detailed else [each for each in (*due, *newest) if each.at > known]:
                history.add(timed)
            known = max((timed.at for timed in newest), default=known)
            # Only now: without its earlier starts the figures of a job are not right.
            self.history = history
            self._append(due, newest)
            if asked:
                self._flushed.set()
        with suppress(OSError):
            self._newest.remove()
        if self._file is not None:
            self._file.close()

    def _take(self, slots: SampleSlots) -> tuple[list[TimedEvent], list[TimedEvent]]:
        """Return what has come since the last call, and what is due in the file."""
        come, due = list[TimedEvent](), list[TimedEvent]()
        while self._waiting:
            timed = self._waiting.popleft()
            come.append(timed)
            due += [*slots.due(timed.at), *slots.add(timed)]
        return come, due + slots.due(self._clock() - self._began)

    def _append(self, due: Sequence[TimedEvent], newest: Sequence[TimedEvent]) -> None:
        lines = [*self._owed, *due]
        # Without its header a recording says nothing.
        self._owed = [timed for timed in lines if isinstance(timed.event, RecordingHeader)]
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write("".join(map(to_line, lines)))
            self._owed = []
            if newest:
                self._newest.write(self._header.started, newest)
        except OSError as error:
            if not self._told:
                self._told = True
                self._notifier.notify(
                    f"the recording {self._path} cannot be written ({error.strerror}); the job continues"
                )

    def _earlier(self) -> JobHistory:
        """Return the history of what the recording has already."""
        history = JobHistory()
        if self._header.resumed:
            with suppress(OSError, RecordingError), closing(RecordingFollower(self._path)) as follower:
                for timed in follower.poll():
                    history.add(timed)
        return history

    def _opened(self) -> RecordingFile:
        file = RecordingFile(self._path, self._header.resumed)
        # Those of a launcher that was killed.
        left = self._newest.read() if self._header.resumed else []
        file.write("".join(map(to_line, left)))
        self._newest.remove()
        return file
