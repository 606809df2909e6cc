"""Which samples a recording has: a bounded rate, and fewer when they are old.

A sample is an event of which a later one of the same process tells the same of a later time. All other events are
written at once and kept. This module is pure.
"""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from topotrain.core.events import Event
from topotrain.tools.recording.recorded_lines import END, HEADER, ONCE, SAMPLES, TimedEvent

SLOT_S = 0.5
"""Seconds for which samples are held: of each process and kind the last one is written."""
SAMPLES_PER_S = 150
"""With more processes the slots are longer, so that all together have this many samples per second."""
RATE_S = 10.0
"""Seconds over which rates are measured. All samples so long before the last one of a process are kept."""
_FIRST_BUCKET_S = 1.0
_EVENTS_SHARE = 4
"""Events that are no samples get a quarter of the room."""

_Key = tuple[Hashable, ...]


def _parts(values: object, loss: object) -> tuple[str, ...]:
    """Return the parts of a sample that others of its kind may lack.

    These are the names of logged values, and the loss of a step.
    """
    names = sorted(map(str, values)) if isinstance(values, Mapping) else []
    return (*names, *(("loss",) if loss is not None else ()))


class SampleSlots:
    """Holds samples until their slot is over; returns those to write, by time."""

    def __init__(self) -> None:
        self._held: dict[_Key, TimedEvent] = {}
        self._known: set[_Key] = set()
        self._until: float | None = None

    def add(self, timed: TimedEvent) -> list[TimedEvent]:
        """Hold a sample, or return an event behind the held samples that came before it."""
        event = timed.event
        if not isinstance(event, Event) or type(event).__name__ not in SAMPLES:
            return [*self.flush(), timed]
        parts = _parts(getattr(event, "values", None), getattr(event, "loss", None))
        key = (type(event).__name__, getattr(event, "who", ""), parts)
        self._known.add(key)
        if self._until is None:
            self._until = timed.at + max(SLOT_S, len(self._known) / SAMPLES_PER_S)
        # Removed first: the dictionary is then in the order of time.
        self._held.pop(key, None)
        self._held[key] = timed
        return []

    def due(self, now: float) -> list[TimedEvent]:
        """Return the held samples if their slot is over."""
        return self.flush() if self._until is not None and now >= self._until else []

    def flush(self) -> list[TimedEvent]:
        """Return the held samples."""
        found, self._until = list(self._held.values()), None
        self._held.clear()
        return found


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """The facts that the thinning knows of a line.

    index: its place in the file. start: the number of the start of the job. key: equal for samples of which a later one
    stands for the earlier ones; None for other events. kind: the name of the event.
    """

    index: int
    size: int
    start: int
    at: float
    kind: str
    key: _Key | None


def described(lines: Iterable[str]) -> list[RecordedLine]:
    """Return the facts of each line for thinning, without lines that cannot be read."""
    found: list[RecordedLine] = []
    start, started = 0, None
    for index, line in enumerate(lines):
        try:
            data = json.loads(line)
            kind, at = data["event"], float(data["at"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if kind == HEADER and data.get("started") != started:
            start, started = start + 1, data.get("started")
        key: _Key | None = None
        if kind in SAMPLES or kind in ONCE:
            key = (start, str(kind), str(data.get("who", "")), _parts(data.get("values"), data.get("loss")))
        found.append(RecordedLine(index, len(line), start, at, str(kind), key))
    return found


def thinned(lines: Sequence[RecordedLine], room: int) -> list[int]:
    """Return the indices of the lines to keep, in order, of about `room` bytes.

    The first sample of each process and kind is kept, and the last ones, from which the present rates are made. Of the
    others the newer half of the room is kept whole. Of the older ones the last of each interval is kept.
    """
    events = _bounded([line for line in lines if line.key is None], room // _EVENTS_SHARE)
    samples = [line for line in lines if line.key is not None]
    left = room - sum(line.size for line in events)
    fixed = _fixed(samples, RATE_S)
    if sum(line.size for line in samples if line.index in fixed) > left // 2:
        # So many processes that only the last two of each fit.
        fixed = _fixed(samples, 0.0)
    recent = left // 2
    for line in reversed(samples):
        recent -= line.size
        if recent < 0:
            break
        fixed.add(line.index)
    bucket_s = _FIRST_BUCKET_S
    while sum(line.size for line in samples) > left:
        kept = _last_of_each(samples, fixed, bucket_s)
        # All that may be dropped is gone, or one per process and start is left.
        if bucket_s > 1e9:
            samples = kept
            break
        samples, bucket_s = kept, bucket_s * 2
    return sorted(line.index for line in (*events, *samples))


def _fixed(samples: Sequence[RecordedLine], window_s: float) -> set[int]:
    """Return the indices of samples that are kept whatever their age is.

    window_s: how long before the last one of a process.
    """
    of_key: dict[_Key, list[RecordedLine]] = {}
    for line in samples:
        assert line.key is not None
        of_key.setdefault(line.key, []).append(line)
    found: set[int] = set()
    for same in of_key.values():
        last = same[-1].at
        if same[-1].kind in ONCE:
            found.add(same[-1].index)
            continue
        found |= {same[0].index, same[-1].index}
        # One more than those of the window: a rate needs a sample before.
        for line in reversed(same[:-1]):
            found.add(line.index)
            if line.at < last - window_s:
                break
    return found


def _last_of_each(samples: Sequence[RecordedLine], fixed: set[int], bucket_s: float) -> list[RecordedLine]:
    """Return the last sample of each key and bucket, and those that are kept anyway.

    bucket_s: the seconds of a bucket.
    """
    taken: set[_Key] = set()
    found: list[RecordedLine] = []
    for line in reversed(samples):
        assert line.key is not None
        place = (*line.key, line.at // bucket_s)
        if line.index in fixed or (place not in taken and line.kind not in ONCE):
            found.append(line)
        taken.add(place)
    found.reverse()
    return found


def _bounded(events: Sequence[RecordedLine], room: int) -> list[RecordedLine]:
    """Return events that fit into the room.

    Of the most frequent kinds those in the middle are dropped.
    """
    kept = list(events)
    while sum(line.size for line in kept) > room:
        of_kind: dict[str, list[RecordedLine]] = {}
        for line in kept:
            of_kind.setdefault(line.kind, []).append(line)
        # The first header says what the job is, and the last ones what holds now.
        kind = max(of_kind, key=lambda name: sum(line.size for line in of_kind[name]))
        same = of_kind[kind]
        if len(same) < 4:
            break
        dropped = {line.index for line in same[len(same) // 4 : len(same) // 2]}
        if kind in (HEADER, END):
            dropped.discard(same[0].index)
        kept = [line for line in kept if line.index not in dropped]
    return kept
