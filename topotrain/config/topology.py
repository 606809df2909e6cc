"""Place every worker and every server of a cluster block in a unit.

The layout is pure arithmetic over six counts and two switches, the same on every machine. It is that of SINGA v0.x. The
four named frameworks (Sandblaster, AllReduce, Downpour, Distributed Hogwild) are four of its points.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any, NamedTuple

from topotrain.config.job import Algorithm, Cluster, Compression, ConfigError, Engine, TransportChoice, all_reduces

MOST = 1 << 16
"""Workers, and servers, that one job may have: a mistyped count must be an error, not a long wait."""


_NOT_CHOSEN = (
    "has no layout before it is measured: `topotrain run` chooses one on this machine, and "
    "`topotrain advise PROGRAM --hosts N --link 1gbit,1ms --sync --out best.conf` writes one for several"
)


class Role(IntEnum):
    """The kind of process endpoint at an address."""

    WORKER = 0
    SERVER = 1
    STANDBY = 2
    """The replica of the server of the same group and index, in another process (`cluster.replicas`)."""


class Address(NamedTuple):
    """One worker or one server: its group, and its index inside that group."""

    role: Role
    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which no code calls on an address

    def __str__(self) -> str:
        return f"{self.role.name.lower()} {self.group}/{self.index}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One process unit and its workers and servers, in layout order.

    `servers` include implicit ones.
    """

    rank: int
    workers: tuple[Address, ...]
    servers: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The whole layout. Build it with `layout`.

    Groups, indices and unit ranks count from 0. With `nserver_groups = 0` each worker group has an *implicit* server
    group of one server. Methods include such groups, and raise ValueError for a group or address that does not exist.
    """

    cluster: Cluster
    units: tuple[Unit, ...]
    hosts: tuple[int, ...] = ()  # of each unit, numbers from 0; empty: all run on one host
    link_mbit: float = 0.0  # the measured speed of the slowest link between units; 0: not measured

    @property
    def implicit(self) -> bool:
        """Whether no server was declared, and each worker group has one of its own."""
        return self.cluster.nserver_groups == 0

    @property
    def synced(self) -> bool:
        """Whether several server groups were declared, which have to agree."""
        return self.cluster.nserver_groups > 1

    @property
    def idle(self) -> int:
        """How many units are empty, because workers have left the job."""
        # By the hosts: a unit keeps of all units only itself.
        return max(0, len(self.hosts) - _total(self.cluster))

    @property
    def worker_groups(self) -> int:
        """Number of worker groups."""
        return self.cluster.nworker_groups

    @property
    def workers_per_group(self) -> int:
        """Number of workers in each worker group."""
        return self.cluster.nworkers_per_group

    @property
    def server_groups(self) -> int:
        """Effective number of server groups."""
        return self.worker_groups if self.implicit else self.cluster.nserver_groups

    @property
    def shards(self) -> int:
        """Effective number of servers in each server group, and of parameter ranges."""
        return 1 if self.implicit else self.cluster.nservers_per_group

    def sees_memory(self, g: int) -> bool:
        """Whether group `g` and its servers run on one host and may share memory."""
        cluster = self.cluster
        # Compressed values, and means that workers exchange, exist only in messages.
        if cluster.transport is TransportChoice.kTcp or cluster.compression is not Compression.kNone or self.collective:
            return False
        # A late worker still reads the values that the others have finished with. With an outer optimizer each worker
        # changes values of its own.
        if cluster.backup or cluster.outer is not None:
            return False
        residents = (*self.workers(g), *self.servers(self.server_group_of(g)))
        return all(self.together(residents[0], resident) for resident in residents)

    @property
    def inline(self) -> bool:
        """Whether each worker's process also runs the server of the same index."""
        # In one synchronous group on one host, servers work only while the workers wait for them. So they need no
        # process of their own.
        return all_reduces(self.cluster) and self.sees_memory(0)

    @property
    def fits_slices(self) -> bool:
        """Whether the sizes of slices may follow the speed of the link.

        They may where no bit of a result depends on them: each compressed slice has a scale of its own, and a ring adds
        the parts of each slice in another order.
        """
        cluster = self.cluster
        set_by_hand = cluster.slice_bytes or cluster.link is not None
        return not (set_by_hand or self.collective or cluster.compression is not Compression.kNone)

    @property
    def torch_collective(self) -> bool:
        """Whether workers sum gradients through torch.distributed, not through servers."""
        # With one worker there is nothing to sum, and engine and algorithm change nothing.
        return self.cluster.engine in (Engine.kGloo, Engine.kNccl) and self.workers_per_group > 1

    @property
    def server_collective(self) -> bool:
        """Whether one of topotrain's own algorithms sums gradients from server to server."""
        return self.cluster.algorithm is not Algorithm.kAuto and self.workers_per_group > 1

    @property
    def collective(self) -> bool:
        """Whether each worker has the group's mean before the servers have it.

        Server k then gets its part from worker k alone.
        """
        return self.torch_collective or self.server_collective

    def server_group_of(self, g: int) -> int:
        """Return the one server group that worker group `g` uses."""
        _check("worker group", g, self.worker_groups)
        # Consecutive worker groups share a server group.
        return g * self.server_groups // self.worker_groups

    def worker_groups_of(self, sg: int) -> tuple[int, ...]:
        """Return the worker groups that use server group `sg`."""
        _check("server group", sg, self.server_groups)
        share = self.worker_groups // self.server_groups
        return tuple(range(sg * share, (sg + 1) * share))

    def workers(self, g: int) -> tuple[Address, ...]:
        """Return the workers of group `g` in order."""
        _check("worker group", g, self.worker_groups)
        return tuple(Address(Role.WORKER, g, i) for i in range(self.workers_per_group))

    def servers(self, sg: int) -> tuple[Address, ...]:
        """Return the servers of group `sg` in shard order."""
        _check("server group", sg, self.server_groups)
        return tuple(Address(Role.SERVER, sg, k) for k in range(self.shards))

    def unit_of(self, address: Address) -> int:
        """Return the rank of the unit of `address`."""
        role, group, index = address
        if role is Role.WORKER:
            _check("worker group", group, self.worker_groups)
            _check(f"worker of group {group}", index, self.workers_per_group)
            return _worker_unit(self.cluster, group, index)
        _check("server group", group, self.server_groups)
        _check(f"server of group {group}", index, self.shards)
        return _server_unit(self.cluster, group, index, self.idle)

    def processes(self, unit: Unit) -> Iterator[tuple[Address, ...]]:
        """Yield the workers and servers in each process of a unit."""
        if self.inline:
            yield from zip(unit.workers, unit.servers, strict=True)
            return
        if unit.servers:
            yield unit.servers
        for worker in unit.workers:
            yield (worker,)

    def host_of(self, address: Address) -> int:
        """Return the number of the host of `address`."""
        unit = self.unit_of(address)
        # An emulated link is between hosts, so every unit counts as one.
        if self.cluster.link is not None:
            return unit
        return self.hosts[unit] if self.hosts else 0

    @property
    def crosses_hosts(self) -> bool:
        """Whether units are on several hosts, or an emulated link is between them."""
        return self.cluster.link is not None or len({*self.hosts}) > 1

    def together(self, a: Address, b: Address) -> bool:
        """Whether two addresses are on one host and can share memory."""
        return self.host_of(a) == self.host_of(b)

    def regroups(self, g: int) -> bool:
        """Whether the workers of group `g` can restart while all other processes go on."""
        _check("worker group", g, self.worker_groups)
        # Without the lost worker a collective never ends, and a server in its process is lost with it.
        return not (self.collective or self.inline)

    def sum_tree(self, g: int) -> tuple[tuple[int, ...], ...]:
        """Return the worker indices of group `g`, grouped by unit, in order.

        This is the canonical order of every sum over the group, which gives the same bits over all transports.
        """
        # First inside a unit, then over units: a sum in shared memory and one message per unit give this order anyway.
        # `groupby` is enough, because consecutive workers share a unit.
        by_unit = groupby(self.workers(g), key=self.unit_of)
        return tuple(tuple(worker.index for worker in members) for _, members in by_unit)

    def sharing(self, unit: int) -> tuple[tuple[Address, ...], ...]:
        """Return the sets of workers of `unit` that share parameter values.

        This is in-memory Hogwild (Recht et al., 2011). A set has workers of at least two worker groups of one server
        group.
        """
        _check("unit", unit, len(self.units))
        if not self.cluster.share_memory or self.cluster.outer is not None:
            return ()
        by_home = groupby(self.units[unit].workers, key=lambda worker: self.server_group_of(worker.group))
        sets = (tuple(members) for _, members in by_home)
        # The workers of one group have the same values in any case.
        return tuple(members for members in sets if len({worker.group for worker in members}) > 1)

    @property
    def framework(self) -> str:
        """The name in the literature for this layout; other layouts are hybrids."""
        if self.implicit:
            return _without_servers(self)
        if self.cluster.outer is not None:
            return _with_outer_optimizer(self)
        if self.synced:
            return _several_server_groups(self)
        return _synchronous(self) if self.worker_groups == 1 else _asynchronous(self)

    def as_data(self) -> dict[str, Any]:
        """Return the layout as plain data (`plan --json`), with declared servers only."""
        return {
            "nprocs": len(self.units),
            "units": [
                {
                    "rank": unit.rank,
                    "workers": [[worker.group, worker.index] for worker in unit.workers],
                    "servers": [[server.group, server.index] for server in self._declared(unit)],
                }
                for unit in self.units
            ],
            "server_group_of_worker_group": [
                None if self.implicit else self.server_group_of(g) for g in range(self.worker_groups)
            ],
            **({"link_mbit": round(self.link_mbit)} if self.link_mbit else {}),
        }

    def explain(self) -> str:
        """Return the layout in words and two tables, of units and of groups."""
        units = [
            (str(unit.rank), _names(unit.workers), _names(self._declared(unit)), self._shared(unit))
            for unit in self.units
        ]
        groups = [
            (str(g), _places(self, self.workers(g)), *self._home(self.server_group_of(g)))
            for g in range(self.worker_groups)
        ]
        return "\n".join(
            [
                f"{self.framework}: {self._census()}",
                "",
                *_table(("unit", "workers", "servers", "sharing values"), units),
                "",
                *_table(("worker group", "runs in", "uses server group", "which runs in"), groups),
            ]
        )

    def _declared(self, unit: Unit) -> tuple[Address, ...]:
        return () if self.implicit else unit.servers

    def _shared(self, unit: Unit) -> str:
        return " + ".join(f"({_names(members)})" for members in self.sharing(unit.rank))

    def _home(self, sg: int) -> tuple[str, str]:
        return ("none", "") if self.implicit else (str(sg), _places(self, self.servers(sg)))

    def _census(self) -> str:
        workers = f"{_count(self.worker_groups, 'worker group')} of {_count(self.workers_per_group, 'worker')}"
        servers = f"{_count(self.server_groups, 'server group')} of {_count(self.shards, 'server')}"
        return ", ".join((_count(len(self.units), "unit"), workers, "no servers" if self.implicit else servers))


def layout(cluster: Cluster, hosts: Sequence[int] = (), link_mbit: float = 0.0) -> Topology:
    """Place every worker and server of `cluster`.

    hosts: the number of the host of each unit, by rank, known after the rendezvous of all units. Empty: one host. If
        there are more hosts than the units that the cluster fills, the units after those of workers are idle: all
        units keep their ranks when workers leave.
    link_mbit: as in `Topology`.

    Raises:
        ConfigError: the counts do not fit together, or the transport does not reach from host to host.
        ValueError: there are fewer hosts than units.
    """
    # First: the counts below are exact only if every unit is full.
    validate(cluster)
    needed = _total(cluster)
    total = max(needed, len(hosts))
    workers: list[list[Address]] = [[] for _ in range(total)]
    servers: list[list[Address]] = [[] for _ in range(total)]
    for g, i in _pairs(cluster.nworker_groups, cluster.nworkers_per_group):
        workers[_worker_unit(cluster, g, i)].append(Address(Role.WORKER, g, i))
    implicit = (cluster.nworker_groups, 1)
    declared = (cluster.nserver_groups, cluster.nservers_per_group)
    for g, k in _pairs(*(declared if cluster.nserver_groups else implicit)):
        servers[_server_unit(cluster, g, k, total - needed)].append(Address(Role.SERVER, g, k))
    # Ranks follow the order of the workers; units of servers only come last.
    units = (Unit(rank, tuple(w), tuple(s)) for rank, (w, s) in enumerate(zip(workers, servers, strict=True)))
    if hosts and len(hosts) < total:
        raise ValueError(f"{len(hosts)} hosts for {total} units")
    if cluster.transport is TransportChoice.kShm and len(set(hosts)) > 1:
        apart = f"cannot join units on {len(set(hosts))} hosts: kAuto takes it on a host only"
        raise ConfigError("cluster.transport", cluster.transport.value, apart)
    return Topology(cluster, tuple(units), tuple(hosts), link_mbit)


def validate(cluster: Cluster) -> None:
    """Raise ConfigError for a count of `cluster` that does not fit the others.

    It is also raised where no layout is chosen yet.
    """
    if cluster.auto:
        raise ConfigError("cluster.auto", cluster.auto, _NOT_CHOSEN)
    groups, homes = cluster.nworker_groups, cluster.nserver_groups
    _fill_units("worker", groups, cluster.nworkers_per_group, cluster.nworkers_per_procs)
    # Without declared servers each worker group has an implicit one, which always fits.
    if homes == 0:
        return
    if groups % homes:
        choices = ", ".join(map(str, [0, *_divisors(groups)]))
        even = f"every server group serves equally many of the nworker_groups = {groups}"
        raise ConfigError("cluster.nserver_groups", homes, f"must be one of {choices}, so that {even}")
    _fill_units("server", homes, cluster.nservers_per_group, cluster.nservers_per_procs)


def _fill_units(role: str, groups: int, per_group: int, per_unit: int) -> None:
    """Check that units are full, with whole groups or an equal part of one group."""
    # Before the divisors are listed, which takes as long as the count is large.
    if groups * per_group > MOST:
        accepted = f"must be at most {MOST // groups} with n{role}_groups = {groups}: a job has up to {MOST} {role}s"
        raise ConfigError(f"cluster.n{role}s_per_group", per_group, accepted)
    # A unit has a part of one group, or several whole groups.
    fits = [p for p in _divisors(groups * per_group) if per_group % p == 0 or p % per_group == 0]
    if per_unit not in fits:
        choices = ", ".join(map(str, fits))
        counts = f"n{role}_groups = {groups} and n{role}s_per_group = {per_group}"
        why = f"with {counts} any other count leaves a unit part empty or lets it straddle two groups"
        accepted = f"must be one of {choices}: {why}"
        raise ConfigError(f"cluster.n{role}s_per_procs", per_unit, accepted)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _pairs(groups: int, members: int) -> Iterator[tuple[int, int]]:
    return ((g, i) for g in range(groups) for i in range(members))


def _unit_counts(cluster: Cluster) -> tuple[int, int]:
    """Return how many units the workers fill, and how many the declared servers."""
    worker_units = cluster.nworker_groups * cluster.nworkers_per_group // cluster.nworkers_per_procs
    server_units = cluster.nserver_groups * cluster.nservers_per_group // cluster.nservers_per_procs
    return worker_units, server_units


def _total(cluster: Cluster) -> int:
    """Return how many units workers and servers fill."""
    worker_units, server_units = _unit_counts(cluster)
    return worker_units + server_units if cluster.server_worker_separate else max(worker_units, server_units)


def _worker_unit(cluster: Cluster, g: int, i: int) -> int:
    return (g * cluster.nworkers_per_group + i) // cluster.nworkers_per_procs


def _server_unit(cluster: Cluster, g: int, k: int, idle: int) -> int:
    if cluster.nserver_groups == 0:
        # An implicit server is in the unit of the first worker of its group.
        return _worker_unit(cluster, g, 0)
    # Units of servers alone come after those of the workers, and after idle ones.
    first = _unit_counts(cluster)[0] + idle if cluster.server_worker_separate else 0
    return first + (g * cluster.nservers_per_group + k) // cluster.nservers_per_procs


def _check(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{what} {value} does not exist: this layout has 0 to {count - 1}")


def _without_servers(t: Topology) -> str:
    if t.worker_groups > 1:
        return "independent groups without servers (group 0 is saved)"
    return "AllReduce without servers (synchronous)" if t.workers_per_group > 1 else "one worker without servers"


def _synchronous(t: Topology) -> str:
    """Name a layout of one worker group and one server group."""
    if t.cluster.server_worker_separate:
        return "Sandblaster (synchronous)"
    if t.workers_per_group == 1 and t.shards == 1:
        return "one worker and its server"
    if len(t.units) == 1:
        return "in-memory Sandblaster (synchronous)"
    if all(len(unit.workers) == len(unit.servers) for unit in t.units):
        return "AllReduce (synchronous)"
    return "Sandblaster with co-located servers (synchronous)"


def _with_outer_optimizer(t: Topology) -> str:
    """Name a layout in which worker groups train alone between two exchanges."""
    steps, parts = t.cluster.sync_freq, t.cluster.fragments
    workers = t.workers_per_group
    rounds = (
        f"rounds of {_count(steps, 'step')}"
        + (f" in {parts} fragments" if parts > 1 else "")
        + (f", in synchronous groups of {_count(workers, 'worker')}" if workers > 1 else "")
    )
    return f"{_kind_of_rounds(t.cluster)} ({rounds})"


def _kind_of_rounds(cluster: Cluster) -> str:
    """Name the local SGD of a block as the literature does."""
    assert cluster.outer is not None
    if not cluster.outer.momentum:
        return "local SGD with an outer optimizer"
    if cluster.quorum:
        return "Decoupled DiLoCo"
    return "Streaming DiLoCo" if cluster.fragments > 1 or cluster.overlap else "DiLoCo"


def _asynchronous(t: Topology) -> str:
    """Name a layout of several worker groups and one server group."""
    separate = t.cluster.server_worker_separate
    shared = [unit for unit in t.units if t.sharing(unit.rank)]
    if not shared:
        return "Downpour (asynchronous)" if separate else "Downpour with co-located servers (asynchronous)"
    if not separate and len(t.units) == 1:
        return "in-memory Hogwild (asynchronous)"
    if sum(1 for unit in t.units if unit.workers) == 1:
        return "in-memory Hogwild with servers in units of their own (asynchronous)"
    return "hybrid: Downpour between units, in-memory Hogwild inside them (asynchronous)"


def _several_server_groups(t: Topology) -> str:
    if t.server_groups == t.worker_groups:
        apart = " with servers in units of their own" if t.cluster.server_worker_separate else ""
        return f"Distributed Hogwild{apart} (asynchronous)"
    shared = any(t.sharing(unit.rank) for unit in t.units)
    inside = "in-memory Hogwild" if shared else "Downpour"
    return f"hybrid: Distributed Hogwild between server groups, {inside} around each of them (asynchronous)"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _names(addresses: Iterable[Address]) -> str:
    return " ".join(f"{address.group}/{address.index}" for address in addresses)


def _places(t: Topology, addresses: Iterable[Address]) -> str:
    # Addresses of a group are in consecutive units, so the first and the last are enough.
    ranks = list(dict.fromkeys(t.unit_of(address) for address in addresses))
    return f"unit {ranks[0]}" if len(ranks) == 1 else f"units {ranks[0]}-{ranks[-1]}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a left-aligned table, without columns that are empty."""
    keep = [c for c in range(len(head)) if any(row[c] for row in rows)]
    widths = {c: max(len(line[c]) for line in (head, *rows)) for c in keep}
    rule = ["-" * widths.get(c, 0) for c in range(len(head))]
    return ["  ".join(line[c].ljust(widths[c]) for c in keep).rstrip() for line in (head, rule, *rows)]
