"""Figures as pages: a section per table, and RESULTS.md, where every goal stands with what was measured for it."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness import Row
from benchmarks.reasons import REASONS, SOURCES, goals_of
from benchmarks.record import Table

_SIGNS = {"<=": "≤", ">=": "≥", "<": "<"}


def number(value: float | None) -> str:
    """Three digits that count; "–" for none."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def bound(text: str) -> str:
    """A bound as people write it."""
    sign, _, limit = text.partition(" ")
    return f"{_SIGNS[sign]} {limit}" if text else "–"


def verdict(row: Row) -> str:
    """Whether a row's goal is met."""
    if row.met is None:
        return "not measured" if row.figure is None and row.bound else "–"
    return "met" if row.met else "**not met**"


def figure(row: Row) -> str:
    """The median, its unit, and the range over the rounds."""
    if row.figure is None:
        return "–"
    spread = f" ({number(row.low)}–{number(row.high)})" if row.low is not None else ""
    return f"{number(row.figure)} {row.unit}{spread}"


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in rows)


def section(table: Table) -> str:
    """All rows of one table."""
    lines = [[r.goal or "–", r.what, r.mode or "–", bound(r.bound), figure(r), verdict(r), r.note] for r in table.rows]
    head = ["goal", "work", "mode", "bound", "median (min–max)", "", "remark"]
    if any(row.processor_ms is not None for row in table.rows):
        head[-1:-1] = ["CPU ms per step", "per MB"]
        for line, measured in zip(lines, table.rows, strict=True):
            line[-1:-1] = [number(measured.processor_ms), number(_per_megabyte(measured))]
    warning = f"{disturbance(table)}\n\n" if table.disturbed else ""
    return f"## {table.title}\n\n`{table.command}`\n\n{warning}{grid(head, lines)}\n"


def _per_megabyte(row: Row) -> float | None:
    """CPU milliseconds of a step for each MiB of the model's parameters."""
    return None if row.processor_ms is None or not row.megabytes else row.processor_ms / row.megabytes


def disturbance(table: Table) -> str:
    """The warning about a table that was measured on a busy machine."""
    share = f"{(table.others or 0.0) + (table.stolen or 0.0):.0%}"
    return f"**The machine was busy: {share} of its processor time went elsewhere. Times and ratios here say nothing.**"


_INTRODUCTION = """# Results

Written by `make bench`; do not edit. A figure is a ratio of medians from one run in which all sides took turns, in
another order in each round, with the lowest and highest ratio of a round behind it. One thread per process. Peers use
fused kernels, too. Times of different tables, or of different days, cannot be compared: look at the ratios.

"CPU ms per step" is the processor time of all processes of a side, launcher included, and "per MB" divides it by the
MiB of the model's parameters. "Others" is the share of the machine's processor time that other programs had meanwhile.

Where a goal is not met the page says why, as far as it is known.

Digests of what synchronous jobs end with are no figures and stand apart, in [digests.json](results/digests.json), by
`python -m benchmarks.digests`: see [what stays exact](../docs/exactness.md#the-record-of-digests).
"""


def results(tables: Sequence[Table], goals: Mapping[str, str], homes: Mapping[str, Sequence[str]]) -> str:
    """The whole page.

    Args:
        tables: those that have been measured.
        goals: "P1" -> what the goal is about, in order.
        homes: "P1" -> the tables that measure it.
    """
    parts = [_INTRODUCTION, "## The goals\n", _goals(tables, goals, homes), "", *_reasons(tables)]
    parts += ["## The runs\n", runs(tables), ""]
    return "\n".join(parts + [section(table) for table in tables])


def _reasons(tables: Sequence[Table]) -> list[str]:
    """Of the goals that are not met just now."""
    missed = {row.goal for table in tables for row in table.rows if row.met is False}
    sources = [table for table in tables if table.name in SOURCES]
    lines: list[str] = []
    for goal, text in REASONS.items():
        if goal in missed:
            lines.append(f"* {goal}: {text}")
            rows = [(table, row) for table in sources for row in table.rows if goal in goals_of(row.what)]
            lines += [f"  * {_in_words(row)} ([{table.name}](#{anchor(table.title)}))" for table, row in rows]
    unmeasured = [name for name in SOURCES if name not in {table.name for table in sources}]
    commands = " and ".join(f"`python -m benchmarks.{name}`" for name in unmeasured)
    more = [f"\nWhat this machine can do at best is not measured here: {commands} measure it."] if commands else []
    return ["## Why some are not met\n", *lines, *more, ""] if lines else []


def _in_words(row: Row) -> str:
    mode = f", {row.mode}" if row.mode else ""
    return f"{row.what}{mode}: {figure(row)}. {row.note}".rstrip(". ")


def _goals(tables: Sequence[Table], goals: Mapping[str, str], homes: Mapping[str, Sequence[str]]) -> str:
    lines: list[list[str]] = []
    for goal, about in goals.items():
        found = [(table, row) for table in tables for row in table.rows if row.goal == goal and row.bound]
        for table, row in found:
            lines.append([goal, row.what, row.mode or "–", bound(row.bound), figure(row), verdict(row), row.note])
            lines[-1].append(f"[{table.name}](#{anchor(table.title)})")
        if not found:
            where = ", ".join(homes.get(goal, ()))
            lines.append([goal, about, "–", "–", "–", "not measured", "", where])
    return grid(["goal", "work", "mode", "bound", "median (min–max)", "", "remark", "table"], lines)


def runs(tables: Sequence[Table]) -> str:
    """Where the figures of these tables come from."""
    machines = list(dict.fromkeys(table.machine for table in tables))
    letters = {machine: chr(ord("A") + number) for number, machine in enumerate(machines)}
    lines = [
        [
            table.name,
            f"`{table.command}`",
            f"`{table.commit}`",
            letters[table.machine],
            f"{table.seconds:.0f} s",
            "–" if table.others is None else f"{table.others + (table.stolen or 0.0):.0%}",
        ]
        for table in tables
    ]
    named = "\n".join(f"Machine {letters[machine]}: {machine}.  " for machine in machines)
    return grid(["table", "command", "commit", "machine", "took", "others"], lines) + f"\n\n{named}"


def anchor(title: str) -> str:
    """The name that a heading has in links."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
