"""Units started one by one lose processes, or a whole unit: the job goes on, and each sample counts once."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from free_ports import free_port
from job_runner import ALLREDUCE, JobRunner
from job_runner import SANDBLASTER as SANDBLASTER_OF_THREE
from process_pool import client
from soak_cases import soaked
from unit_hosts import TOKEN, Job, hastily, newest, wait

pytestmark = pytest.mark.journey

SANDBLASTER = "nworkers_per_group: 2 nservers_per_group: 1 server_worker_separate: true"
APART = "server_worker_separate: true"
DOWNPOUR = "nworker_groups: 2 nworkers_per_group: 1 nservers_per_group: 1 server_worker_separate: true"
HASTILY = hastily(0.3, 1.5)


@pytest.fixture
def begun(runner: JobRunner) -> Iterator[Callable[..., Job]]:
    """Starts a ledger of three units, and returns when there is a snapshot."""
    made: list[Job] = []

    def begin(cluster: str, epochs: int, url: str = "") -> Job:
        url = url or f"tcp://127.0.0.1:{free_port()}?job=ledger"
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


def trained(job: Job) -> None:
    """Wait until the job trains again, and longer than it took to notice."""
    number = newest(job)
    wait(lambda: newest(job) > number + 1)


def incidents(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((job.folder / "report-0.json").read_text())["incidents"]
    return found


def right(job: Job, epochs: int) -> bool:
    return all(bool((cells == epochs).all()) for cells in job.final.values())


def test_a_worker_then_a_server_and_then_a_unit_are_lost(begun: Callable[..., Job], runner: JobRunner) -> None:
    job = begun(SANDBLASTER, 4, (runner.folder / "store").as_uri() + "?job=ledger")
    kill(job, "worker 0/1")
    trained(job)
    kill(job, "server 0/0")
    trained(job)
    job.units[1].kill()
    job.start(1, command=HASTILY)
    job.end_well()
    assert right(job, 4)
    again = "the whole job starts again"
    first, second, third = incidents(job)
    assert first["action"] == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert second["action"] == again
    assert (third["who"], third["action"]) == ("unit 1", again)
    assert "manifests/" in job.said[0]


def test_a_unit_whose_workers_others_can_do_without(begun: Callable[..., Job]) -> None:
    job = begun(DOWNPOUR, 5)
    job.units.pop(1).kill()
    job.end_well()
    assert right(job, 5)
    (incident,) = incidents(job)
    assert incident["who"] == "unit 1"
    assert incident["action"] == "the job goes on without group 1"


ELASTIC = "reduce: kSum on_failure: kContinue"


def test_groups_leave_and_come_in_units_and_one_comes_for_the_first_time(runner: JobRunner) -> None:
    url = f"tcp://127.0.0.1:{free_port()}?job=ledger"
    job = Job(runner, f"nworker_groups: 3 {APART}", "coming.py", [str(runner.folder / "units")], [None] * 4, url)
    job.conf.write_text(f"{ELASTIC} start_groups: 2\n{job.conf.read_text()}")
    job.run()
    assert right(job, 2)
    report = json.loads((job.folder / "report-0.json").read_text())
    changes = [(change["group"], change["what"]) for change in report["groups"]]
    joins = [(1, "joins (incarnation 1)"), (2, "joins (incarnation 1)")]
    assert changes == [(2, "is not there yet"), (1, "has left"), *joins]
    assert report["samples"] == 960 * 2 and report["incidents"] == []
    assert "group 1 has left; the others continue" in job.said[0]
    assert not list(job.workspace.glob("control-*"))


def test_any_unit_takes_a_request_and_so_does_the_store(runner: JobRunner) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    job = Job(
        runner, f"nworker_groups: 3 {APART}", "ledger.py", ["--epochs", "300", "--step-s", "0.03"], [None] * 4, url
    )
    job.url += "?job=ledger"
    job.conf.write_text(f"{ELASTIC} snapshot_s: 0.3\n{job.conf.read_text()}")
    store = [url, "--job", "ledger"]

    def ask(*words: str) -> "subprocess.CompletedProcess[str]":
        environ = {**os.environ, "TOPOTRAIN_TOKEN": TOKEN}
        command = [*client(runner.warm_at), "-m", "topotrain", "jobs", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd=runner.folder)

    try:
        for rank in range(4):
            job.start(rank)
        wait(lambda: any((job.workspace / "manifests").glob("*/manifest.json")))
        left = ask("leave", *store, "--group", "2", "--json")
        assert json.loads(left.stdout) == {"group": 2, "text": "group 2 has left"}, left.stderr
        # on another machine there is only the unit of that machine
        elsewhere = runner.folder / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "control-1").symlink_to((job.workspace / "control-1").readlink())
        (elsewhere / "control-0").symlink_to(runner.folder / "nowhere")
        joined = ask("join", str(elsewhere), "--group", "2")
        assert joined.stdout == "topotrain: group 2 starts (incarnation 1)\n", joined.stderr
        refused = ask("leave", str(elsewhere), "--group", "0")
        assert refused.returncode == 2 and "so it stays to the end" in refused.stderr
        refused = ask("join", *store, "--group", "1")
        assert refused.returncode == 2 and "group 1 trains" in refused.stderr
        refused = ask("join", url, "--job", "legder", "--group", "1")
        assert refused.returncode == 2 and "known jobs: ledger" in refused.stderr
        # what a lost unit had cannot come back without it
        job.units.pop(1).kill()
        wait(lambda: "unit 1, which had its workers, is gone" in ask("join", *store, "--group", "1").stderr)
    finally:
        for unit in job.units.values():
            unit.process.send_signal(signal.SIGTERM)
        said = job.end()
    assert [code for code, _, _ in said.values()] == [143] * 3, said


@pytest.mark.parametrize(("cluster", "units"), soaked([(SANDBLASTER_OF_THREE, 5)], [(ALLREDUCE, 3)]))
def test_workers_leave_a_group_of_units_and_come_as_far_as_there_are_units(
    cluster: str, units: int, runner: JobRunner
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}?job=ledger"
    args = [str(runner.folder / "units"), "-2,1,2"]
    job = Job(runner, cluster, "resized.py", args, [None] * units, url)
    job.conf.write_text(f"{ELASTIC}\n{job.conf.read_text()}")
    job.run()
    assert right(job, 3)
    report = json.loads((job.folder / "report-0.json").read_text())
    changes = [(change["what"], change["workers"]) for change in report["changes"]]
    assert changes == [("2 workers leave", 1), ("1 worker joins", 2)]
    assert report["samples"] == 120 * 3 and report["incidents"] == []
    refused = (job.workspace / "refused").read_text()
    assert "they need" in refused and f"and {units} were started: start all again with more of them" in refused
    log = (job.workspace / "logs" / "worker-0-1.log").read_text()
    assert "the job goes on with nworkers_per_group: 2" in log
    assert "after that change" in job.said[0]


def test_workers_of_one_unit_come_and_go_in_it(runner: JobRunner) -> None:
    url = f"tcp://127.0.0.1:{free_port()}?job=ledger"
    cluster = "nworkers_per_group: 2 nworkers_per_procs: 2 server_worker_separate: true"
    job = Job(runner, cluster, "resized.py", [str(runner.folder / "units"), "1,-1"], [None] * 2, url)
    job.conf.write_text(f"{ELASTIC}\n{job.conf.read_text()}")
    job.run()
    assert right(job, 3)
    report = json.loads((job.folder / "report-0.json").read_text())
    changes = [(change["what"], change["workers"]) for change in report["changes"]]
    assert changes == [("1 worker joins", 3), ("1 worker leaves", 2)]
    assert report["samples"] == 120 * 3 and report["incidents"] == []


def test_a_job_that_was_asked_to_end_goes_on_when_its_units_are_started_again(begun: Callable[..., Job]) -> None:
    job = begun(SANDBLASTER, 3)
    job.units[1].process.send_signal(signal.SIGTERM)
    codes, said = zip(*((code, err) for code, _, err in (job.units[rank].end() for rank in range(3))), strict=True)
    assert codes == (143, 143, 143)
    assert "with `resume: true` the same job goes on from there" in said[0]
    job.conf.write_text(f"resume: true\n{job.conf.read_text()}")
    for rank in range(3):
        job.start(rank, command=HASTILY)
    job.end_well()
    assert right(job, 3)
    assert "workers: 2 finished" in job.said[0], "unit 0 shows the workers of all units"
    report = json.loads((job.folder / "report-0.json").read_text())
    assert report["samples"] == 3 * 240, "what was trained before counts, and is not trained again"
