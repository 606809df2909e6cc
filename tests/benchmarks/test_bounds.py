"""The bounds of a machine: what they are made of, their formulas, and the page that refers to them."""

from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import bounds
from benchmarks.bounds import Kernels, beyond, exchange_rows, reduction_rows, shared_time, training_rows
from benchmarks.exchange import RANKS, expected
from benchmarks.harness import Row, Samples, row
from benchmarks.markdown import results
from benchmarks.programs.pusher import TENSORS
from benchmarks.reasons import REASONS, goals_of
from benchmarks.record import Table
from benchmarks.sides import Sides


def table(name: str, *rows: Row) -> Table:
    return Table(name, f"Title of {name}", f"python -m benchmarks.{name}", "abc", "2 cores", 3.0, rows)


@pytest.mark.parametrize("serve", [Kernels.update, Kernels.serve_one, Kernels.serve_two])
def test_the_kernels_of_a_server_are_those_of_plain_training(serve) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    kernels = Kernels()
    serve(kernels)
    serve(kernels)
    values = [value.detach() for value in kernels.values]
    assert len(values) == TENSORS
    assert all(torch.allclose(value, torch.tensor(expected(2)), rtol=1e-5) for value in values)


def test_the_least_time_of_a_step_has_all_cores_busy() -> None:
    assert shared_time(10.0, 2, 4.0, cores=2) == 12.0  # the cores are the workers'
    assert shared_time(10.0, 2, 4.0, cores=4) == 10.0  # a free core does the rest meanwhile
    assert shared_time(10.0, 2, 40.0, cores=4) == 15.0


def test_a_goal_is_within_or_beyond_a_bound() -> None:
    assert beyond(0.5, 0.4) == "the goal ≤ 0.5 is within it"
    assert beyond(0.5, 0.6) == "the goal ≤ 0.5 is BEYOND it"
    assert beyond(3.0, 3.25, ">=") == "the goal ≥ 3 is within it"
    assert beyond(3.7, 3.6, ">=") == "the goal ≥ 3.7 is BEYOND it"


def measured() -> dict[str, Samples]:
    """Parts that took as many milliseconds as stands behind them, each."""
    parts = {bounds.COPIES: 10, bounds.GLOO: 40, bounds.SOCKETS: 20, bounds.ONE: 6, bounds.TWO: 9, bounds.SUM: 7}
    parts |= {name: 5 for name in bounds.KERNELS if name not in parts}
    parts |= {"mlp no update": 60, "mlp alone": 70, "mlp DDP": 90}
    parts |= {f"{who} {ranks}": ms for ranks in RANKS for who, ms in (("bare", 10), ("Gloo", 50))}
    return {name: Samples((ms / 1e3,) * 5, (ms / 1e3,) * 5) for name, ms in parts.items()}


def test_bounds_are_formulas_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "CORES", 2)
    monkeypatch.setattr(bounds.models, "megabytes", lambda _: bounds.MEGABYTES)
    found = measured()
    rows = {one.what: one for one in exchange_rows(found, {}) + reduction_rows(found, {})}
    rows |= {one.what: one for one in training_rows(found, {}, ["mlp"])}
    values = {what: one.figure for what, one in rows.items() if ": at best" in what}
    assert values == pytest.approx(
        {
            "P1, 1 worker 1 server: at best": 6 / 10,
            "P1, 2 workers 1 server: at best": 9 / 10,
            "P1, 2 workers 1 server, over Gloo: at best": 9 / 40,
            f"P2, 2 workers 1 server, over {bounds.COPIES}: at best": 20 / 10,
            f"P2, 2 workers 1 server, over {bounds.GLOO}: at best": 20 / 40,
            **{f"P3, {ranks} ranks: at best": 0.2 for ranks in RANKS},
            "P4 and P5, MLP over shared memory: at best": (2 * 60 + 9 + 2 * 5) / 2 / 90,
            "P5, MLP over TCP: at best": (2 * 60 + 9 + 2 * 5 + 20) / 2 / 90,
            "P6, MLP: at best": 70 / ((2 * 60 + 2 * (6 + 2 * 5)) / 2),
        }
    )
    assert "the goal ≤ 0.5 is BEYOND it" in rows["P1, 1 worker 1 server: at best"].note
    assert "the goal ≤ 0.9 is within it" in rows["P5, MLP over TCP: at best"].note


def test_kernels_are_compared_by_processor_time_which_others_do_not_lengthen() -> None:
    found = measured() | {bounds.ONE: Samples((0.1,) * 5, (0.006,) * 5), bounds.GLOO: Samples((0.1,) * 5, (0.02,) * 5)}
    rows = {one.what: one.figure for one in exchange_rows(found, {})}
    assert rows["P1, 1 worker 1 server: at best"] == pytest.approx(0.6)
    assert rows["P1, 2 workers 1 server, over Gloo: at best"] == pytest.approx(0.09)  # Gloo's processes wait


def test_a_part_that_is_missing_takes_only_its_bounds_along() -> None:
    found = {name: samples for name, samples in measured().items() if name not in (bounds.GLOO, "mlp DDP")}
    lost = {bounds.GLOO: "Gloo hung", "mlp DDP": "DDP ended"}
    rows = {one.what: one for one in exchange_rows(found, lost) + training_rows(found, lost, ["mlp"])}
    assert rows["P1, 2 workers 1 server, over Gloo: at best"].note == "Gloo hung"
    assert rows["P4 and P5, MLP over shared memory: at best"].figure is None
    assert rows["P1, 1 worker 1 server: at best"].figure is not None
    assert rows["P6, MLP: at best"].figure is not None


def test_bounds_of_arithmetic_need_no_machine() -> None:
    rows = {one.what: one.figure for one in bounds.arithmetic_rows()}
    assert rows["P7, asynchronous: at best"] == 3.25
    # 4 workers with 4.5 MB each at 100 Mbit/s, and 4 x 64 KB until the first bucket is complete.
    assert rows["P9, 1 server over 4 servers: at best"] == pytest.approx((4 * 0.3585 + 0.021) / (0.3585 + 0.021), 1e-3)


# --- the page ----------------------------------------------------------------------------------------------------


def test_a_reason_names_the_goals_that_it_is_about() -> None:
    assert goals_of("P4 and P5, MLP over shared memory: at best") == {"P4", "P5"}
    assert goals_of("40 MB: copy, as P1") == set()
    assert goals_of("P1") == set()
    every = {one.what for one in [*bounds.arithmetic_rows(), *exchange_rows(measured(), {})]}
    assert {"P1", "P2", "P7", "P9"} <= {goal for what in every for goal in goals_of(what)} <= set(REASONS)


def test_a_missed_goal_stands_with_its_bounds() -> None:
    missed = table(
        "exchange", row("P1", "shared memory", 0.6, "x", "<= 0.5"), row("P3", "2 ranks", 0.2, "x", "<= 0.25")
    )
    least = table(
        "bounds", row("", "P1, 1 worker: at best", 0.58, "x", note="a formula"), row("", "P3, 2 ranks", 1.0, "x")
    )
    reasons = (
        results([missed, least], bench.GOALS, {}).partition("## Why some are not met")[2].partition("## The runs")[0]
    )
    assert (
        f"* P1: {REASONS['P1']}\n  * P1, 1 worker: at best: 0.58 x. a formula ([bounds](#title-of-bounds))" in reasons
    )
    assert "P3" not in reasons
    assert "`python -m benchmarks.passes` measure" in reasons
    assert "`python -m benchmarks.bounds`" not in reasons


# --- without any of our code ---------------------------------------------------------------------------------------


@pytest.mark.journey
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bare_reduction_writes_the_mean_for_every_rank(ranks: int, tmp_path: Path) -> None:
    with Sides() as sides:
        side = sides.plain("bare", bounds.BARE, f"reduce:{tmp_path}", ranks)
        assert side.run(2) > 0
        assert [answer["value"] for answer in side.ask(check=True)] == [1.0] * ranks


@pytest.mark.journey
def test_bare_sockets_carry_everything() -> None:
    with Sides() as sides:
        side = sides.plain("sockets", bounds.BARE, "sockets", 2)
        assert [answer["value"] for answer in side.ask(check=True)] == [0.0, 0.0]
        turn = side.turn(1)
        assert [answer["value"] for answer in side.ask(check=True)] == [1.0, 1.0]
        assert turn.wall > 0
