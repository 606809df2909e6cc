"""Elapsed time, epoch, share and the time that is left, by a clock that the test moves; on terminals and in pipes."""

import io

import pytest
from rich.console import Console

from tests.support.recorded_jobs import Clock, displays_go_by, report_of
from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core.events import Connects, Finished, Notice, Serving, Started, StepDone
from topotrain.tools.monitor.progress.live_table import LiveTable, progress
from topotrain.tools.monitor.progress_display import PlainProgress
from topotrain.tools.recording.run_progress import LEAST_S, JobProgress, RemainingTime, duration

TOPOLOGY = layout(Cluster(nworkers_per_group=2, server_worker_separate=True))
WORKERS = ("worker 0/0", "worker 0/1")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    displays_go_by(made, monkeypatch)
    return made


def step(who: str, number: int, epoch: int = -1, share: float = -1.0) -> StepDone:
    return StepDone(who, number / 10, number, 8 * number, 0.5, 0.0, 0, 0, 0, epoch=epoch, progress=share)


# ---- the estimate ----------------------------------------------------------------------------------------------------


def test_an_even_job_has_the_right_end_from_the_first_estimate_on() -> None:
    remaining = RemainingTime()
    for second in range(101):
        remaining.update(10.0 + second, second / 100)
        if second < LEAST_S:
            assert remaining.end is None
        else:
            assert remaining.end == pytest.approx(110.0)


def test_a_slow_beginning_is_forgotten_and_one_slow_step_changes_little() -> None:
    remaining = RemainingTime()
    now, share = 0.0, 0.0
    remaining.update(now, share)
    for _ in range(10):  # compiling, cold caches: 1 % in 10 s
        now, share = now + 1.0, share + 0.001
        remaining.update(now, share)
    while share < 0.5:
        now, share = now + 1.0, share + 0.01
        remaining.update(now, share)
    true_end = now + (1 - share) / 0.01
    assert remaining.end == pytest.approx(true_end, rel=0.01)
    remaining.update(now + 4.0, share + 0.01)
    assert remaining.end is not None and abs(remaining.end - (true_end + 3.0)) < 0.15 * (true_end - now)


def test_a_job_that_goes_on_from_a_snapshot_begins_anew() -> None:
    remaining = RemainingTime()
    for second in range(20):
        remaining.update(float(second), second / 40)
    remaining.update(60.0, 0.25)
    assert remaining.end is None
    remaining.update(70.0, 0.5)
    assert remaining.end == pytest.approx(90.0)


def test_a_day_of_updates_needs_little_memory_and_keeps_the_estimate() -> None:
    remaining = RemainingTime()
    for second in range(20_000):
        remaining.update(float(second), second / 40_000)
        remaining.update(second + 0.25, second / 40_000)  # another worker, with the same lease
    assert remaining.end == pytest.approx(40_000, rel=0.02)
    assert len(remaining._samples) <= 256


def test_times_have_the_form_of_a_clock() -> None:
    times = {0.9: "0:00", 59.9: "0:59", 61: "1:01", 3600: "1:00:00", 97_259: "27:00:59"}
    assert {seconds: duration(seconds) for seconds in times} == times


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_unknown_figures_are_a_dash_and_nothing_is_guessed() -> None:
    run = JobProgress(100.0)
    assert run.header(107.0) == "elapsed 0:07  epoch -  done -  ETA -"
    for second in range(30):
        run.on_event(step(WORKERS[0], second), 100.0 + second)
    assert run.words(130.0) == "epoch -  done -  ETA -"
    run.on_event(step(WORKERS[0], 31, epoch=2), 131.0)
    assert run.words(131.0) == "epoch 3  done -  ETA -"
    # A share that is none must not become one.
    run.on_event(step(WORKERS[0], 32, epoch=2, share=float("nan")), 132.0)
    assert run.words(132.0) == "epoch 3  done -  ETA -"


def test_the_worker_that_is_furthest_has_the_share_of_the_job() -> None:
    run = JobProgress(0.0)
    for second in range(11):
        run.on_event(step(WORKERS[0], second, 1, second / 20), float(second))
        run.on_event(step(WORKERS[1], second, 0, second / 40), float(second))
    assert run.words(10.0) == "epoch 2  done 50 %  ETA 0:10"
    assert run.words(13.0) == "epoch 2  done 50 %  ETA 0:07"


def test_a_job_that_stands_still_does_not_seem_to_come_to_its_end() -> None:
    run = JobProgress(0.0)
    for second in range(61):
        run.on_event(step(WORKERS[0], second, 0, second / 120), float(second))
    assert run.words(60.0).endswith("ETA 1:00")
    assert run.words(500.0).endswith("ETA 0:50")


def test_a_restart_from_a_snapshot_and_the_end() -> None:
    run = JobProgress(0.0)
    for second in range(11):
        for who in WORKERS:
            run.on_event(step(who, second, 1, second / 20), float(second))
    for who in WORKERS:
        run.on_event(Started(who, 7), 12.0)
    run.on_event(step(WORKERS[0], 5, 0, 0.2), 14.0)
    assert run.words(14.0) == "epoch 1  done 20 %  ETA -"
    for who in WORKERS:
        run.on_event(Finished(who, 20, 160, 0.0, 0, 0, 0, epoch=3, progress=1.0), 40.0)
    assert run.words(45.0) == "epoch 1  done 100 %  ETA 0:00"


# ---- the displays ----------------------------------------------------------------------------------------------------


def test_plain_lines_have_the_figures(clock: Clock) -> None:
    text = io.StringIO()
    with PlainProgress(report_of(TOPOLOGY), Console(file=text, width=40)) as shown:
        for number in range(1, 21):
            clock.now = float(number)
            for who in WORKERS:
                shown(step(who, number, number // 8, number / 80))
    lines = text.getvalue().splitlines()
    assert [line.split(" s")[0].strip() for line in lines] == ["5.0", "10.0", "15.0", "20.0", "20.0"]
    assert "epoch 1  done 6 %  ETA 1:15" in lines[0] and "epoch 2  done 12 %  ETA 1:10" in lines[1]
    assert "\x1b" not in text.getvalue() and "\r" not in text.getvalue()


def test_captured_output_of_a_job_with_a_long_wait_has_no_frames(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """What a notebook, a pipe or a CI log keeps: whole lines, a new one only where there is something new."""
    text = io.StringIO()
    with progress(report_of(TOPOLOGY), Console(file=text, width=80, force_terminal=False)) as shown:
        for who in ("unit 0", "unit 1", "unit 2", "server 0/0", *WORKERS):
            shown(Started(who, 1))
        shown(Serving("server 0/0", ("x",), 1))
        for who in WORKERS:
            shown(Connects(who))
        for _ in range(600):
            clock.now += 1
            shown.check()
        for number in range(1, 5):
            clock.now += 10
            for who in WORKERS:
                shown(step(who, number, 0, number / 4))
    lines = text.getvalue().splitlines()
    waits = [line for line in lines if "waiting for the first step" in line]
    assert 8 <= len(waits) <= 12
    assert len(lines) == len(set(lines)) <= len(waits) + 6
    assert "\x1b" not in text.getvalue()


def live(text: io.StringIO, width: int = 100, height: int = 30) -> Console:
    return Console(
        file=text, force_terminal=True, width=width, height=height, color_system=None, legacy_windows=False, record=True
    )


def test_the_live_table_has_the_figures_above_the_rows(clock: Clock) -> None:
    console = live(io.StringIO())
    with LiveTable(report_of(TOPOLOGY), console) as table:
        for second in range(11):
            clock.now = float(second)
            for who in WORKERS:
                table(step(who, second, 0, second / 20))
        drawn = Console(file=io.StringIO(), width=100)
        drawn.print(table._renderable())
        clock.now = 12.0
    first = drawn.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    assert first.rstrip() == "elapsed 0:10  epoch 1  done 50 %  ETA 0:10"
    clock.now = 99.0
    assert "elapsed 0:12 " in console.export_text()


def test_a_table_that_is_higher_than_the_terminal_keeps_figures_and_wait(clock: Clock) -> None:
    topology = layout(Cluster(nworkers_per_group=40, server_worker_separate=True))
    text = io.StringIO()
    console = live(text, height=12)
    with LiveTable(report_of(topology), console) as table:
        clock.now = 30.0
        table._live.refresh()
        shown = text.getvalue()
    frame = shown[shown.rindex("elapsed") :]
    assert frame.startswith("elapsed 0:30") and "waiting for unit 0" in frame


def test_words_are_said_above_the_table_and_without_markup(clock: Clock) -> None:
    for make in (PlainProgress, LiveTable):
        text = io.StringIO()
        with make(report_of(TOPOLOGY), live(text, width=20)) as shown:
            shown(Notice("worker 0/0", "[bold]a sentence that is longer than the terminal is wide[/bold]"))
        assert "[bold]a sentence that is longer than the terminal is wide[/bold]" in text.getvalue()
