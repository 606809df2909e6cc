"""Gradients that are not finite: where one is in a bucket, and who sends them again and again.

Rule: a push never makes a server's value infinite or NaN. What a step brings is looked at before any shard applies it,
with what all shards found; who is to blame is looked for only when something was found.
"""

import math
from collections.abc import Iterable

import torch

from topotrain.config.job import NonFinite
from topotrain.config.sharding import Bucket
from topotrain.core.model.finite import all_finite, reals
from topotrain.core.server.component_state import State

NOBODY = -1  # instead of a worker: the sum is not finite; instead of a parameter: it is a table's
_MOST_IN_A_ROW = 3


def spoiled(bucket: Bucket, present: int, gradient: torch.Tensor) -> int | None:
    """The segment of one of the bucket's present pieces in which an element is not finite, or None."""
    if all_finite(gradient):
        return None
    for i, piece in enumerate(bucket.pieces):
        if present >> i & 1 and not all_finite(gradient[piece.lo - bucket.lo : piece.hi - bucket.lo]):
            return piece.segment
    return None


def look(bucket: Bucket, part: torch.Tensor) -> tuple[int | None, bool]:
    """A segment of a bucket's part that is not finite, or None; and whether a sum with this part must be looked at.

    An element is no larger than the root of the sum of squares, and weights are counts: where that sum fits into the
    dtype, no weighted sum of such parts is infinite.
    """
    numbers = reals(part)
    if numbers.dtype in (torch.float32, torch.float64) and math.isfinite(torch.dot(numbers, numbers).item()):
        return None, False
    return spoiled(bucket, (1 << len(bucket.pieces)) - 1, part), True


class NonfiniteLimit:
    """How many steps in a row had something of a worker that was not finite.

    Args:
        policy: kFail: once is too often, and the job ends; else the third time is, and others may go on.
    """

    def __init__(self, policy: NonFinite) -> None:
        self.quarantine = policy is not NonFinite.kFail
        self.most = _MOST_IN_A_ROW if self.quarantine else 1
        self._counts: dict[int, dict[int, int]] = {}

    def step(self, group: int, workers: Iterable[int]) -> int | None:
        """A step of the group is over, and these of its workers (or NOBODY) were refused; returns who is too often."""
        before = self._counts.get(group, {})
        self._counts[group] = now = {worker: before.get(worker, 0) + 1 for worker in workers}
        return next((worker for worker, count in sorted(now.items(), reverse=True) if count >= self.most), None)

    def forget(self, group: int) -> None:
        """The group is started again."""
        self._counts.pop(group, None)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"counts": self._counts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._counts = {group: dict(counts) for group, counts in state["counts"].items()}


def complaint(who: str, parameter: str, step: int, times: int, why: str = "") -> str:
    """Why a group does not go on. step: counted from 1. why: what may have led there."""
    whose = f"of {parameter}" if parameter else "of a table's rows"
    said = f"the gradient {whose} that {who} pushed" if who else f"the sum of the group's gradients {whose}"
    often = f"in {times} steps in a row, the last of them step {step}" if times > 1 else f"in step {step}"
    return f"{said} is not finite {often}; nothing of it was applied (nonfinite: kAllow would apply it)" + (
        f". {why}" if why else ""
    )
