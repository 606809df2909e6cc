"""Counts of the steps that a worker has lost in an exchange."""

from topotrain.core.client.value_pull import ValueObserver
from topotrain.extensions.outer_optimizer.local_values import LocalValues, TakeRule
from topotrain.extensions.outer_optimizer.rounds import UntoldSteps
from topotrain.training.worker_stats import StepBatches


class ExchangedSteps(ValueObserver):
    """Counts steps as lost that the worker's values have lost with new ones.

    Args:
        values: takes the new values.
        untold: the worker's steps.
        batches: have the samples of the steps since the last push.
        rule: what becomes of steps during an exchange.
    """

    def __init__(self, values: LocalValues, untold: UntoldSteps, batches: StepBatches, rule: TakeRule) -> None:
        self._values, self._untold, self._batches, self._rule = values, untold, batches, rule

    def before_values(self) -> None:
        self._values.before_values()

    def after_values(self) -> None:
        fragment = self._values.awaited
        self._values.after_values()
        if fragment is not None:
            self._untold.read(self._batches.samples)
            self._untold.keep(fragment, self._rule.kept)
