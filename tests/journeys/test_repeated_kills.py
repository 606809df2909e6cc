"""Jobs of the four frameworks whose processes are killed again and again: each time that one is back, the next is
chosen at random. In the result every sample counts exactly as often as the script asked for, and no process is left.

What a seed did is done again by the command that a failure shows.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from job_runner import PROGRAMS, SANDBLASTER, JobRunner
from process_pool import client
from safetensors.torch import load_file

pytestmark = pytest.mark.journey

EPOCHS = 2
KILLS = 5
SEED = int(os.environ.get("TOPOTRAIN_CHAOS_SEED", "1"))
MARK = "TOPOTRAIN_TORMENTED"


def marked(mark: str) -> list[int]:
    """Who was started by a command with this mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_whoever_is_killed_every_sample_counts_as_often_as_it_was_read(runner: JobRunner) -> None:
    conf, workspace = runner.folder / "job.conf", runner.folder / "job"
    conf.write_text(f'reduce: kSum snapshot_s: 0.2 cluster {{ {SANDBLASTER} workspace: "{workspace}" }}')
    blows = ["--at", "back", "--kills", str(KILLS), "--for", "60s", "--seed", str(SEED), "--pairs", "0.4"]
    script = ["--epochs", str(EPOCHS), "--samples", "200", "--step-s", "0.01"]
    chaos = ["chaos", *blows, str(conf), str(PROGRAMS / "ledger.py"), *script]
    started = [*client(runner.warm_at), "-m", "topotrain"]
    command = [*started, chaos[0], "--json", "--forkserver", runner.served_at, *chaos[1:]]
    environ = {**os.environ, MARK: str(runner.folder)}
    done = subprocess.run(command, cwd=runner.folder, env=environ, capture_output=True, text=True, timeout=300)
    again = f"{conf.read_text()}\ntopotrain {shlex.join(chaos)}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, again
    for name, cells in load_file(workspace / "final.safetensors").items():
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), f"{again}\n{name}: {cells}"
    verdict = json.loads(done.stdout)
    assert verdict["killed"] >= KILLS - 2, again
    assert not marked(str(runner.folder)), again
