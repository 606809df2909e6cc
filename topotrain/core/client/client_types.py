"""Types between the client of a worker and its callers: steps, waits, failures."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class JobError(Exception):
    """A server's refusal in the user's words; other fields as in `message.Fail`."""

    def __init__(self, text: str, config: bool, quarantine: bool = False) -> None:
        super().__init__(text)
        self.config, self.quarantine = config, quarantine


class PeerLost(Exception):
    """A server this worker needs is gone. A consequence, hardly ever the cause."""


class Waiter(Protocol):
    """How a worker waits for what readers bring."""

    def update(self) -> AbstractContextManager[object]:
        """Exclusive access for a change. Afterwards a waiting thread checks its condition."""
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true, evaluated under exclusive access."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a step.

    version: of the values. staleness: in versions, for each shard. found_inf: a gradient was not finite.
    norm: of the gradient over all parameters, -1 if the worker did not ask for it.
    snapshot: number of the snapshot of the values after this step, 0 if there is none.
    refused: as in `message.Applied`, as pairs. leaves: the group leaves the job after this step.

    late: the group made the step without this worker's gradient and is in step `next` now. The values are those of that
    step.
    """

    version: int
    staleness: tuple[int, ...]
    found_inf: bool
    norm: float
    snapshot: int = 0
    refused: tuple[tuple[int, int], ...] = ()
    leaves: bool = False
    late: bool = False
    next: int = -1


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A worker's commit (see `message.Commit`), with bitmaps over all pieces."""

    backwards: int
    weight: float
    fetch: bool
    hyper: bytes
    marks: tuple[int, ...]
    revisions: tuple[int, ...] = ()
    edited: int = 0
    dropped: int = 0
    inv_scale: float = 1.0
    check_finite: bool = False
    clip_norm: float = 0.0
    clip_type: float = 2.0
    samples: int = 0
