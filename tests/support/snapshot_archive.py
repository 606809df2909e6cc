"""Snapshots in memory: what all shards of a simulated job have frozen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from faulty_cluster import FaultyCluster

from topotrain.config.topology import Address, Role
from topotrain.core.optim.state_table import Table
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.snapshot_coordinator import (
    DropSnapshot,
    PublishSnapshot,
    SnapshotOrder,
    WriteSnapshot,
)
from topotrain.extensions.checkpointing.snapshot_messages import (
    PUBLISHED,
    WRITTEN,
    SnapshotPart,
    SnapshotRequest,
    snapshot_parts,
)


@dataclass(frozen=True)
class Host:
    """The host of one server."""

    archive: "Archive"
    me: Address

    def execute(self, order: SnapshotOrder) -> None:
        self.archive.work(self.me, order)


class Archive:
    """The host of all servers of a cluster: keeps what it is to write, and answers at once.

    fails: the server whose disk is full. first: the number of the first snapshot.
    """

    def __init__(self, cluster: FaultyCluster, fails: int = -1, first: int = 1) -> None:
        self.cluster, self.fails = cluster, fails
        self.values: dict[int, dict[str, torch.Tensor]] = {}
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.tables: dict[int, Table] = {}
        self.published: list[PublishSnapshot] = []
        self.dropped: list[DropSnapshot] = []
        for me, sim_server in cluster.sim_servers.items():
            snapshots_of(sim_server.server).attach_host(Host(self, me), first)

    def ask(self) -> None:
        """Request a snapshot, as the host's clock does."""
        me = Address(Role.SERVER, 0, 0)
        self.cluster.wake(me, SnapshotRequest())

    def work(self, me: Address, what: SnapshotOrder) -> None:
        """Carry out an order of a server."""
        if isinstance(what, DropSnapshot):
            self.drop(what)
        elif isinstance(what, PublishSnapshot):
            self.publish(what)
            self.answer(me, what.number, PUBLISHED, {})
        else:
            self._write(what)
            full = what.server.index == self.fails
            self.answer(
                me, what.number, WRITTEN, {"error": "the disk is full"} if full else {"server": str(what.server)}
            )

    def drop(self, what: DropSnapshot) -> None:
        self.dropped.append(what)

    def publish(self, what: PublishSnapshot) -> None:
        self.published.append(what)

    def _write(self, what: WriteSnapshot) -> None:
        self._keep(self.values.setdefault(what.number, {}), what.frozen.values)
        self._keep(self.state.setdefault(what.number, {}), what.frozen.state)
        self.tables[what.number] = what.table

    def _keep(self, kept: dict[str, torch.Tensor], slabs: Iterable[Any]) -> None:
        counts = {p.name: p.count for p in self.cluster.map.parameters}
        for slab in slabs:
            # A tensor of the optimizer's state is named after its parameter.
            size = counts.get(slab.name) or counts[slab.name.rpartition("/")[0]]
            # NaN marks elements that no server has written.
            whole = kept.setdefault(slab.name, torch.full((size,), torch.nan, dtype=slab.body.dtype))
            whole[slab.lo : slab.lo + slab.body.numel()] = slab.body

    def answer(self, me: Address, number: int, stage: int, data: Mapping[str, Any]) -> None:
        said = snapshot_parts(number, stage, data)
        self.cluster.sim.actor(f"host {me} {number} {stage}", lambda: self.say(me, said))

    def say(self, me: Address, said: Iterable[SnapshotPart]) -> None:
        for part in said:
            self.cluster.sim_servers[me].handle(me, part)
