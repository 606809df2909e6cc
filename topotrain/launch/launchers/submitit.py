"""submitit: runs the units as the tasks of one submitit job on Slurm.

`submit` can be called directly with an executor of the user. No unit is restarted.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.launch.launchers import foreground_tool, slurm, srun
from topotrain.launch.launchers.submission import LaunchResult, Submission

INSTALL = "pip install 'topotrain[slurm]'"
FOLDER = "submitit"


class UnitFailed(Exception):
    """The failure of a unit's task with exit code `code`, for submitit to see."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def unit(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the unit as one task. Raises UnitFailed."""
    code = subprocess.run(words, env={**os.environ, **environ}, stdin=subprocess.DEVNULL).returncode
    if code:
        raise UnitFailed(code if code > 0 else 128 - code)
    return code


def submit(executor: Any, submission: Submission) -> Any:
    """Submit all units of a job to `executor`; return submitit's Job.

    The executor is a submitit.AutoExecutor or SlurmExecutor. Its nodes times tasks per node must be the number of
    units. The job's folder is written first.
    """
    submission.write()
    return executor.submit(unit, submission.command, dict(submission.environ))


def parameters(submission: Submission) -> dict[str, Any]:
    """Return the arguments of `AutoExecutor.update_parameters`. Raises ConfigError."""
    nodes = submission.options.nodes or 1
    given: dict[str, Any] = {
        "name": submission.job.name or submission.id,
        "nodes": nodes,
        "tasks_per_node": submission.per_node(nodes),
        "cpus_per_task": submission.processes,
        # submitit limits a job to five minutes by default; here the limit is that of the partition.
        "timeout_min": None,
        "stderr_to_stdout": True,
        "slurm_srun_args": ["--kill-on-bad-exit=1", "--cpu-bind=none", "--mpi=none"],
        "slurm_additional_parameters": {"no_requeue": True},
    }
    if submission.options.hosts:
        given["slurm_additional_parameters"]["nodelist"] = ",".join(submission.options.hosts)
    for word in submission.options.extra:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError("--pass", word, "must be a parameter of submitit, such as timeout_min=60")
        given[name] = int(value) if value.isdecimal() else value
    return given


def command(submission: Submission) -> str:
    """Return a description of the submission."""
    # Not the batch script, which submitit writes when it submits.
    lines = [f"submitit.AutoExecutor({str(submission.folder / FOLDER)!r}, cluster='slurm')"]
    lines += [f"  {name} = {value!r}" for name, value in parameters(submission).items()]
    return submission.show("\n".join([*lines, f"  each task runs {' '.join(submission.command)}"]))


def start(submission: Submission) -> LaunchResult:
    """Queue the job, and with `wait` follow it to its end. Raises ConfigError."""
    given = parameters(submission)
    try:
        import submitit
    except ImportError:
        raise ConfigError("launcher", "submitit", f"is not installed: {INSTALL}") from None
    foreground_tool.find("sbatch", srun.INSTALL)
    executor = submitit.AutoExecutor(submission.folder / FOLDER, cluster="slurm", slurm_python=sys.executable)
    try:
        executor.update_parameters(**given)
    except (NameError, TypeError) as error:
        raise ConfigError("--pass", " ".join(submission.options.extra), str(error)) from None
    job = submit(executor, submission)
    said = {"job": job.job_id, "output": str(job.paths.stdout)}
    if not submission.options.wait:
        return LaunchResult(0, said)
    code = slurm.wait_for_end(job.job_id, job.paths.stdout, submission)
    return LaunchResult(code, said)
