"""Settings of the conf together, through real processes. What each does is asserted in process."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, PROGRAMS, SANDBLASTER, JobRunner
from process_pool import client
from safetensors import safe_open
from seeds import SOAK
from torch import nn

pytestmark = pytest.mark.journey

START = 1.6  # loss of the untrained model is above this
ADAM = "updater { type: kAdam learning_rate { type: kStep base_lr: 0.02 step_conf { change_freq: 10 gamma: 0.5 } } }"


@pytest.mark.parametrize(
    ("cluster", "extra", "optimizer", "samples"),
    [
        (
            "nworker_groups: 4 nserver_groups: 2 nservers_per_group: 2 nservers_per_procs: 2 n_push: 3 n_fetch: 2 "
            "agreement: kRingAverage sync_freq: 2 transport: kTcp max_staleness: 1",
            "warmup_steps: 4 shard: kStatic",
            "SGD",
            {(group, 0): 24 for group in range(4)},
        ),
        (
            f"{DOWNPOUR} max_staleness: 0 slicing: kTensor shares: [2, 1]",
            "grads: kHidden shard: kStatic",
            "Muon",
            {(group, index): (32, 16)[index] for group in range(2) for index in range(2)},
        ),
        (
            f"{ALLREDUCE} algorithm: kRing",
            f"per_worker_batch: true reduce: kMean {ADAM}",
            "conf",
            {(0, 0): 36, (0, 1): 36, (0, 2): 24},
        ),
    ],
)
def test_it_trains(
    runner: JobRunner, cluster: str, extra: str, optimizer: str, samples: dict[tuple[int, int], int]
) -> None:
    """`samples`: those of each worker in an epoch."""
    ended = runner.run(cluster, "small.py", "--optimizer", optimizer, extra=extra)
    metrics = ended.report["metrics"]
    assert metrics["loss"] < START
    assert metrics["epochs"] == 6
    processes = ended.report["processes"]
    assert sum(process["samples"] for process in processes) == 96 * 6
    found = {tuple(process["workers"][0]): process["samples"] // 6 for process in processes if process["workers"]}
    assert found == samples
    assert all(torch.isfinite(value).all() for value in ended.final.values() if value.is_floating_point())


def test_a_job_has_a_report_of_every_process_and_the_output_of_one(runner: JobRunner) -> None:
    ended = runner.run(DOWNPOUR, "small.py")
    report = ended.report
    workers = [p for p in report["processes"] if p["workers"]]
    servers = [p for p in report["processes"] if p["servers"]]
    assert [p["workers"] for p in workers] == [[[0, 0]], [[0, 1]], [[1, 0]], [[1, 1]]]
    assert [p["rank"] for p in workers] == [0, 1, 2, 3]
    assert [p["servers"] for p in servers] == [[[0, 0]], [[0, 1]]]
    for process in report["processes"]:
        assert process["pid"] > 0
        assert process["bytes_out"] > 0
        assert process["bytes_in"] > 0
    assert len({p["unit"] for p in report["processes"]}) == 6
    assert report["layout"]["nprocs"] == 6
    assert report["samples_per_s"] > 0
    assert report["last_loss"] < START
    assert sum(p["steps"] for p in workers) == 2 * 8 * 6  # both workers of a group take its steps
    assert max(p["staleness_max"] for p in workers) >= 1
    assert ended.out.count("main says hello") == 1
    assert "others are not heard" not in ended.out + ended.err
    for log in ("worker-0-1.log", "worker-1-1.log"):
        assert "others are not heard" in (ended.workspace / "logs" / log).read_text()


def test_debug_writes_the_norms_of_each_layer_and_the_final_file_loads_in_plain_pytorch(runner: JobRunner) -> None:
    ended = runner.run("nworkers_per_group: 2", "small.py", extra="debug: true")
    rows = [json.loads(line) for line in (ended.workspace / "debug.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 49))
    assert set(rows[0]["norms"]) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert rows[5]["norms"]["0.weight"]["grad"] > 0
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4)).eval()
    model.load_state_dict(ended.final)
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(4))
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
    assert float(loss.detach()) == pytest.approx(ended.report["metrics"]["loss"], rel=1e-5)
    with safe_open(ended.workspace / "final.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["tied"]) == {}


def test_share_memory_shares_the_values(runner: JobRunner) -> None:
    """Workers of one unit hold their parameters in one and the same memory."""
    ended = runner.run("nworker_groups: 2 nworkers_per_procs: 2 share_memory: true", "maps.py")
    addresses = [(ended.workspace / f"map-{rank}").read_text().split() for rank in (0, 1)]
    assert addresses[0] == addresses[1]
    assert all(len(inode) == 1 for inode in addresses)


def test_the_report_says_how_many_threads_each_worker_has(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runner.folder / "threads.py"
    script.write_text(
        "import runpy, sys, torch\n"
        "torch.set_num_threads(int(sys.argv.pop()) or torch.get_num_threads())\n"
        f"runpy.run_path({str(PROGRAMS / 'small.py')!r})\n"
    )
    threads = {"worker 0/0", "worker 0/1", "worker 0/2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert runner.run(SANDBLASTER, str(script), "3").report["threads"] == dict.fromkeys(threads, 3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    divided = max(1, len(os.sched_getaffinity(0)) // 3)
    assert runner.run(SANDBLASTER, str(script), "0").report["threads"] == dict.fromkeys(threads, divided)


def test_plan_with_a_program_shows_slices_and_memory(runner: JobRunner) -> None:
    runner.command(SANDBLASTER, "small.py")
    command = [*client(runner.warm_at), "-m", "topotrain", "plan", "--json", str(runner.folder / "job.conf")]
    done = subprocess.run([*command, str(PROGRAMS / "small.py")], capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert plan["nprocs"] == 5
    assert "main says hello" not in done.stdout + done.stderr
    assert str(plan).count("elements") >= 2


def test_the_four_frameworks_learn_to_read_digits(tmp_path: Path, served_at: str, warm_at: str) -> None:
    """What `make run` shows: the exact cluster blocks and real processes; after 20 epochs 95 % of held-out digits."""
    examples = Path(__file__).parent.parent.parent / "examples"
    confs = [str(examples / "conf" / f"{name}.conf") for name in ("sandblaster", "allreduce", "downpour", "hogwild")]
    command = [*client(warm_at), "-m", "topotrain", "compare", f"--forkserver={served_at}", "--out", str(tmp_path)]
    epochs, least = (20, 0.95) if SOAK else (6, 0.85)
    program = [str(examples / "digits.py"), "--epochs", str(epochs)]
    done = subprocess.run([*command, *confs, *program], capture_output=True, text=True, cwd=examples.parent)
    assert done.returncode == 0, done.stderr
    jobs = json.loads((tmp_path / "compare.json").read_text())["jobs"]
    assert [job["layout"]["nprocs"] for job in jobs] == [5, 3, 6, 3]
    for job in jobs:
        assert job["metrics"]["accuracy"] >= least, job["label"]
    assert (tmp_path / "frameworks.png").stat().st_size > 10_000
    # Whatever the umask, as a workspace.
    made = [path.lstat().st_mode for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert not [oct(mode) for mode in made if mode & 0o077]
