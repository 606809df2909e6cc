"""What `topotrain compare` makes of the results of its jobs: workspaces, labels, data, and a picture."""

import json
from pathlib import Path

import pytest

from tests.tools.monitor.test_job_report import JOB, a_report
from topotrain.config.job import Cluster, Job
from topotrain.launch import JobOutcome
from topotrain.tools.cli.compare import collect, entries
from topotrain.tools.monitor.job_report import JobResult


def test_every_job_has_a_workspace_and_a_label_and_ctrl_c_ends_the_comparison(tmp_path: Path) -> None:
    other = Job(cluster=Cluster(nworkers_per_group=2, nservers_per_group=2))
    jobs = entries([("a/one.conf", JOB), ("b/one.conf", JOB), ("c/ar.yaml", other), ("next.conf", JOB)], tmp_path)
    assert [entry.label for entry in jobs] == ["Downpour (one)", "Downpour (one-2)", "AllReduce", "Downpour (next)"]
    assert [entry.job.workspace for entry in jobs[:3]] == [str(tmp_path / name) for name in ("one", "one-2", "ar")]
    assert jobs[0].job.args == JOB.args
    results = ((job, JobResult(JobOutcome(code, 2.0), a_report(job.job))) for job, code in zip(jobs, (1, 0, 130, 0)))
    code, rows = collect(results, tmp_path / "out")
    assert code == 1, "the first that failed, and yet the second ran"
    assert [row["label"] for row in rows] == [entry.label for entry in jobs[:3]]
    data = json.loads((tmp_path / "out" / "compare.json").read_text())["jobs"]
    assert (data[1]["conf"], data[1]["metrics"]) == ("b/one.conf", {"accuracy": 0.975})
    assert 10 <= len(data[1]["curve"]) <= 20
    assert (tmp_path / "out" / "frameworks.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_files_that_cannot_be_written_do_not_cost_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = entries([("a.conf", JOB)], tmp_path)
    for name in ("compare.json", "frameworks.png"):
        (tmp_path / name).mkdir()
    code, rows = collect(((entry, JobResult(JobOutcome(0, 1.0), a_report(entry.job))) for entry in jobs), tmp_path)
    assert (code, [row["label"] for row in rows]) == (0, ["Downpour"])
    assert [line.split(": ", 2)[2] for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path}/{name}: cannot be written (Is a directory)" for name in ("compare.json", "frameworks.png")
    ]
