"""The wishes of a user for an advice."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of a user for an advice, and how long its search may take.

    Attributes:
        sync: only layouts with the updates of one process.
        most: candidates that are rehearsed at most.
        within_s: seconds after which no further candidate is rehearsed.
    """

    sync: bool = False
    most: int = 40
    within_s: float = 60.0
