"""Jobs of real processes whose scripts change parameters (`tt.assign`)."""

import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import ALLREDUCE, JobRunner
from killed_jobs import killed, resumed
from process_pool import client
from soak_cases import soak_only, soaked
from test_resume import INLINE, SYNC

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

PROGRAM = "assigning.py"


def plainly(folder: Path, kind: str, warm_at: str) -> dict[str, torch.Tensor]:
    """What `python assigning.py` leaves."""
    out = folder / "plain.pt"
    program = str(Path(__file__).parents[1] / "programs" / PROGRAM)
    subprocess.run([*client(warm_at), program, kind, "--out", str(out)], check=True, capture_output=True, timeout=120)
    found: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([v.double().flatten() for _, v in sorted(each.items())]) for each in (one, other))
    return float((a - b).norm() / b.norm())


@soak_only
@pytest.mark.parametrize(
    ("kind", "cluster"),
    [
        ("average", ALLREDUCE),
        ("after", SYNC),
        ("after", INLINE),
        ("before", f"{SYNC} transport: kTcp"),
        ("anew", SYNC),
    ],
)
def test_synchronous_jobs_equal_plain_python(runner: JobRunner, kind: str, cluster: str) -> None:
    assert distance(runner.run(cluster, PROGRAM, kind).final, plainly(runner.folder, kind, runner.warm_at)) < 1e-6


@pytest.mark.parametrize(("kind", "cluster"), soaked([("before", INLINE)], [("after", SYNC)]))
def test_a_job_whose_processes_all_died_has_the_same_bits(runner: JobRunner, kind: str, cluster: str) -> None:
    """Every change counts once: those in the snapshot, and those behind it."""
    undisturbed = runner.run(cluster, PROGRAM, kind, name="undisturbed").final
    workspace = killed(runner, cluster, kind, program=PROGRAM)
    found = latest(workspace)
    assert found is not None and 0 < found.steps(0) <= 30
    ended = resumed(runner, workspace)
    different = [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]
    assert not different, (found.steps(0), different)


def test_a_worker_or_a_server_that_dies_between_a_change_and_its_step_repeats_neither(runner: JobRunner) -> None:
    """The servers go on, and know which changes they have made; so does the second copy of one that dies."""
    undisturbed = runner.run(SYNC, PROGRAM, "before", name="undisturbed").final
    twice = f"{SYNC} transport: kTcp replicas: 2"
    for name, cluster, more, action in (
        ("worker", SYNC, (), "group 0 starts again (incarnation 1)"),
        ("server", twice, ("--job", str(runner.folder / "server")), "its second copy goes on"),
    ):
        words = ("before", "--once", str(runner.folder / f"{name}-once"), *more)
        ended = runner.run(cluster, PROGRAM, *words, extra="on_failure: kContinue restarts: 2", name=name)
        assert ended.report["incidents"][0]["action"].startswith(action)
        assert not [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]


@soak_only
def test_asynchronous_groups_have_the_changes_in_their_result(runner: JobRunner) -> None:
    """Weights that every group clamps behind each of its steps: only a last step of another group is not clamped."""
    final = runner.run("nworker_groups: 2 nserver_groups: 2", PROGRAM, "after").final
    assert all(float(value.abs().max()) < 0.33 for value in final.values())
