"""`--log tensorboard`: the curves of a job as event files of TensorBoard.

They are written as torch's `SummaryWriter` does it, by TensorBoard's own writer: the launcher does not load torch.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from topotrain.config.private_files import FILE_MODE, make_folder
from topotrain.tools.exporters.curve_points import CurvePoint
from topotrain.tools.recording.job_history import JobHistory

FOLDER = "tensorboard"
MISSING = "needs tensorboard: pip install 'topotrain[tensorboard]'"


def is_installed() -> bool:
    """Whether TensorBoard is there."""
    return find_spec("tensorboard") is not None


class TensorBoardExport:
    """Writes each point of a curve as a scalar.

    Args:
        folder: of the event files, for `tensorboard --logdir`.
        private: they are made for this user alone. Else their mode is what the umask gives.
    """

    def __init__(self, folder: Path, private: bool) -> None:
        self._folder, self._private = folder, private

    def start(self, history: JobHistory) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._private:
            make_folder(self._folder)
        self._writer = EventFileWriter(str(self._folder))
        if self._private:
            # The writer has no means for it; until here the folder protects the file.
            self._writer.flush()
            for file in self._folder.glob("*.tfevents.*"):
                file.chmod(FILE_MODE)

    def write(self, points: Sequence[CurvePoint]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            value = Summary.Value(tag=point.tag, simple_value=point.value)
            self._writer.add_event(Record(wall_time=point.time, step=point.step, summary=Summary(value=[value])))
        # Its own thread writes to the disk every two minutes only.
        self._writer.flush()

    def end(self, code: int) -> None:
        self._writer.close()
