"""A script as an ordinary process, made by a forkserver that has loaded what the script would import."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(spec: dict[str, Any], channel: object, fds: Sequence[int]) -> int:
    """Called in the new process: `spec["argv"]` is the script and its arguments."""
    sys.argv = spec["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0
