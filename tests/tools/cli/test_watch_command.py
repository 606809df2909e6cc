"""`topotrain watch --once`: the state of a job from its recording, and what is refused."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.recorded_jobs import Clock, header, step
from topotrain.core import events
from topotrain.launch.agent.file_locks import locked
from topotrain.tools.recording.recording_file import FILE, QUIET_S
from topotrain.tools.recording.recording_writer import RecordingWriter
from topotrain.tools.summary_text import summary_text

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A job that has been recorded up to a moment before its end."""
    clock = Clock()
    writer = RecordingWriter(tmp_path / "work" / FILE, header(), clock)
    for at, event in (
        (1.0, events.Started("worker 0/0", 11)),
        (2.0, step(time=1.0, number=100, samples=3200, loss=0.5, progress=0.25, epoch=1, waited_s=0.25)),
        (3.0, events.Logged("worker 0/0", 1.0, 100, {"accuracy": 0.75})),
        (3.5, events.Resources("worker 0/0", 11, 250_000_000, 3.0)),
        (4.0, events.Incident(0, "worker 1/0", "worker 1/0 (pid 12) was killed by SIGKILL", "group 1 restarts", 4.0)),
        (5.0, events.Recovered(0, 1.0, 0.0)),
        (6.0, events.Saved("server 0/0", 2, 90, "work/manifests/step-90", "time")),
        (7.0, events.ServerLoad("server 0/0", 70, 70, 1.0)),
    ):
        clock.now = at
        writer.write(event)
    writer.flush(10)
    writer.close(None)
    path = tmp_path / "work" / FILE
    # Without its last line, as of a job that runs.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return tmp_path / "work"


def test_the_state_of_a_running_job_is_printed_once(ask: Ask, workspace: Path) -> None:
    code, out, err = ask("watch", str(workspace), "--once")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "digits: Downpour (asynchronous), runs for 7.0 s"
    assert lines[1] == "25 % done, epoch 2, about 15.0 s left" or lines[1] == "25 % done, epoch 2"
    assert lines[2] == "step 100, loss 0.5000, 3200.0 samples/s"
    (row,) = (line.split() for line in lines if line.startswith("0/0") and "computes" in line)
    assert row == ["0/0", "computes", "11", "100", "0.5000", "3200.0", "0.50", "0.0", "3", "25", "%", "250", "MB"]
    assert "worker 0/0 logs accuracy 0.7500" in lines
    assert "last snapshot: 2, after step 90" in lines
    incident = "worker 1/0 (pid 12) was killed by SIGKILL; group 1 restarts; trained again after 1.0 s"
    assert f"at 4.0 s: {incident}" in lines


def test_machines_get_the_summary(ask: Ask, workspace: Path) -> None:
    code, out, err = ask("watch", str(workspace), "--once", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["version"], found["state"], found["step"], found["loss"]) == (1, "running", 100, 0.5)
    assert found["incidents"][0]["recovered_s"] == 1.0 and found["snapshots"][0]["number"] == 2
    worker = found["workers"][0]
    assert (worker["staleness_mean"], worker["samples_per_s"], worker["waiting_share"]) == (0.5, 3200.0, 0.25)


def test_a_job_that_was_killed_is_lost_and_one_that_is_silent_is_not(ask: Ask, workspace: Path) -> None:
    past = time.time() - QUIET_S - 1
    os.utime(workspace / FILE, (past, past))
    assert json.loads(ask("watch", str(workspace), "--once", "--json")[1])["state"] == "lost"
    assert ask("watch", str(workspace), "--once")[1].splitlines()[0].endswith("lost after 7.0 s")
    # As a launcher that waits for something holds its workspace.
    with locked(workspace / "lock", fcntl.LOCK_EX):
        assert json.loads(ask("watch", str(workspace), "--once", "--json")[1])["state"] == "running"


def test_a_folder_without_a_recording_is_refused_in_one_line(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty-recording").mkdir()
    (tmp_path / "empty-recording" / FILE).write_text("")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / FILE)
    for name, why in (
        ("none", "there is no such folder"),
        ("file", "there is no such folder"),
        ("empty", "has no recording (events.jsonl)"),
        ("empty-recording", "has no recording (events.jsonl)"),
        ("pipe", "its recording cannot be read (is a named pipe, must be a file)"),
    ):
        code, out, err = ask("watch", str(tmp_path / name), "--once")
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert err.startswith(f"topotrain: error: WORKSPACE = '{tmp_path / name}': ") and why in err


def test_words_of_scripts_and_stores_do_not_control_the_terminal() -> None:
    evil = "\x1b[2J\r\nroot"
    text = summary_text(
        {
            "state": evil,
            "name": evil,
            "framework": [evil],
            "step": evil,
            "workers": [{"name": evil, "state": evil, "log": {evil: 1.0, "b": None}}, 7, None],
            "servers": {"name": evil},
            "incidents": [{"what": evil, "at_s": "x"}],
            "snapshots": "none",
        }
    )
    assert "\x1b" not in text and "\r" not in text and "?[2J" in text
    assert summary_text({})
