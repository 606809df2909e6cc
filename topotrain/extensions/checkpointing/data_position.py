"""The batches that are in the values, from the applied units of each data stream.

A stream counts units from 0, as the workers of this start of the job form them. A snapshot lists batches of an epoch's
full list, because another start may form other units.
"""

from collections.abc import Iterable, Mapping

from topotrain.config.job import Job
from topotrain.config.topology import Topology
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.consistency import STATIC
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.training.data.batch_ranges import Runs, origin


class DataPosition(DeclaredState):
    """The data of one start of a job, on its coordinator.

    Args:
        groups: worker groups of the job.
        unit: the loader's batches that make a unit.
        before: what was applied before this start, by epoch.
        first: all epochs before this one are read to their end.
        late: a worker pushes after several steps, so a batch may count behind the end of its epoch.
    """

    STATE = ("_before", "_first", "closed")

    def __init__(self, groups: int, unit: int, before: Mapping[int, Runs], first: int = 0, late: bool = False) -> None:
        self._groups, self._unit = groups, unit
        self.late = late
        self._before = dict(before)
        self._first: dict[int, int] = {}
        self.closed = first
        """All epochs before this one are read to their end, and are not listed."""

    @staticmethod
    def of(job: Job, topology: Topology, source: SnapshotSource | None) -> "DataPosition":
        """The position at the start of a job. source: the snapshot that it resumes from."""
        # With `per_worker_batch` a unit is one loader batch for each worker of the group.
        groups, unit = topology.worker_groups, topology.workers_per_group if job.per_worker_batch else 1
        # With backup workers each worker has a stream of its own, in batches instead of rounds of them.
        if job.cluster.backup:
            groups, unit = groups * topology.workers_per_group, 1
        late = job.cluster.local_steps > 1
        if source is None:
            return DataPosition(groups, unit, {}, late=late)
        return DataPosition(groups, unit, {e: tuple(source.runs(e)) for e in source.epochs}, source.closed, late)

    def add_lease(self, epoch: int, lease: int, first: int) -> None:
        """Note that a lease begins with this unit of its epoch."""
        # A repeated lease of an epoch that is over would never be forgotten.
        if epoch >= self.closed:
            self._first[epoch << 32 | lease] = first

    def close(self, epoch: int) -> None:
        """Forget all epochs before this one: they are read to their end."""
        if epoch > self.closed:
            self.closed = epoch
            self._first = {stream: first for stream, first in self._first.items() if stream >> 32 >= epoch}
            self._before = {known: runs for known, runs in self._before.items() if known >= epoch}

    def applied(self, counts: Mapping[int, int]) -> dict[int, Runs]:
        """The applied batches by epoch. counts: applied units of each stream."""
        # Also epochs of which only an earlier start has applied something.
        units: dict[int, list[tuple[int, int]]] = {epoch: [] for epoch in self._before}
        static: dict[int, dict[int, int]] = {}
        for stream, count in counts.items():
            epoch = stream >> 32
            if epoch < self.closed or count <= 0:
                continue
            if stream & STATIC:
                static.setdefault(epoch, {})[stream & ~STATIC & 0xFFFF_FFFF] = count
            elif stream in self._first:
                first = self._first[stream]
                units.setdefault(epoch, []).append((first, first + count))
        for epoch, by_group in static.items():
            units.setdefault(epoch, []).extend(self._interleaved(by_group))
        return {epoch: self._batches(epoch, runs) for epoch, runs in sorted(units.items())}

    def _interleaved(self, counts: Mapping[int, int]) -> Iterable[tuple[int, int]]:
        """The units of groups that take turns."""
        groups = self._groups
        least = min(counts.get(group, 0) for group in range(groups))
        # Units that all groups have applied are one range, so that a manifest stays short.
        yield 0, least * groups
        for group, count in counts.items():
            for turn in range(least, count):
                yield turn * groups + group, turn * groups + group + 1

    def _batches(self, epoch: int, units: Iterable[tuple[int, int]]) -> Runs:
        # Batches that an earlier start applied were left out before units were formed, so both counts are joined here.
        before = self._before.get(epoch, ())
        return origin(before, ((first * self._unit, last * self._unit) for first, last in units))
