"""What a user wishes of an advice."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user wishes of an advice, and how long it may look.

    Attributes:
        sync: only layouts whose updates are those of one process.
        most: candidates that are rehearsed at most.
        within_s: seconds after which no further candidate is rehearsed.
    """

    sync: bool = False
    most: int = 40
    within_s: float = 60.0
