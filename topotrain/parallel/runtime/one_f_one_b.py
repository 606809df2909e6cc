"""The schedule k1F1B: one forward, one backward, inside the model's call.

It is PipeDream-flush of Narayanan et al., 2021. A micro-batch runs its backward as soon as its loss is known and the
first gradient that this worker needs has arrived, before another micro-batch starts. So a worker keeps the activations
of as many micro-batches as there are stages from its own to the last, and not of all.

The model must return its loss, one number, because a backward can only start from it. Gradients are kept, and added to
the parameters when the script calls `loss.backward()`.

There is no deadlock. All workers run the backwards of micro-batches in the same order, so of those inside a backward
the lowest micro-batch waits for no worker that is in another one. And the lowest micro-batch without a backward may
always start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from topotrain.config.field_checks import ConfigError
from topotrain.parallel.program.split_program import LocationKind, Program, ResultRef, StepKind
from topotrain.parallel.runtime.channel import TensorKey
from topotrain.parallel.runtime.microbatch import ForwardPass, ForwardSettings, MicroBatchState, one_step
from topotrain.parallel.runtime.model_outputs import mean
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.worker_sync import WorkerSync


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss that the model returns: its value, and the edge that sends it to all.

    Without an edge each worker has a loss of its own.
    """

    ref: ResultRef
    edge: int | None


def loss_of(program: Program) -> LossOutput:
    """Return the loss of a program. Raises ConfigError if its output is not one loss."""
    ref = program.output
    if isinstance(ref, ResultRef):
        edge = next((edge for edge in program.edges if edge.number == ref.edge), None)
        step = next(step for step in program.steps if step.number == ref.number)
        shape = step.shape if edge is None else edge.shape
        where = (step.layout if edge is None else edge.target).where
        if shape is not None and not shape.sizes and shape.dtype.startswith(("float", "bfloat")):
            if edge is not None and edge.source.where is LocationKind.AT and where is LocationKind.WHOLE:
                return LossOutput(ref, edge.number)
            if edge is None and where is LocationKind.OWN:
                return LossOutput(ref, None)
    raise ConfigError(
        "schedule",
        "k1F1B",
        "needs a forward that returns the loss and nothing else, one number; take kGPipe for a model that returns its "
        "outputs",
    )


def in_flight(program: Program, me: int) -> int:
    """Return of how many micro-batches this worker may keep activations."""
    order = list(dict.fromkeys(step.layout.worker for step in program.steps if step.layout.where is LocationKind.AT))
    first = next((step for step in program.steps if step.kind is not StepKind.INPUT and step.layout.on(me)), None)
    # A worker that computes on its share before the first stage must keep up with the first stage.
    if first is None or first.layout.where is not LocationKind.AT:
        return program.workers
    # The number of stages from this worker's own to the last.
    return max(1, len(order) - order.index(me))


class DeferredBackward(Function):
    """(sync, gradients, loss, anchor, parameters) -> loss, with known gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        sync: WorkerSync,
        gradients: Sequence[torch.Tensor | None],
        loss: torch.Tensor,
        *_: torch.Tensor,
    ) -> Any:
        """Return the loss and store its gradients."""
        ctx.state = sync, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        """Give the gradients to the parameters, multiplied by that of the loss."""
        sync, gradients = ctx.state
        sync.begun()
        (factor,) = given
        return None, None, None, None, *(None if g is None else g * factor.to(g.device, g.dtype) for g in gradients)


class OneFOneBForward:
    """One forward under this schedule.

    Args:
        factor: factor of the gradients of this worker's own loss.
    """

    def __init__(self, settings: ForwardSettings, forward_pass: ForwardPass, loss: LossOutput, factor: float) -> None:
        self.settings, self.forward_pass, self.loss, self.factor = settings, forward_pass, loss, factor
        self.limit = in_flight(settings.program, settings.me)
        self.batches: list[MicroBatchState | None] = [
            MicroBatchState(settings, forward_pass, m, loss.edge) for m in range(forward_pass.micros)
        ]
        self.parameters = [p for p in settings.model.parameters() if p.requires_grad and not p.is_meta]
        self.gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._sums: set[int] = set()  # gradients to which another one may be added in place
        self.losses: list[torch.Tensor] = []
        self.back = 0

    def __call__(self, channel: NetworkChannel, sync: WorkerSync) -> torch.Tensor:
        """Run all micro-batches forward and back, and return the loss."""
        counts = [self._count(batch.samples) for batch in self.batches if batch is not None]
        while self.back < self.forward_pass.micros:
            blocked = self._turn(counts)
            if blocked is not None:
                channel.wait_any(blocked)
        value = mean(self.losses, counts) if len(counts) > 1 else self.losses[0]
        # The script's backward from this loss adds the gradients to the parameters.
        loss: torch.Tensor = DeferredBackward.apply(sync, self.gradients, value, self.settings.anchor, *self.parameters)  # type: ignore[no-untyped-call]
        return loss

    def _turn(self, counts: Sequence[int]) -> list[tuple[int, TensorKey]] | None:
        """Run one stop or one backward, or return the tensors for which all wait."""
        going = [batch for batch in self.batches if batch is not None]
        lowest, blocked = going[0], list[tuple[int, TensorKey]]()
        # A backward comes before another forward step: it frees activations.
        if lowest.done:
            blocked = self._awaited(lowest)
            if not blocked:
                self._go_back(lowest, counts[self.back] / max(1, sum(counts)))
                return None
        may = [index for index, batch in enumerate(going) if index < self.limit or self._feeds(batch)]
        ran, wanted = one_step(going, may)
        return None if ran else blocked + wanted

    def _count(self, samples: Sequence[int]) -> int:
        return samples[self.settings.me] if self.loss.edge is None else sum(samples)

    @staticmethod
    def _feeds(batch: MicroBatchState) -> bool:
        """Return whether the next step reads an input. Inputs may be sent at any time."""
        return not batch.done and batch.next.step is not None and batch.next.step.kind is StepKind.INPUT

    def _awaited(self, batch: MicroBatchState) -> list[tuple[int, TensorKey]]:
        """Return the gradients for which the micro-batch's backward would wait at once."""
        if self._root(batch) is not None or not batch.departed:
            return []
        messages, move = self.forward_pass.messages, batch.departed[-1]
        key = move.key(True)
        return [
            (t.target, key)
            for t in move.outgoing
            if t.target != messages.me and not messages.channel.arrived(t.target, key)
        ]

    def _root(self, batch: MicroBatchState) -> torch.Tensor | None:
        root = batch.values[self.loss.ref] if self.loss.edge is None else batch.root
        return root if isinstance(root, torch.Tensor) and root.requires_grad else None

    def _go_back(self, batch: MicroBatchState, part: float) -> None:
        """Run the backward of one micro-batch; its loss is `part` of the whole."""
        self.losses.append(batch.values[self.loss.ref].detach())
        # Tokens have no value. They are ends of the graph, so that every move runs its part of the backward.
        ends, seeds = list(batch.tokens), [torch.zeros_like(token) for token in batch.tokens]
        root = self._root(batch)
        if root is not None:
            ends.insert(0, root)
            seeds.insert(0, torch.full_like(root, self._seed() * part))
        # The graph is freed with its backward, so that the activations do not stay until the last micro-batch.
        self.batches[self.back] = None
        self.back += 1
        if not ends:
            return
        # not .backward(): that would call the hooks of the parameters once for every micro-batch
        wanted = [*self.parameters, self.settings.anchor]
        found = torch.autograd.grad(ends, wanted, seeds, allow_unused=True)
        for index, gradient in enumerate(found[:-1]):
            if gradient is not None:
                self._add(index, gradient)

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the sum of a parameter."""
        before = self.gradients[index]
        if before is None:
            self.gradients[index] = gradient
        elif index in self._sums:
            before.add_(gradient)
        else:
            # Fresh memory, because autograd may return the same tensor for two parameters.
            self.gradients[index] = before + gradient
            self._sums.add(index)

    def _seed(self) -> float:
        """Return the gradient of the loss that all workers' loss.backward() would give."""
        if self.loss.edge is None:
            return self.factor
        weights = self.forward_pass.messages.weights
        return sum(weights) / weights[self.settings.me]
