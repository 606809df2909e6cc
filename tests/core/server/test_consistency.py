"""Clocks, the list of decisions, and exactly-once streams."""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topotrain.core.protocol import StepDecision, StepVote
from topotrain.core.server.consistency import RESTARTS, AppliedBatches, ApplyOrder, Clocks, DecisionLog


def staged(group, step, finite=True, power=0.0, infinity=False, applied=0):
    return StepVote(group, step, finite, power, infinity, applied)


# --- clocks ------------------------------------------------------------------------------------------------------


def test_unset_is_unbounded_and_0_is_a_barrier_in_group_order():
    free, barrier = Clocks((0, 1), None), Clocks((0, 1), 0)
    for _ in range(9):
        free.tick(0)
    assert free.may_start(0) and free.may_decide(1)
    assert barrier.may_decide(0) and not barrier.may_decide(1)
    barrier.tick(0)
    assert barrier.may_decide(1) and not barrier.may_start(0)
    barrier.tick(1)
    assert barrier.may_start(0) and barrier.may_start(1)


def test_who_is_back_stands_where_the_slowest_of_the_others_stands():
    clocks = Clocks((0, 1), 2)
    clocks.leave(1)
    for _ in range(5):
        clocks.tick(0)
    clocks.join(1)
    assert clocks.clock(1) == 5 and clocks.live() == [0, 1]
    clocks.join(1)
    clocks.tick(1)
    assert clocks.clock(1) == 6
    clocks.leave(1)
    clocks.join(1)
    assert clocks.clock(1) == 6  # never back


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 2**32))
def test_groups_that_start_only_when_they_may_never_lead_by_more_than_the_bound(groups, bound, seed):
    """One step more is under way: what starts at a lead of `bound` ends at `bound` + 1."""
    rng, clocks = random.Random(seed), Clocks(range(groups), bound)
    for _ in range(60):
        ready = [g for g in clocks.live() if clocks.may_start(g)]
        assert ready, "somebody may always go on"
        clocks.tick(rng.choice(ready))
        assert max(clocks.lead(g) for g in range(groups)) <= bound + 1


# --- decisions ---------------------------------------------------------------------------------------------------


def test_a_decision_has_what_all_shards_have_found():
    log = DecisionLog(3)
    for shard, measured in ((2, b"c"), (0, b"a"), (2, b"again"), (1, b"")):
        log.staged(shard, replace(staged(0, 0, finite=shard != 1, power=9.0 + shard), measured=measured))
    found = log.decide(0, 0)
    assert found.measured == b"ac", "in the order of the shards"
    assert found.found_inf, "one shard that overflows skips the step on all"
    assert found.power == 30.0
    for shard in range(3):
        log.staged(shard, staged(0, 1, power=9.0 - shard, infinity=True))
    found = log.decide(0, 1)
    assert (found.measured, found.found_inf, found.power) == (b"", False, 9.0)
    log.staged(0, staged(0, 1))
    assert log.ready() == [], "a vote that comes again after the decision does not decide twice"


@pytest.mark.parametrize("arrival", list(permutations(range(3))))
def test_a_norm_has_the_same_bits_in_whichever_order_the_votes_come(arrival):
    powers = (1e16, 1.0, 1.0)  # 1e16 + 1 + 1 has other bits than 1 + 1 + 1e16
    log = DecisionLog(3)
    for shard in arrival:
        log.staged(shard, staged(0, 0, power=powers[shard]))
    assert log.decide(0, 0).power == sum(powers)


def test_decisions_stand_until_every_shard_has_applied_them():
    log = DecisionLog(2)
    for step in range(3):
        for shard in (0, 1):
            log.staged(shard, staged(0, step))
        log.decide(0, step)
    assert [a.step for a in log.since(0)] == [0, 1, 2]
    assert [a.step for a in log.since(2)] == [2]
    log.staged(0, staged(0, 3, applied=3))
    assert [a.step for a in log.since(0)] == [0, 1, 2]
    log.staged(1, staged(0, 3, applied=2))
    assert [a.step for a in log.since(0)] == [2]


def test_the_step_of_a_group_that_is_started_again_is_void_and_may_be_staged_anew():
    log = DecisionLog(2)
    log.staged(0, staged(0, 0, finite=False))
    log.staged(0, staged(1, 0))
    assert log.restart(0, 1) == StepDecision(0, 0, 1, False, 0.0, RESTARTS)
    assert log.restart(0, 1) is None
    log.staged(1, staged(0, 0))  # a shard that has not carried it out
    log.staged(1, staged(1, 0))
    assert log.ready() == [(1, 0)]
    for shard in (0, 1):
        assert log.ready() == [(1, 0)]
        log.staged(shard, replace(staged(0, 0), incarnation=1))
    assert not log.decide(0, 0).found_inf


@given(st.integers(1, 20), st.integers(0, 2**32))
def test_decisions_are_applied_in_their_order_and_once_however_they_come(count, seed):
    rng, order = random.Random(seed), ApplyOrder()
    applies = [StepDecision(i, 0, i, False, 0.0) for i in range(count)]
    sent = applies + rng.choices(applies, k=count)
    rng.shuffle(sent)
    assert [now for apply in sent for now in order.arrive(apply)] == applies
    assert order.next == count


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_shards_that_vote_in_any_order_get_one_list(shards, groups, steps, seed):
    """Every step of every group is decided once, the steps of a group in order, and all shards see the same."""
    rng, log = random.Random(seed), DecisionLog(shards)
    turns = [(s, g) for s in range(shards) for g in range(groups)] * steps
    rng.shuffle(turns)
    at = dict.fromkeys(turns, 0)
    waiting, decided = list(turns), []
    while waiting:
        held = []
        for shard, group in waiting:
            if at[shard, group] > sum(d.group == group for d in decided):
                held.append((shard, group))  # a shard stages the next step after it applied the last
                continue
            for _ in range(rng.randint(1, 2)):
                log.staged(shard, staged(group, at[shard, group]))
            at[shard, group] += 1
            decided += [log.decide(*ready) for ready in log.ready()]
        waiting = held
    assert [d.index for d in decided] == list(range(groups * steps))
    assert [d.step for d in decided if d.group == 0] == list(range(steps))


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [(7, 4, 4), (7, 2, 3), (8, 1, 1)])
def test_gaps_and_overlaps_are_refused(marks):
    streams = AppliedBatches()
    streams.record((7, 0, 2))
    with pytest.raises(ValueError, match=r"batches \d to \d of stream 0x[78] do not continue it: -?\d was the last"):
        streams.verdict(marks)


def test_a_push_that_is_known_in_part_is_refused():
    streams = AppliedBatches()
    streams.record((7, 0, 2))
    with pytest.raises(ValueError, match="a part was applied before"):
        streams.verdict((7, 0, 2, 8, 0, 0))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 2**32))
def test_every_batch_counts_once_if_pushes_are_sent_again(lengths, seed):
    rng, streams, counted, first = random.Random(seed), AppliedBatches(), [], 0
    said = []
    for length in lengths:
        said.append((3, first, first + length - 1))
        first += length
        for marks in [said[-1], *rng.choices(said, k=3)]:
            if streams.verdict(marks) == "new":
                streams.record(marks)
                counted += range(marks[1], marks[2] + 1)
    assert counted == list(range(first))


@given(st.integers(0, 2**32))
def test_the_lead_is_that_over_the_least_clock_whatever_happened(seed):
    rng, clocks, away = random.Random(seed), Clocks(range(4), 2), set()
    for _ in range(60):
        group = rng.randrange(4)
        match rng.randrange(5):
            case 0:
                clocks.leave(group)
                away.add(group)
            case 1:
                clocks.join(group)
                away.discard(group)
            case 2:
                clocks.load_state_dict(clocks.state_dict())
            case _:
                clocks.tick(group)
        least = min((clocks.clock(g) for g in range(4) if g not in away), default=None)
        for g in range(4):
            assert clocks.lead(g) == (0 if least is None else max(0, clocks.clock(g) - least))
