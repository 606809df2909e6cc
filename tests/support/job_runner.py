"""Real jobs through the real command line, each in a folder of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from process_pool import client
from safetensors.torch import load_file

PROGRAMS = Path(__file__).parents[1] / "programs"
SANDBLASTER = "nworkers_per_group: 3 nservers_per_group: 2 server_worker_separate: true"
ALLREDUCE = "nworkers_per_group: 3 nservers_per_group: 3"
DOWNPOUR = "nworker_groups: 2 nworkers_per_group: 2 nservers_per_group: 2 server_worker_separate: true"
HOGWILD = "nworker_groups: 3 nserver_groups: 3"


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    code: int
    out: str
    err: str
    workspace: Path
    report: dict[str, Any]

    @property
    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.workspace / "final.safetensors")

    def check_ledger(self, times: float) -> None:
        """Every sample of a ledger (programs/ledger.py) has counted so often, and nothing has ended the job."""
        cells = self.final["cells"]
        assert torch.equal(cells, torch.full_like(cells, times)), cells
        assert self.report["cause"] is None


@dataclass(frozen=True)
class JobRunner:
    """Runs jobs in a folder of their own. `warm_at`: the pool that makes the processes of its commands, if any."""

    folder: Path
    served_at: str
    warm_at: str = ""

    @property
    def python(self) -> list[str]:
        """What stands for `python` in a command line."""
        return client(self.warm_at) if self.warm_at else [sys.executable]

    def command(
        self, cluster: str, program: str, *args: str, extra: str = "", name: str = "job", options: Sequence[str] = ()
    ) -> list[str]:
        conf = self.folder / f"{name}.conf"
        workspace = self.folder / name
        conf.write_text(f'name: "{name}"\n{extra}\ncluster {{ {cluster} workspace: "{workspace}" }}\n')
        report = ["--report", str(self.folder / f"{name}.json"), "--forkserver", self.served_at]
        run = [*self.python, "-m", "topotrain", "run", *report, *options]
        return [*run, str(conf), program if program == "-m" else str(PROGRAMS / program), *args]

    def run(
        self,
        cluster: str,
        program: str,
        *args: str,
        extra: str = "",
        name: str = "job",
        code: int = 0,
        options: Sequence[str] = (),
    ) -> Ended:
        """Run a job to its end; its exit code must be `code`. `options` are those of `topotrain run`."""
        command = self.command(cluster, program, *args, extra=extra, name=name, options=options)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.folder)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        report = self.folder / f"{name}.json"
        found = json.loads(report.read_text()) if report.exists() else {}
        return Ended(done.returncode, done.stdout, done.stderr, self.folder / name, found)
