"""The store of a job is wiped or started anew while the job runs: a death after that costs a group, as before."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis_server
from folder_wipe import wipe
from job_runner import DOWNPOUR, Ended, JobRunner
from killed_jobs import entries
from soak_cases import soaked
from unit_hosts import wait

from topotrain.comm.store import open_store, serve_store
from topotrain.comm.store.discovery.job_registry import Registry
from topotrain.comm.store.store_url import parse

pytestmark = pytest.mark.journey

SECRET = "11" * 32


@dataclass
class Meeting:
    """A store, and what happens to it. url: "" where the job's own folder is meant."""

    url: str
    lose: Callable[[], None]


@pytest.fixture(params=soaked(["file"], ["own folder", "tcp", "redis restarted", "redis flushed"]))
def meeting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET)
    with ExitStack() as stack:
        if request.param == "own folder":
            yield Meeting("", lambda: wipe(tmp_path / "job" / "run" / "store"))
        elif request.param == "file":
            folder = tmp_path / "store"
            yield Meeting(folder.as_uri(), lambda: wipe(folder))
        elif request.param == "tcp":
            yield _tcp(stack)
        else:
            yield _redis(stack, tmp_path, request.param == "redis flushed")


def _tcp(stack: ExitStack) -> Meeting:
    first = serve_store("127.0.0.1", 0, bytes.fromhex(SECRET))
    stack.callback(first.close)

    def lose() -> None:
        first.close()
        stack.callback(serve_store("127.0.0.1", parse(first.url).port, bytes.fromhex(SECRET)).close)

    return Meeting(first.url, lose)


def _redis(stack: ExitStack, folder: Path, flushed: bool) -> Meeting:
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    first = stack.enter_context(ExitStack())
    url = first.enter_context(redis_server.redis_server(folder))

    def lose() -> None:
        if not flushed:
            first.close()
            stack.enter_context(redis_server.redis_server(folder, port=parse(url).port))
            return
        import redis

        with redis.Redis(port=parse(url).port, password=redis_server.PASSWORD) as client:
            client.flushall()

    return Meeting(url, lose)


def test_a_worker_that_dies_after_its_store_was_lost_costs_its_group_alone(runner: JobRunner, meeting: Meeting) -> None:
    args = ("--epochs", "6", "--step-s", "0.03")
    options = ["--rendezvous", meeting.url] if meeting.url else []
    extra = "reduce: kSum snapshot_s: 0.2 restarts: 1"
    command = runner.command(DOWNPOUR, "ledger.py", *args, extra=extra, options=options)
    started = subprocess.Popen(command, cwd=runner.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    workspace = runner.folder / "job"
    try:
        wait(lambda: any((workspace / "manifests").glob("*/manifest.json")) or started.poll() is not None)
        meeting.lose()
        (worker,) = [entry for entry in entries(workspace) if "worker 1/0" in entry["roles"]]
        os.kill(worker["pid"], signal.SIGKILL)
        if meeting.url:
            wait(lambda: [record.state for record in _listed(meeting.url)] == ["running"] or started.poll() is not None)
        out, _ = started.communicate(timeout=150)
    finally:
        started.kill()
    assert started.returncode == 0, out
    ended = Ended(0, out, "", workspace, json.loads((runner.folder / "job.json").read_text()))
    ended.check_ledger(6)
    # Its group goes on meanwhile, if its script has shown by then that it can repeat a step.
    (incident,) = ended.report["incidents"]
    assert (incident["who"], incident["action"].endswith("(incarnation 1)")) == ("worker 1/0", True)
    assert "Traceback" not in out
    if meeting.url:
        assert [record.state for record in _listed(meeting.url)] == ["done"]


def _listed(url: str) -> list[Any]:
    store = open_store(url)
    try:
        return Registry(store).list()
    finally:
        store.close()
