"""A real job with its page: what is asked of the job, its end, and what is left of it afterwards."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from job_runner import SANDBLASTER, JobRunner
from page_client import PageClient
from shells import alive

from topotrain.config.job import ConfigError
from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import StopJob, TakeSnapshot

pytestmark = pytest.mark.journey

ADDRESS = re.compile(r"topotrain: the page is at (http://127\.0\.0\.1:\d+/login\?token=[\w-]+)")
LONG = ("steady.py", "--epochs", "400", "--step-s", "0.02")


class WatchedProcess:
    """A command that serves a page, with what it says."""

    def __init__(self, process: "subprocess.Popen[str]", said: Path) -> None:
        self.process, self._said = process, said
        self.wait_for(lambda: ADDRESS.search(self.said) is not None)
        found = ADDRESS.search(self.said)
        assert found is not None
        self.page = PageClient(found.group(1))
        assert self.page.login().status == 303

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < until, self.said
            time.sleep(0.02)

    def view(self) -> Any:
        return self.page.get("/api/view").data

    def trains(self) -> None:
        """Wait until every worker has made a step."""
        self.wait_for(lambda: _states(self.view(), "worker") == {"computes"})


def _states(view: Any, role: str) -> set[str]:
    names = [process["name"] for process in view["processes"] if process["role"] == role]
    return {entries[-1][1] if (entries := view["states"].get(name)) else "" for name in names}


@contextmanager
def watched(runner: JobRunner, command: list[str]) -> Iterator[WatchedProcess]:
    said = runner.folder / "said"
    with said.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=runner.folder)
    try:
        yield WatchedProcess(process, said)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)


def run(runner: JobRunner, cluster: str, extra: str = "") -> list[str]:
    return runner.command(cluster, *LONG, extra=extra, options=["--watch", "0"])


def test_a_snapshot_is_taken_and_the_job_goes_on_until_it_is_stopped(runner: JobRunner) -> None:
    with watched(runner, run(runner, SANDBLASTER, "snapshot_s: 3600")) as job:
        job.trains()
        found = ask(runner.folder / "job", TakeSnapshot())
        assert re.fullmatch(r"snapshot 1 has step \d+: .*", found["text"]), found
        assert found["snapshot"] == 1 and (Path(found["path"]) / "manifest.json").is_file()
        job.wait_for(lambda: any(entry["kind"] == "snapshot" for entry in job.view()["story"]))
        assert _states(job.view(), "worker") <= {"computes", "waits"}
        pids = [process["pid"] for process in job.view()["processes"] if process["pid"]]
        updates = job.page.updates()
        next(updates)
        assert "is asked to end" in ask(runner.folder / "job", StopJob())["text"]
        last = list(updates)[-1]
        assert job.process.wait(timeout=60) == 143
    assert last["job"]["ended"] is not None and last["job"]["code"] == 143
    assert "asked to end by `topotrain jobs stop`" in job.said
    assert "snapshot 2 has step" in job.said, "the last one"
    assert alive(pids) == []


def test_ctrl_c_leaves_nothing(runner: JobRunner) -> None:
    with watched(runner, run(runner, SANDBLASTER, "snapshot_s: 0")) as job:
        job.trains()
        with pytest.raises(ConfigError, match=r"no snapshot can be taken.*takes no snapshots"):
            ask(runner.folder / "job", TakeSnapshot())
        pids = [process["pid"] for process in job.view()["processes"] if process["pid"]]
        assert len(pids) == 5
        updates = job.page.updates()
        next(updates)
        job.process.send_signal(signal.SIGINT)
        assert list(updates)[-1]["job"]["code"] == 130
        assert job.process.wait(timeout=60) == 130
    assert alive(pids) == []
    with pytest.raises(OSError):
        job.page.get("/")


def test_the_page_of_a_job_that_has_ended(runner: JobRunner) -> None:
    runner.run(SANDBLASTER, "steady.py", "--epochs", "1")
    command = [*runner.python, "-m", "topotrain", "watch", str(runner.folder / "job")]
    with watched(runner, command) as seen:
        view = seen.view()
        assert view["job"]["code"] == 0 and view["job"]["ended"] is not None
        assert seen.page.get("/api/log?process=worker+0/0").status == 200
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(timeout=20) == 130
        assert "Traceback" not in seen.said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--watch", "{taken}"], "--watch = {taken}: must be a free port, or 0 for any: another process listens there"),
        (["--watch", "0", "--watch-host", "192.0.2.1"], "--watch-host: host = '192.0.2.1': must be an address of this"),
        (["--watch-host", "127.0.0.2"], "--watch-host: needs --watch"),
    ],
)
def test_a_page_that_cannot_be_served_is_one_line_before_the_job_starts(
    runner: JobRunner, options: list[str], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        words = [word.format(taken=taken) for word in options]
        command = runner.command(SANDBLASTER, *LONG, options=words)
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert said.format(taken=taken) in done.stderr and done.stderr.count("\n") == 1
    assert not (runner.folder / "job" / "logs").exists()
