"""Every codec through the same tests; error feedback and value streams with each of them."""

from contextlib import contextmanager
from hashlib import sha256
from math import ceil, inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topotrain.config.job import Compression
from topotrain.extensions.compression.codecs import (
    BLOCK,
    CastCodec,
    E3M0Codec,
    Int8Codec,
    ScratchMemory,
    TopKCodec,
    largest,
)
from topotrain.extensions.compression.error_feedback import DeltaStream, ErrorFeedback, codec_for, working_dtype

TINY = torch.finfo(torch.float32).tiny
KINDS = {
    "fp16": lambda: CastCodec(torch.float16),
    "bf16": lambda: CastCodec(torch.bfloat16),
    "int8": Int8Codec,
    "e3m0": E3M0Codec,
    "top1%": lambda: TopKCodec(0.01),
    "top30%": lambda: TopKCodec(0.3),
    "top100%": lambda: TopKCodec(1.0),
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 3, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 40_001)


@pytest.fixture(params=KINDS)
def codec(request):
    return KINDS[request.param]()


def encoded(codec, values):
    data = torch.full((codec.size(values.numel()),), 0xA5, dtype=torch.uint8)
    return data, codec.encode(values, data)


def decoded(codec, data, like):
    out = torch.full_like(like, nan)
    codec.decode(data, out)
    return out


def there_and_back(codec, values):
    return decoded(codec, encoded(codec, values)[0], values)


def noise(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def bound(codec, values):
    """What an element's error may be at most, for finite values within the codec's range."""
    x = values.double()
    if isinstance(codec, CastCodec):
        info = torch.finfo(codec.dtype)
        least = info.smallest_normal * info.eps if codec.dtype is torch.float16 else TINY
        return x.abs() * info.eps / 2 + least
    if isinstance(codec, Int8Codec):
        blocks = torch.cat([block.abs().max().expand(block.numel()) for block in x.split(BLOCK)])
        return blocks / 254 * (1 + 1e-5) + 127 * TINY
    if isinstance(codec, E3M0Codec):
        blocks = torch.cat([block.abs().max().expand(block.numel()) for block in x.split(256)])
        factor = torch.where(x.abs() < blocks / 64 / 2**0.5 * (1 + 1e-6), 1.0, 2**0.5 - 1)
        return x.abs() * factor * (1 + 1e-6) + 128 * TINY
    k = codec.kept(x.numel())
    kept = torch.zeros_like(x, dtype=torch.bool)
    kept[x.abs().argsort(descending=True, stable=True)[:k]] = True
    return torch.where(kept, x.abs() * 1e-7, x.abs()) + TINY


def assert_close(codec, values, out):
    """`out` is what an encoding of `values` decodes to; a short dtype of its own adds its rounding."""
    own = values.double().abs() * torch.finfo(values.dtype).eps + torch.finfo(values.dtype).tiny
    error = (out.double() - values.double()).abs()
    limit = bound(codec, values) + (0 if values.dtype is torch.float32 else own)
    assert bool((error <= limit).all()), (error - limit).max()


# --- codecs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_there_and_back(codec, dtype, numel):
    values = noise(numel, dtype=dtype)
    data, whole = encoded(codec, values)
    assert whole
    out = decoded(codec, data, values)
    if numel:
        assert_close(codec, values, out)
    twice, thrice = out.clone(), out.clone()
    codec.add(data, twice)
    assert torch.equal(twice, 2 * out)
    codec.add(data, thrice, sign=-1)
    if dtype in (torch.float32, torch.float64):
        assert not thrice.any()


def test_sizes_are_what_the_formats_say():
    assert CastCodec(torch.float16).size(1000) == 2000
    assert CastCodec(torch.bfloat16).size(3) == 6
    assert [Int8Codec().size(n) for n in (0, 1, 512, 513, 262_144)] == [0, 5, 516, 521, 264_192]
    assert [TopKCodec(0.01).size(n) for n in (0, 1, 100, 101, 262_144)] == [0, 8, 8, 16, 8 * ceil(2621.44)]
    assert TopKCodec(1.0).size(7) == 56
    assert [E3M0Codec().size(n) for n in (0, 1, 256, 257, 262_144)] == [0, 5, 132, 137, 135_168]


def test_e3m0_rounds_to_the_nearest_power_of_two() -> None:
    """The limit between two powers is their geometric mean. The least power is a 64th of the largest element."""
    given = [4.0, -4.0, 2.9, 2.8, -1.0, 0.0625, 0.0443, 0.0441, -0.0441, 0.0, -0.0]
    wanted = [4.0, -4.0, 4.0, 2.0, -1.0, 0.0625, 0.0625, 0.0, 0.0, 0.0, 0.0]
    assert there_and_back(E3M0Codec(), torch.tensor(given)).tolist() == wanted


def test_e3m0_writes_the_recorded_bytes() -> None:
    """Two versions of topotrain may be in one job: neither the bytes nor what they decode to may change."""
    draw = np.random.RandomState(17)
    drawn = draw.randint(0, 1 << 32, 5001, dtype=np.uint64).astype(np.uint32)
    finite = np.where((drawn >> 23) & 255 == 255, drawn & 0x807FFFFF, drawn)
    near = (draw.randint(-(1 << 23), 1 << 23, 5001) / (1 << 23)).astype(np.float32)
    recorded = {
        "acf2542da50ab8ff 03bb5641c1d32b84": drawn.view(np.float32),
        "fc07a5d3c9b3d9ee 03bb5641c1d32b84": finite.view(np.float32),
        "181ddc9ba448acc5 d3a7e81d1c09cc74": near,
        "af5e87bc3d709b9f 99265a3d3a880206": near * np.float32(2.0**-120),
    }
    for digests, values in recorded.items():
        data, _ = encoded(E3M0Codec(), torch.from_numpy(values.copy()))
        out = decoded(E3M0Codec(), data, torch.empty(5001))
        back = bits(out).masked_fill(out.isnan(), 0)
        assert [sha256(x.numpy().tobytes()).hexdigest()[:16] for x in (data, back)] == digests.split()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600))
def test_e3m0_is_within_the_square_root_of_two_and_keeps_zeros(values: list[float]) -> None:
    x = torch.tensor(values)
    out = there_and_back(E3M0Codec(), x)
    blocks = torch.cat([block.abs().max().expand(block.numel()) for block in x.split(256)])
    kept = (x.abs() > blocks / 90) & (blocks > 128 * TINY)
    ratio = out[kept].double() / x[kept].double()
    assert bool(((ratio > 2**-0.5 - 1e-6) & (ratio < 2**0.5 + 1e-6)).all())
    assert not out[x == 0].any()


def test_e3m0_encodes_bodies_of_several_sizes_one_after_the_other() -> None:
    """Its memory is that of the largest body so far; an odd number of elements leaves half a byte."""
    codec = E3M0Codec()
    for numel in (40_001, 3, 512, 777, 40_003, 1):
        values = noise(numel, numel)
        fresh = encoded(E3M0Codec(), values)[0]
        data = encoded(codec, values)[0]
        assert torch.equal(data, fresh)
        assert same_bits(decoded(codec, data, values), decoded(E3M0Codec(), fresh, values))


def test_too_many_elements_for_an_index_are_refused():
    with pytest.raises(ValueError, match="2147483648 elements"):
        TopKCodec(0.01).size(2**31)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_bytes_of_another_length_are_refused(codec, wrong):
    values = noise(100)
    short = torch.zeros(codec.size(100) + wrong, dtype=torch.uint8)
    for call in (codec.encode, lambda v, d: codec.decode(d, v), lambda v, d: codec.add(d, v)):
        with pytest.raises(ValueError, match=f"not {codec.size(100)} bytes"):
            call(values, short)
    with pytest.raises(ValueError, match=r"torch\.int8"):
        codec.encode(values, torch.zeros(codec.size(100), dtype=torch.int8))


@pytest.mark.parametrize("index", [-1, 100, 2**31 - 1])
def test_an_index_from_the_wire_is_not_trusted(index):
    codec = TopKCodec(0.05)
    data, _ = encoded(codec, noise(100))
    data[:4].view(torch.int32)[0] = index
    for call in (codec.decode, codec.add):
        with pytest.raises(ValueError, match="not in 0 … 99"):
            call(data, torch.zeros(100))


@given(data=st.binary(min_size=Int8Codec().size(600), max_size=Int8Codec().size(600)))
def test_any_bytes_of_the_right_length_are_some_numbers(data):
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    Int8Codec().decode(raw, torch.empty(600))
    CastCodec(torch.float16).decode(raw[:600], torch.empty(300))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    values=st.lists(st.floats(width=32, min_value=-60_000, max_value=60_000), max_size=1100),
)
def test_any_numbers_there_and_back(kind, values):
    codec, x = KINDS[kind](), torch.tensor(values)
    data, whole = encoded(codec, x)
    assert whole and data.numel() == codec.size(x.numel())
    out = decoded(codec, data, x)
    if values:
        assert_close(codec, x, out)
    assert not ((out != 0) & (out.abs() < TINY)).any()


@given(kind=st.sampled_from(sorted(KINDS)), values=st.lists(st.floats(allow_subnormal=True), min_size=1, max_size=600))
def test_any_doubles_leave_nothing_that_is_not_finite_behind(kind, values):
    codec, x = KINDS[kind](), torch.tensor(values, dtype=torch.float64)
    feedback = ErrorFeedback(codec, torch.zeros_like(x))
    data = torch.empty(codec.size(x.numel()), dtype=torch.uint8)
    feedback.encode(x, data)
    assert bool(torch.isfinite(feedback.residual).all())
    finite = torch.isfinite(x) & (x.abs() <= codec.largest)
    if isinstance(codec, CastCodec | Int8Codec | E3M0Codec):
        assert torch.equal(torch.isfinite(decoded(codec, data, x)), torch.isfinite(x))
    assert not feedback.residual[~torch.isfinite(x)].any()
    assert bool((feedback.residual[~finite].abs() < 1e-6 * codec.largest).all())


def test_zeros_stay_zeros(codec):
    assert not there_and_back(codec, torch.zeros(1234)).any()
    assert not there_and_back(codec, -torch.zeros(1234)).any()


def test_denormals_become_zero_and_small_normals_do_not_always(codec):
    values = torch.full((1000,), 1e-40)
    assert not there_and_back(codec, values).any()
    values[7] = 1.0
    out = there_and_back(codec, values)
    assert out[7] == 1.0 and not out[:7].any() and not out[8:].any()


def test_nothing_decodes_to_a_denormal(codec):
    for quarter in range(4 * -45, 4 * -32):
        out = there_and_back(codec, noise(BLOCK) * 10.0 ** (quarter / 4))
        assert not ((bits(out) & 0x7FFFFFFF != 0) & (bits(out) & 0x7F800000 == 0)).any()


def test_one_big_element_does_not_silence_other_blocks():
    values = torch.full((2 * BLOCK + 5,), 1e-3)
    values[0] = 1e4
    out = there_and_back(Int8Codec(), values)
    assert out[0] == 1e4 and not out[1:BLOCK].any()
    torch.testing.assert_close(out[BLOCK:], values[BLOCK:], rtol=1e-6, atol=0)


def test_int8_uses_its_whole_range():
    values = torch.linspace(-3, 3, BLOCK)
    data, _ = encoded(Int8Codec(), values)
    codes = data[4:].view(torch.int8)
    assert (int(codes.min()), int(codes.max())) == (-127, 127) and codes.unique().numel() == 255


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_too_large_is_the_largest_and_not_infinite(dtype):
    codec = CastCodec(torch.float16)
    values = torch.tensor([70_000.0, -1e30, 65_504.0, 1.0], dtype=dtype)
    data, whole = encoded(codec, values)
    assert not whole
    assert decoded(codec, data, values).tolist() == [65_504.0, -65_504.0, 65_504.0, 1.0]
    top = torch.finfo(torch.bfloat16).max
    out = there_and_back(CastCodec(torch.bfloat16), torch.tensor([torch.finfo(torch.float32).max, -3.4e38]))
    assert out.tolist() == [top, -top]


@pytest.mark.parametrize("name", ["int8", "top100%"])
def test_doubles_beyond_float32_are_the_largest_float32(name):
    codec, top = KINDS[name](), torch.finfo(torch.float32).max
    data, whole = encoded(codec, torch.tensor([1e300, -1e300, 1e38], dtype=torch.float64))
    assert not whole
    out = decoded(codec, data, torch.empty(3, dtype=torch.float64))
    torch.testing.assert_close(out[:2] / top, torch.tensor([1.0, -1.0], dtype=torch.float64), rtol=1e-6, atol=0)


def test_large_gradients_whose_sum_overflows_are_whole():
    """The quick look at a sum must not take a large sum for an infinite element."""
    assert encoded(CastCodec(torch.float16), torch.full((1000,), 60_000.0))[1]
    assert encoded(CastCodec(torch.bfloat16), torch.full((1000,), 1e38))[1]
    assert encoded(Int8Codec(), torch.full((100 * BLOCK,), 1e38))[1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [0, 5, BLOCK, 2 * BLOCK + 3])
def test_what_is_not_finite_arrives_as_such_and_alone(codec, at, dtype):
    for bad in (inf, -inf, nan):
        values = noise(2 * BLOCK + 4, dtype=dtype)
        clean = there_and_back(codec, values.index_fill(0, torch.tensor([at]), 0))
        values[at] = bad
        data, whole = encoded(codec, values)
        out = decoded(codec, data, values)
        assert not whole and not torch.isfinite(out[at])
        if not isinstance(codec, Int8Codec | E3M0Codec):
            assert torch.equal(out[at], values[at]) or bad != bad
        others = torch.arange(values.numel()) != at
        assert bool(torch.isfinite(out[others]).all())
        if not isinstance(codec, TopKCodec):  # there, one less of the others is sent
            assert torch.equal(out[others], clean[others])


def test_a_block_of_nothing_but_nan():
    out = there_and_back(Int8Codec(), torch.full((BLOCK + 3,), nan))
    assert bool(out.isnan().all())


# --- top-k -------------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    share=st.floats(0, 1),
    repeat=st.sampled_from([1, 7, 200]),
)
def test_the_k_largest_and_of_equal_ones_the_first(values, share, repeat):
    x = np.array(values * repeat, dtype=np.int32)
    k = max(1, ceil(share * x.size))
    expected = np.sort(np.argsort(-x, kind="stable")[:k])
    found = largest(x, k, ScratchMemory()).numpy()
    assert np.array_equal(np.sort(found), expected)


STRIDE = 262_144 // 4096 | 1


@pytest.mark.parametrize(
    "make",
    [
        torch.rand,
        lambda n: torch.arange(n) % STRIDE / STRIDE + 1e-3,
        lambda n: (torch.arange(n) % STRIDE == 0) + torch.arange(1, n + 1) / n / 2,
        lambda n: torch.arange(1, n + 1) / n,
    ],
)
@pytest.mark.parametrize("ratio", [1e-5, 0.001, 0.01, 0.1])
def test_a_bad_guess_of_the_threshold_costs_time_only(make, ratio):
    """Also where each sampled element is untypical (a period equal to the stride), and where none is."""
    values = make(262_144) * 1.0
    codec = TopKCodec(ratio)
    out = there_and_back(codec, values)
    k = ceil(ratio * 262_144)
    assert int((out != 0).sum()) == k
    assert torch.equal(out[out != 0].sort().values, values.sort().values[-k:])


@pytest.mark.parametrize("there", [0, 1, 400, 10_000])
def test_fewer_than_k_that_are_not_zero_are_filled_up_with_the_first_zeros(there):
    bits_, k = np.zeros(100_000, dtype=np.int32), 1000
    at = np.random.default_rng(there).permutation(bits_.size)[:there]
    bits_[at] = 1 + np.arange(there)
    found = largest(bits_, k, ScratchMemory()).numpy()
    assert np.array_equal(np.sort(found), np.sort(np.argsort(-bits_, kind="stable")[:k]))


# --- error feedback ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("drafted", [False, True])
def test_what_was_received_and_what_is_left_is_what_was_given(codec, dtype, drafted):
    numel = BLOCK + 77
    work = working_dtype(dtype)
    residual, draft = torch.zeros(numel, dtype=work), torch.empty(numel, dtype=work) if drafted else None
    feedback = ErrorFeedback(codec, residual, draft)
    data = torch.empty(codec.size(numel), dtype=torch.uint8)
    given_, received = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for t in range(50):
        gradient = noise(numel, t, dtype)
        feedback.encode(gradient, data)
        feedback.settle()
        given_ += gradient
        received += decoded(codec, data, given_)
    torch.testing.assert_close(received + feedback.residual, given_, rtol=0, atol=1e-4)
    if codec.size(numel) < 8 * numel:  # kTopK with all elements leaves nothing
        assert bool(feedback.residual.any()) or dtype in (torch.bfloat16, torch.float16)


def test_without_feedback_small_gradients_never_arrive():
    """What the test above would not show if residuals were forgotten."""
    gradient = torch.full((BLOCK,), 1e-3)
    gradient[0] = 1.0
    codec = Int8Codec()
    feedback, data = ErrorFeedback(codec, torch.zeros(BLOCK)), torch.empty(codec.size(BLOCK), dtype=torch.uint8)
    plain, fed = torch.zeros(BLOCK), torch.zeros(BLOCK)
    for _ in range(100):
        plain += there_and_back(codec, gradient)
        feedback.encode(gradient, data)
        codec.add(data, fed)
    assert not plain[1:].any()
    torch.testing.assert_close(fed, 100 * gradient, rtol=0, atol=0.01)


def test_an_encoding_that_does_not_count_leaves_no_trace(codec):
    numel = 1000
    one = ErrorFeedback(codec, torch.zeros(numel), torch.empty(numel))
    two = ErrorFeedback(codec, torch.zeros(numel), torch.empty(numel))
    a, b = (torch.empty(codec.size(numel), dtype=torch.uint8) for _ in range(2))
    for t in range(6):
        two.encode(noise(numel, 100 + t) * 1e6, b)  # replaced by the next
        if t % 2:
            two.encode(torch.full((numel,), nan), b)
            two.drop()  # and this one dropped with its step
            two.settle()
        for feedback, data in ((one, a), (two, b)):
            feedback.encode(noise(numel, t), data)
            feedback.settle()
        two.settle()  # nothing new since
        assert torch.equal(a, b)
        assert same_bits(one.residual, two.residual)


@pytest.mark.parametrize("bad", [inf, -inf, nan, 1e38])
def test_an_overflow_does_not_come_back(codec, bad):
    numel = 600
    feedback = ErrorFeedback(codec, torch.zeros(numel))
    data = torch.empty(codec.size(numel), dtype=torch.uint8)
    feedback.encode(noise(numel), data)
    spoiled = noise(numel, 1)
    spoiled[[3, 555]] = bad
    feedback.encode(spoiled, data)
    assert decoded(codec, data, spoiled)[3].abs() > 6e4 or not torch.isfinite(decoded(codec, data, spoiled)[3])
    assert feedback.residual[[3, 555]].abs().max() < 1e-2 * torch.finfo(torch.float32).max
    assert bool(torch.isfinite(feedback.residual).all())
    if bad != 1e38 or codec.largest < bad:
        assert not feedback.residual[[3, 555]].any()
        feedback.encode(noise(numel, 2), data)
        assert decoded(codec, data, spoiled).abs().max() < 100


def test_more_overflows_than_top_k_can_tell():
    codec, values = TopKCodec(0.01), torch.full((1000,), inf)
    feedback, data = ErrorFeedback(codec, torch.zeros(1000)), torch.empty(codec.size(1000), dtype=torch.uint8)
    feedback.encode(values, data)
    assert int(decoded(codec, data, values).isinf().sum()) == 10
    assert not feedback.residual.any()


@pytest.mark.parametrize("name", KINDS)
def test_sgd_reaches_the_optimum_of_least_squares(name):
    """Two workers, gradients with error feedback each, means with error feedback back, momentum-free SGD."""
    rows, columns = 200, 100
    rng = torch.Generator().manual_seed(3)
    inputs = [torch.randn(rows, columns, generator=rng) for _ in range(2)]
    truth = torch.randn(columns, generator=rng)
    targets = [x @ truth for x in inputs]
    codec = KINDS[name]()
    ups = [ErrorFeedback(codec, torch.zeros(columns)) for _ in inputs]
    down = ErrorFeedback(codec, torch.zeros(columns))
    data = torch.empty(codec.size(columns), dtype=torch.uint8)
    weights = torch.zeros(columns)
    for step in range(3000):
        mean = torch.zeros(columns)
        for up, x, y in zip(ups, inputs, targets):
            up.encode(x.T @ (x @ weights - y) / rows, data)
            codec.add(data, mean)
        down.encode(mean / 2, data)
        rate = (0.02 if name == "top1%" else 0.1) * (1.0 if step < 2000 else 0.3)
        codec.add(data, weights.mul_(1 / -rate), sign=1)
        weights.mul_(-rate)
    assert torch.linalg.vector_norm(weights - truth) < 1e-2 * torch.linalg.vector_norm(truth)


# --- values ------------------------------------------------------------------------------------------------------


@contextmanager
def no_denormals(on):
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def play(codec, rounds, flush_sender=False, flush_receiver=False):
    """A stream over all `rounds` (tensors); yields (values, sender, receiver) after each."""
    first = rounds[0]
    sender, receiver = (DeltaStream(codec, torch.full_like(first, nan)) for _ in range(2))
    data = torch.empty(codec.size(first.numel()), dtype=torch.uint8)
    for t, values in enumerate(rounds):
        with no_denormals(flush_sender):
            sender.restart(values) if t == 0 else sender.encode(values, data)
        with no_denormals(flush_receiver):
            receiver.restart(values) if t == 0 else receiver.decode(data)
        yield values, sender, receiver


def walk(numel, dtype, rounds=30):
    values, drift = noise(numel, 1), noise(numel, 2)
    for t in range(rounds):
        yield (values + drift * 0.01 * t + noise(numel, 10 + t) * 0.001).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, BLOCK, 2 * BLOCK + 31])
def test_both_copies_are_equal_bit_for_bit(codec, dtype, numel):
    for t, (_, sender, receiver) in enumerate(play(codec, list(walk(numel, dtype)))):
        assert same_bits(sender.held, receiver.held)
        assert sender.rounds == receiver.rounds == t


@pytest.mark.parametrize("flush", [(False, False), (False, True), (True, False)])
def test_both_copies_are_equal_where_one_processor_flushes_denormals(codec, flush):
    scales = torch.logspace(-44, -34, 1500)
    rounds = [noise(1500, t) * scales for t in range(20)]
    for _, sender, receiver in play(codec, rounds, *flush):
        assert same_bits(sender.held, receiver.held)
        assert not ((bits(sender.held) != 0) & (bits(sender.held) & 0x7F800000 == 0)).any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_copies_come_to_the_values_once_these_rest(codec, dtype):
    last = noise(300, 9, dtype)
    rounds = [*walk(300, dtype, 10), *[last] * 300]
    *_, (_, _sender, receiver) = play(codec, rounds)
    error = (receiver.held.double() - last.double()).abs()
    assert bool((error <= last.double().abs() * torch.finfo(dtype).eps + 1e-6).all())


def test_values_that_were_not_finite_are_replaced(codec):
    spoiled = noise(700, 1)
    spoiled[5], spoiled[6], spoiled[650] = inf, -inf, nan
    rounds = [noise(700), spoiled, spoiled, *[noise(700, 2)] * 150]
    held = []
    for _, sender, receiver in play(codec, rounds):
        assert torch.equal(sender.held.isnan(), receiver.held.isnan())
        good = torch.isfinite(sender.held)
        assert same_bits(sender.held[good], receiver.held[good])
        held.append(receiver.held.clone())
    assert not torch.isfinite(held[1][[5, 6, 650]]).any()
    torch.testing.assert_close(held[-1], rounds[-1], rtol=1e-6, atol=1e-6)


# --- the choice --------------------------------------------------------------------------------------------------


def test_which_codec_for_which_body():
    kinds = {Compression.kFp16: CastCodec, Compression.kBf16: CastCodec}
    kinds |= {Compression.kInt8: Int8Codec, Compression.kTopK: TopKCodec, Compression.kE3M0: E3M0Codec}
    for kind in Compression:
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
            assert codec_for(kind, dtype, 0.01) is None
        for dtype in (torch.float32, torch.float64):
            codec = codec_for(kind, dtype, 0.25)
            assert type(codec) is kinds.get(kind, type(None))
    for dtype in (torch.float16, torch.bfloat16):
        assert codec_for(Compression.kFp16, dtype, 0.01) is None
        assert codec_for(Compression.kBf16, dtype, 0.01) is None
        assert isinstance(codec_for(Compression.kInt8, dtype, 0.01), Int8Codec)
    assert codec_for(Compression.kFp16, torch.float32, 1.0).dtype is torch.float16
    assert codec_for(Compression.kBf16, torch.float32, 1.0).dtype is torch.bfloat16
    assert codec_for(Compression.kTopK, torch.float32, 0.25).size(1000) == 2000


def test_encoding_makes_no_large_tensors(codec):
    """After a first round, memory is used again: what is new is small beside the bodies."""
    numel = 262_144
    feedback = ErrorFeedback(codec, torch.zeros(numel))
    gradient, data = noise(numel), torch.empty(codec.size(numel), dtype=torch.uint8)
    feedback.encode(gradient, data)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        feedback.encode(gradient, data)
    sizes = [event.cpu_memory_usage for event in profile.events()]
    share = 4.0 if isinstance(codec, TopKCodec) and codec.ratio > 0.1 else 0.15
    assert max(sizes, default=0) < share * numel * 4
