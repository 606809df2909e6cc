"""The canonical sum, and what one group has staged for its step."""

from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.sharding import Parameter, cut
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.protocol import NO_REVISION, BackwardEnd, Commit, GradientOverride, Push, bits_to_int, int_to_bits
from topotrain.core.server.gradients.backward_means import ReturnedMeans
from topotrain.core.server.gradients.committed_pushes import CommittedPushes
from topotrain.core.server.gradients.gradient_source import GroupBuffers, ReducedBackward, SourceSettings, StepError
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean

SIZE = 100


def parts_of(workers, seed=0, weights=None):
    rng = torch.Generator().manual_seed(seed)
    return {
        w: (1.0 if weights is None else weights[w], torch.randn(SIZE, generator=rng) * 10.0 ** (w % 3))
        for w in range(workers)
    }


def mean_of(parts, tree, divide=True):
    out = torch.full((SIZE,), float("nan"))
    scratch = ScratchBuffers()
    canonical_mean(parts, tree, out, scratch, divide)
    return out


# --- the sum -----------------------------------------------------------------------------------------------------


def test_the_sum_is_nested_by_unit_in_any_order_of_arrival():
    parts, tree = parts_of(5), ((0, 1), (2, 3), (4,))
    a, b, c, d, e = (grad for _, grad in parts.values())
    assert torch.equal(mean_of(parts, tree, divide=False), ((a + b) + (c + d)) + e)
    assert torch.equal(mean_of(parts, ((0,), (1, 2, 3, 4))), (a + (((b + c) + d) + e)) / 5)
    assert torch.equal(mean_of(parts, ((0, 1, 2, 3, 4),)), ((((a + b) + c) + d) + e) / 5)
    mean = mean_of(parts, tree)
    assert not torch.equal(mean, mean_of(parts, ((0, 1, 2, 3, 4),)))
    assert not torch.equal(mean, mean_of(parts, tree[::-1]))
    for order in permutations(range(5)):
        assert torch.equal(mean, mean_of({w: parts[w] for w in order}, tree))


@pytest.mark.parametrize("weights", [(1e16, 1.0, 1.0), (0.1, 0.2, 0.3)])
def test_the_sum_of_the_weights_has_the_same_bits_in_any_order_of_arrival(weights):
    """Weights of `tt.weight` are any numbers. In float64 the last bit of their sum is in the mean."""
    parts = {w: (weight, torch.arange(1.0, 40.0, dtype=torch.float64)) for w, weight in enumerate(weights)}
    for tree in (((0, 1, 2),), ((0,), (1, 2))):
        found = set()
        for order in permutations(range(3)):
            out = torch.empty(39, dtype=torch.float64)
            canonical_mean({w: parts[w] for w in order}, tree, out, ScratchBuffers())
            found.add(out.numpy().tobytes())
        assert len(found) == 1


def test_equal_weights_divide_and_do_not_multiply_and_unequal_ones_weigh():
    parts = parts_of(3, weights=(4.0, 4.0, 4.0))
    a, b, c = (grad for _, grad in parts.values())
    mean = mean_of(parts, ((0, 1, 2),))
    assert torch.equal(mean, ((a + b) + c) / 3)
    assert not torch.equal(mean, ((a + b) + c) * (1 / 3))
    parts = parts_of(4, weights=(1.0, 2.0, 3.0, 0.5))
    a, b, c, d = (grad for _, grad in parts.values())
    expected = ((a * 1.0 + b * 2.0) + (c * 3.0 + d * 0.5)) / 6.5
    assert torch.equal(mean_of(parts, ((0, 1), (2, 3))), expected)
    assert torch.equal(mean_of(parts, ((0, 1), (2, 3)), divide=False), (a + b) + (c + d))


def test_a_missing_gradient_is_zero_but_its_weight_counts_unless_it_is_0():
    parts = parts_of(3)
    a, _, c = (grad for _, grad in parts.values())
    parts[1] = (1.0, None)
    assert torch.equal(mean_of(parts, ((0, 1), (2,))), (a + c) / 3)
    parts[1] = (2.0, None)
    assert torch.equal(mean_of(parts, ((0, 1), (2,))), (a * 1.0 + c * 1.0) / 4)
    parts[1] = (0.0, torch.full((SIZE,), float("nan")))
    assert torch.equal(mean_of(parts, ((0, 1, 2),)), (a + c) / 2)
    assert torch.equal(mean_of({1: parts[1]}, ((0, 1, 2),)), torch.zeros(SIZE))
    assert torch.equal(mean_of({0: (1.0, None)}, ((0,),)), torch.zeros(SIZE))


@given(st.binary(max_size=9), st.integers(0, 40))
def test_bitmaps_travel(raw, extra):
    value = bits_to_int(raw)
    assert bits_to_int(int_to_bits(value, value.bit_length() + extra)) == value


# --- a step ------------------------------------------------------------------------------------------------------


def buffers(slice_map):
    return GroupBuffers(FlatBuffers(slice_map, 0, PrivateMemory()), 0)


class Group:
    """A staging over two buckets (of one piece each, but for the second, which has two), and what its workers say."""

    def __init__(self, workers=2, visible=True, tree=None, divide=True):
        shapes = (("a", 64), ("b", 30), ("c", 34))
        parameters = [Parameter(name, (count,), (1,), "float32", True) for name, count in shapes]
        self.map = cut(parameters, 1, bucket_bytes=512)
        self.buckets = self.map.buckets
        assert [len(b.pieces) for b in self.buckets] == [1, 2]
        self.buffers = buffers(self.map)
        tree = tree or (tuple(range(workers)),)
        settings = SourceSettings(workers, tree, self.buckets, self.buffers, visible, divide)
        self.staging = ReturnedMeans(settings) if visible else CommittedPushes(settings)
        self.workers, self.divide = workers, divide

    def view(self, name, bucket):
        return self.buffers.view(name, bucket)

    def push(self, worker, bucket, value, ordinal=0, weight=1.0, present=None):
        present = present if present is not None else (1 << len(self.buckets[bucket].pieces)) - 1
        body = torch.full((self.buckets[bucket].hi - self.buckets[bucket].lo,), float(value))
        return self.staging.push(worker, Push(self.staging.step, ordinal, bucket, weight, bytes([present])), body)

    def end(self, worker, pushed, ordinal=0, weight=1.0, absent=False):
        message = BackwardEnd(self.staging.step, ordinal, weight, bytes([pushed]), absent=absent)
        return self.staging.end(worker, message)

    def backward(self, values, ordinal=0):
        for worker, value in enumerate(values):
            for bucket in (0, 1):
                self.push(worker, bucket, value, ordinal)
            self.end(worker, 0b11, ordinal)

    def commit(self, worker, **changes):
        commit = Commit(
            step=self.staging.step,
            backwards=1,
            weight=1.0,
            inv_scale=1.0,
            check_finite=False,
            clip_norm=0.0,
            clip_type=2.0,
            fetch=True,
            revisions=b"",
            edited=b"",
            dropped=b"",
            hyper=b"",
            marks=(),
        )
        self.staging.commit(worker, replace(commit, **changes))

    def commit_all(self, **changes):
        for worker in range(self.workers):
            self.commit(worker, **changes)
        return self.staging.try_stage()

    def gradient(self, bucket):
        return self.staging.gradient(self.buckets[bucket])

    def present(self):
        return [self.staging.present(bucket) for bucket in self.buckets]


def shuffled(rng, sayings):
    """In any order, and some of them twice."""
    sayings = [*sayings, *rng.choices(sayings, k=4)]
    rng.shuffle(sayings)
    return sayings


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(100))
def test_each_backward_gives_means_and_the_step_is_their_sum_in_any_order_of_arrival(rng):
    """Whole numbers of two workers, so that no order of sums changes a bit."""
    group = Group(2, divide=rng.random() < 0.5)
    backwards = rng.randint(1, 2)
    values = {
        (worker, ordinal, bucket): rng.choice([None, 2.0, 4.0, 6.0])
        for worker in range(2) for ordinal in range(backwards) for bucket in (0, 1)
    }  # fmt: skip
    sayings = [partial(group.push, w, b, value, o) for (w, o, b), value in values.items() if value is not None]
    for worker in range(2):
        for ordinal in range(backwards):
            pushed = sum(1 << b for b in (0, 1) if values[worker, ordinal, b] is not None)
            sayings.append(partial(group.end, worker, pushed, ordinal))
        sayings.append(partial(group.commit, worker, backwards=backwards))
    staged, means = 0, {}
    for saying in shuffled(rng, sayings):
        for ready in saying() or ():
            key = saying.args[-1], ready.bucket
            assert key not in means, "it is ready once"
            means[key] = ready.mean.clone()
        staged += group.staging.try_stage()
    assert staged == 1
    for bucket in (0, 1):
        there = [o for o in range(backwards) if any(values[w, o, bucket] is not None for w in range(2))]
        parts = {o: sum(values[w, o, bucket] or 0.0 for w in range(2)) / (2 if group.divide else 1) for o in there}
        assert {o for o, b in means if b == bucket} == set(there)
        assert all(means[o, bucket].eq(parts[o]).all() for o in there)
        assert bool(group.present()[bucket]) is bool(there)
        assert not there or group.gradient(bucket).eq(sum(parts.values())).all()
    for ordinal in range(backwards):
        bits = sum(1 << b for o, b in means if o == ordinal)
        assert group.staging.closed(ordinal) == ReducedBackward(bits, 0) and group.staging.closed(ordinal) is None


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(100))
def test_a_commit_names_the_last_push_of_each_worker_and_earlier_ones_do_not_count(rng):
    """To the bit: the mean of the named pushes in the canonical order, with the weights of the commits."""
    tree = ((0, 1), (2,))
    group, bodies = Group(3, visible=False, tree=tree), parts_of(9, rng.randrange(100))
    sayings, parts = [], {}
    for worker in range(3):
        weight, ordinals = rng.choice([1.0, 2.0, 3.0]), sorted(rng.sample(range(1, 4), rng.randint(0, 3)))
        for ordinal in ordinals:
            body = bodies[3 * worker + ordinal - 1][1][:64]
            sayings.append(partial(group.staging.push, worker, Push(0, ordinal, 0, 9.0, b"\x01"), body))
        named = ordinals[-1] if ordinals and rng.random() < 0.8 else NO_REVISION
        parts[worker] = weight, None if named == NO_REVISION else body
        sayings.append(partial(group.commit, worker, revisions=bytes([named, NO_REVISION]), weight=weight))
    staged = 0
    for saying in shuffled(rng, sayings):
        saying()
        staged += group.staging.try_stage()
    assert staged == 1
    wanted = torch.empty(64)
    canonical_mean(parts, tree, wanted, ScratchBuffers())
    there = any(body is not None for _, body in parts.values())
    assert group.present() == [int(there), 0]
    assert not there or torch.equal(group.gradient(0), wanted)


def test_a_shard_without_buckets_waits_for_the_end_of_a_backward_too():
    empty = ReturnedMeans(SourceSettings(2, ((0, 1),), (), buffers(Group().map), visible=True))
    empty.end(0, BackwardEnd(0, 0, 1.0, b""))
    assert empty.closed(0) is None
    empty.end(1, BackwardEnd(0, 0, 1.0, b""))
    assert empty.closed(0) == ReducedBackward(0, 0)


def test_edits_are_written_over_the_sum_piece_by_piece():
    group = Group(2)
    group.backward((1, 3))
    for worker in (0, 1):
        group.commit(worker, edited=bytes([0b100]), dropped=bytes([0b001]))
    assert not group.staging.try_stage()
    group.staging.edit(GradientOverride(0, 1), torch.full((128,), 9.0))
    assert group.staging.try_stage()
    assert group.present() == [0, 0b11]
    gradient = group.gradient(1)
    assert torch.equal(gradient[:30], torch.full((30,), 2.0))
    assert torch.equal(gradient[64:98], torch.full((34,), 9.0))


def test_the_next_step_begins_with_nothing():
    group = Group(2)
    group.backward((1, 3))
    group.commit_all(dropped=bytes([0b110]))
    group.staging.next_step()
    assert group.staging.step == 1
    assert not group.staging.staged and not group.staging.waits
    for worker in (0, 1):
        group.end(worker, 0)
    assert group.commit_all()
    assert group.present() == [0, 0]


def test_weights_are_those_of_the_pushes_and_sums_are_not_divided():
    for divide, expected in ((True, 2.0), (False, 6.0)):
        group = Group(2, divide=divide)
        group.push(0, 0, 1, weight=3.0)
        (ready,) = group.push(1, 0, 5, weight=1.0)
        assert torch.equal(ready.mean, torch.full((64,), expected))


# --- disagreement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_a_committed_worker_joins_a_backward_of_another_whichever_comes_first(late):
    group = Group(2)
    group.backward((1, 1))
    for say in reversed((lambda: group.commit(0), lambda: group.push(1, 0, 1, ordinal=1))[:: 1 if late else -1]):
        say()
    assert list(group.staging.take_joins()) == [(0, 1)] and not list(group.staging.take_joins())
    group.end(1, 0b01, ordinal=1)
    group.commit(1, backwards=2)
    assert not group.staging.try_stage()
    group.end(0, 0, ordinal=1, absent=True)
    assert group.staging.closed(1) is not None
    # What the script of the absent worker has made of a gradient that it has not seen does not count.
    group.commit(0, backwards=2, edited=b"\x01")
    assert group.staging.try_stage() and group.staging.first.edited == b""


def test_a_commit_that_comes_twice_does_not_replace_that_of_a_joined_backward():
    group = Group(2)
    group.commit(0, backwards=0)
    group.push(1, 0, 1)
    group.end(1, 0b01)
    group.end(0, 0, absent=True)
    group.commit(0, backwards=0)
    assert not group.staging.commits
    group.commit(0)
    group.commit(0, backwards=0)
    assert group.staging.commits[0].backwards == 1


def test_backwards_of_different_batches_are_refused():
    group = Group(2, visible=False)
    group.commit(0, ages=(1,))
    with pytest.raises(StepError, match="workers 0 and 1 of a group take different batches into step 1"):
        group.commit(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hyper": b'[{"lr":0.1}]'}, r"hyper-parameters in step 1: lr as before and 0.1. All workers .* tt.mean"),
        ({"inv_scale": 0.5}, "the loss scale"),
        ({"edited": b"\x01"}, "which gradients the script changed"),
        ({"dropped": b"\x01"}, "set to None"),
        ({"clip_norm": 1.0}, "clipping"),
    ],
)
def test_commits_must_agree_and_the_error_names_both_workers(change, words):
    group = Group(3, visible=False)
    group.commit(0)
    with pytest.raises(StepError, match=rf"workers 0 and 2 of a group disagree about .*{words}"):
        group.commit(2, **change)


def test_which_worker_waits_for_which():
    group = Group(2)
    assert not group.staging.waits
    group.push(0, 0, 1)
    assert not group.staging.waits
    group.end(0, 0b01)
    assert group.staging.waits
    group.end(1, 0)
    group.staging.closed(0)
    assert not group.staging.waits
    group.commit(0)
    assert group.staging.waits
    group.commit(1)
    assert group.staging.try_stage() and not group.staging.waits
