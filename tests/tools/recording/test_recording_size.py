"""A day of a job in a bounded file: by a clock that is set, with the real writer but for its thread."""

import itertools
import time
from pathlib import Path

import pytest

from tests.support.recorded_jobs import day, header, history, job_of
from topotrain.tools.recording.recorded_lines import TimedEvent, to_line
from topotrain.tools.recording.recording_file import FILE, LIMIT_BYTES, RecordingFile, read_recording
from topotrain.tools.recording.recording_thinning import SampleSlots

MB = 1e6
BOUND = 50 * MB


def record(path: Path, workers: int, seconds: float, limit: int) -> float:
    """Record a job; return the greatest size of the file in between."""
    slots, file, largest = SampleSlots(), RecordingFile(path, limit=limit), 0.0
    file.write(to_line(TimedEvent(0.0, header(nworker_groups=workers, nworkers_per_group=1))))
    for at, found in itertools.groupby(day(workers, seconds), key=lambda pair: pair[0]):
        out: list[TimedEvent] = slots.due(at)
        for number, (_, event) in enumerate(found):
            out += slots.add(TimedEvent(at + 1e-6 * (number + 1), event))
        file.write("".join(map(to_line, out)))
        largest = max(largest, path.stat().st_size)
    file.write("".join(map(to_line, slots.flush())))
    file.close()
    return max(largest, path.stat().st_size)
