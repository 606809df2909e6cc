"""Tables in real jobs: keys pushed and pulled by hand, rows of embeddings, and what they cost on the network."""

import json
import resource
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, HOGWILD, SANDBLASTER, Ended, JobRunner
from programs import rows
from seeds import soak_only

from topotrain.extensions.tables.frontend.table_export import read_parts
from topotrain.launch.agent import forkserver

pytestmark = [
    pytest.mark.journey,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch's own Adagrad makes such tensors
]
MOST, LARGE, ROW = 640 << 20, 88_000, 8192  # bytes that a process may have; rows; bytes of a row
PAIR = "nworkers_per_group: 2 server_worker_separate: true"
TABLE = rows.ROWS * rows.WIDTH * 4


ISLANDS = (
    "nworker_groups: 2 nworkers_per_group: 2 server_worker_separate: true sync_freq: 4 "
    "outer { type: kNesterov momentum: 0.5 learning_rate { type: kFixed base_lr: 0.7 } }"
)


def test_stores_of_all_kinds_in_one_job(runner: JobRunner) -> None:
    ended = runner.run(ISLANDS, "keys.py", "model")
    workers = 4
    assert ended.report["metrics"] == {"seen": 10 * workers * (workers + 1) / 2}
    tables = {table["name"]: table for table in ended.report["tables"]}
    touched = tables["kv3/'table'"]
    assert touched["rows"] == workers + 3  # of a thousand million: two of all, one of each, one that was only read
    assert touched["bytes"] < 1 << 20
    assert sum(server["rows"] for server in touched["servers"]) == touched["rows"]


def test_a_death_takes_a_job_with_tables_back_to_its_beginning(runner: JobRunner) -> None:
    ended = runner.run(PAIR, "keys.py", "mortal", str(runner.folder / "dead"))
    assert "value [20.0]" in ended.out
    (incident,) = ended.report["incidents"]
    assert (incident["who"], incident["action"]) == ("worker 0/1", "the whole job starts again")


def words_of(ended: Ended) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for ids, values in read_parts(ended.workspace / "tables" / "words", rows.WIDTH):
        found.update(zip(ids.tolist(), values, strict=True))
    return found


def all_bytes(ended: Ended) -> int:
    return sum(process["bytes_out"] for process in ended.report["processes"])


def test_a_sparse_weight_is_trained_as_in_one_process(runner: JobRunner) -> None:
    ended = runner.run(ALLREDUCE, "rows.py", "sparse")
    plain, _ = rows.train("sparse")
    final = ended.final
    assert final.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.allclose(final[name], value, rtol=1e-5, atol=1e-6), name
    # The table leaves worker (0,0) once, and comes back once; as a dense gradient it would travel 60 times.
    assert all_bytes(ended) < 3 * TABLE


def test_a_served_table_is_trained_as_in_one_process_and_only_touched_rows_travel(runner: JobRunner) -> None:
    ended = runner.run(f"{SANDBLASTER} transport: kTcp", "rows.py", "served")
    plain, losses = rows.train("served")
    assert losses[-1] < losses[0]
    expected = {int(i): row for ids, values in plain.words.touched() for i, row in zip(ids, values, strict=True)}
    found = words_of(ended)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[i], row, rtol=1e-5, atol=1e-6) for i, row in expected.items())
    assert torch.allclose(ended.final["line.weight"], plain.line.weight, rtol=1e-5, atol=1e-6)
    assert ended.report["metrics"]["rows"] == len(expected)
    (table,) = ended.report["tables"]
    assert (table["name"], table["rows"]) == ("words", len(expected))
    assert all_bytes(ended) < TABLE
    index = json.loads((ended.workspace / "tables" / "words" / "index.json").read_text())
    assert (index["count"], index["rows"], index["width"]) == (len(expected), rows.ROWS, rows.WIDTH)


@soak_only
def test_nobody_waits_at_a_barrier_for_a_worker_that_has_ended(runner: JobRunner) -> None:
    ended = runner.run("nworkers_per_group: 2", "keys.py", "barrier", code=1)
    assert "worker 0/1 ended while worker 0/0 waits for all workers at a barrier" in ended.err


@soak_only
def test_a_layout_without_one_home_is_refused(runner: JobRunner) -> None:
    ended = runner.run(HOGWILD, "keys.py", code=2)
    assert "cluster.nserver_groups = 3: must be 1 in a job with tables" in ended.err


@soak_only
def test_a_table_larger_than_any_process_may_be(tmp_path: Path) -> None:
    """No process of the job may have more than MOST bytes, Python and torch included; the table alone has more."""
    assert LARGE * ROW > MOST
    with closing(forkserver.start(tmp_path / "forkserver.log")) as served:
        cluster = "nworkers_per_group: 1 nservers_per_group: 6 server_worker_separate: true transport: kTcp"
        runner = JobRunner(tmp_path, served.path)
        runner.run(cluster, "large.py", "--rows", "1000", name="small")  # now all is imported
        once = "snapshot_s: 0"  # a snapshot, which a slow machine would take, is a second copy
        limit = (MOST, MOST)
        resource.prlimit(served.process.pid, resource.RLIMIT_DATA, limit)  # what it forks has the same limit
        command = runner.command(cluster, "large.py", "--rows", str(LARGE), extra=once)
        limited = ["prlimit", f"--data={MOST}", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "job.json").read_text())
    assert report["metrics"] == {"wrong": 0.0, "limit": float(MOST)}
    (table,) = report["tables"]
    assert table["rows"] == LARGE
    assert sum(server["bytes"] for server in table["servers"]) > MOST
    index = json.loads((tmp_path / "job" / "tables" / "large" / "index.json").read_text())
    assert index["count"] == LARGE
    assert len(index["parts"]) > 10
