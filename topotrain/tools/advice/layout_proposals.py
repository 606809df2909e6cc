"""The cluster blocks that an advice considers.

They are for a number of hosts, or for fewer of them, and for a number of workers on each host.

With several hosts each unit is a host. So a layout with separate servers has fewer hosts with workers. With one host
all units are on it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from topotrain.config.job import Agreement, Algorithm, ChangeMethod, Compression, LRGen, Updater, UpdaterType
from topotrain.tools.advice.candidate import Family

AVERAGE_FREQ = 8
"""Updates between two exchanges of server groups that average."""
ROUNDS = (10, 50)
"""Local steps of islands between two rounds."""
STALENESS = 4
KINDS = (Compression.kFp16, Compression.kInt8, Compression.kTopK)
MOST_COUNTS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """Fields of a cluster block that differ from their defaults.

    hosts: that the block is for.
    """

    family: Family
    fields: Mapping[str, Any]
    hosts: int = 1


def proposals(
    hosts: int, per_host: tuple[int, ...], on_one: tuple[int, ...] = (), fewer: tuple[int, ...] = ()
) -> Iterator[Proposal]:
    """Yield cluster blocks: the plainest of each family, then the second of each, …

    Few hosts come before many, because thousands take long to be placed. So a search that has little time has
    something of each family, and of each number of hosts.

    Args:
        hosts: that there are.
        per_host: the numbers of workers of a host to consider, where there are several hosts.
        on_one: the same, for one host.
        fewer: numbers of hosts below `hosts` to consider, in their order.
    """
    lines: dict[tuple[Family, int], list[Proposal]] = {}
    for each in (Proposal(Family.ONE, {}), *_on_fewer(fewer, per_host, on_one), *_all(hosts, per_host, on_one)):
        lines.setdefault((each.family, each.hosts), []).append(each)
    for row in zip_longest(*lines.values()):
        yield from (each for each in row if each is not None)


def _all(hosts: int, per_host: tuple[int, ...], on_one: tuple[int, ...]) -> Iterator[Proposal]:
    """Yield the blocks that use all hosts."""
    if hosts == 1:
        for workers in on_one:
            yield from _on_one_host(workers)
        return
    for workers in per_host:
        for each in _over_hosts(hosts, workers):
            yield replace(each, hosts=hosts)


def _on_fewer(fewer: tuple[int, ...], per_host: tuple[int, ...], on_one: tuple[int, ...]) -> Iterator[Proposal]:
    """Yield the plainest blocks for fewer hosts than there are."""
    for count in fewer:
        if count == 1:
            for workers in on_one:
                yield from _plain_on_one_host(workers)
            continue
        for workers in per_host:
            for each in _plain_over_hosts(count, workers):
                yield replace(each, hosts=count)


def counts(most: int) -> tuple[int, ...]:
    """Return a few numbers from 1 to `most`.

    Below `most` they are powers of two. If these are too many, they are powers of a larger factor.
    """
    factor = 2
    while factor ** (MOST_COUNTS - 1) < most:
        factor *= 2
    found = [factor**power for power in range(MOST_COUNTS) if factor**power < most]
    return (*found, most)


# ---- one host --------------------------------------------------------------------------------------------------------


def _on_one_host(workers: int) -> Iterator[Proposal]:
    group = {"nworkers_per_group": workers, "nworkers_per_procs": workers}
    groups = {"nworker_groups": workers, "nworkers_per_procs": workers}
    yield Proposal(Family.SANDBLASTER, {**group, **_together(workers)})
    for servers in counts(min(2, workers - 1)):
        yield Proposal(Family.SANDBLASTER, {**group, **_together(servers)})
    for servers in counts(min(2, workers)):
        yield Proposal(Family.SANDBLASTER, {**group, **_together(servers), "server_worker_separate": True})
        unshared = {**groups, **_together(servers), "share_memory": False}
        yield Proposal(Family.DOWNPOUR, {**unshared, "server_worker_separate": True})
    yield Proposal(Family.HYBRID, groups)
    yield from _server_groups({**groups, "nserver_groups": workers, "nservers_per_procs": workers})
    yield from _islands(groups, 1)


def _together(servers: int) -> dict[str, int]:
    """Return the counts of servers that share a unit."""
    return {"nservers_per_group": servers, "nservers_per_procs": servers}


def _plain_on_one_host(workers: int) -> Iterator[Proposal]:
    group = {"nworkers_per_group": workers, "nworkers_per_procs": workers}
    yield Proposal(Family.SANDBLASTER, {**group, **_together(workers)})
    yield Proposal(Family.SANDBLASTER, {**group, **_together(1), "server_worker_separate": True})
    yield Proposal(Family.HYBRID, {"nworker_groups": workers, "nworkers_per_procs": workers})


# ---- several hosts ---------------------------------------------------------------------------------------------------


def _over_hosts(hosts: int, workers: int) -> Iterator[Proposal]:
    yield from _all_reduce(hosts, workers)
    yield from _sandblaster(hosts, workers)
    yield from _downpour(hosts, workers)
    groups = {"nworker_groups": hosts, "nworkers_per_group": workers, "nworkers_per_procs": workers}
    yield from _server_groups({**groups, "nserver_groups": hosts})
    yield from _islands({"nworker_groups": hosts * workers, "nworkers_per_procs": workers}, hosts)
    yield from _compressed(hosts, workers)


def _plain_over_hosts(hosts: int, workers: int) -> Iterator[Proposal]:
    yield next(_all_reduce(hosts, workers))
    servers = counts(hosts // 2)[-1]
    yield Proposal(Family.SANDBLASTER, {**_group(hosts - servers, workers), **_apart(servers)})
    groups = {"nworker_groups": hosts, "nworkers_per_group": workers, "nworkers_per_procs": workers}
    yield Proposal(Family.DOWNPOUR, {**groups, "nservers_per_group": hosts})


def _group(hosts: int, workers: int) -> dict[str, int]:
    """Return the counts of one synchronous group."""
    return {"nworkers_per_group": hosts * workers, "nworkers_per_procs": workers}


def _apart(servers: int) -> dict[str, Any]:
    """Return the counts of servers that have a host each."""
    return {"nservers_per_group": servers, "server_worker_separate": True}


def _all_reduce(hosts: int, workers: int) -> Iterator[Proposal]:
    beside = {**_group(hosts, workers), "nservers_per_group": hosts * workers, "nservers_per_procs": workers}
    yield Proposal(Family.ALLREDUCE, beside)
    for algorithm in (Algorithm.kRing, Algorithm.kTree):
        yield Proposal(Family.ALLREDUCE, {**beside, "algorithm": algorithm})


def _sandblaster(hosts: int, workers: int) -> Iterator[Proposal]:
    for servers in counts(hosts // 2):
        yield Proposal(Family.SANDBLASTER, {**_group(hosts - servers, workers), **_apart(servers)})
    # Servers beside the workers of some hosts. With one on each host of one worker this is AllReduce.
    for servers in counts(hosts if workers > 1 else hosts - 1):
        yield Proposal(Family.SANDBLASTER, {**_group(hosts, workers), "nservers_per_group": servers})


def _downpour(hosts: int, workers: int) -> Iterator[Proposal]:
    for servers in counts(hosts // 2):
        away = hosts - servers
        group = {"nworker_groups": away, "nworkers_per_group": workers, "nworkers_per_procs": workers}
        yield Proposal(Family.DOWNPOUR, {**group, **_apart(servers)})
        if workers > 1:
            shared = {"nworker_groups": away * workers, "nworkers_per_procs": workers}
            yield Proposal(Family.HYBRID, {**shared, **_apart(servers)})
    groups = {"nworker_groups": hosts, "nworkers_per_group": workers, "nworkers_per_procs": workers}
    beside = {**groups, "nservers_per_group": hosts}
    yield Proposal(Family.DOWNPOUR, beside)
    yield Proposal(Family.DOWNPOUR, {**beside, "max_staleness": STALENESS})


def _compressed(hosts: int, workers: int) -> Iterator[Proposal]:
    servers = counts(hosts // 2)[-1]
    beside = {**_group(hosts, workers), "nservers_per_group": hosts * workers, "nservers_per_procs": workers}
    apart = {**_group(hosts - servers, workers), **_apart(servers)}
    groups = {"nworker_groups": hosts, "nworkers_per_group": workers, "nworkers_per_procs": workers}
    for kind in KINDS:
        for layout in (beside, apart, {**groups, "nservers_per_group": hosts}):
            yield Proposal(Family.COMPRESSED, {**layout, "compression": kind})


# ---- on one host and on several --------------------------------------------------------------------------------------


def _server_groups(groups: Mapping[str, Any]) -> Iterator[Proposal]:
    yield Proposal(Family.HOGWILD, groups)
    yield Proposal(Family.HOGWILD, {**groups, "sync_freq": AVERAGE_FREQ})
    for agreement in (Agreement.kRingAverage, Agreement.kElastic, Agreement.kGossip):
        yield Proposal(Family.AVERAGED, {**groups, "sync_freq": AVERAGE_FREQ, "agreement": agreement})


def _islands(groups: Mapping[str, Any], servers: int) -> Iterator[Proposal]:
    base = {**groups, "nservers_per_group": servers, "outer": _OUTER}
    for steps in ROUNDS:
        yield Proposal(Family.ISLANDS, {**base, "sync_freq": steps})
    if servers == 1:
        # On one host a round costs little: nothing is to be hidden or compressed.
        return
    streaming = {"sync_freq": ROUNDS[0], "fragments": 2, "overlap": ROUNDS[0] // 2 - 1}
    yield Proposal(Family.ISLANDS, {**base, **streaming, "compression": Compression.kE3M0})
    if groups["nworker_groups"] > 2:
        yield Proposal(Family.ISLANDS, {**base, "sync_freq": ROUNDS[0], "quorum": groups["nworker_groups"] // 2})


_OUTER = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=0.7))
"""That of DiLoCo (Douillard et al., 2023)."""
