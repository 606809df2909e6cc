"""Results as tables for a reader: one row per job. Numbers are rounded for the eye; the JSON beside them is exact."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from topotrain.core.profiling.spans import PHASES
from topotrain.tools.monitor.trace_export import ProcessShare

MB = 1_000_000
FULL_WIDTH = 160


def console(stderr: bool = False) -> Console:
    """A console that never cuts a table when its output goes to a file or a pipe."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=FULL_WIDTH)


def comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Frameworks side by side. `rows` are reports (`Report.as_data`) with a `label`; a job that failed says so."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    names.sort(key=lambda name: name != "accuracy")
    table = Table(box=box.SIMPLE_HEAVY)
    table.add_column("framework")
    apart = any(row["server_groups_apart"] for row in rows)
    groups = ["server groups apart"] if apart else []
    numbers = ["units", "samples/s", "time", *map(_title, names), "staleness mean", "max", *groups, "MB sent"]
    for title in numbers:
        table.add_column(title, justify="right")
    for row in rows:
        label = f"{row['label']}: failed" if row["code"] else str(row["label"])
        table.add_row(Text(label), *map(Text, _cells(row, names, apart)))
    return table


def phases(rows: Sequence[ProcessShare]) -> Table:
    """Where the time of one step went: a row per process, each phase's part of it in percent."""
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
    """One line about a finished job, from its report."""
    loss = "" if data["last_loss"] is None else f", loss {data['last_loss']:.4g}"
    apart = f", server groups {distance(data)} apart" if data["server_groups_apart"] else ""
    metrics = "".join(f", {name} {_value(name, value)}" for name, value in data["metrics"].items())
    return (
        f"{data['job']}: {data['framework']}, {_plural(data['layout']['nprocs'], 'unit')}, {data['steps']} steps, "
        f"{data['seconds']:.1f} s, {data['samples_per_s']:,.0f} samples/s{loss}{metrics}{apart}"
    )


def distance(data: Mapping[str, Any]) -> str:
    """How far server groups were from each other, as updates of others that an exchange brings, and in the values."""
    found = data["server_groups_apart"]
    if not found:
        return "–"
    share = "not finite" if found["share"] is None else f"{found['share']:.1%}"
    return f"{found['updates_mean']:.1f} updates (max {found['updates_max']}), {share}"


def _cells(row: Mapping[str, Any], names: Sequence[str], apart: bool) -> list[str]:
    return [
        str(row["layout"]["nprocs"]),
        f"{row['samples_per_s']:,.0f}",
        f"{row['seconds']:.1f} s",
        *(_value(name, row["metrics"].get(name)) for name in names),
        f"{row['staleness_mean']:.2f}",
        str(row["staleness_max"]),
        *([distance(row)] if apart else []),
        f"{row['bytes_out'] / MB:,.1f}",
    ]


def _title(metric: str) -> str:
    return "held-out accuracy" if metric == "accuracy" else metric


def _value(metric: str, value: float | None) -> str:
    """An accuracy is a fraction and reads better in percent; nothing is known about other metrics."""
    if value is None:
        return "–"
    return f"{value:.1%}" if metric == "accuracy" and 0 <= value <= 1 else f"{value:.4g}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
