"""Disks of a simulation: they hold and verify snapshots, and serve them to resume.

A published snapshot must be a state that the job has been in. Each batch has its own cells. So the cells with 1 in a
snapshot must be exactly those of the batches that the snapshot lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role
from topotrain.core.optim.state_table import Table
from topotrain.extensions.checkpointing.checkpoint_extension import snapshots_of
from topotrain.extensions.checkpointing.snapshot_coordinator import (
    PUBLISHED,
    WRITTEN,
    DropSnapshot,
    PublishSnapshot,
    WriteSnapshot,
    texts,
)
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotPart, SnapshotRequest
from topotrain.extensions.checkpointing.table_file_layout import StoredTable
from topotrain.tools.simulator.sim_cluster import SimCluster, SimServer
from topotrain.tools.simulator.worker_observer import InvariantViolated
from topotrain.training.data.batch_ranges import Runs, merged

_DESK = Address(Role.SERVER, 0, 0)
_FOR_A_REASON = (" never came", " had to start again")
"""Valid reasons to drop a snapshot: the next one was due before a worker's next step, or a worker died before it."""


@dataclass(frozen=True)
class PublishedSnapshot:
    """A published snapshot in memory, from which a crashed job restarts.

    It implements `SnapshotSource`. passes: the first pass over the data that some worker had not completed, by the
    workers' states; None: no worker has stored a state.
    """

    number: int
    version: int
    clocks: Mapping[int, int]
    parameters: tuple[Parameter, ...]
    optimizer: str
    first_epoch: int | None
    passes: int | None
    _steps: Mapping[int, int]
    _runs: Mapping[int, Runs]
    _values: Mapping[str, torch.Tensor]
    table: Table = field(default_factory=dict)
    closed: int = 0
    samples: Mapping[Address, int] = field(default_factory=dict)

    @property
    def epochs(self) -> Sequence[int]:
        """The epochs with batches in the values."""
        return tuple(self._runs)

    @property
    def first(self) -> int:
        """The first epoch that is not over; see `previous_run.find`."""
        known = [epoch for epoch in (self.passes, self.first_epoch) if epoch is not None]
        return max(self.closed, min(known or self._runs, default=0))

    def runs(self, epoch: int) -> Runs:
        """Return the ranges [first, last) of an epoch's batches that are in the values."""
        return self._runs.get(epoch, ())

    def steps(self, group: int) -> int:
        """Return the number of steps of a worker group."""
        return self._steps.get(group, 0)

    def values(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Copy elements of a parameter, from `lo` on, into a 1-D tensor."""
        out.copy_(self._values[name][lo : lo + out.numel()])

    def state(self, parameter: str, entry: str, lo: int, out: torch.Tensor) -> None:
        """Fail: plain SGD has no optimizer state."""
        raise InvariantViolated(f"a plain SGD holds {entry} of {parameter}")

    @property
    def tables(self) -> Sequence[Sequence[StoredTable]]:
        """The empty sequence: the simulation has no tables."""
        return ()

    def rows(self, shard: int, table: str, column: str, lo: int, out: torch.Tensor) -> None:
        """Fail: the simulation has no tables."""
        raise InvariantViolated(f"no worker has opened a table {table}")


class SnapshotTrial(Protocol):
    """The job with its snapshots here: a cluster in which each batch has its cells."""

    @property
    def batches(self) -> int:
        """The number of batches of an epoch."""
        ...

    @property
    def epochs(self) -> int: ...

    @property
    def singly(self) -> bool:
        """Whether each batch belongs to one worker, and is not divided among a group."""
        ...


class SimDisks:
    """The disks of all hosts of one start of a job.

    Args:
        town: the simulated cluster with the servers.
        ledger: the amount of data that the job reads.
        before: the snapshot that this start resumes from.
    """

    def __init__(self, town: SimCluster, ledger: SnapshotTrial, before: PublishedSnapshot | None = None) -> None:
        self._town, self._ledger = town, ledger
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        # The former snapshot has all batches of epochs before this one, so snapshots do not list them any more.
        self._over = 0 if before is None else before.first
        self.last = before
        self.published = 0
        first = 1 if before is None else before.number + 1
        for me, house in town.houses.items():
            snapshots_of(house.server).follow(lambda what, me=me: self._work(me, what), first)  # type: ignore[misc]

    def ask(self) -> None:
        """Request a snapshot, as the host's clock does."""
        house: SimServer = self._town.houses[_DESK]
        self._town.wire.awake(lambda: house.handle(_DESK, SnapshotRequest()), _DESK)

    def _work(self, me: Address, what: WriteSnapshot | PublishSnapshot | DropSnapshot) -> None:
        if isinstance(what, DropSnapshot):
            self._values.pop(what.number, None)
            if not what.why.endswith(_FOR_A_REASON):
                raise InvariantViolated(f"snapshot {what.number} was dropped: {what.why}")
            return
        if isinstance(what, PublishSnapshot):
            self._publish(what)
            self._answer(me, texts(what.number, PUBLISHED, {}))
            return
        for slab in what.frozen.values:
            counts = {p.name: p.count for p in self._town.map.parameters}
            kept = self._values.setdefault(what.number, {})
            whole = kept.setdefault(slab.name, torch.full((counts[slab.name],), torch.nan, dtype=slab.body.dtype))
            whole[slab.lo : slab.lo + slab.body.numel()] = slab.body
        self._answer(me, texts(what.number, WRITTEN, {"server": str(what.server)}))

    def _answer(self, me: Address, said: list[SnapshotPart]) -> None:
        def say() -> None:
            for part in said:
                self._town.houses[me].handle(me, part)

        sim = self._town.sim
        sim.at(sim.now + sim.random.uniform(0.0, 0.01), lambda: self._town.wire.awake(say, me))

    def _publish(self, what: PublishSnapshot) -> None:
        self.published += 1
        values, facts = self._values.pop(what.number), what.facts
        runs = {int(epoch): merged((int(lo), int(hi)) for lo, hi in listed) for epoch, listed in facts["epochs"]}
        self._over = max(self._over, facts["closed"])
        self._check(what.number, runs, values)
        first = facts["first_epoch"]
        self._over = max(self._over, first or 0)
        passes = [int(left.view(torch.int64)) for left in what.deposits.values()]
        self.last = PublishedSnapshot(
            what.number,
            facts["version"],
            dict(facts["clocks"]),
            self._town.schema.parameters,
            self._town.schema.optimizer,
            first,
            min(passes, default=None),
            dict(facts["steps"]),
            runs,
            values,
            closed=facts["closed"],
            samples={Address(Role.WORKER, group, index): count for group, index, count in facts["samples"]},
        )

    def _check(self, number: int, runs: Mapping[int, Runs], values: Mapping[str, torch.Tensor]) -> None:
        workers = self._town.topology.workers_per_group
        of_epoch, each = self._ledger.batches * workers, 1 if self._ledger.singly else workers
        cells = torch.zeros(of_epoch * self._ledger.epochs)
        cells[: self._over * of_epoch] = 1.0
        for epoch, listed in runs.items():
            for first, last in listed:  # the last range of a pass may exceed the number of batches
                cells[epoch * of_epoch :][first * each : min(last * each, of_epoch)] = 1.0
        for name, found in values.items():
            if not torch.equal(found[: cells.numel()].to(cells.dtype), cells):
                has = {cell: float(found[cell]) for cell in range(cells.numel()) if found[cell]}
                raise InvariantViolated(f"snapshot {number} lists {runs}, but {name} has cells {has}")


def passes_of(epoch: int) -> torch.Tensor:
    """Return the state that a simulated worker stores: 1-D uint8."""
    return torch.tensor([epoch], dtype=torch.int64).view(torch.uint8)
