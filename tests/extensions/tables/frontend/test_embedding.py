"""Tables of a model in an ordinary process: torch's arithmetic on touched rows, their files, and what is refused."""

import pytest
import torch
from torch import nn

import topotrain as tt
from topotrain.config.job import ConfigError
from topotrain.extensions.tables.frontend.sparse_embedding import find_sparse
from topotrain.extensions.tables.frontend.table_export import read_parts, write_parts

RULES = {
    "SGD": (tt.kvstore.SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "Adagrad": (tt.kvstore.Adagrad(lr=0.3, lr_decay=0.1), lambda p: torch.optim.Adagrad(p, lr=0.3, lr_decay=0.1)),
    "SparseAdam": (tt.kvstore.SparseAdam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
}


class Tail(nn.Module):
    """Something with a parameter behind a table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.bias = table, nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) * torch.arange(1.0, 4)).square() + self.bias


def rows_of(table: tt.Embedding) -> dict[int, list[float]]:
    return {int(i): row.tolist() for ids, values in table.touched() for i, row in zip(ids, values, strict=True)}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes such tensors
@pytest.mark.parametrize("rule", RULES)
def test_touched_rows_are_those_of_a_sparse_embedding(rule):
    ours, theirs = RULES[rule]
    table = tt.Embedding(50, 3, init="normal 0 1", optimizer=ours, name="t")
    with torch.no_grad():
        start = table(torch.arange(50))
    reference = nn.Embedding(50, 3, sparse=True, _weight=start.clone())
    model, other = Tail(table), Tail(reference)
    model, optimizer = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    its = theirs(reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        its.zero_grad()
        for half in range(2):  # gradients of several backwards add up
            ids = torch.tensor([[1, 7, 7], [step, 30 + half, 1]])
            model(ids).sum().backward()
            other(ids).sum().backward()
        optimizer.step()
        its.step()
        with torch.no_grad():
            assert torch.allclose(table(torch.arange(50)), reference.weight, rtol=1e-6, atol=1e-7)
    assert float(model.bias.detach()[0]) != 0


def test_zero_grad_forgets_and_eval_gathers_nothing():
    table = tt.Embedding(None, 3, init="zeros", optimizer=tt.kvstore.SGD(lr=1.0))
    model = Tail(table)
    model, optimizer = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    table(torch.tensor([5])).sum().backward()
    optimizer.zero_grad()
    model.eval()
    model(torch.tensor([6]))
    optimizer.step()
    assert rows_of(table) == {5: [0, 0, 0], 6: [0, 0, 0]}
    model.train()
    table(torch.tensor([10**15, 10**15])).sum().backward()
    optimizer.step()
    assert rows_of(table)[10**15] == [-2, -2, -2]


def test_tables_without_a_name_have_different_ones():
    first, second = (tt.Embedding(9, 3, init="uniform 0 1", optimizer=tt.kvstore.SGD(lr=1.0)) for _ in range(2))
    assert first.name != second.name
    assert not torch.equal(first(torch.arange(9)), second(torch.arange(9)))


def test_rows_that_the_table_cannot_have_are_not_loaded(tmp_path):
    ids, values = torch.arange(20), torch.zeros(20, 3)
    write_parts(tmp_path / "many", [(ids, values)], {})
    small = tt.Embedding(10, 3, init="zeros", optimizer=tt.kvstore.SGD(lr=1.0))
    with pytest.raises(ConfigError, match="has row 19, rows must be >= 0 and below 10"):
        small.load(tmp_path / "many")
    write_parts(tmp_path / "wrong", [(ids.float(), values)], {})
    with pytest.raises(ConfigError, match="must hold ids and values of 3 elements"):
        small.load(tmp_path / "wrong")
    assert rows_of(small) == {}


def test_ids_of_any_shape_and_the_rates_of_a_schedule():
    rule = tt.kvstore.SGD(lr=1.0)
    table = tt.Embedding(9, 3, init="zeros", optimizer=rule, dtype=torch.float64)
    assert table(torch.zeros(2, 5, 4, dtype=torch.int32)).shape == (2, 5, 4, 3)
    assert table(torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    table.forget()
    model = Tail(table)
    model, optimizer = tt.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rule.param_groups[0]["lr"] = 0.25
    table(torch.tensor(2)).sum().backward()
    optimizer.step()
    assert rows_of(table)[2] == [-0.25] * 3
    (here,) = table.stats()
    assert here["server"] == "here"
    assert here["rows"] == 2
    assert here["bytes"] >= 2 * 3 * 8


def test_a_table_comes_back_from_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("topotrain.extensions.tables.frontend.table_export.PART_BYTES", 4096)
    table = tt.Embedding(None, 8, init="normal 0 1", optimizer=tt.kvstore.SGD(lr=1.0), name="t")
    ids = torch.randperm(1000)[:400] * 1_000_003
    with torch.no_grad():
        values = table(ids)
    pieces = ((i, v) for i, v in zip(ids.split(50), values.split(50), strict=True))
    assert write_parts(tmp_path / "t", pieces, {"name": "t"}) == 400
    assert len(list((tmp_path / "t").glob("part-*.safetensors"))) == 4
    assert sum(len(i) for i, _ in read_parts(tmp_path / "t", 8)) == 400
    reference = tt.Embedding(None, 8, init="zeros", optimizer=tt.kvstore.SGD(lr=1.0), name="u")
    reference.load(tmp_path / "t")
    with torch.no_grad():
        assert torch.equal(reference(ids), values)
    with pytest.raises(ConfigError, match=r"of 9 elements"):
        tt.Embedding(None, 9, optimizer=tt.kvstore.SGD(lr=1.0)).load(tmp_path / "t")
    with pytest.raises(ConfigError, match="folder = 5: must be a path"):
        reference.load(5)
    with pytest.raises(ConfigError, match=r"index\.json"):
        reference.load(tmp_path / "nowhere")
    (tmp_path / "t" / "part-00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="safetensors"):
        reference.load(tmp_path / "t")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": "sgd"}, ["str", "tt.kvstore.SGD"]),
        ({"optimizer": tt.kvstore.Adam()}, ["Adam", "SparseAdam"]),
        ({"optimizer": tt.kvstore.SGD(lr=1.0, momentum=0.9)}, ["momentum", "0.9", "must be 0"]),
        ({"optimizer": tt.kvstore.Adagrad(weight_decay=0.1)}, ["weight_decay", "0.1"]),
        ({"init": "normal(1)"}, ["normal(1)", "uniform LO HI"]),
        ({"dtype": torch.float16}, ["float16", "float32"]),
        ({"name": "a/b"}, ["a/b", "folder"]),
        ({"num_embeddings": 0}, ["num_embeddings", "0"]),
        ({"num_embeddings": -1}, ["num_embeddings", "-1"]),
        ({"name": 5}, ["name", "5"]),
        ({"embedding_dim": 0}, ["width", "0"]),
    ],
)
def test_what_a_table_refuses(more, words):
    with pytest.raises(ConfigError) as told:
        tt.Embedding(**{"num_embeddings": 5, "embedding_dim": 2, "optimizer": tt.kvstore.SGD(lr=1.0), **more})
    for word in words:
        assert word in str(told.value)


def test_ids_that_cannot_be():
    table = tt.Embedding(5, 2, optimizer=tt.kvstore.SGD(lr=1.0), name="t")
    for ids, kind, words in (
        ([5], ValueError, "id 5 .* below 5"),
        ([-1, 2], ValueError, "id -1"),
        ([1.7], TypeError, r"ids are torch\.float32"),
    ):
        with pytest.raises(kind, match=f"t: {words}"):
            table(torch.tensor(ids))


def test_which_weights_are_sparse():
    table = nn.Embedding(9, 4, sparse=True)
    bag = nn.EmbeddingBag(5, 4, sparse=True)
    twice = nn.Embedding(9, 4, sparse=True)
    twice.weight = table.weight
    frozen = nn.Embedding(3, 4, sparse=True).requires_grad_(False)
    model = nn.ModuleDict({"a": table, "b": bag, "c": twice, "d": frozen, "e": nn.Embedding(3, 4)})
    first, second = find_sparse(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (first.names, second.names) == (["a.weight", "c.weight"], ["b.weight"])
    with pytest.raises(ConfigError, match=r"a\.weight.*must be in a parameter group"):
        find_sparse(model, torch.optim.SGD(bag.parameters(), lr=0.1))
    line = nn.Linear(4, 9)
    line.weight = table.weight
    with pytest.raises(ConfigError, match=r"f\.weight.*a\.weight.*sparse=False"):
        find_sparse(nn.ModuleDict({"a": table, "f": line}), torch.optim.SGD(line.parameters(), lr=0.1))
    bounded = nn.Embedding(9, 4, sparse=True, max_norm=1.0)
    with pytest.raises(ConfigError, match=r"max_norm.*1\.0.*None"):
        find_sparse(nn.ModuleDict({"a": bounded}), torch.optim.SGD(bounded.parameters(), lr=0.1))
