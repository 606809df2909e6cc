"""Goodput in virtual time: the formula, the published figures, and rounds that the server decides."""

import pytest

from benchmarks.goodput import (
    PUBLISHED,
    ROUND_S,
    YEAR_S,
    ChipFailures,
    pushes_for,
    simulated,
)

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize(("chips", "islands"), PUBLISHED)
def test_the_formula_is_near_the_published_figures(chips: int, islands: int) -> None:
    """Without this the simulation could not be, either."""
    assert ChipFailures(chips).formula(islands) == pytest.approx(PUBLISHED[chips, islands], abs=0.02)


@pytest.mark.parametrize(("chips", "islands"), [(2_400_000, 1), (1_200_000, 2), (2_400_000, 8)])
def test_groups_that_never_wait_have_the_goodput_of_the_formula(chips: int, islands: int) -> None:
    found = simulated(ChipFailures(chips), islands, pushes=4000)
    assert found.share == pytest.approx(found.failures.formula(islands), abs=0.01)
    assert found.share == pytest.approx(PUBLISHED[chips, islands], abs=0.02)
    assert found.pushes >= 4000 and found.stalls > 500


def test_a_job_without_failures_loses_only_what_is_lost_in_any_case() -> None:
    found = simulated(ChipFailures(4, mtbi_s=1e12), 4, pushes=100)
    assert found.share == pytest.approx(0.95) and not found.stalls


@pytest.mark.parametrize("quorum", [1, 3])
def test_with_a_quorum_no_group_waits(quorum: int) -> None:
    found = simulated(ChipFailures(1_000_000), 4, quorum, 4000)
    assert found.share == pytest.approx(found.failures.formula(4), abs=0.01)
    assert found.rounds <= found.pushes / quorum + 1


def test_without_a_quorum_every_group_waits_for_the_slowest() -> None:
    """A round takes as long as that of the group with the most failures."""
    failures = ChipFailures(1_000_000)
    together, apart = simulated(failures, 4, 0, 4000), simulated(failures, 4, 1, 4000)
    assert together.rounds == pytest.approx(together.pushes / 4, abs=1)
    assert together.share < apart.share - 0.05
    # No better than the slowest group, and no worse than one group that has all chips.
    assert failures.formula(1) < together.share


def test_the_same_seed_has_the_same_result() -> None:
    assert simulated(ChipFailures(1_000_000), 3, pushes=300) == simulated(ChipFailures(1_000_000), 3, pushes=300)


def test_many_groups() -> None:
    found = simulated(ChipFailures(120_000), 1000, pushes=3000)
    assert found.rounds == found.pushes == 3000
    assert found.share == pytest.approx(0.95, abs=0.005)


def test_enough_failures_are_simulated() -> None:
    for chips, islands in PUBLISHED:
        failures = ChipFailures(chips)
        stalls = pushes_for(failures, islands) * ROUND_S * failures.rate(islands)
        few, many = stalls - 3 * stalls**0.5, stalls + 3 * stalls**0.5
        spread = [0.95 / (1 + failures.rate(islands) * failures.stall_s * each / stalls) for each in (few, many)]
        assert spread[0] - spread[1] < 0.012, "three standard deviations either way"
    assert pushes_for(ChipFailures(1_200_000, YEAR_S), 10_000) == 100_000
