"""Paddle's flags: names, accepted values, and the syntax of gflags. Without torch.

A flag has the same meaning on the command line of `topotrain pserver` and in `tt.init`. Both accept all of them, so one
list can be given to both.
"""

import difflib
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import StaticStore, interface_address, numeric
from topotrain.config.job import Cluster, ConfigError, Job, TransportChoice
from topotrain.config.topology import Address, Role, layout

_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_ALIASES = {"num_gradient_servers": "num_of_gradient_servers"}
_LAST_PORT = 65535
_PREFIX = "PADDLE_INIT_"


@dataclass(frozen=True, slots=True)
class Flags:
    """Paddle's flags with their defaults; `host` and `wait_s` are topotrain's own.

    use_gpu: whether `tt.device` may name a GPU. port, ports_num: every pserver has `ports_num` servers, the first at
    `port`. num_of_gradient_servers: how many trainers there are. pservers: hosts, separated by commas, the same list in
    the same order everywhere. trainer_id: 0 to num_of_gradient_servers - 1. is_local: train in this process alone.
    async_sgd: trainers do not wait for each other. save_dir: where trainer 0 writes the result. host: which one of
    `pservers` this pserver is. nics: or the network interface that has its address. wait_s: how many seconds all wait
    for all before training starts. ports_num_for_sparse and comment have no effect. trainer_count must be 1 and
    rdma_tcp "tcp".

    Raises:
        ConfigError: an invalid value.
    """

    use_gpu: bool = False
    port: int = 7164
    ports_num: int = 1
    ports_num_for_sparse: int = 0
    num_of_gradient_servers: int = 1
    pservers: str = "127.0.0.1"
    trainer_id: int = 0
    trainer_count: int = 1
    is_local: bool = True
    async_sgd: bool = False
    save_dir: str = ""
    rdma_tcp: str = "tcp"
    comment: str = ""
    nics: str = ""
    host: str = ""
    wait_s: float = 600.0

    def __post_init__(self) -> None:
        last = self.port + self.ports_num - 1
        trainers = self.num_of_gradient_servers
        checks = {
            "ports_num": (self.ports_num >= 1, "must be a whole number >= 1"),
            "port": (1 <= self.port <= last <= _LAST_PORT, f"must be 1 to {_LAST_PORT + 1 - self.ports_num}"),
            "ports_num_for_sparse": (self.ports_num_for_sparse >= 0, "must be a whole number >= 0"),
            "num_of_gradient_servers": (trainers >= 1, "must be a whole number >= 1"),
            "trainer_id": (0 <= self.trainer_id < trainers, f"must be 0 to {trainers - 1}, with {trainers} trainers"),
            "trainer_count": (self.trainer_count == 1, "must be 1: start one trainer per device"),
            "rdma_tcp": (self.rdma_tcp == "tcp", "must be tcp"),
            "wait_s": (self.wait_s > 0, "must be a number of seconds > 0"),
        }
        for name, (fine, accepted) in checks.items():
            if not fine:
                raise ConfigError(name, getattr(self, name), accepted)
        hosts = self.hosts
        if not all(hosts) or len(set(hosts)) < len(hosts):
            raise ConfigError("pservers", self.pservers, "must be different hosts, separated by commas")
        # A colon may also be part of an IPv6 address, which has more than one.
        if any("/" in host or (host.rpartition(":")[2].isdigit() and host.count(":") == 1) for host in hosts):
            raise ConfigError("pservers", self.pservers, "must be hosts alone: `port` is the same for all of them")

    @property
    def hosts(self) -> list[str]:
        return [host.strip() for host in self.pservers.split(",")]

    def job(self) -> Job:
        # One synchronous group, or asynchronous groups of one trainer.
        groups = self.num_of_gradient_servers if self.async_sgd else 1
        cluster = Cluster(
            nworker_groups=groups,
            nworkers_per_group=self.num_of_gradient_servers // groups,
            nservers_per_group=len(self.hosts) * self.ports_num,
            nservers_per_procs=self.ports_num,
            server_worker_separate=True,
            transport=TransportChoice.kTcp,
            workspace=self.save_dir,
        )
        # Refuses an impossible layout here, before anything is opened.
        layout(cluster)
        return Job(name="pserver", cluster=cluster)

    def store(self) -> StaticStore:
        """Return the servers' addresses, host by host, in the order of their ports."""
        ports = range(self.port, self.port + self.ports_num)
        return StaticStore([_joined(host, port) for host in self.hosts for port in ports])

    def name(self, address: Address) -> str:
        if address.role is Role.WORKER:
            # Synchronous trainers differ by their index, and asynchronous ones by their group. The other number is 0.
            return f"trainer {address.group + address.index}"
        host, port = divmod(address.index, self.ports_num)
        return f"pserver {_joined(self.hosts[host], self.port + port)}"

    @property
    def words(self) -> str:
        """The settings that must be the same for trainers and pservers, in one text."""
        how = "async" if self.async_sgd else "sync"
        return f"{self.num_of_gradient_servers} trainers, {len(self.hosts)} x {self.ports_num} ports, {how}"

    def servers_here(self) -> list[Address]:
        """Return the servers of this pserver. Raises ConfigError if its host is not clear."""
        here = self.hosts.index(self._own_host())
        return [Address(Role.SERVER, 0, here * self.ports_num + port) for port in range(self.ports_num)]

    def _own_host(self) -> str:
        if self.host in self.hosts:
            return self.host
        if self.host:
            # The same host may be listed by its name and given by its address.
            alike = [host for host in self.hosts if _address(host) == _address(self.host)]
            if not alike:
                raise ConfigError("host", self.host, f"must be one of the pservers {self.pservers}")
            return alike[0]
        address = self._nic_address()
        if len(self.hosts) == 1:
            return self.hosts[0]
        if address:
            return replace(self, nics="", host=address)._own_host()
        # Without `host`: the listed address that belongs to this machine.
        mine = [host for host in self.hosts if _is_here(host)]
        if len(mine) != 1:
            found = "none of them is" if not mine else f"{' and '.join(mine)} are"
            raise ConfigError("pservers", self.pservers, f"{found} on this machine: choose one with --host")
        return mine[0]

    def _nic_address(self) -> str:
        try:
            return interface_address(self.nics) if self.nics else ""
        except StoreError as error:
            raise ConfigError("nics", self.nics, str(error)) from None


CLUSTER = ("num_of_gradient_servers", "pservers", "trainer_id", "async_sgd")
"""Flags that mean something only in a job of several processes."""

COMPARE = "num_of_gradient_servers, pservers (and their order), ports_num and async_sgd"
"""The settings to compare when a pserver refuses a trainer."""


def from_environment(values: Mapping[str, Any], environ: Mapping[str, str]) -> Flags:
    """Return a trainer's flags: those of its script, and PADDLE_INIT_… for the others.

    Raises ConfigError, also for the settings of a cluster where no flag says that there is one.
    """
    given = {_ALIASES.get(name, name) for name in values}
    names = {name.removeprefix(_PREFIX).lower(): value for name, value in environ.items() if name.startswith(_PREFIX)}
    started = {name: value for name, value in names.items() if _ALIASES.get(name, name) not in given}
    found = from_values({**started, **values})
    unused = [name for name in CLUSTER if getattr(found, name) != getattr(Flags(), name)]
    if "is_local" not in {*given, *started} and unused:
        # Variables are set where a cluster is started, and a script may be written for several machines or for one.
        if not any(name in given for name in unused):
            return replace(found, is_local=False)
        accepted = "has no effect without is_local=False; say is_local=True to train in this process alone"
        raise ConfigError(unused[0], getattr(found, unused[0]), accepted)
    return found


def from_values(values: Mapping[str, Any]) -> Flags:
    """Return flags from values by name. Raises ConfigError."""
    kinds = {f.name: f.type for f in fields(Flags)}
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = _ALIASES.get(given, given)
        if name not in kinds:
            raise ConfigError(given, value, f"there is no such flag{_suggestion(given)}")
        if name in found:
            raise ConfigError(given, value, "is given twice")
        found[name] = _value(name, value, str(getattr(kinds[name], "__name__", kinds[name])))
    return Flags(**found)


def parse(words: Sequence[str]) -> Flags:
    """Return flags from a command line, in the syntax of gflags.

    That is --port=7164, --port 7164, --use_gpu, --nouse_gpu. Raises ConfigError for anything else.
    """
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise ConfigError("word", word, "must be a flag such as --port=7164")
        name, text = _one(name, value if equals else None, rest)
        if name in values:
            raise ConfigError(f"--{name}", text, "is given twice")
        values[name] = text
    return from_values(values)


def _one(name: str, value: str | None, rest: list[str]) -> tuple[str, str]:
    """Return a flag with its value, which may be the next word."""
    known = {f.name: f.type for f in fields(Flags)}
    switch = known.get(name) in (bool, "bool")
    # Gflags writes --nouse_gpu for --use_gpu=false.
    off = name.removeprefix("no")
    if name not in known and known.get(off) in (bool, "bool") and value is None:
        return off, "false"
    if value is not None:
        return name, value
    # A switch needs no value, but `--use_gpu true` is accepted, too.
    if switch and (not rest or rest[0].lower() not in (*_TRUE, *_FALSE)):
        return name, "true"
    if not rest and name in (*known, *_ALIASES):
        raise ConfigError(f"--{name}", None, "needs a value")
    return name, rest.pop(0) if rest else ""


def _value(name: str, value: Any, kind: str) -> Any:
    if kind == "bool":
        word = str(value).lower()
        if word not in (*_TRUE, *_FALSE):
            raise ConfigError(name, value, "must be True or False")
        return word in _TRUE
    if kind == "str":
        if not isinstance(value, str | PathLike):
            raise ConfigError(name, value, "must be a text")
        return str(value)
    try:
        # `int(str())` refuses 1.5, which `int` would cut to 1.
        number = float(value) if kind == "float" else int(str(value))
    except ValueError:
        raise ConfigError(name, value, f"must be a {'whole ' * (kind == 'int')}number") from None
    return number


def _suggestion(name: str) -> str:
    names = [f.name for f in fields(Flags)]
    near = difflib.get_close_matches(name, [*names, *_ALIASES], 1)
    return f"; did you mean {near[0]}?" if near else f"; flags are {', '.join(names)}"


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(host: str) -> str:
    try:
        return numeric(host)
    # A name that this machine cannot resolve is still compared as text.
    except StoreError:
        return host


def _is_here(host: str) -> bool:
    """Whether the address belongs to this machine, so that a socket can be bound."""
    address = _address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
