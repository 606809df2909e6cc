"""Draw how samples per second grow with hosts: `python scripts/growth_picture.py [OUT.svg]`.

One panel for each link, one line for each framework. `--probe FILE` takes another program than the reference, `--json`
prints the numbers. The picture in docs/pictures is made by this command without options; it takes a few minutes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.tools.monitor.loss_plot import COLORS, DASHES, MARKERS, MISSING, available
from topotrain.tools.prediction.flow.growth_curves import FRAMEWORKS, HOSTS, LINKS, GrowthPoint, growth, reference_probe
from topotrain.tools.probe.probe_file import load_probe

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "growth.svg"
# Read on white and on black: pages are light or dark, and a picture cannot know.
INK = "#7d7d7d"
# The last of the colors is black.
LINES = (*COLORS[:6], INK)


def draw(points: Sequence[GrowthPoint], path: Path) -> None:
    """Write the picture. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(point.link for point in points))
    # Text stays text, so that it can be searched. Without a salt each run has other names inside.
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "growth",
        "text.color": INK,
        "axes.labelcolor": INK,
    }
    with matplotlib.rc_context(settings | {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK}):
        figure = Figure(figsize=(4.2 * len(links), 4.6), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
        for panel, link in zip(panels, links, strict=True):
            for number, framework in enumerate(FRAMEWORKS):
                line = [point for point in points if (point.framework, point.link) == (framework, link)]
                panel.plot(
                    [point.hosts for point in line],
                    [point.samples_per_s for point in line],
                    label=framework,
                    color=LINES[number % len(LINES)],
                    linestyle=DASHES[number % len(DASHES)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    linewidth=1.6,
                )
            panel.set(xscale="log", yscale="log", xlabel="hosts", title=link)
            panel.grid(visible=True, alpha=0.3, color=INK)
            panel.patch.set_alpha(0.0)
        panels[0].set_ylabel("samples/s, predicted")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description="Draw how samples per second grow with hosts.")
    parser.add_argument("out", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--probe", type=Path, help="what `topotrain probe` has written")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), metavar="N")
    parser.add_argument("--json", action="store_true", help="print the numbers, too")
    options = parser.parse_args(words)
    if options.out.suffix != ".svg":
        parser.error(f"{options.out}: must end with .svg")
    if min(options.hosts) < 1:
        parser.error(f"--hosts {min(options.hosts)}: must be whole numbers >= 1")
    if not available():
        print(f"growth_picture: {MISSING}", file=sys.stderr)
        return 2
    try:
        probe = reference_probe() if options.probe is None else load_probe(options.probe)
        points = list(growth(probe, options.hosts, LINKS))
        draw(points, options.out)
    except (ConfigError, OSError) as error:
        print(f"growth_picture: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(point) for point in points]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
