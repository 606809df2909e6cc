"""The table of predictions: its jobs, its held-out cases, and what is made of the figures."""

import argparse

import pytest

from benchmarks import advised
from benchmarks.harness import Figure
from benchmarks.predictions import (
    CASES,
    HELD_OUT,
    HELD_OUT_NAME,
    LAYOUTS,
    MODELS,
    NETWORKS,
    Case,
    Outcome,
    chosen,
    nine_of_ten,
    summary,
)
from benchmarks.record import RESULTS, load
from benchmarks.sides import refusal
from topotrain.tools.prediction import measured_errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_case_is_a_job_that_is_taken(layout: str, network: str) -> None:
    assert refusal(LAYOUTS[layout].conf(NETWORKS[network])) == ""


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"held_out": False, "cases": 0, "only": "", "seed": 1, **changes})


def test_held_out_cases_are_apart() -> None:
    open_cases, apart = chosen(options()), chosen(options(held_out=True))
    assert set(open_cases).isdisjoint(apart)
    assert {*open_cases, *apart} == set(CASES) and len(CASES) == 75
    assert len(open_cases) >= 24 and len(apart) >= 24
    # One model is in no case that anything may be tuned on.
    assert any(all(case in HELD_OUT for case in CASES if case.model == model) for model in MODELS)
    assert open_cases != sorted(open_cases, key=str)
    assert chosen(options()) == open_cases != chosen(options(seed=2))
    assert all(case.model == "char" and case.network == "TCP" for case in chosen(options(only="char TCP")))


def kind_of(network: str) -> str:
    """What the product's expected error depends on."""
    return {"shared memory": "SHARED_MEMORY", "TCP": "TCP", "straggler": "STRAGGLER"}.get(network, "LINK")


def test_the_product_expects_the_errors_of_the_table() -> None:
    errors: dict[str, list[float]] = {}
    for found in load(RESULTS / f"{HELD_OUT_NAME}.json").rows:
        if found.note.startswith("predicted ") and found.figure is not None:
            predicted = float(found.note.split()[1])
            network = found.what.split(", ", 2)[2]
            errors.setdefault(kind_of(network), []).append(abs(predicted / found.figure - 1))
    assert sum(map(len, errors.values())) == len(HELD_OUT)
    for kind, its in errors.items():
        # In whole percents; the table has rounded both figures.
        assert getattr(measured_errors, kind) == pytest.approx(nine_of_ten(its), abs=0.011), kind


def outcome(layout: str, predicted: float, measured: float) -> Outcome:
    return Outcome(Case("char", layout, "TCP"), predicted, Figure(measured, measured, measured))


def test_errors_and_regret() -> None:
    # Downpour's step has two batches of the loader, one in each group.
    found = [outcome("Sandblaster", 1.05, 1.0), outcome("AllReduce", 1.0, 1.25), outcome("Downpour", 2.4, 2.4)]
    assert [each.error for each in found] == pytest.approx([0.05, -0.2, 0.0])
    median, nine, regret = summary(found)
    assert median.figure == pytest.approx(5.0) and median.met
    assert nine.figure == pytest.approx(20.0) and nine.met
    assert regret.figure == pytest.approx(1.25) and regret.met is False
    assert regret.note == "char, TCP: AllReduce instead of Sandblaster, 1.25"
    assert summary([]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", advised.PLACES.values(), ids=list(advised.PLACES))
def test_an_advised_job_is_measured_as_the_same_layout_is(layout: str, place: advised.Place) -> None:
    conf = LAYOUTS[layout].conf(place.network)
    assert refusal(conf) == ""
    found = advised.layout_of(conf)
    expected = LAYOUTS[layout]
    assert (found.workers, found.groups, found.period) == (expected.workers, expected.groups, expected.period)
