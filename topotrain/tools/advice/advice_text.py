"""An advice as text.

The text has one table, a sentence for each layout, and the winner's job file.
"""

import textwrap
from collections.abc import Iterator, Sequence

from topotrain.config.job import Job
from topotrain.config.job_file import dumps
from topotrain.tools.advice.advice import Advice, host_memory, host_traffic
from topotrain.tools.advice.candidate import LeftOut
from topotrain.tools.advice.layout_search import Rehearsed
from topotrain.tools.plan.layout_plan import MB, columns
from topotrain.tools.prediction.measured_errors import error_in_words

WIDTH = 120
SHOWN = 24
"""Layouts that are listed at most; `--json` has all."""
_HEAD = ("layout", "samples/s", "±", "memory MB", "traffic MB", "staleness", "changes")


def explain(advice: Advice) -> str:
    """Return the advice as text."""
    shown = advice.rehearsed[:SHOWN]
    lines = [*_table(advice, shown), ""]
    if len(advice.rehearsed) > len(shown):
        lines += [f"{len(advice.rehearsed) - len(shown)} slower layouts: see --json", ""]
    lines += [_units(advice), ""]
    lines += [*_section("does not fit into memory:", advice.refused)]
    lines += [*_section("not considered:", _grouped(advice.left_out))]
    return "\n".join([*lines, *_verdict(advice)])


def _table(advice: Advice, shown: Sequence[Rehearsed]) -> Iterator[str]:
    head, *rows = columns(_HEAD, [_cells(each) for each in shown])
    yield head
    for row, each in zip(rows, shown, strict=True):
        yield row
        yield from _wrapped(advice.reason(each), "    ")


def _cells(one: Rehearsed) -> tuple[str, ...]:
    staleness = one.prediction.staleness
    stale = f"{staleness.mean:.1f}, ≤ {staleness.max:.0f}" if staleness.max else "0"
    return (
        one.candidate.label,
        f"{one.samples_per_s:,.0f}",
        "–" if one.prediction.error is None else f"{one.prediction.error * 100:.0f} %",
        f"{host_memory(one) / MB:,.1f}",
        f"{host_traffic(one) / MB:,.2f}",
        stale,
        ", ".join(one.candidate.changes) or "–",
    )


def _units(advice: Advice) -> str:
    where = "to other hosts" if advice.machines.hosts > 1 else "between processes"
    text = (
        "memory: training state on the fullest host, without activations and torch itself. "
        f"traffic: sent {where} by all processes for each step of a worker. staleness: mean and most, in updates. "
        "changes: what makes the updates others than those of one process"
    )
    return "\n".join(_wrapped(text, ""))


def _section(title: str, found: Sequence[LeftOut]) -> Iterator[str]:
    if found:
        yield title
        for each in found:
            yield from _wrapped(f"{each.what}: {each.why}", "  ")
        yield ""


def _grouped(found: Sequence[LeftOut]) -> list[LeftOut]:
    """Return reasons with all that they hold for."""
    reasons: dict[str, list[str]] = {}
    for each in found:
        reasons.setdefault(each.why, []).append(each.what)
    return [LeftOut("; ".join(what), why) for why, what in reasons.items()]


def _verdict(advice: Advice) -> Iterator[str]:
    winner = advice.winner
    if advice.late:
        text = (
            f"the time has ended the search: within {advice.wishes.within_s:g} s {advice.late} layouts were not looked "
            "at, and one of them may be faster; a longer --within looks at more"
        )
        yield from _wrapped(text, "")
    yield from _wrapped(f"advised: {winner.candidate.label}: {speed(winner)}; {advice.reason(winner)}", "")
    exact = advice.best_exact
    if not winner.is_exact:
        changes = ", ".join(winner.candidate.changes)
        other = "" if exact is None else f"; --sync advises {exact.candidate.label}: {speed(exact)}"
        yield from _wrapped(f"it changes the statistics of the training ({changes}){other}", "")


def speed(one: Rehearsed) -> str:
    """Return the predicted speed with its error."""
    return f"{one.samples_per_s:,.0f} samples/s {error_in_words(one.prediction.error)}"


def job_text(advice: Advice, job: Job) -> str:
    """Return the text of a job file, with the reason as a comment.

    job: that of the winner, with its program.
    """
    winner = advice.winner
    hosts = winner.candidate.used
    where = "one host" if hosts == 1 else f"{hosts} hosts, one unit on each"
    said = [
        f"Advised by `topotrain advise` for {where}: {winner.candidate.label}.",
        f"Predicted: {speed(winner)}; {advice.reason(winner)}.",
    ]
    if not winner.is_exact:
        said.append(f"It changes the statistics of the training: {', '.join(winner.candidate.changes)}.")
    comments = [line for text in said for line in textwrap.wrap(text, WIDTH - 2)]
    return "".join(f"# {line}\n" for line in comments) + dumps(job)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
