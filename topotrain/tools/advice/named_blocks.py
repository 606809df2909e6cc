"""The blocks that an advice compares, about a dozen for a number of hosts.

With several hosts each unit is a host. So a block with separate servers has fewer hosts with workers. With one host
all units are on it. Each generator begins with the plainest block, because a search that has little time ends there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from topotrain.config.job import (
    Agreement,
    Algorithm,
    Apply,
    ChangeMethod,
    Compression,
    Grads,
    LRGen,
    Updater,
    UpdaterType,
)

AVERAGE_FREQ = 8
"""Updates between two averages of server groups."""
ROUND = 50
"""Local steps of islands between two rounds."""
STALENESS = 4
_OUTER = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=0.7))
"""That of DiLoCo (Douillard et al., 2023)."""
_ISLANDS = {"outer": _OUTER, "sync_freq": ROUND}
_STREAMED = {"outer": _OUTER, "sync_freq": 10, "fragments": 2, "overlap": 4, "compression": Compression.kE3M0}
_AVERAGED = {"sync_freq": AVERAGE_FREQ, "agreement": Agreement.kRingAverage}
_AVERAGES = f"averages every {AVERAGE_FREQ} updates"
_ON_ARRIVAL = "hidden gradients, applied on arrival"
_HIDDEN = {"grads": Grads.kHidden, "apply": Apply.kOnArrival}


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """A block by the fields that differ from their defaults."""

    cluster: Mapping[str, Any]
    hosts: int = 1  # that it uses
    setting: str = ""  # what its name has behind framework and counts
    job: Mapping[str, Any] = field(default_factory=dict)  # fields of the job around it


def on_one_host(workers: int) -> Iterator[NamedBlock]:
    """Yield the blocks for one host with so many workers, and with a single one."""
    yield NamedBlock({})
    if workers == 1:
        return
    group = {"nworkers_per_group": workers, "nworkers_per_procs": workers}
    groups = {"nworker_groups": workers, "nworkers_per_procs": workers}
    beside, two = {**group, **_together(workers)}, _together(2)
    yield NamedBlock(beside)
    yield NamedBlock(group)
    yield NamedBlock({**group, "server_worker_separate": True})
    yield NamedBlock({**group, **two, "server_worker_separate": True})
    if workers > 2:
        half = workers // 2
        yield NamedBlock({"nworkers_per_group": half, "nworkers_per_procs": half, **_together(half)})
    yield NamedBlock(beside, 1, _ON_ARRIVAL, _HIDDEN)
    yield NamedBlock(groups)
    yield NamedBlock({**groups, "share_memory": False, "server_worker_separate": True})
    own_servers = {**groups, "nserver_groups": workers, "nservers_per_procs": workers}
    yield NamedBlock({**own_servers, **_AVERAGED}, 1, _AVERAGES)
    yield NamedBlock({**groups, **_ISLANDS})


def over_hosts(hosts: int, workers: int, fewer: tuple[int, ...]) -> Iterator[NamedBlock]:
    """Yield the blocks for several hosts with so many workers each.

    fewer: numbers of hosts that are compared by the plainest block.
    """
    yield _all_reduce(hosts, workers)
    for count in fewer:
        yield _all_reduce(count, workers)
    if workers > 1:
        yield _all_reduce(hosts, 1)
    for servers in sorted({1, hosts // 2}):
        apart = {"nservers_per_group": servers, "server_worker_separate": True}
        yield NamedBlock({**_group((hosts - servers) * workers, workers), **apart}, hosts)
    yield _all_reduce(hosts, workers, "ring", algorithm=Algorithm.kRing)
    beside = _all_reduce(hosts, workers).cluster
    yield NamedBlock(beside, hosts, _ON_ARRIVAL, _HIDDEN)
    if hosts * workers > 2:
        backup = {**_group(hosts * workers, workers), "nservers_per_group": hosts, "backup": 1}
        yield NamedBlock(backup, hosts, "one backup worker", {"grads": Grads.kHidden})
    groups = {"nworker_groups": hosts, "nworkers_per_group": workers, "nworkers_per_procs": workers}
    downpour = {**groups, "nservers_per_group": hosts}
    yield NamedBlock(downpour, hosts)
    yield NamedBlock({**downpour, "max_staleness": STALENESS}, hosts, f"staleness of at most {STALENESS}")
    if workers > 1:
        shared = {"nworker_groups": (hosts - 1) * workers, "nworkers_per_procs": workers}
        yield NamedBlock({**shared, "server_worker_separate": True}, hosts)
    yield NamedBlock({**groups, "nserver_groups": hosts, **_AVERAGED}, hosts, _AVERAGES)
    islands = {"nworker_groups": hosts * workers, "nworkers_per_procs": workers, "nservers_per_group": hosts}
    yield NamedBlock({**islands, **_ISLANDS}, hosts)
    yield NamedBlock({**islands, **_STREAMED}, hosts, "kE3M0")
    yield _all_reduce(hosts, workers, "kInt8", compression=Compression.kInt8)


def _group(workers: int, per_host: int) -> dict[str, Any]:
    return {"nworkers_per_group": workers, "nworkers_per_procs": per_host}


def _together(servers: int) -> dict[str, Any]:
    return {"nservers_per_group": servers, "nservers_per_procs": servers}


def _all_reduce(hosts: int, workers: int, setting: str = "", **more: object) -> NamedBlock:
    """Return one group with a server beside each worker."""
    count = hosts * workers
    servers = {"nservers_per_group": count, "nservers_per_procs": workers}
    return NamedBlock({**_group(count, workers), **servers, **more}, hosts, setting)
