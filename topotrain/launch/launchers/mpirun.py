"""mpirun of Open MPI: the units as its processes, in front. They start no MPI; only their rank comes from it.

Rule: one unit that fails ends all, and nobody is started again. Open MPI would bind each unit to one core, though a
unit is several processes.
"""

import os
from collections import Counter
from collections.abc import Sequence

from topotrain.config.job import ConfigError
from topotrain.launch.launchers.foreground_tool import CommandTool
from topotrain.launch.launchers.submission import Submission

INSTALL = "it comes with Open MPI (Debian: openmpi-bin)"


def words(submission: Submission) -> list[str]:
    """The command. Raises ConfigError for --nodes, which mpirun does not know."""
    if submission.options.nodes:
        raise ConfigError("--nodes", submission.options.nodes, "is not for mpirun: name the machines with --hosts")
    line = ["mpirun", "-np", str(submission.units), "--bind-to", "none", "--wdir", os.getcwd()]
    line += ["--host", _slots(submission.options.hosts)] if submission.options.hosts else []
    for variable in submission.environ:  # the name alone: mpirun takes the value from its own environment
        line += ["-x", variable]
    return [*line, *submission.options.extra, *submission.command]


def _slots(hosts: Sequence[str]) -> str:
    """A name given n times has n slots, as "name:n" has."""
    return ",".join(f"{name}:{slots}" if slots > 1 else name for name, slots in Counter(hosts).items())


_TOOL = CommandTool(words, INSTALL)
command, start = _TOOL.command, _TOOL.start
