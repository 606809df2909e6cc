"""How server groups agree: every update reaches the master once, and averaging keeps the sum."""

import random

import pytest
import torch
from exchanging_groups import BUCKETS, Groups, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.core.protocol import Delta, MasterValue, PairOffer, PairReply
from topotrain.core.server.group_sync import MasterSync, RingSync


def master(group, values, freq):
    return MasterSync(group, values, freq)


def ring_of(count):
    return lambda group, values, freq: RingSync(group, count, values, freq)


@given(st.integers(1, 3), st.integers(0, 30), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
@settings(max_examples=examples(80))
def test_the_masters_have_every_update_exactly_once(freq, updates, seed, duplicates):
    rng, groups = random.Random(seed), Groups(3, master, freq)
    total = walk(groups, rng, updates, duplicates)
    groups.drain(rng, duplicates)
    for bucket in BUCKETS:
        assert torch.equal(groups.view(bucket.master)(bucket.id), torch.full((64,), float(total)))


@given(st.integers(2, 3), st.integers(1, 3), st.integers(0, 20), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
@settings(max_examples=examples(80))
def test_averaging_keeps_the_sum_over_the_groups(count, freq, updates, seed, duplicates):
    rng, groups = random.Random(seed), Groups(count, ring_of(count), freq)
    for value in groups.values:
        value.zero_()
    total = walk(groups, rng, updates, duplicates)
    groups.drain(rng, duplicates)
    torch.testing.assert_close(sum(groups.values), torch.full((192,), float(total)))


def test_defect_2_updates_between_a_request_and_its_reply_are_kept():
    """By hand: 2 is sent, 5 comes while the reply is under way, and both are in the end at both."""
    groups = Groups(2, master)
    groups.update(1, 2, [0])  # master of bucket 0 is group 0
    groups.update(1, 5, [0])
    assert len(groups.ways[1, 0]) == 1  # no second one while the first is out
    groups.deliver((1, 0))
    groups.deliver((0, 1))
    assert groups.view(0)(0)[0] == 2 and groups.view(1)(0)[0] == 7
    groups.deliver((1, 0))
    groups.deliver((0, 1))
    assert groups.view(0)(0)[0] == groups.view(1)(0)[0] == 7


def test_sync_freq_counts_local_updates():
    groups = Groups(2, master, freq=3)
    for expected in (0, 0, 1):
        groups.update(1, 1, [0])
        assert len(groups.ways[1, 0]) == expected


def test_an_early_delta_waits_for_the_one_before():
    groups = Groups(2, master)
    body = torch.ones(64)
    agreement = groups.agreements[0]
    assert agreement.meet(1, Delta(0, 2), body) == []
    assert torch.equal(groups.values[0], torch.zeros(192))
    ((to, reply),) = agreement.meet(1, Delta(0, 1), body)
    assert (to, reply) == (1, MasterValue(0, 1))
    assert groups.view(0)(0)[0] == 1


def test_an_old_reply_changes_nothing():
    groups = Groups(2, master)
    groups.update(1, 2, [0])
    for sync in (0, 2):
        assert groups.agreements[1].meet(0, MasterValue(0, sync), torch.full((64,), 99.0)) == []
    assert groups.view(1)(0)[0] == 2


def test_both_neighbors_hold_the_average():
    groups = Groups(2, ring_of(2))
    groups.view(0)(0).fill_(6.0)
    groups.update(1, 2, [0])
    (offer,) = groups.ways[1, 0]
    assert offer == PairOffer(0, 1, updates=1)
    groups.deliver((1, 0))
    assert groups.view(0)(0)[0] == 4 and groups.ways[0, 1][0] == PairReply(0, 1)
    groups.update(1, 1, [0])  # meanwhile: stays on top
    groups.deliver((0, 1))
    assert groups.view(1)(0)[0] == 5


def test_drained_only_when_everything_was_answered():
    groups = Groups(2, master)
    agreement = groups.agreements[1]
    groups.update(1, 2, [0])
    assert agreement.drain() == [] and not agreement.drained()
    groups.update(1, 3, [0])
    groups.deliver((1, 0))
    groups.deliver((0, 1))  # the rest leaves at once, whatever sync_freq says
    assert not agreement.drained()
    groups.deliver((1, 0))
    groups.deliver((0, 1))
    assert agreement.drained()
    assert groups.view(0)(0)[0] == 5


def test_an_exchange_with_a_master_tells_versions_and_norm():
    """Group 1 makes 2 updates, group 0 makes 3 meanwhile: each lacks the other's."""
    groups = Groups(2, master, freq=2)
    mine, other = (each.distance for each in groups.agreements)

    def exchange() -> None:
        for _ in range(2):
            groups.update(1, 1, [0])
        groups.deliver((1, 0), twice=True)  # said twice, it counts once
        while groups.ways[0, 1]:
            groups.deliver((0, 1))

    for _ in range(3):
        groups.update(0, 1, [0])
    exchange()
    assert (mine.exchanges, mine.updates, mine.most) == (1, 2, 2)
    assert mine.share == pytest.approx(2 / 5)  # each of 64 elements is 5 now, and 2 of it was not here
    assert (other.exchanges, other.mean, other.most) == (1, 3.0, 3)
    assert other.share == pytest.approx(3 / 5)
    exchange()
    assert (other.exchanges, other.updates) == (2, 3), "nothing new of others the second time"
