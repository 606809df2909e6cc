"""The windows: fed with events that no job has sent."""

import io
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.support.recorded_jobs import Clock, displays_go_by, report_of
from topotrain.config.job import Cluster, Job
from topotrain.config.topology import layout
from topotrain.core import events
from topotrain.core.events import (
    Event,
    Exited,
    Failed,
    Final,
    Finished,
    Incident,
    Metrics,
    Notice,
    Output,
    Recovered,
    Resized,
    Serving,
    Started,
    StepDone,
)
from topotrain.launch import JobOutcome
from topotrain.tools.monitor import loss_plot
from topotrain.tools.monitor.compare_jobs import compare, entries
from topotrain.tools.monitor.job_report import JobResult, Report, merge, story
from topotrain.tools.monitor.live_terminal import NOTEBOOK
from topotrain.tools.monitor.progress.live_table import LiveTable, progress
from topotrain.tools.monitor.progress.process_states import ProcessStates, describe
from topotrain.tools.monitor.progress.process_tally import LossCurve
from topotrain.tools.monitor.progress_display import PlainProgress, QuietProgress
from topotrain.tools.monitor.result_tables import comparison, console, summary
from topotrain.tools.monitor.stragglers import stragglers

DOWNPOUR = Cluster(nworker_groups=2, nworkers_per_group=2, nservers_per_group=2, server_worker_separate=True)
JOB = Job(name="digits", program="train.py", args=("--lr", "0.1"), cluster=DOWNPOUR)
TOPOLOGY = layout(DOWNPOUR)
WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1")
PNG = b"\x89PNG\r\n"


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


# ---- report ----------------------------------------------------------------------------------------------------------


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


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_stays_small_and_keeps_its_mean() -> None:
    curve = LossCurve(limit=16)
    for number in range(1000):
        curve.add(number, float(number))
    assert len(curve.points) <= 16
    assert all(time == loss for time, loss in curve.points)
    assert curve.points == sorted(curve.points)
    assert curve.points[0][0] < 100
    assert curve.points[-1][0] > 850


def test_merge_takes_means_per_time_bin() -> None:
    fast = [(0.0, 4.0), (1.0, 2.0), (2.0, 2.0), (3.0, 0.0)]
    slow = [(0.5, 6.0), (4.0, 2.0)]
    assert merge([fast, slow], bins=2) == [(0.5, 4.5), (3.25, 1.5)]
    assert merge([]) == []
    assert merge([[], [(0.0, 1.0)]]) == [(0.0, 1.0)]


# ---- progress --------------------------------------------------------------------------------------------------------


def test_the_states_of_workers_follow_the_events() -> None:
    states = ProcessStates(TOPOLOGY, 0.0)
    assert [each.word for each in states.workers()] == ["starting"] * 4
    told: list[Event] = [
        *(Started("worker 0/0", 1), step("worker 0/1", 3, 0.25, stale=2), step("worker 0/1", 4, None, stale=2)),
        *(Finished("worker 1/0", 9, 72, 0.0, 0, 1, 1), Exited("worker 1/0", 5, 0)),
        *(Failed("worker 1/1", "died", "was killed by SIGKILL", ""), Exited("worker 1/1", 6, -9)),
        step("server 0/0", 1),
    ]
    for event in told:
        states.on_event(event, 1.0)
    first, second, third, fourth = states.workers()
    figures = second.figures
    assert first.word == "preparing"
    assert (second.word, second.unit, figures.step, figures.loss, figures.staleness.max) == ("training", 1, 4, 0.25, 2)
    assert figures.samples_per_s == pytest.approx(80)
    assert (third.word, third.figures.step) == ("finished", 9)
    assert fourth.word == "failed"
    line = describe(states.workers())
    assert line.startswith("steps 0 to 9  loss 0.2500  80 samples/s")
    assert "1 failed" in line
    for pid, word in ((7, "preparing"), (1, "stopped")):  # 7: of a former process
        states.on_event(Exited("worker 0/0", pid, -15), 2.0)
        assert states.workers()[0].word == word


def test_figures_are_those_of_the_last_seconds_and_of_the_workers_that_train() -> None:
    states = ProcessStates(TOPOLOGY, 0.0)
    # One group leaves. The other one becomes four times as fast after half of the time.
    for event in (StepDone(WORKERS[2], 1, 1, 999, 9.5, 0.0, 0, 0, 0), events.Left(1, "has left", 1.0)):
        states.on_event(event, 1.0)
    for second, who in itertools.product(range(1, 41), WORKERS[:2]):
        samples = 10 * second + 30 * max(0, second - 20)
        states.on_event(StepDone(who, second, second, samples, 0.5, 0.0, 0, 0, 0), float(second))
    assert describe(states.workers()).startswith("steps 0 to 40  loss 0.5000  80 samples/s")


def test_a_long_job_has_fewer_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text, clock = io.StringIO(), Clock()
    displays_go_by(clock, monkeypatch)
    with PlainProgress(report_of(TOPOLOGY), Console(file=text, width=80)) as window:
        for number in range(1, 4 * 3600):  # four hours
            clock.now = float(number)
            window(step("worker 0/0", number))
    times = [float(line.split(" s")[0]) for line in text.getvalue().splitlines()]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[:-1])]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (5.0, 60.0)
    assert len(times) < 320


def test_a_job_that_never_started_has_no_line() -> None:
    text = io.StringIO()
    with PlainProgress(report_of(TOPOLOGY), Console(file=text, width=80)):
        pass
    assert text.getvalue() == ""


def test_the_main_workers_output_and_what_the_job_survives_reach_the_terminal() -> None:
    text, out = io.StringIO(), io.StringIO()
    with QuietProgress(report_of(TOPOLOGY), Console(file=text, width=20), out) as window:
        window(Output("worker 0/0", "stdout", "[bold]a long line "))
        window(Output("worker 0/0", "stdout", "of the program[/bold]\r10 %\rno newline"))
        window(Output("worker 0/0", "stderr", "careful, this is longer than twenty\n50 %"))
        window(Output("worker 0/1", "stdout", "not me"))
        window(Notice("worker 0/1", "no tt.epochs"))
        for event in a_job():
            window(event)
        window(Incident(0, "worker 1/0", "worker 1/0 was killed by SIGKILL", "group 1 starts again", 3.5))
        window(Recovered(0, 0.75, 0.5))
        window(Recovered(1, 0.75, 0.0))
    assert out.getvalue() == "[bold]a long line of the program[/bold]\r10 %\rno newline"
    assert text.getvalue().splitlines() == [
        "careful, this is longer than twenty",
        "50 %",  # our lines do not run into it
        "topotrain: worker 0/1: no tt.epochs",
        "topotrain: worker 1/0 was killed by SIGKILL; group 1 starts again",
        "topotrain: training again 0.8 s after that loss, the others were without a step for at most 0.5 s",
        "topotrain: training again 0.8 s after that loss",
    ]


def test_workers_that_leave_have_a_line_and_no_row() -> None:
    # Five units were started, and the last one has the server.
    text, topology = io.StringIO(), layout(Cluster(nworkers_per_group=3, server_worker_separate=True), range(5))
    with QuietProgress(report_of(topology), Console(file=text, width=20)) as window:
        window(StepDone("worker 0/1", 1.0, 5, 20, 0.5, 0.0, 0, 0, 0))
        window(Resized(0, 3, 2, 5, 3.5))
        window(Recovered(0, 0.75, 0.0))
        assert [(each.who, each.unit, each.figures.step) for each in window.report.states.workers()] == [
            ("worker 0/0", 0, 0),
            ("worker 0/1", 1, 5),
        ]
        for who in ("worker 0/0", "worker 0/1"):
            window(Started(who, 1))
        wait = window.wait()
        assert wait is not None and wait.what == "unit 4 to load torch and start its processes"
        window(Resized(1, 2, 4, 9, 3.5))
        assert len(window.report.states.workers()) == 4
    assert text.getvalue().splitlines() == [
        "topotrain: 1 worker leaves; the job goes on after step 5 with nworkers_per_group: 2",
        "topotrain: training again 0.8 s after that change",
        "topotrain: 2 workers join; the job goes on after step 9 with nworkers_per_group: 4",
    ]


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


def test_the_live_table_shows_a_progress_bar_below_and_whole_lines_above() -> None:
    text = io.StringIO()
    with LiveTable(report_of(TOPOLOGY), live(text)) as window:
        window(Output("worker 0/0", "stderr", "10 %\r20 %\r"))
        window(Output("worker 0/0", "stderr", "30 %\ndone: a, "))
        window(Output("worker 0/0", "stderr", "b\n"))
        window(Output("worker 0/0", "stderr", "the end"))
    shown = text.getvalue()
    assert "30 %" in shown
    assert "10 %" not in shown
    assert "done: a, b" in shown
    assert shown.rstrip().endswith("the end")


def live(text: io.StringIO) -> Console:
    return Console(file=text, force_terminal=True, width=100, height=30, color_system=None, legacy_windows=False)


def test_the_live_table_shows_every_worker_and_gives_the_terminal_back() -> None:
    text = io.StringIO()
    with LiveTable(report_of(TOPOLOGY), live(text)) as window:
        for event in a_job():
            window(event)
        window(Output("worker 0/0", "stdout", "epoch 1 done"))
    shown = text.getvalue()
    assert "epoch 1 done" in shown
    last = shown[shown.rindex("worker") :]
    for worker in ("0/0", "0/1", "1/0", "1/1"):
        assert worker in last
    assert last.count("finished") == 4
    assert "80" in last
    assert shown.index("\x1b[?25l") < shown.rindex("\x1b[?25h")  # the cursor, hidden and shown again


def test_the_live_table_gives_the_terminal_back_on_ctrl_c() -> None:
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt), LiveTable(report_of(TOPOLOGY), live(text)):
        raise KeyboardInterrupt
    assert text.getvalue().rindex("\x1b[?25h") > text.getvalue().rindex("\x1b[?25l")


# ---- table and picture -----------------------------------------------------------------------------------------------


def printed(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return text.getvalue()


def test_the_comparison_has_the_columns_of_the_four_frameworks() -> None:
    done = {**a_report().as_data(JobOutcome(0, 3.5)), "label": "Downpour"}
    failed = {**Report(JOB, TOPOLOGY).as_data(JobOutcome(1, 1.0)), "label": "AllReduce"}
    text = printed(comparison([done, failed]))
    for title in (
        "framework",
        "units",
        "samples/s",
        "time",
        "held-out accuracy",
        "staleness mean",
        "max",
        "MB sent",
        "MB over TCP",
    ):
        assert title in text
    downpour, allreduce = (next(line for line in text.splitlines() if name in line) for name in ("Downp", "AllRe"))
    assert downpour.split() == ["Downpour", "6", "320", "2.0", "s", "97.5%", "0.50", "4", "0.1", "0.0"]
    assert "AllReduce: failed" in allreduce
    assert "–" in allreduce


@contextmanager
def on_a_screen(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Iterator[None]:
    """A real terminal in place of stderr, and the environment of a user's screen with these variables."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", *NOTEBOOK):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    outer, inner = os.openpty()
    with open(outer, "rb", buffering=0), open(inner, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        yield


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({}, LiveTable),
        ({"NO_COLOR": "1"}, LiveTable),  # it asks for no colors, and not for lines
        ({"CI": "false"}, LiveTable),
        ({"CI": "true"}, PlainProgress),
        ({"TERM": "dumb"}, PlainProgress),
        ({"TERM": ""}, PlainProgress),
        ({"JPY_PARENT_PID": "4711"}, PlainProgress),  # `!topotrain run …` in a cell has a terminal of its own
        ({"JPY_SESSION_NAME": "a.ipynb", "FORCE_COLOR": "1"}, PlainProgress),
    ],
)
def test_the_table_is_drawn_only_where_it_can_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type[QuietProgress]
) -> None:
    with on_a_screen(monkeypatch, variables):
        assert type(progress(report_of(TOPOLOGY), console(stderr=True))) is kind
        assert type(progress(report_of(TOPOLOGY), console(stderr=True), quiet=True)) is QuietProgress


def test_a_pipe_gets_lines_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    assert console().width >= 160, "no terminal cuts nothing"
    with progress(report_of(TOPOLOGY), console(stderr=True)) as window:
        for event in a_job():
            window(event)
    assert type(window) is PlainProgress
    assert "\x1b" not in text.getvalue()
    assert "step 20" in text.getvalue()


def test_the_picture(tmp_path: Path) -> None:
    assert loss_plot.available()
    curves = {f"job {number}": [(t, 100.0 / (t + number + 1)) for t in range(50)] for number in range(9)}
    loss_plot.draw({**curves, "one point": [(0.0, 1.0)]}, tmp_path / "many.png")
    loss_plot.draw({}, tmp_path / "none.png")
    assert (tmp_path / "many.png").read_bytes().startswith(PNG)
    assert (tmp_path / "none.png").read_bytes().startswith(PNG)
    assert len(set(loss_plot.COLORS)) == len(loss_plot.COLORS) >= 4


# ---- compare ---------------------------------------------------------------------------------------------------------

ALLREDUCE = Job(cluster=Cluster(nworkers_per_group=2, nservers_per_group=2))


def test_every_job_gets_a_workspace_and_a_label_of_its_own(tmp_path: Path) -> None:
    found = entries([("a/one.conf", JOB), ("b/one.conf", JOB), ("c/ar.yaml", ALLREDUCE)], tmp_path)
    assert [entry.label for entry in found] == ["Downpour (one)", "Downpour (one-2)", "AllReduce"]
    assert [entry.job.workspace for entry in found] == [str(tmp_path / name) for name in ("one", "one-2", "ar")]
    assert found[0].job.args == JOB.args


def test_compare_writes_data_and_picture_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    jobs = entries([("down.conf", JOB), ("ar.conf", JOB), ("hog.conf", JOB), ("next.conf", JOB)], tmp_path / "out")
    results = ((job, JobResult(JobOutcome(code, 2.0), a_report(job.job))) for job, code in zip(jobs, (1, 0, 130, 0)))
    code, rows = compare(results, tmp_path / "out")
    assert code == 1, "the first that failed, and yet the second ran"
    assert [row["label"] for row in rows] == ["Downpour (down)", "Downpour (ar)", "Downpour (hog)"]
    data = json.loads((tmp_path / "out" / "compare.json").read_text())["jobs"]
    assert (data[1]["conf"], data[1]["metrics"]) == ("ar.conf", {"accuracy": 0.975})
    assert 10 <= len(data[1]["curve"]) <= 20
    assert (tmp_path / "out" / "frameworks.png").read_bytes().startswith(PNG)


def test_files_that_cannot_be_written_do_not_cost_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = entries([("a.conf", JOB)], tmp_path)
    for name in ("compare.json", "frameworks.png"):
        (tmp_path / name).mkdir()
    code, rows = compare(((entry, JobResult(JobOutcome(0, 1.0), a_report(entry.job))) for entry in jobs), tmp_path)
    assert (code, [row["label"] for row in rows]) == (0, ["Downpour"])
    assert [line.split(": ", 2)[2] for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path}/{name}: cannot be written (Is a directory)" for name in ("compare.json", "frameworks.png")
    ]
