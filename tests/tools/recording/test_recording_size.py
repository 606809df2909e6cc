"""The size of a recording by the age of its job: with a clock that is set, and all of the writer but its thread.

`python -m tests.tools.recording.test_recording_size` records whole days, for the figures of the documentation.
"""

import itertools
import math
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.recorded_jobs import day, header, history, read_recording, servers_of
from topotrain.tools.recording.recorded_lines import TimedEvent, to_line
from topotrain.tools.recording.recording_file import FILE, RecordingFile
from topotrain.tools.recording.recording_writer import SAMPLES_PER_S, WHOLE_S, SampleSlots

LINE_BYTES = 400
DAY_S = 86_400.0


def record(path: Path, workers: int, seconds: float, every_s: float = 0.5) -> int:
    """Record a job; return the size of the file."""
    slots, file = SampleSlots(), RecordingFile(path)
    fields = {"nworker_groups": workers, "nworkers_per_group": 1, "nservers_per_group": servers_of(workers)}
    file.write(to_line(TimedEvent(0.0, header(**fields))))
    for at, found in itertools.groupby(day(workers, seconds, every_s), key=lambda pair: pair[0]):
        out = slots.due(at)
        for number, (_, event) in enumerate(found):
            out += slots.add(TimedEvent(at + 1e-6 * (number + 1), event))
        file.write("".join(map(to_line, out)))
    file.write("".join(map(to_line, slots.flush())))
    file.close()
    return path.stat().st_size


def most(seconds: float) -> float:
    """The most bytes of samples of a job of this age, however many processes it has."""
    return LINE_BYTES * SAMPLES_PER_S * WHOLE_S * (1 + math.log(seconds / WHOLE_S))


@pytest.mark.parametrize(("workers", "seconds", "every_s"), [(6, 3600.0, 0.5), (150, 600.0, 4.0)])
def test_a_recording_grows_with_the_logarithm_of_the_age_and_tells_of_the_whole_time(
    tmp_path: Path, workers: int, seconds: float, every_s: float
) -> None:
    sizes = [record(tmp_path / FILE, workers, seconds / share, every_s) for share in (4, 2, 1)]
    # Twice the age costs as much as twice the age before.
    assert sizes[2] - sizes[1] < 1.3 * (sizes[1] - sizes[0]) and sizes[2] < most(seconds)
    view = history(*read_recording(tmp_path / FILE)).view()
    (points,) = [each["points"] for each in view["series"] if each["metric"] == "loss" and each["of"] == "worker 0/0"]
    assert points[0][0] < 8 and points[-1][0] > seconds - 2 * every_s
    assert max(later[0] - earlier[0] for earlier, later in itertools.pairwise(points)) < seconds / 8
    assert len([entry for entry in view["story"] if entry["kind"] == "snapshot"]) >= seconds / (600 * every_s)
    assert len(view["processes"]) == workers + servers_of(workers)


if __name__ == "__main__":
    for count in (6, 150):
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            size = record(Path(folder, FILE), count, DAY_S, every_s=0.5 if count < 100 else 8.0)
            print(count + servers_of(count), "processes:", size / 1e6, "MB;", time.process_time() - began, "s of a day")
