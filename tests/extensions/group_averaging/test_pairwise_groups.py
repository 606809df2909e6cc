"""Elastic averaging and gossip without servers: nothing is lost or made, and no group waits for another one."""

import random
from collections import Counter, deque
from copy import deepcopy
from functools import partial

import pytest
import torch
from exchanging_groups import BUCKETS, Groups, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.job import Cluster
from topotrain.core.protocol import PairOffer
from topotrain.extensions.group_averaging.averaging_messages import PairTaken
from topotrain.extensions.group_averaging.averaging_rules import moving_rate
from topotrain.extensions.group_averaging.elastic_averaging import ElasticAveraging
from topotrain.extensions.group_averaging.gossip_averaging import GossipAveraging

EXACT = torch.float64
"""With rates of 1/2 and 1/4 these tests add a few bits at each exchange, which all fit."""
COUNTS, FREQS, UPDATES, SEEDS = st.integers(2, 3), st.integers(1, 3), st.integers(0, 15), st.integers(0, 2**32)
TWICE = st.sampled_from([0.0, 0.3])


def elastic(freq=1, rate=0.25):
    """Three groups, since the buckets have three masters."""
    return Groups(3, lambda g, values, f: ElasticAveraging(g, 3, values, f, rate), freq, dtype=EXACT)


def gossip(count=3, freq=1, seed=0):
    return Groups(count, lambda g, values, f: GossipAveraging(g, count, values, f, seed), freq, (PairTaken,), EXACT)


def center(groups, bucket):
    return groups.agreements[BUCKETS[bucket].master].centers[bucket]


def everything(groups):
    """The sum over the groups, and the centers where there are some."""
    total = sum(groups.values)
    for bucket in BUCKETS:
        if isinstance(groups.agreements[0], ElasticAveraging):
            total[bucket.lo : bucket.hi] += center(groups, bucket.id)
    return total


@given(st.sampled_from([elastic, partial(gossip, 2), gossip]), FREQS, UPDATES, SEEDS, TWICE)
@settings(max_examples=examples(160), deadline=None)
def test_the_sum_of_the_centers_and_of_all_groups_changes_by_updates_alone(make, freq, updates, seed, duplicates):
    rng, groups = random.Random(seed), make(freq=freq)
    total = walk(groups, rng, updates, duplicates)
    groups.drain(rng, duplicates)
    assert torch.equal(everything(groups), torch.full((192,), float(total), dtype=EXACT))


# --- elastic averaging -----------------------------------------------------------------------------------------------


def test_a_group_and_the_center_move_towards_each_other():
    groups = elastic()
    groups.update(1, 8, [0])  # bucket 0 has its center at group 0
    groups.deliver((1, 0))
    assert center(groups, 0)[0] == 2.0 and groups.view(0)(0)[0] == 0.0, "the master's own value is another one"
    groups.update(1, 1, [0])  # meanwhile: stays on top
    groups.deliver((0, 1))
    assert groups.view(1)(0)[0] == 8.0 - 2.0 + 1.0


def test_sync_freq_counts_the_updates_of_a_group():
    groups = elastic(freq=3)
    for expected in (0.0, 0.0, 3.0 / 4):
        groups.update(0, 1, [0])
        assert center(groups, 0)[0] == expected


def test_the_drain_is_a_last_exchange_of_every_group_with_updates():
    """The result is the center: 0.25 of 8, then 0.25 of what lies between that and 4."""
    groups = elastic(freq=9)
    groups.update(0, 8, [0])
    groups.update(1, 4, [0])
    groups.drain(random.Random(0))
    assert center(groups, 0)[0] == 2.0 + (4.0 - 2.0) / 4
    for agreement in groups.agreements:
        value = torch.ones(64, dtype=EXACT)
        assert agreement.result(0, value) is (center(groups, 0) if agreement is groups.agreements[0] else value)


def test_a_snapshot_is_the_center_after_one_more_exchange_of_every_group():
    groups = elastic(freq=9)
    groups.update(0, 8, [0])
    groups.update(1, 4, [0])
    frozen = groups.view(0)(0).clone()
    at_master = groups.agreements[0]
    at_master.begin_cut(0, frozen)
    assert frozen[0] == 2.0, "a quarter of 8, and not the 8 of the master's own copy"
    at_master.join_cut(frozen, groups.view(1)(0))
    at_master.end_cut(frozen)
    assert frozen[0] == 2.0 + (4.0 - 2.0) / 4
    assert center(groups, 0)[0] == 0.0 and groups.view(0)(0)[0] == 8.0, "training goes on as if there was none"


def test_a_snapshot_of_gossip_is_the_mean_of_all_groups():
    made = gossip(3)
    frozen = torch.full((64,), 3.0, dtype=EXACT)
    made.agreements[0].begin_cut(0, frozen)
    for value in (6.0, 12.0):
        made.agreements[0].join_cut(frozen, torch.full((64,), value, dtype=EXACT))
    made.agreements[0].end_cut(frozen)
    assert torch.equal(frozen, torch.full((64,), 7.0, dtype=EXACT))


def test_updates_during_an_exchange_leave_with_the_next_one_at_the_end():
    groups = elastic(freq=2)
    for _ in range(3):
        groups.update(1, 1, [0])
    groups.post(1, groups.agreements[1].drain())
    assert len(groups.ways[1, 0]) == 1, "one exchange of a bucket at a time"
    groups.deliver((1, 0))
    groups.deliver((0, 1))
    assert len(groups.ways[1, 0]) == 1 and not groups.agreements[1].drained()


def test_an_exchange_brings_the_updates_of_all_others():
    groups = elastic(freq=2)
    for group, times in ((0, 2), (2, 4), (1, 2)):
        for _ in range(times):
            groups.update(group, 1, [0])
            groups.run_dry(random.Random(0))
    distance = groups.agreements[1].distance
    assert (distance.exchanges, distance.updates) == (1, 6)
    # 2, and twice 2 more from a group that moves as well: the center has followed.
    assert 0 < distance.share < 2


def test_the_default_of_the_moving_rate_is_that_of_the_paper():
    assert moving_rate(Cluster(3, 3, agreement="kElastic")) == pytest.approx(0.3)
    assert moving_rate(Cluster(3, 3, agreement="kElastic", moving_rate=0.5)) == 0.5


# --- gossip ----------------------------------------------------------------------------------------------------------


class _Nothing:
    buckets = ()

    def values(self, bucket):
        raise AssertionError(bucket)


@pytest.mark.parametrize("groups", [2, 3, 5, 8])
def test_partners_are_the_other_groups_about_equally_often(groups):
    for group in range(groups):
        made = GossipAveraging(group, groups, _Nothing(), 1, seed=7)
        drawn = Counter(made.partner(0, sync) for sync in range(1, 4001))
        assert drawn.keys() == set(range(groups)) - {group}
        assert all(abs(count * (groups - 1) / 4000 - 1) < 0.15 for count in drawn.values()), drawn


def test_the_seed_of_the_job_decides_the_partners_of_all_buckets():
    def drawn(seed, bucket=0, group=1):
        made = GossipAveraging(group, 5, _Nothing(), 1, seed)
        return [made.partner(bucket, sync) for sync in range(1, 100)]

    assert drawn(3) == drawn(3) == drawn(3, bucket=9)
    assert drawn(3) != drawn(4) and drawn(3) != drawn(3, group=2)


def test_a_reply_that_has_arrived_is_not_kept():
    groups = gossip(2)
    groups.update(0, 2, [0])
    (offer,) = groups.ways[0, 1]
    assert isinstance(offer, PairOffer)
    groups.deliver((0, 1))
    kept = groups.agreements[1].state_dict()["answers"]
    assert kept[0, 0][1] is not None, "for an offer that comes twice"
    groups.run_dry(random.Random(0))
    assert groups.agreements[1].state_dict()["answers"][0, 0][1] is None
    before = [value.clone() for value in groups.values]
    assert groups.agreements[1].meet(0, offer, offer.body.clone()) == []
    assert all(map(torch.equal, before, groups.values))


def test_a_repeated_reply_tells_on_which_side_of_a_snapshot_the_value_moved():
    """The group that awaits it may hear the repeated one first."""
    groups = gossip(2)
    groups.update(0, 2, [0])
    (offer,) = groups.ways[0, 1]
    partner = groups.agreements[1]
    ((_, first),) = partner.meet(0, offer, offer.body.clone())
    partner.mark(5)
    ((_, again),) = partner.meet(0, offer, offer.body.clone())
    assert (first.cut, again.cut) == (0, 0) and torch.equal(first.body, again.body)
    groups.update(1, 2, [1])
    assert groups.ways[1, 0][-1].cut == 5, "an exchange from behind the snapshot"


@pytest.mark.parametrize("make", [elastic, gossip])
def test_a_second_copy_goes_on_as_the_first_one_would(make):
    for seed in range(10):
        groups, other = make(), make()
        walk(groups, random.Random(seed), 9, 0.3)
        for mine, theirs in zip(other.agreements, groups.agreements, strict=True):
            mine.load_state_dict(deepcopy(theirs.state_dict()))
        for mine, theirs in zip(other.values, groups.values, strict=True):
            mine.copy_(theirs)
        other.ways = {way: deque(queue) for way, queue in groups.ways.items()}
        for each in (groups, other):
            walk(each, random.Random(-1 - seed), 9, 0.3)
            each.drain(random.Random(seed))
        assert all(map(torch.equal, other.values, groups.values))
        assert torch.equal(everything(other), everything(groups))
        for mine, theirs in zip(other.agreements, groups.agreements, strict=True):
            assert mine.distance == theirs.distance
