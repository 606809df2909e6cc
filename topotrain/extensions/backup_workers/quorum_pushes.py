"""Gradient source with backup workers: a step sums some workers' contributions."""

from collections.abc import Collection
from dataclasses import replace

import torch

from topotrain.core.protocol import NO_REVISION
from topotrain.core.server.gradients.committed_pushes import CommittedPushes


class QuorumPushes(CommittedPushes):
    """Collects complete contributions, and adds up those that the decision names."""

    may_differ = ("backwards", "hyper", "marks")  # the workers are not always at the same batch

    def forget(self, worker: int) -> None:
        super().forget(worker)
        self.members = tuple(member for member in self.members if member != worker)

    def try_stage(self) -> bool:
        """Return whether one more contribution is complete. The shard then votes again."""
        new = [worker for worker in self.commits if worker not in self.members and self._has_all(worker)]
        self.members = tuple(sorted([*self.members, *new]))
        return bool(new)

    @property
    def marks(self) -> tuple[int, ...]:
        """The data batches of the decided step, of which every worker has its own."""
        return tuple(number for _, commit in sorted(self.commits.items()) for number in commit.marks)

    def choose(self, members: Collection[int]) -> list[int]:
        """Make the step of these workers' contributions.

        Returns the other workers that had committed it.
        """
        others = [worker for worker in self.commits if worker not in members]
        hyper = [self.commits[worker].hyper for worker in sorted(members)]
        # A worker that was late has called its schedulers less often, so the hyper-parameters of most workers count. In
        # a tie these are the first ones.
        most = max(hyper, key=hyper.count)
        self.commits = {worker: replace(self.commits[worker], hyper=most) for worker in sorted(members)}
        self._find_present(self.commits)
        return others

    def nonfinite_workers(self) -> dict[int, int]:
        """As `GradientSource.nonfinite_workers`, of the complete contributions."""
        found: dict[int, int] = {}
        for at, bucket in enumerate(self._buckets):
            held = self._pushes.get(bucket.id, {})
            for worker in self.members:
                if self.commits[worker].revisions[at] == NO_REVISION:
                    continue
                part = held[worker][1]
                assert part is not None  # a step may be made without some workers of a unit, so units have no sums
                segment, large = self._look(at, worker, part)
                if segment is None and large:
                    # The other members are not known yet. A part that could make any sum infinite is refused.
                    share = torch.finfo(part.dtype).max / self.workers / max(1.0, self.commits[worker].weight)
                    segment = bucket.pieces[0].segment if float(part.abs().max()) > share else None
                if segment is not None:
                    found[worker] = segment
        return found
