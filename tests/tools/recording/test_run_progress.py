"""Elapsed time, epoch, share and the time that is left, by a clock that the test moves; on terminals and in pipes."""

import pytest

from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core.events import Finished, Started, StepDone
from topotrain.tools.recording.run_progress import LEAST_S, JobProgress, RemainingTime, duration

TOPOLOGY = layout(Cluster(nworkers_per_group=2, server_worker_separate=True))
WORKERS = ("worker 0/0", "worker 0/1")


def step(who: str, number: int, epoch: int = -1, share: float = -1.0) -> StepDone:
    return StepDone(who, number / 10, number, 8 * number, 0.5, 0.0, 0, 0, 0, epoch=epoch, progress=share)


# ---- the estimate ----------------------------------------------------------------------------------------------------


def test_an_even_job_has_the_right_end_from_the_first_estimate_on_and_needs_little_memory() -> None:
    remaining = RemainingTime()
    for second in range(20_000):
        remaining.update(10.0 + second, second / 40_000)
        remaining.update(10.25 + second, second / 40_000)  # another worker, with the same lease
        if second < LEAST_S:
            assert remaining.end is None
        else:
            assert remaining.end == pytest.approx(40_010.0, rel=1e-6 if second < 100 else 0.02)
    assert len(remaining._samples) <= 256


def test_a_slow_beginning_is_forgotten_and_one_slow_step_changes_little() -> None:
    remaining = RemainingTime()
    now, share = 0.0, 0.0
    remaining.update(now, share)
    for _ in range(10):  # compiling, cold caches: 1 % in 10 s
        now, share = now + 1.0, share + 0.001
        remaining.update(now, share)
    while share < 0.5:
        now, share = now + 1.0, share + 0.01
        remaining.update(now, share)
    true_end = now + (1 - share) / 0.01
    assert remaining.end == pytest.approx(true_end, rel=0.01)
    remaining.update(now + 4.0, share + 0.01)
    assert remaining.end is not None and abs(remaining.end - (true_end + 3.0)) < 0.15 * (true_end - now)


def test_a_job_that_goes_on_from_a_snapshot_begins_anew() -> None:
    remaining = RemainingTime()
    for second in range(20):
        remaining.update(float(second), second / 40)
    remaining.update(60.0, 0.25)
    assert remaining.end is None
    remaining.update(70.0, 0.5)
    assert remaining.end == pytest.approx(90.0)


def test_times_have_the_form_of_a_clock() -> None:
    times = {0.9: "0:00", 59.9: "0:59", 61: "1:01", 3600: "1:00:00", 97_259: "27:00:59"}
    assert {seconds: duration(seconds) for seconds in times} == times


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_unknown_figures_are_a_dash_and_nothing_is_guessed() -> None:
    run = JobProgress(100.0)
    assert run.header(107.0) == "elapsed 0:07  epoch -  done -  ETA -"
    for second in range(30):
        run.on_event(step(WORKERS[0], second), 100.0 + second)
    assert run.words(130.0) == "epoch -  done -  ETA -"
    run.on_event(step(WORKERS[0], 31, epoch=2), 131.0)
    assert run.words(131.0) == "epoch 3  done -  ETA -"
    # A share that is none must not become one.
    run.on_event(step(WORKERS[0], 32, epoch=2, share=float("nan")), 132.0)
    assert run.words(132.0) == "epoch 3  done -  ETA -"


def test_the_worker_that_is_furthest_has_the_share_of_the_job() -> None:
    run = JobProgress(0.0)
    for second in range(11):
        run.on_event(step(WORKERS[0], second, 1, second / 20), float(second))
        run.on_event(step(WORKERS[1], second, 0, second / 40), float(second))
    assert run.words(10.0) == "epoch 2  done 50 %  ETA 0:10"
    assert run.words(13.0) == "epoch 2  done 50 %  ETA 0:07"
    assert run.words(20.0) == run.words(500.0) == "epoch 2  done 50 %  ETA 0:00", "it stands still"


def test_a_restart_from_a_snapshot_and_the_end() -> None:
    run = JobProgress(0.0)
    for second in range(11):
        for who in WORKERS:
            run.on_event(step(who, second, 1, second / 20), float(second))
    for who in WORKERS:
        run.on_event(Started(who, 7), 12.0)
    run.on_event(step(WORKERS[0], 5, 0, 0.2), 14.0)
    assert run.words(14.0) == "epoch 1  done 20 %  ETA -"
    for who in WORKERS:
        run.on_event(Finished(who, 20, 160, 0.0, 0, 0, 0, epoch=3, progress=1.0), 40.0)
    assert run.words(45.0) == "epoch 1  done 100 %  ETA 0:00"
