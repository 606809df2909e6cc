"""Elastic averaging and gossip on the simulated network: whole jobs, their deaths, and their snapshots."""

import pytest
import torch
from fault_schedule import FAR, FaultSchedule
from seeded_runs import LAYOUTS, run_seeds, run_trial
from seeds import seeds, soaked
from simulation import STORM, VIEWS, ScriptedCluster, job, parameters

from topotrain.config.job import Agreement
from topotrain.extensions.group_averaging.elastic_averaging import ElasticAveraging

pytestmark = pytest.mark.simulated

DOUBLE = parameters(150, 256, dtype="float64")
SCALE = float(1 << 20)
"""Multiples of it stay exact for more exchanges than these jobs have."""
GROUPS, START = 3, 7 * SCALE


def parts(cluster: ScriptedCluster, bucket, of: list[torch.Tensor]) -> torch.Tensor:
    """The elements of a bucket, out of whole parameters."""
    found = torch.full((bucket.hi - bucket.lo,), torch.nan, dtype=torch.float64)
    for piece in bucket.pieces:
        segment = cluster.map.segments[piece.segment]
        lo = segment.start + piece.lo - segment.lo
        found[bucket.place(piece)] = of[segment.parameter][lo : lo + piece.hi - piece.lo]
    return found


def same_where_known(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    known = ~wanted.isnan()  # behind the pieces there is padding
    return bool(known.any()) and torch.equal(found[known], wanted[known])


@pytest.mark.parametrize(
    ("freq", "weather"),
    soaked([(1, STORM), (3, VIEWS), (1, FAR)], [(3, STORM), (1, VIEWS), (3, FAR)]),
)
def test_the_result_is_the_center_and_no_update_is_lost(freq, weather):
    """The sum of the center and the groups has the start of all four, and every update once."""
    for seed in seeds(6):
        more = {"nserver_groups": GROUPS, "sync_freq": freq, "agreement": Agreement.kElastic, "moving_rate": 0.25}
        cluster = ScriptedCluster(job(GROUPS, 1, 2, **more), seed, weather, DOUBLE)
        wanted, final = cluster.train(4, START, SCALE)
        for shard in range(2):
            models = [cluster.server(group, shard).state.known for group in range(GROUPS)]
            for bucket in models[0].buckets:
                at_master = models[bucket.master].group_sync
                assert isinstance(at_master, ElasticAveraging)
                center = at_master.centers[bucket.id]
                assert same_where_known(center, parts(cluster, bucket, final)), f"seed {seed}"
                # Of the other buckets group 0 has the result in the place of its own values.
                if bucket.master == 0:
                    found = center + sum(model.values(bucket.id) for model in models)
                    assert same_where_known(found, GROUPS * START + parts(cluster, bucket, wanted)), f"seed {seed}"


@pytest.mark.parametrize("kind", [Agreement.kElastic, Agreement.kGossip])
def test_no_group_waits_for_another_one(kind):
    """Group 1 is away for a while; the others make all their steps, and in the end nothing is missing."""
    cluster = ScriptedCluster(job(3, 1, 1, nserver_groups=3, agreement=kind), 1, None, DOUBLE)
    away, home = cluster.server(1, 0).me, cluster.server(0, 0)
    cluster.sim.at(0.02, lambda: cluster.transport.pause(away))
    met: list[int] = []

    def back() -> None:
        met.append(home.state.version)
        cluster.transport.resume(away)

    cluster.sim.at(10.0, back)
    wanted, final = cluster.train(20, START, SCALE)
    assert met == [20]
    if kind is Agreement.kGossip:
        means = [START - (START - part) / 3 for part in wanted]
        assert all(torch.allclose(end, mean, rtol=1e-12) for end, mean in zip(final, means, strict=True))


# --- faults and snapshots --------------------------------------------------------------------

NAMES = ("ring average", "elastic averaging", "gossip")


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_counts_once_under_faults(name):
    kills = crashes = snapshots = 0
    for verdict in run_seeds(seeds(40), name=name):
        assert not verdict.wrong, f"tests/support/simulate.py --layout '{name}' --seed {verdict.seed}: {verdict.wrong}"
        kills, crashes, snapshots = kills + verdict.kills, crashes + verdict.crashes, snapshots + verdict.snapshots
    assert kills and crashes and snapshots


@pytest.mark.parametrize("name", NAMES)
def test_snapshots_in_quick_succession_are_right(name):
    found = [
        run_trial(LAYOUTS[name], name, seed, FaultSchedule(net, 40, 1, "lease", True, (), every=0.01))
        for seed, net in enumerate(("far", "echo", "storm") * 2)
    ]
    assert not [verdict.wrong for verdict in found if verdict.wrong]
    assert sum(verdict.snapshots for verdict in found) > 10
