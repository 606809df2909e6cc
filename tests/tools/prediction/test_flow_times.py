"""Samples per second and step times of the flow model are near those of the exact rehearsal, on small layouts.

Both predict the same jobs from a measured probe, whose steps differ by chance. The rehearsal draws them, so that a part
of each difference is the chance of its few dozen steps.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from topotrain.config.job import Algorithm, ChangeMethod, Cluster, Job, Link, LRGen, Updater, UpdaterType
from topotrain.tools.prediction.flow_model import predict_flow
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.predict import predict
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.probe.probe_file import load_probe

PROBE = load_probe(Path(__file__).parents[3] / "examples" / "probes" / "digits.json")
MEDIAN, WORST = 0.06, 0.2
"""Bounds of the relative differences. docs/growth.md has what they are."""

OUTER = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=0.7))
ROUNDS: Mapping[str, Any] = {"nworker_groups": 4, "sync_freq": 10, "outer": OUTER}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "sandblaster": {"nworkers_per_group": 4, "nservers_per_group": 2, "server_worker_separate": True},
    "allreduce": {"nworkers_per_group": 4, "nservers_per_group": 4},
    "ring": {"nworkers_per_group": 4, "nservers_per_group": 4, "algorithm": Algorithm.kRing},
    "tree": {"nworkers_per_group": 8, "nservers_per_group": 8, "algorithm": Algorithm.kTree},
    "downpour": {"nworker_groups": 6, "nservers_per_group": 2, "server_worker_separate": True},
    "downpour that waits": {
        "nworker_groups": 4,
        "nservers_per_group": 2,
        "server_worker_separate": True,
        "max_staleness": 2,
    },
    "local steps": {
        "nworker_groups": 3,
        "n_push": 2,
        "n_fetch": 2,
        "nservers_per_group": 2,
        "server_worker_separate": True,
    },
    "hogwild": {"nworker_groups": 4, "nserver_groups": 4, "sync_freq": 4},
    "hybrid": {
        "nworker_groups": 4,
        "nworkers_per_group": 2,
        "nworkers_per_procs": 2,
        "nservers_per_group": 2,
        "server_worker_separate": True,
    },
    "diloco": {**ROUNDS, "server_worker_separate": True},
}
UNWAITED: Mapping[str, Mapping[str, Any]] = {
    "streaming": {**ROUNDS, "nservers_per_group": 4, "fragments": 2, "overlap": 4},
    "quorum": {**ROUNDS, "nservers_per_group": 4, "quorum": 2},
}
LINKS = (Link(bandwidth=1000.0, delay=1.0), Link(bandwidth=10_000.0, delay=0.1))
STRAGGLERS: tuple[Mapping[int, float], ...] = ({}, {1: 4.0})


def both(layouts: Iterable[Mapping[str, Any]]) -> Mapping[str, tuple[Prediction, Prediction]]:
    """The exact prediction and that by flows of each case."""
    found = {}
    for cluster in layouts:
        job = Job(cluster=Cluster(**cluster))
        for link in LINKS:
            for stragglers in STRAGGLERS:
                machines = Machines(link=link, stragglers=stragglers)
                pair = predict(job, PROBE, machines), predict_flow(job, PROBE, machines)
                found[f"{cluster} {link} {stragglers}"] = pair
    return found


def check(cases: Mapping[str, tuple[Prediction, Prediction]]) -> None:
    """Check samples per second, and the median of steps."""
    for facts in (
        {name: flow.samples_per_s / exact.samples_per_s - 1 for name, (exact, flow) in cases.items()},
        {name: flow.step_s / exact.step_s - 1 for name, (exact, flow) in cases.items()},
    ):
        sizes = [abs(each) for each in facts.values()]
        worst = max(facts, key=lambda name: abs(facts[name]))
        print(f"{len(sizes)} cases: median {median(sizes):.3f}, {worst}: {facts[worst]:+.3f}")
        assert median(sizes) <= MEDIAN, facts
        assert abs(facts[worst]) <= WORST, worst


@pytest.mark.simulated
def test_times_of_each_layout() -> None:
    check(both(LAYOUTS.values()))


@pytest.mark.simulated
def test_times_of_groups_that_train_on_during_an_exchange() -> None:
    check(both(UNWAITED.values()))
