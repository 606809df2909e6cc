"""Data that units exchange as JSON: units, hosts, and the job's end."""

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from topotrain.comm.security.secret import job_key
from topotrain.comm.store import StoreError
from topotrain.config.job import ConfigError
from topotrain.core.events import Failed
from topotrain.launch import exit_code


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job has ended.

    code: the exit code of every unit. unit, host: where it ended; -1 and "" for no particular unit.
    failed: the first cause of a failure. text: the reason of an early end without a failure.
    term: the term of the leader that has decided it, 0 for another unit.
    """

    code: int
    unit: int = -1
    host: str = ""
    failed: Failed | None = None
    text: str = ""
    term: int = 0

    @staticmethod
    def of(cause: Failed, unit: int, host: str) -> "JobEnd":
        """Return the end that a failure causes."""
        return JobEnd(exit_code(cause), unit, host, cause)

    def dumped(self) -> bytes:
        """Serialize for the store."""
        data = asdict(self)
        if self.failed is not None:
            # The store limits the size of values. The end of a traceback is its useful part.
            data["failed"].update(text=self.failed.text[-20_000:], traceback=self.failed.traceback[-40_000:])
        return json.dumps(data).encode()

    def counts_in(self, term: int) -> bool:
        """Return whether this end counts in a term: it was not decided by a former leader."""
        return not self.term or self.term >= term

    def to_text(self) -> str:
        """Serialize for a message between units."""
        return self.dumped().decode()

    @staticmethod
    def loaded(raw: bytes | str) -> "JobEnd":
        """Deserialize the result of `dumped`."""
        try:
            data = json.loads(raw)
            failed = data.pop("failed")
            return JobEnd(**data, failed=None if failed is None else Failed(**failed))
        except (ValueError, TypeError, KeyError, AttributeError):
            # Not raised: the job has ended, although the reason cannot be read.
            return JobEnd(1, text=f"its end cannot be read: {raw[:80]!r}")


class EndedBeforeStart(Exception):
    """The job ended before it started. `end` describes how."""

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.text)
        self.end = end


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The description of a unit.

    machine: equal for units that can share memory. proof: proves that the unit has the job's secret.
    address: the address for other hosts; "" if the unit does not know one. given: the user has set the address.
    word: a random word that no other process has.
    """

    rank: int
    name: str
    pid: int
    machine: str
    address: str
    proof: str
    nprocs: int
    given: bool
    word: str = ""

    def dumped(self) -> bytes:
        """Serialize for the store."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(raw: bytes) -> "NodeInfo":
        """Deserialize the result of `dumped`. Raises StoreError."""
        try:
            return NodeInfo(**json.loads(raw))
        except (ValueError, TypeError):
            raise StoreError(f"a unit's introduction in the store cannot be read: {raw[:80]!r}") from None

    @property
    def who(self) -> str:
        """The unit's name, pid and host for error messages."""
        return f"unit {self.rank} (pid {self.pid} on {self.name})"


@dataclass(frozen=True, slots=True)
class NodeVerifier:
    """Proves and checks that units belong to one job.

    secret: the job's secret. id: the name of the job. nprocs: the number of units.
    """

    secret: bytes
    id: str
    nprocs: int

    def proof(self, rank: int) -> str:
        """Return the proof of the unit of this rank."""
        return job_key(self.secret, "unit", self.id, str(rank)).hex()

    def verify(self, raw: bytes) -> NodeInfo:
        """Check the description of a unit. Raises StoreError or ConfigError."""
        unit = NodeInfo.loaded(raw)
        # Not every store checks secrets. Without this a wrong one would be found by a worker, much later.
        if unit.proof != self.proof(unit.rank):
            accepted = "must be the same in all units: TOPOTRAIN_TOKEN, or the file that TOPOTRAIN_TOKEN_FILE names"
            raise ConfigError("secret", None, f"{unit.who} has another secret than unit 0; it {accepted}")
        if unit.nprocs != self.nprocs:
            accepted = f"must be {self.nprocs} as for unit 0"
            raise ConfigError(f"--nprocs of unit {unit.rank}", unit.nprocs, accepted)
        return unit


@dataclass(frozen=True, slots=True)
class HostMap:
    """The hosts of the units, by rank.

    numbers: the number of each unit's host. names: the name of each unit's host. addresses: the address of each unit.
    url: the URL of the store, if units were started with another one. served: unit 0 serves the store itself.
    units: the descriptions of all units. Every unit knows them, because any of them may lead.
    link_mbit: the measured speed of the slowest link between units; 0: not measured. It holds for all attempts.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    url: str = ""
    served: bool = False
    units: tuple[NodeInfo, ...] = ()
    link_mbit: float = 0.0

    def dumped(self) -> bytes:
        """Serialize for the store."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(raw: bytes) -> "HostMap":
        """Deserialize the result of `dumped`. Raises StoreError."""
        try:
            return HostMap.of(json.loads(raw))
        except (ValueError, TypeError, KeyError):
            raise StoreError("hosts in the store cannot be read") from None

    @staticmethod
    def of(data: Mapping[str, Any]) -> "HostMap":
        """Return the inverse of `asdict` after JSON. Raises KeyError or TypeError."""
        numbers, names, addresses = (tuple(data[key]) for key in ("numbers", "names", "addresses"))
        units = tuple(NodeInfo(**unit) for unit in data["units"])
        return HostMap(numbers, names, addresses, data["url"], data["served"], units, float(data["link_mbit"]))


def machine() -> str:
    """Return a text that identifies this machine.

    It is equal for processes that can reach each other's Unix sockets and loopback addresses, and for no others.
    """
    # Host names may repeat, boot_id does not. The network namespace decides about loopback addresses.
    parts = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    folder = os.stat(tempfile.gettempdir())  # containers may share a network but no folder
    return " ".join([*parts, str(os.stat("/proc/self/ns/net").st_ino), f"{folder.st_dev}:{folder.st_ino}"])


def address_towards(url: str) -> str:
    """Return this host's address on the route to the store; "" without a route."""
    parts = urlsplit(url)
    if not parts.hostname:
        return _own_address()
    # `connect` of a datagram socket only chooses a route, and so the local address.
    with suppress(OSError, UnicodeError):
        family, kind, _, _, where = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    return ""


def _own_address() -> str:
    """Return the address of this host's name; "" for a loopback address."""
    with suppress(OSError, UnicodeError):
        found = str(socket.getaddrinfo(socket.gethostname(), 1, type=socket.SOCK_DGRAM)[0][4][0])
        # Some distributions map the name of the host to a loopback address in /etc/hosts.
        return "" if is_local(found) else found
    return ""


def is_local(address: str) -> bool:
    """Return whether other hosts cannot connect to this address."""
    return address in ("", "::1", "0.0.0.0", "::") or address.startswith("127.")


def with_job(url: str, job: str) -> str:
    """Return the store's URL with `?job=` set to this job, or removed for ""."""
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query, keep_blank_values=True) if key != "job"]
    return urlunsplit(parts._replace(query=urlencode([*query, ("job", job)] if job else query, safe="/")))


def hosts_of(units: list[NodeInfo], url: str, served: bool) -> HostMap:
    """Return the hosts of these units, which are ordered by rank.

    Raises ConfigError for a unit on another host without an address.
    """
    numbers: dict[str, int] = {}
    for unit in units:
        numbers.setdefault(unit.machine, len(numbers))
    alone = len(numbers) == 1
    for unit in units:
        if not alone and is_local(unit.address):
            shown = f"is on {unit.name}, and others elsewhere:"
            # The fourth word of a machine is its folder for temporary files.
            place, others = unit.machine.split()[:3], (u for u in units if u.machine != unit.machine)
            twin = next((u for u in others if u.machine.split()[:3] == place), None)
            if twin is not None:
                shown = f"is on the machine of unit {twin.rank}, with another TMPDIR: give both the same, or"
            accepted = f"{shown} set --host to an address at which they reach it"
            raise ConfigError(f"--host of unit {unit.rank}", unit.address, accepted)
    return HostMap(
        tuple(numbers[unit.machine] for unit in units),
        tuple(unit.name for unit in units),
        # On one machine nothing needs to listen where other machines can connect.
        tuple("127.0.0.1" if alone and not unit.given else unit.address for unit in units),
        url,
        served,
        tuple(units),
    )


def rejoined(hosts: HostMap, back: Mapping[int, NodeInfo]) -> HostMap:
    """Return the hosts after units were replaced. Raises ConfigError."""
    found = hosts_of([back.get(unit.rank, unit) for unit in hosts.units], hosts.url, hosts.served)
    # The sizes of slices stay as they were: snapshots and running units have them.
    return replace(found, link_mbit=hosts.link_mbit)
