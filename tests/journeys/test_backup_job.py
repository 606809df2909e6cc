"""Backup workers in real jobs: one worker is slowed, or killed; in the result every sample counts exactly as often as
the script asked for."""

import pytest
from job_runner import JobRunner
from soak_cases import soaked

pytestmark = pytest.mark.journey

CLUSTER = "nworkers_per_group: 3 nservers_per_group: 2 nservers_per_procs: 2 server_worker_separate: true backup: 1"
APART = "reduce: kSum grads: kHidden per_worker_batch: true"


def test_a_slow_worker_is_not_waited_for_and_all_of_its_samples_count(runner: JobRunner) -> None:
    words = ("--samples", "202", "--epochs", "2", "--step-s", "0.02", "--slow", "2", "--factor", "5")
    ended = runner.run(CLUSTER, "ledger.py", *words, extra=APART)
    ended.check_ledger(2)
    report = ended.report
    assert report["late"]["worker 0/2"] > 5
    assert report["samples"] == 2 * 202, "what came too late is not among them"
    (slow,) = [found for found in report["stragglers"] if found["who"] == "worker 0/2"]
    assert slow["factor"] > 1.5
    assert "worker 0/2 is slow: it takes" in ended.err


@pytest.mark.parametrize(
    ("victim", "killer", "wishes"),
    soaked([("worker 0/0", 1, ("snapshot",))], [("worker 0/2", 1, ()), ("server 0/0", 0, ("snapshot",))]),
)
def test_deaths_beside_backup_workers(runner: JobRunner, victim: str, killer: int, wishes: tuple[str, ...]) -> None:
    words = (str(runner.folder / "job"), victim, str(killer), "5", *wishes)
    extra = f"{APART} on_failure: kContinue snapshot_s: 0.05"
    ended = runner.run(CLUSTER, "mortal.py", *words, extra=extra)
    ended.check_ledger(3)
    whole = victim.startswith("server")
    assert ("the whole job starts again from /" if whole else "its group continues meanwhile") in ended.err
