"""Loss over time of several jobs as text, as bars.

It shows at a glance what the picture shows, on a terminal and without matplotlib.
"""

from collections.abc import Sequence
from math import log

from topotrain.tools.monitor.progress.process_tally import Point

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48

LOGARITHMIC = 30
"""From this ratio of the largest loss to the smallest on, losses are shown on a logarithmic scale."""


def common_loss(curves: Sequence[Sequence[Point]]) -> float | None:
    """Return the lowest loss that all jobs with a curve have reached, or None."""
    lowest = [min(loss for _, loss in curve) for curve in curves if curve]
    return max(lowest) if lowest else None


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Return the time at which a job first had this loss or less; None: it never had."""
    return next((seconds for seconds, found in curve if found <= loss), None)


def bars(curves: Sequence[Sequence[Point]], width: int = WIDTH) -> list[str]:
    """Return a line of bars for each curve; all have the same scales of time and loss.

    A job that ends earlier has a shorter line. A curve without points has an empty one.
    """
    points = [point for curve in curves for point in curve]
    if not points:
        return [""] * len(curves)
    end = max(seconds for seconds, _ in points)
    losses = [loss for _, loss in points]
    low, high = min(losses), max(losses)
    # As the picture has it: a loss that falls far is shown by its logarithm.
    if low > 0 and high / low > LOGARITHMIC:
        low, high = log(low), log(high)
        curves = [[(seconds, log(loss)) for seconds, loss in curve] for curve in curves]
    return [_line(curve, width, end, low, high) for curve in curves]


def _line(curve: Sequence[Point], width: int, end: float, low: float, high: float) -> str:
    heights: dict[int, int] = {}
    for seconds, loss in curve:
        column = min(int(seconds / end * width), width - 1) if end > 0 else 0
        # Of several losses in a column the last one, which is the newest.
        heights[column] = round((loss - low) / (high - low) * (len(BARS) - 1)) if high > low else 0
    found, height = "", None
    for column in range(max(heights, default=-1) + 1):
        height = heights.get(column, height)
        # No loss is known before the first point.
        found += " " if height is None else BARS[height]
    return found
