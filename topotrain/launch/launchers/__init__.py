"""The registry of launchers, by name.

A launcher is a module of this folder with the two functions of `submission.LauncherTool`.
"""

import importlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from topotrain.config.job import ConfigError
from topotrain.launch import UnitPlace, arguments

# The rest is imported where it is used: `topotrain --help` reads the names of the launchers, and answers at once.
if TYPE_CHECKING:
    from topotrain.config.job import Job
    from topotrain.config.topology import Topology
    from topotrain.launch.launchers.submission import LauncherTool, LaunchOptions

LOCAL, KUBERNETES = "local", "kubernetes"


@dataclass(frozen=True, slots=True)
class LauncherEntry:
    """A launcher: its description, and the fields of `LaunchOptions` that it accepts."""

    says: str
    takes: tuple[str, ...] = ()


_MEETING = ("rendezvous", "id", "extra")
_NODES = (*_MEETING, "nodes", "hosts")
_QUEUED = (*_NODES, "wait", "requeue")
LAUNCHERS = {
    LOCAL: LauncherEntry("On this machine, as `topotrain run`."),
    "torchrun": LauncherEntry("With torch.distributed.run, started on each node.", _NODES),
    "slurm": LauncherEntry("In a batch job of Slurm.", _QUEUED),
    "srun": LauncherEntry("In a step of Slurm, in front, with or without an allocation.", _NODES),
    "submitit": LauncherEntry("In a batch job of Slurm, through submitit.", _QUEUED),
    "mpirun": LauncherEntry("With Open MPI, in front.", (*_MEETING, "hosts")),
    "ray": LauncherEntry("In actors of a Ray cluster, in front.", (*_MEETING, "max_restarts")),
    KUBERNETES: LauncherEntry(
        "Write manifests: a TrainJob of Kubeflow, or a JobSet.",
        (*_MEETING, "max_restarts", "image", "namespace", "format", "output", "with_secret"),
    ),
}
OPTIONS = tuple(dict.fromkeys(option for entry in LAUNCHERS.values() for option in entry.takes))
"""The options that not all launchers accept."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The result of a launch. text: for stdout, a dry run or the queued job's number."""

    launcher: str
    id: str
    rendezvous: str
    units: int
    code: int
    text: str
    said: Mapping[str, str]
    dry_run: bool

    def as_data(self) -> dict[str, Any]:
        """Return the data for --json."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("said", "text", "dry_run")}
        return {**data, **self.said, **({"dry_run": self.text} if self.dry_run else {})}


def launch(
    name: str, job: "Job", topology: "Topology", options: "LaunchOptions", environ: Mapping[str, str], dry_run: bool
) -> Launched:
    """Start a job with the launcher `name`, or show what it would submit.

    Raises ConfigError or StoreError.
    """
    from topotrain.launch.launchers.submission import LaunchResult, submission, without_password

    check_name(name)
    check_options(name, options)
    if name == LOCAL:
        return Launched(name, "", "", len(topology.units), 0, local_command(job, topology), {}, dry_run)
    # Imported by name: most launchers need a library that only their users have.
    tool = cast("LauncherTool", importlib.import_module(f"topotrain.launch.launchers.{name}"))
    if name == KUBERNETES:  # where there is no folder that all units can read
        from topotrain.launch.launchers.kubernetes import completed

        options = completed(job, options)
    at = submission(job, topology, options, environ)
    ended, text = LaunchResult(0), ""
    if dry_run:
        text = tool.command(at)
    else:
        ended = tool.start(at)
        text = ended.text or "".join(f"{ended.said[key]}\n" for key in ("job",) if key in ended.said)
    shown = without_password(at.rendezvous)
    return Launched(name, at.id, shown, at.units, ended.code, text, ended.said, dry_run)


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is the name of a launcher."""
    if name not in LAUNCHERS:
        known = "".join(f"\n{known:12}{entry.says}" for known, entry in LAUNCHERS.items())
        raise ConfigError("launcher", name, f"must be one of these:{known}")


def check_options(name: str, options: "LaunchOptions") -> None:
    """Raise ConfigError for an option that this launcher does not accept."""
    from topotrain.launch.launchers.submission import without_password

    for option in OPTIONS:
        value = getattr(options, option)
        if value and option not in LAUNCHERS[name].takes:
            shown = without_password(value) if isinstance(value, str) else value
            takers = ", ".join(known for known, entry in LAUNCHERS.items() if option in entry.takes)
            raise ConfigError(flag_of(option), shown, f"is not for {name}, but for {takers}")


def flag_of(option: str) -> str:
    """Return the command's option for a field of `LaunchOptions`."""
    return "--pass" if option == "extra" else "--" + option.replace("_", "-")


def local_command(job: "Job", topology: "Topology") -> str:
    """Return the commands of the local launcher's units, without their forkserver."""
    from topotrain.launch.agent.workspace import STORE

    run_dir = Path(job.workspace).absolute() / "run"
    lines = []
    for unit in topology.units:
        place = UnitPlace(unit.rank, len(topology.units), (run_dir / STORE).as_uri(), str(run_dir))
        lines.append(shlex.join([sys.executable, "-m", "topotrain.launch.agent.unit_main", *arguments(place)]))
    return "\n".join([*lines, ""])
