"""The inner optimizer as a part of `tt.prepare`."""

import time

from topotrain.config.job import ConfigError
from topotrain.core.client.client_context import StepEnd, StepOutcome
from topotrain.core.events import LocalSteps
from topotrain.extensions.inner_state.inner_state import OptimizerStates, share_state
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.groups.group_optimizer import GroupOptimizer
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.extensions.outer_optimizer.inner_optimizer import NO_TABLES, InnerOptimizer
from topotrain.extensions.outer_optimizer.radial.radial_marks import embeddings_of
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.gradients.local_steps import LocalOptimizer
from topotrain.training.step_progress import INTERVAL_S
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

INNER = "inner optimizer"
"""The name of its state in a snapshot. No name of `tt.keep` has a space."""


class _TableCheck(WorkerExtension):
    """Refuses tables that a script makes after `tt.prepare`."""

    def __init__(self, here: Context) -> None:
        self._here = here

    def before_commit(self, step: int, end: StepEnd) -> None:
        check_tables(self._here)


class LocalStepReport(WorkerExtension):
    """Reports a worker's own steps, at most once in INTERVAL_S and at its end."""

    def __init__(self, here: Context, worker: Worker, inner: InnerOptimizer) -> None:
        self._here, self._worker, self._inner = here, worker, inner
        self._due = 0.0

    def after_step(self, outcome: StepOutcome | None) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._report()

    def left_job(self) -> None:
        self._report()

    def job_over(self) -> None:
        self._report()

    def _report(self) -> None:
        inner, untold, waited_s = self._inner, self._inner.untold, self._worker.client.channel.waited
        self._here.emit(LocalSteps(str(self._here.me), untold.made, inner.unsure_steps, untold.dropped, waited_s))


class OuterOptimizerExtension(PrepareExtension):
    """Lets the script's optimizer run on its worker, and the outer one on servers.

    choices: as for `InnerOptimizer`.
    """

    def __init__(self, choices: ExchangeChoices | None = None) -> None:
        self._choices = choices
        self._inner: InnerOptimizer | None = None

    def local_optimizer(self, here: Context, request: PrepareRequest) -> LocalOptimizer | None:
        cluster, topology = here.place.job.cluster, here.place.topology
        if cluster.outer is None:
            return None
        check_tables(here)
        inner, *more = request.optimizers
        # No server has its state.
        here.kept[INNER] = OptimizerStates(request.optimizers) if more else inner
        named = request.model.named_parameters()
        wanted = inner, cluster, named, embeddings_of(request.model)
        if topology.workers_per_group == 1:
            self._inner = InnerOptimizer(*wanted, choices=self._choices, more=more)
            return self._inner
        here.alike.add(INNER)
        reduction = GroupReduction(here.me, here.place.job, topology)
        self._inner = GroupOptimizer(*wanted, reduction, choices=self._choices, more=more)
        return self._inner

    def attach(self, here: Context, worker: Worker) -> None:
        if self._inner is not None:
            worker.attach(_TableCheck(here))
            worker.attach(LocalStepReport(here, worker, self._inner))
            self._inner.meet(here.connect())
            of_others = share_state(here, INNER, self._inner.shared_state)
            if of_others is not None:
                worker.attach(of_others)

    def stop_pushing(self, here: Context) -> None:
        if self._inner is not None:
            self._inner.leave()


def check_tables(here: Context) -> None:
    """Raise ConfigError for a table in the model's steps; a `KVStore` is not in them."""
    if here.tables is not None and here.tables.in_steps:
        raise ConfigError("cluster.outer", None, NO_TABLES)
