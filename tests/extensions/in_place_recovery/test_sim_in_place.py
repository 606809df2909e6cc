"""Deaths in synchronous groups on the simulated network: the survivors repeat one step, and every batch counts once."""

import pytest
from fault_schedule import STORM, Fault, FaultKind, FaultSchedule
from fault_trial import Trial
from seeded_runs import LAYOUTS
from seeds import every, seeds

pytestmark = pytest.mark.simulated

GROUPS = ("sandblaster", "sandblaster of three", "downpour of pairs")


def death(name: str, seed: int, *faults: Fault, mode: str = "static", epochs: int = 2, assigns: bool = False) -> Trial:
    """These deaths, each survived by the rest of its group where there is a rest."""
    schedule = FaultSchedule("storm", 6, epochs, mode, True, faults, survive=1.0, assigns=assigns)
    return Trial(LAYOUTS[name], seed, schedule, STORM).run()


def incarnations(trial: Trial) -> list[int]:
    return [trial.worker_processes[me].incarnation for me in trial.workers]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("mode", ["lease", "static"])
def test_a_worker_dies_at_every_message_and_the_others_are_not_started_again(name, mode):
    repeats = 0
    for after in every(14, 74, 6):
        found = death(name, after, Fault(0, 0, 1, after, away=0.02), mode=mode)
        assert not found.wrong(), f"{name}, after {after}: {found.wrong()[:3]}"
        repeats += found.repeats
        if found.kills and any(me.stepped for me in found.worker_processes.values() if me.incarnation == 0):
            assert incarnations(found)[0] in (0, 1)
    assert repeats > 1


def test_the_first_worker_dies_and_the_last_one_and_the_middle_one():
    for index in range(3):
        found = death("sandblaster of three", index, Fault(0, 0, index, 60, away=0.05))
        assert not found.wrong() and found.repeats >= 2
        assert incarnations(found) == [int(each == index) for each in range(3)]


def test_two_of_three_die_and_the_third_goes_on():
    faults = (Fault(0, 0, 1, 60, away=0.05), Fault(0, 0, 2, 61, away=0.08))
    for seed in seeds(6):
        found = death("sandblaster of three", seed, *faults)
        assert not found.wrong() and incarnations(found) == [0, *incarnations(found)[1:]]


def test_the_survivors_make_their_steps_while_the_dead_one_is_away():
    found = death("sandblaster of three", 1, Fault(0, 0, 1, 60, away=3.0))
    ((died, _),) = found.deaths
    assert not found.wrong() and sum(died < moment < died + 2.0 for moment in found.commits[0]) >= 4


def test_a_new_process_dies_before_it_has_joined_and_after():
    for after in every(0, 30, 3):
        faults = (Fault(0, 0, 1, 60, away=0.01), Fault(0, 1, 1, after, away=0.01))
        found = death("sandblaster of three", after, *faults)
        assert not found.wrong() and incarnations(found) == [0, 2, 0]


def test_the_last_survivor_dies_and_the_whole_group_restarts():
    faults = (Fault(0, 0, 1, 60, away=0.5), Fault(0, 0, 0, 75, away=0.01))
    for seed in seeds(6):
        found = death("sandblaster", seed, *faults)
        assert not found.wrong() and incarnations(found) == [2, 2]


def test_a_connection_of_a_worker_ends_and_only_this_worker_restarts():
    cut = Fault(0, 0, 1, 60, away=0.01, what=FaultKind.CUT, server=1)
    found = death("sandblaster of three", 1, cut)
    assert not found.wrong() and incarnations(found) == [0, 1, 0]


# --- scripts that assign parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), list(zip(GROUPS, ("lease", "static", "static"), strict=True)))
def test_a_step_with_an_assignment_is_not_repeated_and_the_group_restarts(name, mode):
    """The launcher has not heard of the assignments: the survivors find out by themselves."""
    wholly = 0
    for after in every(20, 68, 4):
        found = death(name, after, Fault(0, 0, 1, after, away=0.02), mode=mode, assigns=True)
        assert not found.wrong(), f"{name}, after {after}: {found.wrong()[:3]}"
        ours = incarnations(found)[: found.topology.workers_per_group]
        if len(found.deaths) > 1:
            assert len(set(ours)) == 1, "all of the group, once more"
            wholly += 1
    assert wholly


def test_a_death_that_is_not_survived_restarts_the_group():
    schedule = FaultSchedule("storm", 6, 2, "static", True, (Fault(0, 0, 1, 60),), survive=0.0)
    whole = Trial(LAYOUTS["sandblaster"], 3, schedule, STORM).run()
    assert not whole.wrong() and incarnations(whole) == [1, 1] and whole.repeats == 0
