"""The script's optimizer as the inner one: a worker trains alone between two rounds.

Invariant: the worker's values are those that it received last, plus what it has learned and the received values do not
contain. The difference is what the worker pushes. Values that come in between are taken without losing it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, Updater, Weigh
from topotrain.config.sharding import SliceMap
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.optim.updater_block import build
from topotrain.core.protocol import NO_REVISION
from topotrain.training.parameters.device_parameters import LOCAL, CopiedParameters, ParameterHolder, QueuedPush
from topotrain.training.parameters.flat_parameters import ModelBuffers, ModelParts
from topotrain.training.parameters.gradient_hooks import GradientPath
from topotrain.training.parameters.local_steps import LocalOptimizer
from topotrain.training.worker_stats import StepBatches

_REVISION = 1


@dataclass(frozen=True, slots=True)
class Learned:
    """What a worker has learned since the last round.

    Attributes:
        steps: local steps that changed its values.
        samples: the samples of these steps; 0 where the script reads no loader of the job.
    """

    steps: int = 0
    samples: int = 0

    def weight(self, weigh: Weigh) -> float:
        """The weight of this part in the mean of a round."""
        if not self.steps:
            return 0.0
        if weigh is Weigh.kEqual:
            return 1.0
        # Samples times samples per step: steps with larger batches have less noise (Decoupled DiLoCo).
        return self.samples * self.samples / self.steps if self.samples else float(self.steps)


class LocalValues(ValueObserver):
    """The worker's own values, apart from those that it has received ("params").

    Args:
        tensors: the parameters.
        buffers: the worker's flat buffers.
        spaces: the numbers of their spaces.
    """

    def __init__(self, tensors: Sequence[nn.Parameter], buffers: ModelBuffers, spaces: Iterable[int]) -> None:
        self._tensors, self._buffers, self._spaces = tensors, buffers, tuple(spaces)
        self._holder = buffers.mirror
        self._untold = False
        self._kept = False

    def learn(self) -> None:
        """The values have changed here, and no server knows."""
        self._untold = True

    def tell(self) -> None:
        """The difference is being pushed: the next values that are received contain it."""
        self._untold = False

    def write_difference(self) -> None:
        """Write the received values minus the worker's own into "local"."""
        flats, mine = self._buffers.flats, LOCAL
        if not isinstance(self._holder, CopiedParameters):
            mine = "local"
            # From the device into "local" itself, which the subtraction then overwrites.
            self._holder.bring(mine, {index: tensor.data for index, tensor in enumerate(self._tensors)})
        # A whole buffer at a time, whatever the number of parameters.
        for space in self._spaces:
            torch.sub(flats.flat("params", space), flats.flat(mine, space), out=flats.flat("local", space))

    def before_values(self) -> None:
        self._holder.before_values()
        # Values that are asked for between two rounds do not contain what was learned since.
        self._kept = self._untold
        if self._kept:
            self.write_difference()

    def after_values(self) -> None:
        self._holder.after_values()
        if self._kept:
            for index in range(len(self._tensors)):
                own = self._holder.value(index)
                own.sub_(self._buffers.view("local", index).to(own.device))
        self._kept = False
        # New values are no edit of the script.
        self._buffers.remember()


class DifferencePath(GradientPath):
    """Pushes the received values minus the worker's own, at a commit.

    Args:
        parts, buffers, gradients, slice_map, batches: as for `GradientPath`.
        values: the worker's own values.
        trained: the numbers of the parameters that the optimizer changes.
        inner: has the weight of a push.
    """

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        gradients: GradientExchange,
        slice_map: SliceMap,
        batches: StepBatches,
        values: LocalValues,
        trained: Iterable[int],
        inner: "InnerOptimizer",
    ) -> None:
        super().__init__(parts, buffers, gradients, slice_map, batches)
        self._values, self._inner = values, inner
        self._present = [0] * len(slice_map.buckets)
        for index in trained:
            for bucket, piece in self._pieces[index]:
                self._present[bucket.id] |= 1 << piece

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        """Register nothing: the gradient of a backward stays with the script's optimizer."""

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        """No hook is registered."""

    def _end(self) -> None:
        """No hook is registered."""

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        self._values.write_difference()
        self.backwards = 1
        weight = self._inner.weight()
        for bucket in self._map.buckets:
            present = self._present[bucket.id]
            if present:
                body = self._flats.view("local", bucket)
                push = QueuedPush(self._gradients, self._step, _REVISION, bucket, weight, present, body, False)
                self._mirror.then(push)
        self._mirror.drain()
        return tuple(_REVISION if present else NO_REVISION for present in self._present), 0, 0


class InnerOptimizer(LocalOptimizer):
    """The steps of one worker between two rounds.

    Args:
        optimizer: the script's.
        outer: the servers' optimizer.
        sync_freq: local steps between two rounds.
        weigh: the weights of the mean.
        named: the model's parameters.

    Raises:
        ConfigError: the optimizer cannot make its steps this way.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        outer: Updater,
        sync_freq: int,
        weigh: Weigh,
        named: Iterable[tuple[str, nn.Parameter]],
    ) -> None:
        self._optimizer, self._freq, self._weigh = optimizer, sync_freq, weigh
        self._make_step = plain_step(type(optimizer))
        # Asked now: `tt.prepare` gives the object another class later.
        self._scales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        made = build(outer, [(name, p) for name, p in named if id(p) in self._trained])
        for group in made.param_groups:
            # The kernel that torch takes by default. The step is too rare for a faster one to matter.
            group.update({"fused": False} if "fused" in group else {})
        self.optimizers = (made,)
        self._steps = 0

    def open(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        gradients: GradientExchange,
        slice_map: SliceMap,
        batches: StepBatches,
    ) -> GradientPath:
        if parts.aside:
            accepted = "must not be given where the model has tables or sparse weights: their rows are no local values"
            raise ConfigError("cluster.outer", None, accepted)
        self._buffers, self._batches = buffers, batches
        self._values = LocalValues(parts.tensors, buffers, [space.index for space in slice_map.spaces])
        trained = [index for index, tensor in enumerate(parts.tensors) if id(tensor) in self._trained]
        return DifferencePath(parts, buffers, gradients, slice_map, batches, self._values, trained, self)

    def observer(self, holder: ParameterHolder) -> ValueObserver:
        return self._values

    # --- steps ---------------------------------------------------------------------------------------------------

    @property
    def has_sum(self) -> bool:
        return self._steps > 0 or self._batches.samples > 0

    def pushes(self, step: int) -> bool:
        return step % self._freq == 0

    def fetches(self, step: int) -> bool:
        return self.pushes(step)

    def step(self, inv_scale: float) -> None:
        if inv_scale != 1.0 and self._scales:
            # In place, as GradScaler leaves them.
            for group in self._optimizer.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.grad.mul_(inv_scale)
        self._make_step(self._optimizer)
        self._steps += 1
        self._values.learn()
        self._buffers.remember()

    @contextmanager
    def sum_as_gradient(self) -> Iterator[None]:
        self._values.tell()
        yield
        self._steps = 0

    # --- hooks of the worker -------------------------------------------------------------------------------------

    def weight(self) -> float:
        return Learned(self._steps, self._batches.samples).weight(self._weigh)

    def before_step(self) -> None:
        # The values are the worker's own: what the script changes between two steps is learned like a step.
        self._buffers.remember()

    def before_change(self) -> None:
        raise ConfigError("tt.assign", None, "cannot be used with cluster.outer: each worker has values of its own")


def plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the `step` of an optimizer's class without the hooks of the script.

    Raises:
        ConfigError: it needs a closure.
    """
    step: Any = kind.step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        accepted = "must be an optimizer with a step() that needs no closure, with cluster.outer"
        raise ConfigError("optimizer", kind.__name__, accepted)
    # torch wraps the method of each class in one that runs hooks. The adopted optimizer runs them.
    found: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found
