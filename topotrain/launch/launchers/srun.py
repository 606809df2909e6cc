"""srun: runs the units as the tasks of one Slurm step, in the foreground.

One failed unit ends the step, and none is restarted. A unit is one task with a CPU for each of its processes.
"""

import os

from topotrain.launch.launchers.foreground_tool import CommandTool
from topotrain.launch.launchers.submission import Submission

INSTALL = "it comes with Slurm (Debian: slurm-client), on a login node of the cluster"


class Srun(CommandTool):
    """Starts all units with one srun."""

    install = INSTALL

    def words(self, submission: Submission, inside: bool = False) -> list[str]:
        """Return the command; inside a batch script the script has the other options."""
        step = ["srun", f"--ntasks={submission.units}", f"--cpus-per-task={submission.processes}"]
        if not inside:
            step += [f"--job-name={submission.job.name or submission.id}", f"--chdir={os.getcwd()}"]
            step += [f"--nodes={submission.options.nodes}"] if submission.options.nodes else []
            step += ["--nodelist=" + ",".join(submission.options.hosts)] if submission.options.hosts else []
            step += submission.options.extra
        # Without binding: Slurm would bind all processes of a unit to one CPU. The units use no MPI.
        return [*step, "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL", *submission.command]


_TOOL = Srun()
command, start = _TOOL.command, _TOOL.start
