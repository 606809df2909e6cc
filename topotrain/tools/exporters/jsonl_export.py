"""`--log jsonl`: the curves of a job as lines of JSON.

A line is one value: {"time": 1765000000.5, "step": 12, "process": "group 0", "name": "loss", "value": 0.25}.
A value that is not finite is null.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from topotrain.config.private_files import make_folder, open_file
from topotrain.tools.exporters.curve_points import CurvePoint
from topotrain.tools.recording.job_history import JobHistory

FILE = "curves.jsonl"


class JsonLinesExport:
    """Writes each point of a curve as a line.

    Args:
        path: of the file.
        private: it is made for this user alone. Else its mode is what the umask gives.
    """

    def __init__(self, path: Path, private: bool) -> None:
        self._path, self._private = path, private

    def start(self, history: JobHistory) -> None:
        # The curves of a job that goes on follow those of its earlier start.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if history.start.resumed else os.O_TRUNC)
        if self._private:
            make_folder(self._path.parent)
            fd = open_file(self._path, flags)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, flags | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(fd, "w", encoding="utf-8")

    def write(self, points: Sequence[CurvePoint]) -> None:
        self._file.writelines(map(_line, points))
        # A reader follows the file while the job runs.
        self._file.flush()

    def end(self, code: int) -> None:
        self._file.close()


def _line(point: CurvePoint) -> str:
    data = {
        "time": round(point.time, 3),
        "step": point.step,
        "process": point.process,
        "name": point.name,
        "value": point.value if math.isfinite(point.value) else None,
    }
    return json.dumps(data) + "\n"
