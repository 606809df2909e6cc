"""How long a round with its quorum stays open: only for time that no worker of it needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_same_bits import OUTER

from topotrain.config.job import Cluster
from topotrain.extensions.outer_optimizer.grace.grace_window import GraceWindow, has_windows


def measured(slack: float, steps: int, intervals: dict[int, float], exchange: float = 0.0) -> GraceWindow:
    """Groups that have pushed at 0 and at their interval, with exchanges of this time."""
    grace = GraceWindow(slack, steps)
    for group, interval in intervals.items():
        grace.pushed(group, 0, 0.0)
        grace.answered(group, 0, 0.5)
        grace.exchanged(group, 0, 0.5 + exchange)
        grace.pushed(group, 1, interval)
    return grace


def test_the_window_is_a_share_of_the_free_time() -> None:
    """A group pushes every 10 s, its exchange takes 2 s, and the quorum came 1 s after its push."""
    grace = measured(0.5, 1, {0: 10.0}, exchange=2.0)
    assert grace.seconds([0], 11.0) == pytest.approx(0.5 * (10 - 1 - 2))
    assert grace.seconds([0], 18.1) == 0.0, "the values are late already"


def test_the_first_group_that_pushes_again_decides() -> None:
    grace = measured(1.0, 1, {0: 10.0, 1: 6.0, 2: 8.0})
    assert grace.seconds([0, 2], 10.0) == pytest.approx(6.0)  # group 2 pushed at 8, and will at 16
    assert grace.seconds([0, 1, 2], 10.0) == pytest.approx(2.0)  # group 1 pushed at 6, and will at 12


def test_a_window_is_at_most_a_step() -> None:
    assert measured(0.9, 24, {0: 24.0}).seconds([0], 24.0) == pytest.approx(1.0)
    assert measured(0.9, 1, {0: 24.0}).seconds([0], 24.0) == pytest.approx(0.9 * 24)


def test_no_window_before_all_groups_were_measured() -> None:
    grace = measured(0.9, 1, {0: 10.0})
    grace.pushed(1, 0, 10.0)
    assert grace.seconds([0], 10.0) > 0
    assert grace.seconds([0, 1], 10.0) == 0.0
    grace.forget(0)
    assert grace.seconds([0], 10.0) == 0.0, "a new process has another pace"


def test_a_repeated_push_is_no_interval() -> None:
    grace = measured(1.0, 1, {0: 10.0})
    grace.pushed(0, 1, 17.0)
    assert grace.seconds([0], 10.0) == pytest.approx(10.0)


def test_a_pause_of_a_worker_makes_no_long_window() -> None:
    grace = measured(1.0, 1, {0: 1.0})
    grace.pushed(0, 2, 1000.0)
    assert grace.seconds([0], 1000.0) <= 1.25
    for number in range(3, 30):
        grace.pushed(0, number, 1000.0 + 5.0 * (number - 2))
    assert grace.seconds([0], 1135.0) == pytest.approx(5.0, rel=0.01), "it stays slower, which is learned"


def test_the_wait_for_a_round_is_no_part_of_the_exchange() -> None:
    grace = GraceWindow(1.0, 1)
    grace.pushed(0, 0, 0.0)
    grace.answered(0, 0, 4.0)
    grace.exchanged(0, 7, 100.0)  # of a push that is not known here
    grace.exchanged(0, 0, 5.0)
    grace.pushed(0, 1, 10.0)
    assert grace.seconds([0], 10.0) == pytest.approx(10.0 - 1.0)


@given(
    slack=st.floats(0, 1),
    compute=st.floats(0.1, 10),
    exchange=st.floats(0, 20),
    reached=st.lists(st.floats(0, 5), min_size=1, max_size=30),
)
def test_a_window_never_delays_a_push(slack: float, compute: float, exchange: float, reached: list[float]) -> None:
    """A worker that computes for `compute` between two pushes, and a quorum that is there `reached` after its own."""
    grace, at = GraceWindow(slack, 1), 0.0
    for number, wait in enumerate(reached):
        grace.pushed(0, number, at)
        quorum = at + wait
        over = quorum + grace.seconds([0], quorum)
        grace.answered(0, number, over)
        grace.exchanged(0, number, over - at + exchange)
        without = max(compute, wait + exchange)
        following = max(at + compute, over + exchange)
        # What was late without a window is a measured interval, which a later window may use.
        assert following - at <= max(without, *(max(compute, w + exchange) for w in reached)) + 1e-6
        at = following


def test_which_jobs_have_windows() -> None:
    def windows(**cluster: object) -> bool:
        return has_windows(Cluster(nworker_groups=3, server_worker_separate=True, **cluster))  # type: ignore[arg-type]

    outer = OUTER["mean"][0]
    assert windows(outer=outer, quorum=1) and windows(outer=outer, quorum=2, slack=0.1)
    assert not windows(outer=outer, quorum=2, slack=0.0)
    assert not windows(outer=outer, quorum=3), "such a round has all workers"
    assert not windows(outer=outer) and not windows()
