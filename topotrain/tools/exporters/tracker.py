"""`tt.Tracker`: the base class of trackers, to which a job gives its curves."""

from collections.abc import Mapping
from typing import Any


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
