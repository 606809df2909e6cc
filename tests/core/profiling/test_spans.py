"""Spans of time: which step is kept, which thread they belong to, and what it means that nobody listens."""

import itertools

import pytest

from topotrain.core.profiling.spans import (
    SILENT,
    Clock,
    ProcessSpans,
    ServerRecorder,
    Span,
    WorkerRecorder,
    from_json,
    to_json,
)


class Ticks(Clock):
    """It ticks once per look: 0, 1, 2, …"""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now(self) -> int:
        return next(self._ticks)

    def thread(self) -> str:
        return "MainThread"


def worker(wanted: int = 2) -> WorkerRecorder:
    return WorkerRecorder(wanted, Ticks())


def test_a_span_is_kept_with_its_numbers_and_inside_its_step_also_after_an_error():
    recorder = worker(1)  # looks twice at the clock
    recorder.step_done(0)
    with pytest.raises(KeyError), recorder.span("push", bucket=3), recorder.span("wait for means"):
        raise KeyError
    recorder.step_done(1)
    inner, outer, step = recorder.kept()
    assert (outer.name, outer.track, dict(outer.numbers)) == ("push", "MainThread", {"bucket": 3})
    assert step.start < outer.start < inner.start < inner.end < outer.end < step.end
    assert (step.name, dict(step.numbers)) == ("step", {"step": 1})


def test_what_has_begun_before_its_name_is_known():
    recorder = worker(1)
    recorder.mark()
    recorder.since("data")
    recorder.since("forward")
    recorder.step_done(1)
    data, forward, _ = recorder.kept()
    assert (data.name, forward.name) == ("data", "forward")
    assert data.end == forward.start < forward.end


@pytest.mark.parametrize(("wanted", "steps", "kept"), [(2, 4, 2), (1, 4, 1), (9, 4, 4), (4, 4, 4)])
def test_the_wanted_step_is_kept_or_the_last_one(wanted, steps, kept):
    recorder = worker(wanted)
    for step in range(1, steps + 1):
        with recorder.span("push", step=step):
            pass
        recorder.step_done(step)
    with recorder.span("push", step=99):  # of a step that is never finished
        pass
    assert [span.numbers["step"] for span in recorder.kept()] == [kept, kept]


def test_a_span_that_ends_after_its_step_still_belongs_to_it():
    recorder = worker(3)
    late = recorder.span("pull")
    late.__enter__()
    recorder.step_done(1)
    assert [span.name for span in recorder.kept()] == ["step"]
    late.__exit__(None, None, None)
    assert [span.name for span in recorder.kept()] == ["step", "pull"]


def test_a_server_stops_when_all_its_groups_are_past_the_step():
    recorder = ServerRecorder(2, Ticks(), "server 0/0", (0, 1))
    for group, step in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (0, 4), (1, 4)):
        with recorder.span("reduce", group=group, step=step):
            pass
    with recorder.span("apply"):
        pass
    kept = [(span.numbers["group"], span.numbers["step"]) for span in recorder.kept()]
    assert kept == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


def test_a_server_forgets_what_is_long_ago(monkeypatch):
    monkeypatch.setattr("topotrain.core.profiling.spans.ROLLING", 3)
    recorder = ServerRecorder(9, Ticks(), "server 0/0", (0,))
    for bucket in range(7):
        with recorder.span("reduce", bucket=bucket):
            pass
    assert [span.numbers["bucket"] for span in recorder.kept()] == [4, 5, 6]


def test_silence_keeps_nothing_and_costs_one_object():
    with SILENT.span("push", bucket=1), SILENT.span("wait"):
        SILENT.mark()
        SILENT.since("forward")
        SILENT.step_done(1)
    assert SILENT.span("push", bucket=1) is SILENT.span("pull")


def test_the_file_of_a_process_comes_back_as_it_was():
    spans = (Span("push", "MainThread", 5, 2**62, {"bucket": 7}), Span("step", "MainThread", 1, 2**62, {"step": 1}))
    process = ProcessSpans("worker 0/1", 4711, spans)
    assert from_json(to_json(process)) == process


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"who": "a", "pid": 1, "spans": [[1]]}', '{"who": "a", "spans": []}']
)
def test_other_files_are_refused(text):
    with pytest.raises(ValueError, match="not the spans of a process"):
        from_json(text)
