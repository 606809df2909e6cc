"""A side of a benchmark that is a real job: it takes orders, and it says why it ended."""

import pytest

from benchmarks.link_accuracy import HOSTS, incast, ring, times
from benchmarks.sides import Refused, Sides, cluster
from topotrain.config.job import Link


@pytest.mark.journey
def test_a_job_takes_orders_and_what_it_reports_can_be_switched_off_and_timed() -> None:
    with Sides() as sides:
        side = sides.job("job", cluster(workers=1), 1, "small", "kTcp")
        (before,) = side.ask(link=True)
        assert side.run(2) > 0
        (after,) = side.ask(link=True)
        assert after["link"] > before["link"] > 0
        assert side.run(2, mute=True) > 0
        side.run(1, mute=False)
        (answer,) = side.ask(timed=2)
        assert answer["seconds"] > 0, "a step reports and checks nothing any more: the names have changed"
        assert side.turn(1).wall > 0


@pytest.mark.journey
def test_a_side_that_has_ended_says_so_and_not_that_a_pipe_is_broken() -> None:
    with Sides() as sides:
        side = sides.peer("alone", "alone", 1, "small")
        side.let_go()
        for process in side.processes:
            process.wait()
        with pytest.raises(Refused, match="alone"):
            side.ask(steps=1)


@pytest.mark.journey
def test_hosts_of_an_emulated_link_end_their_rounds() -> None:
    """Every host has a place, also the one that only receives."""
    fast = Link(bandwidth=10_000.0)
    assert all(seconds > 0 for seconds in times(incast, HOSTS + 1, fast, rounds=1))
    assert all(seconds > 0 for seconds in times(ring, HOSTS, fast, rounds=1))
