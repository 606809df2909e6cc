"""The history of a job: view, deltas and summary, as pages and commands get them."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recorded_jobs import SERVERS, STARTED, WORKERS, header, history, step
from tests.tools.recording.test_recording_file import recordings
from topotrain.core import events
from topotrain.core.events import Event
from topotrain.tools.recording import history_series
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.job_summary import compacted
from topotrain.tools.recording.recorded_lines import RecordingEnd, TimedEvent


def told(*found: tuple[float, Event | RecordingEnd], **fields: Any) -> JobHistory:
    return history(TimedEvent(0.0, header(**fields)), *[TimedEvent(at, event) for at, event in found])


def series(view: dict[str, Any], name: str) -> list[list[Any]]:
    (found,) = [each["points"] for each in view["series"] if each["id"] == name]
    return found  # type: ignore[no-any-return]


# ---- what holds for all recordings -----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(recordings(), st.data())
def test_deltas_add_up_to_the_view(timed: list[TimedEvent], data: st.DataObject) -> None:
    made = JobHistory()
    made.add(timed[0])
    sum_ = made.view()
    for at, each in enumerate(timed[1:]):
        made.add(each)
        if data.draw(st.integers(0, 9)) == 0 or at == len(timed) - 2:
            sum_ = added(sum_, made.since(sum_["cursor"]))
    assert sum_ == made.view()
    json.dumps(sum_, allow_nan=False)


def added(view: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """What a page makes of a view and a delta."""
    assert "whole" not in delta
    series_ = {each["id"]: each for each in view["series"]}
    for each in delta["series"]:
        former = series_.get(each["id"], {**each, "points": []})
        series_[each["id"]] = {**each, "points": [*former["points"], *each["points"]]}
    names = [each["name"] for each in delta.get("processes", view["processes"])]
    states = {who: [*view["states"].get(who, []), *delta["states"].get(who, [])] for who in names}
    story = [*view["story"], *delta["story"]]
    return {**view, **delta, "series": list(series_.values()), "states": states, "story": story}


# ---- the view --------------------------------------------------------------------------------------------------------


def test_the_view_has_the_layout() -> None:
    slices = events.Slices("server 0/1", ("a", "b"), (10, 0), (5, 7), 3)
    view = told((0.1, events.Started("worker 0/0", 71)), (0.2, slices), max_staleness=4).view()
    assert view["version"] == 1
    assert [each["name"] for each in view["processes"]] == [*WORKERS, *SERVERS]
    assert view["processes"][0] == {
        "name": "worker 0/0",
        "role": "worker",
        "group": 0,
        "index": 0,
        "unit": 0,
        "host": "localhost",
        "pid": 71,
    }
    first, second = view["processes"][-1]["slices"]
    assert (first, second) == ({"name": "a", "first": 10, "count": 5}, {"name": "b", "first": 0, "count": 7})
    assert series(view, "job:staleness_bound") == [[0.0, 0, 4.0]]
    job = view["job"]
    assert (job["name"], job["framework"], job["started"]) == ("digits", "Downpour (asynchronous)", STARTED)
    assert "nworker_groups: 2" in job["block"] and (job["ended"], job["code"], job["eta_s"]) == (None, None, None)
    job = told((10.0, step(progress=0.25, epoch=2)), (20.0, step(number=11, progress=0.5, epoch=3))).view()["job"]
    assert (job["progress"], job["eta_s"], job["epoch"]) == (0.5, 20.0, 3)


def test_curves_have_the_rates_of_the_last_seconds() -> None:
    made = told(
        (1.0, step(time=1.0, number=10, samples=100, waited_s=0.5, loss=2.0)),
        (2.0, step(time=2.0, number=30, samples=400, waited_s=0.6, loss=1.0)),
        (3.0, events.Traffic("worker 0/0", {"server 0/0": 1000, "stranger": 10**9})),
        (5.0, events.Traffic("worker 0/0", {"server 0/0": 3000, "server 0/1": 2000})),
        (5.0, events.ServerLoad("server 0/0", 10, 10, 0.1)),
        (6.0, events.ServerLoad("server 0/0", 30, 30, 0.1)),
        (6.0, events.Resources("worker 0/0", 1, 777, 0.5)),
        (6.5, events.Logged("worker 0/0", 2.0, 30, {"accuracy": 0.5})),
    )
    view = made.view()
    assert series(view, "worker 0/0:samples_per_s") == [[1.0, 10, 100.0], [2.0, 30, 300.0]]
    assert series(view, "worker 0/0:waiting_share") == [[1.0, 10, 0.5], [2.0, 30, pytest.approx(0.1)]]
    assert series(view, "worker 0/0:loss") == series(view, "group 0:loss") == [[1.0, 10, 2.0], [2.0, 30, 1.0]]
    assert series(view, "worker 0/0:bytes_per_s") == [[5.0, 30, 2000.0]]
    assert series(view, "server 0/0:updates_per_s") == [[6.0, 30, 20.0]]
    assert series(view, "worker 0/0:memory_bytes") == [[6.0, 30, 777.0]]
    assert series(view, "worker 0/0:log:accuracy") == [[6.5, 30, 0.5]]
    summary = made.summary()
    assert (summary["samples_per_s"], summary["bytes_per_s"], summary["loss"], summary["step"]) == (300, 2000, 1, 30)
    assert summary["workers"][0]["log"] == {"accuracy": 0.5}
    assert summary["servers"][0]["updates_per_s"] == 20.0


def test_rates_begin_with_the_first_update_and_anew_with_a_new_process() -> None:
    made = told(
        *[(float(n), events.Traffic("worker 0/0", {"server 0/0": 1000 * n})) for n in (1, 2, 3)],
        *[(float(at), events.ServerLoad("server 0/0", 0, 0, 0.1)) for at in range(4, 9)],
        *[(8.0 + n, events.ServerLoad("server 0/0", 44 * n, 44 * n, 0.1)) for n in range(1, 5)],
        (13.0, step(time=9.0, number=90, samples=900)),
    )
    assert [value for *_, value in series(made.view(), "server 0/0:updates_per_s")] == [44.0, 44.0, 44.0]
    assert made.summary()["bytes_per_s"] == 1000.0
    made.add(TimedEvent(14.0, events.Started("worker 0/0", 2)))
    made.add(TimedEvent(14.0, events.ServerLoad("server 0/0", 0, 0, 0.0)))
    assert made.summary()["bytes_per_s"] is None and made.summary()["servers"][0]["updates_per_s"] is None
    made.add(TimedEvent(15.0, step(time=1.0, number=5, samples=50, loss=float("nan"))))
    assert series(made.view(), "worker 0/0:samples_per_s")[-1] == [15.0, 5, 50.0]
    assert series(made.view(), "worker 0/0:loss")[-1] == [15.0, 5, None]
    assert made.summary()["loss"] is None and made.summary()["workers"][0]["loss"] is None


def test_the_staleness_of_curves_is_that_of_the_last_seconds() -> None:
    totals = {"staleness_mean": 4.0, "staleness_p95": 9.0, "staleness_max": 12}
    made = told((1.0, step(**totals)), (2.0, step(number=11, time=2.0, **totals, recent=(1.0, 2.0, 3.0))))
    made.add(TimedEvent(3.0, events.Finished("worker 0/0", 11, 352, 4.0, 12, 0, 0, staleness_p95=9.0)))
    worker = made.summary()["workers"][0]
    for name, old, new in (("mean", 4.0, 1.0), ("p95", 9.0, 2.0), ("max", 12.0, 3.0)):
        assert [value for *_, value in series(made.view(), f"worker 0/0:staleness_{name}")] == [old, new]
        assert worker[f"staleness_{name}"] == new


def states(made: JobHistory, who: str) -> list[str]:
    return [state for _, state in made.view()["states"][who]]


def test_the_states_of_a_worker_that_is_killed_and_starts_again() -> None:
    made = told(
        (0.1, events.Started("worker 0/0", 1)),
        (1.0, step()),
        (2.0, events.Waits("worker 0/0", 2.0)),
        (3.0, step(number=11)),
        (3.5, events.Frozen("worker 0/0", 1)),
        (3.6, events.Thawed("worker 0/0", 1)),
        (4.0, events.Incident(0, "worker 0/0", "worker 0/0 was killed", "group 0 restarts", 4.0)),
        (4.1, events.Started("worker 0/0", 2)),
        (4.2, events.Exited("worker 0/0", 1, -9)),  # of the former process
        (5.0, step(number=12)),
        (5.1, events.Recovered(0, 1.0, 0.0)),
        (6.0, events.Finished("worker 0/0", 12, 9, 0.0, 0, 0, 0)),
        (6.1, events.Exited("worker 0/0", 2, 0)),
    )
    expected = "starting computes waits computes stopped computes dead restarts computes finished"
    assert states(made, "worker 0/0") == expected.split()
    (incident,) = made.summary()["incidents"]
    assert incident == {
        "number": 0,
        "at_s": 4.0,
        "what": "worker 0/0 was killed",
        "action": "group 0 restarts",
        "recovered_s": 1.0,
    }
    assert [(entry["kind"], entry["of"]) for entry in made.view()["story"]] == [
        ("incident", "worker 0/0"),
        ("recovered", "job"),
    ]


def test_the_states_of_a_server_and_of_a_group_that_leaves() -> None:
    made = told(
        (0.1, events.Started("server 0/0", 1)),
        (0.5, events.Serving("server 0/0", ("tcp://x",), 1)),
        (1.0, events.ServerLoad("server 0/0", 5, 5, 0.1)),
        (2.0, events.Resources("server 0/0", 1, 10, 1.0)),
        (4.0, events.Resources("server 0/0", 1, 10, 1.0)),
        (5.0, step("worker 1/0")),
        (6.0, events.Left(1, "has left", 6.0)),
        (7.0, events.Joined(1, 1, 7.0)),
        (8.0, events.Ending("server 0/0")),
    )
    assert states(made, "server 0/0") == ["starting", "waits", "applies", "waits", "finished"]
    assert states(made, "worker 1/0") == ["computes", "away", "starting"]
    assert [entry["kind"] for entry in made.view()["story"]] == ["left", "joined"]


def test_a_server_inside_a_worker_has_the_state_of_the_worker() -> None:
    hosted = {"nworker_groups": 1, "server_worker_separate": False}
    made = told((1.0, step()), (1.5, events.ServerLoad("server 0/0", 5, 5, 0.1)), **hosted)
    assert states(made, "worker 0/0") == states(made, "server 0/0") == ["computes"]
    made.add(TimedEvent(2.0, events.Waits("worker 0/0", 1.0)))
    made.add(TimedEvent(2.5, events.ServerLoad("server 0/0", 9, 9, 0.2)))
    assert states(made, "server 0/0") == ["computes", "waits"]
    assert made.summary()["servers"][0]["updates"] == 9


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "dead"), (None, "dead")])
def test_with_the_job_or_a_unit_its_processes_have_ended(code: int | None, state: str) -> None:
    made = told((1.0, step("worker 1/0")), (2.0, events.Failed("unit 1", "died", "unit 1 vanished", "")), (3.0, step()))
    view = made.view()
    lost = [each["name"] for each in view["processes"] if each["unit"] == 1]
    assert lost and all(view["states"].get(who, [[0, "dead"]])[-1][1] == "dead" for who in lost)
    made.add(TimedEvent(4.0, RecordingEnd(code)))
    assert states(made, "worker 0/0")[-1] == state
    assert made.summary()["state"] == "ended" and made.view()["job"]["code"] == code
    assert made.view()["story"][-1]["kind"] == "ended"


def test_a_lost_job_has_no_rates_and_goes_on_with_its_next_event() -> None:
    made = told((1.0, step()), (2.0, step(number=20, time=2.0)))
    cursor = made.view()["cursor"]
    assert made.lose() and not made.lose()
    delta = made.since(cursor)
    assert delta["job"]["lost"] and delta["states"] == {"worker 0/0": [[2.0, "dead"]]}
    (entry,) = delta["story"]
    assert entry["kind"] == "failed" and "the job is lost" in entry["text"]
    summary = made.summary()
    assert (summary["state"], summary["step"], summary["eta_s"]) == ("lost", 20, None)
    made.add(TimedEvent(3.0, step(number=30, time=3.0)))
    assert made.summary()["state"] == "running" and states(made, "worker 0/0") == ["computes", "dead", "computes"]
    made.add(TimedEvent(4.0, RecordingEnd(0)))
    assert not made.lose() and made.summary()["state"] == "ended"


def test_a_resumed_job_goes_on_without_the_time_between() -> None:
    made = told((5.0, step(number=50)), (6.0, RecordingEnd(143)))
    made.add(TimedEvent(0.0, header(STARTED + 1000, resumed=True)))
    made.add(TimedEvent(2.0, step(number=60)))
    view = made.view()
    assert view["job"]["started"] == STARTED and view["job"]["elapsed"] == 8.0 and view["job"]["ended"] is None
    assert [point[:2] for point in series(view, "worker 0/0:loss")] == [[5.0, 50], [8.0, 60]]
    assert "994 s after its last event" in view["story"][-1]["text"]


def test_a_change_of_the_layout_keeps_the_workers_that_stay() -> None:
    made = told((1.0, step()), (2.0, events.Resized(0, 2, 1, 10, 2.0)))
    cursor = made.view()["cursor"]
    made.add(TimedEvent(2.1, header(nworkers_per_group=1)))
    delta = made.since(cursor)
    assert [each["name"] for each in delta["processes"]] == ["worker 0/0", "worker 1/0", *SERVERS]
    assert made.view()["states"]["worker 0/0"] == [[1.0, "computes"]]
    assert made.view()["job"]["elapsed"] == 2.1


def test_a_recovery_is_that_of_the_loss_or_the_change_before_it() -> None:
    loss, change = events.Incident(0, "worker 0/0", "was killed", "restarts", 1.0), events.Resized(1, 2, 1, 10, 3.0)
    made = told(*enumerate([loss, events.Recovered(0, 1.5, 0.0), change, events.Recovered(1, 2.5, 0.0)], 1))
    # The numbers of a job that was started again begin anew.
    made.add(TimedEvent(0.0, header(STARTED + 1000, resumed=True)))
    again = [replace(change, number=0), events.Recovered(0, 3.5, 0.0), replace(loss, number=1)]
    for at, event in enumerate([*again, events.Recovered(1, 4.5, 0.0)], 1):
        made.add(TimedEvent(float(at), event))
    told_of = [entry["text"].split(" that ")[1] for entry in made.view()["story"] if entry["kind"] == "recovered"]
    assert told_of == ["loss", "change", "change", "loss"]
    assert [each["recovered_s"] for each in made.summary()["incidents"]] == [1.5, 4.5]


def test_events_of_strangers_and_a_history_without_a_header_do_no_harm() -> None:
    made = told((1.0, step("worker 9/9")), (1.0, events.Traffic("worker 0/0", {"stranger": 10**9})))
    assert made.view()["series"] == [] and made.summary()["step"] == 0
    made = history(TimedEvent(1.0, step()))
    assert not made.has_job and not made.lose() and made.view()["processes"] == made.summary()["workers"] == []


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_the_memory_is_bounded_and_curves_keep_their_beginning_and_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_series, "MOST_STATES", 100)
    monkeypatch.setattr(history_series, "MOST_STORIES", 100)
    made = told()
    for n in range(1, 20_000):
        made.add(TimedEvent(float(n), step(time=float(n), number=n)))
        if n % 3 == 0:
            made.add(TimedEvent(n + 0.5, events.Waits("worker 0/0", 1.0)))
            made.add(TimedEvent(n + 0.6, events.Notice("worker 0/0", str(n))))
        if n % 5000 == 0:
            made.add(TimedEvent(n + 0.7, events.Incident(n, "worker 0/0", "was killed", "restarts", n)))
    view = made.view()
    points = series(view, "worker 0/0:loss")
    assert len(points) <= history_series.MOST_POINTS
    assert points[0][1] == 1 and [point[1] for point in points[-500:]] == list(range(19_500, 20_000))
    # The older half has them evenly over the whole time.
    older = [point[1] for point in points if point[1] < 15_000]
    assert max(b - a for a, b in itertools.pairwise(older)) <= 20_000 * 8 / history_series.MOST_POINTS
    entries = view["states"]["worker 0/0"]
    assert len(entries) <= 100 and [state for _, state in entries].count("dead") == 3
    assert len(view["story"]) <= 100 and [entry["kind"] for entry in view["story"]].count("incident") == 3


def test_a_script_cannot_fill_the_memory_with_names() -> None:
    calls = [{f"name {n}": 1.0 for n in range(20 * call, 20 * call + 20)} for call in range(50)]
    made = told(*[(1.0 + at, events.Logged("worker 0/0", 1.0, at, call)) for at, call in enumerate(calls)])
    assert list(made.summary()["workers"][0]["log"]) == [f"name {n}" for n in range(100)]
    assert len(made.view()["series"]) == 100


def test_a_summary_for_the_store_has_its_bound_and_those_in_trouble_first() -> None:
    made = told(nworker_groups=200, nworkers_per_group=1)
    for n in range(200):
        made.add(TimedEvent(1.0 + n, step(f"worker {n}/0")))
    made.add(TimedEvent(300.0, events.Incident(0, "worker 150/0", "was killed " * 99, "restarts", 300.0)))
    found = compacted(made.summary(), 4000)
    assert len(json.dumps(found, separators=(",", ":"))) <= 4000
    assert found["workers"][0]["name"] == "worker 150/0"
    assert found["left_out"] == 202 - len(found["workers"]) - len(found["servers"]) > 0
    assert compacted(made.summary(), 10**6)["left_out"] == 0


# ---- figures of a job that ends, and of workers that are gone --------------------------------------------------------


@pytest.mark.parametrize("ending", [RecordingEnd(0), None, events.Resources("worker 0/0", 1, 777, 0.5)])
def test_the_curve_of_a_group_has_a_point_each_half_second_and_the_last_step(ending: Any) -> None:
    made = told(
        (1.0, step(number=10, loss=0.8)),
        (1.1, step("worker 0/1", number=11, loss=0.6)),
        (1.2, step(number=12, loss=0.2)),
    )
    assert series(made.view(), "group 0:loss") == [[1.0, 10, 0.8]]
    cursor = made.view()["cursor"]
    if ending is None:
        assert made.lose()
    else:
        made.add(TimedEvent(1.6, ending))
    assert series(made.view(), "group 0:loss") == [[1.0, 10, 0.8], [1.2, 12, 0.4]]
    assert series(made.since(cursor), "group 0:loss") == [[1.2, 12, 0.4]]
    job, summary = made.view()["job"], made.summary()
    assert [job[name] == summary[name] for name in ("step", "loss", "samples_per_s")] == [True] * 3


@pytest.mark.parametrize(
    "gone",
    [
        events.Incident(0, "worker 0/1", "worker 0/1 was killed", "the others go on", 2.0),
        events.Left(1, "has left", 2.0),
    ],
)
def test_the_loss_is_that_of_the_workers_that_live(gone: Event) -> None:
    made = told((1.0, step(loss=0.2)), (1.0, step("worker 0/1", loss=0.8)), (1.0, step("worker 1/0", loss=0.8)))
    made.add(TimedEvent(2.0, gone))
    made.add(TimedEvent(3.0, step(number=20, time=3.0, loss=0.2)))
    group = 0.2 if isinstance(gone, events.Incident) else 0.5
    assert series(made.view(), "group 0:loss")[-1] == [3.0, 20, group]
    assert made.summary()["loss"] == 0.5
    made.add(TimedEvent(3.1, events.Finished("worker 0/0", 20, 640, 0.0, 0, 0, 0)))
    assert made.lose() and made.summary()["loss"] == 0.5, "a lost job keeps the loss of its workers"
    made.add(TimedEvent(4.0, RecordingEnd(0)))
    assert made.summary()["loss"] == 0.5
