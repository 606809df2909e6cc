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


def test_a_name_or_an_alias_is_used_once():
    for other in (parameter("a"), parameter("tied"), parameter("b", aliases=("a",)), parameter("b", aliases=("tied",))):
        with pytest.raises(SchemaError, match="is used twice: tied weights are one parameter with aliases"):
            cut([parameter("a", aliases=("tied",)), other], 1)


def test_a_parameter_with_a_home_is_on_that_server_and_all_tensors_stay_whole():
    made = cut([replace(parameter("a", 300), home=2), parameter("b", 500), replace(parameter("c", 20), home=0)], 3)
    assert {made.parameters[each.parameter].name: each.shard for each in made.segments} == {"a": 2, "b": 1, "c": 0}
    assert len(made.segments) == 3


def test_defect_3_no_server_is_home_to_more_than_its_share():
    schema = tuple(gpt2_small())
    assert sum(p.count for p in schema) == 124_439_808
    for shards in (2, 3, 7, 16, 64):
        m = cut(schema, shards)
        assert m.imbalance <= 0.01
        assert min(m.shard_bytes) >= 0.99 * sum(m.shard_bytes) / shards


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (-1,)}, "shape = "),
        ({"shape": (3, 3)}, "stride = "),
        ({"shape": (1 << 30, 1 << 30), "stride": (1, 1)}, "more than"),
        ({"dtype": "object"}, "must be one of bool"),
        ({"owners": (1, 0)}, "owners = .*ascending"),
        ({"owners": (-1,)}, "owners = .*workers' numbers"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(change, message):
    with pytest.raises(SchemaError, match=f"parameter 'a'.*{message}"):
        replace(parameter("a", 3), **change)


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
        "[" * 100_000,
        '[["a"]]',
        '[["a",[3],[1],"float32",1,[]]]',
        '[["a",[3.0],[1],"float32",true,[]]]',
        '[["a",[3],[1],"float99",true,[]]]',
        '[["a",[1e400],[1],"float32",true,[]]]',
        '[["a",[%s],[1],"float32",true,[]]]' % ("9" * 5000),
        '[["a",[3],[1],"float32",true,[]],["a",[3],[1],"float32",true,[]]]',
        '[["a",[3],[1],"float32",true,[],[0]]]',
        '[["a",[3],[1],"float32",true,[],-1,["0"]]]',
        '[["a",[3],[1],"float32",true,[],-1,[0],0]]',
    ],
)
def test_a_schema_from_a_peer_is_checked(text):
    with pytest.raises(SchemaError):
        parse(text)
