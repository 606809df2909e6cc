"""`tt.Tracker`, and the export that calls one: `--log python:MODULE:CLASS`."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.tools.exporters.curve_files import CurvePoint
from topotrain.tools.recording.job_history import JobHistory

_JOB = ("name", "framework", "workspace", "block")


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
