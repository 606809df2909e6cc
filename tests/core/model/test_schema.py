"""The model's description as it travels, and flat buffers with their views."""

import re
from dataclasses import replace

import pytest
import torch

from topotrain.config.job import Slicing
from topotrain.config.sharding import Parameter, cut
from topotrain.core.model.schema import (
    FlatBuffers,
    ModelBuffer,
    PrivateMemory,
    Schema,
    SchemaParts,
    difference,
    parse_schema,
    torch_dtype,
    typed,
)
from topotrain.core.protocol import MAX_META, ProtocolError, SchemaPart, encode


def parameter(name="w", shape=(70, 3), dtype="float32", trainable=True):
    return Parameter(name, shape, torch.empty(shape).stride(), dtype, trainable)


def schema(*parameters, buffers=(), optimizer='{"lr":1}', digest="d"):
    return Schema(parameters or (parameter(),), tuple(buffers), optimizer, digest)


# --- the description ---------------------------------------------------------------------------------------------


def test_a_description_survives_its_parts_in_any_order():
    whole = schema(
        *(parameter(f"layer.{i}.größe", dtype="bfloat16") for i in range(2000)), buffers=[ModelBuffer("b", "int64", 1)]
    )
    parts = whole.parts()
    assert len(parts) > 2 and all(len(encode(part)[1]) <= MAX_META for part in parts)
    taking = SchemaParts()
    found = [taking.take(part) for part in reversed(parts)]
    assert found == [None] * (len(parts) - 1) + [whole]


def test_what_only_some_workers_hold_is_described_and_told():
    mine = schema(
        replace(parameter(), owners=(1,)), buffers=[ModelBuffer("b", "int64", 1, (0, 2)), ModelBuffer("c", "int64", 1)]
    )
    assert parse_schema(mine.text()) == mine
    assert [buffer.sending_worker for buffer in mine.buffers] == [0, 0]
    theirs = replace(mine, buffers=(ModelBuffer("b", "int64", 1, (2,)), mine.buffers[1]))
    assert (
        "me has b with 1 elements of int64, held by workers 0 and 2, you has b with 1 elements of int64, held by "
        in (difference(mine, theirs, "me", "you"))
    )
    plain = schema(buffers=[ModelBuffer("b", "int64", 1)])
    assert plain.text().endswith('[["b", "int64", 1]], "{\\"lr\\":1}", "d"]')


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "[[],[],1]", '["[]",[["b","nonsense",1]],"o","d"]', '["[]",[1],"o","d"]', '["[[1]]",[],"o","d"]'],
)
def test_what_is_no_description_is_refused(text):
    with pytest.raises(ProtocolError):
        parse_schema(text)


@pytest.mark.parametrize(("part", "parts"), [(-1, 2), (2, 2), (0, 0), (0, 10**9)])
def test_parts_that_cannot_be_are_refused(part, parts):
    with pytest.raises(ProtocolError, match=f"part {part} of {parts}"):
        SchemaParts().take(SchemaPart(part, parts, "x"))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            schema(parameter(shape=(70, 4))),
            r"parameter w: worker 0/0 has w of shape \(70, 3\), float32, worker 0/1 .*4",
        ),
        (schema(parameter(trainable=False)), "worker 0/1 has w of shape .*frozen"),
        (schema(parameter(), parameter("v")), "worker 0/1 has 2 parameters, worker 0/0 has 1"),
        (schema(buffers=[ModelBuffer("b", "int64", 1)]), "worker 0/1 has 1 buffers, worker 0/0 has 0"),
        (schema(replace(parameter(), owners=(0, 1))), "worker 0/1 has w of .*float32, held by workers 0 and 1$"),
        (schema(optimizer='{"lr":2}'), 'the optimizers differ: worker 0/0 has {"lr":1}, worker 0/1 has {"lr":2}'),
        (schema(digest="e"), "cuts into slices differ between worker 0/0 and worker 0/1"),
        (schema(), "^$"),
    ],
)
def test_a_difference_is_described(theirs, words):
    assert re.search(words, difference(schema(), theirs, "worker 0/0", "worker 0/1"))


def test_a_dtype_has_a_name():
    assert torch_dtype("bfloat16") is torch.bfloat16
    for name in ("nn", "no_such", "Tensor", ""):
        with pytest.raises(ProtocolError, match="is not a dtype"):
            torch_dtype(name)
    assert ModelBuffer("b", "int64", 3).nbytes == 24


# --- buffers -----------------------------------------------------------------------------------------------------


def test_the_shards_views_are_parts_of_one_whole():
    parameters = [parameter("a", (100,)), parameter("b", (7, 9)), parameter("c", (5,), "float64")]
    slice_map = cut(parameters, 2, bucket_bytes=1024)
    whole = FlatBuffers(slice_map, None, PrivateMemory())
    for space in slice_map.spaces:
        whole.flat("values", space.index).copy_(torch.arange(space.length))
    for shard in (0, 1):
        mine = FlatBuffers(slice_map, shard, PrivateMemory())
        for bucket in slice_map.buckets_of(shard):
            mine.view("values", bucket).copy_(whole.view("values", bucket))
        for segment in slice_map.segments_of(shard):
            assert torch.equal(mine.segment("values", segment), whole.segment("values", segment))
            assert mine.segment("values", segment)[0] == segment.lo


def test_views_are_made_once_and_names_apart():
    slice_map = cut([parameter()], 1)
    flats = FlatBuffers(slice_map, 0, PrivateMemory())
    (bucket,) = slice_map.buckets
    assert flats.view("a", bucket) is flats.view("a", bucket)
    flats.view("a", bucket).fill_(1)
    assert not flats.view("b", bucket).any()
    given = torch.full((bucket.hi,), 5.0)
    flats.put("c", 0, given)
    assert flats.view("c", bucket).data_ptr() == given.data_ptr()


def test_who_asks_while_a_buffer_is_being_made_gets_the_same():
    """Values of several servers arrive on as many threads; none may land in memory that nobody sees."""
    slice_map = cut([parameter()], 1)

    class Interrupted(PrivateMemory):
        def allocate(self, numel, dtype):
            if not asked:  # somebody else comes in between
                asked.append(None)
                asked.append(flats.flat("params", 0))
            return super().allocate(numel, dtype)

    asked = []
    flats = FlatBuffers(slice_map, None, Interrupted())
    assert flats.flat("params", 0) is asked[1] is flats.flat("params", 0)


def test_whole_tensors_have_the_parameters_shape_and_strides():
    odd = Parameter("w", (4, 6), (1, 4), "float32", True)
    slice_map = cut([odd], 1, slicing=Slicing.kTensor)
    flats = FlatBuffers(slice_map, 0, PrivateMemory())
    (segment,) = slice_map.segments
    assert flats.segment("values", segment).shape == (4, 6)
    assert flats.segment("values", segment).stride() == (1, 4)


def test_a_body_becomes_elements_or_is_refused():
    like = torch.zeros(6)
    raw = torch.arange(6.0).view(torch.uint8)
    assert torch.equal(typed(raw, like), torch.arange(6.0))
    for wrong in (raw[:20], raw[:21], torch.zeros(7)):
        with pytest.raises(ProtocolError, match="bytes, expected 24"):
            typed(wrong, like)
