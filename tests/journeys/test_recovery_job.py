"""Jobs that go on when processes die: real ones, killed once, in whose result every sample counts exactly as often as
the script asked for."""

import pytest
from job_runner import DOWNPOUR, SANDBLASTER, Ended, JobRunner
from soak_cases import soak_only, soaked

pytestmark = pytest.mark.journey

EPOCHS = 3
GOES_ON = "on_failure: kContinue reduce: kSum"
AS_A_WHOLE = "pull: kLazy"  # the outcome of a step is known only in the next one, so no step is repeated
PAIR = "nworker_groups: 2 server_worker_separate: true"


def survive(runner: JobRunner, cluster: str, victim: str, killer: int, *wishes: str, extra: str = "") -> Ended:
    """A job in which one process is killed at the killer's fifth step; all cells of its ledger are right."""
    words = (str(runner.folder / "job"), victim, str(killer), "5", *wishes)
    ended = runner.run(cluster, "mortal.py", *words, extra=f"{GOES_ON} {extra}")
    ended.check_ledger(EPOCHS)
    incident = ended.report["incidents"][0]
    assert incident["who"] == victim
    assert ("was frozen for 2 s and was ended" if "freeze" in wishes else "was killed by SIGKILL") in incident["what"]
    assert incident["what"] in ended.err
    assert 0 < incident["waited_s"] < 20
    assert ended.report["samples"] == EPOCHS * 96
    return ended


def action(ended: Ended) -> str:
    (incident,) = ended.report["incidents"]
    return incident["action"]


def test_a_frozen_worker_does_not_stop_the_job(runner: JobRunner) -> None:
    ended = survive(runner, DOWNPOUR, "worker 1/1", 2, "back", "freeze", extra=AS_A_WHOLE)
    assert action(ended) == "group 1 starts again (incarnation 1)"
    assert ended.report["incidents"][0]["waited_s"] > 2


def starts(runner: JobRunner) -> list[int]:
    """How often the script of each worker was started."""
    return [len(path.read_text()) for path in sorted((runner.folder / "job").glob("starts-*"))]


@pytest.mark.parametrize("extra", soaked(["grads: kHidden"], ["", "per_worker_batch: true"]))
def test_the_survivors_of_a_synchronous_group_are_not_started_again(runner: JobRunner, extra: str) -> None:
    ended = survive(runner, SANDBLASTER, "worker 0/1", 0, extra=extra)
    assert action(ended) == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert starts(runner) == [1, 2, 1]
    assert 0 < ended.report["incidents"][0]["others_waited_s"] < 20


@soak_only
def test_the_first_worker_dies_and_the_others_keep_their_step(runner: JobRunner) -> None:
    """Worker (0,0) draws the epochs for all."""
    ended = survive(runner, SANDBLASTER, "worker 0/0", 1)
    assert action(ended) == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert starts(runner) == [2, 1, 1]


@soak_only
def test_the_survivors_of_groups_of_two_are_not_started_again(runner: JobRunner) -> None:
    ended = survive(runner, DOWNPOUR, "worker 1/1", 2)
    assert action(ended) == "it starts again, and its group continues meanwhile (incarnation 1)"
    assert starts(runner) == [1, 1, 1, 2]


@soak_only
def test_a_script_that_makes_two_backwards_in_a_step_restarts_with_its_group(runner: JobRunner) -> None:
    ended = survive(runner, SANDBLASTER, "worker 0/1", 0, "twice")
    assert action(ended) == "group 0 starts again (incarnation 1)"
    assert starts(runner) == [2, 2, 2]


def test_a_result_that_could_not_be_saved_is_made_once_more(runner: JobRunner) -> None:
    ended = survive(runner, PAIR, "worker 0/0", 0, "late")
    assert "the whole job starts again" in ended.report["incidents"][-1]["action"]
    assert ended.report["metrics"] == {"trained": 1.0}
