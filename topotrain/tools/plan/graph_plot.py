"""A picture of a partitioned graph: a lane per worker, time to the right.

Arrows show transfers, with their bytes.
"""

from pathlib import Path
from typing import Any

from topotrain.parallel.estimate.cost_report import CostReport
from topotrain.parallel.estimate.fake_run import refs
from topotrain.parallel.program.segments import LayoutSegment, stretches, words_of
from topotrain.parallel.program.split_program import LocationKind
from topotrain.tools.monitor.loss_curves import COLORS
from topotrain.tools.plan.model_cut import amount

# The color of each layout. The text in the boxes gives the layout, too, for readers without color vision.
_COLORS = {
    LocationKind.BATCH: COLORS[0],
    LocationKind.FEATURE: COLORS[2],
    LocationKind.AT: COLORS[1],
    LocationKind.SAME: COLORS[6],
}
_HALF = 0.36


def draw(bill: CostReport, path: Path, title: str = "the cut graph") -> None:
    """Write a picture to `path`, which must end with one of `loss_curves.ENDINGS`.

    Raises ImportError without matplotlib, and OSError where the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, workers = stretches(bill.program), bill.program.workers
    # A model of hundreds of segments must still give a picture that viewers open.
    width = min(60.0, max(7.0, 1.9 * (len(found) + 2)))
    figure = Figure(figsize=(width, max(2.5, 1.3 * workers + 1.2)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stretch in found:
        for worker in range(workers):
            if stretch.layout.on(worker):
                _box(axes, stretch, worker, bill)
    _arrows(axes, bill, found)
    axes.set_xlim(-0.9, len(found) - 0.1)
    # Downwards: worker 0 is at the top.
    axes.set_ylim(workers - 0.4, -0.6)
    axes.set_yticks(range(workers), [f"worker {worker}\n{_held(bill, worker)}" for worker in range(workers)])
    axes.set_xticks([-0.8, len(found) - 0.2], ["batch", "output"])
    axes.set_title(title)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _held(bill: CostReport, worker: int) -> str:
    one = bill.workers[worker]
    return f"{amount(one.parameters)} parameters\n{amount(one.peak)} activations"


def _box(axes: Any, stretch: LayoutSegment, worker: int, bill: CostReport) -> None:
    from matplotlib.patches import FancyBboxPatch

    color = _COLORS.get(stretch.layout.where, COLORS[3])
    corner, size = (stretch.number - _HALF, worker - 0.28), (2 * _HALF, 0.56)
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0.02", facecolor=color, alpha=0.18, linewidth=0))
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0.02", fill=False, edgecolor=color, linewidth=1.4))
    costs = bill.steps[worker]
    work = sum(costs[step.number].flops + costs[step.number].backward_flops for step in stretch.steps)
    names = "\n".join(_fit(name) for name in stretch.title().replace(" … ", ", … ").split(", "))
    axes.text(
        stretch.number,
        worker,
        f"{names}\n{words_of(stretch.layout)}\n{work / 1e6:,.1f} MFLOP",
        ha="center",
        va="center",
        fontsize=6.5,
    )


def _fit(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _arrows(axes: Any, bill: CostReport, found: tuple[LayoutSegment, ...]) -> None:
    """Draw an arrow from the segment that makes a value to its first remote reader."""
    made = {step.number: stretch.number for stretch in found for step in stretch.steps}
    read: dict[int, int] = {}
    for stretch in found:
        for step in stretch.steps:
            for ref in refs(step):
                if ref.edge is not None:
                    read.setdefault(ref.edge, stretch.number)
    for one in bill.edges:
        # The batch is made before all segments, and an output is read after them.
        start, end = made.get(one.edge.value, -1), read.get(one.edge.number, len(found))
        for (source, target), size in one.forward.items():
            tail = (start + _HALF if start >= 0 else -0.8, source)
            head = (end - _HALF if end < len(found) else len(found) - 0.2, target)
            axes.annotate(
                "", xy=head, xytext=tail, arrowprops={"arrowstyle": "-|>", "color": "#444444", "linewidth": 0.9}
            )
            middle = (tail[0] + 0.4 * (head[0] - tail[0]), tail[1] + 0.4 * (head[1] - tail[1]))
            axes.text(*middle, amount(size), fontsize=6, ha="center", va="center", backgroundcolor="#ffffffcc")
