"""How often each batch counts in the values of a simulated job.

A batch adds 1 to its cells, once. Where server groups add, a cell is 1 from then on. Where they average, the sum over
the groups is 1, and the mean a part of it. With elastic averaging the center has a part that depends on the exchanges,
and the sum of the center and of all groups is 1.
"""

from collections.abc import Sequence

import torch
from faulty_cluster import FaultyCluster

from topotrain.config.job import Agreement
from topotrain.config.topology import Topology
from topotrain.core.server.server import Server
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotSource
from topotrain.extensions.group_averaging.elastic_averaging import ElasticAveraging

_ROUNDING = 1e-3
"""Parts of a batch are added in any order. A batch that is lost, or counts twice, is a whole number."""


class InvariantViolated(Exception):
    """The job violates an invariant, which the text describes."""


class BatchCounts:
    """The counts of batches in the result of a job, or in a snapshot of it."""

    def __init__(self, topology: Topology) -> None:
        agreement = topology.cluster.agreement if topology.synced else Agreement.kMaster
        self.exact = agreement is Agreement.kMaster
        """Whether a cell is 0 or 1 at any moment, on every server."""
        self.elastic = agreement is Agreement.kElastic
        self._groups = topology.server_groups

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The counts by the values of one model, cell by cell."""
        if self.exact:
            return values
        if self.elastic:
            # What part of a batch is in the center is not known; but all of it, and nothing else, is in some group.
            return torch.where((values > 0) & (values <= 1 + _ROUNDING), torch.ones_like(values), values)
        return _rounded(values * self._groups)

    def check_sums(self, cluster: FaultyCluster, cells: int, before: SnapshotSource | None) -> None:
        """Check an ended job with elastic averaging by the sums of all groups.

        cells: how many each parameter begins with. before: the snapshot that the job has started from.

        Raises:
            InvariantViolated: a batch was lost, or counted twice.
        """
        if not self.elastic:
            return
        start = [torch.zeros(parameter.count) for parameter in cluster.map.parameters]
        for parameter, values in zip(cluster.map.parameters, start, strict=True):
            if before is not None:
                before.values(parameter.name, 0, values)
        for shard in range(cluster.topology.shards):
            _check_shard([cluster.server(group, shard) for group in range(self._groups)], cells, start)


def _check_shard(servers: Sequence[Server], cells: int, start: Sequence[torch.Tensor]) -> None:
    """Check the same shard of all server groups."""
    first = servers[0].state.known
    mine = first.group_sync
    assert isinstance(mine, ElasticAveraging)
    for bucket in first.buckets:
        # Of other buckets server group 0 has the result in the place of its own value.
        if bucket.id not in mine.centers:
            continue
        total = sum((each.state.known.values(bucket.id) for each in servers), mine.centers[bucket.id])
        for piece in bucket.pieces:
            segment = first.map.segments[piece.segment]
            lo = segment.start + piece.lo - segment.lo
            part = total[piece.lo - bucket.lo : piece.hi - bucket.lo]
            before = start[segment.parameter][lo : lo + part.numel()]
            # All groups and the center have started with the same value, and new batches with 0.
            counts = _rounded(part - (len(servers) + 1) * before + (before > 0))
            seen = counts[: max(0, cells - lo)]
            if (seen != 1).any():
                cell = int((seen != 1).nonzero()[0])
                raise InvariantViolated(f"cell {lo + cell} of p{segment.parameter} counts {float(seen[cell]):g}")


def _rounded(counts: torch.Tensor) -> torch.Tensor:
    whole = counts.round()
    return torch.where((counts - whole).abs() < _ROUNDING, whole, counts)
