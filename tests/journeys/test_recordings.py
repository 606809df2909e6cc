"""Jobs are recorded wherever they are started, and a recording tells of a running job, here and over a store."""

import json
import os
import signal
import stat
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from killed_jobs import resumed, terminated
from unit_hosts import wait

from tests.support.recorded_jobs import history, read_recording
from topotrain.comm.store import open_store
from topotrain.comm.store.discovery.job_registry import Registry
from topotrain.core.events import Output
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingEnd, RecordingHeader
from topotrain.tools.recording.recording_file import FILE, RecordedWorkspace

pytestmark = pytest.mark.journey

DOWNPOUR = "nworker_groups: 2 nservers_per_group: 1 server_worker_separate: true"
STAY = ("steady.py", "--epochs", "400", "--step-s", "0.02")


def recorded(workspace: Path) -> JobHistory:
    return history(*read_recording(workspace / FILE))


def watched(runner: JobRunner, workspace: Path) -> dict[str, Any]:
    """What `topotrain watch --once --json` prints."""
    words = [*runner.python, "-m", "topotrain", "watch", str(workspace), "--once", "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=300).stdout)
    return found


def test_a_recording_and_the_store_end_as_the_report_and_a_second_run_begins_anew(
    runner: JobRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", "11" * 32)
    url = f"{(runner.folder / 'store').as_uri()}?job=night"
    ended = runner.run(DOWNPOUR, "steady.py", "--epochs", "2", options=["--rendezvous", url])
    path = ended.workspace / FILE
    events = [timed.event for timed in read_recording(path)]
    assert isinstance(events[0], RecordingHeader) and events[-1] == RecordingEnd(0)
    assert not any(isinstance(event, Output) for event in events)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    view, summary = recorded(ended.workspace).view(), recorded(ended.workspace).summary()
    assert summary["state"] == "ended" and summary["step"] == ended.report["steps"]
    assert [each["state"] for each in (*summary["workers"], *summary["servers"])] == ["finished"] * 3
    assert {each["pid"] for each in view["processes"]} == {
        each["pid"] for each in ended.report["processes"] if each["workers"] or each["servers"]
    }
    record = Registry(open_store((runner.folder / "store").as_uri())).view("night")
    assert record.state == "done" and record.summary is not None
    assert (record.summary["state"], record.summary["step"]) == ("ended", ended.report["steps"])
    words = [*runner.python, "-m", "topotrain", "jobs", "view", url]
    out = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    assert f"step {ended.report['steps']}, loss" in out
    runner.run(DOWNPOUR, "steady.py", "--epochs", "1")
    assert recorded(ended.workspace).summary()["step"] < summary["step"]
    assert [entry["kind"] for entry in recorded(ended.workspace).view()["story"]].count("ended") == 1


def test_a_running_job_is_watched_and_a_killed_one_is_lost(runner: JobRunner) -> None:
    with subprocess.Popen(
        runner.command(DOWNPOUR, *STAY), cwd=runner.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        workspace = runner.folder / "job"
        wait(lambda: (workspace / FILE).exists() and recorded(workspace).summary()["step"] > 5)
        found = watched(runner, workspace)
        assert found["state"] == "running" and found["step"] > 5
        workers = found["workers"]
        assert all(each["samples_per_s"] > 0 and each["loss"] > 0 for each in workers)
        first, second = (recorded(workspace).view()["processes"][n]["pid"] for n in (0, 1))
        os.kill(first, signal.SIGKILL)
        wait(lambda: recorded(workspace).summary()["incidents"])
        wait(lambda: recorded(workspace).summary()["incidents"][0]["recovered_s"] is not None)
        states = [state for _, state in recorded(workspace).view()["states"]["worker 0/0"]]
        at = states.index("dead")
        assert states[at : at + 3] == ["dead", "restarts", "computes"]
        assert second == recorded(workspace).view()["processes"][1]["pid"]
        launcher.kill()
    # Half a second later nothing holds the workspace, and the file has been silent for long.
    past = (workspace / FILE).stat().st_mtime - 60
    os.utime(workspace / FILE, (past, past))
    with closing(RecordedWorkspace(workspace)) as left:
        wait(lambda: left.read().summary()["state"] == "lost")
        assert left.history.view()["job"]["lost"]
    assert watched(runner, workspace)["state"] == "lost"


def test_a_resumed_job_goes_on_in_its_recording(runner: JobRunner) -> None:
    program = ("resuming.py", "net", "--epochs", "4")
    code, said, workspace = terminated(
        runner, "nworkers_per_group: 2 nservers_per_group: 2", *program, extra="snapshot_s: 0 checkpoint_freq: 20"
    )
    assert code == 143, said
    before = recorded(workspace)
    assert before.view()["job"]["code"] == 143
    resumed(runner, workspace)
    found = recorded(workspace)
    assert found.view()["job"]["code"] == 0
    assert found.view()["job"]["started"] == before.view()["job"]["started"]
    assert found.summary()["step"] > before.summary()["step"]
    assert found.view()["story"][: len(before.view()["story"])] == before.view()["story"]
