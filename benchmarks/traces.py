"""What a trace of torch's profiler says of copies: how much of their time the GPU also computed.

A copy counts as overlapped while a kernel of the backward runs on another stream of the same device. Kernels on the
streams of the copies are part of the copying. A kernel or a copy belongs to the backward if it was launched during one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKWARD = "backward"
"""The name under which a script records its backward."""

TO_HOST, TO_DEVICE = "DtoH", "HtoD"
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of one direction; times in milliseconds.

    `pinned` are those of them from or to memory whose pages cannot move. `launched` counts those that were launched
    during a backward, `spent` is the time of these, and `overlapped` the part of that in which the backward computed.
    """

    count: int
    megabytes: float
    pinned: int
    launched: int
    spent: float
    overlapped: float

    @property
    def share(self) -> float | None:
        """The overlapped share of the copying; None without copies."""
        return self.overlapped / self.spent if self.spent else None


def copies_of(trace: Path, direction: str) -> Copies:
    """The copies of one direction ("DtoH" or "HtoD") in a trace."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    backwards = [_span(e) for e in events if e.get("cat") == "user_annotation" and e["name"] == BACKWARD]
    launches = {_correlation(e): float(e["ts"]) for e in events if e.get("cat") in _LAUNCHES}
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and direction in e["name"]]
    within = [e for e in copies if _during(e, launches, backwards)]
    streams = {_stream(e) for e in copies}
    kernels = [e for e in events if e.get("cat") == "kernel" and _stream(e) not in streams]
    busy: dict[Any, list[Span]] = {}
    for kernel in kernels:
        if _during(kernel, launches, backwards):
            busy.setdefault(_device(kernel), []).append(_span(kernel))
    joined = {device: union(spans) for device, spans in busy.items()}
    overlapped = sum(common(_span(e), joined.get(_device(e), ())) for e in within)
    return Copies(
        len(copies),
        sum(float(e.get("args", {}).get("bytes", 0)) for e in copies) / 2**20,
        sum("Pinned" in e["name"] for e in copies),
        len(within),
        sum(float(e["dur"]) for e in within) / 1e3,
        overlapped / 1e3,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not touch, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def common(span: Span, others: Sequence[Span]) -> float:
    """The time of a span that others cover, which do not touch each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


def _during(event: Mapping[str, Any], launches: Mapping[Any, float], spans: Iterable[Span]) -> bool:
    at = launches.get(_correlation(event))
    return at is not None and any(begin <= at <= end for begin, end in spans)


def _span(event: Mapping[str, Any]) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _device(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("device", event.get("pid"))


def _stream(event: Mapping[str, Any]) -> Any:
    return _device(event), event.get("args", {}).get("stream", event.get("tid"))
