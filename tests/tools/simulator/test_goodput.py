"""Goodput in virtual time: the formula, the published figures, and rounds that the server decides."""

import json
import os

import pytest
from typer.testing import CliRunner

from topotrain.tools.cli.app import app
from topotrain.tools.simulator.goodput import (
    PUBLISHED,
    ROUND_S,
    YEAR_S,
    ChipFailures,
    Goodput,
    GoodputSimulation,
    published_layouts,
    pushes_for,
)

pytestmark = pytest.mark.simulated


def simulated(failures: ChipFailures, islands: int, quorum: int = 1, pushes: int = 4000) -> Goodput:
    simulation = GoodputSimulation(failures, islands, quorum)
    for _ in simulation.run(pushes):
        pass
    return simulation.found()


@pytest.mark.parametrize(("chips", "islands"), PUBLISHED)
def test_the_formula_is_near_the_published_figures(chips: int, islands: int) -> None:
    """Without this the simulation could not be, either."""
    assert ChipFailures(chips).formula(islands) == pytest.approx(PUBLISHED[chips, islands], abs=0.02)


@pytest.mark.parametrize(("chips", "islands"), [(2_400_000, 1), (1_200_000, 2), (2_400_000, 8)])
def test_groups_that_never_wait_have_the_goodput_of_the_formula(chips: int, islands: int) -> None:
    found = simulated(ChipFailures(chips), islands)
    assert found.share == pytest.approx(found.failures.formula(islands), abs=0.01)
    assert found.share == pytest.approx(PUBLISHED[chips, islands], abs=0.02)
    assert found.pushes >= 4000 and found.stalls > 500


def test_a_job_without_failures_loses_only_what_is_lost_in_any_case() -> None:
    found = simulated(ChipFailures(4, mtbi_s=1e12), 4, pushes=100)
    assert found.share == pytest.approx(0.95) and not found.stalls


@pytest.mark.parametrize("quorum", [1, 3])
def test_with_a_quorum_no_group_waits(quorum: int) -> None:
    found = simulated(ChipFailures(1_000_000), 4, quorum)
    assert found.share == pytest.approx(found.failures.formula(4), abs=0.01)
    assert found.rounds <= found.pushes / quorum + 1


def test_without_a_quorum_every_group_waits_for_the_slowest() -> None:
    """A round takes as long as that of the group with the most failures."""
    failures = ChipFailures(1_000_000)
    together, apart = simulated(failures, 4, 0), simulated(failures, 4, 1)
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
    for failures, islands in published_layouts(ChipFailures(0)):
        stalls = pushes_for(failures, islands) * ROUND_S * failures.rate(islands)
        few, many = stalls - 3 * stalls**0.5, stalls + 3 * stalls**0.5
        spread = [0.95 / (1 + failures.rate(islands) * failures.stall_s * each / stalls) for each in (few, many)]
        assert spread[0] - spread[1] < 0.012, "three standard deviations either way"
    assert pushes_for(ChipFailures(1_200_000, YEAR_S), 10_000) == 100_000


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *words])
    return result.exit_code, result.output


def test_the_command_prints_a_table() -> None:
    code, out = run("--islands", "1", "--chips", "2.4M")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.lstrip().startswith("2,400,000"))
    assert line.split()[1] == "1" and line.split()[-1] == "40%", out
    assert "arXiv 2604.21428" in out


def test_the_command_leaves_its_process_all_cores() -> None:
    before = os.sched_getaffinity(0)
    assert run("--islands", "1", "--chips", "2.4M")[0] == 0
    assert os.sched_getaffinity(0) == before


def test_the_command_prints_json() -> None:
    code, out = run("--islands", "3", "--chips", "640k", "--mtbi", "30d", "--stall", "6s", "--base", "0", "--json")
    (row,) = json.loads(out)["layouts"]
    assert code == 0 and (row["islands"], row["chips"], row["published"]) == (3, 640_000, None)
    assert row["goodput"] == pytest.approx(row["formula"], abs=0.02)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--islands", "0", "--chips", "8"), "--islands = '0': must be a number from 1 to 50000, or published"),
        (("--islands", "many", "--chips", "8"), "--islands = 'many': must be a number"),
        (("--islands", "8"), "--chips: is required by --islands"),
        (("--islands", "8", "--chips", "4"), "--chips = '4': must be at least 8, one for each island"),
        (("--islands", "8", "--chips", "1.2G"), "--chips = '1.2G': must be a number above 0, such as"),
        (("--islands", "8", "--chips", "8", "--mtbi", "soon"), "--mtbi = 'soon': must be a time above 0"),
        (("--islands", "8", "--chips", "8", "--stall", "0"), "--stall = '0': must be a time above 0"),
        (("--islands", "8", "--chips", "8", "--quorum", "9"), "--quorum = 9: must be at most 8"),
        (("--islands", "8", "--chips", "8", "--seeds", "9"), "--seeds = 9: must not be given with --islands"),
        (("--islands", "published", "--chips", "8"), "--chips = '8': must not be given with --islands published"),
        (("--chips", "8"), "--chips = '8': needs --islands"),
    ],
)
def test_bad_options_are_named(words: tuple[str, ...], text: str) -> None:
    code, out = run(*words)
    assert code == 2 and text in " ".join(out.split()), out
