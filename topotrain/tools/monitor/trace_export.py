"""Trace of one step over all processes, for Perfetto and Chrome, and time shares.

Nothing is measured here: the spans that the processes have written are combined. They share the host's clock. The file
is in Chrome's trace event format. Each span is a complete event ("X"), in microseconds. Arrows ("s" to "f") lead from
the push of a gradient to its reduction by the server, and from the send of a value to its worker.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topotrain.config.private_files import write_text
from topotrain.core.profiling.spans import PHASES, STEP, ProcessSpans, Span, from_json

FILE = "trace.json"
_OTHER = "other"
_IDLE = "wait for messages"
_MAIN = "MainThread"


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """How one process spent its step (0: a server); phases: shares that add up to 1."""

    who: str
    step: int
    seconds: float
    phases: Mapping[str, float]


def collect(folder: Path) -> list[ProcessSpans]:
    """Return the spans that processes wrote to `folder`, workers first."""
    found = sorted((from_json(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")), key=_order)
    # A worker that was killed in its step has no complete one to show.
    workers = [process for process in found if not process.serves and _step_of(process) is not None]
    windows = [step for step in map(_step_of, workers) if step is not None]
    if not windows:
        return []
    # Servers have no steps: their spans are shown while any worker was in its step.
    start, end = min(step.start for step in windows), max(step.end for step in windows)
    servers = [_in_window(process, start, end) for process in found if process.serves]
    return workers + servers


def _order(process: ProcessSpans) -> tuple[bool, list[int]]:
    return process.serves, [int(number) for number in process.who.split()[-1].split("/")]


def _step_of(process: ProcessSpans) -> Span | None:
    return next((span for span in process.spans if span.name == STEP), None)


def _in_window(process: ProcessSpans, start: int, end: int) -> ProcessSpans:
    """Return a server process's spans, cut to that time, and its waits."""
    inside = [
        replace(span, start=max(span.start, start), end=min(span.end, end))
        for span in process.spans
        if span.end > start and span.start < end
    ]
    # A server measures its work only; the gaps are its waits.
    waits = [wait for track in _tracks(process.spans) for wait in _waits(inside, track, start, end)]
    return replace(process, spans=tuple(inside + waits))


def _waits(spans: Sequence[Span], track: str, start: int, end: int) -> Iterator[Span]:
    """Yield the gaps between the spans of a server."""
    at = start
    for span in sorted((span for span in spans if span.track == track), key=lambda span: span.start):
        if span.start > at:
            yield Span(_IDLE, track, at, span.start)
        at = max(at, span.end)
    if end > at:
        yield Span(_IDLE, track, at, end)


def _tracks(spans: Sequence[Span]) -> list[str]:
    """Return the tracks by their first span's end; the main thread comes first."""
    return sorted(dict.fromkeys(span.track for span in spans), key=lambda track: track != _MAIN)


# --- shares of the time ------------------------------------------------------------------------------------------


def shares(processes: Sequence[ProcessSpans]) -> list[ProcessShare]:
    return [_share(process) for process in processes]


def _share(process: ProcessSpans) -> ProcessShare:
    step = _step_of(process)
    start = step.start if step else min(span.start for span in process.spans)
    end = step.end if step else max(span.end for span in process.spans)
    spent = dict.fromkeys((*PHASES, _OTHER), 0)
    for phase, duration in _moments(process.spans, start, end):
        spent[phase] += duration
    # A step of no measured time must not divide by 0.
    whole = max(1, end - start)
    number = step.numbers.get("step", 0) if step else 0
    return ProcessShare(
        process.who, number, (end - start) / 1e9, {phase: part / whole for phase, part in spent.items()}
    )


def _moments(spans: Sequence[Span], start: int, end: int) -> Iterator[tuple[str, int]]:
    """Yield (phase, nanoseconds) between every two changes from `start` to `end`."""
    begins = sorted((s for s in spans if s.end > s.start), key=lambda s: (s.start, -s.end))
    # At equal times ends come before beginnings, and inner spans end first.
    changes = [(s.start, 1, n, s) for n, s in enumerate(begins)] + [(s.end, 0, -n, s) for n, s in enumerate(begins)]
    open_on: dict[str, list[Span]] = defaultdict(list)
    at = start
    for when, begins_now, _, span in sorted(changes, key=lambda change: change[:3]):
        upto = min(max(when, start), end)
        if upto > at:
            yield _busiest(open_on), upto - at
            at = upto
        if begins_now:
            open_on[span.track].append(span)
        else:
            open_on[span.track].remove(span)
    if end > at:
        yield _busiest(open_on), end - at


def _busiest(open_on: Mapping[str, Sequence[Span]]) -> str:
    # A thread is in the phase of its innermost span, and the process in the first phase of one of its threads.
    # So receiving values during a computation costs nothing, and waiting is the time without other phases.
    doing = {stack[-1].phase for stack in open_on.values() if stack}
    # Time outside named phases counts as work, so it comes before a wait.
    return next((phase for phase in (*PHASES[:-1], _OTHER, PHASES[-1]) if phase in doing), _OTHER)


# --- the file ----------------------------------------------------------------------------------------------------


def write(processes: Sequence[ProcessSpans], path: Path) -> None:
    """Write the trace. Raises OSError."""
    write_text(path, json.dumps(chrome(processes), separators=(",", ":")) + "\n")


def chrome(processes: Sequence[ProcessSpans]) -> dict[str, Any]:
    """Return the trace as data; time 0 is the start of the first span."""
    zero = min((span.start for process in processes for span in process.spans), default=0)
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    ends: dict[tuple[Any, ...], list[_End]] = defaultdict(list)
    for number, process in enumerate(processes):
        threads = {track: tid for tid, track in enumerate(_tracks(process.spans), 1)}
        names += _named(process, number, threads)
        for span in process.spans:
            # The format counts in microseconds.
            place = {"pid": process.pid, "tid": threads[span.track], "ts": (span.start - zero) / 1000}
            event = {"ph": "X", "name": span.name, "cat": span.phase, **place, "dur": (span.end - span.start) / 1000}
            events.append({**event, "args": dict(span.numbers)})
            for key, leaves in _flow(process, span):
                ends[key].append(_End(leaves, place))
    events.sort(key=lambda event: event["ts"])
    return {"displayTimeUnit": "ms", "traceEvents": names + events + list(_arrows(ends))}


@dataclass(frozen=True, slots=True)
class _End:
    """One end of an arrow, and its position."""

    leaves: bool
    place: Mapping[str, Any]


def _named(process: ProcessSpans, number: int, threads: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    def meta(kind: str, tid: int, args: Mapping[str, object]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process.pid, "tid": tid, "args": args}

    yield meta("process_name", 0, {"name": process.who})
    yield meta("process_sort_index", 0, {"sort_index": number})
    for track, tid in threads.items():
        yield meta("thread_name", tid, {"name": "script" if track == _MAIN else track})
        yield meta("thread_sort_index", tid, {"sort_index": tid})


def _flow(process: ProcessSpans, span: Span) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield the key that both ends of a transfer have, and whether this end sends."""
    if "bucket" not in span.numbers or span.name not in ("push", "reduce", "pull"):
        return
    worker = process.who
    if process.serves:
        worker = f"worker {span.numbers.get('group')}/{span.numbers.get('index')}"
    kind = "values" if span.name == "pull" else "gradient"
    numbers = tuple(span.numbers.get(name) for name in ("step", "ordinal", "round", "bucket"))
    yield (kind, worker, *numbers), span.name == "push" or (process.serves and span.name == "pull")


def _arrows(ends: Mapping[tuple[Any, ...], Sequence[_End]]) -> Iterator[dict[str, Any]]:
    for number, (key, found) in enumerate(ends.items()):
        leaving = [end.place for end in found if end.leaves]
        coming = [end.place for end in found if not end.leaves]
        # A message that was repeated has several ends, and no arrow would be right.
        if len(leaving) == len(coming) == 1 and leaving[0]["ts"] <= coming[0]["ts"]:
            arrow = {"name": key[0], "cat": "flow", "id": number}
            yield {"ph": "s", **arrow, **leaving[0]}
            # bp e: the arrow ends at the span around this time, and not at the next one.
            yield {"ph": "f", "bp": "e", **arrow, **coming[0]}
