"""Advice for a job that runs: from a history of events to commands, with a predictor that is plain arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
from arithmetic_predictor import ArithmeticPredictor, timed_probe

from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.topology import layout
from topotrain.core.events import Left, Slices, Started, StepDone
from topotrain.tools.advice.job_measurements import JobMeasurement, check_probe_of, from_history
from topotrain.tools.advice.running_advice import Change, RunningAdvice, RunningComparison
from topotrain.tools.advice.wishes import Wishes
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.job_start import JobStart
from topotrain.tools.recording.recorded_lines import TimedEvent

DOWNPOUR = Cluster(nworker_groups=3, server_worker_separate=True)
SAMPLES = 64


def history(cluster: Cluster, step_s: dict[str, float], waits: float = 0.2, seconds: float = 20.0) -> JobHistory:
    """A job whose workers need so long for a step, of which they wait for a share."""
    topology, made = layout(cluster), JobHistory()
    made.add(TimedEvent(0.0, JobStart(Job(cluster=cluster), topology, 1000.0, False).header))
    members = topology.workers_per_group
    events = []
    for who, step in step_s.items():
        events.append((0.0, Started(who, 1)))
        for number in range(1, int(seconds / step) + 1):
            at = number * step
            events.append(
                (
                    at,
                    StepDone(who, at, number, number * SAMPLES // members, 1.0, 0.0, 0, 10, 10, waited_s=at * waits),
                )
            )
    for at, event in sorted(events, key=lambda pair: pair[0]):
        made.add(TimedEvent(at, event))
    return made


def measured(made: JobHistory) -> JobMeasurement:
    return from_history(made.summary(), made.view(), "--running", "work")


def compared(measurement: JobMeasurement, job: Job | None = None, **probe: Any) -> RunningAdvice:
    comparison = RunningComparison(measurement, timed_probe(**probe), Machines(), job or Job(), ArithmeticPredictor())
    return comparison.compare(Wishes())


def names(cluster: Cluster) -> list[str]:
    topology = layout(cluster)
    return [str(worker) for group in range(topology.worker_groups) for worker in topology.workers(group)]


def test_the_figures_are_those_of_the_history() -> None:
    found = measured(history(DOWNPOUR, {"worker 0/0": 0.1, "worker 1/0": 0.1, "worker 2/0": 0.4}))
    assert found.cluster == DOWNPOUR
    assert found.hosts == 1
    first, _, third = found.workers
    assert (first.group, first.index) == (0, 0)
    assert first.steps_per_s == pytest.approx(10.0, rel=0.02)
    assert first.samples == pytest.approx(SAMPLES, rel=0.02)
    assert first.compute_s == pytest.approx(0.08, rel=0.02)
    assert third.compute_s == pytest.approx(0.32, rel=0.1)
    assert found.samples_per_s == pytest.approx(640 + 640 + 160, rel=0.02)


def test_a_job_that_has_just_begun_says_when_to_ask_again() -> None:
    with pytest.raises(ConfigError, match="--running = 'work': worker 0/0 has not trained for 2 s yet"):
        measured(history(DOWNPOUR, dict.fromkeys(names(DOWNPOUR), 0.1), seconds=1.0))
    with pytest.raises(ConfigError, match="worker 0/0 has not trained"):
        measured(history(DOWNPOUR, {}))


@pytest.mark.parametrize(
    ("names", "counts", "right"),
    [(("p0", "p3"), (62_500, 40_000), True), (("p0",), (62_501,), False), (("weight",), (1,), False)],
)
def test_a_probe_of_another_model_than_that_of_the_recording_is_refused(
    names: tuple[str, ...], counts: tuple[int, ...], right: bool
) -> None:
    made = history(DOWNPOUR, dict.fromkeys(["worker 0/0", "worker 1/0", "worker 2/0"], 0.1))
    made.add(TimedEvent(20.0, Slices("server 0/0", names, (0,) * len(names), counts)))
    found = measured(made)
    if right:
        check_probe_of(found, timed_probe(cores=4))
    else:
        with pytest.raises(ConfigError, match=r"--probe: a probe of another model, made with made\.py"):
            check_probe_of(found, timed_probe(cores=4))


def test_the_probe_is_brought_to_what_the_job_says() -> None:
    found = measured(history(DOWNPOUR, dict.fromkeys(names(DOWNPOUR), 0.2), waits=0.0))
    probe = RunningComparison(found, timed_probe(cores=4), Machines(), Job(), ArithmeticPredictor()).calibrated()
    # By the probe 64 ms of computing and 0.1 ms beside it; by the job 200 ms.
    assert probe.batch.per_sample_s == pytest.approx(1e-3 * 200 / 64.1, rel=0.02)
    assert probe.batch.compute_s(SAMPLES) + probe.batch.other_s == pytest.approx(0.2, rel=0.02)


def test_a_slow_group_is_a_straggler_and_may_leave() -> None:
    found = compared(measured(history(DOWNPOUR, {"worker 0/0": 0.1, "worker 1/0": 0.1, "worker 2/0": 0.4})))
    assert found.stragglers == {2: pytest.approx(4.0, rel=0.1)}
    by_command = {each.how: each for each in found.reachable}
    assert set(by_command) == {
        "topotrain jobs leave WORKSPACE --group 1",
        "topotrain jobs leave WORKSPACE --group 2",
    }
    # Without it the job loses the samples of the slow group alone.
    assert by_command["topotrain jobs leave WORKSPACE --group 2"].gain == pytest.approx(-1 / 9, rel=0.1)
    assert by_command["topotrain jobs leave WORKSPACE --group 1"].gain == pytest.approx(-4 / 9, rel=0.1)
    assert "advised: no change" in found.explain() or "start again" in found.explain()


def test_predictions_are_scaled_to_what_is_measured() -> None:
    found = compared(measured(history(DOWNPOUR, dict.fromkeys(names(DOWNPOUR), 0.1), waits=0.5)), cores=4)
    assert found.measured == pytest.approx(3 * 640, rel=0.02)
    # The predictor knows nothing of waiting: it predicts twice as much.
    assert found.predicted == pytest.approx(2 * found.measured, rel=0.05)
    (leave,) = found.reachable
    assert leave.samples_per_s == pytest.approx(found.measured * 2 / 3, rel=0.02)


def test_speeds_are_what_failures_leave() -> None:
    hour = 3600.0
    made = measured(history(DOWNPOUR, dict.fromkeys(names(DOWNPOUR), 0.1), waits=0.0))
    # A host for the server and for each group.
    spread = replace(made, hosts=4)
    comparison = RunningComparison(spread, timed_probe(cores=4), Machines(mtbf_s=hour), Job(), ArithmeticPredictor())
    found = comparison.compare(Wishes())
    # The hosts of the server and of worker 0/0 take the job 15 s back, and all pause for 2.4 s. The others pause alone.
    first = 1 / (1 + 2 * 17.4 / hour)
    other = 1 / (1 + 2 * 17.4 / hour + 2.4 / hour)
    assert found.goodput == pytest.approx((first + 2 * other) / 3, rel=1e-4)
    leave = next(each for each in found.reachable if "leave" in each.how)
    assert leave.samples_per_s == pytest.approx(found.measured * 2 / 3 * (first + other) / 2, rel=1e-3)
    assert leave.gain == pytest.approx((first + other) / (first + 2 * other) - 1, rel=1e-3)
    assert found.measured == made.samples_per_s
    assert f"failures: {found.goodput:.1%} of its steps are left" in found.explain()
    assert found.as_data()["goodput"] == found.goodput


def test_a_group_that_is_away_may_join() -> None:
    made = history(DOWNPOUR, dict.fromkeys(names(DOWNPOUR), 0.1))
    made.add(TimedEvent(20.0, Left(2, "asked", 20.0)))
    found = measured(made)
    assert found.away == {2} and len(found.workers) == 2
    said = compared(found)
    join = next(each for each in said.reachable if "join" in each.how)
    assert join.how == "topotrain jobs join WORKSPACE --group 2"
    assert join.gain == pytest.approx(0.5, rel=0.02)
    assert said.explain().splitlines()[-1] == "advised: topotrain jobs join WORKSPACE --group 2: +50%"


def test_a_synchronous_job_gets_workers_by_number() -> None:
    sync = Cluster(nworkers_per_group=2, nworkers_per_procs=1, server_worker_separate=True)
    found = compared(measured(history(sync, dict.fromkeys(names(sync), 0.1), waits=0.0)))
    by_command = {each.how: each for each in found.reachable}
    assert by_command["topotrain jobs join WORKSPACE --workers 1"].gain == pytest.approx(0.5, rel=0.05)
    assert by_command["topotrain jobs leave WORKSPACE --workers 1"].gain == pytest.approx(-0.5, rel=0.05)
    assert "advised: topotrain jobs join WORKSPACE --workers 1: +5" in found.explain()


def test_a_group_that_cannot_leave_is_told_why() -> None:
    kept = Cluster(nworker_groups=2, nserver_groups=2, server_worker_separate=True)
    found = compared(measured(history(kept, {"worker 0/0": 0.1, "worker 1/0": 0.4})))
    assert not found.reachable
    assert any("leave WORKSPACE --group 1" in each.what and "servers of its own" in each.why for each in found.left_out)


def test_other_blocks_are_compared_with_the_present_one() -> None:
    slow = Cluster(nworkers_per_group=1)
    found = compared(measured(history(slow, {"worker 0/0": 0.1}, waits=0.0)), cores=4)
    assert found.others
    best = found.others[0]
    assert best.gain == pytest.approx(3.0, rel=0.05)
    assert not best.how
    if not any(each.is_clear for each in found.reachable):
        assert "start again from a snapshot with" in found.explain()
    data = found.as_data()
    assert data["others"][0]["label"] == best.label
    assert data["measured_samples_per_s"] == found.measured


@pytest.mark.parametrize(
    ("gain", "error", "clear"),
    [
        (0.1, 0.08, True),
        (0.1, 0.12, False),
        (0.1, 0.0, True),
        (-0.1, 0.0, False),
        (0.4, None, False),
        (0.5, None, True),
    ],
)
def test_a_gain_is_clear_above_the_error(gain: float, error: float | None, clear: bool) -> None:
    assert Change("a layout", "", 100.0, gain, error, (), "because").is_clear is clear
