"""The inner optimizer as a part of `tt.prepare`."""

from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.parameters.local_steps import LocalOptimizer

INNER = "inner optimizer"
"""The name of its state among those that a restart restores. No name of `tt.keep` has a space."""


class OuterOptimizerExtension(PrepareExtension):
    """Lets the script's optimizer train on its worker, and the servers run the outer one."""

    def local_optimizer(self, here: Context, request: PrepareRequest) -> LocalOptimizer | None:
        cluster = here.place.job.cluster
        if cluster.outer is None:
            return None
        inner = request.only_optimizer("with cluster.outer each worker makes its steps alone")
        # No server has its state.
        here.kept[INNER] = inner
        return InnerOptimizer(inner, cluster, request.model.named_parameters())
