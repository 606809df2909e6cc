"""Counts and reports of the steps that a worker makes alone."""

import time

from topotrain.core.client.client_context import StepOutcome
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.events import LocalSteps
from topotrain.extensions.outer_optimizer.local_values import LocalValues, TakeRule
from topotrain.extensions.outer_optimizer.rounds import UntoldSteps
from topotrain.training.context import Context
from topotrain.training.step_progress import INTERVAL_S
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension
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
        """As `ValueObserver.before_values`."""
        self._values.before_values()

    def after_values(self) -> None:
        """As `ValueObserver.after_values`."""
        fragment = self._values.awaited
        self._values.after_values()
        if fragment is not None:
            self._untold.read(self._batches.samples)
            self._untold.keep(fragment, self._rule.kept)


class LocalStepReport(WorkerExtension):
    """Reports a worker's own steps, at most once in INTERVAL_S and at its end."""

    def __init__(self, here: Context, worker: Worker, untold: UntoldSteps) -> None:
        self._here, self._worker, self._untold = here, worker, untold
        self._due = 0.0

    def after_step(self, outcome: StepOutcome | None) -> None:
        """As `WorkerExtension.after_step`."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._report()

    def left_job(self) -> None:
        """As `WorkerExtension.left_job`."""
        self._report()

    def job_over(self) -> None:
        """As `WorkerExtension.job_over`."""
        self._report()

    def _report(self) -> None:
        untold, waited_s = self._untold, self._worker.client.channel.waited
        self._here.emit(LocalSteps(str(self._here.me), untold.made, untold.pending_steps, untold.dropped, waited_s))
