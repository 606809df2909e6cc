"""Recordings on disk: what is written is read, whatever has happened to the file, to the disk and to the writer."""

import errno
import itertools
import json
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_events import EXAMPLES
from tests.support.recorded_jobs import SERVERS, STARTED, WORKERS, Clock, header, history, read_recording, step
from topotrain.core import events
from topotrain.core.events import EVENTS, Event, Notifier, Output
from topotrain.tools.recording import recorded_lines, recording_file
from topotrain.tools.recording.recorded_lines import (
    LONGEST_TEXT,
    VERSION,
    RecordingEnd,
    RecordingError,
    RecordingHeader,
    TimedEvent,
    from_line,
    to_line,
)
from topotrain.tools.recording.recording_file import FILE, RecordingFollower
from topotrain.tools.recording.recording_writer import RecordingWriter


class Told(Notifier):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notify(self, text: str) -> None:
        self.texts.append(text)


def written(path: Path, *events_: Event, code: int | None = 0, resumed: bool = False, **more: object) -> None:
    writer = RecordingWriter(path, header(STARTED + resumed, resumed), Clock(), **more)  # type: ignore[arg-type]
    for event in events_:
        writer.write(event)
    writer.close(code)


@st.composite
def recordings(draw: st.DrawFn, most: int = 30) -> list[TimedEvent]:
    """Whole recordings: starts of a job, the later ones resumed, with events of all kinds at any distance."""
    found: list[TimedEvent] = []
    numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True)
    for start in range(draw(st.integers(1, 2))):
        at = 0.0
        found.append(TimedEvent(0.0, header(STARTED + 1e6 * start, resumed=start > 0)))
        for number in range(draw(st.integers(0, most))):
            at += draw(st.sampled_from((0.01, 0.2, 0.5, 3.0, 60.0, 3600.0)))
            event = draw(st.sampled_from(EXAMPLES) | st.builds(step, loss=numbers, number=st.just(number)))
            if hasattr(event, "who"):
                event = replace(event, who=draw(st.sampled_from((*WORKERS, *SERVERS))))
            found.append(TimedEvent(round(at, 6), event))
        if draw(st.booleans()):
            found.append(TimedEvent(round(at + 1, 6), RecordingEnd(draw(st.sampled_from((0, 1, None))))))
    return found


def events_of(path: Path) -> list[object]:
    return [timed.event for timed in read_recording(path)]


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_every_event_comes_back_from_its_line() -> None:
    for event in [*EXAMPLES, header(), RecordingEnd(0), RecordingEnd(None)]:
        line = to_line(TimedEvent(1.5, event))
        assert line.endswith("\n") and line.count("\n") == 1
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        found = from_line(line)
        assert found is not None and found.at == 1.5
        assert repr(found.event) == repr(event)  # NaN is not equal to itself
    assert {*recorded_lines.SAMPLES} <= EVENTS.keys()
    assert "args" not in json.loads(to_line(TimedEvent(0.0, header())))["job"], "a recording may be shown to others"


def test_numbers_that_json_does_not_have_are_texts() -> None:
    for value, text in ((float("nan"), "NaN"), (float("inf"), "Infinity"), (-float("inf"), "-Infinity")):
        line = to_line(TimedEvent(0.0, step(loss=value)))
        assert json.loads(line)["loss"] == text
        logged = to_line(TimedEvent(0.0, events.Logged("worker 0/0", 1.0, 1, {"a": value})))
        assert json.loads(logged)["values"] == {"a": text}
        for each, get in ((line, lambda e: e.loss), (logged, lambda e: e.values["a"])):
            found = from_line(each)
            assert found is not None and repr(get(found.event)) == repr(value)
    event = events.Notice("worker 0/0", "NaN")
    found = from_line(to_line(TimedEvent(0.0, event)))
    assert found is not None and found.event == event, "a text with such a name stays a text"


LEFT_OUT = (
    "",
    "null",
    "[]",
    "{",
    '{"at":1}',
    '{"event":"StepDone"}',
    '{"at":1,"event":"OfTheFuture","who":"worker 0/0"}',
    '{"at":1,"event":"Traveled","who":"worker 0/0","to":"server 0/0","what":"push","step":3,"bucket":7}',  # removed
    '{"at":1,"event":["StepDone"]}',
    '{"at":"x","event":"Waits","who":"worker 0/0","seconds":1}',
    '{"at":1,"event":"Waits","who":7,"seconds":1}',
    '{"at":1,"event":"Waits","who":"worker 0/0"}',
    '{"at":1,"event":"Failed","who":"w","kind":"unheard of","text":"","traceback":""}',
    "[" * 5000,
)


def test_a_line_that_is_no_event_of_this_version_is_left_out() -> None:
    assert [from_line(line) for line in LEFT_OUT] == [None] * len(LEFT_OUT)


def test_fields_of_other_versions_do_not_matter() -> None:
    line = '{"at": 2, "event": "StepDone", "who": "worker 0/0", "time": 1, "step": 7, "samples": 9, "loss": null, '
    line += '"staleness_mean": 0, "staleness_max": 0, "bytes_out": 1, "bytes_in": 1, "of_the_future": {"a": []}}'
    found = from_line(line)
    # A field of this version that an earlier one does not have gets its default.
    assert found is not None and isinstance(found.event, events.StepDone) and found.at == 2.0
    assert (found.event.step, found.event.progress, found.event.epoch) == (7, -1.0, -1)


def test_a_recording_of_a_newer_version_is_refused() -> None:
    line = to_line(TimedEvent(0.0, header())).replace('"version":1', f'"version":{VERSION + 1}')
    with pytest.raises(RecordingError, match=f"is of version {VERSION + 1}, and this topotrain reads"):
        from_line(line)


def test_of_long_texts_the_end_is_kept() -> None:
    found = from_line(to_line(TimedEvent(0.0, events.Failed("worker 0/0", "program", "x", "a" * 10**6 + "the error"))))
    assert found is not None and isinstance(found.event, events.Failed)
    assert len(found.event.traceback) == LONGEST_TEXT and found.event.traceback.endswith("the error")


# ---- the writer ------------------------------------------------------------------------------------------------------


def test_a_recording_has_all_events_but_output_between_header_and_end(tmp_path: Path) -> None:
    path = tmp_path / "work" / FILE
    written(path, *EXAMPLES, *[events.Notice("launcher", str(n)) for n in range(100)], code=3)
    found = events_of(path)
    assert isinstance(found[0], RecordingHeader) and found[-1] == RecordingEnd(3)
    # Of the same kind and process only the last sample of half a second is there.
    names = {type(event).__name__ for event in found[1:-1]}
    assert names == {type(event).__name__ for event in EXAMPLES} - {Output.__name__}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    times = [timed.at for timed in read_recording(path) if isinstance(timed.event, events.Notice)]
    assert times == sorted(set(times)), "no two have one time"


def test_a_second_run_begins_anew_and_a_resumed_one_goes_on_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for text in ("first", "second"):
        written(path, events.Notice("launcher", text))
    with path.open("ab") as file:
        file.write(b'{"at":9.0,"event":"Noti')
    written(path, events.Notice("launcher", "third"), resumed=True)
    found = events_of(path)
    assert [type(event).__name__ for event in found] == ["RecordingHeader", "Notice", "RecordingEnd"] * 2
    assert [event.text for event in found if isinstance(event, events.Notice)] == ["second", "third"]
    seen = history(*read_recording(path)).view()
    assert [entry["kind"] for entry in seen["story"]] == ["notice", "ended", "notice", "notice", "ended"]


def test_samples_are_written_at_most_twice_a_second_and_other_events_behind_those_before_them(tmp_path: Path) -> None:
    path, clock = tmp_path / FILE, Clock()
    writer = RecordingWriter(path, header(), clock)
    for tick in range(400):
        clock.now = tick / 40
        writer.write(step(number=tick))
    writer.write(events.Incident(0, "worker 0/0", "was killed", "restarts", 0.1))
    clock.now += 0.1
    writer.write(step(number=3))
    writer.write(events.Waits("worker 0/0", 1.0))
    writer.close(0)
    *timed, last, incident, again, _waits, _end = read_recording(path)
    steps = [each for each in timed if isinstance(each.event, events.StepDone)]
    assert 18 <= len(steps) + 1 <= 22
    assert all(later.at - earlier.at >= 0.4 for earlier, later in itertools.pairwise(steps))
    assert [getattr(each.event, "step", type(each.event).__name__) for each in (last, incident, again)] == [
        399,
        "Incident",
        3,
    ]


def test_a_full_disk_costs_one_notice_and_the_recording_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told, full, real = tmp_path / FILE, Told(), threading.Event(), os.write
    tried = threading.Semaphore(0)

    def write(fd: int, data: bytes) -> int:
        if not full.is_set():
            return real(fd, data)
        tried.release()
        # Some of it still fits.
        real(fd, bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recording_file.os, "write", write)
    writer = RecordingWriter(path, header(), Clock(), told)
    writer.write(events.Notice("launcher", "before"))
    writer.flush(10)
    full.set()
    for text in ("lost", "lost, too"):
        writer.write(events.Notice("launcher", text))
        writer.flush(10)
        assert tried.acquire(timeout=10)
    full.clear()
    writer.write(events.Notice("launcher", "after"))
    writer.close(0)
    (text,) = told.texts
    assert str(path) in text and "No space left on device" in text and "the job continues" in text
    assert [e.text for e in events_of(path) if isinstance(e, events.Notice)] == ["before", "after"]


def test_a_recording_that_could_not_begin_has_its_header_when_there_is_room(tmp_path: Path) -> None:
    path, told = tmp_path / "work" / FILE, Told()
    (tmp_path / "work").write_text("no folder")
    writer = RecordingWriter(path, header(), Clock(), told)
    writer.write(events.Notice("launcher", "lost"))
    writer.flush(10)
    (tmp_path / "work").unlink()
    writer.write(events.Notice("launcher", "after"))
    writer.close(0)
    assert [type(e).__name__ for e in events_of(path)] == ["RecordingHeader", "Notice", "RecordingEnd"]
    os.mkfifo(tmp_path / FILE)
    written(tmp_path / FILE, events.Notice("launcher", "x"), notifier=told, resumed=True)
    assert len(told.texts) == 2, "a named pipe is not waited for"


# ---- reading ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(recordings(), st.data())
def test_any_prefix_of_a_recording_can_be_read(timed: list[TimedEvent], data: st.DataObject) -> None:
    whole = "".join(map(to_line, timed)).encode()
    lines = whole.split(b"\n")[:-1]
    cut = data.draw(st.integers(0, len(whole)))
    path = _temporary(whole[:cut])
    complete = whole[:cut].count(b"\n")
    with closing(RecordingFollower(path)) as follower:
        found = follower.poll()
    assert [repr(each) for each in found] == [repr(from_line(line.decode())) for line in lines[:complete]]
    made = history(*found)
    assert made.has_job is (complete > 0)
    json.dumps([made.view(), made.summary()], allow_nan=False)


@settings(max_examples=25)
@given(recordings(), st.lists(st.integers(1, 400), max_size=30))
def test_a_follower_reads_each_line_once(timed: list[TimedEvent], pieces: list[int]) -> None:
    whole = "".join(map(to_line, timed)).encode()
    path = _temporary(b"")
    follower, found = RecordingFollower(path), []
    at = 0
    for size in [*pieces, len(whole)]:
        with path.open("ab") as file:
            file.write(whole[at : at + size])
        at += size
        found += follower.poll()
    follower.close()
    assert [repr(each) for each in found] == [repr(each) for each in read_recording(path)]


def aged(path: Path, seconds: int, resumed: bool = False, ends: bool = True) -> RecordingWriter:
    """Record a worker's step in each second of a job."""
    clock = Clock()
    writer = RecordingWriter(path, header(STARTED + resumed * 1000.0, resumed), clock)
    for second in range(seconds):
        clock.now = float(second)
        writer.write(step(number=second))
    if ends:
        writer.close(None)
    return writer


def steps_in(timed: Iterable[TimedEvent]) -> list[int]:
    return [each.event.step for each in timed if isinstance(each.event, events.StepDone)]


def test_intervals_grow_with_the_age_of_the_job_and_a_follower_has_the_newest_samples(tmp_path: Path) -> None:
    path = tmp_path / FILE
    writer = aged(path, 6000, ends=False)
    writer.flush(10)
    follower = RecordingFollower(path)
    assert steps_in(follower.poll())[-1] == 5999
    recorded = steps_in(read_recording(path))
    gaps = [later - earlier for earlier, later in itertools.pairwise(recorded)]
    assert recorded[:30] == list(range(30)) and 40 < max(gaps) <= 60 and len(recorded) < 60 + 130 * 5
    inode, size = path.stat().st_ino, path.stat().st_size
    writer.close(None)
    assert path.stat().st_ino == inode and path.stat().st_size > size
    assert steps_in(read_recording(path))[-1] == 5999 and steps_in(follower.poll()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == [FILE]
    follower.close()


def test_a_job_that_is_started_again_often_is_one_job_of_its_age(tmp_path: Path) -> None:
    path = tmp_path / FILE
    aged(path, 1000)
    before = len(steps_in(read_recording(path)))
    for _ in range(30):
        aged(path, 60, resumed=True)
    assert len(steps_in(read_recording(path))) < before + 30 * 9


def test_the_newest_samples_of_a_killed_launcher_stay(tmp_path: Path) -> None:
    path = tmp_path / FILE
    writer = aged(path, 500, ends=False)
    writer.flush(10)
    killed = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    writer.close(None)
    for name, data in killed.items():
        (tmp_path / name).write_bytes(data)
    assert steps_in(read_recording(path))[-1] < 499
    follower = RecordingFollower(path)
    assert steps_in(follower.poll())[-1] == 499
    written(path, events.Notice("launcher", "again"), resumed=True)
    assert steps_in(read_recording(path))[-1] == 499 and steps_in(follower.poll()) == []
    follower.close()


def test_events_that_repeat_are_samples_after_a_while(tmp_path: Path) -> None:
    path, clock = tmp_path / FILE, Clock()
    writer = RecordingWriter(path, header(), clock)
    for number in range(5000):
        clock.now = float(number)
        writer.write(events.Saved("server 0/0", number, number, "work/manifests/step", "time"))
    writer.close(0)
    saved = [each.event.number for each in read_recording(path) if isinstance(each.event, events.Saved)]
    assert saved[:500] == list(range(500)) and saved[-1] == 4999 and len(saved) < 900


def test_a_follower_sees_that_another_job_has_begun(tmp_path: Path) -> None:
    path = tmp_path / FILE
    follower = RecordingFollower(path)
    assert follower.poll() == [], "there is no file yet"
    written(path, events.Notice("launcher", "first"))
    made = history(*follower.poll())
    cursor = made.view()["cursor"]
    writer = RecordingWriter(path, header(STARTED + 5), Clock())
    writer.write(events.Notice("launcher", "second"))
    writer.close(0)
    for timed in follower.poll():
        made.add(timed)
    follower.close()
    assert [entry["text"] for entry in made.view()["story"]] == ["second", "the job has ended"]
    delta = made.since(cursor)
    assert delta["whole"] is True and delta["job"]["started"] == STARTED + 5


_FOLDER: list[Path] = []


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _FOLDER[:] = [tmp_path_factory.mktemp("recordings")]


def _temporary(data: bytes) -> Path:
    path = _FOLDER[0] / f"{len(list(_FOLDER[0].iterdir()))}.jsonl"
    path.write_bytes(data)
    return path
