"""Tables of results, with one row per job.

Numbers are rounded for readability. The JSON has the exact numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from topotrain.core.profiling.spans import PHASES
from topotrain.tools.monitor.loss_curves import Point, bars, common_loss, seconds_to
from topotrain.tools.monitor.trace_export import ProcessShare

MB = 1_000_000


def comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of reports, each with a `label` and perhaps a `curve`."""
    table, columns = Table(box=box.SIMPLE_HEAVY), list(_columns(rows))
    table.add_column("framework")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for row in rows:
        label = f"{row['label']}: failed" if row["code"] else str(row["label"])
        # As Text: rich would read brackets in a name as markup.
        table.add_row(Text(label), *(Text(cell(row)) for _, cell in columns))
    return table


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], str]]]:
    """Yield the columns of a comparison: each with its title, and its cell of a row."""
    yield "units", lambda row: str(row["layout"]["nprocs"])
    yield "samples/s", lambda row: f"{row['samples_per_s']:,.0f}"
    yield "time", lambda row: f"{row['seconds']:.1f} s"
    loss = common_loss([_curve(row) for row in rows])
    if loss is not None:
        yield f"time to loss {loss:.3g}", partial(_seconds_to, loss)
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    # Accuracy first; the sort keeps the others in their order.
    for name in sorted(names, key=lambda name: name != "accuracy"):
        yield "held-out accuracy" if name == "accuracy" else name, partial(_metric, name)
    yield "staleness mean", lambda row: f"{row['staleness_mean']:.2f}"
    yield "max", lambda row: str(row["staleness_max"])
    if any(row["server_groups_apart"] for row in rows):
        yield "server groups apart", distance
    if any(row.get("rounds") for row in rows):
        yield "rounds", _rounds_made
        yield "lost steps", lambda row: f"{row['rounds']['lost_steps']:.4g}" if row.get("rounds") else "–"
    yield "MB sent", lambda row: f"{row['bytes_out'] / MB:,.1f}"
    # Where a part of the bytes stays inside hosts, what the links carry is another number.
    if any(0 < row["bytes_link"] < row["bytes_out"] for row in rows):
        yield "MB over TCP", lambda row: f"{row['bytes_link'] / MB:,.1f}"


def _seconds_to(loss: float, row: Mapping[str, Any]) -> str:
    reached = seconds_to(_curve(row), loss)
    return "–" if reached is None else f"{reached:.1f} s"


def _metric(name: str, row: Mapping[str, Any]) -> str:
    return _value(name, row["metrics"].get(name))


def _rounds_made(row: Mapping[str, Any]) -> str:
    """Return the number of rounds with the mean number of groups in one."""
    found = row.get("rounds")
    return f"{found['count']} of {found['members_mean']:.3g}" if found and found["count"] else "–"


def losses(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the loss over time of jobs as bars, or None if no job has one."""
    points = [point for row in rows for point in _curve(row)]
    if not points:
        return None
    end, found = max(seconds for seconds, _ in points), [loss for _, loss in points]
    title = f"training loss, {max(found):.3g} to {min(found):.3g}, over {end:.1f} s"
    table = Table(box=None, title=title, title_justify="left", title_style="", show_header=False, pad_edge=True)
    for row, line in zip(rows, bars([_curve(row) for row in rows]), strict=True):
        table.add_row(Text(str(row["label"])), Text(line))
    return table


def phases(rows: Sequence[ProcessShare]) -> Table:
    """Return the time of one step by phase: a row per process, with percentages."""
    table = Table(box=box.SIMPLE_HEAVY)
    table.add_column("process")
    names = [*PHASES, "other"]
    for title in ("step", "ms", *names):
        table.add_column(title, justify="right")
    for row in rows:
        parts = [f"{row.phases[name]:.1%}" if row.phases[name] else "–" for name in names]
        table.add_row(row.who, str(row.step or "–"), f"{row.seconds * 1000:,.1f}", *parts)
    return table


def summary(data: Mapping[str, Any]) -> str:
    """Return one line about a finished job, from its report."""
    loss = "" if data["last_loss"] is None else f", loss {data['last_loss']:.4g}"
    apart = f", server groups {distance(data)} apart" if data["server_groups_apart"] else ""
    metrics = "".join(f", {name} {_value(name, value)}" for name, value in data["metrics"].items())
    return (
        f"{data['job']}: {data['framework']}, {_plural(data['layout']['nprocs'], 'unit')}, {data['steps']} steps, "
        f"{data['seconds']:.1f} s, {data['samples_per_s']:,.0f} samples/s{loss}{metrics}{apart}{_rounds(data)}"
    )


def _rounds(data: Mapping[str, Any]) -> str:
    """Describe the rounds of an outer optimizer; "": there are none."""
    found = data.get("rounds")
    if not found or not found["count"]:
        return ""
    lost = f", {found['lost_steps']:.4g} steps lost" if found["lost_steps"] else ""
    age = f" (age {found['age_mean']:.1f}, max {found['age_max']})" if found["age_max"] else ""
    return f", {_plural(found['count'], 'round')} of {found['members_mean']:.3g} groups{age}{lost}"


def distance(data: Mapping[str, Any]) -> str:
    """Describe the distance between server groups: in updates, and relative to values."""
    found = data["server_groups_apart"]
    if not found:
        return "–"
    share = "not finite" if found["share"] is None else f"{found['share']:.1%}"
    return f"{found['updates_mean']:.1f} updates (max {found['updates_max']}), {share}"


def _curve(row: Mapping[str, Any]) -> Sequence[Point]:
    found: Sequence[Point] = row.get("curve", ())
    return found


def _value(metric: str, value: float | None) -> str:
    """Format a metric, an accuracy in percent. Other metrics have no known unit."""
    if value is None:
        return "–"
    return f"{value:.1%}" if metric == "accuracy" and 0 <= value <= 1 else f"{value:.4g}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
