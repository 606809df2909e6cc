"""Which fragment a worker pushes next: all in step after a return, and a late worker skips instead of waiting."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from fault_schedule import Fault, FaultKind
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds, soaked
from simulated_islands import STEP_S, IslandTrial, islands

from topotrain.config.job import Cluster, Pace, Shard
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import ProtocolError, StepDecision
from topotrain.core.server.consistency import IS_BACK
from topotrain.extensions.outer_optimizer.round_client import RoundClient
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN, NextRound
from topotrain.extensions.outer_optimizer.round_turns import RoundTurns
from topotrain.extensions.outer_optimizer.rounds import RoundSchedule, StepTimes, fragment_to_push

pytestmark = pytest.mark.simulated

SERVER = Address(Role.SERVER, 0, 0)

# --- the rules -------------------------------------------------------------------------------------------------------


def test_the_fragment_of_a_push() -> None:
    assert fragment_to_push(1, [4, 4, 4]) == 1
    assert fragment_to_push(1, [9, 4, 8]) == 1
    assert fragment_to_push(1, [4, 0, 4]) == 2, "nothing was learned of fragment 1"
    assert fragment_to_push(2, [4, 0, 0]) == 0
    assert fragment_to_push(1, [0, 0, 0]) == 1, "a round waits for the push of all"


def client(fragments: int = 3) -> RoundClient:
    made = RoundClient(fragments)
    waiter: Any = SimpleNamespace(update=lambda: pytest.MonkeyPatch.context())
    made.bind(SimpleNamespace(waiter=waiter), None, None)  # type: ignore[arg-type]
    return made


def named(here: RoundClient) -> int:
    """The fragment that was named for a push, which is made now."""
    found = here.named
    here.follow()
    return found


def test_a_worker_that_is_back_follows_until_its_push() -> None:
    here = client()
    here.handle(SERVER, NextRound(3, 1, 0.4))
    assert (named(here), here.fastest) == (OWN_TURN, 0.4), "it goes on with its own turn"
    here.handle(SERVER, NextRound(4, 1, 0.5, back=True))
    here.handle(SERVER, NextRound(5, 2, 0.5))
    assert (named(here), named(here), here.fastest) == (2, OWN_TURN, 0.5)
    here.handle(SERVER, NextRound(4, 1, 0.7, back=True))
    here.handle(SERVER, NextRound(6, 1, 0.6))
    assert (named(here), here.fastest) == (OWN_TURN, 0.6), "a word that came twice, and one from before its push"
    here.handle(SERVER, NextRound(7, 2, 0.0, back=True))
    here.handle(SERVER, NextRound(8, OWN_TURN, 0.1))
    assert (named(here), here.fastest) == (2, 0.1), "the word about the pace names no fragment"


def test_a_fragment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ProtocolError, match="names fragment 3 of 3"):
        client().handle(SERVER, NextRound(0, 3))


def coordinator(**cluster: Any) -> tuple[RoundTurns, Any]:
    """The rounds of three workers on a coordinator of which only the needed parts are there."""
    groups = SimpleNamespace(
        clocks=SimpleNamespace(live=lambda: [0, 1, 2]),
        workers={group: (Address(Role.WORKER, group, 0),) for group in range(3)},
    )
    staging = {group: SimpleNamespace(first=SimpleNamespace(optimizer=0)) for group in range(3)}
    state = SimpleNamespace(known=SimpleNamespace(staging=staging))
    server: Any = SimpleNamespace(worker_groups=groups, state=state)
    return RoundTurns(server, islands(3, 6, 3, **cluster)), server


def back(group: int) -> StepDecision:
    return StepDecision(0, group, 0, False, 0.0, IS_BACK)


def over(group: int) -> Any:
    return SimpleNamespace(group=group)


def test_a_worker_that_is_back_is_told_until_it_has_a_part_in_a_round() -> None:
    turns, _ = coordinator(quorum=2, pace=Pace.kSteps)
    turns.on_decree(back(1))
    turns.before_decision(0)
    copy, _ = coordinator(quorum=2, pace=Pace.kSteps)
    copy.load_state_dict(turns.state_dict())
    for each in (turns, copy):
        assert each.step_over(over(0)) == [(Address(Role.WORKER, 1, 0), NextRound(1, 1))]
    turns.before_decision(1)
    assert turns.step_over(over(0)) == turns.step_over(over(1)) == []


# --- in step ---------------------------------------------------------------------------------------------------------


def assert_in_turn(trial: IslandTrial) -> None:
    fragments = trial.job.cluster.fragments
    assert [each.fragment for each in trial.rounds] == [n % fragments for n in range(len(trial.rounds))]


@pytest.mark.parametrize(("victim", "overlap"), [(0, 1), (1, 0)])
def test_a_worker_that_comes_back_pushes_what_the_others_push(victim: int, overlap: int) -> None:
    """Killed at any step of a turn, and for any time, it is in step again: each round has one fragment, in turn."""
    job = islands(3, 6, 3, overlap=overlap)
    for n in (2 * each for each in seeds(6)):
        fault = Fault(victim, at=(8.3 + n) * STEP_S, away=0.7 * (n % 6) * STEP_S)
        trial = IslandTrial(job, 3 * 30, [fault]).run()
        assert len(trial.restarts) == 1
        assert_in_turn(trial)
        sizes = Counter(len(each.groups) for each in trial.rounds)
        # Only from the death to the return, and at the end, a round has fewer than all.
        assert sizes[3] >= len(trial.rounds) - 8, (n, trial.rounds)
        back = [each for each in trial.rounds if each.time > trial.restarts[0][0] + 8 * STEP_S]
        assert any(len(each.groups) == 3 for each in back)
        counted = trial.cells()
        assert int(counted.max()) == 1, "counted twice"
        lost = counted == 0
        # Of each fragment at most what the dead worker had made since its last push of it.
        assert all(int(each.sum()) <= job.cluster.sync_freq for each in lost), (n, lost.sum(1))
        assert not lost[:, [cell for cell in range(90) if cell % 3 != victim]].any()


def dies(n: int) -> list[Fault]:
    return [Fault(1, at=(10.4 + n) * STEP_S, away=3 * STEP_S)]


def is_given_up_and_joins(n: int) -> list[Fault]:
    away = Fault(1, at=(8.4 + n) * STEP_S, what=FaultKind.LOSE)
    return [away, Fault(1, at=(15.7 + 2 * n) * STEP_S, what=FaultKind.JOIN)]


@pytest.mark.parametrize(
    ("fragments", "quorum", "speeds", "faults"),
    [
        # A slow worker rests where no batch is left, and others go on: it comes back to their fragment.
        (3, 0, (1.0, 0.6, 0.35), lambda n: []),
        (3, 0, (), dies),
        (3, 2, (), is_given_up_and_joins),
        *soaked([], [(2, 0, (1.0, 0.6, 0.35), lambda n: []), (3, 0, (), is_given_up_and_joins)]),
    ],
)
def test_workers_that_lease_their_batches_stay_in_step(
    fragments: int, quorum: int, speeds: tuple[float, ...], faults: Callable[[int], list[Fault]]
) -> None:
    job = replace(islands(3, 6, fragments, quorum=quorum), shard=Shard.kLease)
    for n in seeds(4) if faults(0) else [0]:
        trial = IslandTrial(job, 120, faults(n), speeds, lease=True).run()
        assert [fault for _, fault in trial.log] == faults(n)
        if not quorum:
            assert_in_turn(trial)
        counted = trial.cells()
        assert int(counted.max()) == 1, "counted twice"
        assert faults(n) or bool((counted == 1).all())
        if len(faults(n)) == 2:
            assert any(1 in each.weights for each in trial.rounds if each.time > faults(n)[1].at)


# --- a quorum --------------------------------------------------------------------------------------------------------


def waits(trial: IslandTrial, group: int, since: float = 0.0) -> list[int]:
    """For each push of a worker: how many rounds were decided before its own."""
    return [trial.rounds_until(push) for push in trial.told if push.group == group and push.time >= since]


@pytest.mark.parametrize("pace", [Pace.kTime, Pace.kSteps])
def test_a_worker_that_comes_back_has_a_part_in_the_next_round(pace: Pace) -> None:
    """It pushes what the others push, and does not begin with the first fragment again."""
    job, found = islands(3, 16, 8, quorum=2, pace=pace), []
    for n in seeds(6):
        fault = Fault(1, at=(10.3 + 3 * n) * STEP_S, away=3 * STEP_S)
        trial = IslandTrial(job, 150, [fault], lease=True).run()
        ((since, _),) = trial.restarts
        found.append(waits(trial, 1, since)[0])
        counted = trial.cells()
        assert int(counted.max()) == 1, "counted twice"
        # What it has made since its last push of a fragment that was in a round. A push may have waited for a turn.
        assert all(int(each.sum()) <= 2 * job.cluster.sync_freq for each in counted == 0)
    # Of three that push at the same moment one is late for a round of two, whichever that is.
    assert sum(wait <= 1 for wait in found) >= len(found) - 2, found


@pytest.mark.parametrize(
    ("quorum", "speeds", "pace"),
    [
        (3, (1.0, 1.0, 0.7, 0.4), Pace.kTime),
        (3, (1.0, 0.9, 0.8, 1.0), Pace.kSteps),
        *soaked([], [(2, (1.0, 1.0, 1.0), Pace.kTime), (2, (1.0, 1.0, 1.0), Pace.kSteps)]),
    ],
)
def test_rounds_have_the_quorum_until_workers_end(quorum: int, speeds: tuple[float, ...], pace: Pace) -> None:
    """Workers that drift apart come together again, and a push waits for one turn over the fragments at most."""
    fragments = 4
    job = islands(len(speeds), 10 * fragments, fragments, quorum=quorum, pace=pace)
    trial = IslandTrial(job, 350, speeds=speeds, lease=True).run()
    assert bool((trial.cells() == 1).all())
    end = max(each.time for each in trial.rounds) - 40 * STEP_S
    sizes = Counter(len(each.groups) for each in trial.rounds if each.time < end)
    assert min(sizes) >= quorum, sizes
    assert max(wait for group in range(len(speeds)) for wait in waits(trial, group)) <= fragments


@pytest.mark.parametrize("quorum", soaked([3], [1]))
def test_no_worker_leaves_a_fragment_out(quorum: int) -> None:
    """Each worker pushes each fragment as often as every other one, up to one push."""
    job = islands(4, 8, 4, quorum=quorum)
    trial = IslandTrial(job, 300, speeds=(1.0, 0.9, 0.7, 0.4), lease=True).run()
    for group in range(4):
        pushed = Counter(each.fragment for each in trial.told if each.group == group)
        assert max(pushed.values()) - min(pushed.values()) <= 1, (group, pushed)
    assert bool((trial.cells() == 1).all())


# --- the pace of pushes: after so many own steps, or as often as the fastest worker ----------------------------------

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


@pytest.mark.parametrize(("quorum", "fragments"), soaked([(1, 2)], [(1, 1), (2, 1)]))
def test_slow_workers_push_as_often_with_fewer_steps(quorum: int, fragments: int) -> None:
    trial = IslandTrial(islands(4, 10 * fragments, fragments, quorum=quorum), 500, speeds=SPEEDS, lease=True).run()
    for group, steps in enumerate((10, 10, 7, 4)):
        found = pushes(trial, group)
        assert len(found) == 6
        assert {made for made, _, _ in found} == {steps}, (group, found)
        # The values come some milliseconds after the push, so no step is added. Its length may be cut by one.
        assert all(abs(gap - 10 * STEP_S) < 0.6 * STEP_S for _, gap, _ in found), (group, found)
        # Samples times samples per step: one sample is one step here. A fragment has the steps of all its turn.
        assert {weight for _, _, weight in found} == {float(steps * fragments)}, (group, found)
    assert bool((trial.cells() == 1).all())


def test_the_fastest_worker_is_the_fastest_that_is_there() -> None:
    """When it dies, the others make more steps again."""
    job = islands(3, 10, quorum=1)
    trial = IslandTrial(job, 600, [Fault(1, at=0.5, away=60.0)], speeds=(0.5, 1.0, 0.5), lease=True).run()
    steps = [each.samples for each in trial.told if each.group == 0]
    assert 5 in steps[2:10]
    assert steps[-3] == 10, steps
