"""Processes of a job die, and the result has the bits of a calm run."""

import pytest
import torch
from job_runner import SANDBLASTER, JobRunner
from killed_jobs import killed, resumed
from test_resume import INLINE, SYNC

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

COPIES = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true transport: kTcp compression: kInt8"


def test_each_server_may_die_and_the_result_does_not_show_it(runner: JobRunner) -> None:
    """The one that decides, the one that has taken its part, and the one that has taken that one's."""
    # What is lazy has the same bits.
    calm = runner.run(COPIES, "twice.py", str(runner.folder / "calm"), name="calm").final
    kills = ("4:0", "11:1", "19:1", "30:0")
    goes_on = "pull: kLazy on_failure: kContinue restarts: 2 snapshot_s: 0.2"
    ended = runner.run(f"{COPIES} replicas: 2", "twice.py", str(runner.folder / "job"), *kills, extra=goes_on)
    assert calm.keys() == ended.final.keys()
    for name, values in calm.items():
        assert torch.equal(values, ended.final[name]), name
    incidents = ended.report["incidents"]
    assert [incident["who"][-1] for incident in incidents] == ["0", "1", "1", "0"]
    assert {incident["action"] for incident in incidents} == {
        "its second copy goes on; a fresh process becomes the second one"
    }
    assert all(0 < incident["waited_s"] < 20 for incident in incidents)


# --- a script that changes parameters (`tt.assign`) -------------------------------------------------------------------


def test_a_server_that_dies_between_a_change_and_its_step_repeats_neither(runner: JobRunner) -> None:
    """The second copy of the server knows which changes have been made."""
    undisturbed = runner.run(SYNC, "assigning.py", "before", name="undisturbed").final
    twice = f"{SYNC} transport: kTcp replicas: 2"
    words = ("before", "--once", str(runner.folder / "once"), "--job", str(runner.folder / "server"))
    ended = runner.run(twice, "assigning.py", *words, extra="on_failure: kContinue restarts: 2", name="server")
    assert ended.report["incidents"][0]["action"].startswith("its second copy goes on")
    assert not [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]


# --- several models and optimizers ------------------------------------------------------------------------------------


def test_every_step_with_every_batch_counts_once_whenever_a_worker_dies(runner: JobRunner) -> None:
    words = ("--die", "1", "--at", "7", "--lived", str(runner.folder / "lived"))
    extra = "on_failure: kContinue reduce: kSum snapshot_s: 0.1"
    ended = runner.run(SANDBLASTER, "pair.py", "ledger", "--epochs", "3", *words, extra=extra)
    assert ended.report["incidents"][0]["who"].startswith("worker")
    for name, cells in ended.final.items():
        assert torch.equal(cells, torch.full_like(cells, 3)), (name, cells)


# --- the whole job ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "kind"), [("assigning.py", "before"), ("pair.py", "gan")])
def test_a_job_whose_processes_all_died_has_the_same_bits(runner: JobRunner, program: str, kind: str) -> None:
    """A change counts once. The main worker of the GAN is killed between two steps with a batch, never a snapshot's."""
    undisturbed = runner.run(INLINE, program, kind, name="undisturbed").final
    workspace = killed(runner, INLINE, kind, program=program)
    found = latest(workspace)
    assert found is not None and 0 < found.version <= 60 and (kind != "gan" or found.version % 2 == 0)
    ended = resumed(runner, workspace)
    different = [name for name, value in undisturbed.items() if not torch.equal(value, ended.final[name])]
    assert not different, (found.version, different)
