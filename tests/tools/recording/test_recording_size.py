"""A day of a job in a bounded file: by a clock that is set, with all of the writer but its thread.

`python -m tests.tools.recording.test_recording_size` records whole days, for the figures of the documentation.
"""

import itertools
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.recorded_jobs import day, header, history, servers_of
from topotrain.tools.recording.recorded_lines import TimedEvent, to_line
from topotrain.tools.recording.recording_file import FILE, LIMIT_BYTES, RecordingFile, read_recording
from topotrain.tools.recording.recording_thinning import SampleSlots

BOUND_BYTES = 50e6
DAY_S = 86_400.0


def record(path: Path, workers: int, seconds: float, limit: int = LIMIT_BYTES, every_s: float = 0.5) -> int:
    """Record a job; return the greatest size of the file."""
    slots, file, largest = SampleSlots(), RecordingFile(path, limit=limit), 0
    fields = {"nworker_groups": workers, "nworkers_per_group": 1, "nservers_per_group": servers_of(workers)}
    file.write(to_line(TimedEvent(0.0, header(**fields))))
    for at, found in itertools.groupby(day(workers, seconds, every_s), key=lambda pair: pair[0]):
        out = slots.due(at)
        for number, (_, event) in enumerate(found):
            out += slots.add(TimedEvent(at + 1e-6 * (number + 1), event))
        largest = max(largest, file.size + sum(len(to_line(timed)) for timed in out))
        file.write("".join(map(to_line, out)))
    file.write("".join(map(to_line, slots.flush())))
    file.close()
    return max(largest, path.stat().st_size)


def test_the_bound_has_room_for_what_comes_while_a_file_is_thinned() -> None:
    # The file and its successor lie side by side for a moment.
    assert LIMIT_BYTES * 1.5 + 20e6 < BOUND_BYTES


@pytest.mark.parametrize(("workers", "seconds", "share"), [(6, DAY_S / 48, 48), (150, 300.0, 2)])
def test_a_recording_stays_in_its_bound_and_tells_of_the_whole_time(
    tmp_path: Path, workers: int, seconds: float, share: int
) -> None:
    # A part of the time in a part of the room is thinned as the whole in the whole.
    limit = LIMIT_BYTES // share
    largest = record(tmp_path / FILE, workers, seconds, limit, every_s=2.0 if workers > 100 else 0.5)
    # Above the limit by what is written at once.
    assert limit / 2 < largest < limit * 1.25
    made = history(*read_recording(tmp_path / FILE))
    view = made.view()
    curves = [each["points"] for each in view["series"] if each["metric"] == "loss" and each["of"] == "worker 0/0"]
    (points,) = curves
    assert points[0][0] < 5 and points[-1][0] > seconds - 20
    # Intervals of old samples double when the room is too small.
    assert max(later[0] - earlier[0] for earlier, later in itertools.pairwise(points)) < seconds / 4
    assert len([entry for entry in view["story"] if entry["kind"] == "snapshot"]) >= seconds / 1300
    assert len(view["processes"]) == workers + servers_of(workers)


if __name__ == "__main__":
    for count in (6, 150):
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            most = record(Path(folder, FILE), count, DAY_S, every_s=4.0 if count < 100 else 120.0)
            print(count + servers_of(count), "processes:", most / 1e6, "MB;", time.process_time() - began, "s of a day")
