"""Scripts whose workers wait for each other outside of topotrain: the servers in their processes serve meanwhile."""

import pytest
from job_runner import JobRunner

pytestmark = pytest.mark.journey

PAIR = "nworkers_per_group: 2 nservers_per_group: 2"
LAZY = "grads: kHidden apply: kOnArrival pull: kLazy"


def test_a_worker_serves_the_others_while_its_script_waits_for_them(runner: JobRunner) -> None:
    totals = [
        runner.run(PAIR, "own_barrier.py", where, str(runner.folder), extra=extra, name=where).report["metrics"]
        for where, extra in (("prepare", ""), ("forward", LAZY), ("backward", LAZY))
    ]
    # With lazy pulls the values of the last step are there when the loop is over.
    assert totals == [totals[0]] * 3
