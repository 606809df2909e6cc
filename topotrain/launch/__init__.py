"""The contract of every launcher, and the one table of what a unit has to be told.

A launcher starts a unit once per unit of the layout and gives each the values of a `UnitPlace`. Where a
site's own tool starts the processes (srun, torchrun, a pod), the same values come as variables: a launcher is a table
from its names to these, plus a way to start and to stop.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Protocol

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Failed

OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Where a unit stands.

    rank, nprocs: its number among so many units. rendezvous: the URL where all meet. run_dir: the folder, on its host,
    of what the launcher has laid down for the job (see workspace.py). forkserver: the host's; "" for one of its own.
    hosts: the number of every unit's host, separated by commas; "" where all units stand on one. host: the address at
    which others reach this one. sockets: a private folder with a short path that all units of the host share; "": the
    forkserver's.
    """

    rank: int
    nprocs: int
    rendezvous: str
    run_dir: str
    forkserver: str = ""
    hosts: str = ""
    host: str = "127.0.0.1"
    sockets: str = ""

    @property
    def host_numbers(self) -> tuple[int, ...]:
        """`hosts` as numbers. Raises ConfigError."""
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
}

RUN_VARIABLE = "TOPOTRAIN_RUN"
"""A random text in the environment of every process of one started job: by it a launcher finds what it must end."""


def arguments(place: UnitPlace) -> list[str]:
    """The command line of a unit at `place`."""
    return [word for name, (option, _) in TABLE.items() for word in (option, str(getattr(place, name)))]


def add_arguments(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Let `parser` read a `UnitPlace`, each value from its argument or, without one, from its variable."""
    for f in fields(UnitPlace):
        option, variable = TABLE[f.name]
        default = environ.get(variable, None if f.default is MISSING else f.default)
        parser.add_argument(option, type=f.type, default=default, required=default is None, help=f"or {variable}")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended.

    code: 0 all went well, 1 something failed, 2 it was set up wrongly, 128 + n ended by signal n.
    seconds: from `start` to the end of the last process. cause: the first cause of a failure.
    exits: who -> exit code, or minus the signal, of every resident and unit that was seen to end; pids: who -> pid.
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
        """Its reader does not read: the units of this machine are to hold the program up until it does."""
        ...

    def hurry(self) -> None:
        """A signal has ended the job: nothing is to wait for that reader any more."""
        ...


class AlwaysTaken:
    """An outlet that takes all at once."""

    full = False

    def hurry(self) -> None:
        """Nothing waits."""


class Launcher(Protocol):
    """One way to get the units of a job running, watched and ended."""

    def start(self, job: Job, topology: Topology, on_event: OnEvent) -> JobOutcome:
        """Run the whole job; returns when no process of it is left. Raises ConfigError before anything is started."""
        ...


def exit_code(cause: Failed) -> int:
    """2 for a job that was set up wrongly, else 1."""
    return 2 if cause.kind == "config" else 1


def choose_cause(failures: Sequence[Failed]) -> Failed | None:
    """The failure that explains the others: the first among those of the most primary kind.

    Whoever loses a peer fails because of that peer, so "peer" explains nothing; an error of our own may follow from a
    death that was not understood; an exception in the user's program, or a wrong setting, is always the beginning.
    """
    return min(failures, key=lambda failed: PRIMARY[failed.kind], default=None)


PRIMARY = {"config": 0, "program": 0, "died": 1, "internal": 2, "quarantine": 2, "peer": 3}
"""Kinds of failure, from cause to consequence."""
