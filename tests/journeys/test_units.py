"""Units started one by one lose processes, or a whole unit: the job goes on, and each sample counts once."""

import signal

import pytest
from job_runner import JobRunner
from seeds import soak_only
from unit_hosts import Units

pytestmark = pytest.mark.journey

APART = "server_worker_separate: true"
HOST_SUMS = f"nworkers_per_group: 4 nworkers_per_procs: 2 {APART} link {{ }}"
PAIRS = f"nworkers_per_group: 2 nworkers_per_procs: 2 nservers_per_group: 2 {APART} transport: kTcp"
ELASTIC = "reduce: kSum on_failure: kContinue"


def test_a_worker_then_a_server_and_then_a_unit_are_lost(units: Units) -> None:
    """The workers of a host send one sum; it is the worker that adds up which is killed."""
    job = units.paced(HOST_SUMS, 6, hosts=3, store="file")
    job.begin()
    job.kill("worker 0/0")
    job.trains()
    job.kill("server 0/0")
    job.trains()
    job.units[1].kill()
    job.start_hastily(1)
    job.end_well()
    job.check_ledger(6)
    assert job.report["bytes_out"] > job.report["bytes_link"], "of the workers of a host to each other"
    again = "the whole job starts again"
    first, second, third = job.report["incidents"]
    assert first["action"] == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert second["action"] == again
    assert (third["who"], third["action"]) == ("unit 1", again)
    assert "manifests/" in job.said[0]


def test_groups_leave_and_come_in_units_and_one_comes_for_the_first_time(runner: JobRunner, units: Units) -> None:
    workspace = str(runner.folder / "units")
    job = units.job(f"nworker_groups: 3 {APART}", "coming.py", workspace, hosts=4, extra=f"{ELASTIC} start_groups: 2")
    job.run()
    job.check_ledger(2)
    changes = [(change["group"], change["what"]) for change in job.report["groups"]]
    joins = [(1, "joins (incarnation 1)"), (2, "joins (incarnation 1)")]
    assert changes == [(2, "is not there yet"), (1, "has left"), *joins]
    assert job.report["samples"] == 960 * 2 and job.report["incidents"] == []
    assert "group 1 has left; the others continue" in job.said[0]
    assert not list(job.workspace.glob("control-*"))


def test_a_server_and_a_unit_with_copies_of_servers_die_and_the_result_does_not_show_it(
    runner: JobRunner, units: Units
) -> None:
    calm = runner.run(PAIRS, "twice.py", str(runner.folder / "calm"), name="calm").final
    kills = (str(runner.folder / "units"), "6:0", "16:unit-2", "26:0")
    extra = "on_failure: kContinue restarts: 2 snapshot_s: 0.2"
    job = units.job(f"{PAIRS} replicas: 2", "twice.py", *kills, hosts=3, extra=extra)
    job.start_hastily(0, 1, 2)
    ends = job.end()
    assert [code for code, _, _ in ends.values()] == [0, 0, -9], "\n".join(err for _, _, err in ends.values())
    job.check_bits(calm)
    found = job.report["incidents"]
    assert [incident["who"] for incident in found] == ["server 0/0", "unit 2", "server 0/0"]
    assert "fresh processes in unit 0" in found[1]["action"]


@soak_only  # units that are asked to end: launch/multinode/test_node.py; `resume`: test_resume.py
def test_a_job_that_was_asked_to_end_goes_on_when_its_units_are_started_again(units: Units) -> None:
    job = units.paced(f"nworkers_per_group: 2 {APART}", 3, hosts=3)
    job.begin()
    job.units[1].process.send_signal(signal.SIGTERM)
    ended = job.end()
    assert [code for code, _, _ in ended.values()] == [143, 143, 143]
    assert "with `resume: true` the same job goes on from there" in ended[0][2]
    job.conf.write_text(f"resume: true\n{job.conf.read_text()}")
    job.start_hastily(0, 1, 2)
    job.end_well()
    job.check_ledger(3)
    assert "workers: 2 finished" in job.said[0], "unit 0 shows the workers of all units"
    assert job.report["samples"] == 3 * 240, "what was trained before counts, and is not trained again"
