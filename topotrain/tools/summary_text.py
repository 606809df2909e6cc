"""The summary of a job as text.

A summary may come from another machine, and is read as such: what is missing is left out, and nothing in it controls
the terminal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from topotrain.config.plain_text import printable

_LONGEST = 100  # characters of a word from a job
_MOST = 1e30


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the state of a job as lines: job, workers, servers, incidents."""
    parts = [
        "\n".join(_job(summary)),
        text_table(
            [
                ("worker", "state", "pid", "step", "loss", "samples/s", "staleness", "p95", "max", "waits", "memory"),
                *_workers(summary),
            ]
        ),
        text_table([("server", "state", "updates", "updates/s", "memory"), *_servers(summary)]),
        "\n".join(_moments(summary)),
    ]
    return "\n\n".join(part for part in parts if part)


def _job(summary: Mapping[str, Any]) -> Iterator[str]:
    state, elapsed = _word(summary.get("state")), _span(summary.get("elapsed_s"))
    said = {"running": f"runs for {elapsed}", "ended": f"ended after {elapsed}", "lost": f"lost after {elapsed}"}
    code = summary.get("code")
    ending = f" with code {code}" if isinstance(code, int) and code else ""
    yield f"{_word(summary.get('name')) or 'job'}: {_word(summary.get('framework'))}, {said.get(state, state)}{ending}"
    progress, epoch, eta = summary.get("progress"), summary.get("epoch"), summary.get("eta_s")
    far = [
        f"{100 * progress:.0f} % done" if _is_number(progress) else "",
        # People count epochs from 1, as the terminal does.
        f"epoch {epoch + 1}" if _is_number(epoch) else "",
        f"about {_span(eta)} left" if _is_number(eta) else "",
    ]
    if any(far):
        yield ", ".join(part for part in far if part)
    rate, traffic = summary.get("samples_per_s"), summary.get("bytes_per_s")
    now = [
        f"step {_number(summary.get('step'), 0)}",
        f"loss {_number(summary.get('loss'), 4)}",
        f"{_number(rate, 1)} samples/s" if _is_number(rate) else "",
        f"{_number(traffic, 1, 1e6)} MB/s between processes" if _is_number(traffic) else "",
    ]
    yield ", ".join(part for part in now if part)


def _workers(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for each in _dicts(summary.get("workers")):
        share = each.get("waiting_share")
        yield (
            _word(each.get("name")).removeprefix("worker "),
            _word(each.get("state")),
            _number(each.get("pid"), 0),
            _number(each.get("step"), 0),
            _number(each.get("loss"), 4),
            _number(each.get("samples_per_s"), 1),
            _number(each.get("staleness_mean"), 2),
            _number(each.get("staleness_p95"), 1),
            _number(each.get("staleness_max"), 0),
            f"{100 * share:.0f} %" if _is_number(share) else "",
            _memory(each.get("memory_bytes")),
        )


def _servers(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for each in _dicts(summary.get("servers")):
        yield (
            _word(each.get("name")).removeprefix("server "),
            _word(each.get("state")),
            _number(each.get("updates"), 0),
            _number(each.get("updates_per_s"), 1),
            _memory(each.get("memory_bytes")),
        )


def _moments(summary: Mapping[str, Any]) -> Iterator[str]:
    left_out = summary.get("left_out")
    if isinstance(left_out, int) and left_out:
        yield f"{left_out} more workers and servers"
    for each in _dicts(summary.get("workers")):
        log = each.get("log")
        if isinstance(log, dict) and log:
            values = ", ".join(f"{_word(name)} {_number(value, 4)}" for name, value in log.items())
            yield f"{_word(each.get('name'))} logs {values}"
    for each in _dicts(summary.get("incidents")):
        recovered = each.get("recovered_s")
        then = f"; trained again after {_number(recovered, 1)} s" if _is_number(recovered) else ""
        yield f"at {_number(each.get('at_s'), 1)} s: {_word(each.get('what'))}; {_word(each.get('action'))}{then}"
    saved = _dicts(summary.get("snapshots"))
    if saved:
        yield f"last snapshot: {_number(saved[-1].get('number'), 0)}, after step {_number(saved[-1].get('step'), 0)}"


def text_table(rows: Sequence[tuple[str, ...]], words: int = 2) -> str:
    """Return columns of equal width below their names, without empty columns.

    words: the number of columns on the left that are words; the others are numbers.
    """
    # Names and hosts come from other processes, and must not control the terminal.
    clean = [tuple(map(printable, row)) for row in rows]
    keep = [at for at in range(len(clean[0])) if any(row[at] for row in clean[1:])]
    widths = {at: max(len(row[at]) for row in clean) for at in keep}
    lines = (
        "  ".join(row[at].ljust(widths[at]) if at < words else row[at].rjust(widths[at]) for at in keep).rstrip()
        for row in clean
    )
    return "\n".join(lines) if keep else ""


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _word(value: object) -> str:
    return printable(value[:_LONGEST]) if isinstance(value, str) else ""


def _is_number(value: object) -> TypeGuard[float]:
    # Within these bounds an int can be divided and shown. They are false for NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _number(value: Any, digits: int, unit: float = 1.0) -> str:
    return f"{value / unit:.{digits}f}" if _is_number(value) else ""


def _memory(value: Any) -> str:
    return f"{value / 1e6:.0f} MB" if _is_number(value) else ""


def _span(value: Any) -> str:
    """Return seconds as text."""
    if not _is_number(value):
        return "an unknown time"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
