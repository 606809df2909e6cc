"""The difference of a group, of which each worker pushes a share."""

from collections.abc import Collection
from dataclasses import replace

from topotrain.core.server.gradients.committed_pushes import CommittedPushes
from topotrain.core.server.ordered_sum import Part


class SharedPushes(CommittedPushes):
    """Takes each bucket from the worker that has pushed it.

    The others of its group have the same values.
    """

    def _parts(self, at: int) -> dict[int, Part]:
        return {worker: part for worker, part in super()._parts(at).items() if part[1] is not None}

    def refuse(self, workers: Collection[int]) -> bool:
        """Leave out the whole step: the rest would be no step of the group."""
        self.commits = {worker: replace(commit, weight=0.0) for worker, commit in self.commits.items()}
        return False
