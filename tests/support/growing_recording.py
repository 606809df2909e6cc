"""Recordings that tests write themselves, event by event."""

from contextlib import closing
from pathlib import Path
from typing import Any

from topotrain.config.job import Cluster
from topotrain.config.topology import layout
from topotrain.core.events import StepDone
from topotrain.tools.recording.recorded_lines import Recorded, RecordingHeader, TimedEvent, layout_data, to_line
from topotrain.tools.recording.recording_file import FILE, RecordedWorkspace, RecordingFile

STARTED = 1_700_000_000.0


class GrowingRecording:
    """The recording of a job in a workspace, which begins with its header. `cluster`: fields of its cluster block."""

    def __init__(self, workspace: Path, name: str = "digits", started: float = STARTED, **cluster: Any) -> None:
        self.workspace = workspace
        self._file = RecordingFile(workspace / FILE)
        topology = layout(Cluster(**cluster))
        job = {"name": name, "framework": "Downpour", "workspace": str(workspace), "block": "cluster { }"}
        self.add(0.0, RecordingHeader(started=started, job=job, layout=layout_data(topology)))

    def add(self, at: float, *events: Recorded) -> None:
        self._file.write("".join(to_line(TimedEvent(at + number * 1e-6, event)) for number, event in enumerate(events)))

    def close(self) -> None:
        self._file.close()


def step(who: str, number: int, loss: float = 0.5) -> StepDone:
    """A step of a worker, a tenth of a second after the one before."""
    return StepDone(who, number / 10, number, number * 32, loss, 0.0, 0, 0, 0)


def view_of(workspace: Path) -> dict[str, Any]:
    """The view of a recorded job."""
    with closing(RecordedWorkspace(workspace)) as recorded:
        return recorded.read().view()
