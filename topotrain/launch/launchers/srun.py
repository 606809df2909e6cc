"""srun: the units as the tasks of one Slurm step, in front.

Rule: one unit that fails ends the step, and nobody is started again. A unit is one task with a CPU for each of its
processes, and Slurm must not bind them all to one.
"""

import os

from topotrain.launch.launchers.foreground_tool import CommandTool
from topotrain.launch.launchers.submission import Submission

INSTALL = "it comes with Slurm (Debian: slurm-client), on a login node of the cluster"


def words(submission: Submission, inside: bool = False) -> list[str]:
    """The command. `inside`: it stands in a batch script, which says the rest."""
    step = ["srun", f"--ntasks={submission.units}", f"--cpus-per-task={submission.processes}"]
    if not inside:
        step += [f"--job-name={submission.job.name or submission.id}", f"--chdir={os.getcwd()}"]
        step += [f"--nodes={submission.options.nodes}"] if submission.options.nodes else []
        step += ["--nodelist=" + ",".join(submission.options.hosts)] if submission.options.hosts else []
        step += submission.options.extra
    return [*step, "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL", *submission.command]


_TOOL = CommandTool(words, INSTALL)
command, start = _TOOL.command, _TOOL.start
