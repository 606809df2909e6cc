"""A real job with its page: what is asked of the job, its end, and what is left of it afterwards."""

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from job_runner import SANDBLASTER, JobRunner
from page_client import PageClient
from page_command import WatchedJob, waited_for, watching
from shells import alive

from topotrain.config.job import ConfigError
from topotrain.launch.control_socket import ask
from topotrain.launch.recovery.recovery_actions import StopJob, TakeSnapshot
from topotrain.tools.cli.app import main

pytestmark = pytest.mark.journey

LONG = ("steady.py", "--epochs", "400", "--step-s", "0.02")


@contextmanager
def watched(runner: JobRunner, command: list[str]) -> Iterator[tuple[WatchedJob, PageClient]]:
    """A command that serves a page, and a client of the page."""
    with watching(command, runner.folder) as job:
        page = PageClient(job.address)
        assert page.login().status == 303
        yield job, page


def view(page: PageClient) -> Any:
    return page.get("/api/view").data


def workers(page: PageClient) -> set[str]:
    """The states of the workers."""
    found = view(page)
    names = [process["name"] for process in found["processes"] if process["role"] == "worker"]
    return {entries[-1][1] if (entries := found["states"].get(name)) else "" for name in names}


def pids(page: PageClient) -> list[int]:
    return [process["pid"] for process in view(page)["processes"] if process["pid"]]


def run(runner: JobRunner, extra: str) -> list[str]:
    return runner.command(SANDBLASTER, *LONG, extra=extra, options=["--watch", "0"])


def test_a_snapshot_is_taken_and_the_job_goes_on_until_it_is_stopped(runner: JobRunner) -> None:
    with watched(runner, run(runner, "snapshot_s: 3600")) as (job, page):
        waited_for(lambda: workers(page) == {"computes"})
        found = ask(runner.folder / "job", TakeSnapshot())
        assert re.fullmatch(r"snapshot 1 has step \d+: .*", found["text"]), found
        assert found["snapshot"] == 1 and (Path(found["path"]) / "manifest.json").is_file()
        waited_for(lambda: any(entry["kind"] == "snapshot" for entry in view(page)["story"]))
        assert workers(page) <= {"computes", "waits"}
        there = pids(page)
        updates = page.updates()
        next(updates)
        assert "is asked to end" in ask(runner.folder / "job", StopJob())["text"]
        last = list(updates)[-1]
        assert job.end() == 143
    assert last["job"]["ended"] is not None and last["job"]["code"] == 143
    said = job.said.read_text()
    assert "asked to end by `topotrain jobs stop`" in said
    assert "snapshot 2 has step" in said, "the last one"
    assert alive(there) == []


def test_ctrl_c_leaves_nothing(runner: JobRunner) -> None:
    with watched(runner, run(runner, "snapshot_s: 0")) as (job, page):
        waited_for(lambda: workers(page) == {"computes"})
        with pytest.raises(ConfigError, match=r"no snapshot can be taken.*takes no snapshots"):
            ask(runner.folder / "job", TakeSnapshot())
        there = pids(page)
        assert len(there) == 5
        updates = page.updates()
        next(updates)
        job.process.send_signal(signal.SIGINT)
        assert list(updates)[-1]["job"]["code"] == 130
        assert job.end() == 130
    assert alive(there) == []
    with pytest.raises(OSError):
        page.get("/")


def test_the_page_of_a_job_that_has_ended(runner: JobRunner) -> None:
    runner.run(SANDBLASTER, "steady.py", "--epochs", "1")
    command = [*runner.python, "-m", "topotrain", "watch", str(runner.folder / "job")]
    with watched(runner, command) as (job, page):
        assert view(page)["job"]["code"] == 0 and view(page)["job"]["ended"] is not None
        assert page.get("/api/log?process=worker+0/0").status == 200
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert "Traceback" not in job.said.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--watch", "{taken}"], "--watch = {taken}: must be a free port, or 0 for any: another process listens there"),
        (["--watch", "0", "--watch-host", "192.0.2.1"], "--watch-host: host = '192.0.2.1': must be an address of this"),
        (["--watch-host", "127.0.0.2"], "--watch-host: needs --watch"),
    ],
)
def test_a_page_that_cannot_be_served_is_one_line_before_the_job_starts(
    runner: JobRunner, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        command = runner.command(SANDBLASTER, *LONG, options=[word.format(taken=taken) for word in options])
        with pytest.raises(SystemExit, match="2"):
            main(command[command.index("run") :])
    err = capsys.readouterr().err
    assert said.format(taken=taken) in err and err.count("\n") == 1
    assert not (runner.folder / "job" / "logs").exists()
