"""Jobs of real processes whose scripts change parameters (`tt.assign`)."""

import pytest
import torch
from job_runner import JobRunner
from killed_jobs import killed, resumed
from test_resume import INLINE, SYNC

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

PROGRAM = "assigning.py"


def test_a_job_whose_processes_all_died_has_the_same_bits(runner: JobRunner) -> None:
    """Every change counts once: those in the snapshot, and those behind it."""
    undisturbed = runner.run(INLINE, PROGRAM, "before", name="undisturbed").final
    workspace = killed(runner, INLINE, "before", program=PROGRAM)
    found = latest(workspace)
    assert found is not None and 0 < found.steps(0) <= 30
    ended = resumed(runner, workspace)
    different = [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]
    assert not different, (found.steps(0), different)


def test_a_server_that_dies_between_a_change_and_its_step_repeats_neither(runner: JobRunner) -> None:
    """The second copy of the server knows which changes have been made."""
    undisturbed = runner.run(SYNC, PROGRAM, "before", name="undisturbed").final
    twice = f"{SYNC} transport: kTcp replicas: 2"
    words = ("before", "--once", str(runner.folder / "once"), "--job", str(runner.folder / "server"))
    ended = runner.run(twice, PROGRAM, *words, extra="on_failure: kContinue restarts: 2", name="server")
    assert ended.report["incidents"][0]["action"].startswith("its second copy goes on")
    assert not [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]
