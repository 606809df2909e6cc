"""The loss of a worker group as points that are not too close to each other."""

from dataclasses import dataclass

GROUP_S = 0.5
"""Seconds between two points, except the last one."""


@dataclass(slots=True)
class GroupLoss:
    """Holds the newest point of a group until it is time for it, or the job has ended."""

    _added: float | None = None
    _held: tuple[float, int, float] | None = None

    def take(self, at: float, step: int, loss: float) -> None:
        """Hold a point in place of the one that is held."""
        self._held = at, step, loss

    def is_due(self, at: float) -> bool:
        """Whether a point is held for which it is time."""
        return self._held is not None and (self._added is None or at - self._added >= GROUP_S)

    def release(self) -> list[tuple[float, int, float]]:
        """Return the point that is held, if there is one: time, step and loss."""
        held, self._held = self._held, None
        if held is None:
            return []
        self._added = held[0]
        return [held]
