"""mpirun of Open MPI: runs the units as its processes, in the foreground.

The units use no MPI; only their ranks come from it. One failed unit ends all, and none is restarted.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from topotrain.launch.launchers.foreground_tool import CommandTool
from topotrain.launch.launchers.submission import Submission

_LIBRARIES = "LD_LIBRARY_PATH"
INSTALL = "it comes with Open MPI (Debian: openmpi-bin)"


class Mpirun(CommandTool):
    """Starts all units with one mpirun."""

    install = INSTALL

    def words(self, submission: Submission) -> list[str]:
        """Return the command."""
        # Without binding: Open MPI would bind each unit to one core, and a unit is several processes.
        line = ["mpirun", "-np", str(submission.units), "--bind-to", "none", "--wdir", os.getcwd()]
        line += ["--host", _slots(submission.options.hosts)] if submission.options.hosts else []
        for variable in submission.environ:  # only the name: mpirun reads the value from its own environment
            line += ["-x", variable]
        return [*line, *submission.options.extra, *submission.command]

    def environ_here(self, submission: Submission, program: str) -> Mapping[str, str] | None:
        """Return the environment of the units; None where they may all run on other hosts."""
        # In a batch job of Slurm mpirun takes the hosts from there.
        if submission.options.hosts or "SLURM_JOB_ID" in os.environ:
            return None
        # Open MPI adds its folder for processes that it starts, if it was called by its path.
        libraries = [str(Path(program).parent.parent / "lib"), *filter(None, [os.environ.get(_LIBRARIES)])]
        return {**os.environ, **submission.environ, _LIBRARIES: ":".join(libraries)}


def _slots(hosts: Sequence[str]) -> str:
    """Return the hosts with their slots: a name given n times becomes "name:n"."""
    return ",".join(f"{name}:{slots}" if slots > 1 else name for name, slots in Counter(hosts).items())


_TOOL = Mpirun()
command, start = _TOOL.command, _TOOL.start
