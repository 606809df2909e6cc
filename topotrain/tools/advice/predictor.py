"""Predictors of layouts.

A rehearsal is the usual one. Another implementation can be passed in.
"""

from abc import ABC, abstractmethod

from topotrain.config.job import Job
from topotrain.tools.prediction.machines import Machines
from topotrain.tools.prediction.prediction import Prediction
from topotrain.tools.probe.probe_file import Probe


class Predictor(ABC):
    """Predicts what a layout does on machines."""

    @abstractmethod
    def predict(self, job: Job, probe: Probe, machines: Machines) -> Prediction:
        """Return the prediction. Raises ConfigError for a job that cannot be predicted."""


class RehearsalPredictor(Predictor):
    """Predicts by a rehearsal with the product's own servers and clients."""

    def __init__(self) -> None:
        # Now and not in the first prediction, whose time is limited: it imports torch.
        from topotrain.tools.prediction.predict import predict

        self._predict = predict

    def predict(self, job: Job, probe: Probe, machines: Machines) -> Prediction:
        return self._predict(job, probe, machines)
