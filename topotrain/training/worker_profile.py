"""A process's part of a profile: its recorders, and the file for the launcher."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from topotrain.config.private_files import write_text
from topotrain.config.topology import Address
from topotrain.core.profiling.spans import (
    SILENT,
    ProcessSpans,
    Recorder,
    ServerRecorder,
    WorkerRecorder,
    to_json,
)
from topotrain.training.worker_stats import ProcessClock


class ProfileRecorders:
    """Makes the recorders of one process. Without a profile they record nothing.

    Args:
        step: the step of which spans are recorded, counted from 1. 0: no step.
        folder: the folder in which the launcher looks for files of spans.
        resident: the first address of the process.
    """

    def __init__(self, step: int, folder: Path, resident: Address) -> None:
        self._wanted = step
        self._folder = folder
        self._resident = resident
        self._recorders: list[WorkerRecorder | ServerRecorder] = []

    def worker(self) -> Recorder:
        """Make the recorder of this process's worker."""
        if not self._wanted:
            return SILENT
        # The monotonic clock is one for all processes of a host, so their spans can be compared.
        made = WorkerRecorder(self._wanted, ProcessClock())
        self._recorders.append(made)
        return made

    def server(self, me: Address, groups: Iterable[int]) -> Recorder:
        """Make the recorder of a server of this process, which serves these groups."""
        if not self._wanted:
            return SILENT
        made = ServerRecorder(self._wanted, ProcessClock(), str(me), groups)
        self._recorders.append(made)
        return made

    def leave(self) -> None:
        """Write what was recorded. Raises OSError."""
        spans = tuple(span for recorder in self._recorders for span in recorder.kept())
        if spans:
            file = self._folder / (re.sub(r"\W", "-", str(self._resident)) + ".json")
            # Renamed when it is whole: the launcher reads every .json file that it finds.
            half = file.with_suffix(".tmp")
            write_text(half, to_json(ProcessSpans(str(self._resident), os.getpid(), spans)))
            half.replace(file)
