"""Loss over time: the curve of a job, and several jobs as bars of text or as a picture.

The bars show at a glance what the picture shows, on a terminal and without matplotlib. The lines of the picture differ
by color, dash and marker, for readers without color vision.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import log
from pathlib import Path

from topotrain.config.private_files import open_file

Point = tuple[float, float]
"""A loss, after the seconds since the first step."""
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
LOGARITHMIC = 30
"""From this ratio of the largest loss to the smallest on, losses are shown on a logarithmic scale."""
ENDINGS = (".png", ".pdf", ".svg")
"""Endings of the files that a picture can be written to."""
MISSING = "the picture needs matplotlib: pip install 'topotrain[plot]'"

# Okabe and Ito (2008), "Color Universal Design", without its yellow, which is too pale for a line on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _mean(points: Sequence[Point]) -> Point:
    return sum(t for t, _ in points) / len(points), sum(loss for _, loss in points) / len(points)


def merge(curves: Sequence[Sequence[Point]], bins: int = 60) -> list[Point]:
    """Merge several curves into one, as means per time bin. Empty bins are left out."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    end = max(curve[-1][0] for curve in curves)
    # No more than an average curve has points, so that a short run is shown step by step.
    bins = max(1, min(bins, sum(map(len, curves)) // len(curves)))
    means: list[list[Point]] = [[] for _ in range(bins)]
    for curve in curves:
        inside: dict[int, list[Point]] = {}
        for point in curve:
            inside.setdefault(min(int(point[0] / end * bins), bins - 1) if end > 0 else 0, []).append(point)
        for index, points in inside.items():
            # Each curve counts once in a bin, also one of a worker with more steps.
            means[index].append(_mean(points))
    return [_mean(points) for points in means if points]


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
    if _falls_far(losses):
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


def _falls_far(losses: Sequence[float]) -> bool:
    return bool(losses) and min(losses) > 0 and max(losses) / min(losses) > LOGARITHMIC


def available() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return find_spec("matplotlib") is not None


def draw(curves: Mapping[str, Sequence[Point]], path: Path, title: str = "loss over time") -> None:
    """Write a PNG to `path`; curves: (seconds, loss) points by label.

    Raises ImportError without matplotlib.
    """
    # Imported here: it is an extra, and slow to load.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not by pyplot, which chooses a window system and keeps every figure.
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(curves.items()):
        axes.plot(
            [time for time, _ in points],
            [loss for _, loss in points],
            label=label,
            color=COLORS[number % len(COLORS)],
            linestyle=DASHES[number % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)],
            # A few markers per line tell lines apart without color; one per point would hide them.
            markevery=max(1, len(points) // 8),
            markersize=5,
            linewidth=1.8,
        )
    losses = [loss for points in curves.values() for _, loss in points]
    if _falls_far(losses):
        axes.set_yscale("log")
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("training loss")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    if curves:
        axes.legend()
    # Private from the first byte on, whatever the umask.
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        figure.savefig(file, format="png")
