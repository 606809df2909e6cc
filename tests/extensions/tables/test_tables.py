"""Tables: rows on the servers only, in all three modes, over the simulated network and against torch itself."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_network import NetworkFaults
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_job import Plain, Script, building, job_of, plain, run_hosted, run_local
from pairwise import pairwise
from simulation import STORM, ScriptedCluster, ScriptedWorker, job
from torch import nn

from topotrain.config.job import Algorithm, ConfigError, Job, Reduce, TransportChoice
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import JobError
from topotrain.core.protocol import ProtocolError
from topotrain.core.server.ordered_sum import ScratchBuffers, canonical_mean
from topotrain.core.server.server_extension import StepResult
from topotrain.extensions.tables import push_modes
from topotrain.extensions.tables.row_optimizers import make_optimizer, optimizer_text
from topotrain.extensions.tables.row_storage import RowIndex, RowStorage
from topotrain.extensions.tables.table_client import TableClient
from topotrain.extensions.tables.table_messages import TableOpen, TablePull, TablePush, TableStep
from topotrain.extensions.tables.table_server import TableServer
from topotrain.extensions.tables.table_spec import TableSpec, initial_rows, pack_ids

QUIET = settings(max_examples=25, deadline=None, derandomize=True)


def rule(cls: type[torch.optim.Optimizer], **more: Any) -> str:
    return optimizer_text(cls([nn.Parameter(torch.zeros(1))], **more))


SGD = rule(torch.optim.SGD, lr=1.0)


def client_of(worker: ScriptedWorker) -> TableClient:
    return TableClient(worker.client, worker.cluster.topology, worker.cluster.job)


def play(
    made: Job,
    spec: TableSpec,
    do: Callable[[TableClient, ScriptedWorker], None],
    seed: int = 0,
    weather: NetworkFaults | None = None,
) -> ScriptedCluster:
    """Each worker opens a table, does something with it, and closes it. With the steps of a model: and ends it."""

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)
        client.open(spec)
        if spec.mode == "step":
            worker.open()
        do(client, worker)
        client.close()
        if spec.mode == "step":
            worker.finish()

    return ScriptedCluster(made, seed, weather).play(script)


def nothing_for(worker: ScriptedWorker) -> list[torch.Tensor]:
    return [torch.zeros_like(value) for value in worker.values()]


def whole(low: int, high: int, shape: tuple[int, ...], rng: random.Random) -> torch.Tensor:
    return torch.tensor([float(rng.randint(low, high)) for _ in range(int(np.prod(shape)))]).view(shape)


# --- the description -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 201),
        ("rows", 0),
        ("rows", -2),
        ("rows", 2.0),
        ("width", 0),
        ("width", 1 << 40),
        ("dtype", "float8"),
        ("mode", "later"),
        ("init", "uniform 1"),
        ("init", "normal 0 nan"),
        ("init", "ones"),
        ("seed", -1),
        ("optimizer", ""),
        ("first", -1),
    ],
)
def test_what_a_table_cannot_be(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"table.{field}"):
        replace(TableSpec("t", 10, 3, optimizer=SGD), **{field: value})


def test_a_text_that_describes_nothing() -> None:
    for text in ("", "[]", "{}", '{"name": "t", "rows": 1, "width": 1, "more": 2}', '{"name": 3}'):
        with pytest.raises(ProtocolError, match="description of a table"):
            TableSpec.from_text(text)


# --- rows ------------------------------------------------------------------------------------------------------------


@QUIET
@given(st.lists(st.lists(st.integers(0, 2**62), max_size=60), max_size=8))
def test_the_index_finds_what_was_put_there(batches: list[list[int]]) -> None:
    index, known = RowIndex(), dict[int, int]()
    for batch in batches:
        ids = np.unique(np.array(batch, dtype=np.int64))
        found = index.find(ids)
        assert found.tolist() == [known.get(i, -1) for i in ids.tolist()]
        new = ids[found < 0]
        known |= dict(zip(new.tolist(), index.add(new).tolist(), strict=True))
    everything = np.array(sorted(known), dtype=np.int64)
    assert index.find(everything).tolist() == [known[i] for i in everything.tolist()]
    assert sorted(known.values()) == list(range(len(known)))
    assert index.ids()[index.find(everything)].tolist() == everything.tolist()


@pytest.mark.parametrize("init", ["uniform -0.5 2", "normal 1 0.25", "zeros"])
def test_every_layout_makes_the_same_rows(init: str) -> None:
    spec = TableSpec("t", -1, 5, "float64", optimizer=SGD, init=init, seed=3)
    ids = np.array([4, 900, 7, 2**40, 3, 11], dtype=np.int64)
    wanted = initial_rows(spec, ids)
    for shards in (1, 2, 3):
        for first in (0, 1):
            spread = replace(spec, first=first)
            homes = [RowStorage(spread, shard, shards) for shard in range(shards)]
            for i in (3, 0, 2, 1, 5, 4):  # in another order
                home = homes[(int(ids[i]) + first) % shards]
                assert torch.equal(home.gather(home.slots(ids[i : i + 1]))[0], wanted[i])
    assert not torch.equal(initial_rows(replace(spec, seed=4), ids), wanted) or init == "zeros"
    assert not torch.equal(initial_rows(replace(spec, name="u"), ids), wanted) or init == "zeros"


def test_what_rows_begin_with_is_distributed_as_it_says() -> None:
    ids = np.arange(4000, dtype=np.int64)
    spec = TableSpec("t", -1, 25, optimizer=SGD, init="uniform -1 3")
    cells = initial_rows(spec, ids)
    assert -1 <= float(cells.min()) < -0.99 and 2.99 < float(cells.max()) < 3
    assert abs(float(cells.mean()) - 1) < 0.02 and abs(float(cells.std()) - 4 / 12**0.5) < 0.02
    cells = initial_rows(replace(spec, init="normal 2 0.5"), ids)
    assert abs(float(cells.mean()) - 2) < 0.01 and abs(float(cells.std()) - 0.5) < 0.01
    near = torch.corrcoef(torch.stack([cells[:-1].flatten(), cells[1:].flatten()]))
    assert abs(float(near[0, 1])) < 0.02 and abs(float(torch.corrcoef(cells[:, :2].T)[0, 1])) < 0.05


# --- updates ---------------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.3}),
    "SGD up": (torch.optim.SGD, {"lr": 0.3, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.8, 0.95)}),
}


def sparse_steps(
    cls: Any, more: dict[str, Any], width: int, steps: int
) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    """What torch makes of sparse gradients: values before, the gradients, values after."""
    rng = torch.Generator().manual_seed(width)
    weight = nn.Parameter(torch.randn(40, width, generator=rng))
    before, optimizer, pushed = weight.detach().clone(), cls([weight], **more), []
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        for step in range(steps):
            ids = torch.randperm(40, generator=rng)[: 0 if step == 2 else 11].sort().values
            grad = torch.randn(len(ids), width, generator=rng)
            weight.grad = torch.sparse_coo_tensor(ids[None], grad, (40, width), is_coalesced=True)
            optimizer.step()
            pushed.append((ids, grad))
    return before, pushed, weight.detach()


@pytest.mark.parametrize("name", RULES)
def test_sparse_rules_have_torchs_bits(name: str) -> None:
    cls, more = RULES[name]
    for width in (1, 3, 8, 17, 33, 128):
        before, pushed, after = sparse_steps(cls, more, width, 6)
        spec = TableSpec("t", 40, width, optimizer=rule(cls, **more))
        rows = RowStorage(spec, 0, 1)
        rows.assign(np.arange(40, dtype=np.int64), before)
        how = make_optimizer(rows, spec.optimizer)
        for ids, grad in pushed:
            how.apply(rows.slots(ids.numpy()), grad.clone())
        assert torch.equal(rows.gather(rows.slots(np.arange(40, dtype=np.int64))), after), width


# --- async -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "groups", "workers", "shards"),
    [
        ("async", 2, 2, 1),
        ("async", 2, 2, 3),
        ("sync", 2, 2, 2),
        ("step", 1, 1, 2),
        ("step", 1, 3, 2),
        ("step", 3, 2, 2),
    ],
)
def test_pushes_add_up_whatever_the_transport_does(mode: str, groups: int, workers: int, shards: int) -> None:
    """Whole numbers, at once, together with all workers, or with the steps of a model."""
    total = torch.zeros(50, 3, dtype=torch.float64)

    def do(client: TableClient, worker: ScriptedWorker) -> None:
        rng = random.Random(str(worker.me))
        for turn in range(5):
            worker.sleep(0, 0.01)
            for _ in range(turn % 3):
                ids = [rng.randrange(50) for _ in range(rng.randrange(9))]
                rows = whole(-9, 9, (len(ids), 3), rng).double()
                client.push("t", ids, rows)
                total.index_add_(0, torch.tensor(ids, dtype=torch.int64), rows if mode == "async" else -rows)
            if mode == "step":
                worker.step(worker.numbers())
        client.pull("t", range(50))
        client.barrier()
        assert torch.equal(client.pull("t", range(50)), total)
        assert sum(size.rows for size in client.stats("t")) == 50

    spec = TableSpec("t", -1, 3, "float64", mode, optimizer="" if mode == "async" else SGD)
    cluster = play(job(groups, workers, shards), spec, do, shards, STORM)
    assert mode == "step" or all(sim_server.server.done for sim_server in cluster.sim_servers.values())


class Bench:
    """A book and the numbers that its clients are at."""

    def __init__(self, workers: int = 1, shards: int = 1) -> None:
        self.job = job(1, workers, shards)
        self.topology = layout(self.job.cluster)
        self.book = TableServer(Address(Role.SERVER, 0, 0), self.job, self.topology)
        self.numbers = [0] * workers

    def say(self, worker: int, kind: Callable[..., m.Message], *fields: object, body: Any = None) -> Any:
        self.numbers[worker] += 1
        return self.book.handle(Address(Role.WORKER, 0, worker), kind(self.numbers[worker] - 1, *fields, body=body))

    def open(self, spec: TableSpec) -> None:
        for worker in range(len(self.numbers)):
            self.say(worker, TableOpen, 0, spec.to_text())


# --- sync ------------------------------------------------------------------------------------------------------------


def test_the_bits_of_a_sum_do_not_depend_on_the_order_of_arrival() -> None:
    """Without an optimizer the sum of a turn replaces the rows."""
    parts = [(pack_ids(np.array([1, 2 + worker])), torch.tensor([0.1 + worker, 0.3])) for worker in range(3)]
    found = set()
    for order in permutations(range(3)):
        bench = Bench(3)
        bench.open(TableSpec("t", 10, 1, mode="sync"))
        for turn in (1, 2):
            for worker in order:
                bench.say(worker, TablePush, 0, turn, True, parts[worker][0], body=parts[worker][1].clone())
        ((_, reply),) = bench.say(0, TablePull, 0, 1, 2, pack_ids(np.array([1, 2, 5])))
        found.add(tuple(reply.body.tolist()))
    assert found == {(float(sum(parts[worker][1][0] for worker in range(3))), float(parts[0][1][1]), 0.0)}


def test_a_worker_that_pushes_a_sync_table_alone_is_told_why() -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        for _ in range(2 - worker.me.index):
            client.push("t", [1], torch.ones(1, 1))
        if worker.me.index == 0:
            with pytest.raises(JobError, match=r"ended after 1 pushes, while .* made 2"):
                client.pull("t", [1])

    play(job(1, 2, 1), TableSpec("t", 3, 1, mode="sync"), do)


# --- with the steps of a model ---------------------------------------------------------------------------------------


WORDS = TableSpec("words", 20, 6, optimizer=SGD, init="normal 0 1", seed=9)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [(torch.randint(20, (12, 3), generator=rng), torch.randint(3, (12,), generator=rng)) for _ in range(count)]


def words_of(cls: Any, more: dict[str, Any], steps: int = 6) -> Script:
    """A loop in which the words' rows are a table's, or, in the plain process, an `nn.Embedding`'s."""

    def script(t: Any) -> None:
        held: dict[str, Any] = {}
        weight = nn.Parameter(initial_rows(WORDS, np.arange(20, dtype=np.int64)))
        plain_optimizer = cls([weight], **more)
        client = None
        if not isinstance(t, Plain):
            client = TableClient(t.exchange, t.topology, t.worker.job)
            client.open(replace(WORDS, optimizer=rule(cls, **more)))

        def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ids, place = x.unique(return_inverse=True)
            held["ids"] = ids
            held["rows"] = weight if client is None else client.pull("words", ids).requires_grad_()
            found = nn.functional.embedding(x if client is None else place, held["rows"], sparse=True)
            return nn.functional.cross_entropy(model(found.mean(1)), y)

        for batch in batches(steps):
            t.optimizer.zero_grad()
            t.backward(t.losses(loss, *batch))
            with torch.sparse.check_sparse_tensor_invariants(enable=True):
                grad = held["rows"].grad.coalesce()
                if client is None:
                    weight.grad = grad
                    plain_optimizer.step()
                    weight.grad = None
                else:
                    client.push("words", held["ids"][grad.indices()[0]], grad.values())
            t.optimizer.step()
        if client is None:
            t.model.register_buffer("words", weight.detach())
        else:
            words = client.pull("words", range(20))
            t.notes["words"], t.notes["sizes"] = words, client.stats("words")
            client.close()

    return script


def head() -> nn.Module:
    return nn.Linear(6, 3)


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The servers' kernel, said: torch's default has other bits."""
    return torch.optim.SGD(model.parameters(), lr=0.05, fused=True)


ALONE = {"nworkers_per_group": 1}
INLINE = {"nservers_per_group": 3, "server_worker_separate": False}


@pytest.mark.parametrize(
    ("layout_name", "changes", "name"),
    [
        ("sandblaster", {**ALONE, "nservers_per_group": 1}, "SGD"),
        ("sandblaster", ALONE, "Adagrad"),
        ("sandblaster", ALONE, "SparseAdam"),
        ("allreduce", {}, "Adagrad"),
        ("two by two", {}, "SparseAdam"),
        ("sandblaster", {"transport": TransportChoice.kTcp}, "SGD"),
        ("sandblaster", {**INLINE, "transport": TransportChoice.kShm}, "Adagrad"),
        ("sandblaster", {**INLINE, "transport": TransportChoice.kTcp, "algorithm": Algorithm.kRing}, "Adagrad"),
    ],
)
def test_a_table_of_a_job_is_trained_as_a_sparse_embedding_of_one_process(
    layout_name: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """Of one worker it has the same bits. All workers see the same rows."""
    script, made = words_of(*RULES[name]), job_of(layout_name, **changes)
    wanted = plain(building(head, fused_sgd), script)
    if "transport" in changes:
        found = run_hosted(made, building(head, fused_sgd), script, tmp_path)
    else:
        found = run_local(made, building(head, fused_sgd), script, shared=layout_name == "two by two")
    near = {"rtol": 0.0, "atol": 0.0} if len(found.workers) == 1 else {"rtol": 1e-4, "atol": 2e-6}
    for handle in found.workers:
        torch.testing.assert_close(handle.notes["words"], wanted.values["words"], **near)
        assert torch.equal(handle.notes["words"], found.workers[0].notes["words"])
        assert sum(size.rows for size in handle.notes["sizes"]) == 20
    for name in ("weight", "bias"):
        torch.testing.assert_close(found.values[name], wanted.values[name], **near)


def test_pulls_of_many_rows_may_be_waited_for_in_any_order() -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        client.open(TableSpec("u", -1, 100, "float64", mode="async"))
        ids = torch.arange(0, 9000, 3)
        first, second = client.pull_async("t", ids), client.pull_async("u", ids + 1)
        assert not client.wait(second).any() and not client.wait(first).any()
        for turn in range(3):
            client.push("t", ids, torch.full((3000, 100), 1.0 + turn + worker.me.index))
            assert bool((client.pull("t", ids) == 6.0 + 3 * turn).all())
            client.push("u", ids, torch.ones(3000, 100))
        client.barrier()
        assert bool((client.pull("u", ids.flip(0)) == 9.0).all())
        assert sum(size.rows for size in client.stats("u")) == 6000
        client.barrier()

    play(job(1, 3, 2), TableSpec("t", -1, 100, mode="sync"), do, 1, STORM)


def test_a_pull_waits_for_the_step_that_was_left_to_the_servers() -> None:
    bench = Bench()  # `pull: kLazy`: the worker goes on before its step is applied
    bench.open(TableSpec("t", 9, 1, optimizer=SGD))
    raw = pack_ids(np.array([4], dtype=np.int64))
    assert bench.say(0, TablePush, 0, 0, True, raw, body=torch.ones(1)) == []
    assert bench.say(0, TablePull, 0, 1, 1, raw) == []
    assert not bench.book.may_stage(0, 0)
    assert bench.say(0, TableStep, 0) == []
    assert bench.book.may_stage(0, 0) and not bench.book.may_stage(0, 1)
    commit = m.Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, True, b"", b"", b"", b"", ())
    assert bench.book.apply_step(0, 0, {0: commit}, 1.0) == []
    ((to, reply),) = bench.book.step_over(StepResult(0, 0, {0: commit}, m.Applied(0, 1, 0, False, 0.0)))
    assert to == Address(Role.WORKER, 0, 0) and reply.body is not None and reply.body.tolist() == [-1.0]


def test_scaled_skipped_and_clipped_steps() -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        nothing = nothing_for(worker)
        push = lambda *values: client.push("t", range(len(values)), torch.tensor(values).view(-1, 1))  # noqa: E731
        push(8.0, 0.0, 4.0)
        worker.step(nothing, inv_scale=0.25)
        assert client.pull("t", range(4)).view(-1).tolist() == [-4.0, 0.0, -2.0, 0.0]
        push(1.0, float("inf") if worker.me.index else 1.0)
        assert worker.step(nothing, check_finite=True).found_inf
        assert client.pull("t", range(4)).view(-1).tolist() == [-4.0, 0.0, -2.0, 0.0]
        push(0.0, 3.0, 4.0)
        assert worker.step(nothing, clip_norm=5.0).norm == 10.0
        changed = client.pull("t", range(4)).view(-1) - torch.tensor([-4.0, 0.0, -2.0, 0.0])
        assert torch.allclose(changed, torch.tensor([0.0, -3.0, -4.0, 0.0]), atol=1e-5)

    play(job(1, 2, 2), TableSpec("t", 4, 1, optimizer=SGD), do)


def test_new_settings_count_from_the_next_step() -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        nothing = nothing_for(worker)
        for rate in (1.0, 10.0, 100.0):
            client.set_optimizer("t", rule(torch.optim.SGD, lr=rate))
            client.push("t", [2 * worker.me.group], torch.ones(1, 1))
            worker.step(nothing)
        assert float(client.pull("t", [2 * worker.me.group])) == -111.0
        client.barrier()
        if worker.me.group == 0:  # the other group's rate is its own
            client.set_optimizer("t", rule(torch.optim.SGD, lr=1000.0))
        for _ in range(2):
            client.push("t", [2 * worker.me.group + 1], torch.ones(1, 1))
            worker.step(nothing)
        assert float(client.pull("t", [2 * worker.me.group + 1])) == (-200.0 if worker.me.group else -2000.0)

    play(job(2, 1, 2), TableSpec("t", 4, 1, optimizer=SGD), do)


def test_the_mean_counts_weights_as_dense_gradients_do() -> None:
    made = job(1, 3, 1, reduce=Reduce.kMean)
    grads = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    weights, wanted = [3.0, 1.0, 4.0], torch.empty(20)
    parts = {i: (weights[i], grads[i].view(-1)) for i in range(3)}
    canonical_mean(parts, layout(made.cluster).sum_tree(0), wanted, ScratchBuffers())

    def do(client: TableClient, worker: ScriptedWorker) -> None:
        client.push("t", range(5), grads[worker.me.index])
        worker.step(nothing_for(worker), weight=weights[worker.me.index])
        assert torch.equal(client.pull("t", range(5)).view(-1), torch.zeros(20).sub_(wanted))

    play(made, TableSpec("t", 5, 4, optimizer=SGD), do)


# --- dense keys ------------------------------------------------------------------------------------------------------

BLOCK = 1 << 14  # elements of a row: a multiple of 64, so that an update cut there has the bits of the whole


def dense_spec(name: str, numel: int, **more: Any) -> TableSpec:
    width = max(1, min(numel, BLOCK))
    return TableSpec(name, max(1, -(-numel // width)), width, dense=True, **{"init": "given", **more})


def blocks(value: torch.Tensor) -> tuple[range, torch.Tensor]:
    """The rows of a key: all of them, the last one filled up."""
    width = max(1, min(value.numel(), BLOCK))
    rows = -(-value.numel() // width)
    return range(rows), torch.cat([value, value.new_zeros(rows * width - value.numel())]).view(rows, width)


def pulled(client: TableClient, name: str, numel: int) -> torch.Tensor:
    return client.wait(client.pull_async(name, blocks(torch.empty(numel))[0])).view(-1)[:numel]


@pytest.mark.parametrize(
    ("numel", "mode", "cls"),
    pairwise([1, 63, 16384, 50_001], ["sync", "async"], [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad]),
)
def test_a_dense_key_has_torchs_bits(cls: Any, mode: str, numel: int) -> None:
    more = {"lr": 0.01, "momentum": 0.9} if cls is torch.optim.SGD else {"lr": 0.01}
    rng = torch.Generator().manual_seed(numel)
    start, grads = torch.randn(numel, generator=rng), [torch.randn(numel, generator=rng) for _ in range(4)]
    value = nn.Parameter(start.clone())
    optimizer = cls([value], **more, fused=True)

    def do(client: TableClient, worker: ScriptedWorker) -> None:
        client.assign("key", *blocks(start))
        client.set_optimizer("key", rule(cls, **more))
        for grad in grads:
            value.grad = grad.clone()
            optimizer.step()
            client.push("key", *blocks(grad))
            assert torch.equal(pulled(client, "key", numel), value.detach())
        assert sum(size.value_bytes for size in client.stats("key")) >= 4 * numel

    play(job(1, 1, 3), dense_spec("key", numel, mode=mode, first=1), do)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_the_worker_says_what_cannot_be() -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        client.open(TableSpec("t", 10, 2, mode="async"))
        with pytest.raises(ConfigError, match="another description"):
            client.open(TableSpec("t", 11, 2, mode="async"))
        with pytest.raises(KeyError, match="'u' is not open; open are: t"):
            client.pull("u", [1])
        for ids in ([10], [-1]):
            with pytest.raises(IndexError, match=f"row {ids[0]} of table 't'"):
                client.pull("t", ids)
            with pytest.raises(IndexError, match=f"row {ids[0]} of table 't'"):
                client.push("t", ids, torch.ones(1, 2))
        with pytest.raises(ValueError, match="3 elements for 1 rows of table 't', which has rows of 2"):
            client.push("t", [1], torch.ones(3))
        with pytest.raises(IndexError, match="whole numbers"):
            client.pull("t", torch.ones(2))
        assert client.pull("t", []).shape == (0, 2)

    play(job(shards=2), TableSpec("t", 10, 2, mode="async"), do)


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_that_was_not_given(dense: bool) -> None:
    def do(client: TableClient, worker: ScriptedWorker) -> None:
        client.assign("t", [1, 2], torch.ones(2, 2))
        assert client.pull("t", [2, 1]).tolist() == [[1, 1], [1, 1]]
        with pytest.raises(JobError, match="row 3 of table 't' has not been given"):
            client.pull("t", [1, 3])

    play(job(), TableSpec("t", 10, 2, mode="async", init="given", dense=dense), do)


def test_workers_that_describe_a_table_differently() -> None:
    heard = list[str]()

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)

        def both() -> None:
            client.open(TableSpec("t", 10, 2 + worker.me.index, mode="async"))
            client.barrier()

        with pytest.raises(JobError, match=r"table 't': width is . for one worker and . for another") as caught:
            both()
        assert caught.value.config
        heard.append(str(caught.value))

    ScriptedCluster(job(1, 2, 1)).play(script)
    assert len(heard) == 2


def test_tables_have_one_home() -> None:
    cluster = ScriptedCluster(job(2, 1, 1, nserver_groups=2))
    with pytest.raises(ConfigError, match=r"nserver_groups = 2.*must be 1"):
        TableClient(cluster.clients[cluster.workers[0]], cluster.topology, cluster.job)


IDS, SMALL = pack_ids(np.array([1, 3], dtype=np.int64)), TableSpec("t", 10, 2, mode="async")


LARGE = TableSpec("t", 10, 1 << 22, mode="async")
ZEROS = pack_ids(np.zeros(LARGE.part_rows + 1, dtype=np.int64))


@pytest.mark.parametrize(
    ("message", "words", "shards", "spec"),
    [
        (TablePush(1, 5, 0, True, IDS, body=torch.ones(4)), "not opened a table number 5", 1, SMALL),
        (TablePush(1, 0, 0, True, IDS, body=torch.ones(3)), "12 bytes for 2 rows of 2", 1, SMALL),
        (TablePush(1, 0, 0, True, IDS), "0 bytes for 2 rows", 1, SMALL),
        (TablePush(1, 0, 0, True, IDS[:-1]), "15 bytes of row numbers", 1, SMALL),
        (TablePush(1, 0, 0, True, bytes(8 * 4097)), "bytes of row numbers", 1, SMALL),
        (TablePush(1, 0, 0, True, IDS[8:] + IDS[:8], body=torch.ones(4)), "do not ascend", 1, SMALL),
        (TablePush(1, 0, 0, True, IDS[:8] + IDS[:8], body=torch.ones(4)), "do not ascend", 1, SMALL),
        (
            TablePush(1, 0, 0, True, pack_ids(np.array([10])), body=torch.ones(2)),
            "row 10 of table 't', which has 10",
            1,
            SMALL,
        ),
        (TablePull(1, 0, 1, 0, pack_ids(np.array([-3]))), "row -3 of table 't'", 1, SMALL),
        (TablePull(1, 7, 1, 0, IDS), "not opened a table number 7", 1, SMALL),
        (TableOpen(1, 1, "{}"), "not the description of a table", 1, SMALL),
        (TablePull(1, 0, 1, 0, ZEROS), f"in a message, at most {LARGE.part_rows}", 1, LARGE),
        (TablePull(1, 0, 1, 0, IDS), "row 1 of table 't' is on another shard", 2, SMALL),
    ],
)
def test_what_no_peer_may_send(message: m.Message, words: str, shards: int, spec: TableSpec) -> None:
    bench = Bench(shards=shards)
    bench.open(spec)
    with pytest.raises(ProtocolError, match=words):
        bench.book.handle(Address(Role.WORKER, 0, 0), message)


def test_only_messages_that_still_wait_are_counted_as_early() -> None:
    bench, me, width = Bench(), Address(Role.WORKER, 0, 0), 1 << 22
    bench.open(TableSpec("t", 10, width, mode="async"))
    row, body = pack_ids(np.array([1], dtype=np.int64)), torch.ones(width)
    # Pairs arrive in reverse order, and the next pair's second message before this pair's first one.
    for number in (2, *(n for first in range(1, 21, 2) for n in (first + 3, first)), 21):
        bench.book.handle(me, TablePush(number, 0, number, True, row, body=body))
    (pulled,) = bench.book.handle(me, TablePull(23, 0, 1, 0, row))
    assert float(pulled[1].body[0]) == 22.0


def test_memory_for_a_body_comes_from_the_description() -> None:
    bench, me = Bench(), Address(Role.WORKER, 0, 0)
    bench.open(TableSpec("t", 10, 2, mode="async"))
    good = TablePush(1, 0, 0, True, IDS)
    assert bench.book.place(me, good, False).shape == (4,)
    for who, message in (
        (me, TablePush(1, 1, 0, True, IDS)),
        (me, TablePush(1, 0, 0, True, bytes(8 * 4097))),
        (me, TablePull(1, 0, 1, 0, IDS)),
        (Address(Role.WORKER, 3, 0), good),
    ):
        with pytest.raises(ProtocolError):
            bench.book.place(who, message, False)


@pytest.mark.parametrize("mode", ["async", "sync", "step"])
def test_rows_that_wait_are_bounded_in_bytes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_modes, "_MOST_KEPT", 200)
    bench = Bench(workers=2)
    bench.open(TableSpec("t", 10, 2, mode=mode, optimizer=rule(torch.optim.SGD, lr=1.0)))
    body = torch.ones(4)  # with its row numbers 32 bytes
    for turn in range(1, 21):  # what is applied or dropped no longer counts
        for worker in range(2):
            bench.say(worker, TablePush, 0, turn, True, IDS, body=body)
        bench.book._tables["t"].drop(0, turn) if mode == "step" else None
    assert not any(bench.book._tables["t"]._kept.values())
    with pytest.raises(ProtocolError, match=r"bytes of rows of table 't' waiting, at most 200"):
        repeat(10, lambda turn: bench.say(0, TablePush, 0, 21, False, IDS, body=body))
    if mode == "sync":  # turns ahead of a slow worker
        bench = Bench(workers=2)
        bench.open(TableSpec("t", 10, 2, mode="sync"))
        with pytest.raises(ProtocolError, match=r"worker 0/0 has .* bytes of rows of table 't' waiting"):
            repeat(30, lambda turn: bench.say(0, TablePush, 0, turn, True, IDS, body=body))


def test_early_messages_are_bounded_with_their_texts() -> None:
    bench, me, text = Bench(), Address(Role.WORKER, 0, 0), "x" * 60_000
    with pytest.raises(ProtocolError, match="message 0 about tables never came"):
        repeat(4000, lambda number: bench.book.handle(me, TableOpen(number, 0, text)))


def repeat(times: int, say: Callable[[int], object]) -> None:
    for number in range(1, times):
        say(number)
