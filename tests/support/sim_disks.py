"""Disks of a simulation: they hold and verify snapshots, and serve them to resume.

A published snapshot must be a state that the job has been in: as each batch has cells of its own, the cells with 1 must
be exactly those of the batches that the snapshot lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from batch_counts import BatchCounts, InvariantViolated
from fault_schedule import ASSIGNED, FaultSchedule
from faulty_cluster import FaultyCluster
from snapshot_archive import Archive

from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role
from topotrain.core.optim.state_table import Table
from topotrain.extensions.checkpointing.snapshot_coordinator import DropSnapshot, PublishSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import snapshot_parts
from topotrain.extensions.checkpointing.table_file_layout import StoredTable
from topotrain.training.data.batch_ranges import Runs, merged

_VALID_REASONS = (" never came", " had to start again")
"""Valid reasons to drop a snapshot: the next one was due before a worker's next step, or a worker died before it."""


@dataclass(frozen=True, kw_only=True)
class PublishedSnapshot:
    """A published snapshot in memory (`SnapshotSource`), from which a job restarts."""

    number: int
    version: int
    clocks: Mapping[int, int]
    parameters: tuple[Parameter, ...]
    optimizer: str
    first_epoch: int | None
    # The first pass over the data that some worker had not completed. None: no worker has stored a state.
    passes: int | None
    _steps: Mapping[int, int]
    _runs: Mapping[int, Runs]
    _values: Mapping[str, torch.Tensor]
    table: Table = field(default_factory=dict)
    closed: int = 0
    samples: Mapping[Address, int] = field(default_factory=dict)
    rounds: Sequence[int] = ()

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


class SimDisks(Archive):
    """The disks of all hosts of one start of a job.

    singly: each batch belongs to one worker, and is not divided among a group. before: the snapshot to resume from.
    """

    def __init__(
        self, cluster: FaultyCluster, schedule: FaultSchedule, singly: bool, before: PublishedSnapshot | None = None
    ) -> None:
        self._schedule, self._singly = schedule, singly
        self._counts = BatchCounts(cluster.topology)
        # The former snapshot has all batches of epochs before this one, so snapshots do not list them any more.
        self._over = 0 if before is None else before.first
        self.last = before
        # Numbers go on after a crash, as on a disk that has the earlier snapshots.
        super().__init__(cluster, first=1 if before is None else before.number + 1)

    def drop(self, what: DropSnapshot) -> None:
        self.values.pop(what.number, None)
        # Simulated disks do not fail, and servers do not die alone, so no other reason can be right.
        if not what.why.endswith(_VALID_REASONS):
            raise InvariantViolated(f"snapshot {what.number} was dropped: {what.why}")

    def answer(self, me: Address, number: int, stage: int, data: Mapping[str, Any]) -> None:
        # A disk takes time, so other messages come between an order and its answer.
        parts, sim = snapshot_parts(number, stage, data), self.cluster.sim
        send = partial(self.cluster.transport.when_resumed, lambda: self.say(me, parts), me)
        sim.at(sim.now + sim.random.uniform(0.0, 0.01), send)

    def publish(self, what: PublishSnapshot) -> None:
        super().publish(what)
        values, facts, schema = self.values.pop(what.number), what.facts, self.cluster.schema
        runs = {int(epoch): merged((int(lo), int(hi)) for lo, hi in listed) for epoch, listed in facts["epochs"]}
        self._over = max(self._over, facts["closed"])
        self._check(what.number, runs, values)
        first = facts["first_epoch"]
        passes = [int(left.view(torch.int64)) for left in what.states.values()]
        self.last = PublishedSnapshot(
            number=what.number,
            version=facts["version"],
            clocks=dict(facts["clocks"]),
            parameters=schema.parameters,
            optimizer=schema.optimizer,
            first_epoch=first,
            passes=min(passes, default=None),
            _steps=dict(facts["steps"]),
            _runs=runs,
            _values=values,
            closed=facts["closed"],
            samples={Address(Role.WORKER, group, index): count for group, index, count in facts["samples"]},
            rounds=facts.get("rounds", ()),
        )
        # Of an epoch that all have read, some batches may not count yet.
        self._over = max(self._over, min(first or 0, self.last.first))

    def _check(self, number: int, runs: Mapping[int, Runs], values: Mapping[str, torch.Tensor]) -> None:
        workers = self.cluster.topology.workers_per_group
        # A batch has one cell for each worker of the group that reads it.
        of_epoch, each = self._schedule.batches * workers, 1 if self._singly else workers
        cells = torch.zeros(of_epoch * self._schedule.epochs)
        # Snapshots do not list the batches of epochs that are over.
        cells[: self._over * of_epoch] = 1.0
        for epoch, listed in runs.items():
            for first, last in listed:  # the last range of a pass may exceed the number of batches
                cells[epoch * of_epoch :][first * each : min(last * each, of_epoch)] = 1.0
        for name, found in values.items():
            there = self._counts.of(found[: cells.numel()].to(cells.dtype))
            if self._schedule.assigns and name == f"p{ASSIGNED}" and self.cluster.topology.worker_groups > 1:
                # Another group may be between an assignment and its step.
                there = torch.where((cells == 0) & (there == 1), cells, there)
            if self.cluster.job.cluster.fragments > 1:
                # A batch is listed with the first fragment that has it.
                there = torch.where((cells == 1) & (there == 0), cells, there)
            behind = (cells == 1) & (there == 0)
            lost = [cell for cell in behind.nonzero()[:, 0].tolist() if self.cluster.may_be_lost(cell)]
            there = torch.where(
                torch.isin(torch.arange(len(cells)), torch.tensor(lost, dtype=torch.int64)), cells, there
            )
            if not torch.equal(there, cells):
                has = {cell: float(found[cell]) for cell in range(cells.numel()) if found[cell]}
                raise InvariantViolated(f"snapshot {number} lists {runs}, but {name} has cells {has}")


def passes_of(epoch: int) -> torch.Tensor:
    """Return the state that a simulated worker stores: 1-D uint8."""
    return torch.tensor([epoch], dtype=torch.int64).view(torch.uint8)
