"""The key-value store in an ordinary process: MXNet's words, torch's arithmetic, clear refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.extensions.tables.frontend.value_layout import WIDEST, ValueLayout

rows = partial(torch.sparse_coo_tensor, check_invariants=True)


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_every_kind_works_with_one_worker(kind):
    kv = tt.kvstore.create(kind)
    assert (kv.type, kv.rank, kv.num_workers) == (kind, 0, 1)
    kv.init("w", torch.ones(3, 4))
    out = torch.zeros(3, 4)
    assert kv.pull("w", out=out) is out
    assert torch.equal(out, torch.ones(3, 4))
    kv.push("w", torch.full((3, 4), 2.0))
    kv.barrier()
    assert torch.equal(kv.pull("w"), torch.full((3, 4), 3.0 if kind == "dist_async" else 2.0))
    kv.init("n", 1.0)
    kv.push("n", 5.0)
    assert float(kv.pull("n")) == (6.0 if kind == "dist_async" else 5.0)


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (WIDEST + 1,), (3, 4), (2, 3, 3), (2, 2 * WIDEST + 5), (1, 1, 1)], ids=str
)
def test_a_value_of_any_shape_comes_back(shape):
    layout = ValueLayout.of(shape)
    assert layout.width <= WIDEST
    value = torch.randn(shape)
    rows = layout.split(value)
    assert rows.shape == (layout.rows, layout.width)
    assert torch.equal(layout.join(rows).reshape(shape), value)
    if value.numel():
        rows.zero_()  # what is pushed is the store's own
        assert value.abs().sum() > 0
    kv = tt.kvstore.create("local")
    kv.init(0, value)
    assert torch.equal(kv.pull(0), value)


def test_lists_of_keys_and_lists_of_values():
    kv = tt.kvstore.create()
    kv.init(["a", 7], [torch.zeros(2), torch.ones(2, 2)])
    kv.push(["a", 7], [[torch.ones(2), torch.ones(2)], torch.ones(2, 2)])
    outs = [torch.zeros(2), [torch.zeros(2, 2), torch.zeros(2, 2)]]
    assert kv.pull(["a", 7], out=outs) == outs
    assert torch.equal(outs[0], torch.full((2,), 2.0))
    assert all(torch.equal(out, torch.ones(2, 2)) for out in outs[1])
    value = torch.full((2,), 4.0)
    assert kv.pushpull("a", value) is value
    assert torch.equal(kv.broadcast("b", torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (lambda: tt.kvstore.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (lambda: tt.kvstore.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (lambda: torch.optim.RMSprop([torch.zeros(1)]), lambda p: torch.optim.RMSprop(p)),
    ],
    ids=["sgd", "adam", "a torch object"],
)
def test_with_an_optimizer_a_push_is_a_gradient(make, reference):
    expected = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(()))]
    kv = tt.kvstore.create("dist_sync")
    kv.init([0, 1], [p.detach().clone() for p in expected])
    rule, plain = make(), reference(expected)
    kv.set_optimizer(rule, rescale_grad=0.5)
    for step in range(4):
        rule.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.1 / (1 + step)
        grads = [torch.randn_like(p) for p in expected]
        kv.push([0, 1], grads)
        for p, grad in zip(expected, grads):
            p.grad = grad * 0.5
        plain.step()
        for value, p in zip(kv.pull([0, 1]), expected):
            assert torch.allclose(value, p.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes such tensors
def test_rows():
    kv = tt.kvstore.create("dist_sync")
    kv.init("table", rows(size=(10_000_000, 4)))
    kv.set_optimizer(tt.kvstore.Adagrad(lr=0.5))
    ids = torch.tensor([9_999_999, 3, 3])
    assert kv.row_sparse_pull("table", row_ids=ids).values().abs().sum() == 0
    kv.push("table", rows(ids[None], torch.ones(3, 4), (10_000_000, 4)))
    found = kv.row_sparse_pull("table", row_ids=ids).coalesce()
    assert found.shape == (10_000_000, 4)
    assert found.indices()[0].tolist() == [3, 9_999_999]
    reference = nn.Embedding(10, 4, sparse=True)
    nn.init.zeros_(reference.weight)
    rule = torch.optim.Adagrad(reference.parameters(), lr=0.5)
    reference(torch.tensor([3, 9, 3])).sum().backward()
    rule.step()
    assert torch.equal(found.values(), reference.weight.detach()[[3, 9]])


def test_rows_of_a_dense_key():
    kv = tt.kvstore.create()
    kv.init("w", torch.zeros(6, 2))
    out = torch.full((6, 2), 7.0)
    kv.push("w", torch.arange(12.0).reshape(6, 2))
    assert kv.row_sparse_pull("w", out=out, row_ids=[4, 1]) is out
    assert out.tolist() == [[7, 7], [2, 3], [7, 7], [7, 7], [8, 9], [7, 7]]
    kv.set_optimizer(tt.kvstore.SGD(lr=1.0, momentum=0.5))
    kv.push("w", rows([[2]], torch.ones(1, 2), (6, 2)))
    assert kv.pull("w")[2].tolist() == [3, 4]


def test_init_twice_keeps_the_first_value_of_workers():
    kv = tt.kvstore.create("dist_sync")
    kv.init("w", torch.ones(2))
    kv.init("w", torch.zeros(2))
    assert torch.equal(kv.pull("w"), torch.ones(2))
    local = tt.kvstore.create()
    local.init("w", torch.ones(2))
    with pytest.raises(ConfigError, match="is there already"):
        local.init("w", torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_key_of_half_precision_is_a_rounded_float32(dtype):
    """Steps that are too small for the dtype add up, as with MXNet's `multi_precision`."""
    kv = tt.kvstore.create("dist_sync")
    kv.init(["dense", "rows"], [torch.ones(4, 2, dtype=dtype), rows(size=(4, 2), dtype=dtype)])
    kv.set_optimizer(tt.kvstore.SGD(lr=1e-4, multi_precision=True))
    for _ in range(100):
        kv.push("dense", [torch.ones(4, 2, dtype=dtype)] * 2)
        kv.push("rows", rows([[1]], torch.ones(1, 2, dtype=dtype), (4, 2)))
    assert torch.equal(kv.pull("dense"), torch.full((4, 2), 0.98).to(dtype))
    found = kv.row_sparse_pull("rows", row_ids=[1])
    assert found.dtype == dtype and torch.equal(found.values(), torch.full((1, 2), -0.01).to(dtype))


def test_names_of_stores_and_of_an_optimizers_numbers():
    """What MXNet's programs write."""
    assert [tt.kvstore.create(name).type for name in ("Device", "local_update_cpu", "dist_device_sync")] == [
        "device",
        "local_update_cpu",
        "dist_device_sync",
    ]
    assert tt.kvstore.create().is_capable("optimizer")
    kv = tt.kvstore.create("dist_sync_device")
    kv.init("w", [torch.ones(2)])
    kv.set_optimizer(
        tt.kvstore.SGD(learning_rate=0.5, wd=0.25, rescale_grad=0.5, lazy_update=True, clip_gradient=None),
        rescale_grad=0.5,
    )
    kv.push("w", np.ones(2, dtype="float32"))
    kv._barrier()
    assert torch.equal(kv.pull("w"), torch.ones(2) - 0.5 * (0.25 + 0.25))


def test_rows_into_several_tensors():
    kv = tt.kvstore.create()
    kv.init("e", torch.ones(4, 4).to_sparse())
    # Sparse tensors with other dimensions, and not empty.
    outs = [torch.ones(4, 4).to_sparse(), torch.ones(4, 4).to_sparse(1), torch.zeros(4, 4)]
    assert kv.row_sparse_pull("e", out=outs, row_ids=[torch.tensor([0.0, 2.0]), [1], torch.tensor([])]) == outs
    assert [out.to_dense()[:, 0].tolist() for out in outs] == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    kv.row_sparse_pull(["e"], out=[outs], row_ids=[[3, 3]])
    assert [out.to_dense()[:, 0].tolist() for out in outs] == [[0, 0, 0, 1]] * 3
    kv.row_sparse_pull("e", out=outs, row_ids=[torch.tensor(2)])
    assert outs[0].to_dense()[:, 0].tolist() == [0, 0, 1, 0]


def test_an_updater_of_a_local_store():
    kv = tt.kvstore.create()
    kv.init(["a", 1], [torch.zeros(2), torch.ones(2)])
    keys = []

    def add(key, received, stored):
        keys.append(key)
        stored += 2 * received

    kv._set_updater(add)
    kv.push(["a", 1], [[torch.ones(2)] * 2] * 2)
    assert keys == ["a", 1] and torch.equal(kv.pull("a"), torch.full((2,), 4.0))
    kv.set_optimizer(tt.kvstore.SGD(lr=1.0))
    kv.push("a", torch.ones(2))
    assert torch.equal(kv.pull("a"), torch.full((2,), 3.0))


def test_methods_that_are_not_there_say_what_is():
    kv = tt.kvstore.create("dist_sync")
    with pytest.raises(AttributeError, match=r"set_gradient_compression: cluster\.compression"):
        kv.set_gradient_compression({"type": "2bit"})
    assert not hasattr(kv, "save_optimizer_states") and not hasattr(kv, "other")
    with pytest.raises(ConfigError, match=r"dist_sync.*kv\.set_optimizer"):
        kv.set_updater(lambda *_: None)
    with pytest.raises(ValueError, match="unknown capability"):
        kv.is_capable("sparse")


W = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda kv: tt.kvstore.create("dist_snyc"), ["dist_snyc", "dist_sync", "local"]),
        (lambda kv: tt.kvstore.create(3), ["3", "dist_sync"]),
        (lambda kv: kv.pull("v"), ["'v'", "never given to kv.init", "'w'"]),
        (lambda kv: kv.push("v", W), ["'v'", "never given to kv.init", "'w'"]),
        (lambda kv: kv.push("w", torch.zeros(4, 3)), ["'w'", "(4, 3)", "(3, 4)"]),
        (lambda kv: kv.push("w", W.double()), ["'w'", "float64", "float32"]),
        (lambda kv: kv.pull("w", out=torch.zeros(2)), ["'w'", "(2,)", "(3, 4)"]),
        (lambda kv: kv.pull("w", out=3), ["'w'", "int", "tensor"]),
        (lambda kv: kv.push("w", "text"), ["'w'", "str", "a tensor, a numpy array or a number"]),
        (lambda kv: kv.init("w", torch.zeros(2)), ["'w'", "(2,)", "already", "(3, 4)"]),
        (lambda kv: kv.init("h", W.bool()), ["'h'", "bool", "float32", "bfloat16"]),
        (lambda kv: kv.init("e", torch.zeros(0, 3)), ["'e'", "(0, 3)"]),
        (lambda kv: kv.init(1.5, W), ["1.5", "text or a whole number"]),
        (lambda kv: kv.init(["a", "b"], [W]), ["2 keys, 1 values", "as many"]),
        (lambda kv: kv.init("a", [W, W]), ["'a'", "one value"]),
        (lambda kv: kv.row_sparse_pull("w", out=[W, W], row_ids=[torch.tensor([0])] * 3), ["'w'", "3", "must be 2"]),
        (lambda kv: kv.row_sparse_pull("w", out=torch.zeros(4, 4), row_ids=[0]), ["'w'", "(4, 4)", "(3, 4)"]),
        (lambda kv: tt.kvstore.SGD(momentum=0.9), ["SGD", "lr"]),
        (lambda kv: tt.kvstore.SGD(lr=0.1, rescale_grad="half"), ["SGD", "rescale_grad", "half"]),
        (lambda kv: tt.kvstore.SGD(lr=0.1, clip_gradient=1.0), ["SGD", "clip_gradient"]),
        (
            lambda kv: tt.Embedding(3, 2, optimizer=tt.kvstore.SGD(lr=0.1, rescale_grad=0.5)),
            ["tt.Embedding", "rescale_grad", "0.5"],
        ),
        (lambda kv: kv.row_sparse_pull("w", row_ids=[3]), ["'w'", "3", "0 to 2"]),
        (lambda kv: kv.row_sparse_pull("w", row_ids=[-1]), ["'w'", "-1", "0 to 2"]),
        (lambda kv: kv.row_sparse_pull("w", row_ids=[0.5]), ["'w'", "whole numbers"]),
        (lambda kv: kv.row_sparse_pull("w"), ["'w'", "row_ids"]),
        (lambda kv: kv.row_sparse_pull("b", row_ids=[0]), ["'b'", "two dimensions"]),
        (lambda kv: kv.row_sparse_pull("w", row_ids="first"), ["'w'", "first", "whole numbers"]),
        (lambda kv: kv.row_sparse_pull("w", out="w", row_ids=[0]), ["'w'", "str", "out"]),
        (lambda kv: kv.push("w", []), ["'w'", "must have a value"]),
        (lambda kv: kv.set_optimizer(tt.kvstore.SGD(lr=0.1), rescale_grad="half"), ["rescale_grad", "half"]),
        (lambda kv: kv.set_optimizer("sgd"), ["str", "tt.kvstore.SGD"]),
        (lambda kv: kv.set_optimizer(torch.optim.LBFGS([torch.zeros(1)])), ["LBFGS"]),
        (lambda kv: tt.kvstore.SGD(lr=-1.0, nesterov=True), ["SGD", "esterov"]),
        (lambda kv: tt.kvstore.SGD(lr=0.1, moment=1), ["SGD", "moment"]),
    ],
)
def test_what_is_refused(wrong, words):
    kv = tt.kvstore.create("dist_sync")
    kv.init(["w", "b"], [W, torch.zeros(3)])
    with pytest.raises(ConfigError) as told:
        wrong(kv)
    for word in words:
        assert word in str(told.value)


def test_an_optimizer_of_rows_must_leave_the_others_alone():
    kv = tt.kvstore.create("dist_sync")
    kv.init("table", rows(size=(100, 4)))
    with pytest.raises(ConfigError, match="momentum"):
        kv.set_optimizer(tt.kvstore.SGD(lr=0.1, momentum=0.9))
    with pytest.raises(ConfigError, match=r"Adam.*SparseAdam"):
        kv.set_optimizer(tt.kvstore.Adam())
