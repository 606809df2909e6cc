"""Environment variables by which other tools identify units, in one table.

A unit needs its rank, the number of units, and the URL of the rendezvous.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType

from topotrain.comm.store.store_url import parse
from topotrain.config.job import ConfigError

RENDEZVOUS, HOST, MEETING = "TOPOTRAIN_RENDEZVOUS", "TOPOTRAIN_HOST", "TOPOTRAIN_MEETING_S"
DEFAULT_ID = "default"


@dataclass(frozen=True, slots=True)
class VariableNames:
    """The names of a launcher's variables.

    rank, nprocs: the unit's rank and the number of units.
    id: variables that together name one start of a job, with the same values in all of its units.
    first: a variable with a number to add to the rank, if it is set. It is for launchers that count each role from 0.
    """

    rank: str
    nprocs: str
    id: tuple[str, ...] = ()
    first: str = ""


# The first entry with both variables set wins. A launcher that runs inside another one comes before it. For example
# mpirun in a batch job of Slurm inherits Slurm's variables, which hold the rank of the batch script for every unit.
TABLES: Mapping[str, VariableNames] = MappingProxyType(
    {
        "topotrain": VariableNames("TOPOTRAIN_RANK", "TOPOTRAIN_NPROCS"),
        "torchrun": VariableNames("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
        "mpirun": VariableNames("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
        "pmi": VariableNames("PMI_RANK", "PMI_SIZE"),
        "slurm": VariableNames("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
        "kubernetes": VariableNames("JOB_COMPLETION_INDEX", "TOPOTRAIN_NPROCS", first="TOPOTRAIN_FIRST_RANK"),
    }
)


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """The identity of a unit, and its rendezvous.

    launcher: the launcher that set the variables. "": none did.
    id: the launcher's name for this start. "default": it has none.
    patience: seconds to wait for the other units before training. 0: the default.
    """

    rank: int
    nprocs: int
    rendezvous: str
    host: str = ""
    launcher: str = ""
    id: str = DEFAULT_ID
    patience: int = 0

    def scope(self, environ: Mapping[str, str]) -> str:
        """Return a text without secrets that is the same for all units of a job.

        Raises StoreError for an invalid URL.
        """
        url = parse(self.rendezvous)
        where = [url.scheme, url.host, str(url.port), url.path, url.job or self.id or DEFAULT_ID, str(self.nprocs)]
        if url.scheme == "env":
            where += [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        return "\n".join(where)


def started_by(environ: Mapping[str, str]) -> str:
    """Return the launcher with all variables set; "" for none."""
    return next((name for name, table in TABLES.items() if {table.rank, table.nprocs} <= environ.keys()), "")


def start_of(
    environ: Mapping[str, str], rank: int | None = None, nprocs: int | None = None, rendezvous: str = "", host: str = ""
) -> LaunchInfo:
    """Return the identity of this process. Arguments win over variables.

    Raises:
        ConfigError: a value is missing or invalid; the error lists the variables.
    """
    launcher = started_by(environ)
    table = TABLES.get(launcher)
    if table is None and (rank is None or nprocs is None):
        missing = "--rank" if rank is None else "--nprocs"
        looked = "; ".join(f"{name}: {t.rank} and {t.nprocs}" for name, t in TABLES.items())
        raise ConfigError(
            missing, None, f"must be given, or set by a launcher's variables, which are not all set\n{looked}"
        )
    if table is not None:
        if rank is None:
            # Kubernetes counts the pods of each role from 0.
            first = _number(environ, table.first, 0) if table.first in environ else 0
            rank = first + _number(environ, table.rank, 0)
        nprocs = _number(environ, table.nprocs, 1) if nprocs is None else nprocs
    assert rank is not None
    assert nprocs is not None
    if nprocs < 1:
        raise ConfigError("--nprocs", nprocs, "must be at least 1")
    if not 0 <= rank < nprocs:
        raise ConfigError("--rank", rank, f"must be 0 to {nprocs - 1}, one less than the number of units")
    url = rendezvous or environ.get(RENDEZVOUS, "")
    if not url and {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        # The variables of torch.distributed, which some tools set.
        url = "env://"
    if not url:
        raise ConfigError("--rendezvous", None, f"must be given, or {RENDEZVOUS}, or MASTER_ADDR and MASTER_PORT")
    # An empty variable counts as not set: manifests and scripts often pass it on unconditionally.
    patience = _number(environ, MEETING, 1) if environ.get(MEETING) else 0
    host = host or environ.get(HOST, "")
    _check_host(host)
    return LaunchInfo(rank, nprocs, url, host, launcher, _id(environ, launcher), patience)


def _check_host(host: str) -> None:
    """Raise ConfigError for an address that cannot belong to one host."""
    try:
        address = ip_address(host)
    except ValueError:  # a host name, which is resolved later
        return
    # An early check makes every unit report the mistake at once.
    if address.is_unspecified or address.is_multicast:
        accepted = "must be the address of one interface of this host, at which others reach it"
        raise ConfigError("--host", host, accepted)


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ConfigError(name, text, f"must be a number from {least} on")
    return int(text)


def _id(environ: Mapping[str, str], launcher: str) -> str:
    """Return a name of this start that can be part of a key."""
    words = [environ[name] for name in TABLES[launcher].id if environ.get(name)] if launcher else []
    # Some launchers name no start, so their jobs share a default name.
    if not words:
        return DEFAULT_ID
    return re.sub(r"[^a-z0-9_.-]+", "-", "-".join([launcher, *words]).lower())[:80]
