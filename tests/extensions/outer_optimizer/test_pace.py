"""The pace of pushes: after so many own steps, or as often as the fastest worker."""

from itertools import pairwise

import pytest
from fault_schedule import Fault
from hypothesis import given
from hypothesis import strategies as st
from simulated_islands import STEP_S, IslandTrial, islands

from topotrain.config.job import Cluster, Pace
from topotrain.extensions.outer_optimizer.rounds import RoundSchedule, StepTimes

pytestmark = pytest.mark.simulated

SPEEDS = (1.0, 1.0, 0.7, 0.4)


def test_which_pace_is_the_default() -> None:
    outer = islands(2, 4).cluster.outer
    assert not Cluster(outer=outer).paces_by_time
    assert Cluster(outer=outer, quorum=1).paces_by_time
    assert not Cluster(outer=outer, quorum=1, pace=Pace.kSteps).paces_by_time


def test_the_steps_of_slow_workers() -> None:
    ten, two = RoundSchedule(20, 2), RoundSchedule(2)
    assert [ten.interval_at(1 / speed, 1.0) for speed in SPEEDS] == [10, 10, 7, 4]
    assert [two.interval_at(1 / speed, 1.0) for speed in (1.0, 0.99, 0.7, 0.1)] == [2, 2, 1, 1]
    assert ten.interval_at(0.0, 1.0) == ten.interval_at(1.0, 0.0) == 10, "not known yet"


@given(interval=st.integers(1, 500), own=st.floats(1e-6, 1e3), fastest=st.floats(1e-6, 1e3))
def test_no_worker_makes_more_steps_than_the_job_says_or_none(interval: int, own: float, fastest: float) -> None:
    assert 1 <= RoundSchedule(interval).interval_at(own, fastest) <= interval


def test_a_pause_of_the_script_is_no_time_of_a_step() -> None:
    times, now = StepTimes(), 0
    assert times.seconds == 0.0
    for length in (10, 10, 10, 9000, 10, 11, 10):
        times.step(now)
        now += length * 1_000_000
    assert times.seconds == 0.01
    for _ in range(20):
        times.step(now)
        now += 30_000_000
    assert times.seconds == pytest.approx(0.03), "the worker has become slower"


def pushes(trial: IslandTrial, group: int) -> list[tuple[int, float, float]]:
    """The steps, the time since the one before, and the weight of some pushes of a worker in the middle of a job."""
    found = [each for each in trial.told if each.group == group]
    gaps = [later.time - earlier.time for earlier, later in pairwise(found)]
    told = [(each.samples, gap, each.weight) for each, gap in zip(found[1:], gaps, strict=True)]
    return told[3:9]


@pytest.mark.parametrize(("quorum", "fragments"), [(1, 1), (2, 1), (1, 2)])
def test_slow_workers_push_as_often_with_fewer_steps(quorum: int, fragments: int) -> None:
    trial = IslandTrial(islands(4, 10 * fragments, fragments, quorum=quorum), 900, speeds=SPEEDS, lease=True).run()
    for group, steps in enumerate((10, 10, 7, 4)):
        found = pushes(trial, group)
        assert len(found) == 6
        assert {made for made, _, _ in found} == {steps}, (group, found)
        # The values come some milliseconds after the push, so no step is added. Its length may be cut by one.
        assert all(abs(gap - 10 * STEP_S) < 0.6 * STEP_S for _, gap, _ in found), (group, found)
        # Samples times samples per step: one sample is one step here. A fragment has the steps of all its turn.
        assert {weight for _, _, weight in found} == {float(steps * fragments)}, (group, found)
    assert bool((trial.cells() == 1).all())


def test_by_steps_slow_workers_push_less_often() -> None:
    trial = IslandTrial(islands(4, 10, quorum=1, pace=Pace.kSteps), 900, speeds=SPEEDS, lease=True).run()
    for group, speed in enumerate(SPEEDS):
        found = pushes(trial, group)
        assert {made for made, _, _ in found} == {10}
        assert all(abs(gap - 10 * STEP_S / speed) < 0.6 * STEP_S / speed for _, gap, _ in found), (group, found)
    assert bool((trial.cells() == 1).all())


def test_the_fastest_worker_is_the_fastest_that_is_there() -> None:
    """When it dies, the others make more steps again."""
    job = islands(3, 10, quorum=1)
    trial = IslandTrial(job, 600, [Fault(1, at=0.5, away=60.0)], speeds=(0.5, 1.0, 0.5), lease=True).run()
    steps = [each.samples for each in trial.told if each.group == 0]
    assert 5 in steps[2:10]
    assert steps[-3] == 10, steps
