"""Elastic averaging and gossip on the simulated network: whole jobs, their deaths, and their snapshots."""

from dataclasses import replace

import pytest
import torch
from seeded_runs import LAYOUTS, run_seeds, run_trial, schedule_of
from simulation import STORM, VIEWS, ScriptedCluster, job, parameters

from topotrain.config.job import Agreement
from topotrain.core.server.group_sync import PairwiseSync
from topotrain.extensions.checkpointing.averaging_cut import AveragingCut
from topotrain.extensions.checkpointing.snapshot_messages import Remainder
from topotrain.extensions.group_averaging.elastic_averaging import ElasticAveraging
from topotrain.extensions.group_averaging.gossip_averaging import GossipAveraging
from topotrain.tools.simulator.fault_schedule import FAR, FaultSchedule

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


@pytest.mark.parametrize("freq", [1, 3])
@pytest.mark.parametrize("weather", [STORM, VIEWS, FAR], ids=["storm", "views", "far"])
def test_the_result_is_the_center_and_no_update_is_lost(freq, weather):
    """The sum of the center and the groups has the start of all four, and every update once."""
    for seed in range(6):
        more = {"nserver_groups": GROUPS, "sync_freq": freq, "agreement": Agreement.kElastic, "moving_rate": 0.25}
        cluster = ScriptedCluster(job(GROUPS, 1, 2, **more), seed, weather, DOUBLE)
        _, pushed, final = cluster.train(4, SCALE)
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
                    wanted = (GROUPS + 1) * START - parts(cluster, bucket, pushed)
                    assert same_where_known(found, wanted), f"seed {seed}"


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
    _, pushed, final = cluster.train(20, SCALE)
    assert met == [20]
    if kind is Agreement.kGossip:
        assert all(torch.allclose(end, START - gone / 3, rtol=1e-12) for end, gone in zip(final, pushed, strict=True))


def test_a_job_is_the_same_twice_and_another_with_another_seed():
    def run(seed: int) -> list[torch.Tensor]:
        made = job(4, 1, 1, nserver_groups=4, agreement=Agreement.kGossip, seed=seed)
        cluster = ScriptedCluster(made, 1, STORM, DOUBLE)
        cluster.train(3, SCALE)
        return cluster.values(1)

    assert all(map(torch.equal, run(5), run(5)))
    assert not all(map(torch.equal, run(5), run(6)))


# --- faults, snapshots, and what each rule is for --------------------------------------------------------------------

NAMES = ("ring average", "elastic averaging", "gossip")


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_counts_once_under_faults(name):
    kills = crashes = snapshots = 0
    for verdict in run_seeds(range(40), name=name):
        assert not verdict.wrong, f"tests/support/simulate.py --layout '{name}' --seed {verdict.seed}: {verdict.wrong}"
        kills, crashes, snapshots = kills + verdict.kills, crashes + verdict.crashes, snapshots + verdict.snapshots
    assert kills and crashes and snapshots


def nothing_held(patch):
    """What a group exchanges behind its cut is taken by a group that is before its own."""
    is_early = AveragingCut._is_early
    # Not those of snapshots themselves: without them no snapshot is completed, and none could be wrong.
    patch.setattr(
        AveragingCut, "_is_early", lambda self, message: isinstance(message, Remainder) and is_early(self, message)
    )


def replies_left_out(patch):
    """What was in replies at the cut is in no group's part of it."""
    complete = AveragingCut._complete_value

    def without(self, message, change):
        complete(self, message, torch.zeros_like(change))

    patch.setattr(AveragingCut, "_complete_value", without)


def replies_not_awaited(patch):
    """A group does not wait for the reply that is under way when it freezes."""
    patch.setattr(PairwiseSync, "waits", lambda self, bucket: False)


def all_replies_added(patch):
    """Replies from behind the cut are in the snapshot, too."""
    complete = AveragingCut._complete_value

    def with_all(self, message, change):
        complete(self, replace(message, cut=-1), change)

    patch.setattr(AveragingCut, "_complete_value", with_all)


def taken_for_the_mean(patch):
    """Values of the groups are added up, and not divided."""
    patch.setattr(PairwiseSync, "end_cut", lambda self, frozen: None)


def repeated_replies_added(patch):
    """A reply that comes twice moves the value twice."""
    patch.setattr(PairwiseSync, "awaits", lambda self, message: True)


def repeated_offers_answered_anew(patch):
    """An offer that comes twice moves the partner twice."""
    average = PairwiseSync._average

    def anew(self, group, message, body):
        self._answers.pop((group, message.bucket), None)
        return average(self, group, message, body)

    patch.setattr(PairwiseSync, "_average", anew)


def own_value_is_the_result(patch):
    """The center is forgotten at the end of the job."""
    patch.setattr(ElasticAveraging, "_offered_to", lambda self, bucket: self._view(bucket))


def forgotten_too_soon(patch):
    """A reply is forgotten at once, and an offer that comes twice is a new one."""

    def forget(self, group, message):
        self._answers.pop((group, message.bucket), None)

    patch.setattr(GossipAveraging, "forget_reply", forget)


MUTANTS = [
    (nothing_held, "gossip"),
    (nothing_held, "elastic averaging"),
    (replies_left_out, "gossip"),
    (replies_not_awaited, "gossip"),
    (all_replies_added, "ring average"),
    (taken_for_the_mean, "ring average"),
    (repeated_replies_added, "elastic averaging"),
    (repeated_offers_answered_anew, "elastic averaging"),
    (own_value_is_the_result, "elastic averaging"),
    (forgotten_too_soon, "gossip"),
]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=[f"{row[0].__name__}, {row[1]}" for row in MUTANTS])
def test_each_rule_of_averaging_is_needed(mutant, name, monkeypatch):
    mutant(monkeypatch)
    job = LAYOUTS[name]
    # Many batches, a snapshot between any few of them, and messages that take long or come twice.
    busy = (FaultSchedule(net, 40, 1, "lease", True, (), every=0.01) for net in ("far", "echo", "storm") * 7)
    drawn = (schedule_of(job, name, seed) for seed in range(60))
    found = (run_trial(job, name, seed, schedule) for seed, schedule in enumerate((*busy, *drawn)))
    assert any(verdict.wrong for verdict in found), "it makes no difference"


@pytest.mark.parametrize("name", NAMES)
def test_snapshots_in_quick_succession_are_right(name):
    found = [
        run_trial(LAYOUTS[name], name, seed, FaultSchedule(net, 40, 1, "lease", True, (), every=0.01))
        for seed, net in enumerate(("far", "echo", "storm") * 2)
    ]
    assert not [verdict.wrong for verdict in found if verdict.wrong]
    assert sum(verdict.snapshots for verdict in found) > 10
