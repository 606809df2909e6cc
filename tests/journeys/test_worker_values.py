"""Jobs of real processes whose scripts exchange values over their workers (`tt.mean` and the like)."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, DOWNPOUR, PROGRAMS, JobRunner
from process_pool import client

pytestmark = pytest.mark.journey

PROGRAM = "together.py"
ISLANDS = (
    "nworker_groups: 2 nworkers_per_group: 2 server_worker_separate: true sync_freq: 3 "
    "outer { type: kNesterov momentum: 0.5 learning_rate { type: kFixed base_lr: 0.7 } }"
)


def ordinary(runner: JobRunner, *words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The program as `python` runs it, without a job."""
    command = [*client(runner.warm_at), *words]
    return subprocess.run(command, check=True, timeout=300, cwd=cwd or runner.folder, capture_output=True, text=True)


def values(workspace: Path, out: str, over: str) -> dict[int, str]:
    """What each worker printed."""
    text = out + "".join(log.read_text() for log in (workspace / "logs").glob("worker-*.log"))
    return {int(rank): found for rank, found in re.findall(rf"values {over} (\d): (.*)", text)}


def expected(ranks: range) -> str:
    odd, n = [rank for rank in ranks if rank % 2], len(ranks)
    weighted = sum(rank * rank for rank in ranks) / sum(ranks) if ranks == range(4) else 0.0
    gathered = [rank for rank in ranks for _ in range(1 + rank % 2)]
    found = [sum(ranks) / n + 0.5, weighted, 1.0, sum(10**rank for rank in ranks), [n, len(odd)], ranks[-1]]
    halves = torch.tensor([sum(ranks) / n, 1.0], dtype=torch.bfloat16).tolist()
    return str([*found, ranks[0] + 0.1, True, halves, gathered, len(odd), ranks[0], float(sum(ranks) + n)])


def test_all_workers_of_a_group_and_of_a_job_get_the_same_values(runner: JobRunner) -> None:
    ended = runner.run(DOWNPOUR, PROGRAM, "agree")
    group, job = (values(ended.workspace, ended.out, over) for over in ("group", "job"))
    first, second = expected(range(2)), expected(range(2, 4))
    assert group == {0: first, 1: first, 2: second, 3: second}
    assert job == dict.fromkeys(range(4), expected(range(4)))


@pytest.mark.parametrize(
    ("mode", "cluster", "said"),
    [
        ("left out", ISLANDS, "worker ./1 called tt.mean after 3 steps, worker ./0 went on without this call"),
        ("report", ALLREDUCE, "tt.mean in an evaluation that the main worker makes alone"),
    ],
)
def test_a_call_that_some_workers_leave_out_is_an_error_by_name(
    runner: JobRunner, mode: str, cluster: str, said: str
) -> None:
    ended = runner.run(cluster, PROGRAM, mode, code=1 if mode == "report" else 2)
    assert re.search(said, ended.err), ended.err


def test_calls_are_made_again_with_the_steps_after_a_death(runner: JobRunner) -> None:
    once = runner.folder / "once"
    ended = runner.run(DOWNPOUR, PROGRAM, "dies", str(once), extra="on_failure: kContinue checkpoint_freq: 3")
    (incident,) = ended.report["incidents"]
    assert once.exists() and "starts again (incarnation 1)" in incident["action"], incident
    assert ended.report["metrics"]["ranks"] == 2


def test_buffers_begin_with_the_values_of_the_main_worker(runner: JobRunner) -> None:
    """As its parameters do, also whole numbers and those outside the state."""
    ended = runner.run(ISLANDS, PROGRAM, "buffers")
    right = str([[1.0] * 3, 7, [True, False, True], [float(i) for i in range(9)]])
    assert set(values(ended.workspace, ended.out, "buffers").values()) == {right}
    assert ended.final["shift"].tolist() == [1.0] * 3 and ended.final["count"] == 7


def test_a_loss_over_all_samples_and_their_statistics_are_those_of_plain_python(runner: JobRunner) -> None:
    """`tt.gather` with a gradient, and SyncBatchNorm; shares are unequal, and some are empty."""
    out = runner.folder / "plain.pt"
    ordinary(runner, str(PROGRAMS / "whole_batch.py"), str(out))
    plain = torch.load(out, weights_only=True)
    final = runner.run(ALLREDUCE, "whole_batch.py").final
    far = {name: float((final[name].double() - value.double()).abs().max()) for name, value in plain.items()}
    assert final.keys() == plain.keys() and max(far.values()) < 1e-5, far


def test_the_scripts_of_the_documentation_do_the_same_in_a_job(runner: JobRunner) -> None:
    script = Path(__file__).parents[2] / "examples" / "early_stopping.py"
    apart = runner.folder / "plain"
    apart.mkdir()
    done = ordinary(runner, str(script), cwd=apart)
    plain = {name: float(value) for name, value in re.findall(r"^(\w+): (\S+)$", done.stdout, re.MULTILINE)}
    ended = runner.run("nworkers_per_group: 2 nservers_per_group: 2", str(script))
    assert plain and ended.report["metrics"] == pytest.approx(plain, rel=1e-4)
    for saved in apart.glob("*.pt"):
        here, there = (torch.load(path, weights_only=True) for path in (saved, runner.folder / saved.name))
        assert all(torch.allclose(value, there[name], atol=1e-5) for name, value in here.items())


def test_a_loop_until_the_job_has_made_so_many_steps_ends_for_all(runner: JobRunner) -> None:
    done = ordinary(runner, str(PROGRAMS / "until.py"), "20")
    assert "values until 0: 20\n" in done.stdout
    ended = runner.run(ALLREDUCE, "until.py", "20", name="together")
    assert values(ended.workspace, ended.out, "until") == dict.fromkeys(range(3), "20")
    assert "tt.report mine is the main worker's own, 0, with 1 on worker 0/1, 2 on worker 0/2" in ended.err
    wrote = f"2 workers wrote {runner.folder / 'all.pt'}, one over the other's: use tt.save"
    assert wrote in ended.err and any(wrote in notice for notice in ended.report["notices"])
    assert torch.load(runner.folder / "until.pt", weights_only=True)["rank"] == 0
    assert not list(runner.folder.glob("*.tmp"))
    ended = runner.run(ISLANDS, "until.py", "20", name="islands", code=2)
    assert "must be in a job whose groups send every step to the same servers" in ended.err
