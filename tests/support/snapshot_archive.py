"""Snapshots in memory: what all shards of a simulated job have frozen."""

import torch
from simulation import ScriptedCluster

from topotrain.config.topology import Address, Role
from topotrain.core.optim.state_table import Table
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.snapshot_coordinator import DropSnapshot, PublishSnapshot, WriteSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import (
    PUBLISHED,
    WRITTEN,
    SnapshotPart,
    SnapshotRequest,
    snapshot_parts,
)


class Host:
    """The host of one server."""

    def __init__(self, archive: "Archive", me: Address) -> None:
        self._archive, self._me = archive, me

    def execute(self, order: WriteSnapshot | PublishSnapshot | DropSnapshot) -> None:
        self._archive.work(self._me, order)


class Archive:
    """The host of all servers of a cluster: keeps what it is to write, and answers at once."""

    def __init__(self, cluster: ScriptedCluster, fails: int = -1) -> None:
        self.cluster, self.fails = cluster, fails
        self.parts: dict[int, dict[int, WriteSnapshot]] = {}
        self.values: dict[int, dict[str, torch.Tensor]] = {}
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        self.tables: dict[int, Table] = {}
        self.published: list[PublishSnapshot] = []
        self.dropped: list[DropSnapshot] = []
        for me, sim_server in cluster.sim_servers.items():
            snapshots_of(sim_server.server).attach_host(Host(self, me))

    def ask(self) -> None:
        me = Address(Role.SERVER, 0, 0)
        self.cluster.sim_servers[me].handle(me, SnapshotRequest())

    def work(self, me: Address, what: WriteSnapshot | PublishSnapshot | DropSnapshot) -> None:
        if isinstance(what, DropSnapshot):
            self.dropped.append(what)
            return
        answer = {}
        if isinstance(what, WriteSnapshot):
            for slab in what.frozen.values:
                whole = self.values.setdefault(what.number, {}).setdefault(
                    slab.name, torch.full((self.count(slab.name),), torch.nan, dtype=slab.body.dtype)
                )
                whole[slab.lo : slab.lo + slab.body.numel()] = slab.body
            for slab in what.frozen.state:
                # A tensor of the optimizer's state is named after its parameter.
                whole = self.state.setdefault(what.number, {}).setdefault(
                    slab.name, torch.full((self.count(slab.name.rpartition("/")[0]),), torch.nan, dtype=slab.body.dtype)
                )
                whole[slab.lo : slab.lo + slab.body.numel()] = slab.body
            self.tables[what.number] = what.table
            answer = {"error": "the disk is full"} if what.server.index == self.fails else {"server": str(what.server)}
        else:
            self.published.append(what)
        stage = WRITTEN if isinstance(what, WriteSnapshot) else PUBLISHED
        said = snapshot_parts(what.number, stage, answer)
        self.cluster.sim.actor(f"host {me} {what.number} {stage}", lambda: self.say(me, said))

    def say(self, me: Address, said: list[SnapshotPart]) -> None:
        for part in said:
            self.cluster.sim_servers[me].handle(me, part)

    def count(self, name: str) -> int:
        return next(p.count for p in self.cluster.map.parameters if p.name == name)
