"""What real jobs leave on the disk: for their user alone, and the result also where there is no room any more."""

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_runner import ALLREDUCE, SANDBLASTER, JobRunner
from safetensors.torch import load_file

pytestmark = pytest.mark.journey

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB, in the place of the workspace `job`."""
    disk = tmp_path / "job"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def open_to_others(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)} {stat.S_IMODE(path.lstat().st_mode):o}"
        for path in (root, *root.rglob("*"))
        if not path.is_symlink() and path.lstat().st_mode & 0o077
    ]


def test_nothing_that_a_job_leaves_can_be_read_by_others(runner: JobRunner):
    extra = "checkpoint_freq: 2 debug: true on_failure: kContinue"
    options = ["--profile", "--record", str(runner.folder / "job.record")]
    command = replace(runner, warm_at="").command(SANDBLASTER, "disk.py", "", "40", "", extra=extra, options=options)
    at = command.index("--forkserver")
    del command[at : at + 2]  # the job's own has the job's umask
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=runner.folder, umask=0)
    assert done.returncode == 0, done.stderr
    workspace = runner.folder / "job"
    names = {path.name for path in workspace.rglob("*")}
    assert {"final.safetensors", "trace.json", "debug.jsonl", "step-2", "worker-0-0.log", "lock"} <= names
    assert open_to_others(workspace) == []
    # Files that the user has named have the mode of the umask.
    named = [runner.folder / name for name in ("job.json", "job.record")]
    assert [stat.S_IMODE(file.stat().st_mode) for file in named] == [0o666, 0o666]


def test_the_final_parameters_find_room_on_a_disk_that_became_full(runner: JobRunner, small_disk: Path):
    ended = runner.run(ALLREDUCE, "disk.py", "fill", str(MIB // 8), str(small_disk))
    free = os.statvfs(small_disk)
    assert free.f_bavail * free.f_bsize < MIB
    assert ended.final["weight"].shape == (8, MIB // 8)
    assert not (small_disk / "final.tmp").exists()


def test_a_disk_without_room_for_the_result_is_told_before_training(runner: JobRunner, small_disk: Path):
    ended = runner.run(ALLREDUCE, "disk.py", "", str(MIB), str(small_disk), code=2)
    assert "must have room for 33,554,464 bytes of final.safetensors (No space left on device)" in ended.err
    assert str(small_disk) in ended.err and "Traceback" not in ended.err
    assert not (small_disk / "final.tmp").exists()


def test_a_result_that_cannot_be_written_names_the_file_and_the_snapshot(runner: JobRunner):
    workspace = runner.folder / "job"
    extra = "checkpoint_freq: 2"
    ended = runner.run(ALLREDUCE, "disk.py", "limit", "4000", str(workspace), extra=extra, code=1)
    assert f"{workspace / 'final.safetensors'} cannot be written: File too large" in ended.err
    assert f"`topotrain run --resume {workspace}`" in ended.err and "goes on from snapshot 0" in ended.err
    assert "Traceback" not in ended.err and not (workspace / "final.tmp").exists()
    again = runner.run(ALLREDUCE, "disk.py", "", "4000", "", extra=extra, options=["--resume", str(workspace)])
    assert load_file(again.workspace / "final.safetensors")["weight"].shape == (8, 4000)
