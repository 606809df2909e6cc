"""How server groups agree: every update reaches the master once, and averaging keeps the sum."""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topotrain.config.sharding import Parameter, cut
from topotrain.core.protocol import Delta, MasterValue, RingOffer, RingReply
from topotrain.core.server.group_sync import MasterSync, NoSync, RingSync

MAP = cut([Parameter("w", (192,), (1,), "float32", True)], 1, groups=3)
BUCKETS = MAP.buckets  # one per master group


class Groups:
    """Server groups and what is under way between them."""

    def __init__(self, count, make, freq=1):
        self.values = [torch.zeros(192) for _ in range(count)]
        self.agreements = [make(g, self.view(g), freq) for g in range(count)]
        self.ways = {(a, b): deque() for a in range(count) for b in range(count) if a != b}
        self.said = []
        for agreement in self.agreements:
            agreement.begin()

    def view(self, group):
        return lambda bucket: self.values[group][BUCKETS[bucket].lo : BUCKETS[bucket].hi]

    def update(self, group, amount, buckets=(0, 1, 2)):
        for bucket in buckets:
            self.view(group)(bucket).add_(amount)
        self.post(group, self.agreements[group].updated(buckets))

    def post(self, sender, out):
        for to, message in out:
            # A body is a snapshot: what happens to the sender's values meanwhile does not show in it.
            self.ways[sender, to].append(message)
            self.said.append((sender, to, message, message.body.clone()))

    def deliver(self, way, twice=False):
        message = self.ways[way].popleft()
        for _ in range(1 + twice):
            self.post(way[1], self.agreements[way[1]].meet(way[0], message, message.body.clone()))

    def run_dry(self, rng, duplicates=0.0):
        while ways := [way for way, queue in self.ways.items() if queue]:
            self.deliver(rng.choice(ways), rng.random() < duplicates)

    def drain(self, rng, duplicates=0.0):
        for group, agreement in enumerate(self.agreements):
            assert not agreement.drained()
            self.post(group, agreement.drain())
        self.run_dry(rng, duplicates)
        assert all(agreement.drained() for agreement in self.agreements)
        for sender, _, message, body in self.said:
            assert torch.equal(message.body, body), f"a body of {sender} changed after it was sent"


def master(group, view, freq):
    return MasterSync(group, SimpleNamespace(buckets=BUCKETS, values=view), freq)


def ring_of(count):
    return lambda group, view, freq: RingSync(group, count, SimpleNamespace(buckets=BUCKETS, values=view), freq)


def walk(groups, rng, updates, duplicates):
    """Updates of integer size at random moments between random deliveries; returns their sum."""
    total = 0
    for _ in range(updates):
        amount = rng.randint(1, 9)
        total += amount
        groups.update(rng.randrange(len(groups.values)), amount)
        for _ in range(rng.randint(0, 3)):
            if ways := [way for way, queue in groups.ways.items() if queue]:
                groups.deliver(rng.choice(ways), rng.random() < duplicates)
    return total


@given(st.integers(1, 3), st.integers(0, 30), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
@settings(max_examples=80)
def test_the_masters_have_every_update_exactly_once(freq, updates, seed, duplicates):
    rng, groups = random.Random(seed), Groups(3, master, freq)
    total = walk(groups, rng, updates, duplicates)
    groups.drain(rng, duplicates)
    for bucket in BUCKETS:
        assert torch.equal(groups.view(bucket.master)(bucket.id), torch.full((64,), float(total)))


@given(st.integers(2, 3), st.integers(1, 3), st.integers(0, 20), st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
@settings(max_examples=80)
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


def test_a_master_sends_nothing_of_its_own_bucket():
    groups = Groups(2, master)
    groups.update(0, 1, [0])
    assert not groups.ways[0, 1]


def test_others_updates_reach_every_group_through_the_master():
    groups = Groups(3, master)
    rng = random.Random(0)
    groups.update(1, 4)
    groups.run_dry(rng)
    groups.update(2, 8)
    groups.run_dry(rng)
    assert torch.equal(groups.view(2)(0), torch.full((64,), 12.0))


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
    assert offer == RingOffer(0, 1)
    groups.deliver((1, 0))
    assert groups.view(0)(0)[0] == 4 and groups.ways[0, 1][0] == RingReply(0, 1)
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


def test_alone_there_is_nothing_to_agree():
    alone = NoSync()
    alone.begin()
    assert alone.updated([0, 1]) == alone.drain() == alone.meet(1, Delta(0, 1), torch.zeros(1)) == []
    assert alone.drained()


@pytest.mark.parametrize("groups", [2, 3])
def test_a_ring_has_two_neighbors(groups):
    made = Groups(groups, ring_of(groups))
    made.update(groups - 1, 1, [0])
    assert [way for way, queue in made.ways.items() if queue] == [(groups - 1, 0)]
