"""The inner optimizer of a worker that shares its replica with its group."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import Cluster
from topotrain.core.client.client import Client
from topotrain.core.client.client_context import StepOutcome
from topotrain.core.profiling.spans import Clock
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.groups.group_path import GroupPath
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction, PeerChannel
from topotrain.extensions.outer_optimizer.inner_optimizer import DifferencePath, InnerOptimizer
from topotrain.training.context import Connections
from topotrain.training.gradients.gradient_hooks import GradientPath
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_stats import StepBatches


class GroupOptimizer(InnerOptimizer):
    """The steps of a worker in a group of several.

    All workers of the group make the same steps with the same gradients, so they have the same values.

    Args:
        optimizer, cluster, named, embeddings, clock, choices, more: as for `InnerOptimizer`.
        group: adds up the gradients.

    Raises:
        ConfigError: the optimizer cannot make its steps this way.
    """

    # Gradients come into "local" while what was learned before is still pushed.
    difference = "difference"

    def __init__(
        self,
        optimizer: Optimizer,
        cluster: Cluster,
        named: Iterable[tuple[str, nn.Parameter]],
        embeddings: Collection[nn.Parameter],
        group: GroupReduction,
        clock: Clock | None = None,
        choices: ExchangeChoices | None = None,
        more: Sequence[Optimizer] = (),
    ) -> None:
        super().__init__(optimizer, cluster, named, embeddings, clock, choices, more)
        self._group, self._samples = group, 0

    def open(self, buffers: ModelBuffers, client: Client, batches: StepBatches) -> GradientPath:
        path = super().open(buffers, client, batches)
        assert isinstance(path, DifferencePath)
        self._path = GroupPath(buffers, self._group, batches, path)
        path.push_only(self._group.pushed_share())
        return self._path

    @property
    def samples(self) -> int:
        """Those of all workers of the group, since the last push."""
        return self._samples

    @property
    def named(self) -> int:
        """As the coordinator has named it to worker 0 before the last backward."""
        return self._group.named

    @property
    def interval(self) -> int:
        """As worker 0 of the group has measured it before the last backward."""
        return self._group.interval

    def settles(self, step: int, over: bool) -> bool:
        # All workers of the group take the new values behind the same step, and not each when it has them.
        return super().settles(step, self._group.settled)

    def step(self, inv_scale: float, number: int = 0) -> None:
        super().step(inv_scale, number)
        self._samples += self._group.samples

    @contextmanager
    def sum_as_gradient(self) -> Iterator[None]:
        self._group.pause(self._made)
        with super().sum_as_gradient():
            yield
        self._samples = 0

    # --- hooks of the worker -------------------------------------------------------------------------------------

    def before_step(self) -> None:
        self._path.end_backwards()
        super().before_step()
        self._group.propose(super().interval)

    def after_step(self, outcome: StepOutcome | None) -> None:
        self._path.end_step()

    def leave(self) -> None:
        """The script has ended."""
        self._group.pause(self._made, over=True)

    def meet(self, connections: Connections) -> None:
        """Connect to the other workers of the group, which all call this once.

        Raises as `Connections.join_group`.
        """
        connections.join_group(self.channel(connections.exchange, connections.group_sender))

    def channel(self, client: Client, sender: MessageSender) -> PeerChannel:
        """Return the channel of this worker to the others, which are not connected yet."""
        return PeerChannel(client, sender, self._group)
