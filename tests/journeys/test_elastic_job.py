"""Groups that leave real jobs and come to them: in the result every sample counts as often as the script asked for."""

import pytest
from job_runner import JobRunner
from soak_cases import soak_only

pytestmark = pytest.mark.journey

SUM = "on_failure: kContinue reduce: kSum"
APART = "server_worker_separate: true nservers_per_group: 2"


@soak_only  # of units: test_units.py
def test_a_group_leaves_and_comes_again_and_another_one_comes_for_the_first_time(runner: JobRunner) -> None:
    cluster, extra = f"nworker_groups: 3 {APART}", f"{SUM} start_groups: 2"
    ended = runner.run(cluster, "coming.py", str(runner.folder / "job"), extra=extra)
    ended.check_ledger(2)
    changes = [(change["group"], change["what"]) for change in ended.report["groups"]]
    joins = [(1, "joins (incarnation 1)"), (2, "joins (incarnation 1)")]
    assert changes == [(2, "is not there yet"), (1, "has left"), *joins]
    assert ended.report["incidents"] == []
    assert "topotrain: group 1 has left; the others continue" in ended.err
    assert ended.report["samples"] == 960 * 2


def test_a_group_that_may_not_start_again_does_not_end_the_job(runner: JobRunner) -> None:
    words = (str(runner.folder / "job"), "worker 1/0", "1", "5")
    ended = runner.run(f"nworker_groups: 2 {APART}", "mortal.py", *words, extra=f"{SUM} restarts: 0")
    ended.check_ledger(3)
    assert ended.report["samples"] == 96 * 3, "with what the group had done that was given up"
    (incident,) = ended.report["incidents"]
    assert incident["who"] == "worker 1/0"
    assert incident["action"].startswith("the job goes on without group 1")
    assert [change["what"] for change in ended.report["groups"]] == ["is given up"]


def test_a_group_with_gradients_that_are_not_finite_is_put_into_quarantine_and_the_others_train_on(
    runner: JobRunner,
) -> None:
    words = ("--epochs", "2", "--sick", "2", "--step-s", "0.01")
    ended = runner.run(f"nworker_groups: 2 nworkers_per_group: 2 {APART}", "ledger.py", *words, extra=SUM)
    cells = ended.final["cells"]
    assert set(cells.tolist()) == {1.0, 2.0}
    assert (cells == 1).sum() == 3 * 4, "the batches of three steps are used up"
    assert ended.report["samples"] == cells.sum()
    assert ended.report["cause"] is None
    (incident,) = ended.report["incidents"]
    assert "the gradient of cells that worker 1/0 pushed is not finite in 3 steps in a row" in incident["what"]
    assert [(change["group"], change["what"]) for change in ended.report["groups"]] == [(1, "is in quarantine")]
