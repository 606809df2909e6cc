"""The last lines of a process's log, for the page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.agent.workspace import LOGS

_LINES = 200


def tail_of(workspace: Path, process: Mapping[str, Any]) -> str | None:
    """Return the last lines of a process's log; None if this machine has none.

    process: an entry of the view's list of processes. Only its role and its numbers are used.
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
    return "\n".join(text.splitlines()[-_LINES:])
