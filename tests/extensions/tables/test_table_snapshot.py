"""Tables in snapshots: rows are frozen behind a step, written, read back by whoever they belong to now, or refused."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import EventList, TextList
from safetensors.torch import load_file
from simulation import STORM, ScriptedCluster, ScriptedWorker, job
from snapshot_archive import Archive
from snapshot_files import Vault
from test_tables import Bench, client_of, rule

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.optim.state_table import StateError, merge, to_rows
from topotrain.core.server.server_extension import StepResult
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, Manifest, hashed, latest
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles, SnapshotWriter
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard, ShardFreezer
from topotrain.extensions.checkpointing.snapshot_coordinator import TIME, PublishSnapshot, WriteSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotRequest
from topotrain.extensions.checkpointing.table_file_layout import file_of
from topotrain.extensions.tables.push_modes import KINDS
from topotrain.extensions.tables.table_messages import TableAssign, TableOpen, TablePush, TableStep
from topotrain.extensions.tables.table_server import TableServer
from topotrain.extensions.tables.table_snapshot import StoredRows, TableCopier
from topotrain.extensions.tables.table_spec import TableSpec, pack_ids

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.3}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.05}),
}
SGD = rule(torch.optim.SGD, lr=1.0)
WORDS = TableSpec("words", -1, 5, optimizer=SGD, init="normal 0 1", seed=3)
NOTHING = FrozenShard((), (), (), {}, {})


class Shelf:
    """Some tables on all servers of a job, pushed to step by step."""

    def __init__(self, specs: Sequence[TableSpec], shards: int) -> None:
        self.shards, self.step = shards, 0
        made: Callable[[TableSpec, int], Any] = lambda spec, shard: KINDS[spec.mode](  # noqa: E731
            spec, shard, shards, [Address(Role.WORKER, 0, 0)], "", None, 0
        )
        self.tables = [[made(spec, shard) for spec in specs] for shard in range(shards)]
        self.copiers = [TableCopier() for _ in range(shards)]

    def push(self, steps: int) -> "Shelf":
        """Other rows with each step, also new ones, and sometimes none for a shard."""
        for _ in range(steps):
            self.step += 1
            rng = np.random.default_rng(self.step)
            ids = np.unique(rng.integers(0, 60, 3 if self.step % 3 == 0 else 25)) * 1_000_003
            grads = torch.from_numpy(rng.standard_normal((len(ids), 5))).float()
            for shard, tables in enumerate(self.tables):
                for table in tables:
                    mine = ids % self.shards == table.spec.residue(shard, self.shards)
                    table.apply(ids[mine], grads[torch.from_numpy(mine)].to(table.spec.torch_dtype), True)
        return self

    def rows(self) -> dict[tuple[str, int], list[float]]:
        found = {}
        for table in (table for tables in self.tables for table in tables):
            ids = table.rows.ids()
            values = table.rows.gather(table.rows.slots(ids))
            found |= {(table.spec.name, i): row for i, row in zip(ids.tolist(), values.tolist(), strict=True)}
        return found

    def freeze(self) -> list[FrozenShard]:
        return [copier.freeze(NOTHING, own) for copier, own in zip(self.copiers, self.tables, strict=True)]

    def refill(self, source: Manifest) -> "Shelf":
        for shard, tables in enumerate(self.tables):
            for table in tables:
                StoredRows(source, shard, self.shards).refill(table)
        return self


def write(workspace: Path, number: int, frozen: Sequence[FrozenShard]) -> Manifest:
    """What the hosts of a job do with it, beside a model."""
    vault, told = Vault(torch.optim.SGD, len(frozen)), EventList()
    writer = SnapshotWriter(vault.job, vault.topology, SnapshotFiles(workspace / FOLDER), number, "server 0/0", told)
    own = [ShardFreezer(model, shard).freeze() for shard, model in enumerate(vault.models)]
    table = merge([each.table for each in own], vault.map.parameters)
    written = []
    for shard, (mine, rows) in enumerate(zip(own, frozen, strict=True)):
        with_rows = replace(mine, tables=rows.tables, rows=rows.rows)
        written.append(writer._write(WriteSnapshot(number, Address(Role.SERVER, 0, shard), with_rows, table)))
    facts = {"version": 1, "clocks": [[0, 1]], "steps": [[0, 1]], "first_epoch": 0, "epochs": [], "hyper": []}
    facts |= {"model": vault.schema.text(), "optimizer": to_rows(table)}
    writer._publish(PublishSnapshot(number, TIME, facts, tuple(json.loads(json.dumps(each)) for each in written), {}))
    found = Manifest.open(workspace / FOLDER / f"{number:06d}")
    found.verify()
    return found


@pytest.mark.parametrize(("name", "before", "after"), [("SGD", 2, 2), ("Adagrad", 2, 3), ("SparseAdam", 3, 1)])
def test_rows_go_on_bit_for_bit_whatever_the_number_of_servers(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    cls, more = RULES[name]
    specs = [replace(WORDS, optimizer=rule(cls, **more)), TableSpec("b/ids", 10**9, 5, "float64", optimizer=SGD)]
    undisturbed = Shelf(specs, 1).push(9).rows()
    shelf = Shelf(specs, before).push(5)
    found = write(tmp_path, 1, shelf.freeze())
    assert [len(tables) for tables in found.tables] == [2] * before
    settings = [replace(spec, optimizer=rule(cls, **{**more, "lr": 9.0})) for spec in specs[:1]] + specs[1:]
    fresh = Shelf(settings, after).refill(found)
    assert fresh.rows() == shelf.rows()
    read = {}
    for shard in range(before):
        data = load_file(found.path / file_of(shard))
        read |= {("words", i): row for i, row in zip(data["words/ids"].tolist(), data["words/values"].tolist())}
    assert read.items() <= shelf.rows().items(), "safetensors itself reads the files"
    assert len(read) == sum(name == "words" for name, _ in shelf.rows())
    for table in (tables[0] for tables in fresh.tables):
        table._use_optimizer(specs[0].optimizer)  # settings are the script's, whatever the snapshot has
    fresh.step = 5
    assert fresh.push(4).rows() == undisturbed


def test_what_is_frozen_stays_as_it_was_and_its_memory_is_used_again(tmp_path: Path) -> None:
    shelf = Shelf([WORDS], 1).push(3)
    (first,) = shelf.freeze()
    known, was = write(tmp_path, 1, [first]), shelf.rows()
    places = [slab.body.data_ptr() for slab in first.rows if slab.name.endswith("values")]
    shelf.push(3)
    assert Shelf([WORDS], 1).refill(known).rows() == was != shelf.rows()
    values = torch.cat([slab.body for slab in first.rows if slab.name.endswith("values")])
    assert values.view(-1, 5).tolist() == list(was.values())
    (second,) = shelf.freeze()
    assert [slab.body.data_ptr() for slab in second.rows if slab.name.endswith("values")] == places


def test_many_rows_in_many_blocks(tmp_path: Path) -> None:
    spec = TableSpec("t", -1, 3, optimizer=rule(torch.optim.Adagrad, lr=0.1), init="normal 0 1")
    shelf = Shelf([spec], 1)
    (table,) = shelf.tables[0]
    for part in np.array_split(np.arange(60_000, dtype=np.int64) * 17, 7):
        table.apply(part, torch.ones(len(part), 3), True)
    assert len(list(table.rows.blocks("sum"))) > 2
    found = write(tmp_path, 1, shelf.freeze())
    fresh = Shelf([spec], 2).refill(found)
    assert fresh.rows() == shelf.rows()
    assert [t.pushes for (t,) in fresh.tables] == [7, 7]


def test_a_table_without_rows_is_kept_too(tmp_path: Path) -> None:
    assert Shelf([WORDS], 3).refill(write(tmp_path, 1, Shelf([WORDS], 2).freeze())).rows() == {}


def test_who_has_no_memory_for_a_copy_goes_without_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf([WORDS], 1).push(1)

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("topotrain.extensions.tables.table_snapshot.torch.empty_like", full)
    with pytest.raises(StateError, match="no memory for a copy of table 'words': can't allocate memory"):
        shelf.freeze()


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "shard"), [(flipped, 1), (Path.unlink, 0)])
def test_a_damaged_file_of_a_table_gives_way_to_the_snapshot_before(
    tmp_path: Path, damage: Callable[[Path], None], shard: int
) -> None:
    shelf = Shelf([WORDS], 2)
    write(tmp_path, 1, shelf.push(2).freeze())
    was = shelf.rows()
    second = write(tmp_path, 2, shelf.push(2).freeze())
    damage(second.path / file_of(shard))
    told = TextList()
    found = latest(tmp_path, told)
    assert found is not None and found.number == 1
    assert f"tables-{shard}.safetensors" in told[0] and "000002" in told[0]
    assert Shelf([WORDS], 2).refill(found).rows() == was
    shutil.rmtree(found.path)
    with pytest.raises(ConfigError, match="no snapshot in it can be read"):
        latest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("tables", 5),
        lambda d: d["tables"][0].append(d["tables"][0][0]),
        lambda d: d["tables"][0][0].__setitem__(0, "[]"),
        lambda d: d["tables"][0][0].__setitem__(0, "{}"),
        lambda d: d["tables"][0][0].__setitem__(3, -1),
        lambda d: d["tables"][0][0].__setitem__(3, 1 << 60),
        lambda d: d["tables"][0][0].__setitem__(4, [["ids", 0.0]]),
        lambda d: d["tables"][0][0].__setitem__(4, [["values"]]),
        lambda d: d["files"].pop("tables-1.safetensors"),
        lambda d: d["files"]["tables-0.safetensors"]["ranges"].pop(),
    ],
)
def test_a_forged_manifest_is_a_named_error(tmp_path: Path, change: Callable[[Any], object]) -> None:
    path = write(tmp_path, 1, Shelf([WORDS], 2).push(2).freeze()).path / MANIFEST
    data = json.loads(path.read_text())
    del data["sha256"]
    change(data)
    path.write_text(json.dumps({**data, "sha256": hashed(data)}))
    with pytest.raises(ConfigError, match="resume"):
        Manifest.open(path.parent)


# --- what a server does with them ------------------------------------------------------------------------------------


class Second(Bench):
    """A book of a job that goes on."""

    def __init__(self, source: Manifest) -> None:
        super().__init__()
        self.book = TableServer(Address(Role.SERVER, 0, 0), self.job, self.topology, source)

    def push(self, step: int, name: str = "words") -> list[Any]:
        raw = pack_ids(np.array([4], dtype=np.int64))
        self.say(0, TablePush, 0, step, True, raw, body=torch.ones(5))
        self.say(0, TableStep, step)
        commit = m.Commit(step, 1, 1.0, 1.0, False, 0.0, 2.0, True, b"", b"", b"", b"", ())
        out: list[Any] = self.book.apply_step(0, step, {0: commit}, 1.0)
        return out + list(
            self.book.step_over(StepResult(0, step, {0: commit}, m.Applied(step, step + 1, 0, False, 0.0)))
        )

    def row(self) -> list[float]:
        (table,) = self.book._tables.values()
        row: list[float] = table.rows.gather(table.rows.slots(np.array([4], dtype=np.int64)))[0].tolist()
        return row


ZEROS = replace(WORDS, init="zeros")


def kept(workspace: Path, *specs: TableSpec) -> Manifest:
    """A snapshot in which row 4 of each table is -1."""
    shelf = Shelf(specs or [ZEROS], 1)
    for table in shelf.tables[0]:
        table.apply(np.array([4], dtype=np.int64), torch.ones(1, 5), True)
    return write(workspace, 1, shelf.freeze())


def test_what_a_script_gives_before_its_first_step_is_older_than_the_snapshot(tmp_path: Path) -> None:
    """Of a table that the snapshot has."""
    raw, manifest = pack_ids(np.array([4], dtype=np.int64)), kept(tmp_path)
    for spec, given in ((ZEROS, -1.0), (replace(ZEROS, name="more"), 7.0)):
        bench = Second(manifest)
        bench.open(spec)
        bench.say(0, TableAssign, 0, raw, body=torch.full((5,), 7.0))
        assert bench.row() == [given] * 5
        if given < 0:
            assert bench.push(0) == []
            assert bench.row() == [given - 1] * 5
            bench.say(0, TableAssign, 0, raw, body=torch.full((5,), 7.0))
            assert bench.row() == [7.0] * 5


def fails(out: Sequence[tuple[Address, m.Message]]) -> list[tuple[str, bool]]:
    return [(message.text, message.config) for _, message in out if isinstance(message, m.Fail)]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(ZEROS, width=4), "resume = 'table words': has width 4 now, and 5 in snapshot 1"),
        (replace(ZEROS, seed=4), "has seed 4 now, and 3 in snapshot 1"),
        (replace(ZEROS, mode="sync"), "has mode 'sync' now, and 'step' in snapshot 1"),
        (
            replace(ZEROS, optimizer=rule(torch.optim.Adagrad)),
            "is updated by torch.optim.Adagrad now, but was by torch.optim.SGD",
        ),
    ],
)
def test_another_table_of_the_same_name_is_refused(tmp_path: Path, now: TableSpec, words: str) -> None:
    bench = Second(kept(tmp_path))
    ((text, config),) = fails(bench.say(0, TableOpen, 0, now.to_text()))
    assert words in text and config


def test_a_table_that_the_model_has_no_more_is_missed_at_the_first_step(tmp_path: Path) -> None:
    bench = Second(kept(tmp_path, ZEROS, replace(ZEROS, name="gone")))
    bench.open(ZEROS)
    ((text, config),) = fails(bench.push(0))
    assert "'gone' is in snapshot 1, and the model has no table of this name" in text and config


def test_a_job_with_a_store_takes_none_and_says_why() -> None:
    cluster = ScriptedCluster(job(1, 1, 2))
    archive = Archive(cluster)

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)
        client.open(replace(WORDS, optimizer="", mode="async"))
        worker.open()
        for _ in range(3):
            archive.ask()
            worker.step(worker.numbers())
        leader = Address(Role.SERVER, 0, 0)
        cluster.sim_servers[leader].handle(leader, SnapshotRequest(last=True))
        client.close()
        worker.finish()

    cluster.play(script)
    assert not archive.published
    assert [drop.why for drop in archive.dropped] == ["pushes of table 'words' belong to no step of the model"]


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_frozen_behind_the_same_decision_as_the_model(seed: int) -> None:
    cluster, rows = ScriptedCluster(job(3, 1, 3), seed, STORM), dict[int, dict[int, float]]()
    archive = Archive(cluster)
    work = archive.work

    def noted(me: Address, what: Any) -> None:
        if isinstance(what, WriteSnapshot):
            by_name = {
                name: [x.body for x in what.frozen.rows if x.name == f"cells/{name}"] for name in ("ids", "values")
            }
            ids, values = (torch.cat(by_name[name]).tolist() for name in ("ids", "values"))
            rows.setdefault(what.number, {}).update(zip(ids, values, strict=True))
        work(me, what)

    archive.work = noted  # type: ignore[method-assign]

    def script(worker: ScriptedWorker) -> None:
        client = client_of(worker)
        client.open(TableSpec("cells", -1, 1, optimizer=SGD))
        worker.open()
        for step in range(6):
            client.push("cells", range(7), torch.full((7, 1), -1.0))
            client.push("cells", [100 * worker.me.group + step + 10], torch.full((1, 1), -1.0))
            worker.sleep(0.0, 0.01)
            if worker.me.group == 0:
                archive.ask()
            worker.step(
                [torch.full(p.shape, -1.0, dtype=v.dtype) for p, v in zip(cluster.map.parameters, worker.values())]
            )
        client.close()
        worker.finish()

    cluster.play(script)
    assert archive.published and not archive.dropped
    for published in archive.published:
        steps = dict(published.facts["steps"])
        own = {100 * group + step + 10: 1.0 for group, count in steps.items() for step in range(count)}
        assert rows[published.number] == own | dict.fromkeys(range(7), float(sum(steps.values())))
        for values in archive.values[published.number].values():
            assert bool((values == sum(steps.values())).all())
