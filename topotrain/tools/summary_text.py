"""The summary of a job as text.

A summary may come from another machine, and is read as such: what is missing is left out, and nothing in it controls
the terminal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from topotrain.config.plain_text import printable

_LONGEST = 100  # characters of a word from a job
_MOST = 1e30


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the state of a job as lines: job, workers, servers, incidents."""
    tables = [_table(columns, summary.get(kind)) for kind, columns in (("workers", _WORKER), ("servers", _SERVER))]
    parts = ["\n".join(_job(summary)), *tables, "\n".join(_moments(summary))]
    return "\n\n".join(part for part in parts if part)


def _word(value: object) -> str:
    return printable(value[:_LONGEST]) if isinstance(value, str) else ""


def _address(value: object) -> str:
    return _word(value).rpartition(" ")[2]


def _is_number(value: object) -> TypeGuard[float]:
    # Within these bounds an int can be divided and shown. They are false for NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _number(digits: int, unit: float = 1.0, sign: str = "") -> Callable[[object], str]:
    return lambda value: f"{value / unit:.{digits}f}{sign}" if _is_number(value) else ""


def _span(value: object) -> str:
    """Return seconds as text."""
    if not _is_number(value):
        return "an unknown time"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


_COUNT, _TENTHS, _LOSS = _number(0), _number(1), _number(4)
_MEMORY = _number(0, 1e6, " MB")
_WORKER = {
    "worker": ("name", _address),
    "state": ("state", _word),
    "pid": ("pid", _COUNT),
    "step": ("step", _COUNT),
    "loss": ("loss", _LOSS),
    "samples/s": ("samples_per_s", _TENTHS),
    "staleness": ("staleness_mean", _number(2)),
    "p95": ("staleness_p95", _TENTHS),
    "max": ("staleness_max", _COUNT),
    "waits": ("waiting_share", _number(0, 0.01, " %")),
    "memory": ("memory_bytes", _MEMORY),
}
"""The columns of a table: the key in the summary, and the text of its value."""
_SERVER = {
    "server": ("name", _address),
    "state": ("state", _word),
    "updates": ("updates", _COUNT),
    "updates/s": ("updates_per_s", _TENTHS),
    "memory": ("memory_bytes", _MEMORY),
}


def _job(summary: Mapping[str, Any]) -> Iterator[str]:
    state, elapsed = _word(summary.get("state")), _span(summary.get("elapsed_s"))
    said = {"running": f"runs for {elapsed}", "ended": f"ended after {elapsed}", "lost": f"lost after {elapsed}"}
    code = summary.get("code")
    ending = f" with code {code}" if isinstance(code, int) and code else ""
    yield f"{_word(summary.get('name')) or 'job'}: {_word(summary.get('framework'))}, {said.get(state, state)}{ending}"
    epoch, eta = summary.get("epoch"), summary.get("eta_s")
    far = [
        _number(0, 0.01, " % done")(summary.get("progress")),
        # People count epochs from 1, as the terminal does.
        f"epoch {epoch + 1}" if _is_number(epoch) else "",
        f"about {_span(eta)} left" if _is_number(eta) else "",
    ]
    if any(far):
        yield ", ".join(part for part in far if part)
    now = [
        f"step {_COUNT(summary.get('step'))}",
        f"loss {_LOSS(summary.get('loss'))}",
        _number(1, sign=" samples/s")(summary.get("samples_per_s")),
        _number(1, 1e6, " MB/s between processes")(summary.get("bytes_per_s")),
    ]
    yield ", ".join(part for part in now if part)


def _moments(summary: Mapping[str, Any]) -> Iterator[str]:
    left_out = summary.get("left_out")
    if isinstance(left_out, int) and left_out:
        yield f"{left_out} more workers and servers"
    for each in _dicts(summary.get("workers")):
        log = each.get("log")
        if isinstance(log, dict) and log:
            yield f"{_word(each.get('name'))} logs {', '.join(f'{_word(name)} {_LOSS(log[name])}' for name in log)}"
    for each in _dicts(summary.get("incidents")):
        recovered = each.get("recovered_s")
        then = f"; trained again after {recovered:.1f} s" if _is_number(recovered) else ""
        yield f"at {_TENTHS(each.get('at_s'))} s: {_word(each.get('what'))}; {_word(each.get('action'))}{then}"
    saved = _dicts(summary.get("snapshots"))
    if saved:
        yield f"last snapshot: {_COUNT(saved[-1].get('number'))}, after step {_COUNT(saved[-1].get('step'))}"


def _table(columns: Mapping[str, tuple[str, Callable[[object], str]]], processes: object) -> str:
    rows = [tuple(text(each.get(key)) for key, text in columns.values()) for each in _dicts(processes)]
    return text_table([tuple(columns), *rows])


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
