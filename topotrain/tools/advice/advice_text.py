"""An advice as text: a table, a sentence for each layout, and the job file."""

import textwrap
from collections.abc import Iterator, Sequence

from topotrain.config.job_file import dumps
from topotrain.tools.advice.advice import Advice, Rehearsed
from topotrain.tools.advice.candidate import LeftOut
from topotrain.tools.plan.layout_plan import MB, columns
from topotrain.tools.prediction.rehearsable import MOST_PROCESSES
from topotrain.tools.prediction.speed_bounds import SpeedBound

WIDTH = 120
_HEAD = ("layout", "samples/s", "±", "memory MB", "traffic MB", "staleness", "changes")
_BOUNDS = f"bounds by arithmetic (above {MOST_PROCESSES} workers and servers, or after --within, nothing is rehearsed):"


def explain(advice: Advice) -> str:
    exact = advice.best_exact
    head, *rows = columns(_HEAD, [_cells(each, each is exact) for each in advice.rehearsed])
    lines = [head]
    for row, each in zip(rows, advice.rehearsed, strict=True):
        lines += [row, *_wrapped(each.reason, "    ")]
    where = "to other hosts" if advice.machines.hosts > 1 else "between processes"
    text = (
        "*: the fastest that changes nothing, for any script. "
        "memory: training state on the fullest host, without activations and torch itself. "
        f"traffic: sent {where} by all processes for each step of a worker. staleness: mean and most, in updates. "
        "changes: what makes the updates others than those of one process"
    )
    lines += ["", *_wrapped(text, ""), ""]
    lines += _section(_BOUNDS, [LeftOut(candidate.label, _at_most(bound)) for candidate, bound in advice.bounded])
    lines += _section("does not fit into memory:", advice.refused)
    lines += _section("not considered:", _grouped(advice.left_out))
    return "\n".join([*lines, *_verdict(advice)])


def _at_most(bound: SpeedBound) -> str:
    return f"at most {bound.samples_per_s:,.0f} samples/s: {bound.limit}"


def _cells(one: Rehearsed, is_marked: bool) -> tuple[str, ...]:
    staleness, error = one.prediction.staleness, one.prediction.error
    return (
        one.candidate.label + " *" * is_marked,
        f"{one.samples_per_s:,.0f}",
        "–" if error is None else f"{error * 100:.0f} %",
        f"{one.memory_bytes / MB:,.1f}",
        f"{one.traffic_bytes / MB:,.2f}",
        f"{staleness.mean:.1f}, ≤ {staleness.max:.0f}" if staleness.max else "0",
        ", ".join(one.candidate.changes) or "–",
    )


def _section(title: str, found: Sequence[LeftOut]) -> Iterator[str]:
    if found:
        yield title
        for each in found:
            yield from _wrapped(f"{each.what}: {each.why}", "  ")
        yield ""


def _grouped(found: Sequence[LeftOut]) -> list[LeftOut]:
    reasons: dict[str, list[str]] = {}
    for each in found:
        reasons.setdefault(each.why, []).append(each.what)
    return [LeftOut("; ".join(what), why) for why, what in reasons.items()]


def _verdict(advice: Advice) -> Iterator[str]:
    winner, exact = advice.winner, advice.best_exact
    if advice.bounded and advice.bounded[0][1].samples_per_s > winner.samples_per_s:
        yield "a layout that was not rehearsed may be faster: see its bound"
    yield from _wrapped(f"advised: {winner.candidate.label}: {speed(winner)}; {winner.reason}", "")
    for text in _conditions(winner):
        yield from _wrapped(text, "")
    if exact is not None and exact is not winner:
        yield from _wrapped(f"--sync advises {exact.candidate.label}: {speed(exact)}", "")
    for each in advice.rehearsed:
        if each.candidate.needs and each.is_exact and exact is not None and each.samples_per_s > exact.samples_per_s:
            text = f"with the same updates, if the script allows {each.candidate.needs}: {speed(each)}"
            yield from _wrapped(text, "")


def _conditions(one: Rehearsed) -> list[str]:
    """Return what a user must know before a layout is taken."""
    changes, needs = ", ".join(one.candidate.changes), one.candidate.needs
    found = [f"it changes the statistics of the training: {changes}"] if changes else []
    return found + ([f"the script must allow its {needs}"] if needs else [])


def speed(one: Rehearsed) -> str:
    """Return the predicted speed with its error."""
    error = one.prediction.error
    return f"{one.samples_per_s:,.0f} samples/s " + (
        "(error not measured)" if error is None else f"± {error * 100:.0f} %"
    )


def job_text(advice: Advice) -> str:
    """Return the text of the advised job's file, with the reason as a comment."""
    winner = advice.winner
    hosts = winner.candidate.used
    where = "one host" if hosts == 1 else f"{hosts} hosts, one unit on each"
    said = [
        f"Advised by `topotrain advise` for {where}: {winner.candidate.label}.",
        f"Predicted: {speed(winner)}; {winner.reason}.",
    ]
    said += [f"{text[0].upper()}{text[1:]}." for text in _conditions(winner)]
    comments = [line for text in said for line in textwrap.wrap(text, WIDTH - 2)]
    return "".join(f"# {line}\n" for line in comments) + dumps(winner.candidate.job)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
