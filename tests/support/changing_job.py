"""A job in a sandbox that worker groups, or workers, leave and join, by the command line of a user.

The job is programs/paced.py in the job's folder, with `--id=paced`; its store is the folder that a launch makes.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from slurm_cluster import Sandbox, Started
from unit_hosts import wait

LEDGER = "reduce: kSum on_failure: kContinue"
EPOCHS = 2


@dataclass(frozen=True)
class ChangingJob:
    """`folder`: in which the job was started; there its workspace is called job. `started`: its launcher."""

    sandbox: Sandbox
    folder: Path
    started: Started

    def a_group_leaves_and_joins(self) -> None:
        """Group 1, which leaves from a machine with a unit, and joins from one that only shares what a launch wrote."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "launch").symlink_to(self.folder / "job" / "launch")
        self._wait_for_lives({0: 1, 1: 1})
        left = self._asked("leave", "job", "--group", "1")
        assert left == {"group": 1, "text": "group 1 has left"}
        joined = self._asked("join", "elsewhere", "--group", "1")
        assert joined == {"group": 1, "text": "group 1 starts (incarnation 1)"}
        self._wait_for_lives({0: 1, 1: 2})

    def a_worker_leaves_and_joins(self) -> None:
        """One of two, which leaves by the store and joins by the workspace; each time all scripts begin anew."""
        self._wait_for_lives({0: 1, 1: 1})
        left = self._asked("leave", *self._store, "--workers", "1")
        assert left["workers"] == 1 and "a worker has left" in left["text"]
        self._wait_for_lives({0: 2, 1: 1})
        joined = self._asked("join", "job", "--workers", "1")
        assert joined["workers"] == 2 and joined["step"] > left["step"]
        self._wait_for_lives({0: 3, 1: 2})

    def ends_well(self) -> None:
        """With every sample counted as often as there are epochs."""
        (self.folder / "on").touch()
        code, said = self.started.end()
        assert code == 0, said
        cells = load_file(self.folder / "job" / "final.safetensors")["cells"]
        assert torch.equal(cells, torch.full_like(cells, EPOCHS)), cells

    @property
    def _store(self) -> list[str]:
        return [(self.folder / "job" / "launch" / "paced" / "store").as_uri(), "--job", "paced"]

    def _asked(self, *words: str) -> dict[str, Any]:
        done = self.sandbox.run(sys.executable, "-m", "topotrain", "jobs", *words, "--json", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def _wait_for_lives(self, lives: dict[int, int]) -> None:
        """Until the worker of each rank has begun to train so often."""
        ended = self.started.process.poll
        wait(lambda: ended() is not None or {rank: len([*self.folder.glob(f"{rank} *")]) for rank in lives} == lives)
        assert ended() is None, self.started.end()
