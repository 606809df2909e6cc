"""The measuring side of benchmarks/, without measuring: ratios, verdicts, pages, and a table for every goal."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.balance import MODELS
from benchmarks.downpour import compared
from benchmarks.harness import Figure, Row, absent, holds, interleave, row
from benchmarks.markdown import anchor, results, section
from benchmarks.record import Table, load, machine, save
from benchmarks.sides import cluster, refusal
from benchmarks.training_step import ARRANGEMENTS, DEFAULT, conf
from topotrain.config import job_file


def table(*rows: Row) -> Table:
    return Table("balance", "Balance of it", "python -m benchmarks.balance", "abc+changes", "2 cores", 3.0, rows)


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    values = {"a": iter([100.0, 1, 2, 3, 4, 5]), "b": iter([100.0, 2, 4, 6, 8, 40])}

    def side(name: str) -> Callable[[], float]:
        return lambda: (order.append(name), next(values[name]))[1]

    found = interleave({"a": side("a"), "b": side("b")}, 5, lambda name: order.append(f"warm {name}"))
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert len(rounds) == 6
    assert {tuple(turns) for turns in rounds} == {("warm a", "a", "warm b", "b"), ("warm b", "b", "warm a", "a")}
    assert interleave({"a": lambda: 7.0}, 5, spare=0)["a"].values == (7.0,) * 5
    assert found["a"].values == (1, 2, 3, 4, 5)
    assert found["b"].over(found["a"]) == Figure(2.0, 2.0, 8.0)
    assert found["b"].figure == Figure(6.0, 2.0, 40.0)


def test_a_median_of_few_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds = 4"):
        interleave({"a": lambda: 1.0}, 4)


@pytest.mark.parametrize(
    ("figure", "bound", "expected"),
    [(0.85, "<= 0.85", True), (0.86, "<= 0.85", False), (3.0, ">= 3.0", True), (2.9, ">= 3.0", False), (1, "", None)],
)
def test_a_goal_is_met_or_not(figure: float, bound: str, expected: bool | None) -> None:
    assert holds(figure, bound) is expected
    assert row("P5", "x", figure, "×", bound).met is expected


def test_an_unknown_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="bound = 'about 3'"):
        holds(3.0, "about 3")


def test_what_could_not_be_measured_is_neither_met_nor_not_met() -> None:
    text = section(table(absent("P5", "MLP", "×", "FSDP2 refuses", "<= 0.75")))
    assert "not measured" in text
    assert "not met" not in text
    assert "FSDP2 refuses" in text


def test_the_page_shows_every_goal_once_measured_or_not() -> None:
    rows = (row("P10", "even", Figure(2.0, 1.0, 3.0), "%", "<= 1", "because", "mode"), row("P10", "no bound", 7.0, "s"))
    page = results([table(*rows)], bench.GOALS, {"P1": ["exchange"]})
    goals = page.partition("## The runs")[0]
    line = next(line for line in goals.splitlines() if line.startswith("| P10"))
    assert line == ("| P10 | even | mode | ≤ 1 | 2 % (1–3) | **not met** | because | [balance](#balance-of-it) |")
    assert "no bound" not in goals
    assert "no bound" in page
    assert next(line for line in goals.splitlines() if line.startswith("| P1 ")).endswith(
        "not measured |  | exchange |"
    )
    assert "| balance | `python -m benchmarks.balance` | `abc+changes` | A | 3 s | – |" in page
    assert "Machine A: 2 cores." in page


def test_links_of_the_page_lead_to_its_headings() -> None:
    assert anchor("A training step, 2 workers on one host") == "a-training-step-2-workers-on-one-host"


def test_results_survive_their_file(tmp_path: Path) -> None:
    before = table(row("P10", "even", Figure(2.0, 1.0, 3.0), "%", "<= 1"), absent("", "x", "s", "why"))
    assert load(save(before, tmp_path)) == before


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert platform.node() not in machine() or not platform.node()
    assert "torch" in machine()


def test_every_goal_has_a_table() -> None:
    assert list(bench.GOALS) == [f"P{number}" for number in range(1, 15)]
    assert {goal for goals in bench.TABLES.values() for goal in goals} == set(bench.GOALS)


@pytest.mark.parametrize("name", [name for name in bench.TABLES if find_spec(f"benchmarks.{name}")])
def test_tables_say_of_themselves_what_the_list_says(name: str) -> None:
    module = import_module(f"benchmarks.{name}")
    if hasattr(module, "GOALS"):
        assert (name, bench.TABLES[name]) == (module.NAME, module.GOALS)


def test_all_tables_fit_into_the_budget_with_room_to_spare() -> None:
    assert bench.MINUTES.keys() == bench.TABLES.keys()
    assert sum(bench.MINUTES.values()) <= 27.2
    assert 60 * (sum(bench.MINUTES.values()) + bench.TENSORFLOW_MINUTES) + bench.ENDING_S <= bench.BUDGET_S
    goals = [bool(goals) for goals in bench.TABLES.values()]
    assert goals == sorted(goals, reverse=True), "what has a goal comes first, for the rest may be left out"


def test_a_table_that_does_not_fit_is_left_out_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = bench.run_all(["core", "splitting"], False, 31.0)
    assert (outcome.failed, outcome.skipped) == ([], ["core", "splitting"])
    assert "splitting: left out, it takes 1 min and 0.0 of 0.5" in capsys.readouterr().err
    last = bench.told(2, 45.0, 31.0, outcome)
    left_out = "core, splitting (python -m benchmarks core splitting)"
    assert last == f"0 tables took 0.8 min, NOT within 0.516667 min; left out: {left_out}"
    assert bench.told(2, 30.0, 1800.0, bench.Outcome()) == "2 tables took 0.5 min, within 30 min"


def test_the_multiples_of_two_systems_are_compared_with_their_whole_spread() -> None:
    assert compared(Figure(1.8, 1.6, 2.0), Figure(0.9, 0.8, 1.0)) == Figure(2.0, 1.6, 2.5)


def test_words_choose_tables() -> None:
    assert bench.chosen([]) == list(bench.TABLES)
    assert bench.chosen(["p5", "p6", "startup"]) == ["startup", "training_step", "downpour"]
    with pytest.raises(ValueError, match="p99"):
        bench.chosen(["p99"])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda arrangement: arrangement.name)
def test_the_arrangements_of_a_training_step_are_those_of_the_goals(arrangement) -> None:  # type: ignore[no-untyped-def]
    job = job_file.loads(conf(arrangement, DEFAULT), "the conf")
    assert job.cluster.nworkers_per_group == 2
    assert job.cluster.server_worker_separate is arrangement.separate
    assert (job.grads.name, job.apply.name) == ("kVisible", "kAtStep")


def test_a_conf_that_is_refused_says_why() -> None:
    assert refusal(cluster()) == ""
    assert "apply" in refusal(cluster(top="apply: kOnArrival"))


def test_the_shapes_are_those_of_the_models() -> None:
    import math

    counts = {name: sum(math.prod(shape) for shape in make()) for name, make in MODELS.items()}
    assert counts == {"GPT-2-small": 124_439_808, "ResNet-50": 25_557_032, "VGG-16": 138_357_544}
