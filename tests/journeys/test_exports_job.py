"""A job whose figures go to Prometheus, TensorBoard, a file and MLflow at once; and the logs of its processes."""

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from free_ports import free_port
from job_runner import DOWNPOUR, JobRunner
from prometheus_client.parser import text_string_to_metric_families
from unit_hosts import Job
from wait_limit import ended_after

from tests.support.recorded_jobs import history, read_recording
from topotrain.core.events import StepDone
from topotrain.launch.log_lines import without_stamps
from topotrain.tools.recording.recorded_lines import RecordingEnd, RecordingHeader
from topotrain.tools.recording.recording_file import FILE

pytestmark = pytest.mark.journey

EXAMPLES = Path(__file__).parents[2] / "examples"
APART = "nworker_groups: 2 nservers_per_group: 1 server_worker_separate: true"
WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0", "worker 1/1")


def scraped(url: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("process", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_exports_at_once(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = runner.folder / "runs"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", runs.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    shutil.copy(EXAMPLES / "track_mlflow.py", runner.folder)
    logs = [word for kind in ("tensorboard", "jsonl", "python:track_mlflow:MLflow") for word in ("--log", kind)]
    command = runner.command(
        DOWNPOUR, "logging_values.py", "--steps", "60", "--step-s", "0.1", options=["--metrics", "0", *logs]
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ended_after(150), subprocess.Popen(command, cwd=runner.folder, text=True, **pipes) as job:
        try:
            url = ""
            while not url:
                url = (re.findall(r"^metrics: (http://127\.0\.0\.1:\d+/metrics)$", job.stderr.readline()) or [""])[0]
            found: dict[tuple[str, ...], float] = {}
            while job.poll() is None and not all(found.get(("topotrain_worker_steps_total", who)) for who in WORKERS):
                found = scraped(url)
            assert found["topotrain_job_running", ""] == 1
            assert found["topotrain_worker_samples_per_second", "worker 1/1"] > 0
            _, err = job.communicate()
        finally:
            job.kill()
    assert job.returncode == 0, err
    assert "--log" not in err
    workspace = runner.folder / "job"
    lines = [json.loads(line) for line in (workspace / "curves.jsonl").read_text().splitlines()]
    for who in WORKERS:
        doubled = [line for line in lines if (line["process"], line["name"]) == (who, "log:double")]
        assert doubled and all(line["value"] > 0 for line in doubled)
        assert any((line["process"], line["name"]) == (who, "loss") for line in lines)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(workspace / "tensorboard"))
    board.Reload()
    assert {"loss/group 0", "loss/group 1", "log/double/worker 1/1"} <= set(board.Tags()["scalars"])
    (metric,) = runs.glob("0/*/metrics/loss/group 0")
    steps = [int(line.split()[2]) for line in metric.read_text().splitlines()]
    assert steps and steps == sorted(steps)
    # MLflow's number for FINISHED.
    assert "status: 3" in (metric.parents[2] / "meta.yaml").read_text()


def test_unit_0_records_and_exports_the_curves_of_all_units(runner: JobRunner) -> None:
    """Each unit is started with the same options, as by a launcher."""
    url = f"tcp://127.0.0.1:{free_port()}?job=ledger"
    job = Job(runner, APART, "ledger.py", ["--epochs", "4", "--step-s", "0.03"], [None] * 3, url)
    for rank in (2, 1, 0):
        job.start(rank, "--log", "jsonl", "--metrics", "0")
    job.end_well()
    assert ["metrics: http://127.0.0.1:" in job.said[rank] for rank in range(3)] == [True, False, False]
    lines = [json.loads(line) for line in (job.workspace / "curves.jsonl").read_text().splitlines()]
    for who in ("worker 0/0", "worker 1/0"):
        assert any((line["process"], line["name"]) == (who, "loss") for line in lines), who
    timed = list(read_recording(job.workspace / FILE))
    assert [type(each.event) for each in timed].count(RecordingHeader) == 1
    assert timed[-1].event == RecordingEnd(0)
    # While the job runs, and not only with the reports at its end.
    steps = [each for each in timed if isinstance(each.event, StepDone) and each.event.who == "worker 1/0"]
    assert len(steps) > 1 and steps[0].at < timed[-1].at - 1.0
    report = json.loads((job.folder / "report-0.json").read_text())
    assert max(each["step"] for each in history(*timed).summary()["workers"]) == report["steps"]
    assert not list(job.workspace.glob("events*.tmp"))


def test_logs_have_time_and_name_and_topotrains_words(runner: JobRunner) -> None:
    ended = runner.run(DOWNPOUR, "logging_values.py", "--level", "INFO")
    assert ended.out == "prepared\n" and "steps" in ended.err and " | " not in ended.out + ended.err
    for who in WORKERS:
        log = (ended.workspace / "logs" / f"{who.replace('/', '-').replace(' ', '-')}.log").read_bytes()
        own = without_stamps(log).decode()
        assert re.search(r"topotrain INFO: has finished: \d+ steps, \d+ samples\n", own)
        assert "prepared\n" in own and "\ntrained" in own and "\r1 steps" in own
        stamps = re.findall(rf"^(\d{{4}}-\d\d-\d\dT[\d:.]+Z) {who} \| ".encode(), log, re.MULTILINE)
        assert len(stamps) >= 4
        # What the main worker prints is written by its unit, and its records by itself: they may overtake each other.
        if who != WORKERS[0]:
            assert own.startswith("prepared\n") or "topotrain INFO: connects to the servers\nprepared\n" in own
            assert "\ntrained\n" in own and stamps == sorted(stamps)
