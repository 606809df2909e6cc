"""The page of real jobs in a real browser: frameworks, a death, what commands ask, and ended jobs side by side."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from browser import Browser, chromium, why_none
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, SANDBLASTER, JobRunner
from page_command import waited_for, watching
from soak_cases import soaked
from wait_limit import ended_after

from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import (
    JOIN,
    LEAVE,
    GroupRequest,
    ResizeRequest,
    StopJob,
    TakeSnapshot,
)
from topotrain.tools.recording.recording_file import FILE

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

FRAMEWORKS = {
    "Sandblaster": (SANDBLASTER, 5),
    "AllReduce": (ALLREDUCE, 6),
    "Downpour": (DOWNPOUR, 6),
    "Hogwild": (HOGWILD, 6),
}
SEEN_S = 2.0
"""Seconds after which a death must be on the map."""


def command(runner: JobRunner, cluster: str, *program: str, extra: str = "") -> list[str]:
    return runner.command(cluster, *program, extra=extra, options=["--watch", "0"])


STATES = "return [...document.querySelectorAll('.process')].map((b) => b.dataset.state)"
LONG = ("steady.py", "--epochs", "400", "--step-s", "0.05")


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A window; what its console complains about fails the test."""
    with ended_after(170), chromium() as window:
        yield window
        assert window.problems() == []


@pytest.mark.parametrize("framework", soaked(["AllReduce"], ["Sandblaster", "Downpour", "Hogwild"]))
def test_each_framework_is_seen_while_it_runs_and_afterwards(
    runner: JobRunner, browser: Browser, framework: str
) -> None:
    cluster, processes = FRAMEWORKS[framework]
    with watching(command(runner, cluster, "steady.py", "--epochs", "8", "--step-s", "0.05"), runner.folder) as job:
        browser.open(job.address)
        assert framework.lower() in browser.text("#job-framework").lower()
        browser.wait("return document.querySelectorAll('.process').length === arguments[0]", processes)
        browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
        browser.wait("return [...document.querySelectorAll('.annotation')].some((one) => one.textContent === 'Loss')")
        browser.picture(f"live-{framework.lower()}")
        browser.wait("return document.body.dataset.connection === 'recorded'")
        assert set(browser.script(STATES)) <= {"finished", "waits", "applies"}
        assert job.end() == 0, job.said.read_text()
    browser.picture(f"ended-{framework.lower()}")


def test_a_death_is_on_the_map_within_two_seconds(runner: JobRunner, browser: Browser) -> None:
    victims, seen = ["worker 1/0", "worker 1/1", "worker 0/1"], []
    with watching(command(runner, DOWNPOUR, *LONG, extra="snapshot_s: 0.5"), runner.folder) as job:
        browser.open(job.address)
        # A machine with other work may be late once. It is not late each time.
        while victims and min(seen, default=SEEN_S + 1) > SEEN_S:
            victim = victims.pop()
            state = f"document.querySelector(\"[data-name='{victim}']\").dataset.state"
            browser.wait(f"return {state} === 'computes'")
            os.kill(job.pid_of(runner.folder / "job", victim), signal.SIGKILL)
            killed = time.monotonic()
            browser.wait(f"return ['dead', 'restarts'].includes({state})")
            seen.append(time.monotonic() - killed)
            browser.picture("live-death")
        browser.wait("return document.querySelectorAll(\".event[data-kind='incident']\").length > 0")
    print(f"deaths were on the map after {', '.join(f'{each:.2f}' for each in seen)} s")
    assert min(seen) <= SEEN_S


def test_what_commands_ask_of_a_job_is_seen(runner: JobRunner, browser: Browser) -> None:
    workspace = runner.folder / "job"
    words = command(runner, DOWNPOUR, *LONG, extra="snapshot_s: 3600 on_failure: kContinue")
    with watching(words, runner.folder) as job:
        browser.open(job.address)
        browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
        browser.script("document.querySelector(\"[data-name='server 0/0']\").click()")
        browser.wait("return document.querySelectorAll('#details-slice-rows tr').length > 0")
        browser.wait("return !document.getElementById('details-log').hidden")
        readings = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/log')).length"
        browser.wait(f"return {readings} >= 3")
        ask(workspace, TakeSnapshot())
        browser.wait(EVENT, "snapshot")
        ask(workspace, GroupRequest(LEAVE, 1))
        browser.wait(EVENT, "left")
        browser.wait(f"return {STATE} === 'away'", "worker 1/1")
        ask(workspace, GroupRequest(JOIN, 1))
        browser.wait(EVENT, "joined")
        browser.wait(f"return ['computes', 'waits'].includes({STATE})", "worker 1/1")
        browser.picture("left-and-joined")
        ask(workspace, StopJob())
        job.end()
        browser.wait("return document.body.dataset.connection === 'recorded'")
        # Longer than between two readings of a log: a server that is gone is asked for nothing.
        read = browser.script(f"return {readings}")
        browser.frames(2.5)
        assert browser.script(f"return {readings}") == read


def test_a_worker_that_leaves_and_one_that_joins_are_seen(runner: JobRunner, browser: Browser) -> None:
    count = "return document.querySelectorAll('.process[data-role=worker]').length === arguments[0]"
    with watching(command(runner, SANDBLASTER, *LONG, extra="on_failure: kContinue"), runner.folder) as job:
        browser.open(job.address)
        for change, workers in ((LEAVE, 2), (JOIN, 3)):
            browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
            ask(runner.folder / "job", ResizeRequest(change, 1))
            browser.wait(count, workers)
        browser.wait("return document.querySelectorAll(\".event[data-kind='resized']\").length === 2")


EVENT = "return document.querySelector(`.event[data-kind=${arguments[0]}]`) !== null"
STATE = "document.querySelector(`[data-name='${arguments[0]}']`).dataset.state"


def test_a_job_whose_launcher_was_killed_is_lost(runner: JobRunner, browser: Browser) -> None:
    with subprocess.Popen(
        runner.command(DOWNPOUR, *LONG), cwd=runner.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        try:
            recording = runner.folder / "job" / FILE
            waited_for(lambda: recording.exists() and b'"StepDone"' in recording.read_bytes())
            with watching([*runner.python, "-m", "topotrain", "watch", "job"], runner.folder) as job:
                browser.open(job.address)
                browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
                launcher.kill()
                browser.wait("return document.getElementById('connection').textContent.startsWith('lost')")
                assert set(browser.script(STATES)) == {"dead"}
                browser.picture("lost")
                # It would go on asking the server, which ends before the window.
                browser.driver.get("about:blank")
        finally:
            launcher.kill()


def test_two_jobs_of_a_folder_that_have_ended_are_shown_and_compared(runner: JobRunner, browser: Browser) -> None:
    for name, cluster in (("one", SANDBLASTER), ("two", DOWNPOUR)):
        runner.run(cluster, "steady.py", "--epochs", "2", "--step-s", "0.02", name=name)
    words = [*runner.python, "-m", "topotrain", "watch", "."]
    with watching(words, runner.folder) as job:
        browser.open(job.address)
        browser.wait("return document.getElementById('run-rows').textContent.includes('two')")
        move = "const s = document.getElementById('moment-slider'); s.value = 0; s.dispatchEvent(new Event('input'));"
        browser.script(move)
        assert set(browser.script(STATES)) == {"starting"}
        browser.click("#moment-follow")
        browser.wait("return document.querySelectorAll('.process[data-state=finished]').length > 0")
        browser.picture("watch-two")
