"""Who is told to be waited for when a job makes no step."""

from itertools import pairwise

import pytest

from topotrain.core.events import Exited, Finished, StepDone, Waits
from topotrain.launch.recovery.stall_detector import GATHER_S, QUIET_S, StallDetector
from topotrain.launch.runtime import process_host

A, B, C = WORKERS = ("worker 0/0", "worker 0/1", "worker 1/0")
NOW = 100.0


def step(who: str) -> StepDone:
    return StepDone(who, 1.0, 1, 8, None, 0.0, 0, 0, 0)


def text(still: StallDetector, now: float = NOW + GATHER_S, missing: tuple[str, ...] = ()) -> str:
    notice = still.poll(now, missing)
    return "" if notice is None else notice.text


def test_who_does_not_wait_is_waited_for() -> None:
    still = StallDetector(WORKERS)
    still.on_event(Waits(A, 10.0), NOW)
    still.on_event(Waits(C, 10.4), NOW + GATHER_S / 2)
    assert text(still, NOW + GATHER_S / 2) == ""
    said = text(still)
    assert said.startswith("worker 0/0, worker 1/0 have waited 10 s so far; not worker 0/1: is its program")
    assert text(still) == ""  # once, up to the next word


def test_where_all_wait_no_process_is_to_blame() -> None:
    still = StallDetector((A,))
    still.on_event(Waits(A, 20.0), NOW)
    assert text(still) == "worker 0/0 has waited 20 s so far: for the servers, or for workers elsewhere"


def test_who_makes_steps_is_not_waited_for() -> None:
    still = StallDetector((A, B))
    still.on_event(step(B), NOW - QUIET_S / 2)
    still.on_event(Waits(A, 10.0), NOW)
    assert text(still) == ""
    still.on_event(Waits(A, 20.0), NOW + QUIET_S)
    assert "not worker 0/1" in text(still, NOW + QUIET_S + GATHER_S)


def test_a_step_ends_the_wait() -> None:
    still = StallDetector((A, B))
    still.on_event(Waits(A, 10.0), NOW)
    still.on_event(step(A), NOW)
    assert text(still) == ""


def test_who_has_ended_or_is_away_is_not_waited_for() -> None:
    still = StallDetector(WORKERS)
    still.on_event(Finished(B, 1, 8, 0.0, 0, 0, 0), NOW)
    still.on_event(Exited(B, 7, 0), NOW)
    still.on_event(Waits(A, 10.0), NOW)
    assert text(still, missing=(C,)).endswith("for the servers, or for workers elsewhere")


def test_a_wait_tells_how_long_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "LONG_S", 0.0)
    told: list[float] = []

    class Observer(process_host.HostObserver):
        def on_long_wait(self, seconds: float) -> None:
            told.append(seconds)

    process_host.ConditionWaiter(0.001, Observer()).wait(lambda: len(told) >= 3)
    assert all(later >= 2 * earlier for earlier, later in pairwise(told))
