"""A plot of loss over time, with one line per job.

Lines differ by color, dash and marker, for readers without color vision.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from topotrain.config.private_files import open_file
from topotrain.tools.monitor.loss_bars import LOGARITHMIC

ENDINGS = (".png", ".pdf", ".svg")
"""Endings of the files that a picture can be written to."""
MISSING = "the picture needs matplotlib: pip install 'topotrain[plot]'"

# Okabe and Ito (2008), "Color Universal Design", without its yellow, which is too pale for a line on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def available() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return find_spec("matplotlib") is not None


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str = "loss over time") -> None:
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
    if losses and min(losses) > 0 and max(losses) / min(losses) > LOGARITHMIC:
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
