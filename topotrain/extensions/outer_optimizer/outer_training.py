"""The inner optimizer as a part of `tt.prepare`."""

from topotrain.config.job import ConfigError
from topotrain.core.client.client_context import StepEnd
from topotrain.extensions.outer_optimizer.exchanged_steps import LocalStepReport
from topotrain.extensions.outer_optimizer.inner_optimizer import NO_TABLES, InnerOptimizer
from topotrain.extensions.outer_optimizer.radial.radial_marks import embeddings_of
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.parameters.local_steps import LocalOptimizer
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


class OuterOptimizerExtension(PrepareExtension):
    """Lets the script's optimizer run on its worker, and the outer one on servers."""

    def __init__(self) -> None:
        self._inner: InnerOptimizer | None = None

    def local_optimizer(self, here: Context, request: PrepareRequest) -> LocalOptimizer | None:
        cluster = here.place.job.cluster
        if cluster.outer is None:
            return None
        check_tables(here)
        inner = request.only_optimizer("with cluster.outer each worker makes its steps alone")
        # No server has its state.
        here.kept[INNER] = inner
        named = request.model.named_parameters()
        self._inner = InnerOptimizer(inner, cluster, named, embeddings_of(request.model))
        return self._inner

    def attach(self, here: Context, worker: Worker) -> None:
        if self._inner is not None:
            worker.attach(_TableCheck(here))
            worker.attach(LocalStepReport(here, worker, self._inner.untold))


def check_tables(here: Context) -> None:
    """Raise ConfigError if the script has a table."""
    if here.tables is not None:
        raise ConfigError("cluster.outer", None, NO_TABLES)
