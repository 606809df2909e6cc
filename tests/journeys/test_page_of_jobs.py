"""The page of real jobs in a real browser: four frameworks, a death, an act, the replay of a job that has ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Browser, chromium, why_none
from job_runner import ALLREDUCE, DOWNPOUR, HOGWILD, SANDBLASTER, JobRunner
from wait_limit import ended_after

pytestmark = [pytest.mark.journey, pytest.mark.skipif(bool(why_none()), reason=why_none())]

FRAMEWORKS = {
    "Sandblaster": (SANDBLASTER, 5),
    "AllReduce": (ALLREDUCE, 6),
    "Downpour": (DOWNPOUR, 6),
    "Hogwild": (HOGWILD, 6),
}
SEEN_S = 2.0
"""Seconds after which a death must be on the map."""
_ADDRESS = re.compile(r"the page is at (\S+)")


@dataclass(frozen=True)
class WatchedJob:
    """A job that runs, or a `topotrain watch`, with the address of its page."""

    process: "subprocess.Popen[bytes]"
    said: Path
    address: str

    def pid_of(self, workspace: Path, name: str) -> int:
        entries = json.loads((workspace / "processes.json").read_text())
        return int(next(entry["pid"] for entry in entries if name in entry["roles"]))

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout=seconds)


def waited_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "never true"
        time.sleep(0.02)


@contextmanager
def watching(command: list[str], folder: Path, name: str = "said") -> Iterator[WatchedJob]:
    said = folder / name
    with said.open("wb") as out, subprocess.Popen(command, cwd=folder, stdout=out, stderr=out) as process:
        try:
            with ended_after(120):
                waited_for(lambda: _ADDRESS.search(said.read_text()) or process.poll() is not None)
                found = _ADDRESS.search(said.read_text())
                assert found, said.read_text()
                yield WatchedJob(process, said, found.group(1))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def command(runner: JobRunner, cluster: str, *program: str, extra: str = "") -> list[str]:
    return runner.command(cluster, *program, extra=extra, options=["--watch", "0"])


STATES = "return [...document.querySelectorAll('.process')].map((b) => b.dataset.state)"
LONG = ("steady.py", "--epochs", "400", "--step-s", "0.05")


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A window; what its console complains about fails the test."""
    with chromium() as window:
        yield window
        assert window.problems() == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_is_seen_while_it_runs_and_afterwards(
    runner: JobRunner, browser: Browser, framework: str
) -> None:
    cluster, processes = FRAMEWORKS[framework]
    with watching(command(runner, cluster, "steady.py", "--epochs", "8", "--step-s", "0.05"), runner.folder) as job:
        browser.open(job.address)
        assert framework.lower() in browser.text("#job-framework").lower()
        browser.wait("return document.querySelectorAll('.process').length === arguments[0]", processes)
        browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
        browser.wait("return [...document.querySelectorAll('.chart figcaption')].some((f) => f.textContent === 'Loss')")
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


def test_acts_ask_first_and_do_what_the_commands_do(runner: JobRunner, browser: Browser) -> None:
    with watching(command(runner, DOWNPOUR, *LONG, extra="snapshot_s: 3600"), runner.folder) as job:
        browser.open(job.address)
        browser.wait("return document.querySelectorAll('.process[data-state=computes]').length > 0")
        browser.script("document.querySelector(\"[data-name='server 0/0']\").click()")
        browser.wait("return document.querySelectorAll('#details-slice-rows tr').length > 0")
        browser.wait("return !document.getElementById('details-log').hidden")
        browser.click("#act-snapshot")
        browser.click("#act-cancel")
        assert browser.text("#act-answer") == ""
        browser.click("#act-snapshot")
        browser.picture("act")
        browser.click("#act-confirm")
        browser.wait("return document.querySelectorAll(\".event[data-kind='snapshot']\").length === 1")
        browser.wait("return !document.getElementById('act-answer').textContent.startsWith('Asked')")
        browser.click("#act-stop")
        browser.click("#act-confirm")
        job.end()
        browser.wait("return document.body.dataset.connection === 'recorded'")
        assert browser.script("return document.getElementById('acts').hidden")


def test_a_lecture_says_what_each_message_means(runner: JobRunner, browser: Browser) -> None:
    options = ["--watch", "0", "--lecture", "0.1", "--set", "cluster.transport=kTcp"]
    words = runner.command(SANDBLASTER, "steady.py", "--epochs", "50", options=options)
    with watching(words, runner.folder) as job:
        browser.open(job.address)
        browser.wait("return !document.getElementById('lecture').hidden")
        assert browser.text("#lecture-intro").startswith("Sandblaster")
        browser.click("#lecture-next")
        sentence = browser.text("#lecture-sentence")
        assert "step 1" in sentence and sentence.startswith(("worker", "server")), sentence
        browser.click("#lecture-play")
        browser.wait("return document.getElementById('lecture-sentence').textContent !== arguments[0]", sentence)
        browser.picture("live-lecture")


def test_two_jobs_that_have_ended_are_replayed_and_compared(runner: JobRunner, browser: Browser) -> None:
    for name, cluster in (("one", SANDBLASTER), ("two", DOWNPOUR)):
        runner.run(cluster, "steady.py", "--epochs", "2", "--step-s", "0.02", name=name)
    words = [sys.executable, "-m", "topotrain", "watch", "one", "two"]
    with watching(words, runner.folder) as job:
        browser.open(job.address)
        assert browser.script("return document.getElementById('acts').hidden")
        browser.wait("return document.getElementById('run-key').textContent.includes('two')")
        move = "const s = document.getElementById('replay-slider'); s.value = 0; s.dispatchEvent(new Event('input'));"
        browser.script(move)
        assert set(browser.script(STATES)) == {"starting"}
        browser.click("#replay-live")
        browser.wait("return document.querySelectorAll('.process[data-state=finished]').length > 0")
        browser.picture("watch-two")
