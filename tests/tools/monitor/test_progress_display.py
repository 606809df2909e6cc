"""The displays of a job, fed with events that no job has sent, and the notice of a unit that waits."""

import io
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from tests.support.recorded_jobs import Clock, displays_go_by, report_of
from tests.tools.monitor.test_job_report import TOPOLOGY, WORKERS, a_job, step
from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core import events
from topotrain.core.events import (
    Event,
    Exited,
    Failed,
    Finished,
    Incident,
    Notice,
    Output,
    Recovered,
    Resized,
    Started,
    StepDone,
)
from topotrain.launch.multinode import node_rendezvous
from topotrain.launch.multinode.node_rendezvous import QUIET_S, REPEAT_S, RendezvousNotice
from topotrain.tools.monitor import terminal
from topotrain.tools.monitor.job_monitor import LiveRendezvousNotice, rendezvous_notice
from topotrain.tools.monitor.progress_display import LiveTable, PlainProgress, QuietProgress, describe, progress
from topotrain.tools.monitor.terminal import NOTEBOOK, console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    displays_go_by(made, monkeypatch)
    return made


def live(text: io.StringIO, width: int = 100, height: int = 30) -> Console:
    more = {"color_system": None, "legacy_windows": False, "record": True}
    return Console(file=text, force_terminal=True, width=width, height=height, **more)


def test_the_states_of_workers_follow_the_events() -> None:
    states = report_of(TOPOLOGY).states
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
    states = report_of(TOPOLOGY).states
    # One group leaves. The other one becomes four times as fast after half of the time.
    for event in (StepDone(WORKERS[2], 1, 1, 999, 9.5, 0.0, 0, 0, 0), events.Left(1, "has left", 1.0)):
        states.on_event(event, 1.0)
    for second, who in itertools.product(range(1, 41), WORKERS[:2]):
        samples = 10 * second + 30 * max(0, second - 20)
        states.on_event(StepDone(who, second, second, samples, 0.5, 0.0, 0, 0, 0), float(second))
    assert describe(states.workers()).startswith("steps 0 to 40  loss 0.5000  80 samples/s")


def shown_step(who: str, number: int, epoch: int, share: float) -> StepDone:
    return StepDone(who, number / 10, number, 8 * number, 0.5, 0.0, 0, 0, 0, epoch=epoch, progress=share)


def test_plain_lines_have_the_figures_and_a_long_job_has_fewer(clock: Clock) -> None:
    text = io.StringIO()
    with PlainProgress(report_of(TOPOLOGY), Console(file=text, width=80)):
        pass
    assert text.getvalue() == "", "a job that never started has no line"
    with PlainProgress(report_of(TOPOLOGY), Console(file=text, width=40)) as shown:
        for number in range(1, 4 * 3600):  # four hours
            clock.now = float(number)
            shown(shown_step("worker 0/0", number, number // 8, number / 80))
    lines = text.getvalue().splitlines()
    times = [float(line.split(" s")[0]) for line in lines]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[:-1])]
    assert gaps == sorted(gaps) and (gaps[0], gaps[-1]) == (5.0, 60.0) and len(times) < 320
    assert "epoch 1  done 6 %  ETA 1:15" in lines[0] and "epoch 2  done 12 %  ETA 1:10" in lines[1]
    assert "\x1b" not in text.getvalue() and "\r" not in text.getvalue()


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


# ---- the table that is redrawn ---------------------------------------------------------------------------------------


def test_the_live_table_shows_every_worker_and_whole_lines_above_and_gives_the_terminal_back() -> None:
    text = io.StringIO()
    with LiveTable(report_of(TOPOLOGY), live(text, width=100)) as window:
        for event in a_job():
            window(event)
        for words in ("10 %\r20 %\r", "30 %\ndone: a, ", "b\n", "the end"):
            window(Output("worker 0/0", "stderr", words))
    shown = text.getvalue()
    last = shown[shown.rindex("worker") :]
    assert all(worker in last for worker in ("0/0", "0/1", "1/0", "1/1")) and last.count("finished") == 4
    assert "80" in last
    assert "30 %" in shown and "10 %" not in shown and "done: a, b" in shown
    assert last.rstrip().endswith("the end"), "an unfinished line is below"
    with pytest.raises(KeyboardInterrupt), LiveTable(report_of(TOPOLOGY), live(text)):
        raise KeyboardInterrupt
    assert text.getvalue().count("\x1b[?25h") == text.getvalue().count("\x1b[?25l") == 2, "the cursor is shown again"


def test_the_live_table_has_the_figures_above_the_rows(clock: Clock) -> None:
    console = live(io.StringIO())
    with LiveTable(report_of(TOPOLOGY), console) as table:
        for second in range(11):
            clock.now = float(second)
            table(shown_step("worker 0/0", second, 0, second / 20))
        drawn = Console(file=io.StringIO(), width=100)
        drawn.print(table._renderable())
        clock.now = 12.0
    first = drawn.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    assert first.rstrip() == "elapsed 0:10  epoch 1  done 50 %  ETA 0:10"
    clock.now = 99.0
    assert "elapsed 0:12 " in console.export_text()


def test_a_table_that_is_higher_than_the_terminal_keeps_figures_and_wait(clock: Clock) -> None:
    topology, text = layout(Cluster(nworkers_per_group=40, server_worker_separate=True)), io.StringIO()
    with LiveTable(report_of(topology), live(text, height=12)) as table:
        clock.now = 30.0
        table._live.refresh()
        shown = text.getvalue()
    frame = shown[shown.rindex("elapsed") :]
    assert frame.startswith("elapsed 0:30") and "waiting for unit 0" in frame


def test_words_are_said_whole_and_without_markup() -> None:
    for make in (PlainProgress, LiveTable):
        text = io.StringIO()
        with make(report_of(TOPOLOGY), live(text, width=20)) as shown:
            shown(Notice("worker 0/0", "[bold]a sentence that is longer than the terminal is wide[/bold]"))
        assert "[bold]a sentence that is longer than the terminal is wide[/bold]" in text.getvalue()


# ---- where it is drawn -----------------------------------------------------------------------------------------------


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
    text = io.StringIO()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", text)
    assert console().width >= 160, "no terminal cuts nothing"
    with progress(report_of(TOPOLOGY), console(stderr=True)) as window:
        for event in a_job():
            window(event)
    assert type(window) is PlainProgress
    assert "\x1b" not in text.getvalue() and "step 20" in text.getvalue()


def test_a_unit_that_waits_at_the_rendezvous_says_so_in_lines_or_in_one_line_with_the_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (node_rendezvous, terminal):
        monkeypatch.setattr(module.time, "monotonic", clock)
    notice = rendezvous_notice(0, 2)  # in place only on a terminal
    assert type(notice) is RendezvousNotice
    for _ in range(int(QUIET_S + REPEAT_S) + 1):
        notice("unit 1")
        clock.now += 1
    notice.end()
    assert capsys.readouterr().err.splitlines() == [
        f"topotrain: unit 0 of 2 waits at the rendezvous for unit 1, {seconds:.0f} s"
        for seconds in (QUIET_S, QUIET_S + REPEAT_S)
    ]
    drawn: list[str] = []
    monkeypatch.setattr(terminal.ProgressLine, "stage", lambda line, text: drawn.append(text))
    with on_a_screen(monkeypatch, {}):
        live_notice = rendezvous_notice(0, 3)
        assert type(live_notice) is LiveRendezvousNotice
        live_notice("units 1, 2")
        clock.now += 12
        live_notice("units 1, 2")
        live_notice.end()
        live_notice.end()
    assert drawn == ["topotrain: unit 0 of 3 waits at the rendezvous for units 1, 2, 12 s"]
