"""The map of slices: every element has one home, cuts are where kernels can bear them, all processes agree."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.job import Slicing
from topotrain.config.sharding import ALIGN, ITEM_BYTES, Parameter, SchemaError, SliceMap, cut, describe, parse

DTYPES = ("float32", "bfloat16", "float64")
EDGES = (0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 5 * ALIGN, 3000)


def parameter(name: str, *shape: int, dtype: str = "float32", trainable: bool = True, aliases=()) -> Parameter:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return Parameter(name, shape, tuple(strides) if shape else (), dtype, trainable, tuple(aliases))


@st.composite
def schemas(draw: st.DrawFn) -> tuple[Parameter, ...]:
    """Zero-dimensional, empty, tiny, large, frozen, tied parameters of several dtypes."""
    shape = st.one_of(
        st.just(()),
        st.sampled_from(EDGES).map(lambda n: (n,)),
        st.tuples(st.integers(0, 70), st.integers(1, 70)),
    )
    made = []
    for number in range(draw(st.integers(0, 12))):
        aliases = [f"tied{number}"] if draw(st.booleans()) else []
        dtype, trainable = draw(st.sampled_from(DTYPES)), draw(st.booleans())
        made.append(parameter(f"p{number}", *draw(shape), dtype=dtype, trainable=trainable, aliases=aliases))
    return tuple(made)


@st.composite
def maps(draw: st.DrawFn) -> tuple[SliceMap, int]:
    bucket_bytes = draw(st.sampled_from([ALIGN * 8, 1000, 4096, 1 << 20]))
    slicing = draw(st.sampled_from(list(Slicing)))
    shards, groups = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    return cut(draw(schemas()), shards, groups, slicing, bucket_bytes), bucket_bytes


def tiles(parts: list[tuple[int, int]], lo: int, hi: int) -> bool:
    """`parts` cover [lo, hi) without gap or overlap."""
    at = lo
    for a, b in sorted(parts):
        if a != at or b < a:
            return False
        at = b
    return at == hi


def check_parameters_lie_apart(m: SliceMap) -> None:
    for space in m.spaces:
        assert space.itemsize == ITEM_BYTES[space.dtype]
        placed = [(m.offsets[i][1], p) for i, p in enumerate(m.parameters) if m.offsets[i][0] == space.index]
        assert all(p.dtype == space.dtype and offset % ALIGN == 0 for offset, p in placed)
        assert tiles([(o, o + -(-p.count // ALIGN) * ALIGN) for o, p in placed], 0, space.length)


def check_each_element_has_one_home(m: SliceMap) -> None:
    for index, p in enumerate(m.parameters):
        space, offset = m.offsets[index]
        segments = m.segments_of_parameter(index)
        assert [s.lo for s in segments] == sorted(s.lo for s in segments)
        assert tiles([(s.lo, s.hi) for s in segments], offset, offset + p.count)
        for s in segments:
            lo, hi = m.ranges[space][s.shard]
            assert (s.parameter, s.space, s.start) == (index, space, s.lo - offset)
            assert s.start % ALIGN == 0
            assert lo <= s.lo < s.hi <= hi
    assert len(m.segments) == sum(len(m.segments_of_parameter(i)) for i in range(len(m.parameters)))


def check_each_element_is_in_one_bucket(m: SliceMap, bucket_bytes: int) -> None:
    for space in m.spaces:
        buckets = [b for b in m.buckets if b.space == space.index]
        assert tiles([(b.lo, b.hi) for b in buckets], 0, space.length)
        assert all(0 < (b.hi - b.lo) * space.itemsize <= bucket_bytes for b in buckets)
        assert all(b.lo % ALIGN == b.hi % ALIGN == 0 for b in buckets)
    for b in m.buckets:
        lo, hi = m.ranges[b.space][b.shard]
        units = (hi - lo) // ALIGN
        master = [lo + ALIGN * (units * k // m.groups) for k in (b.master, b.master + 1)]
        assert lo <= master[0] <= b.lo < b.hi <= master[1] <= hi


def check_each_element_is_in_one_piece(m: SliceMap) -> None:
    for segment in m.segments:
        pieces = m.pieces_of(segment.id)
        assert tiles([(piece.lo, piece.hi) for piece in pieces], segment.lo, segment.hi)
        for piece in pieces:
            bucket = m.buckets[piece.bucket]
            assert piece in bucket.pieces
            assert (piece.segment, bucket.shard) == (segment.id, segment.shard)
            assert bucket.lo <= piece.lo < piece.hi <= bucket.hi
    pieces = [piece for bucket in m.buckets for piece in bucket.pieces]
    assert len(pieces) == sum(len(m.pieces_of(segment.id)) for segment in m.segments)
    assert all(bucket.pieces == tuple(sorted(bucket.pieces, key=lambda p: p.lo)) for bucket in m.buckets)


def check_ids_are_dense(m: SliceMap) -> None:
    for items, of in ((m.segments, m.segments_of), (m.buckets, m.buckets_of)):
        assert [item.id for item in items] == list(range(len(items)))
        assert [item.id for shard in range(m.shards) for item in of(shard)] == list(range(len(items)))
        assert all(item.shard == shard for shard in range(m.shards) for item in of(shard))


def check_balance(m: SliceMap) -> None:
    for ranges in m.ranges:
        sizes = [hi - lo for lo, hi in ranges]
        assert m.slicing is Slicing.kTensor or max(sizes) - min(sizes) <= ALIGN
    sizes = [p.count * ITEM_BYTES[p.dtype] for p in m.parameters]
    assert sum(m.shard_bytes) == sum(sizes)
    if m.slicing is Slicing.kTensor:
        assert len(m.segments) == sum(1 for p in m.parameters if p.count)
        assert max(m.shard_bytes) - min(m.shard_bytes) <= max(sizes, default=0)


@given(maps())
@settings(max_examples=examples(250), deadline=None)
def test_every_map_follows_the_rules(made):
    m, bucket_bytes = made
    check_parameters_lie_apart(m)
    check_each_element_has_one_home(m)
    check_each_element_is_in_one_bucket(m, bucket_bytes)
    check_each_element_is_in_one_piece(m)
    check_ids_are_dense(m)
    check_balance(m)


@given(schemas(), st.integers(1, 16), st.integers(1, 4), st.sampled_from(list(Slicing)))
@settings(max_examples=examples(60), deadline=None)
def test_the_same_schema_gives_the_same_map_everywhere(schema, shards, groups, slicing):
    here, there = cut(schema, shards, groups, slicing), cut(parse(describe(schema)), shards, groups, slicing)
    assert here == there
    assert here.digest == there.digest


def test_the_digest_tells_maps_apart():
    schema = [parameter("a", 1000), parameter("b", 1000)]
    others = [
        cut(schema, 2),
        cut(schema, 3),
        cut(schema, 2, 2),
        cut(schema, 2, 1, Slicing.kTensor),
        cut(schema, 2, bucket_bytes=1024),
        cut(schema[::-1], 2),
        cut([replace(schema[0], trainable=False), schema[1]], 2),
        cut([replace(schema[0], name="c"), schema[1]], 2),
        cut([replace(schema[0], aliases=("c",)), schema[1]], 2),
    ]
    assert len({m.digest for m in others}) == len(others)


def test_a_cut_inside_a_parameter_is_at_a_multiple_of_64_from_its_start():
    m = cut([parameter("a", 100), parameter("b", 1000)], 3, bucket_bytes=ALIGN * 4)
    assert m.ranges == (((0, 384), (384, 768), (768, 1152)),)
    assert [(s.parameter, s.shard, s.start, s.hi - s.lo) for s in m.segments] == [
        (0, 0, 0, 100),
        (1, 0, 0, 256),
        (1, 1, 256, 384),
        (1, 2, 640, 360),
    ]


def test_more_servers_than_units_of_alignment_leave_some_without_work():
    m = cut([parameter("a", 3), parameter("b"), parameter("c", 0)], 5, groups=3)
    assert [len(m.buckets_of(shard)) for shard in range(5)] == [0, 0, 1, 0, 1]
    assert m.segments_of_parameter(2) == ()
    assert (m.buckets[0].lo, m.buckets[0].hi, m.buckets[0].pieces[0].hi) == (0, 64, 3)


def test_no_parameter_at_all():
    m = cut([], 4)
    assert (m.spaces, m.buckets, m.imbalance, m.buckets_of(3)) == ((), (), 0.0, ())


def test_spaces_follow_the_first_use_of_a_dtype():
    m = cut([parameter("a", 5, dtype="bfloat16"), parameter("b", 5), parameter("c", 70, dtype="bfloat16")], 1)
    assert [(s.dtype, s.itemsize, s.length) for s in m.spaces] == [("bfloat16", 2, 192), ("float32", 4, 64)]
    assert m.offsets == ((0, 0), (1, 0), (0, 64))


def test_whole_tensors_are_balanced_and_the_imbalance_is_told():
    sizes = [100, 900, 500, 400, 90]
    m = cut([parameter(f"p{n}", size) for n, size in enumerate(sizes)], 2, slicing=Slicing.kTensor)
    assert m.shard_bytes == (1000 * 4, 990 * 4)
    assert m.imbalance == pytest.approx(1000 / 995 - 1)
    assert [(s.parameter, s.shard) for s in m.segments] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]
    one = cut([parameter("all", 10_000)], 4, slicing=Slicing.kTensor)
    assert one.imbalance == pytest.approx(3.0)


def gpt2_small() -> Iterator[Parameter]:
    """124 M elements; the word embedding is tied to the output layer."""
    d = 768
    yield parameter("wte", 50257, d, aliases=["lm_head"])
    yield parameter("wpe", 1024, d)
    for layer in range(12):
        shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
        yield from (parameter(f"h{layer}.{n}", *shape) for n, shape in enumerate(shapes))
    yield from (parameter("ln_f.weight", d), parameter("ln_f.bias", d))


def convolution(name: str, out: int, inp: int, size: int) -> Iterator[Parameter]:
    """A convolution without bias and its batch norm."""
    yield parameter(f"{name}.conv", out, inp, size, size)
    yield from (parameter(f"{name}.bn.weight", out), parameter(f"{name}.bn.bias", out))


def resnet50() -> Iterator[Parameter]:
    """25.6 M elements."""
    yield from convolution("stem", 64, 3, 7)
    inp = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            name, out = f"{stage}.{block}", 4 * width
            shapes = [(width, inp, 1), (width, width, 3), (out, width, 1), *([(out, inp, 1)] if block == 0 else [])]
            for n, shape in enumerate(shapes):
                yield from convolution(f"{name}.{n}", *shape)
            inp = out
    yield from (parameter("fc.weight", 1000, 2048), parameter("fc.bias", 1000))


def vgg16() -> Iterator[Parameter]:
    """138 M elements, three quarters of them in one matrix."""
    inp = 3
    for n, out in enumerate([64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]):
        yield from (parameter(f"{n}.weight", out, inp, 3, 3), parameter(f"{n}.bias", out))
        inp = out
    for n, (out, inp) in enumerate([(4096, 25088), (4096, 4096), (1000, 4096)]):
        yield from (parameter(f"fc{n}.weight", out, inp), parameter(f"fc{n}.bias", out))


@pytest.mark.parametrize(
    ("model", "elements"), [(gpt2_small, 124_439_808), (resnet50, 25_557_032), (vgg16, 138_357_544)]
)
def test_defect_3_no_server_is_home_to_more_than_its_share(model, elements):
    schema = tuple(model())
    assert sum(p.count for p in schema) == elements
    for shards in (2, 3, 4, 7, 8, 16, 31, 32, 48, 64):
        m = cut(schema, shards)
        assert m.imbalance <= 0.01
        assert min(m.shard_bytes) >= 0.99 * sum(m.shard_bytes) / shards


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (-1,)}, "shape = "),
        ({"shape": (True,)}, "shape = "),
        ({"shape": (3, 3)}, "stride = "),
        ({"shape": (1 << 30, 1 << 30), "stride": (1, 1)}, "more than"),
        ({"dtype": "object"}, "must be one of bool"),
        ({"owners": (1, 0)}, "owners = .*ascending"),
        ({"owners": (0, 0)}, "owners = .*ascending"),
        ({"owners": (-1,)}, "owners = .*workers' numbers"),
        ({"owners": (True,)}, "owners = .*workers' numbers"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(change, message):
    with pytest.raises(SchemaError, match=f"parameter 'a'.*{message}"):
        replace(parameter("a", 3), **change)


def test_names_are_used_once():
    for other in (parameter("a", 1), parameter("b", 1, aliases=["a"])):
        with pytest.raises(SchemaError, match="'a' is used twice"):
            cut([parameter("a", 3), other], 2)


def owned(name: str, count: int, *owners: int, dtype: str = "float32") -> Parameter:
    return replace(parameter(name, count, dtype=dtype), owners=owners)


SPLIT = (
    owned("a", 100, 0),
    owned("b", 700, 1),
    parameter("c", 50),
    owned("d", 300, 0, 2),
    owned("e", 65, 1, dtype="float64"),
    owned("f", 40, 0),
)


@pytest.mark.parametrize("slicing", list(Slicing))
def test_a_space_has_parameters_of_the_same_owners(slicing):
    m = cut(SPLIT, 2, slicing=slicing)
    kinds = [(s.dtype, s.owners, s.length) for s in m.spaces]
    assert kinds == [
        ("float32", (0,), 192),
        ("float32", (1,), 704),
        ("float32", (), 64),
        ("float32", (0, 2), 320),
        ("float64", (1,), 128),
    ]
    assert all(m.spaces[space].owners == p.owners for p, (space, _) in zip(SPLIT, m.offsets, strict=True))
    check_parameters_lie_apart(m)
    assert [space.sending_worker for space in m.spaces] == [0, 1, 0, 0, 1]
    held = [{m.spaces[bucket.space].owners for bucket in m.buckets_on(worker)} for worker in range(4)]
    assert held == [{(0,), (), (0, 2)}, {(1,), ()}, {(), (0, 2)}, {()}]


def test_what_a_home_wants_holds_also_where_workers_own_parts():
    m = cut([*SPLIT, replace(owned("g", 10, 1), home=1)], 2)
    assert [m.segments[s.id].shard for s in m.segments_of_parameter(6)] == [1]
    assert all(len({s.shard for s in m.segments_of_parameter(index)}) == 1 for index in range(7))


def test_owners_survive_the_description_and_are_part_of_the_digest():
    assert parse(describe(SPLIT)) == SPLIT
    whole = [replace(p, owners=()) for p in SPLIT]
    assert cut(SPLIT, 2).digest != cut(whole, 2).digest
    assert "owners" not in describe(whole) and parse(describe(whole)) == tuple(whole)
    homes = (replace(SPLIT[0], home=1), replace(whole[1], home=0))
    assert parse(describe(homes)) == homes


def test_a_model_that_is_not_split_has_the_digest_that_it_had_before_splitting():
    schema = [parameter("a", 100), parameter("b", 1000, dtype="bfloat16", trainable=False, aliases=["c"])]
    assert cut(schema, 3, 2).digest == "9a57d10586de5246f0cd16d90cb8dab36fc08fcf43b677397f56d56fd469c453"


@pytest.mark.parametrize("counts", [{"shards": 0}, {"shards": 1, "groups": 0}, {"shards": 1, "bucket_bytes": 255}])
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match=f"{list(counts)[-1]} = .*must be a whole number >="):
        cut([parameter("a", 3)], **counts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 100_000,
        "[1]",
        '[["a"]]',
        '[["a",[3],[1],"float32",1,[]]]',
        '[["a",[3.0],[1],"float32",true,[]]]',
        '[["a",[3],[],"float32",true,[]]]',
        '[["a",[3],[1],"float32",true,[7]]]',
        '[["a",[3],[1],"float99",true,[]]]',
        '[["a",[1e400],[1],"float32",true,[]]]',
        '[["a",[%s],[1],"float32",true,[]]]' % ("9" * 5000),
        '[["a",[3],[1],"float32",true,[]],["a",[3],[1],"float32",true,[]]]',
        '[["a",[3],[1],"float32",true,[],[0]]]',
        '[["a",[3],[1],"float32",true,[],-1,[1,0]]]',
        '[["a",[3],[1],"float32",true,[],-1,["0"]]]',
        '[["a",[3],[1],"float32",true,[],-1,[0],0]]',
    ],
)
def test_a_schema_from_a_peer_is_checked(text):
    with pytest.raises(SchemaError):
        parse(text)
