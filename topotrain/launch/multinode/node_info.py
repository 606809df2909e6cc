"""What units tell each other: who they are, where all are, and how the job has ended: data, as JSON in the store."""

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from topotrain.comm.store import StoreError
from topotrain.config.job import ConfigError
from topotrain.core.events import Failed
from topotrain.launch import exit_code


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job has ended. unit, host: where; -1 and "" for nowhere in particular. code: every unit's exit code.

    failed: the first cause of a failure. text: in words, where nothing failed and the job ended early all the same.
    """

    code: int
    unit: int = -1
    host: str = ""
    failed: Failed | None = None
    text: str = ""

    @staticmethod
    def of(cause: Failed, unit: int, host: str) -> "JobEnd":
        """The end that a failure is."""
        return JobEnd(exit_code(cause), unit, host, cause)

    def dumped(self) -> bytes:
        """For the store, whose values have a bound."""
        data = asdict(self)
        if self.failed is not None:
            data["failed"].update(text=self.failed.text[-20_000:], traceback=self.failed.traceback[-40_000:])
        return json.dumps(data).encode()

    @staticmethod
    def loaded(raw: bytes) -> "JobEnd":
        """What `dumped` made; anything else in its place ends a job, too."""
        try:
            data = json.loads(raw)
            failed = data.pop("failed")
            return JobEnd(**data, failed=None if failed is None else Failed(**failed))
        except (ValueError, TypeError, KeyError, AttributeError):
            return JobEnd(1, text=f"its end in the store cannot be read: {raw[:80]!r}")


class EndedBeforeStart(Exception):
    """The job ended before it began; says how."""

    def __init__(self, end: JobEnd) -> None:
        super().__init__(end.text)
        self.end = end


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a unit says about itself. machine: the same for units that can share memory. proof: that it has the secret.

    address: at which other hosts reach it; "" if it does not know. given: the user has said so. word: a random one,
    which no other process has.
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
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(raw: bytes) -> "NodeInfo":
        """What `dumped` made. Raises StoreError."""
        try:
            return NodeInfo(**json.loads(raw))
        except (ValueError, TypeError):
            raise StoreError(f"a unit's introduction in the store cannot be read: {raw[:80]!r}") from None

    @property
    def who(self) -> str:
        """For an error."""
        return f"unit {self.rank} (pid {self.pid} on {self.name})"


@dataclass(frozen=True, slots=True)
class HostMap:
    """Where the units are, by rank: numbers of hosts, their names, and the address of each unit.

    url: of the store, where it is not what each unit was told. served: unit 0 serves the store itself.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    url: str = ""
    served: bool = False

    def dumped(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loaded(raw: bytes) -> "HostMap":
        """What `dumped` made. Raises StoreError."""
        try:
            return HostMap.of(json.loads(raw))
        except (ValueError, TypeError, KeyError):
            raise StoreError("hosts in the store cannot be read") from None

    @staticmethod
    def of(data: Mapping[str, Any]) -> "HostMap":
        """The inverse of `asdict`, by way of JSON. Raises KeyError, TypeError."""
        numbers, names, addresses = (tuple(data[key]) for key in ("numbers", "names", "addresses"))
        return HostMap(numbers, names, addresses, data["url"], data["served"])


def machine() -> str:
    """The same for processes that can reach each other's Unix sockets and loopback addresses, and for no others."""
    parts = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    folder = os.stat(tempfile.gettempdir())  # containers of one machine may have one network and yet no common folder
    return " ".join([*parts, str(os.stat("/proc/self/ns/net").st_ino), f"{folder.st_dev}:{folder.st_ino}"])


def address_towards(url: str) -> str:
    """The address of this host on its way to the store; "" where the store's URL names no host that has one."""
    parts = urlsplit(url)
    if not parts.hostname:
        return _own_address()
    with suppress(OSError, UnicodeError):
        family, kind, _, _, where = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(where)  # sends nothing
            return str(sock.getsockname()[0])
    return ""


def _own_address() -> str:
    """What this host's name stands for, if that is no loopback address."""
    with suppress(OSError, UnicodeError):
        found = str(socket.getaddrinfo(socket.gethostname(), 1, type=socket.SOCK_DGRAM)[0][4][0])
        return "" if is_local(found) else found
    return ""


def is_local(address: str) -> bool:
    """Whether it is nothing that another host could call."""
    return address in ("", "::1", "0.0.0.0", "::") or address.startswith("127.")


def with_job(url: str, job: str) -> str:
    """The URL of a store with `?job=` for this job, or for none."""
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query, keep_blank_values=True) if key != "job"]
    return urlunsplit(parts._replace(query=urlencode([*query, ("job", job)] if job else query, safe="/")))


def hosts_of(units: list[NodeInfo], url: str, served: bool) -> HostMap:
    """Where these units, in the order of their ranks, are. Raises ConfigError for one whose address is missing."""
    numbers: dict[str, int] = {}
    for unit in units:
        numbers.setdefault(unit.machine, len(numbers))
    alone = len(numbers) == 1
    for unit in units:
        if not alone and is_local(unit.address):
            shown = f"is on {unit.name}, and others on {len(numbers) - 1} other hosts"
            accepted = f"{shown}: say with --host at which address they reach it"
            raise ConfigError(f"--host of unit {unit.rank}", unit.address, accepted)
    return HostMap(
        tuple(numbers[unit.machine] for unit in units),
        tuple(unit.name for unit in units),
        tuple("127.0.0.1" if alone and not unit.given else unit.address for unit in units),
        url,
        served,
    )
