"""The last lines of a process's log, for the page."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.agent.workspace import LOGS

_LINES = 200
_MAILED_LINES = 50
"""A file has the logs of all processes."""
# Sequences that color a terminal or move its cursor, and then all control characters but ends of lines and tabs.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def tails_of(workspace: Path, view: Mapping[str, Any]) -> dict[str, str]:
    """Return the last lines of each process of a view, by its name.

    Processes without any are left out.
    """
    tails = {process["name"]: tail_of(workspace, process, _MAILED_LINES) for process in view["processes"]}
    return {name: text for name, text in tails.items() if text}


def tail_of(workspace: Path, process: Mapping[str, Any], lines: int = _LINES) -> str | None:
    """Return the last lines of a process's log; None if this machine has none.

    process: an entry of the view's list of processes. Only its role and its numbers are used. lines: at most so many.
    """
    group, index, unit = (int(process[name]) for name in ("group", "index", "unit"))
    if process["role"] == "worker":
        names = [f"worker-{group}-{index}.log"]
    else:
        # That of a server which has moved to another unit comes first: the other one is older.
        names = [f"server-{group}-{index}-in-unit-{unit}.log", f"servers-unit-{unit}.log"]
    there = [log for name in names if (log := workspace / LOGS / name).exists()]
    if not there:
        return None
    text = next((text for text in map(log_tail, there) if text), "")
    return "\n".join(plain(line) for line in text.splitlines()[-lines:])


def plain(text: str) -> str:
    """Return text without what is meant for a terminal."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))
