"""The page of real jobs in a real browser: deaths, what commands ask, a lost launcher, and ended jobs side by side."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser, chromium, why_none
from job_runner import DOWNPOUR, JobRunner
from page_command import WatchedJob, waited_for, watching
from wait_limit import ended_after

from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import JOIN, LEAVE, GroupRequest, TakeSnapshot
from topotrain.tools.recording.recording_file import FILE

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

SEEN_S = 2.0
"""Seconds after which a death must be on the map."""
STATES = "return [...document.querySelectorAll('.process')].map((b) => b.dataset.state)"
STATE = "document.querySelector(`[data-name='${arguments[0]}']`).dataset.state"
EVENT = "return document.querySelector(`.event[data-kind=${arguments[0]}]`) !== null"


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A window; what its console complains about fails the test."""
    with ended_after(170), chromium() as window:
        yield window
        assert window.problems() == []


@contextmanager
def running(runner: JobRunner, cluster: str, extra: str = "") -> Iterator[tuple["subprocess.Popen[bytes]", WatchedJob]]:
    """A job that makes steps, and `topotrain watch` beside it."""
    silent, recording = subprocess.DEVNULL, runner.folder / "job" / FILE
    command = runner.command(cluster, "steady.py", "--epochs", "400", "--step-s", "0.05", extra=extra)
    with subprocess.Popen(command, cwd=runner.folder, stdout=silent, stderr=silent) as launcher:
        try:
            waited_for(lambda: recording.exists() and b'"StepDone"' in recording.read_bytes())
            with watching([*runner.python, "-m", "topotrain", "watch", "job"], runner.folder) as job:
                yield launcher, job
        finally:
            launcher.kill()


def test_deaths_and_what_commands_ask_are_seen_until_the_launcher_is_lost(runner: JobRunner, browser: Browser) -> None:
    workspace = runner.folder / "job"
    with running(runner, DOWNPOUR, "snapshot_s: 3600 on_failure: kContinue restarts: 9") as (launcher, job):
        browser.open(job.address)
        assert "downpour" in browser.text("#job-framework").lower()
        browser.wait("return document.querySelectorAll('.process').length === 6")
        browser.wait("return [...document.querySelectorAll('.annotation')].some((one) => one.textContent === 'Loss')")
        browser.script("document.querySelector(\"[data-name='server 0/0']\").click()")
        browser.wait("return document.querySelectorAll('#details-slice-rows tr').length > 0")
        browser.wait("return !document.getElementById('details-log').hidden")
        readings = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/log')).length"
        browser.wait(f"return {readings} >= 3")
        assert _least_seconds_until_a_death_is_seen(job, browser, workspace) <= SEEN_S
        browser.wait(EVENT, "incident")
        ask(workspace, TakeSnapshot())
        browser.wait(EVENT, "snapshot")
        ask(workspace, GroupRequest(LEAVE, 1))
        browser.wait(EVENT, "left")
        browser.wait(f"return {STATE} === 'away'", "worker 1/1")
        ask(workspace, GroupRequest(JOIN, 1))
        browser.wait(EVENT, "joined")
        browser.wait(f"return ['computes', 'waits'].includes({STATE})", "worker 1/1")
        launcher.kill()
        browser.wait("return document.getElementById('connection').textContent.startsWith('lost')")
        assert set(browser.script(STATES)) == {"dead"}
        # Longer than between two readings of a log: a server that is gone is asked for nothing.
        read = browser.script(f"return {readings}")
        browser.frames(2.5)
        assert browser.script(f"return {readings}") == read
        # It would go on asking the server, which ends before the window.
        browser.driver.get("about:blank")


def _least_seconds_until_a_death_is_seen(job: WatchedJob, browser: Browser, workspace: Path) -> float:
    """A machine with other work may be late once. It is not late each time."""
    seen = [SEEN_S + 1]
    for victim in ("worker 0/1", "worker 1/1", "worker 1/0"):
        if min(seen) > SEEN_S:
            browser.wait(f"return {STATE} === 'computes'", victim)
            os.kill(job.pid_of(workspace, victim), signal.SIGKILL)
            killed = time.monotonic()
            browser.wait(f"return ['dead', 'restarts'].includes({STATE})", victim)
            seen.append(time.monotonic() - killed)
    return min(seen)
