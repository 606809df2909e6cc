"""The report of a job, from events that no job has sent, and the tables that are made of reports."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.core import events
from topotrain.core.events import (
    Event,
    Failed,
    Final,
    Finished,
    Incident,
    LocalSteps,
    Metrics,
    Recovered,
    Resized,
    Rounds,
    Serving,
    Started,
    StateTaken,
    StepDone,
)
from topotrain.launch import JobOutcome
from topotrain.tools.monitor import loss_curves
from topotrain.tools.monitor.job_report import Report, story
from topotrain.tools.monitor.loss_curves import bars, common_loss, merge, seconds_to
from topotrain.tools.monitor.process_tally import stragglers
from topotrain.tools.monitor.result_tables import comparison, losses, summary

DOWNPOUR = Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
JOB = Job(name="digits", program="train.py", args=("--lr", "0.1"), cluster=DOWNPOUR)
TOPOLOGY = layout(DOWNPOUR)
WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1")


def step(who: str, number: int, loss: float | None = 0.5, stale: int = 0) -> StepDone:
    """The event of step `number`, a tenth of a second and 8 samples each."""
    traffic = {"bytes_out": 1000 * number, "bytes_in": 500 * number, "bytes_link": 250 * number}
    return StepDone(who, number / 10, number, 8 * number, loss, stale / 2, stale, **traffic)


def a_job(steps: int = 20) -> Iterator[Event]:
    """What a healthy job tells."""
    for number, who in enumerate(WORKERS):
        yield Started(who, 100 + number)
    for number, who in enumerate(("server 0/0", "server 0/1")):
        yield Serving(who, (f"tcp://127.0.0.1:{6723 + number}",), 200 + number)
    for number in range(1, steps + 1):
        for who in WORKERS:
            yield step(who, number, 1 / number, stale=4 if who == "worker 1/0" else 0)
    for who in WORKERS:
        stale = 4 if who == "worker 1/0" else 0
        yield Finished(who, steps, 8 * steps, stale / 2, stale, 1000 * steps, 500 * steps, bytes_link=250 * steps)
    yield Finished("server 0/0", steps, 0, 0.0, 0, 70, 7)
    yield Metrics({"accuracy": 0.975})
    yield Final("workspace/final.safetensors", 2.5)


def a_report(job: Job = JOB, steps: int = 20) -> Report:
    report = Report(job, layout(job.cluster))
    for event in a_job(steps):
        report(event)
    return report


def test_the_report_of_a_job() -> None:
    report = a_report()
    report(events.Tested("worker 0/0", "test", 0, {"loss": 2.5, "accuracy": 0.1}, 0))
    report(events.Tested("worker 0/0", "validate", 3, {"loss": math.nan}, 1))
    report(events.Tested("worker 0/0", "test", 8, {"loss": 0.5, "accuracy": 0.9}, 4))
    data = report.as_data(JobOutcome(0, 3.5))
    known = {
        "code": 0,
        "cause": None,
        "job": "digits",
        "program": "train.py",
        "args": ["--lr", "0.1"],
        "layout": TOPOLOGY.as_data(),
        "seconds": pytest.approx(2.0),
        "wall_seconds": 3.5,
        "samples": 4 * 160,
        "samples_per_s": pytest.approx(320),
        "steps": 20,
        "last_loss": pytest.approx(1 / 20),
        "metrics": {"accuracy": 0.975},
        "tests": [{"step": 0, "loss": 2.5, "accuracy": 0.1}, {"step": 8, "loss": 0.5, "accuracy": 0.9}],
        "validations": [{"step": 3, "loss": None}],
        "evaluations_skipped": 4,
        "final": "workspace/final.safetensors",
        "bytes_out": 4 * 20_000 + 70,
        "bytes_in": 4 * 10_000 + 7,
        "bytes_link": 4 * 5_000,
        "staleness_max": 4,
        "staleness_mean": pytest.approx(0.5),
    }
    assert {name: data[name] for name in known} == known
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    processes = data["processes"]
    assert [process["unit"] for process in processes] == [0, 1, 2, 3, 4, 5]
    assert processes[2] == {
        "unit": 2,
        "rank": 2,
        "pid": 102,
        "workers": [[1, 0]],
        "servers": [],
        "steps": 20,
        "samples": 160,
        "bytes_out": 20_000,
        "bytes_in": 10_000,
        "bytes_link": 5_000,
        "staleness_mean": 2.0,
        "staleness_max": 4,
    }
    assert (processes[4]["rank"], processes[4]["pid"], processes[4]["servers"]) == (None, 200, [[0, 0]])
    points = report.curve(bins=10)
    assert len(points) == 10 and points == sorted(points) and points[0][1] > points[-1][1]
    assert summary(data) == (
        "digits: Downpour (asynchronous), 6 units, 20 steps, 2.0 s, 320 samples/s, loss 0.05, accuracy 97.5%"
    )


def test_residents_with_one_pid_are_one_process() -> None:
    cluster = Cluster(nworkers_per_group=2, nservers_per_group=2, nservers_per_procs=2)
    report = Report(Job(cluster=cluster), layout(cluster))
    for who, pid in (("worker 0/0", 7), ("server 0/0", 8), ("server 0/1", 8), ("worker 0/1", 9)):
        report(Started(who, pid))
    processes = report.as_data(JobOutcome(0, 1))["processes"]
    assert [(p["unit"], p["pid"], p["workers"], p["servers"]) for p in processes] == [
        (0, 7, [[0, 0]], []),
        (0, 8, [], [[0, 0], [0, 1]]),
        (1, 9, [[0, 1]], []),
    ]


def test_incidents_are_listed_with_what_they_cost() -> None:
    report = a_report()
    report(Incident(0, "worker 1/0", "worker 1/0 was killed by SIGKILL", "group 1 starts again (incarnation 1)", 3.5))
    report(Incident(1, "server 0/0", "server 0/0 was killed by SIGKILL", "nothing is missing", 9.0))
    report(Recovered(0, 0.75, 0.5))
    first, second = report.as_data(JobOutcome(0, 12.0))["incidents"]
    assert first == {
        "who": "worker 1/0",
        "what": "worker 1/0 was killed by SIGKILL",
        "action": "group 1 starts again (incarnation 1)",
        "at_s": 3.5,
        "waited_s": 0.75,
        "others_waited_s": 0.5,
    }
    assert (second["who"], second["waited_s"], second["others_waited_s"]) == ("server 0/0", None, None)


def test_workers_that_leave_and_join_are_listed_and_what_they_did_counts() -> None:
    cluster = Cluster(nworkers_per_group=2, server_worker_separate=True)
    report = Report(Job(cluster=cluster), layout(cluster))
    for who, pid in (("worker 0/0", 7), ("worker 0/1", 8)):
        report(Started(who, pid))
        report(StepDone(who, 2.0, 5, 20, 0.5, 0.0, 0, 0, 0))
    report(Resized(0, 2, 1, 5, 3.5))
    report(Recovered(0, 0.75, 0.0))
    report(Started("worker 0/0", 9))
    report(StepDone("worker 0/0", 1.0, 9, 32, 0.25, 0.0, 0, 0, 0))
    report(Resized(1, 1, 3, 9, 6.0))
    for number in range(3):
        report(Started(f"worker 0/{number}", 20 + number))
    report(StepDone("worker 0/2", 1.0, 10, 4, 0.25, 0.0, 0, 0, 0))
    data = report.as_data(JobOutcome(0, 12.0))
    assert data["changes"] == [
        {"what": "1 worker leaves", "workers": 1, "step": 5, "at_s": 3.5, "waited_s": 0.75},
        {"what": "2 workers join", "workers": 3, "step": 9, "at_s": 6.0, "waited_s": None},
    ]
    assert (data["samples"], data["steps"], data["seconds"]) == (20 + 20 + 32 + 4, 10, 4.0)
    assert len(data["layout"]["units"]) == 4 and len(data["processes"]) == 3
    assert report.topology.workers_per_group == 3


def test_a_worker_that_started_again_counts_on() -> None:
    report = a_report()
    before = report.as_data(JobOutcome(0, 12.0))
    report(Started("worker 1/0", 999))
    report(Serving("worker 1/0", ("test://",), 999))
    report(replace(step("worker 1/0", 1), step=21))  # steps go on, and all else is of this process
    report(replace(step("worker 1/0", 10), step=30))
    data = report.as_data(JobOutcome(0, 12.0))
    assert data["steps"] == 30
    assert data["samples"] == before["samples"] + 80
    assert data["bytes_out"] == before["bytes_out"] + 10_000
    assert data["seconds"] == pytest.approx(3.0)
    assert data["staleness_max"] == 4
    assert data["staleness_mean"] == pytest.approx(before["staleness_mean"] * 80 / 90)
    (entry,) = (entry for entry in data["processes"] if entry["workers"] == [[1, 0]])
    assert (entry["pid"], entry["steps"]) == (999, 30)


def test_samples_are_those_that_the_servers_have_counted() -> None:
    report = a_report()
    counts = {"worker 0/0": 100, "worker 0/1": 150, "worker 1/0": 90, "worker 1/1": 80}
    report(events.Counted("server 0/0", counts))
    data = report.as_data(JobOutcome(0, 12.0))
    assert data["samples"] == 420
    assert data["samples_per_s"] == pytest.approx(4 * 160 / data["seconds"]), "what was done, in the time it took"
    assert {tuple(p["workers"][0]): p["samples"] for p in data["processes"] if p["workers"]}[1, 0] == 90
    report(Started("worker 1/0", 999))  # the job goes on: what was counted of the group is not all
    assert report.as_data(JobOutcome(0, 12.0))["samples"] == 100 + 150 + 160 + 160


def test_samples_of_workers_that_have_left_are_in_what_their_servers_count() -> None:
    cluster = Cluster(nworkers_per_group=2, server_worker_separate=True)
    report = Report(Job(cluster=cluster), layout(cluster))
    for number in range(2):
        report(Started(f"worker 0/{number}", 7 + number))
        report(StepDone(f"worker 0/{number}", 2.0, 5, 24, 0.5, 0.0, 0, 0, 0))
    report(events.Counted("server 0/0", {"worker 0/0": 20, "worker 0/1": 20}))  # with the snapshot
    report(Resized(0, 2, 1, 5, 3.5))
    report(Started("worker 0/0", 9))
    report(StepDone("worker 0/0", 1.0, 9, 32, 0.25, 0.0, 0, 0, 0))
    assert report.as_data(JobOutcome(1, 4.0))["samples"] == 24 + 32 + 24, "nobody has counted: what they were given"
    report(events.Counted("server 0/0", {"worker 0/0": 72}))
    assert report.as_data(JobOutcome(0, 4.0))["samples"] == 72


def test_a_job_that_said_nothing_and_a_loss_that_is_no_number_have_a_report() -> None:
    report = Report(JOB, TOPOLOGY)
    data = report.as_data(JobOutcome(1, 0.2, Failed("worker 0/1", "program", "ValueError: no", "Traceback\n  boom\n")))
    assert (data["processes"], data["samples_per_s"], data["last_loss"]) == ([], 0, None)
    assert data["cause"]["who"] == "worker 0/1" and "0 steps" in summary(data)
    for event in (step("worker 0/0", 1, 1.0), step("worker 0/0", 2, math.nan), Metrics({"accuracy": math.inf})):
        report(event)
    data = report.as_data(JobOutcome(0, 1))
    assert (data["last_loss"], data["metrics"]) == (None, {"accuracy": None})
    assert report.curve() == [(0.1, 1.0)] and "–" in summary(data)


def test_the_story_of_a_failure() -> None:
    boom = Failed(
        "worker 1/0", "program", "ValueError: no", "Traceback (most recent call last):\n  ...\nValueError: no"
    )
    assert story(boom, JOB, TOPOLOGY).splitlines() == [
        "worker 1/0 (unit 2) failed: ValueError: no",
        "Traceback (most recent call last):",
        "  ...",
        "ValueError: no",
        "log: ./workspace/digits/logs/worker-1-0.log",
    ]
    died = Failed("server 0/1", "died", "server 0/1 (pid 7) was killed by SIGKILL", "")
    assert story(died, JOB, TOPOLOGY).splitlines() == [
        "server 0/1 (pid 7) was killed by SIGKILL",
        "log: ./workspace/digits/logs/servers-unit-5.log",
    ]
    assert "unit 3 died: gone" in story(Failed("unit 3", "died", "gone", ""), JOB, TOPOLOGY)


@pytest.mark.parametrize(
    ("groups", "workers", "own", "slow"),
    [
        (1, 2, (1.0, 2.9), {"worker 0/1": 2.9}),
        (1, 3, (1.0, 1.0, 3.0), {"worker 0/2": 3.0}),
        (2, 2, (1.0, 1.0, 4.0, 4.1), {}),  # a group is compared with itself
        (4, 1, (1.0, 4.0, 1.0, 1.0), {"worker 1/0": 4.0}),
        (1, 2, (0.001, 0.02), {}),
        (1, 2, (1.0,), {}),
    ],
)
def test_a_slow_worker_is_compared_with_the_others(
    groups: int, workers: int, own: tuple[float, ...], slow: dict[str, float]
) -> None:
    topology = layout(Cluster(nworker_groups=groups, nworkers_per_group=workers, server_worker_separate=True))
    names = [str(worker) for unit in topology.units for worker in unit.workers]
    found = stragglers(topology, dict(zip(names, own, strict=False)))
    assert {each.who: each.factor for each in found} == slow


# ---- rounds ----------------------------------------------------------------------------------------------------------

ROUNDS = Rounds("server 0/0", {"1": 2, "2": 6}, 0.25, 2, ("0 7 0 1", "1 7 1"))


def islands(*told: Event) -> dict[str, Any]:
    """The report of a job with an outer optimizer."""
    cluster = Cluster(nworker_groups=2, server_worker_separate=True)
    report = Report(Job(name="digits", cluster=cluster), layout(cluster))
    for event in told:
        report(event)
    return report.as_data(JobOutcome(0, 3.5))


def test_rounds_and_workers_that_train_alone() -> None:
    none = islands(Started("worker 0/0", 1))
    assert none["rounds"] is None and "round" not in summary(none)
    data = islands(
        LocalSteps("worker 0/0", 30, 4.0, 0.0, 0.5),
        LocalSteps("worker 0/0", 40, 0.0, 2.5, 1.0),
        StateTaken("worker 1/0", True),
        StateTaken("worker 1/0", False),
        StateTaken("worker 1/0", True),
        # What a dead process had not told is lost. The new process counts from 0, and tells all before its end.
        Started("worker 1/0", 7),
        LocalSteps("worker 1/0", 12, 3.0, 1.0, 0.5),
        Started("worker 1/0", 8),
        LocalSteps("worker 1/0", 20, 0.0, 0.5, 1.0),
        Finished("worker 1/0", 4, 0, 0.0, 0, 700, 900),
        replace(ROUNDS, members={"1": 1}),
        ROUNDS,
    )
    first, second = data["rounds"].pop("workers")
    assert data["rounds"] == {
        "count": 8,
        "members": {"1": 2, "2": 6},
        "members_mean": 1.75,
        "age_mean": 0.25,
        "age_max": 2,
        "states_taken": 2,
        "states_missed": 1,
        "lost_steps": 7.0,
        "last": [{"fragment": 0, "number": 7, "groups": [0, 1]}, {"fragment": 1, "number": 7, "groups": [1]}],
    }
    assert list(first.values()) == ["worker 0/0", 40, 2.5, 1.0, 0, 0]
    assert list(second.values()) == ["worker 1/0", 32, 4.5, 1.5, 700, 900]
    assert summary(data).endswith(", 8 rounds of 1.75 groups (age 0.2, max 2), 7 steps lost")


def test_a_job_that_failed_before_its_first_round_has_the_steps_of_its_workers() -> None:
    found = islands(LocalSteps("worker 0/0", 3, 3.0, 0.0, 0.0))["rounds"]
    assert (found["count"], found["lost_steps"], found["last"], found["members"]) == (0, 3.0, [], {})
    assert found["members_mean"] is None and (found["age_mean"], found["age_max"]) == (0, 0)


# ---- tables and pictures ---------------------------------------------------------------------------------------------

FAST = [(0.0, 2.0), (1.0, 1.0), (2.0, 0.25)]
SLOW = [(0.0, 2.0), (4.0, 1.5), (8.0, 0.5), (10.0, 0.6)]


def test_merge_takes_means_per_time_bin() -> None:
    fast = [(0.0, 4.0), (1.0, 2.0), (2.0, 2.0), (3.0, 0.0)]
    slow = [(0.5, 6.0), (4.0, 2.0)]
    assert merge([fast, slow], bins=2) == [(0.5, 4.5), (3.25, 1.5)]
    assert merge([]) == []
    assert merge([[], [(0.0, 1.0)]]) == [(0.0, 1.0)]


def test_bars_of_all_jobs_have_one_scale_of_time_and_loss() -> None:
    fast, slow, none = bars([FAST, SLOW, []], width=10)
    assert fast == "█▄▁" and len(slow) == 10 and none == ""
    # The highest and the lowest loss of all have the highest and the lowest bar; between two points the last one stays.
    assert slow == "█" * 4 + "▆" * 4 + "▂" * 2
    assert bars([[(1.0, 0.5)], [(2.0, 0.5)]], width=4) == ["  ▁", "   ▁"]
    assert bars([[(0.0, 100.0), (1.0, 10.0), (2.0, 1.0)]], width=3) == ["█▅▁"]  # by the logarithm
    assert bars([[]]) == [""] and bars([[(0.0, 1.0)]], width=5) == ["▁"]


def printed(table: Table | None) -> str:
    assert table is not None
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return text.getvalue()


def test_a_comparison_has_the_columns_that_a_job_has_figures_for() -> None:
    plain = {**a_report().as_data(JobOutcome(0, 3.5)), "label": "Downpour"}
    failed = {**Report(JOB, TOPOLOGY).as_data(JobOutcome(1, 1.0)), "label": "AllReduce"}
    text = printed(comparison([plain, failed]))
    titles = ("framework", "units", "samples/s", "time", "held-out accuracy", "staleness mean", "max", "MB sent")
    assert all(title in text for title in (*titles, "MB over TCP")) and "AllReduce: failed" in text
    (line,) = (line for line in text.splitlines() if "Downp" in line)
    assert line.split() == ["Downpour", "6", "320", "2.0", "s", "97.5%", "0.50", "4", "0.1", "0.0"]
    lone = {**plain, "bytes_out": 5, "bytes_link": 5}
    assert not {"time to loss", "over TCP", "rounds", "lost steps"} & {*printed(comparison([lone])).split("  ")}
    assert losses([lone]) is None
    rows = [
        {**plain, "label": "DiLoCo", "curve": FAST, "rounds": islands(ROUNDS)["rounds"], "bytes_link": 60_000},
        {**plain, "label": "AllReduce", "curve": SLOW, "bytes_out": 9_000_000, "bytes_link": 6_000_000},
        {**plain, "label": "Downpour", "curve": []},
    ]
    columns = {column.header: list(map(str, column.cells)) for column in comparison(rows).columns}
    assert (common_loss([FAST, SLOW, []]), common_loss([[], []]), seconds_to(SLOW, 0.4)) == (0.5, None, None)
    assert columns["time to loss 0.5"] == ["2.0 s", "8.0 s", "–"]
    assert columns["rounds"] == ["8 of 1.75", "–", "–"] and columns["lost steps"][0] == "0"
    assert columns["MB sent"][1] == "9.0" and columns["MB over TCP"][1] == "6.0"
    drawn = printed(losses(rows))
    assert "training loss, 2 to 0.25, over 10.0 s" in drawn
    assert drawn.splitlines()[2].split() == ["AllReduce", bars([FAST, SLOW])[1]]


def test_the_picture(tmp_path: Path) -> None:
    assert loss_curves.available()
    curves = {f"job {number}": [(t, 100.0 / (t + number + 1)) for t in range(50)] for number in range(9)}
    for name, drawn in (("many", {**curves, "one point": [(0.0, 1.0)]}), ("none", {})):
        loss_curves.draw(drawn, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")
    assert len(set(loss_curves.COLORS)) == len(loss_curves.COLORS) >= 4
