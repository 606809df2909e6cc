"""The exports of a job's curves: `--log jsonl`, `--log tensorboard`, and `--log python:MODULE:CLASS`.

A line of JSON is one value: {"time": 1765000000.5, "step": 12, "process": "group 0", "name": "loss", "value": 0.25}.
A value that is not finite is null.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from topotrain.config.job import ConfigError
from topotrain.config.private_files import FILE_MODE, make_folder, open_file
from topotrain.tools.recording.job_history import JobHistory

JSONL, TENSORBOARD = "curves.jsonl", "tensorboard"
"""The names in the workspace."""
_JOB = ("name", "framework", "workspace", "block")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A value of a curve.

    time: seconds since 1970. step: of a worker; for a server, the version of its values. process: a worker, a server
    or a group, or "job". name: such as "loss" or "log:accuracy". value: NaN for any number that is not finite.
    """

    time: float
    step: int
    process: str
    name: str
    value: float

    @property
    def has_worker_step(self) -> bool:
        """Whether `step` counts steps of workers, and not versions of a server."""
        return not self.process.startswith("server ")

    @property
    def tag(self) -> str:
        """The name of the curve, such as "loss/group 0"."""
        # Tools show names with equal beginnings together.
        return f"{self.name.replace(':', '/')}/{self.process}"


class CurveExport(Protocol):
    """Writes the curves of a job for another tool, on a thread of its own."""

    def start(self, history: JobHistory) -> None:
        """Begin; the history has the job already."""
        ...

    def write(self, points: Sequence[CurvePoint]) -> None:
        """Write what is new, in the order of time."""
        ...

    def end(self, code: int) -> None:
        """End; the job has this exit code."""
        ...


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


class TensorBoardExport:
    """Writes the points of curves as scalars, with TensorBoard's own writer.

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


class Tracker:
    """Receives the curves of a job.

    `topotrain run --log python:MODULE:CLASS` makes one and calls it. A subclass passes the values on to an experiment
    tracker. All calls come from one thread of the launcher. They may take long: the job does not wait for them. After
    an exception the job goes on without the tracker, and says so.
    """

    def start(self, job: Mapping[str, Any]) -> None:
        """Begin the run of a job, before any value.

        job: its "name", "framework", "workspace" and "block", the text of the cluster block.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step.

        step: of the worker that has made most steps. It never decreases.
        values: by names such as "loss/group 0", "samples_per_s/worker 0/1" and "log/accuracy/worker 0/0".
        """

    def end(self, code: int) -> None:
        """End the run; code: the exit code of the job."""


def load(option: str, value: str, words: str) -> Tracker:
    """Make the tracker of MODULE:CLASS.

    option, value: where it was named, for errors. Raises ConfigError.
    """
    module, _, name = words.partition(":")
    if not (all(map(str.isidentifier, module.split("."))) and name.isidentifier()):
        raise ConfigError(option, value, "must be python:MODULE:CLASS, such as python:examples.track_mlflow:MLflow")
    # As `python -m`: a module of the current folder is found.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        # The module is the user's, and may raise anything.
        raise ConfigError(option, value, f"cannot be made: {type(error).__name__}: {error}") from None
    if not isinstance(made, Tracker):
        raise ConfigError(option, value, "must name a subclass of tt.Tracker")
    return made


class TrackerExport:
    """Calls a tracker with the points of all curves, once for each step."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self._step = tracker, 0

    def start(self, history: JobHistory) -> None:
        job = history.view()["job"]
        self.tracker.start({name: job.get(name) for name in _JOB})

    def write(self, points: Sequence[CurvePoint]) -> None:
        values: dict[str, float] = {}
        for point in points:
            # Groups do not step together, and trackers refuse a step that is smaller than the last one.
            if point.has_worker_step and point.step > self._step:
                if values:
                    self.tracker.log(self._step, values)
                    values = {}
                self._step = point.step
            values[point.tag] = point.value
        if values:
            self.tracker.log(self._step, values)

    def end(self, code: int) -> None:
        self.tracker.end(code)
