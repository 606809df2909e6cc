"""The lines of a recording: JSON with seconds since the start, in order of time.

Writers are strict and readers tolerant: unknown events and fields are left out, so that a later version can add some.
Numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity".
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_args

from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import EVENTS, Event, Output, from_json, to_json

VERSION = 1
HEADER, END = "Recording", "RecordingEnd"
LONGEST_TEXT = 4000
"""Characters of a text in a recording. Of a longer one the end is kept, where a traceback has its error."""
LONGEST_LINE = 64 << 10
"""Bytes of a line. A longer event is left out."""
NOT_RECORDED: tuple[type[Event], ...] = (Output,)
"""These are in the logs of the processes."""
_ODD = MappingProxyType({"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf})
_EMPTY: Mapping[str, Any] = MappingProxyType({})


class RecordingError(Exception):
    """A recording that cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The first line of a start of the job, and the line where its layout changes.

    started: seconds since 1970. A line with the same `started` as the one before it changes the layout only.
    resumed: the job goes on from what earlier lines tell.
    job, layout: as the page about recordings describes them.
    """

    version: int = VERSION
    topotrain: str = ""
    started: float = 0.0
    resumed: bool = False
    job: Mapping[str, Any] = field(default_factory=lambda: _EMPTY, hash=False)
    layout: Mapping[str, Any] = field(default_factory=lambda: _EMPTY, hash=False)


@dataclass(frozen=True, slots=True)
class RecordingEnd:
    """The last line of a start: the job has ended, with this exit code."""

    code: int | None = None


Recorded = Event | RecordingHeader | RecordingEnd


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event, and its seconds since the start of the job that it is of."""

    at: float
    event: Recorded


def to_line(timed: TimedEvent) -> str:
    """Return the line of an event, with its end. "": it is too long."""
    event = timed.event
    if isinstance(event, RecordingHeader | RecordingEnd):
        data = {f.name: getattr(event, f.name) for f in fields(event)}
        name = END if isinstance(event, RecordingEnd) else HEADER
        text = json.dumps({"event": name, **_plain(data)}, separators=(",", ":"))
    else:
        text = to_json(event)
        # The names of these numbers may also be in a text, for which the longer way is right, too.
        if "NaN" in text or "Infinity" in text or len(text) > LONGEST_TEXT:
            text = json.dumps(_plain(json.loads(text)), separators=(",", ":"))
    line = f'{{"at":{timed.at:.6f},{text[1:]}\n'
    # Without its header a recording says nothing, and a layout of many processes is long.
    return line if len(line) <= LONGEST_LINE or isinstance(event, RecordingHeader) else ""


def from_line(line: str) -> TimedEvent | None:
    """Return the event of a line; None for one that this version does not know."""
    fast = _exact(line)
    if fast is not None:
        return fast
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not _is_number(data.get("at")):
        return None
    event = _event(data)
    return None if event is None else TimedEvent(float(data["at"]), event)


def _exact(line: str) -> TimedEvent | None:
    """Return the event of a line as this version writes it."""
    head, comma, rest = line.partition(",")
    if not comma or not head.startswith('{"at":'):
        return None
    try:
        return TimedEvent(float(head[6:]), from_json("{" + rest))
    except ValueError:
        return None


def _event(data: Mapping[str, Any]) -> Recorded | None:
    match data.get("event"):
        case "Recording":
            return _header(data)
        case "RecordingEnd":
            code = data.get("code")
            return RecordingEnd(code if isinstance(code, int) else None)
        case str(name) if name in EVENTS:
            return _known(EVENTS[name], data)
        case _:
            return None


def _header(data: Mapping[str, Any]) -> RecordingHeader:
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        newer = f"is of version {version!r}, and this topotrain reads versions up to {VERSION}"
        raise RecordingError(f"{newer}: it was written by topotrain {str(data.get('topotrain', ''))[:40]}")
    started, job, layout = data.get("started"), data.get("job"), data.get("layout")
    return RecordingHeader(
        version,
        str(data.get("topotrain", "")),
        float(started) if started is not None and _is_number(started) else 0.0,
        data.get("resumed") is True,
        job if isinstance(job, dict) else {},
        layout if isinstance(layout, dict) else {},
    )


def _known(kind: type[Event], data: Mapping[str, Any]) -> Event | None:
    """Return an event of the fields that are known; None if one is missing or wrong."""
    values: dict[str, Any] = {}
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name in data:
            values[f.name] = _number(f.type, data[f.name])
        elif f.default is not MISSING:
            values[f.name] = f.default
        else:
            return None
    try:
        return from_json(json.dumps({"event": kind.__name__, **values}))
    except ValueError:
        return None


def _number(kind: Any, value: Any) -> Any:
    """Return the numbers that JSON does not have, where a field has numbers."""
    if isinstance(value, str) and float in (kind, *get_args(kind)):
        return _ODD.get(value, value)
    if isinstance(value, dict) and float in get_args(kind):
        return {name: _ODD.get(item, item) if isinstance(item, str) else item for name, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """Return data without numbers that JSON does not have, and without long texts."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case str():
            return value[-LONGEST_TEXT:]
        case dict() | MappingProxyType():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


SAMPLES = ("StepDone", "Resources", "Traffic", "ServerLoad", "Logged", "LocalSteps", "Rounds", "Waits")
"""Events of which a later one of the same process tells the same of a later time. They are thinned with age."""


def layout_data(topology: Topology, hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the layout as plain data.

    hosts: the name of each unit's host; empty: all are on this one.
    """
    implicit = range(topology.worker_groups)
    return {
        "units": [
            {
                "rank": unit.rank,
                "host": hosts[unit.rank] if unit.rank < len(hosts) else "localhost",
                "workers": [[worker.group, worker.index] for worker in unit.workers],
                "servers": [[server.group, server.index] for server in unit.servers],
            }
            for unit in topology.units
        ],
        "server_group_of_worker_group": [topology.server_group_of(group) for group in implicit],
        "servers_in_workers": topology.inline or topology.collective,
    }


def residents(layout: Mapping[str, Any]) -> Iterator[tuple[Address, int, str]]:
    """Yield each worker and server of a recorded layout with its unit and its host.

    Parts that cannot be read are left out.
    """
    for unit in _dicts(layout.get("units")):
        rank, host = unit.get("rank"), str(unit.get("host", ""))
        for role, name in ((Role.WORKER, "workers"), (Role.SERVER, "servers")):
            for group, index in _pairs(unit.get(name)):
                yield Address(role, group, index), rank if isinstance(rank, int) else 0, host


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _pairs(value: object) -> list[tuple[int, int]]:
    pairs = value if isinstance(value, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, int) and number >= 0 for number in pair)
    ]
