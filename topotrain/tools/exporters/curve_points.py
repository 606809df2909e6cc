"""New points of a job's curves, in the order of time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topotrain.tools.recording.job_history import HistoryStart, JobHistory


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A value of a curve.

    time: seconds since 1970. step: of a worker; for a server, the version of its values. process: a worker, a server
    or a group, or "job". name: such as "loss" or "log:accuracy". value: NaN for any number that is not finite.
    """

    time: float
    step: int
    process: str
    name: str
    value: float

    @property
    def has_worker_step(self) -> bool:
        """Whether `step` counts steps of workers, and not versions of a server."""
        return not self.process.startswith("server ")

    @property
    def tag(self) -> str:
        """The name of the curve, such as "loss/group 0"."""
        # Tools show names with equal beginnings together.
        return f"{self.name.replace(':', '/')}/{self.process}"


class CurveReader:
    """Reads from a history the points that have come since the last call."""

    def __init__(self) -> None:
        self._cursor: int | None = None

    def read(self, history: JobHistory) -> list[CurvePoint]:
        """Return the new points of the present start."""
        delta = history.since(history.start.cursor if self._cursor is None else self._cursor)
        self._cursor = delta["cursor"]
        return sorted(self._points(delta, history.start), key=lambda point: point.time)

    def _points(self, delta: dict[str, Any], start: HistoryStart) -> Iterator[CurvePoint]:
        for series in delta["series"]:
            for at, step, value in series["points"]:
                number = math.nan if value is None else float(value)
                time = start.time + at - start.at
                yield CurvePoint(time, int(step), series["of"], series["metric"], number)
