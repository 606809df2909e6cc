"""Exports of a running job: real files, read back; slow and failing ones, which the job does not notice."""

import json
import math
import sqlite3
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sample_history import events, step
from wait_limit import ended_after

import topotrain as tt
from tests.support.recorded_jobs import recorder_of
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.core.events import Event, Notice, Output, Resized, Resources, ServerLoad
from topotrain.tools.exporters import job_exports
from topotrain.tools.exporters.curve_exports import load
from topotrain.tools.exporters.job_exports import JobExports
from topotrain.tools.recording import history_series

CALLS: list[tuple[Any, ...]] = []
GO = threading.Event()


class Remembers(tt.Tracker):
    """A tracker that notes its calls."""

    def start(self, job: Mapping[str, Any]) -> None:
        CALLS.append(("start", dict(job)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        CALLS.append(("log", step, dict(values)))

    def end(self, code: int) -> None:
        CALLS.append(("end", code))


class Fails(tt.Tracker):
    """A tracker whose service is gone. What it does not have is the base class's."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        CALLS.append(("log", step, dict(values)))
        raise ConnectionError("the service is gone\nmore\x1b[31m" + "x" * 1000)


class Stands(Remembers):
    """A tracker that waits until it is let go."""

    def start(self, job: Mapping[str, Any]) -> None:
        GO.wait(60)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This module is found by the name that the options give."""
    monkeypatch.setitem(sys.modules, "remembering", sys.modules[__name__])
    CALLS.clear()
    GO.clear()
    yield
    GO.set()


class Exported:
    """A job with exports, which follow its recorder as in a launcher."""

    def __init__(self, folder: Path, *logs: str, metrics: str = "", resumed: bool = False, **fields: int) -> None:
        cluster = Cluster(server_worker_separate=True, workspace=str(folder), **(fields or {"nworker_groups": 2}))
        job = Job(name="digits", cluster=cluster)
        self.exports = JobExports(job, logs, metrics, {})
        self.recorder = recorder_of(job, resumed, self.exports)

    def close(self) -> None:
        self.exports.close()


def run(made: Exported, given: list[Event], code: int = 0) -> list[Notice]:
    """Give the events of a job to its recorder, from its start to its end."""
    with closing(made), ended_after(300):
        for event in given:
            made.recorder(event)
        made.recorder.end(code)
        return made.exports.notices()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_flat_values_in_the_order_of_time(tmp_path: Path) -> None:
    folder, began = tmp_path / "job", time.time() - 0.001
    assert run(Exported(folder, "jsonl"), [*events(), step("worker 0/0", 13, math.nan)]) == []
    found = lines(folder / "curves.jsonl")
    assert all(list(line) == ["time", "step", "process", "name", "value"] for line in found)
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)
    assert began <= found[0]["time"] <= time.time()
    of = {
        key: [(line["step"], line["value"]) for line in found if (line["process"], line["name"]) == key]
        for key in ((line["process"], line["name"]) for line in found)
    }
    assert of["worker 0/0", "loss"] == [*((number, 0.75) for number in range(1, 13)), (13, None)]
    # Points of a group's loss are half a second apart, and the last one is there.
    assert of["group 0", "loss"][-1][0] == 13
    assert {key: points for key, points in of.items() if key[1].startswith("log:")} == {
        ("worker 0/0", 'log:accuracy "of" all'): [(12, 0.5)]
    }
    modes = [path.stat().st_mode & 0o777 for path in (folder / "curves.jsonl", folder)]
    assert modes == [0o600, 0o700]


def test_lines_follow_those_of_an_earlier_start_and_have_workers_that_join(tmp_path: Path) -> None:
    for resumed in (False, False, True):
        # Times are written in milliseconds: what was written before is earlier in them, too.
        began = time.time() + 0.002
        while time.time() < began:
            pass
        made = Exported(tmp_path, "jsonl", resumed=resumed, nworkers_per_group=2)
        run(made, [*events(2), step("worker 0/2", 1), Resized(0, 2, 3, 1, 1.0), step("worker 0/2", 2)])
    losses = [line for line in lines(tmp_path / "curves.jsonl") if line["name"] == "loss"]
    found = [
        (line["process"], line["step"], line["time"] > began - 0.001) for line in losses if line["process"] != "group 0"
    ]
    # The recorder has the earlier start in its history, whose curves are written already.
    own = (("worker 0/0", 1), ("worker 0/0", 2), ("worker 0/2", 2))
    assert sorted(found) == [(*point, later) for point in own for later in (False, True)]


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    began = time.time()
    assert run(Exported(tmp_path, "tensorboard"), events()) == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (tmp_path / "tensorboard").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert tags >= {f"{name}/worker 1/0" for name in ("loss", "staleness_mean", "staleness_p95", "staleness_max")}
    assert tags >= {
        "bytes_per_s/worker 0/0",
        "loss/group 0",
        "loss/group 1",
        'log/accuracy "of" all/worker 0/0',
        "memory_bytes/server 0/0",
    }
    loss = found.Scalars("loss/worker 1/0")
    assert [(point.step, point.value) for point in loss] == [(number, 0.75) for number in range(1, 13)]
    assert began <= loss[0].wall_time <= loss[-1].wall_time <= time.time()


def test_a_tracker_gets_the_job_its_end_and_values_by_the_steps_of_workers(tmp_path: Path) -> None:
    given: list[Event] = []
    for number in range(1, 6):
        given += [step(f"worker {group}/0", number) for group in range(2)]
        # The versions of servers are no steps.
        given += [ServerLoad("server 0/0", 10 * number, 10 * number, 0.1), Resources("server 0/0", 9, 1, 0.5)]
    # A step that is behind counts as the last one.
    given += [step("worker 0/0", 9), step("worker 1/0", 6)]
    assert run(Exported(tmp_path, "python:remembering:Remembers"), given, 1) == []
    (begins, job), *logged, ended = CALLS
    assert (begins, job["name"], job["framework"]) == ("start", "digits", "Downpour (asynchronous)")
    assert job["workspace"] == str(tmp_path) and "nworker_groups: 2" in job["block"]
    assert ended == ("end", 1) and {call[0] for call in logged} == {"log"}
    steps = [call[1] for call in logged]
    assert {1, 5} <= set(steps) and steps == sorted(steps) and steps[-1] == 9
    assert [call[1] for call in logged if "loss/worker 0/0" in call[2]] == [1, 2, 3, 4, 5, 9]
    whole = {name: value for call in logged for name, value in call[2].items()}
    assert whole["loss/group 1"] == 0.75 and whole["staleness_p95/worker 0/0"] == 3.0
    assert "updates_per_s/server 0/0" in whole


def test_exports_that_fail_are_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = Exported(tmp_path, "python:remembering:Fails", "jsonl", f"jsonl:{tmp_path / 'file' / 'x'}")
    of_file, of_tracker = sorted(run(made, events()), key=lambda notice: notice.text)
    assert of_tracker == Notice(
        "launcher",
        "--log python:remembering:Fails has failed: ConnectionError: the service is gone; the job continues without it",
    )
    assert "--log jsonl:" in of_file.text and "File exists" in of_file.text
    assert made.exports.notices() == []
    assert [call[0] for call in CALLS] == ["log"]
    assert len(lines(tmp_path / "curves.jsonl")) > 12


def test_a_tracker_that_stands_still_costs_neither_the_job_nor_another_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_series, "MOST_POINTS", 64)
    path = tmp_path / "a" / "curves"
    made = Exported(tmp_path / "job", "python:remembering:Stands", f"jsonl:{path}")
    with closing(made), ended_after(300):
        for number in range(1, 1001):
            made.recorder(step("worker 0/0", number))
            made.recorder(Output("worker 0/0", "stdout", "not exported\n"))
        while not (path.exists() and '"step": 1000' in path.read_text()):
            time.sleep(0.01)
        GO.set()
        made.recorder.end(3)
        assert made.exports.notices() == [] and not (tmp_path / "job" / "curves.jsonl").exists()
    steps = [call[1] for call in CALLS if call[0] == "log" and "loss/worker 0/0" in call[2]]
    # The tracker gets what is left of the curve: its beginning, each n-th point, and the last ones.
    assert (steps[0], steps[-1]) == (1, 1000) and len(steps) <= 64
    assert CALLS[-1] == ("end", 3)


def test_a_tracker_that_never_ends_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_exports, "END_S", 0.1)
    (notice,) = run(Exported(tmp_path, "python:remembering:Stands"), events())
    assert notice.text.endswith("is left behind")


def test_metrics_are_served_until_the_end(tmp_path: Path) -> None:
    made = Exported(tmp_path, metrics="0")
    with closing(made), ended_after(300):
        for event in events():
            made.recorder(event)
        text = ""
        while 'topotrain_worker_steps_total{group="0",process="worker 0/0"} 12.0' not in text:
            with urllib.request.urlopen(made.exports.url, timeout=10) as answer:
                text = answer.read().decode()
        made.recorder.end(0)
        assert made.exports.notices() == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(made.exports.url, timeout=10)


def test_a_wrong_value_and_a_missing_library_are_refused_and_nothing_is_written_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Exported(tmp_path / "job", "jsonl", "tensorboard"), [], 1)
    monkeypatch.setattr(job_exports, "find_spec", lambda name: None)
    for value, accepted in (
        ("tensorboard", r"pip install 'topotrain\[tensorboard\]'"),
        ("wandb", r"must be tensorboard\[:DIR\], jsonl\[:FILE\] or python:MODULE:CLASS"),
        ("", "must be tensorboard"),
        ("python", "must be python:MODULE:CLASS"),
        ("python:remembering", "must be python:MODULE:CLASS"),
        ("python:../x:Y", "must be python:MODULE:CLASS"),
        ("python:remembering:Missing", "cannot be made: AttributeError"),
        ("python:no_such_module:Y", "cannot be made: ModuleNotFoundError: No module named 'no_such_module'"),
        ("python:pathlib:Path", "must name a subclass of tt.Tracker"),
    ):
        with pytest.raises(ConfigError, match=f"--log.*{accepted}"):
            Exported(tmp_path / "job", value)
    assert not (tmp_path / "job").exists()
    assert isinstance(load("--log", "x", "topotrain:Tracker"), tt.Tracker)


def test_the_example_for_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    made = Exported(tmp_path, "python:examples.track_sqlite:Sqlite")
    assert run(made, events()) == []
    with closing(sqlite3.connect(tmp_path / "curves.sqlite")) as file:
        assert file.execute("select code from ends where job = 'digits'").fetchall() == [(0,)]
        rows = file.execute("select distinct value from curves where name = 'loss/group 0'").fetchall()
    assert rows == [(0.75,)]
