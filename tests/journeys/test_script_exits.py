"""Scripts that end their own processes: in the middle of a loop that is a death, after it the result comes home."""

import pytest
from job_runner import ALLREDUCE, SANDBLASTER, JobRunner

pytestmark = pytest.mark.journey

EPOCHS = 3
SUM = "reduce: kSum"


def test_after_the_loop_the_result_comes_home(runner: JobRunner) -> None:
    ended = runner.run(SANDBLASTER, "leaves.py", "exit", "end", extra=SUM)
    ended.check_ledger(EPOCHS)
    assert ended.report["incidents"] == []
    assert ended.report["metrics"] == {"trained": 1.0}


def test_in_the_middle_of_a_loop_it_is_a_death(runner: JobRunner) -> None:
    ended = runner.run(ALLREDUCE, "leaves.py", "exec", "middle", str(runner.folder / "mark"), extra=SUM)
    ended.check_ledger(EPOCHS)
    (incident,) = ended.report["incidents"]
    assert "ended with exit code 0 before its work was done" in incident["what"]
    assert "the whole job" in incident["action"]
