"""A side of a benchmark that is a real job: it takes orders, and it says why it ended."""

import pytest

from benchmarks.sides import Refused, Sides, cluster


@pytest.mark.journey
def test_a_job_takes_orders_and_what_it_reports_can_be_switched_off_and_timed() -> None:
    with Sides() as sides:
        side = sides.job("job", cluster(workers=1), 1, "small")
        assert side.run(2) > 0
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
