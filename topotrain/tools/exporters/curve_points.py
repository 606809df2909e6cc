"""New points of a job's curves, in the order of time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topotrain.tools.recording.job_history import JobHistory

_LEFT_OUT = ("bytes_per_s",)
"""Of these curves there is one for each pair of processes."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A value of a curve.

    time: seconds since 1970. process: the worker, server or group, or "job". name: such as "loss" and "log:accuracy".
    """

    time: float
    step: int
    process: str
    name: str
    value: float

    @property
    def tag(self) -> str:
        """The name of the curve, such as "loss/group 0": tools show equal beginnings together."""
        return f"{self.name.replace(':', '/')}/{self.process}"


class CurveReader:
    """Reads from a history the points that have come since the last call."""

    def __init__(self) -> None:
        self._cursor = 0
        self._started = 0.0

    def read(self, history: JobHistory) -> list[CurvePoint]:
        """Return the new points."""
        delta = history.since(self._cursor)
        self._cursor = delta["cursor"]
        self._started = (delta.get("job") or {}).get("started") or self._started
        return sorted(self._points(delta), key=lambda point: point.time)

    def _points(self, delta: dict[str, Any]) -> Iterator[CurvePoint]:
        for series in delta.get("series", ()):
            if series["metric"] not in _LEFT_OUT:
                for at, step, value in series["points"]:
                    yield CurvePoint(self._started + at, int(step), series["of"], series["metric"], value)
