"""The types that the client of a worker exchanges with its callers: waiting, a step's end and outcome, failures."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from topotrain.core import protocol as m


class JobError(Exception):
    """A server refuses to go on, and why, in the user's words; config, quarantine: as in message.Fail."""

    def __init__(self, text: str, config: bool, quarantine: bool = False) -> None:
        super().__init__(text)
        self.config, self.quarantine = config, quarantine


class PeerLost(Exception):
    """A server this worker needs is gone. A consequence, hardly ever the cause."""


class Waiter(Protocol):
    """How a worker waits for what readers bring."""

    def update(self) -> AbstractContextManager[object]:
        """Exclusive access for a change; whoever waits looks again afterwards."""
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true, evaluated under exclusive access."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a step: staleness per shard (versions), found_inf, global gradient norm (-1: not asked for).

    snapshot: of the values as this step has left them one is taken under this number; 0: none. refused: as in
    message.Applied, as pairs. leaves: the group leaves the job after it.

    late: it was made without what this worker had pushed; the group is in step `next` now, and the values are those.
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
    """What a worker says of a step when it commits it (see message.Commit); bitmaps are over all pieces of the map."""

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


def present_body(message: m.Message) -> torch.Tensor:
    """The body of a message that must have one. Raises ProtocolError."""
    if message.body is None:
        raise m.ProtocolError(f"{type(message).__name__} without a body")
    return message.body
