"""The registry of launchers, by name.

A launcher is a module of this folder with the two functions of `submission.LauncherTool`.
"""

import importlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.launch import UnitPlace, arguments
from topotrain.launch.agent.workspace import STORE
from topotrain.launch.launchers.submission import (
    LauncherTool,
    LaunchOptions,
    LaunchResult,
    submission,
    without_password,
)

LOCAL, KUBERNETES = "local", "kubernetes"


@dataclass(frozen=True, slots=True)
class LauncherEntry:
    """A launcher: its module, its description for the user, and its special options."""

    module: str
    says: str
    takes: tuple[str, ...] = ()


LAUNCHERS = {
    LOCAL: LauncherEntry("", "this machine, as `topotrain run`"),
    "torchrun": LauncherEntry("torchrun", "torch.distributed.run, on one node or started on each of several"),
    "slurm": LauncherEntry("slurm", "a batch job of Slurm", ("requeue",)),
    "srun": LauncherEntry("srun", "a step of Slurm, in front, inside an allocation or with one of its own"),
    "submitit": LauncherEntry("submitit", "a batch job of Slurm through submitit", ("requeue",)),
    "mpirun": LauncherEntry("mpirun", "Open MPI, in front"),
    "ray": LauncherEntry("ray", "actors in a Ray cluster, in front", ("max_restarts",)),
    KUBERNETES: LauncherEntry(
        "kubernetes",
        "writes manifests: a TrainJob of Kubeflow, or a JobSet",
        ("max_restarts", "image", "namespace", "format", "output", "with_secret"),
    ),
}
SPECIAL = tuple(dict.fromkeys(option for entry in LAUNCHERS.values() for option in entry.takes))
"""The options that only some launchers accept."""


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
    name: str, job: Job, topology: Topology, options: LaunchOptions, environ: Mapping[str, str], dry_run: bool
) -> Launched:
    """Start a job with the launcher `name`, or show what it would submit.

    Raises ConfigError or StoreError.
    """
    check_name(name)
    check_special(name, options)
    if name == LOCAL:
        check_local(options)
        return Launched(name, "", "", len(topology.units), 0, local_command(job, topology), {}, dry_run)
    tool = find_tool(name)
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


def find_tool(name: str) -> LauncherTool:
    """Return the module of a launcher but the local one. Raises ConfigError."""
    check_name(name)
    # Imported by name: most launchers need a library that only their users have.
    return cast(LauncherTool, importlib.import_module(f"topotrain.launch.launchers.{LAUNCHERS[name].module}"))


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is the name of a launcher."""
    if name not in LAUNCHERS:
        known = "".join(f"\n{known:12}{entry.says}" for known, entry in LAUNCHERS.items())
        raise ConfigError("launcher", name, f"must be one of these:{known}")


def check_special(name: str, options: LaunchOptions) -> None:
    """Raise ConfigError for an option that only other launchers accept."""
    for option in SPECIAL:
        value = getattr(options, option)
        if value and option not in LAUNCHERS[name].takes:
            takers = " and ".join(known for known, entry in LAUNCHERS.items() if option in entry.takes)
            raise ConfigError("--" + option.replace("_", "-"), value, f"is not for {name}, but for {takers}")


def check_local(options: LaunchOptions) -> None:
    """Raise ConfigError for an option that the local launcher does not have."""
    for option, value in (("--nodes", options.nodes), ("--hosts", options.hosts), ("--pass", options.extra)):
        if value and value != 1:
            raise ConfigError(option, value, "is not for the local launcher, which starts all units on this machine")
    for option, text in (("--rendezvous", options.rendezvous), ("--id", options.id)):
        if text:
            raise ConfigError(option, without_password(text), "is not for the local launcher, which has its own")


def local_command(job: Job, topology: Topology) -> str:
    """Return the commands of the local launcher's units, without their forkserver."""
    run_dir = Path(job.workspace).absolute() / "run"
    lines = []
    for unit in topology.units:
        place = UnitPlace(unit.rank, len(topology.units), (run_dir / STORE).as_uri(), str(run_dir))
        lines.append(shlex.join([sys.executable, "-m", "topotrain.launch.agent.unit_main", *arguments(place)]))
    return "\n".join([*lines, ""])
