"""Boxes and transfers: every element that is needed comes from one worker that has it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topotrain.parallel.program.layouts import box, sizes_of, transfers, within
from topotrain.parallel.program.split_program import LayoutEdge, LocationKind, SymbolicShape, ValueLocation

BATCH, WHOLE, SAME = (
    ValueLocation(LocationKind.BATCH),
    ValueLocation(LocationKind.WHOLE),
    ValueLocation(LocationKind.SAME),
)


def test_what_has_no_place_is_an_error():
    with pytest.raises(ValueError, match="without a batch dimension"):
        box(BATCH, 0, SymbolicShape((3,), "float32"), (1, 1))
    with pytest.raises(ValueError, match="for itself"):
        box(ValueLocation(LocationKind.OWN), 0, SymbolicShape((3,), "float32"), (1, 1))


def test_what_all_have_travels_nowhere():
    edge = LayoutEdge(0, 0, SAME, ValueLocation(LocationKind.AT, worker=1), SymbolicShape((3,), "float32"))
    assert [(t.source, t.target) for t in transfers(edge, (4, 4))] == [(1, 1)]


layouts = st.one_of(
    st.just(BATCH),
    st.builds(ValueLocation, st.just(LocationKind.FEATURE), st.sampled_from([1, 2])),
    st.builds(ValueLocation, st.just(LocationKind.AT), st.just(0), st.integers(0, 2)),
)


@given(
    layouts, st.one_of(layouts, st.just(WHOLE)), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(1, 2)
)
def test_every_target_gets_its_part_of_the_whole(source, target, samples, per_sample):
    shape = SymbolicShape((0, 5, 4), "float32", 0, per_sample)
    whole = torch.arange(sum(samples) * per_sample * 20).reshape(shape.at(sum(samples)))
    edge = LayoutEdge(0, 0, source, target, shape)
    everything = tuple((0, size) for size in whole.shape)
    for worker in range(3):
        wanted = box(target, worker, shape, samples)
        incoming = [t for t in transfers(edge, samples) if t.target == worker]
        if wanted is None:
            assert not incoming
            continue
        got = torch.full(sizes_of(wanted), -1)
        for transfer in incoming:
            has = box(source, transfer.source, shape, samples)
            part = whole[within(has, everything)][within(transfer.box, has)]
            assert (got[within(transfer.box, wanted)] == -1).all()  # nothing comes twice
            got[within(transfer.box, wanted)] = part
        assert torch.equal(got, whole[within(wanted, everything)])
