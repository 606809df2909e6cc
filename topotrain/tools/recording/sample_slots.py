"""The samples of a recording: of each process and kind one in an interval.

The interval grows with the age of the job.

A sample is an event of which a later one of the same process tells the same of a later time. Other events are written
at once, and only where one kind repeats hundreds of times they count as samples. This module is pure.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

from topotrain.core.events import Event
from topotrain.tools.recording.recorded_lines import SAMPLES, RecordingHeader, TimedEvent

SLOT_S = 0.5
"""Seconds for which samples are held: of each process and kind only the last one counts."""
SAMPLES_PER_S = 150
"""With more processes the slots are longer, so that all together have this many samples per second."""
WHOLE_S = 60.0
"""Up to this age of a job each slot is recorded. At n times this age it is one of n slots."""
WHOLE_EVENTS = 500
"""Events of a kind that are all recorded. Further ones count as samples."""

Key = tuple[Hashable, ...]


def sample_key(timed: TimedEvent) -> Key:
    """Return the key of an event: a later sample stands for earlier ones of its key."""
    event = timed.event
    values, loss = getattr(event, "values", None), getattr(event, "loss", None)
    names = sorted(map(str, values)) if isinstance(values, Mapping) else ()
    # Others of its kind may lack them.
    parts = (*names, *(("loss",) if loss is not None else ()))
    return (type(event).__name__, getattr(event, "who", ""), parts)


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


class SeenEvents:
    """The time of the last event of each kind and process, from two files."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._at: dict[Key, float] = {}

    def is_new(self, timed: TimedEvent) -> bool:
        """Note an event; return whether it is later than those of its kind so far."""
        event, key = timed.event, sample_key(timed)
        if isinstance(event, RecordingHeader) and event.started != self._started:
            self._started, self._at = event.started, {}
        new = timed.at > self._at.get(key, -1.0)
        if new:
            self._at[key] = timed.at
        return new
