"""The inner optimizer as a part of `tt.prepare`."""

from topotrain.config.job import ConfigError
from topotrain.core.client.client_context import StepEnd
from topotrain.extensions.inner_state.inner_state import share_state
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.exchanged_steps import LocalStepReport
from topotrain.extensions.outer_optimizer.groups.group_optimizer import GroupOptimizer
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction
from topotrain.extensions.outer_optimizer.inner_optimizer import NO_TABLES, InnerOptimizer
from topotrain.extensions.outer_optimizer.radial.radial_marks import embeddings_of
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.parameters.local_steps import LocalOptimizer
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

INNER = "inner optimizer"
"""The name of its state in a snapshot. No name of `tt.keep` has a space."""
NO_SPLIT = "must not be given where the model is split over the workers of a group: each worker trains all of it"


class _TableCheck(WorkerExtension):
    """Refuses tables that a script makes after `tt.prepare`."""

    def __init__(self, here: Context) -> None:
        self._here = here

    def before_commit(self, step: int, end: StepEnd) -> None:
        check_tables(self._here)


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
        inner = request.only_optimizer("with cluster.outer each worker makes its steps alone")
        # No server has its state.
        here.kept[INNER] = inner
        named = request.model.named_parameters()
        wanted = inner, cluster, named, embeddings_of(request.model)
        if topology.workers_per_group == 1:
            self._inner = InnerOptimizer(*wanted, choices=self._choices)
            return self._inner
        if here.will_split(request.model):
            raise ConfigError("cluster.outer", None, NO_SPLIT)
        here.alike.add(INNER)
        self._inner = GroupOptimizer(*wanted, GroupReduction(here.me, here.place.job, topology), self._choices)
        return self._inner

    def attach(self, here: Context, worker: Worker) -> None:
        if self._inner is not None:
            worker.attach(_TableCheck(here))
            worker.attach(LocalStepReport(here, worker, self._inner.untold))
            self._inner.meet(here.connect())
            of_others = share_state(here, INNER, self._inner.shared_state)
            if of_others is not None:
                worker.attach(of_others)

    def stop_pushing(self, here: Context) -> None:
        if self._inner is not None:
            self._inner.leave()


def check_tables(here: Context) -> None:
    """Raise ConfigError if the script has a table."""
    if here.tables is not None:
        raise ConfigError("cluster.outer", None, NO_TABLES)
