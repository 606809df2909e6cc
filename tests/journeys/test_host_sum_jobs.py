"""Jobs in which the workers of a host send one sum: deaths of those that add up.

The bits of two hosts: test_unit_hosts.py; units: test_units.py.
"""

import pytest
from job_runner import Ended, JobRunner
from soak_cases import soaked

pytestmark = pytest.mark.journey

PAIRS = "nworkers_per_group: 4 nworkers_per_procs: 2"
APART = f"{PAIRS} server_worker_separate: true link {{ }}"
EPOCHS = 3


def inside_hosts(report: dict[str, int]) -> int:
    """Bytes between the workers of a host: all others take the link."""
    return report["bytes_out"] - report["bytes_link"]


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
