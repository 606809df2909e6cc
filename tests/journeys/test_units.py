"""Units started one by one lose processes, or a whole unit: the job goes on, and each sample counts once."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from job_runner import JobRunner
from unit_hosts import Job, hastily, port, wait

pytestmark = pytest.mark.journey

SANDBLASTER = "nworkers_per_group: 2 nservers_per_group: 1 server_worker_separate: true"
DOWNPOUR = "nworker_groups: 2 nworkers_per_group: 1 nservers_per_group: 1 server_worker_separate: true"
HASTILY = hastily(0.3, 1.5)


@pytest.fixture
def begun(runner: JobRunner) -> Iterator[Callable[..., Job]]:
    """Starts a ledger of three units, and returns when there is a snapshot."""
    made: list[Job] = []

    def begin(cluster: str, epochs: int, url: str = "") -> Job:
        url = url or f"tcp://127.0.0.1:{port()}?job=ledger"
        job = Job(runner, cluster, "ledger.py", ["--epochs", str(epochs), "--step-s", "0.03"], [None] * 3, url)
        job.conf.write_text(f"reduce: kSum snapshot_s: 0.3\n{job.conf.read_text()}")
        made.append(job)
        for rank in range(3):
            job.start(rank, command=HASTILY)
        wait(lambda: any((job.workspace / "manifests").glob("*/manifest.json")))
        return job

    yield begin
    for job in made:
        for unit in job.units.values():
            unit.kill()


def kill(job: Job, role: str) -> None:
    """A process of the job."""
    for path in job.workspace.glob("processes-*.json"):
        for entry in json.loads(path.read_text()):
            if role in entry["roles"]:
                os.kill(entry["pid"], signal.SIGKILL)
                return
    raise AssertionError(role)


def incidents(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((job.folder / "report-0.json").read_text())["incidents"]
    return found


def right(job: Job, epochs: int) -> bool:
    return all(bool((cells == epochs).all()) for cells in job.final.values())


def test_a_group_of_two_units_and_then_the_whole_job_start_again(begun: Callable[..., Job]) -> None:
    job = begun(SANDBLASTER, 2)
    kill(job, "worker 0/1")
    time.sleep(0.5)
    kill(job, "server 0/0")
    job.end_well()
    assert right(job, 2)
    first, second = incidents(job)
    assert first["action"] == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert second["action"] == "the whole job starts again"
    assert "manifests/" in job.said[0]


def test_a_unit_whose_workers_others_can_do_without(begun: Callable[..., Job]) -> None:
    job = begun(DOWNPOUR, 5)
    job.units.pop(1).kill()
    job.end_well()
    assert right(job, 5)
    (incident,) = incidents(job)
    assert incident["who"] == "unit 1"
    assert incident["action"] == "the job goes on without group 1"


def test_a_unit_that_is_started_again(begun: Callable[..., Job], runner: JobRunner) -> None:
    job = begun(SANDBLASTER, 2, (runner.folder / "store").as_uri() + "?job=ledger")
    job.units[1].kill()
    job.start(1, command=HASTILY)
    job.end_well()
    assert right(job, 2)
    (incident,) = incidents(job)
    assert incident["who"] == "unit 1"
    assert incident["action"] == "the whole job starts again"


def test_a_job_that_was_asked_to_end_goes_on_when_its_units_are_started_again(begun: Callable[..., Job]) -> None:
    job = begun(SANDBLASTER, 3)
    job.units[1].process.terminate()
    codes, said = zip(*((code, err) for code, _, err in (job.units[rank].end() for rank in range(3))), strict=True)
    assert codes == (143, 143, 143)
    assert "with `resume: true` the same job goes on from there" in said[0]
    job.conf.write_text(f"resume: true\n{job.conf.read_text()}")
    for rank in range(3):
        job.start(rank, command=HASTILY)
    job.end_well()
    assert right(job, 3)
    report = json.loads((job.folder / "report-0.json").read_text())
    assert report["samples"] == 3 * 240, "what was trained before counts, and is not trained again"
