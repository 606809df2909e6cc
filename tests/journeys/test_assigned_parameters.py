"""Jobs of real processes whose scripts change parameters (`tt.assign`)."""

import pytest
import torch
from job_runner import JobRunner
from killed_jobs import killed, resumed
from soak_cases import soaked
from test_resume import INLINE, SYNC

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

PROGRAM = "assigning.py"


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
    for name, cluster, more, action in soaked(
        [("server", twice, ("--job", str(runner.folder / "server")), "its second copy goes on")],
        [("worker", SYNC, (), "group 0 starts again (incarnation 1)")],
    ):
        words = ("before", "--once", str(runner.folder / f"{name}-once"), *more)
        ended = runner.run(cluster, PROGRAM, *words, extra="on_failure: kContinue restarts: 2", name=name)
        assert ended.report["incidents"][0]["action"].startswith(action)
        assert not [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]
