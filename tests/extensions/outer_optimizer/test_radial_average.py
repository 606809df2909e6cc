"""The radial-directional average: its length, its direction, and inner products that several servers have parts of."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from topotrain.core.protocol import ProtocolError
from topotrain.core.server.ordered_sum import ScratchBuffers
from topotrain.extensions.outer_optimizer.radial.radial_average import (
    average_factors,
    block_products,
    direction_factors,
    exact_sum,
    write_sum,
)
from topotrain.extensions.outer_optimizer.radial.radial_average import inner_product as sum_of_blocks
from topotrain.extensions.outer_optimizer.radial.radial_products import (
    NOTHING,
    ProductRow,
    joined_products,
    unpack_rows,
)

Tensors = list[torch.Tensor]


def inner_product(left: torch.Tensor, right: torch.Tensor) -> float:
    return sum_of_blocks([block_products(left, right)])


def average(tensors: Tensors, weights: list[float]) -> torch.Tensor | None:
    """As the servers compute it of a whole tensor. None: the mean."""
    weigh, scratch = dict(enumerate(weights)), ScratchBuffers()
    lengths = {number: math.sqrt(inner_product(each, each)) for number, each in enumerate(tensors)}
    factors = direction_factors(lengths, weigh, tensors[0].dtype)
    total = torch.empty_like(tensors[0])
    write_sum([(factors[number], tensors[number]) for number in sorted(factors)], total, scratch)
    found = average_factors(factors, lengths, weigh, inner_product(total, total))
    if found is None:
        return None
    write_sum([(found[number], tensors[number]) for number in sorted(found)], total, scratch)
    return total


def by_hand(tensors: Tensors, weights: list[float]) -> torch.Tensor:
    """The same in float64, as the paper has it."""
    wide = [each.double() for each in tensors]
    length = sum(w * d.norm() for w, d in zip(weights, wide, strict=True)) / sum(weights)
    direction = sum(w * d / d.norm() for w, d in zip(weights, wide, strict=True) if d.norm())
    assert isinstance(direction, torch.Tensor)
    return length * direction / direction.norm()


def several(least: int = 1, dtype: torch.dtype = torch.float32) -> st.SearchStrategy[Tensors]:
    """Tensors of one size, some of them zeros."""
    number = st.one_of(st.just(0.0), st.floats(2**-10, 100, width=32), st.floats(-100, -(2**-10), width=32))

    def made(size: int) -> st.SearchStrategy[Tensors]:
        one = st.lists(number, min_size=size, max_size=size).map(lambda numbers: torch.tensor(numbers, dtype=dtype))
        return st.lists(one, min_size=least, max_size=5)

    return st.integers(1, 12).flatmap(made)


def weighed(tensors: Tensors) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0.5, 1000), min_size=len(tensors), max_size=len(tensors))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@given(st.data())
def test_length_and_direction(dtype: torch.dtype, rounding: float, data: st.DataObject) -> None:
    tensors = data.draw(several(least=2, dtype=dtype))
    weights = data.draw(weighed(tensors))
    found = average(tensors, weights)
    assume(found is not None)
    lengths = [float(each.double().norm()) for each in tensors]
    length = float(found.double().norm())
    assert min(lengths) * (1 - 10 * rounding) <= length <= max(lengths) * (1 + 10 * rounding)
    directions = [w * d.double() / d.double().norm() for w, d in zip(weights, tensors, strict=True) if d.any()]
    left = float(torch.stack(directions).sum(0).norm()) / sum(weights)
    # What cancels magnifies the rounding of the parts.
    wanted = by_hand(tensors, weights)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=rounding * max(lengths) / left)


@given(several())
def test_one_tensor_and_zeros_are_left_to_the_mean(tensors: Tensors) -> None:
    """Of one tensor the mean is the tensor itself, bit for bit, and of zeros it is zero."""
    assert average(tensors[:1], [3.0]) is None
    zeros = [torch.zeros_like(each) for each in tensors]
    assert average(zeros, [1.0] * len(zeros)) is None
    assert average([tensors[0], *zeros], [2.0] * (1 + len(zeros))) is None


@given(several(), st.floats(0.5, 100))
def test_directions_that_cancel_are_left_to_the_mean(tensors: Tensors, weight: float) -> None:
    assume(tensors[0].any())
    opposite = [tensors[0], -3 * tensors[0]]
    assert average(opposite, [weight, weight]) is None
    assert average(opposite, [weight, 2 * weight]) is not None


def test_a_number_that_is_not_finite_is_left_to_the_mean() -> None:
    for sick in (math.nan, math.inf):
        assert average([torch.tensor([1.0, sick]), torch.tensor([1.0, 2.0])], [1.0, 1.0]) is None
    assert average([torch.tensor([math.inf, -math.inf])] * 2, [1.0, 1.0]) is None
    assert math.isnan(exact_sum([math.inf, -math.inf])) and math.isnan(exact_sum([1e308, 1e308]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_added_up_in_float32(dtype: torch.dtype) -> None:
    tensors = [torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    found = average(tensors, [1.0, 2.0, 3.0])
    assert found is not None and found.dtype is dtype
    wanted = by_hand(tensors, [1.0, 2.0, 3.0])
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 8)


def test_the_number_of_threads_changes_no_bit() -> None:
    tensor, before = torch.randn(300_000, generator=torch.Generator().manual_seed(1)), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.add(inner_product(tensor, tensor))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(tensor.double() @ tensor.double()), rel=1e-13)


@given(st.lists(st.integers(0, 700), max_size=6), st.sampled_from([44_800, 44_799, 64, 1, 40_000]))
def test_the_cut_into_slices_changes_no_bit(units: list[int], size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    left, right = torch.randn(size, generator=rng), torch.randn(size, generator=rng)
    ends = [0, *sorted({64 * unit for unit in units if 0 < 64 * unit < size}), size]
    blocks = [block_products(left[a:b], right[a:b]) for a, b in pairwise(ends)]
    assert sum_of_blocks(blocks) == inner_product(left, right)
    assert sum_of_blocks(blocks) == pytest.approx(float(left.double() @ right.double()), rel=1e-9, abs=1e-9)


# --- inner products over several servers -----------------------------------------------------------------------------

GROUPS = (0, 1, 2)
FIRST = (0, 4)  # the first start of a group, its step 4


def row(own: int, tensors: Tensors, staged: dict[int, tuple[int, int]]) -> ProductRow:
    """What one shard measures when a group's step is staged, with its only tensor."""
    products = (inner_product(tensors[own], tensors[g]) if g in staged else 0.0 for g in GROUPS)
    return ProductRow(tuple(staged.get(g, NOTHING) for g in GROUPS), (tuple(products),))


def travelled(rows: dict[int, ProductRow]) -> dict[int, ProductRow]:
    """The rows of the shards about one group, from the bytes of the decision."""
    divided = {shard: [7] for shard in rows}
    return unpack_rows(b"".join(rows[shard].pack() for shard in sorted(rows)), len(GROUPS), divided)


def test_what_a_vote_says_about_a_group_before_its_restart_is_void() -> None:
    old, new, other = (torch.tensor([value]) for value in (1.0, 5.0, 2.0))
    first = row(1, [old, other, other], {0: FIRST, 1: FIRST})
    # Group 0 starts again, and comes to the step of the same number.
    second = row(0, [new, other, other], {0: (1, 4), 1: FIRST})
    found = joined_products({0: travelled({0: second}), 1: travelled({0: first})}, GROUPS, {0: [7]})[7]
    assert found == {(0, 0): 25.0, (0, 1): 10.0, (1, 1): 4.0}


def test_rows_of_other_tensors_are_refused() -> None:
    body = row(0, [torch.ones(1)] * 3, {0: FIRST}).pack()
    assert unpack_rows(body, 3, {1: [7]}) == {1: row(0, [torch.ones(1)] * 3, {0: FIRST})}
    for groups, divided in ((3, {0: [7], 1: [7]}), (2, {1: [7]}), (3, {}), (3, {1: [7, 8]})):
        with pytest.raises(ProtocolError, match="bytes of inner products"):
            unpack_rows(body, groups, divided)
