"""The jobs of the tables are taken, and what is made of their figures."""

import pytest
from seeds import soak_only

from benchmarks import asynchrony, islands, islands_loss, training_step, two_hosts
from benchmarks.contest import Contestant, Limits
from benchmarks.goodput import PUBLISHED, Failures, simulated
from benchmarks.gpu_training import GLOO, NCCL, ONE_GPU, Target, contestants, measure_model
from benchmarks.harness import Figure
from benchmarks.islands_loss import ALL, WAYS, Trained, rows_of
from benchmarks.predictions import (
    HELD_OUT,
    LAYOUTS,
    NETWORKS,
    Case,
    Outcome,
    nine_of_ten,
    summary,
)
from benchmarks.record import RESULTS, load
from benchmarks.sides import cluster, refusal
from topotrain.tools.prediction import rehearsable


def test_every_conf_is_taken() -> None:
    confs = [one.conf for one in training_step.contestants() if not one.way]
    confs += [layout.conf(network) for layout in LAYOUTS.values() for network in NETWORKS.values()]
    confs += [*(way.conf for way in WAYS.values()), *two_hosts.JOBS.values()]
    confs += [islands.islands(f"{way} {islands.NESTEROV}") for way in (islands.STREAMING, islands.DECOUPLED)]
    assert not any(map(refusal, confs))
    assert "apply" in refusal(cluster(top="apply: kOnArrival"))
    assert all(conf == "allreduce" or "correction=" in " ".join(sets) for _, _, conf, sets in asynchrony.JOBS)


def test_gpus_of_their_own_are_connected_by_nccl() -> None:
    one, two = ({each.key: each for each in contestants(Target(("H100",) * n, 80.0))} for n in (1, 2))
    assert all(each.way or each.missing or not refusal(each.conf) for each in (*one.values(), *two.values()))
    assert (two[NCCL].way, two[NCCL].workers) == ("ddp+nccl", 2) and GLOO not in two
    assert one[NCCL].missing == ONE_GPU and one[f"{NCCL}, one worker"].workers == 1


@soak_only
@pytest.mark.journey
def test_the_code_path_of_gpus_measures_on_cpus_and_keeps_what_works() -> None:
    engine, refused = cluster(2, 2, separate=False, inside="engine: kGloo"), cluster(2, inside="outer { }")
    chosen = [Contestant("alone", 2, way="alone"), Contestant(GLOO, 2, way="ddp")]
    chosen += [Contestant(name, 2, conf=each, over=GLOO) for name, each in (("a", engine), ("b", refused))]
    rows = measure_model("small", Target(), 5, Limits(300.0), chosen)
    assert all(line.figure for line in rows[:3]) and "outer" in rows[3].note, rows
    late = measure_model("small", Target(), 5, Limits(0.0), chosen)
    assert {line.note for line in late} == {"left out: the 0 s for this table were over"}


@pytest.mark.simulated
def test_groups_that_never_wait_have_the_goodput_of_the_formula() -> None:
    for layout, paper in PUBLISHED.items():
        assert Failures(*layout).formula == pytest.approx(paper, abs=0.02)
    assert simulated(Failures(2_400_000, 8), pushes=4000) == pytest.approx(0.8, abs=0.02)


def test_gaps_of_islands_are_to_allreduce() -> None:
    found = {ALL: [Trained(2.0, 8.0, 0), Trained(2.2, 8.0, 0)], "diloco-10": [Trained(2.1, 1, 0), Trained(2.3, 2, 0)]}
    rows = {row.what: row for row in rows_of(found, {"ring": "it is broken"})}
    gap = rows["DiLoCo, sync_freq 10: gap to AllReduce"]
    assert (gap.figure, gap.low, gap.high) == pytest.approx((100 * (2.2 / 2.1 - 1), 100 * (2.3 / 2.2 - 1), 5.0))
    assert rows["Hogwild, kRingAverage, sync_freq 10"].note == "it is broken"
    for way in WAYS.values():
        samples, batch = (int(way.arguments[way.arguments.index(word) + 1]) for word in ("--samples", "--batch"))
        assert samples // batch * (way.workers // way.groups) == islands_loss.STEPS * way.workers


def test_the_product_expects_the_errors_of_the_table() -> None:
    errors: dict[str, list[float]] = {}
    for found in load(RESULTS / "2-cores-amd-epyc.json")["predictions_held_out"].rows:
        if found.note.startswith("predicted ") and found.figure is not None:
            kinds = {"shared memory": "SHARED_MEMORY", "TCP": "TCP", "straggler": "STRAGGLER"}
            kind = kinds.get(found.what.split(", ", 2)[2], "LINK")
            errors.setdefault(kind, []).append(abs(float(found.note.split()[1]) / found.figure - 1))
    assert sum(map(len, errors.values())) == len(HELD_OUT)
    for kind, its in errors.items():
        # In whole percents; the table has rounded both figures.
        assert getattr(rehearsable, kind) == pytest.approx(nine_of_ten(its), abs=0.011), kind


def test_errors_and_regret() -> None:
    cases = {"Sandblaster": (1.05, 1.0), "AllReduce": (1.0, 1.25), "Downpour": (2.4, 2.4)}
    found = [Outcome(Case("char", name, "TCP"), *(guess, Figure(t, t, t))) for name, (guess, t) in cases.items()]
    median, nine, regret = summary(found)
    assert (median.figure, nine.figure, regret.figure) == pytest.approx((5.0, 20.0, 1.25))
    assert regret.note == "char, TCP: AllReduce instead of Sandblaster, 1.25"
