"""The same job under other people's tools, really run: a two-node Slurm, submitit, mpirun, torchrun.

All of them live in a sandbox of their own (../slurm_cluster.py): its network has no way out, and nothing survives it.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from job_runner import PROGRAMS
from safetensors.torch import load_file
from seeds import soak_only
from slurm_cluster import Missing, Sandbox, add_forkserver, add_slurm, open_sandbox

from topotrain.extensions.checkpointing.checkpoint_reader import latest

pytestmark = pytest.mark.journey

THREE = "nworkers_per_group: 2 server_worker_separate: true"
DOWNPOUR = "nworker_groups: 2 server_worker_separate: true"
ONE = "nworkers_per_group: 2 nworkers_per_procs: 2"
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_oob_tcp_if_include": "lo",  # left out by default, and there is no other
    "OMPI_MCA_btl": "self",
}
SLURM_MISSING: list[str] = []


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with ExitStack() as stack:
        try:
            here = stack.enter_context(open_sandbox(tmp_path_factory.mktemp("sandbox")))
        except Missing as missing:
            pytest.skip(str(missing))
        here.environ.update(MPI, TOPOTRAIN_TOKEN="5e" * 32)
        try:
            add_slurm(here)
        except Missing as missing:
            SLURM_MISSING.append(str(missing))
        add_forkserver(here)
        yield here


@dataclass(frozen=True)
class LaunchedJobs:
    """Runs jobs in a folder of its own inside the sandbox."""

    sandbox: Sandbox
    folder: Path

    def launch(
        self, name: str, cluster: str, program: str, *args: str, options: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        conf = self.folder / "job.conf"
        conf.write_text(f'name: "job"\ncluster {{ {cluster} workspace: "job" }}\n')
        start = ["run", f"--forkserver={self.sandbox.environ['TOPOTRAIN_FORKSERVER']}"]
        start = start if name == "run" else ["launch", name]
        words = [sys.executable, "-m", "topotrain", *start, *options, conf.name, str(PROGRAMS / program), *args]
        return self.sandbox.run(*words, cwd=self.folder)

    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "job" / "final.safetensors")

    def left(self) -> str:
        """What of a job still runs in the sandbox."""
        return self.sandbox.left("topotrain")


@pytest.fixture
def jobs(sandbox: Sandbox, tmp_path: Path) -> LaunchedJobs:
    return LaunchedJobs(sandbox, tmp_path)


@pytest.fixture(scope="module")
def expected(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What `topotrain run` makes of it."""
    here = LaunchedJobs(sandbox, tmp_path_factory.mktemp("run"))
    done = here.launch("run", THREE, "small.py")
    assert done.returncode == 0, done.stderr
    return here.final()


LAUNCHES = {
    "srun": ("--nodes=2",),
    "submitit": ("--wait",),
    "mpirun": ("--pass=--oversubscribe",),
    "torchrun": (),
}


def needed(name: str) -> None:
    """Skip where the launcher's tool is missing."""
    if name in ("srun", "slurm", "submitit") and SLURM_MISSING:
        pytest.skip(SLURM_MISSING[0])
    if name == "submitit":
        pytest.importorskip("submitit")
    if name == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun (Debian: openmpi-bin)")


@pytest.mark.parametrize("name", ["srun", "mpirun", "submitit"])
def test_a_synchronous_job_ends_with_the_bits_of_run(
    name: str, jobs: LaunchedJobs, expected: dict[str, torch.Tensor]
) -> None:
    needed(name)
    done = jobs.launch(name, THREE, "small.py", options=LAUNCHES[name])
    assert done.returncode == 0, done.stdout + done.stderr
    final = jobs.final()
    assert final.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(final[key], value), key
    assert jobs.left() == ""


def test_torchrun_starts_every_process_again(jobs: LaunchedJobs) -> None:
    """The program fails in its first life; in the second nothing of the first must be in the way."""
    lived = jobs.folder / "lived"
    done = jobs.launch(
        "torchrun", "nworkers_per_group: 2", "wrong.py", "fails once", str(lived), options=("--pass=--max-restarts=1",)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert lived.exists()
    assert "the first life ends" in done.stderr
    assert jobs.final()


REQUEUED = {
    # what Slurm sends before the time limit: to the script alone, or to all processes of the step
    "slurm": (("--pass=--time=60",), ("--batch", "--signal=USR1")),
    "submitit": (("--pass=timeout_min=60",), ("--signal=USR2",)),
}


def test_a_job_without_a_snapshot_is_not_queued_again(jobs: LaunchedJobs) -> None:
    """It would be queued for ever."""
    needed("slurm")
    refused = jobs.launch("slurm", DOWNPOUR, "small.py", options=("--pass=--partition=nowhere",))
    assert refused.returncode == 2, "what Slurm refuses is bad input"
    assert "nowhere" in refused.stderr and "Traceback" not in refused.stderr
    hold = jobs.folder / "hold"
    hold.touch()
    options = ("--json", "--requeue", "--pass=--time=60", "--set=grace_s=0.5")
    done = jobs.launch("slurm", ONE, "resuming.py", "ledger", "--at", "1", "--hold", str(hold), options=options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    jobs.sandbox.wait_for("the script", ["cat", told["output"]], "holding")
    jobs.sandbox.run("scancel", "--batch", "--signal=USR1", told["job"])
    jobs.sandbox.wait_for("the end", ["scontrol", "show", "job", told["job"]], "JobState=FAILED")
    output = Path(told["output"]).read_text()
    assert "not queued again: it has taken no snapshot" in output, output
    assert jobs.left() == ""


@soak_only  # in one process, without Slurm: launch/launchers/test_submission.py
@pytest.mark.parametrize("name", REQUEUED)
def test_a_job_that_nears_its_time_limit_is_queued_again_and_goes_on(name: str, jobs: LaunchedJobs) -> None:
    needed(name)
    limit, near = REQUEUED[name]
    options = ("--json", "--requeue", *limit)
    done = jobs.launch(name, DOWNPOUR, "resuming.py", "ledger", "--epochs", "20", options=options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    scontrol = ["scontrol", "show", "job", told["job"]]
    jobs.sandbox.wait_for("training", ["cat", told["output"]], "there")
    jobs.sandbox.run("scancel", *near, told["job"])
    jobs.sandbox.wait_for("the requeue", scontrol, "Restarts=1")
    # it waits for `cred_expire` (slurm_cluster.py), by default for two minutes
    jobs.sandbox.wait_for("the job", scontrol, "JobState=COMPLETED", patience=60)
    # submitit writes a file for each task
    output = "".join(path.read_text() for path in sorted(Path(told["output"]).parent.glob("*.out")))
    assert "one more snapshot is taken" in output
    cells = jobs.final()["cells"]
    assert torch.equal(cells, torch.full_like(cells, 20.0)), output
    found = latest(jobs.folder / "job")
    assert found is not None and found.steps(0) > 30
    assert jobs.left() == ""
