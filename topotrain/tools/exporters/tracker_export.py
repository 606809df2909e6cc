"""`--log python:MODULE:CLASS`: a tracker that is loaded by its name."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from topotrain.config.job import ConfigError
from topotrain.tools.exporters.curve_points import CurvePoint
from topotrain.tools.exporters.tracker import Tracker
from topotrain.tools.recording.job_history import JobHistory

_JOB = ("name", "framework", "workspace", "block")


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


@dataclass(slots=True)
class TrackerExport:
    """Calls a tracker with the points of all curves, once for each step."""

    tracker: Tracker
    _step: int = 0

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
