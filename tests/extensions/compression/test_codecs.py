"""Every codec through the same tests; error feedback and value streams with each of them."""

from contextlib import contextmanager
from hashlib import sha256
from itertools import product
from math import ceil, inf, nan

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from seeds import examples

from topotrain.config.job import ChangeMethod, Cluster, Compression, LRGen, Updater, UpdaterType
from topotrain.extensions.compression.codecs import (
    BLOCK,
    CastCodec,
    E3M0Codec,
    Int8Codec,
    ScratchMemory,
    TopKCodec,
    largest,
)
from topotrain.extensions.compression.encoded_sizes import encoded_bytes, has_codec, of_replies
from topotrain.extensions.compression.error_feedback import DeltaStream, ErrorFeedback, codec_for, working_dtype

TINY = torch.finfo(torch.float32).tiny
FP32_MOST, BF16_MOST = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
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
    if isinstance(codec, Int8Codec | E3M0Codec):
        wide = BLOCK if isinstance(codec, Int8Codec) else 256
        blocks = torch.cat([block.abs().max().expand(block.numel()) for block in x.split(wide)])
        if isinstance(codec, Int8Codec):
            return blocks / 254 * (1 + 1e-5) + 127 * TINY
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


def test_sizes_are_what_the_formats_say_and_not_too_large_for_an_index():
    assert CastCodec(torch.float16).size(1000) == 2000
    assert CastCodec(torch.bfloat16).size(3) == 6
    assert [Int8Codec().size(n) for n in (0, 1, 512, 513, 262_144)] == [0, 5, 516, 521, 264_192]
    assert [TopKCodec(0.01).size(n) for n in (0, 1, 100, 101, 262_144)] == [0, 8, 8, 16, 8 * ceil(2621.44)]
    assert TopKCodec(1.0).size(7) == 56
    with pytest.raises(ValueError, match="2147483648 elements"):
        TopKCodec(0.01).size(2**31)
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


def test_bytes_of_another_length_or_dtype_are_refused(codec):
    values, size = noise(100), codec.size(100)
    for wrong in (
        torch.zeros(size - 1, dtype=torch.uint8),
        torch.zeros(size + 1, dtype=torch.uint8),
        torch.zeros(size),
    ):
        for call in (codec.encode, lambda v, d: codec.decode(d, v), lambda v, d: codec.add(d, v)):
            with pytest.raises(ValueError, match=f"{wrong.dtype} for 100 numbers, not {size} bytes"):
                call(values, wrong)


def test_an_index_from_the_wire_is_not_trusted():
    codec = TopKCodec(0.05)
    data, _ = encoded(codec, noise(100))
    for index, call in product([-1, 100, 2**31 - 1], (codec.decode, codec.add)):
        data[:4].view(torch.int32)[0] = index
        with pytest.raises(ValueError, match="not in 0 … 99"):
            call(data, torch.zeros(100))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(FLOATS),
    values=st.lists(st.floats(width=32, min_value=-60_000, max_value=60_000), max_size=1100).map(torch.tensor)
    | st.builds(lambda numel, exponent: noise(numel) * 10.0**exponent, st.sampled_from(SIZES), st.integers(-45, 3)),
    earlier=st.sampled_from(SIZES),
)
@settings(max_examples=examples(200))
@example("int8", torch.float32, noise(40_001), 0)
@example("e3m0", torch.float32, noise(40_001), 40_003)
def test_any_numbers_there_and_back(kind, dtype, values, earlier):
    """Also with memory of earlier bodies of another size. Nothing decodes to a denormal."""
    codec, x = KINDS[kind](), values.to(dtype)
    encoded(codec, noise(earlier))
    data, whole = encoded(codec, x)
    assert whole and data.numel() == codec.size(x.numel()) and torch.equal(data, encoded(KINDS[kind](), x)[0])
    single = decoded(codec, data, x.float())
    assert not ((single != 0) & (single.abs() < TINY)).any() and not single[x == 0].any()
    out = decoded(codec, data, x)
    assert same_bits(out, single.to(dtype))
    if x.numel():
        assert_close(codec, x, out)
    twice = out.clone()
    codec.add(data, twice)
    assert torch.equal(twice, 2 * out)
    codec.add(data, out, sign=-1)
    assert not out.any() or dtype in (torch.bfloat16, torch.float16)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(FLOATS),
    values=st.lists(st.floats(allow_subnormal=True), min_size=1, max_size=600),
)
@example("int8", torch.float32, [nan] * 3)
@example("e3m0", torch.float32, [nan] * 3)
@example("fp16", torch.float32, [3.0, 1e38, -1e38])
@example("top1%", torch.float64, [inf] * 150)
def test_what_is_not_finite_or_overflows_leaves_nothing_behind(kind, dtype, values):
    codec, x = KINDS[kind](), torch.tensor(values, dtype=torch.float64).to(dtype)
    feedback = ErrorFeedback(codec, torch.zeros_like(x, dtype=working_dtype(dtype)))
    data = torch.empty(codec.size(x.numel()), dtype=torch.uint8)
    feedback.encode(x, data)
    assert bool(torch.isfinite(feedback.residual).all())
    finite = torch.isfinite(x) & (x.abs() <= codec.largest)
    if isinstance(codec, CastCodec | Int8Codec | E3M0Codec):
        assert torch.equal(torch.isfinite(decoded(codec, data, x.double())), torch.isfinite(x))
    assert not feedback.residual[~torch.isfinite(x)].any()
    assert bool((feedback.residual[~finite].abs() < 1e-6 * codec.largest).all())


@pytest.mark.parametrize(
    ("name", "dtype", "values", "expected"),
    [
        ("fp16", torch.float32, [70_000.0, -1e30, 65_504.0, 1.0], [65_504.0, -65_504.0, 65_504.0, 1.0]),
        ("fp16", torch.float64, [70_000.0, -1e300, 65_504.0, 1.0], [65_504.0, -65_504.0, 65_504.0, 1.0]),
        ("bf16", torch.float32, [FP32_MOST, -3.4e38], [BF16_MOST, -BF16_MOST]),
        ("int8", torch.float64, [1e300, -1e300], [FP32_MOST, -FP32_MOST]),
        ("top100%", torch.float64, [1e300, -1e300, 1e38], [FP32_MOST, -FP32_MOST, 1e38]),
    ],
)
def test_too_large_is_the_largest_and_not_infinite(name, dtype, values, expected):
    x = torch.tensor(values, dtype=dtype)
    data, whole = encoded(KINDS[name](), x)
    assert not whole
    assert decoded(KINDS[name](), data, x).tolist() == pytest.approx(expected, rel=1e-6)
    # The quick look at a sum must not take a large sum for an infinite element.
    large = 60_000.0 if name == "fp16" else 1e38
    assert name == "top100%" or encoded(KINDS[name](), torch.full((100 * BLOCK,), large))[1]


@pytest.mark.parametrize(
    ("name", "dtype", "at", "bad"), pairwise(sorted(KINDS), FLOATS, [0, 5, BLOCK, 2 * BLOCK + 3], [inf, -inf, nan])
)
def test_what_is_not_finite_arrives_as_such_and_alone(name, dtype, at, bad):
    codec, values = KINDS[name](), noise(2 * BLOCK + 4, dtype=dtype)
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


# --- top-k -------------------------------------------------------------------------------------------------------


def assert_largest(bits_, k):
    found = largest(bits_, k, ScratchMemory()).numpy()
    assert np.array_equal(np.sort(found), np.sort(np.argsort(-bits_, kind="stable")[:k]))


@given(
    values=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    share=st.floats(0, 1),
    repeat=st.sampled_from([1, 7, 200]),
)
def test_the_k_largest_and_of_equal_ones_the_first(values, share, repeat):
    x = np.array(values * repeat, dtype=np.int32)
    assert_largest(x, max(1, ceil(share * x.size)))


@pytest.mark.parametrize("ratio", [1e-5, 0.001, 0.01, 0.1])
def test_a_bad_guess_of_the_threshold_costs_time_only(ratio):
    """Where each sampled element is untypical, where none is, and where fewer than k are not zero."""
    numel = 262_144
    at, stride = np.arange(numel), numel // 4096 | 1
    drawn = np.random.default_rng(3).permutation(numel)
    dense = (drawn, at % stride + 1, (at % stride == 0) * numel + at // 2, at)
    for bits_ in (*dense, *((drawn + 1) * (drawn < there) for there in (0, 1, 400, 10_000))):
        assert_largest(bits_.astype(np.int32), ceil(ratio * numel))


# --- error feedback ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "drafted"), pairwise(sorted(KINDS), FLOATS, [False, True]))
def test_what_was_received_and_what_is_left_is_what_was_given(name, dtype, drafted):
    codec, numel, work = KINDS[name](), BLOCK + 77, working_dtype(dtype)
    feedback = ErrorFeedback(codec, torch.zeros(numel, dtype=work), torch.empty(numel, dtype=work) if drafted else None)
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


def test_small_gradients_beside_a_large_one_arrive_in_the_end(codec):
    """What the test above would not show if a residual were not part of the next encoding."""
    gradient, rounds = torch.full((BLOCK,), 1e-3), 1000
    gradient[0] = 1.0
    feedback, data = ErrorFeedback(codec, torch.zeros(BLOCK)), torch.empty(codec.size(BLOCK), dtype=torch.uint8)
    received = torch.zeros(BLOCK)
    for _ in range(rounds):
        feedback.encode(gradient, data)
        codec.add(data, received)
    torch.testing.assert_close(received, rounds * gradient, rtol=1e-3, atol=0.2)


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


# --- values ------------------------------------------------------------------------------------------------------


@contextmanager
def no_denormals(on):
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def play(codec, rounds, flush_sender=False, flush_receiver=False):
    """A stream over all `rounds` (tensors); yields (sender, receiver) after each."""
    first = rounds[0]
    sender, receiver = (DeltaStream(codec, torch.full_like(first, nan)) for _ in range(2))
    data = torch.empty(codec.size(first.numel()), dtype=torch.uint8)
    for t, values in enumerate(rounds):
        with no_denormals(flush_sender):
            sender.restart(values) if t == 0 else sender.encode(values, data)
        with no_denormals(flush_receiver):
            receiver.restart(values) if t == 0 else receiver.decode(data)
        yield sender, receiver


@pytest.mark.parametrize(("name", "dtype", "numel"), pairwise(sorted(KINDS), FLOATS, [0, 1, BLOCK, 2 * BLOCK + 31]))
def test_both_copies_are_equal_bit_for_bit_and_come_to_values_that_rest(name, dtype, numel):
    values, drift = noise(numel, 1), noise(numel, 2)
    rounds = [(values + drift * 0.01 * t + noise(numel, 10 + t) * 0.001).to(dtype) for t in range(30)]
    for t, (sender, receiver) in enumerate(play(KINDS[name](), rounds + rounds[-1:] * 300)):
        assert same_bits(sender.held, receiver.held)
        assert sender.rounds == receiver.rounds == t
    last = rounds[-1].double()
    error = (receiver.held.double() - last).abs()
    assert bool((error <= last.abs() * torch.finfo(dtype).eps + 1e-6).all())


@pytest.mark.parametrize("flush", [(False, False), (False, True), (True, False)])
def test_both_copies_are_equal_where_one_processor_flushes_denormals(codec, flush):
    scales = torch.logspace(-44, -34, 1500)
    rounds = [noise(1500, t) * scales for t in range(20)]
    for sender, receiver in play(codec, rounds, *flush):
        assert same_bits(sender.held, receiver.held)
        assert not ((bits(sender.held) != 0) & (bits(sender.held) & 0x7F800000 == 0)).any()


def test_values_that_were_not_finite_are_replaced(codec):
    spoiled = noise(700, 1)
    spoiled[5], spoiled[6], spoiled[650] = inf, -inf, nan
    rounds = [noise(700), spoiled, spoiled, *[noise(700, 2)] * 150]
    held = []
    for sender, receiver in play(codec, rounds):
        assert torch.equal(sender.held.isnan(), receiver.held.isnan())
        assert same_bits(sender.held.nan_to_num(), receiver.held.nan_to_num())
        held.append(receiver.held.clone())
    assert not torch.isfinite(held[1][[5, 6, 650]]).any()
    torch.testing.assert_close(held[-1], rounds[-1], rtol=1e-6, atol=1e-6)


# --- the choice --------------------------------------------------------------------------------------------------


def test_which_codec_for_which_body():
    casts = {Compression.kFp16: torch.float16, Compression.kBf16: torch.bfloat16}
    kinds = {Compression.kInt8: Int8Codec, Compression.kTopK: TopKCodec, Compression.kE3M0: E3M0Codec}
    others = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    for kind, dtype in product(Compression, (*FLOATS, *others)):
        codec = codec_for(kind, dtype, 0.25)
        if kind is Compression.kNone or dtype in others or (kind in casts and dtype.itemsize == 2):
            assert codec is None
        else:
            assert type(codec) is kinds.get(kind, CastCodec) and getattr(codec, "dtype", None) is casts.get(kind)
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


# --- the bytes that a plan counts are those of the codecs ------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Compression))
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "complex64"])
def test_sizes_are_those_of_the_codecs(kind: Compression, dtype: str) -> None:
    codec = codec_for(kind, getattr(torch, dtype), 0.03)
    assert (codec is not None) == has_codec(kind, dtype)
    for numel in (1, 2, 255, 256, 257, 511, 512, 513, 100_001):
        assert codec is None or codec.size(numel) == encoded_bytes(kind, numel, 0.03)


def test_only_pushes_have_four_bits() -> None:
    kinds = {kind: of_replies(Cluster(compression=kind)) for kind in Compression}
    assert kinds.pop(Compression.kE3M0) is Compression.kBf16
    assert all(kind is replies for kind, replies in kinds.items())


def test_values_of_a_round_are_not_thinned_out() -> None:
    outer = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(ChangeMethod.kFixed, base_lr=1.0))
    kinds = {kind: of_replies(Cluster(compression=kind, outer=outer)) for kind in Compression}
    assert (kinds[Compression.kTopK], kinds[Compression.kE3M0]) == (Compression.kNone, Compression.kBf16)
    assert kinds[Compression.kInt8] is Compression.kInt8
