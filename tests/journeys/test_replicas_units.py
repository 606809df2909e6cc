"""Servers with a second copy in units that are started one by one: a process dies, then a whole unit, then one more."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from free_ports import free_port
from job_runner import JobRunner
from unit_hosts import Job, covered, hastily, servers, wait

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp"
MIXED = "nworker_groups: 2 nservers_per_group: 2 transport: kTcp"
HASTILY = hastily(0.3, 1.5)


@pytest.fixture
def units(runner: JobRunner) -> Iterator[Any]:
    """Starts the units of a job."""
    made: list[Job] = []

    def begin(cluster: str, count: int, program: str, *words: str, extra: str = "") -> Job:
        url = f"tcp://127.0.0.1:{free_port()}?job=twice"
        job = Job(runner, f"{cluster} replicas: 2", program, words, [None] * count, url)
        job.conf.write_text(f"on_failure: kContinue restarts: 2 snapshot_s: 0.2 {extra}\n{job.conf.read_text()}")
        made.append(job)
        for rank in range(count):
            job.start(rank, command=HASTILY)
        return job

    yield begin
    for job in made:
        for unit in job.units.values():
            unit.kill()


def incidents(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((job.folder / "report-0.json").read_text())["incidents"]
    return found


def test_a_server_and_a_unit_die_and_the_result_does_not_show_it(runner: JobRunner, units: Any) -> None:
    calm = runner.run(PAIRS, "twice.py", str(runner.folder / "calm"), name="calm").final
    job = units(PAIRS, 3, "twice.py", str(runner.folder / "units"), "6:0", "16:unit-2", "26:0")
    ends = {rank: unit.end() for rank, unit in job.units.items()}
    assert [code for code, _, _ in ends.values()] == [0, 0, -9], "\n".join(err for _, _, err in ends.values())
    assert calm.keys() == job.final.keys()
    for name, values in calm.items():
        assert torch.equal(values, job.final[name]), name
    found = incidents(job)
    assert [incident["who"] for incident in found] == ["server 0/0", "unit 2", "server 0/0"]
    assert "fresh processes in unit 0" in found[1]["action"]


def test_a_unit_with_a_server_and_a_group_that_others_can_do_without(units: Any) -> None:
    """What was counted there counts, and what was not is done by the others. Whoever comes in its place waits."""
    job = units(MIXED, 2, "ledger.py", "--epochs", "4", "--step-s", "0.03", extra="reduce: kSum")
    covered(job, 2)
    job.units[1].kill()
    job.start(1, command=HASTILY)
    wait(lambda: any(entry["second"] == 1 for entry in servers(job)))
    (pid,) = (entry["pid"] for entry in servers(job) if "server 0/0" in entry["roles"])
    os.kill(pid, signal.SIGKILL)
    job.end_well()
    assert all(bool((cells == 4).all()) for cells in job.final.values())
    assert [incident["who"] for incident in incidents(job)] == ["unit 1", "unit 1", "server 0/0"]


def test_units_with_both_copies_are_started_again_and_the_job_from_its_snapshot(units: Any) -> None:
    job = units(PAIRS, 3, "ledger.py", "--epochs", "2", "--step-s", "0.03", extra="reduce: kSum")
    covered(job, 2)
    for rank in (1, 2):
        job.units.pop(rank).kill()
    for rank in (1, 2):
        job.start(rank, command=HASTILY)
    job.end_well()
    assert all(bool((cells == 2).all()) for cells in job.final.values())
    assert incidents(job)[-1]["action"] == "the whole job starts again"
    assert "manifests/" in job.said[0]
