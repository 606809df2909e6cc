"""Jobs of several hosts in which the workers of a host send one sum: their bits, and deaths of those that add up."""

import json
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from free_ports import free_port
from job_runner import Ended, JobRunner
from soak_cases import soaked
from unit_hosts import HostNetwork, Job, hastily, wait

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 4 nworkers_per_procs: 2"
ALLREDUCE = f"{PAIRS} nservers_per_group: 2"
APART = f"{PAIRS} server_worker_separate: true link {{ }}"
EPOCHS = 3


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        for unit in job.units.values():
            unit.kill()


def inside_hosts(report: dict[str, int]) -> int:
    """Bytes between the workers of a host: all others take the link."""
    return report["bytes_out"] - report["bytes_link"]


def test_two_hosts_have_the_bits_of_one(runner: JobRunner, jobs: list[Job], network: HostNetwork) -> None:
    expected = runner.run(ALLREDUCE, "small.py", "--epochs", "6", name="alone").final
    url = f"tcp://{network.addresses[0]}:{free_port()}?job=hosts"
    jobs.append(Job(runner, ALLREDUCE, "small.py", ["--epochs", "6"], [0, 1], url, network))
    jobs[0].run()
    found = jobs[0].final
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def survived(ended: Ended, victim: str) -> str:
    """What was done about the death of a worker; every cell of the ledger is right."""
    ended.check_ledger(EPOCHS)
    assert inside_hosts(ended.report) > 0
    (incident,) = ended.report["incidents"]
    assert incident["who"] == victim
    return str(incident["action"])


@pytest.mark.parametrize("victim", soaked(["worker 0/3"], ["worker 0/0"]))
def test_a_worker_that_adds_up_is_killed_and_the_others_keep_their_step(runner: JobRunner, victim: str) -> None:
    words = (str(runner.folder / "job"), victim, "1", "5")
    cluster = f"{APART} nservers_per_group: 2"
    ended = runner.run(cluster, "mortal.py", *words, extra="on_failure: kContinue reduce: kSum")
    assert survived(ended, victim) == "it starts again, and its group continues meanwhile (incarnation 1)"


def test_a_group_whose_sums_are_lost_starts_again(runner: JobRunner) -> None:
    words = (str(runner.folder / "job"), "worker 0/0", "1", "5")
    extra = "on_failure: kContinue reduce: kSum grads: kHidden pull: kLazy"
    ended = runner.run(APART, "mortal.py", *words, extra=extra)
    assert survived(ended, "worker 0/0") == "group 0 starts again (incarnation 1)"


def test_units_go_on_when_a_worker_that_adds_up_is_killed(runner: JobRunner, jobs: list[Job]) -> None:
    url = f"tcp://127.0.0.1:{free_port()}?job=ledger"
    job = Job(runner, APART, "ledger.py", ["--epochs", str(EPOCHS), "--step-s", "0.03"], [None] * 3, url)
    job.conf.write_text(f"reduce: kSum snapshot_s: 0.3\n{job.conf.read_text()}")
    jobs.append(job)
    for rank in range(3):
        job.start(rank, command=hastily(0.3, 1.5))
    wait(lambda: any((job.workspace / "manifests").glob("*/manifest.json")))
    entries = [entry for path in job.workspace.glob("processes-*.json") for entry in json.loads(path.read_text())]
    (victim,) = (entry["pid"] for entry in entries if "worker 0/0" in entry["roles"])
    os.kill(victim, signal.SIGKILL)
    job.end_well()
    assert all(bool((cells == EPOCHS).all()) for cells in job.final.values())
    report = json.loads((job.folder / "report-0.json").read_text())
    assert inside_hosts(report) > 0
    (incident,) = report["incidents"]
    assert incident["action"] == "it starts again, and its group continues meanwhile (incarnation 1)"
