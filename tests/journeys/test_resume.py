"""A job of which every process is killed goes on from its newest snapshot: the same bits, every sample once."""

import signal

import pytest
import torch
from job_runner import PROGRAMS, Ended, JobRunner
from killed_jobs import resumed, terminated
from programs.resuming import SAMPLES, Net
from safetensors.torch import load_file
from seeds import soaked

from topotrain.extensions.checkpointing.checkpoint_reader import Manifest, latest

pytestmark = pytest.mark.journey

SYNC = "nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
INLINE = "nworkers_per_group: 2 nservers_per_group: 2"
HOGWILD = "nworker_groups: 2 nserver_groups: 2 nservers_per_group: 2"


def test_a_signal_leaves_a_snapshot_from_which_the_same_bits_come(runner: JobRunner) -> None:
    number = signal.SIGHUP
    program = ("resuming.py", "net", "--epochs", "4")
    undisturbed = runner.run(SYNC, *program, name="undisturbed").final
    extra = "snapshot_s: 0 checkpoint_freq: 20"
    code, said, workspace = terminated(runner, SYNC, *program, extra=extra, number=number)
    found = latest(workspace)
    assert code == 128 + number and found is not None and found.steps(0) > 30, said
    assert f"snapshot {found.number} has step {found.steps(0)}: `topotrain run --resume {workspace}`" in said
    early = workspace / "manifests" / "step-20"
    net = Net()  # as the documentation has it, in an ordinary process
    net.load_state_dict(load_file(early / "model.safetensors"), strict=False)
    assert Manifest.open(early).steps(0) == 20
    assert not torch.equal(net.layers[0].weight, undisturbed["layers.0.weight"])
    ended = resumed(runner, workspace)
    different = [name for name, tensor in undisturbed.items() if not torch.equal(tensor, ended.final[name])]
    assert not different, (found.steps(0), different)
    steps = {int(path.name.removeprefix("step-")) for path in (workspace / "manifests").glob("step-*")}
    assert steps >= {20, 40, 80}


def test_a_job_whose_processes_all_get_sigterm_goes_on_where_it_was(runner: JobRunner) -> None:
    """As from Slurm's `scancel`, or the end of a control group; no snapshot was due before."""
    extra = "snapshot_s: 1000 reduce: kSum"
    code, said, workspace = terminated(runner, SYNC, "resuming.py", "ledger", "--epochs", "9", extra=extra, all=True)
    found = latest(workspace)
    assert code == 143 and found is not None and found.steps(0) > 30, said
    assert "was killed by SIGTERM" not in said
    cells = resumed(runner, workspace).final["cells"]
    assert torch.equal(cells, torch.full_like(cells, 9)), (found.steps(0), cells)


def test_a_resumed_epoch_goes_on_with_the_numbers_of_its_batches(runner: JobRunner) -> None:
    """Seven batches make four steps: step 10 is in the third epoch. The disk takes longer than the rest of the job."""
    extra, program = "checkpoint_freq: 10 snapshot_s: 0", runner.folder / "slow_disk.py"
    slow = "import os, runpy, threading, time; fsync = os.fsync; here = threading.current_thread; "
    slow += "os.fsync = lambda fd: here().name == 'snapshots' and time.sleep(0.2) or fsync(fd); "
    numbered = f"runpy.run_path({str(PROGRAMS / 'numbered.py')!r})"
    program.write_text(slow + numbered)
    undisturbed = runner.run(INLINE, str(program), "tt", extra=extra).final
    numbers = runner.folder / "numbers-1.txt"
    seen = numbers.read_text().splitlines()
    numbers.unlink()
    ended = runner.run(INLINE, str(program), "tt", extra=extra, options=("--resume", "job/manifests/step-10"))
    assert "counts them by enumerate(loader)" not in ended.err
    assert numbers.read_text().splitlines() == seen[-10:]
    assert all(torch.equal(tensor, ended.final[name]) for name, tensor in undisturbed.items())
    silent = "import topotrain.extensions.checkpointing.checkpoint_writer as writer; writer.END_S = 1.0; "
    program.write_text(slow.replace("0.2", "99") + silent + numbered)
    said = runner.run(INLINE, str(program), "tt", extra=extra, name="silent").err
    assert "the last snapshot was not written within 1 s of the end of training" in said


def test_sigterm_leaves_one_of_several_server_groups_with_every_sample_once(runner: JobRunner) -> None:
    program = ("resuming.py", "ledger", "--at", "12")
    code, said, workspace = terminated(runner, HOGWILD, *program, extra="snapshot_s: 0 checkpoint_freq: 5 reduce: kSum")
    found = latest(workspace)
    assert code == 143 and found is not None and found.steps(0) >= 12, said
    assert f"snapshot {found.number} has step {found.steps(0)}: `topotrain run --resume {workspace}`" in said
    early = workspace / "manifests" / "step-5"
    counted = load_file(early / "model.safetensors")["cells"]
    assert 0 < counted.sum() < SAMPLES * 2 and Manifest.open(early).steps(0) == 5
    cells = resumed(runner, workspace).final["cells"]
    assert torch.equal(cells, torch.full((SAMPLES,), 3.0)), (found.version, cells)


def test_what_may_be_edited_since_a_snapshot(runner: JobRunner) -> None:
    """A frozen layer keeps its values. In the middle of an epoch its batches must stay what they are."""
    runner.run(INLINE, "edited.py", "", extra="checkpoint_freq: 4 snapshot_s: 0")
    snapshots = runner.folder / "job" / "manifests"

    def edited(edit: str, step: int, code: int = 0) -> Ended:
        options = ("--resume", str(snapshots / f"step-{step}"))
        return runner.run(INLINE, "edited.py", edit, extra="checkpoint_freq: 8", code=code, options=options)

    for edit, words in soaked(
        [("excluded", "has other parameter groups than in snapshot 1: 0.weight differs; a layer that is frozen")],
        [
            ("batch", "loader.batch_size = 16: must be 8, as when the snapshot was taken: 4 batches of this epoch"),
            ("data", "len(loader.dataset) = 80: must be 64, as when the snapshot was taken"),
        ],
    ):
        ended = edited(edit, 4, 2)
        assert words in ended.err and "Traceback" not in ended.err, ended.err
    early = load_file(snapshots / "step-4" / "model.safetensors")
    found = edited("frozen", 4).final
    assert {name for name in early if torch.equal(found[name], early[name])} == {"0.weight", "0.bias"}
    assert edited("batch", 8).report["steps"] == 8 + 2 * 4, "of an epoch that had not begun"
