"""The contract of every launcher, and the table of a unit's settings.

A launcher starts one process per unit of the layout, and passes each the values of a `UnitPlace`. Where another tool
starts the processes (srun, torchrun, a pod), the same values come as environment variables: such a launcher is a table
of variable names (`launchers/env_tables.py`).
"""

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Failed


class EventListener(Protocol):
    """Receives the events of a job, on the thread of the job's launcher."""

    def __call__(self, event: Event) -> None: ...


class JobWatch:
    """Follows a job, and sums up its state for the store. This one follows nothing."""

    def lead(self, resumed: bool, hosts: Sequence[str]) -> None:
        """Follow the job from here on: this unit leads it.

        resumed: the job has begun before. hosts: the names of the units' hosts, by rank.
        """

    def summary(self) -> Mapping[str, Any] | None:
        """Return the present state of the job as JSON data, on any thread; None: unknown."""
        return None


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """The rank, addresses and folders of one unit.

    rank: the unit's number, from 0.
    nprocs: the number of units.
    rendezvous: the URL of the store where all units meet.
    run_dir: the folder, on the unit's host, with the files that the launcher has prepared for the job (see
        workspace.py).
    forkserver: the socket of the host's forkserver. "": the unit starts its own.
    hosts: the number of every unit's host, separated by commas. "": all units run on one host.
    host: the address at which other units reach this one.
    sockets: a private folder with a short path that all units of the host share. "": the forkserver's.
    link_mbit: the measured speed of the slowest link between units. 0: not measured.
    """

    rank: int
    nprocs: int
    rendezvous: str
    run_dir: str
    forkserver: str = ""
    hosts: str = ""
    host: str = "127.0.0.1"
    sockets: str = ""
    link_mbit: float = 0.0

    @property
    def host_numbers(self) -> tuple[int, ...]:
        """The entries of `hosts` as integers. Raises ConfigError."""
        try:
            return tuple(int(word) for word in self.hosts.split(",") if word)
        except ValueError:
            raise ConfigError("hosts", self.hosts, "must be numbers separated by commas") from None


FORKSERVER_VARIABLE = "TOPOTRAIN_FORKSERVER"
# name -> (argument, variable); an argument wins over a variable.
TABLE: Mapping[str, tuple[str, str]] = {
    "rank": ("--rank", "TOPOTRAIN_RANK"),
    "nprocs": ("--nprocs", "TOPOTRAIN_NPROCS"),
    "rendezvous": ("--rendezvous", "TOPOTRAIN_RENDEZVOUS"),
    "run_dir": ("--run-dir", "TOPOTRAIN_RUN_DIR"),
    "forkserver": ("--forkserver", FORKSERVER_VARIABLE),
    "hosts": ("--hosts", "TOPOTRAIN_HOSTS"),
    "host": ("--host", "TOPOTRAIN_HOST"),
    "sockets": ("--sockets", "TOPOTRAIN_SOCKETS"),
    "link_mbit": ("--link-mbit", "TOPOTRAIN_LINK_MBIT"),
}

RUN_VARIABLE = "TOPOTRAIN_RUN"
"""A random text in the environment of every process of one started job. A launcher finds its processes by it."""


def arguments(place: UnitPlace) -> list[str]:
    """Return the command-line arguments of a unit at `place`."""
    return [word for name, (option, _) in TABLE.items() for word in (option, str(getattr(place, name)))]


def add_arguments(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the options of a `UnitPlace` to `parser`; an option wins over its variable."""
    for f in fields(UnitPlace):
        option, variable = TABLE[f.name]
        default = environ.get(variable, None if f.default is MISSING else f.default)
        # Without a default and without the variable argparse names the missing option, as it does for a wrong value.
        parser.add_argument(option, type=f.type, default=default, required=default is None, help=f"or {variable}")


def own_python(module: str) -> list[str]:
    """Return the command that calls `main` of a topotrain module with its arguments.

    The process has the options of this interpreter (-O, -W, -X, …). It imports nothing from the working folder, where a
    user's `queue.py` may be, and its `sys.path` has no entry of its own.
    """
    root = str(Path(__file__).parents[2])
    # Not -P: a script would see it in `sys.flags`. At the end of the path the root shadows nothing.
    path = f"sys.flags.safe_path or sys.path.pop(0); {root!r} in sys.path or sys.path.append({root!r})"
    code = f"import sys; {path}; from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, *_interpreter_options(sys.orig_argv[1:]), "-c", code]


def import_from_working_folder() -> None:
    """Let a process of servers find the module that the job's `import` names."""
    if not sys.flags.safe_path:
        # Behind Python's own modules, which a user's files must not replace, and before all others.
        places = [number for number, folder in enumerate(sys.path) if "-packages" in folder]
        sys.path.insert(min(places, default=len(sys.path)), os.getcwd())


def _interpreter_options(words: Sequence[str]) -> list[str]:
    """Return the options before the program of a command line of Python."""
    found, rest = list[str](), iter(words)
    for word in rest:
        if word == "--check-hash-based-pycs":
            found += [word, next(rest)]
            continue
        option = re.fullmatch(r"-([bBdEIOPqRsSuv]*)[ix]*(?:([cmWX])(.*))?", word)
        if option is None or word == "-":
            break
        letters, last, value = option.groups()
        found += [f"-{letters}"] * bool(letters)
        if last in ("c", "m"):
            break
        if last is not None:
            found += [f"-{last}{value or next(rest)}"]
    return found


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended.

    code: 0 for success, 1 for a failure, 2 for a wrong configuration, 128 + n for an end by signal n.
    seconds: from `start` to the end of the last process. cause: the first cause of a failure.
    exits: exit code, or minus the signal number, by name of each process and unit that was seen to end.
    pids: process ID by name.
    """

    code: int
    seconds: float
    cause: Failed | None = None
    exits: Mapping[str, int] = field(default_factory=dict)
    pids: Mapping[str, int] = field(default_factory=dict)


class Outlet(Protocol):
    """Where the output of the job's program goes."""

    @property
    def full(self) -> bool:
        """Whether the reader is behind, so that the units of this host pause the program."""
        ...

    def hurry(self) -> None:
        """Stop waiting for the reader, because a signal has ended the job."""
        ...


class AlwaysTaken:
    """An outlet that takes all output at once."""

    full = False

    def hurry(self) -> None:
        """Do nothing: this outlet never waits."""


class Launcher(Protocol):
    """Starts the units of a job, watches them and ends them."""

    def start(self, job: Job, topology: Topology, on_event: EventListener) -> JobOutcome:
        """Run the whole job, and return when no process of it is left.

        Raises ConfigError before anything is started.
        """
        ...


def exit_code(cause: Failed) -> int:
    """Return 2 for a job with a wrong configuration, else 1."""
    return 2 if cause.kind == "config" else 1


def choose_cause(failures: Sequence[Failed]) -> Failed | None:
    """Return the failure that explains the others: the first of the most primary kind."""
    # `min` keeps the first of equals: the failure that was reported first.
    return min(failures, key=lambda failed: PRIMARY[failed.kind], default=None)


# A process fails as "peer" because of the peer that it lost, so "peer" explains nothing. An "internal" error may follow
# from a death that was not understood. The user's program or a wrong setting is always a root cause.
PRIMARY = {"config": 0, "program": 0, "died": 1, "internal": 2, "quarantine": 2, "peer": 3}
"""The rank of each kind of failure, from cause to consequence."""
