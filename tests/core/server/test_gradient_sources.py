"""The canonical sum, and what one group has staged for its step."""

import random
from dataclasses import replace
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


def test_the_sum_is_nested_by_unit():
    parts = parts_of(5)
    a, b, c, d, e = (grad for _, grad in parts.values())
    assert torch.equal(mean_of(parts, ((0, 1), (2, 3), (4,)), divide=False), ((a + b) + (c + d)) + e)
    assert torch.equal(mean_of(parts, ((0,), (1, 2, 3, 4))), (a + (((b + c) + d) + e)) / 5)
    assert torch.equal(mean_of(parts, ((0, 1, 2, 3, 4),)), ((((a + b) + c) + d) + e) / 5)


def test_another_tree_has_other_bits_and_another_order_of_arrival_the_same():
    parts = parts_of(5)
    mean = mean_of(parts, ((0, 1), (2, 3), (4,)))
    assert not torch.equal(mean, mean_of(parts, ((0, 1, 2, 3, 4),)))
    assert not torch.equal(mean, mean_of(parts, ((4,), (2, 3), (0, 1))))
    for order in permutations(range(5)):
        assert torch.equal(mean, mean_of({w: parts[w] for w in order}, ((0, 1), (2, 3), (4,))))


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


def test_equal_weights_divide_and_do_not_multiply():
    parts = parts_of(3, weights=(4.0, 4.0, 4.0))
    a, b, c = (grad for _, grad in parts.values())
    mean = mean_of(parts, ((0, 1, 2),))
    assert torch.equal(mean, ((a + b) + c) / 3)
    assert not torch.equal(mean, ((a + b) + c) * (1 / 3))


def test_unequal_weights():
    parts = parts_of(4, weights=(1.0, 2.0, 3.0, 0.5))
    a, b, c, d = (grad for _, grad in parts.values())
    expected = ((a * 1.0 + b * 2.0) + (c * 3.0 + d * 0.5)) / 6.5
    assert torch.equal(mean_of(parts, ((0, 1), (2, 3))), expected)
    assert torch.equal(mean_of(parts, ((0, 1), (2, 3)), divide=False), (a + b) + (c + d))


def test_a_missing_gradient_is_zero_but_its_weight_counts():
    parts = parts_of(3)
    a, _, c = (grad for _, grad in parts.values())
    parts[1] = (1.0, None)
    assert torch.equal(mean_of(parts, ((0, 1), (2,))), (a + c) / 3)
    parts[1] = (2.0, None)
    assert torch.equal(mean_of(parts, ((0, 1), (2,))), (a * 1.0 + c * 1.0) / 4)


def test_weight_0_does_not_count_at_all():
    parts = parts_of(3, weights=(2.0, 0.0, 2.0))
    parts[1] = (0.0, torch.full((SIZE,), float("nan")))
    a, c = parts[0][1], parts[2][1]
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
        self.workers = workers

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


def test_a_mean_is_ready_when_every_part_is_there():
    group = Group(3)
    assert group.push(2, 0, 9) == group.push(0, 0, 3) == ()
    (ready,) = group.push(1, 0, 6)
    assert (ready.bucket, ready.present) == (0, 1)
    assert torch.equal(ready.mean, torch.full((64,), 6.0))
    assert group.push(1, 0, 60) == ()
    assert torch.equal(ready.mean, torch.full((64,), 6.0))


def test_what_a_worker_did_not_push_by_the_end_it_does_not_have():
    group = Group(3)
    group.push(0, 1, 3, present=0b01)
    group.push(2, 1, 6, present=0b10)
    assert group.end(0, 0b10) == group.end(2, 0b10) == ()
    (ready,) = group.end(1, 0)
    assert (ready.bucket, ready.present) == (1, 0b11)
    assert torch.equal(ready.mean, torch.full((128,), 3.0))
    assert group.staging.closed(0) == ReducedBackward(0b10, 0)
    assert group.staging.closed(0) is None
    group.commit_all()
    assert group.present() == [0, 0b11]


def test_a_backward_is_over_when_all_workers_are_in_it():
    """A shard without buckets has nothing to wait for, and must wait all the same."""
    empty = ReturnedMeans(SourceSettings(2, ((0, 1),), (), buffers(Group().map), visible=True))
    empty.end(0, BackwardEnd(0, 0, 1.0, b""))
    assert empty.closed(0) is None
    empty.end(1, BackwardEnd(0, 0, 1.0, b""))
    assert empty.closed(0) == ReducedBackward(0, 0)


def test_a_mean_stays_until_the_next_backward_and_a_part_may_be_missing_in_some():
    group = Group(2)
    group.backward((1, 3), 0)
    assert torch.equal(group.view("mean", group.buckets[0]), torch.full((64,), 2.0))
    for worker in (0, 1):  # the second backward has only bucket 1
        group.push(worker, 1, 5, ordinal=1)
        group.end(worker, 0b10, ordinal=1)
    assert group.commit_all(backwards=2)
    assert torch.equal(group.gradient(0), torch.full((64,), 2.0))
    assert torch.equal(group.gradient(1), torch.full((128,), 7.0))


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


def test_a_step_waits_for_every_reduction_and_stages_once():
    group = Group(2)
    group.push(0, 0, 1)
    group.end(0, 0b01)
    group.commit(0)
    group.commit(1)
    assert not group.staging.try_stage()
    group.push(1, 0, 3)
    assert not group.staging.try_stage()
    group.end(1, 0b01)
    assert group.staging.try_stage()
    assert not group.staging.try_stage()


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


# --- pushes that replace one another -----------------------------------------------------------------------------


def test_a_push_replaces_the_workers_former_one():
    group = Group(2, visible=False)
    assert group.push(0, 0, 1, ordinal=1) == ()
    group.push(0, 0, 5, ordinal=2)
    group.push(1, 0, 7, ordinal=1)
    group.commit(0, revisions=bytes([2, NO_REVISION]))
    group.commit(1, revisions=bytes([1, NO_REVISION]))
    assert group.staging.try_stage()
    assert torch.equal(group.gradient(0), torch.full((64,), 6.0))
    assert group.present() == [1, 0]


def test_a_late_older_revision_changes_nothing_and_a_newer_one_is_waited_for():
    group = Group(1, visible=False)
    group.push(0, 0, 1, ordinal=1)
    group.commit(0, revisions=bytes([3, NO_REVISION]))
    assert not group.staging.try_stage()
    group.push(0, 0, 3, ordinal=3)
    group.push(0, 0, 2, ordinal=2)
    assert group.staging.try_stage()
    assert torch.equal(group.gradient(0), torch.full((64,), 3.0))


def test_weights_of_replacing_pushes_are_those_of_the_commits():
    group = Group(2, visible=False)
    group.push(0, 0, 1, ordinal=1)
    group.push(1, 0, 5, ordinal=1)
    group.commit(0, revisions=bytes([1, NO_REVISION]), weight=3.0)
    group.commit(1, revisions=bytes([1, NO_REVISION]), weight=1.0)
    assert group.staging.try_stage()
    assert torch.equal(group.gradient(0), torch.full((64,), 2.0))
    assert sum(commit.weight for commit in group.staging.commits.values()) == 4.0


def test_who_has_no_revision_counts_as_zero_also_if_something_was_pushed():
    group = Group(2, visible=False)
    group.push(0, 0, 4, ordinal=1)
    group.push(1, 0, 1000, ordinal=1)
    group.commit(0, revisions=bytes([1, NO_REVISION]))
    group.commit(1, revisions=bytes([NO_REVISION, NO_REVISION]))
    assert group.staging.try_stage()
    assert torch.equal(group.gradient(0), torch.full((64,), 2.0))


# --- any order ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=examples(60))
def test_the_order_of_arrival_and_duplicates_change_no_bit(seed, visible):
    rng = random.Random(seed)
    bodies = parts_of(6, seed % 7)
    tree = ((0, 1), (2,))

    def run(shuffled):
        group = Group(3, visible, tree)
        backwards = 2 if visible else 1
        sayings = []
        for worker in range(3):
            for ordinal in range(2):
                body = bodies[2 * worker + ordinal][1][:64]
                number = ordinal if visible else ordinal + 1
                push = Push(0, number, 0, 1.0 + worker, b"\x01")
                sayings.append(lambda w=worker, p=push, b=body: group.staging.push(w, p, b))
                if visible:
                    end = BackwardEnd(0, ordinal, 1.0 + worker, b"\x01")
                    sayings.append(lambda w=worker, e=end: group.staging.end(w, e))
            revisions = b"" if visible else bytes([2, NO_REVISION])
            sayings.append(
                lambda w=worker, r=revisions: group.commit(w, backwards=backwards, revisions=r, weight=1.0 + w)
            )
        if shuffled:
            sayings += rng.sample(sayings, 4)
            rng.shuffle(sayings)
        staged = 0
        for saying in sayings:
            saying()
            staged += group.staging.try_stage()
        assert staged == 1
        return group.gradient(0).clone()

    first, second = run(False), run(True)
    if visible:  # the order of the backwards is that of their first arrival
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(first, second)


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
