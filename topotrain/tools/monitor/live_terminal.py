"""Whether the output is a terminal on which a display can be redrawn in place.

Elsewhere each drawing would stay, one after another: in a pipe or file, on a terminal that cannot move its cursor, in
the log of a CI system, and below the cell of a notebook. Some of these look like terminals to a process.
"""

import os
from collections.abc import Mapping
from typing import IO, Any

DUMB = frozenset({"", "dumb", "unknown"})
"""Values of TERM for terminals that cannot move their cursor."""
NOTEBOOK = ("JPY_PARENT_PID", "JPY_SESSION_NAME")
"""Variables of a Jupyter kernel, which gives `!command` a terminal of its own and shows what it writes there."""
_OFF = frozenset({"", "0", "false", "no"})


def redraws(file: IO[Any], environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a display on `file` can be redrawn in place."""
    # NO_COLOR has no part in this: it is about colors only.
    captured = any(name in environ for name in NOTEBOOK) or environ.get("CI", "").lower() not in _OFF
    return not captured and environ.get("TERM", "") not in DUMB and _is_terminal(file)


def _is_terminal(file: IO[Any]) -> bool:
    try:
        return file.isatty()
    except ValueError:  # it is closed
        return False
