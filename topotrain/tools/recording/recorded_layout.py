"""The layout of a job in a recording: made from a topology, and read again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topotrain.config.topology import Address, Role, Topology


def layout_data(topology: Topology, hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the layout as plain data.

    hosts: the name of each unit's host; empty: all are on this one.
    """
    implicit = range(topology.worker_groups)
    return {
        "units": [
            {
                "rank": unit.rank,
                "host": hosts[unit.rank] if unit.rank < len(hosts) else "localhost",
                "workers": [[worker.group, worker.index] for worker in unit.workers],
                "servers": [[server.group, server.index] for server in unit.servers],
            }
            for unit in topology.units
        ],
        "server_group_of_worker_group": [topology.server_group_of(group) for group in implicit],
        "servers_in_workers": topology.inline or topology.collective,
    }


def residents(layout: Mapping[str, Any]) -> Iterator[tuple[Address, int, str]]:
    """Yield each worker and server of a recorded layout with its unit and its host.

    Parts that cannot be read are left out.
    """
    for unit in _dicts(layout.get("units")):
        rank, host = unit.get("rank"), str(unit.get("host", ""))
        for role, name in ((Role.WORKER, "workers"), (Role.SERVER, "servers")):
            for group, index in _pairs(unit.get(name)):
                yield Address(role, group, index), rank if isinstance(rank, int) else 0, host


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _pairs(value: object) -> list[tuple[int, int]]:
    pairs = value if isinstance(value, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, int) and number >= 0 for number in pair)
    ]
