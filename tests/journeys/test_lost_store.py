"""The store of a job is wiped or dies while the job runs: a death after that costs a group, as before.

Each kind of store writes its values again: comm/store/test_maintained_values.py.
"""

import json
import os
import signal
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis_server
from folder_wipe import wipe
from job_runner import DOWNPOUR, Ended, JobRunner
from killed_jobs import entries
from unit_hosts import TOKEN, Units, wait

from topotrain.comm.store import open_store
from topotrain.comm.store.discovery.job_registry import Registry

pytestmark = pytest.mark.journey


def test_a_worker_that_dies_after_its_store_was_lost_costs_its_group_alone(
    runner: JobRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOTRAIN_TOKEN", TOKEN)
    url = (tmp_path / "store").as_uri()
    pace = ("--epochs", "8", "--step-s", "0.1", "--on", str(tmp_path / "on"))
    extra = "reduce: kSum snapshot_s: 0.2 restarts: 1"
    command = runner.command(DOWNPOUR, "ledger.py", *pace, extra=extra, options=["--rendezvous", url])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen(command, cwd=runner.folder, **pipes)
    workspace = runner.folder / "job"
    try:
        wait(lambda: any((workspace / "manifests").glob("*/manifest.json")) or started.poll() is not None)
        wipe(tmp_path / "store")
        (worker,) = (entry for entry in entries(workspace) if "worker 1/0" in entry["roles"])
        os.kill(worker["pid"], signal.SIGKILL)
        wait(lambda: states(url) == ["running"] or started.poll() is not None)
        (tmp_path / "on").touch()
        out, _ = started.communicate(timeout=150)
    finally:
        started.kill()
    assert started.returncode == 0, out
    Ended(0, out, "", workspace, report := json.loads((runner.folder / "job.json").read_text())).check_ledger(8)
    # Its group goes on meanwhile, if its script has shown by then that it can repeat a step.
    (incident,) = report["incidents"]
    assert (incident["who"], incident["action"].endswith("(incarnation 1)")) == ("worker 1/0", True)
    assert "Traceback" not in out
    assert states(url) == ["done"]


def states(url: str) -> list[str]:
    """Of the jobs in a store."""
    with closing(open_store(url)) as store:
        return [record.state for record in Registry(store).list()]


def test_redis_is_not_needed_while_a_job_runs(units: Units, tmp_path: Path) -> None:
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    with ExitStack() as stack:
        url = stack.enter_context(redis_server.redis_server(tmp_path))
        job = units.paced("nworkers_per_group: 2 nservers_per_group: 2", 6, hosts=2, store=url)
        job.begin()
        stack.close()
        job.end_well()
    job.check_ledger(6)
    assert not any("Traceback" in said for said in job.said.values()), job.said  # of a thread whose store was closed
    assert not any("the end of the other units is unknown" in said for said in job.said.values())
