"""Worker groups that leave a job and come to it: what the others do meanwhile.

Moves that a seed draws are in tests/tools/simulator/test_seeded_runs.py.
"""

import pytest
from fault_schedule import VIEWS, Fault, FaultKind, FaultSchedule
from fault_trial import Trial, TrialScript
from simulation import job

from topotrain.extensions.elastic.membership_messages import GroupLeaveRequest

pytestmark = pytest.mark.simulated


def move(verb: str, group: int, at: float, patience: float = 0.5) -> Fault:
    """A group leaves at a moment, is dead from then on ("lose"), or comes; where the servers say that it may."""
    return Fault(group, at=at, away=patience, what=FaultKind(verb))


def calm(moves, absent=(), groups=3, workers=2, batches=30):
    schedule = FaultSchedule("", batches, 1, "lease", True, moves)
    return Trial(job(groups, workers, 2), 1, schedule, VIEWS, absent).run()


def test_who_leaves_ends_behind_a_step_and_the_others_read_the_rest_without_a_pause():
    found = calm((move("leave", 1, 0.05),))
    assert not found.wrong() and found.moves
    left = max(found.commits[1])
    assert left < 0.3
    for group in (0, 2):
        later = [moment for moment in found.commits[group] if moment > left]
        assert later and max(b - a for a, b in zip([left, *later], later, strict=False)) < 0.3


def test_a_group_that_was_never_there_is_not_missed_and_reads_once_it_comes():
    found = calm((), absent=(1, 2))
    assert not found.wrong() and set(found.commits) == {0}
    found = calm((move("join", 2, 0.1),), absent=(1, 2))
    assert not found.wrong() and set(found.commits) == {0, 2}


def test_who_has_left_may_come_again_and_leave_again():
    found = calm((move("leave", 2, 0.05), move("join", 2, 0.25), move("leave", 2, 0.5)), batches=120)
    assert [each.what.value for each in found.moves] == ["leave", "join", "leave"] and not found.wrong()
    assert any(moment > 0.25 for moment in found.commits[2])


def test_who_waits_for_batches_that_others_may_leave_goes_at_once():
    """Group 0 is slow with its last batch; group 1 has read all there is, and is told to go while it waits."""

    class SlowScript(TrialScript):
        def __init__(self, trial, worker, process):
            super().__init__(trial, worker, process)
            if not worker.me.group:
                sleep = worker.sleep
                worker.sleep = lambda low, high: sleep(1.0, 1.0)

    class Slow(Trial):
        script_class = SlowScript

    schedule = FaultSchedule("", 3, 1, "lease", True, (move("leave", 1, 0.5, 9.0),))
    found = Slow(job(2, 1, 1), 1, schedule, VIEWS).run()
    assert found.moves and not found.wrong()
    assert found.absent == {1}
    assert found.left_at < 0.7


def test_an_order_to_leave_is_not_for_workers_that_came_after_the_dead():
    """The servers have seen the death, and the launcher had not when it asked."""
    schedule = FaultSchedule("", 30, 1, "lease", True, (Fault(1, at=0.03, away=0.1),))
    found = Trial(job(2, 1, 1), 1, schedule, VIEWS)
    found.sim.at(0.08, lambda: found._send(GroupLeaveRequest(1, 0)))
    assert not found.run().wrong()
    assert max(found.commits[1]) > 0.13
