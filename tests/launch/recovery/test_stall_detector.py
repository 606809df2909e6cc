"""What is told to be waited for when a job makes no step."""

from itertools import pairwise

import pytest

from topotrain.core.events import Event, Exited, Finished, StepDone, Waits
from topotrain.launch.recovery.stall_detector import GATHER_S, QUIET_S, StallDetector
from topotrain.launch.runtime import process_host

A, B, C = WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0")
NOW = 100.0
ELSEWHERE = "worker 0/0 has waited 10 s so far: for the servers, or for workers elsewhere"
NOT_B = "not worker 0/1: is its program"


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("workers", "events", "missing", "said"),
    [
        (WORKERS, [(Waits(A, 10.0), 0.0), (Waits(C, 10.4), GATHER_S / 2)], (), NOT_B),
        ((A,), [(Waits(A, 10.0), 0.0)], (), ELSEWHERE),
        # A process that makes steps is not waited for, and a step ends the wait.
        ((A, B), [(step(B), -QUIET_S / 2), (Waits(A, 10.0), 0.0)], (), ""),
        ((A, B), [(step(B), -QUIET_S - GATHER_S), (Waits(A, 20.0), 0.0)], (), NOT_B),
        ((A, B), [(Waits(A, 10.0), 0.0), (step(A), 0.0)], (), ""),
        # Nor is one that has ended or is away.
        (
            WORKERS,
            [(Finished(B, 1, 8, 0.0, 0, 0, 0), 0.0), (Exited(B, 7, 0), 0.0), (Waits(A, 10.0), 0.0)],
            (C,),
            ELSEWHERE,
        ),
    ],
)
def test_what_does_not_wait_is_waited_for(
    workers: tuple[str, ...], events: list[tuple[Event, float]], missing: tuple[str, ...], said: str
) -> None:
    still = StallDetector(workers)
    for event, later in events:
        still.on_event(event, NOW + later)
    assert still.poll(NOW + GATHER_S / 2, missing) is None
    notice = still.poll(NOW + GATHER_S, missing)
    assert (notice is not None and said in notice.text) if said else notice is None
    assert still.poll(NOW + GATHER_S, missing) is None, "once, up to the next word"


def test_a_wait_tells_how_long_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "LONG_S", 0.0)
    told: list[float] = []

    class Observer(process_host.HostObserver):
        def on_long_wait(self, seconds: float) -> None:
            told.append(seconds)

    process_host.ConditionWaiter(0.001, Observer()).wait(lambda: len(told) >= 3)
    assert all(later >= 2 * earlier for earlier, later in pairwise(told))
