"""Gradients that are not finite: where they are, and which workers send them.

A push never makes a server's value infinite or NaN. Each shard looks at the gradient of a step before it votes, and no
shard applies a step in which another one found something.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from topotrain.config.job import NonFinite
from topotrain.config.sharding import Bucket
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.ordered_sum import Part

_SQUARED = frozenset([torch.float32, torch.float64])  # the sum of squares of others soon is too large for them


def reals(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor: of complex elements both parts, in one row."""
    return torch.view_as_real(x.resolve_conj()).reshape(-1) if x.is_complex() else x


def all_finite(x: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    x = reals(x)
    # A sum is many times cheaper than a test of each element. A sum of squares is as fast as the memory, but it is too
    # large for its dtype long before an element is.
    if x.dim() == 1 and x.dtype in _SQUARED and math.isfinite(torch.dot(x, x).item()):
        return True
    if math.isfinite(x.sum().item()):
        return True
    if x.dtype is torch.float16 and bool(torch.isfinite(x.sum(dtype=torch.float32))):
        return True  # the sum was too large for the elements' dtype
    return bool(torch.isfinite(x).all())


NO_WORKER = -1  # the sum is not finite, and no worker's part explains it
_MOST_IN_A_ROW = 3  # one bad batch is no reason to end a group


def nonfinite_segment(bucket: Bucket, present: int, gradient: torch.Tensor) -> int | None:
    """A segment of the bucket's present pieces that is not finite, or None."""
    if all_finite(gradient):
        return None
    # Piece by piece only after a failure: most gradients are finite, and one pass is enough for them.
    for i, piece in enumerate(bucket.pieces):
        if present >> i & 1 and not all_finite(gradient[bucket.place(piece)]):
            return piece.segment
    return None


def look(bucket: Bucket, present: int, part: torch.Tensor) -> tuple[int | None, bool]:
    """A segment of the present pieces that is not finite, or None; and whether sums need a check."""
    numbers = reals(part)
    # An element is no larger than the root of the sum of squares, and weights are counts. Where the sum of squares fits
    # into the dtype, no weighted sum of such parts is infinite.
    if numbers.dtype in _SQUARED and math.isfinite(torch.dot(numbers, numbers).item()):
        return None, False
    return nonfinite_segment(bucket, present, part), True


def nonfinite_workers(bucket: Bucket, present: int, total: torch.Tensor, parts: Mapping[int, Part]) -> dict[int, int]:
    """The workers that make a bucket's sum not finite, each with a segment.

    Empty: the sum is finite. -1: no part explains it.
    """
    segment = nonfinite_segment(bucket, present, total)
    if segment is None:
        return {}
    # The parts are looked at only now, because a finite sum has only finite parts.
    found = {
        w: look(bucket, present, part)[0] for w, (weight, part) in parts.items() if weight > 0 and part is not None
    }
    return {worker: where for worker, where in found.items() if where is not None} or {NO_WORKER: segment}


class NonfiniteLimit(DeclaredState):
    """The number of steps in a row in which a worker's gradient was not finite.

    Args:
        policy: kFail: the first time ends the job; else the third time does, and other groups may go on.
    """

    STATE = ("_counts",)

    def __init__(self, policy: NonFinite) -> None:
        self.quarantine = policy is not NonFinite.kFail
        self.most = _MOST_IN_A_ROW if self.quarantine else 1
        self._counts: dict[tuple[int, int], dict[int, int]] = {}

    def step(self, group: int, workers: Iterable[int], optimizer: int = 0) -> int | None:
        """Count an optimizer's step that refused these workers.

        Returns one that is over the limit. -1 stands for a sum that no worker's part explains.
        """
        before = self._counts.get((group, optimizer), {})
        # A worker that is not among them starts at 0 again: only steps of an optimizer in a row count.
        self._counts[group, optimizer] = now = {worker: before.get(worker, 0) + 1 for worker in workers}
        # From the highest number, so that a worker is named before NO_WORKER.
        return next((worker for worker, count in sorted(now.items(), reverse=True) if count >= self.most), None)

    def forget(self, group: int) -> None:
        """Forget a group that is started again."""
        self._counts = {key: counts for key, counts in self._counts.items() if key[0] != group}


def local_nonfinite_message(worker: str, parameter: str, step: int, times: int, why: str = "") -> str:
    """Return the reason why a group of workers that train alone ends.

    Args:
        worker: with the gradient. Empty: the mean of the group has it, and the worker is not known.
        parameter: with the gradient.
        step: local, counted from 1.
        times: in so many steps in a row.
        why: a possible cause.
    """
    whose, gradient = (worker, "gradient") if worker else ("the group", "mean gradient")
    steps = f"{times} local steps of {whose} in a row, the last of them step {step}"
    often = steps if times > 1 else f"local step {step} of {whose}"
    text = f"the {gradient} of {parameter} is not finite in {often}; nothing of it was applied"
    return f"{text} (nonfinite: kAllow would apply it)" + (f". {why}" if why else "")


def nonfinite_message(worker: str, parameter: str, step: int, times: int, why: str = "") -> str:
    """Return the reason why a group does not go on.

    worker: "" for a sum that no worker's part explains. step: counted from 1. why: a possible cause.
    """
    where = f"of {parameter}" if parameter else "of a table's rows"
    gradient = f"the gradient {where} that {worker} pushed" if worker else f"the sum of the group's gradients {where}"
    often = f"in {times} steps in a row, the last of them step {step}" if times > 1 else f"in step {step}"
    return f"{gradient} is not finite {often}; nothing of it was applied (nonfinite: kAllow would apply it)" + (
        f". {why}" if why else ""
    )
