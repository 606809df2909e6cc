"""The moves of a value between workers, as nodes of autograd: a gradient goes the way back that its value has come.

`SendActivation` sends a worker's part of a value, `ReceiveActivation` puts together what has come; each has the other's
work as its backward. Every Leave and every Arrive gives a token, and `TieTokens` makes all tokens inputs of what the
model returns: so every backward goes through all of them once, also where this worker's own loss depends on none.

Why no backward waits for ever: autograd goes through a graph in descending order of creation, and since tokens are tied
to the output, a Leave is never kept back. Times of execution in the forward are one order over all workers, in which a
part leaves before it arrives. Of all the nodes that are still to be gone through on any worker, the latest waits for
nobody, for sending does not wait.

Scale: on worker k a gradient is (W / w_k) × that of the group's loss (w: the weights, W: their sum), so that one which
has come from worker i is multiplied by w_i / w_k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch.autograd import Function

from topotrain.parallel.program.layouts import Box, Transfer, box, sizes_of, transfers, within
from topotrain.parallel.program.split_program import LayoutEdge
from topotrain.parallel.runtime.channel import ActivationChannel, ArrivedTensors, TensorKey


@dataclass(slots=True)
class ForwardMessages:
    """A worker's messages of one forward and its backward; those to itself stay here."""

    passage: ActivationChannel
    forward: int
    weights: tuple[float, ...]
    device: torch.device
    wait: Callable[[int, TensorKey], None]
    """Returns when it is here."""
    own: ArrivedTensors = field(default_factory=ArrivedTensors)

    @property
    def me(self) -> int:
        """This worker's index in the group."""
        return self.passage.me

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool) -> None:
        """As `ActivationChannel.send`, also to oneself."""
        if to == self.me:
            self.own.put(to, key, _copy(tensor), grad)
        else:
            self.passage.send(to, key, tensor, grad)

    def take(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """As `ActivationChannel.take`, also from oneself; on the model's device."""
        if source == self.me:
            return self.own.take(source, key)
        self.wait(source, key)
        tensor, grad = self.passage.take(source, key)
        return tensor.to(self.device), grad

    def missing(self, move: "EdgeTransfer") -> list[tuple[int, TensorKey]]:
        """What has not come yet of what arrives by a move."""
        key = move.key(False)
        return [(t.source, key) for t in move.incoming if t.source != self.me and not self.passage.here(t.source, key)]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One edge and one worker, for given numbers of samples: `outgoing` it sends, `incoming` it gets.

    have, want: its boxes of the whole tensor, before and after.
    """

    edge: LayoutEdge
    outgoing: tuple[Transfer, ...]
    incoming: tuple[Transfer, ...]
    have: Box | None
    want: Box | None

    @staticmethod
    def of(edge: LayoutEdge, me: int, samples: Sequence[int]) -> "TransferPlan":
        """For each worker's number of samples."""
        found = transfers(edge, samples)
        return TransferPlan(
            edge,
            tuple(t for t in found if t.source == me),
            tuple(t for t in found if t.target == me),
            box(edge.source, me, edge.shape, samples),
            box(edge.target, me, edge.shape, samples),
        )


class EdgeTransfer:
    """A plan at work for one micro-batch."""

    def __init__(self, plan: TransferPlan, micro: int, post: ForwardMessages) -> None:
        self.edge, self.micro, self.post = plan.edge, micro, post
        self.outgoing, self.incoming = plan.outgoing, plan.incoming
        self._have, self._want = plan.have, plan.want
        self._answers: tuple[Transfer, ...] = ()

    def key(self, backward: bool) -> TensorKey:
        """Under which the boxes travel."""
        return TensorKey(self.post.forward, self.micro, self.edge.number, backward)

    def leave(self, part: torch.Tensor) -> torch.Tensor | None:
        """Send this worker's part, and give the token, if there will be a gradient."""
        if part.requires_grad and torch.is_grad_enabled():
            token: torch.Tensor = SendActivation.apply(part, self)  # type: ignore[no-untyped-call]
            return token
        self.send(part, False)
        return None

    def arrive(self, anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The value in its target's layout, and the token, if somebody wants the gradient."""
        value, answers = self._assemble()
        # a value of no samples comes from nobody, and the script's backward must not fail over it
        wanted = bool(answers) or (not self.incoming and value.is_floating_point())
        if not wanted or not torch.is_grad_enabled():
            return value, None
        self._answers = answers
        arrived, token = ReceiveActivation.apply(anchor, [value], self)  # type: ignore[no-untyped-call]
        return arrived, token

    def take_own(self, value: torch.Tensor) -> torch.Tensor:
        """The target's part of a value that this worker has as a whole."""
        return value if self._want == self._have else value[within(_box(self._want), _box(self._have))]

    def send(self, part: torch.Tensor, grad: bool) -> None:
        """Each one its box. It is copied at once, for a later step may write to the value."""
        have = _box(self._have)
        if part.shape != torch.Size(sizes_of(have)):
            raise ValueError(f"this worker's part has shape {tuple(part.shape)}, the plan says {sizes_of(have)}")
        for transfer in self.outgoing:
            self.post.send(transfer.target, self.key(False), part[within(transfer.box, have)], grad)

    def _assemble(self) -> tuple[torch.Tensor, tuple[Transfer, ...]]:
        want, whole, answers = _box(self._want), None, []
        for transfer in self.incoming:
            tensor, grad = self.post.take(transfer.source, self.key(False))
            if grad:
                answers.append(transfer)
            if transfer.box == want:
                whole = tensor
                continue
            if whole is None:
                whole = tensor.new_empty(sizes_of(want))
            whole[within(transfer.box, want)] = tensor
        if whole is None:  # no samples
            whole = torch.empty(sizes_of(want), dtype=getattr(torch, self.edge.shape.dtype), device=self.post.device)
        return whole, tuple(answers)

    def answer(self, gradient: torch.Tensor | None) -> None:
        """Send the gradient back, each one its box."""
        want = _box(self._want)
        for transfer in self._answers:
            if gradient is None:
                nothing = torch.empty(0, device=self.post.device)
                self.post.send(transfer.source, self.key(True), nothing, False)
            else:
                self.post.send(transfer.source, self.key(True), gradient[within(transfer.box, want)], True)

    def collect(self) -> torch.Tensor | None:
        """The gradient of this worker's part: what those say who got some of it, added in the order of workers."""
        have, found = _box(self._have), list[tuple[Transfer, torch.Tensor]]()
        for transfer in self.outgoing:
            gradient, there = self.post.take(transfer.target, self.key(True))
            if there:
                factor = self.post.weights[transfer.target] / self.post.weights[self.post.me]
                found.append((transfer, gradient if factor == 1.0 else gradient * factor))
        if not found:
            return None
        if found[0][0].box == have:  # one worker has got all of it, or each has
            return reduce(torch.add, [gradient for _, gradient in found])
        covered = sum(prod(sizes_of(transfer.box)) for transfer, _ in found) == prod(sizes_of(have))
        make = torch.empty if covered else torch.zeros
        total = make(sizes_of(have), dtype=found[0][1].dtype, device=found[0][1].device)
        for transfer, gradient in found:
            total[within(transfer.box, have)] = gradient
        return total


class SendActivation(Function):
    """(part, move) -> token, a number that is 0."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, move: EdgeTransfer) -> torch.Tensor:
        """Send."""
        ctx.set_materialize_grads(False)
        ctx.move = move
        move.send(part.detach(), True)
        return torch.zeros((), device=part.device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Collect."""
        return ctx.move.collect(), None


class ReceiveActivation(Function):
    """(anchor, [value], move) -> value, token. The anchor is a leaf: without one there would be no way back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: list[torch.Tensor], move: EdgeTransfer) -> Any:
        """The value in the list becomes a node's result."""
        ctx.set_materialize_grads(False)
        ctx.move = move
        arrived = value.pop()
        return arrived, torch.zeros((), device=arrived.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Answer."""
        ctx.move.answer(gradients[0])
        return None, None, None


class TieTokens(Function):
    """(begun, factor, count, results and tokens) -> the first `count` of them, as they are.

    Backward calls `begun`; gradients of results are multiplied by `factor` (0: zero, whatever they are).
    """

    @staticmethod
    def forward(ctx: Any, begun: Callable[[], None], factor: float, count: int, *tensors: torch.Tensor) -> Any:
        """An alias each, not a view: the script may write to it."""
        ctx.set_materialize_grads(False)
        ctx.begun, ctx.factor, ctx.rest = begun, factor, len(tensors) - count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients to the results."""
        ctx.begun()
        return None, None, None, *(_scaled(gradient, ctx.factor) for gradient in gradients), *[None] * ctx.rest


def _scaled(gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    if gradient is None or factor == 1.0:
        return gradient
    return torch.zeros_like(gradient) if factor == 0 else gradient * factor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _box(part: Box | None) -> Box:
    if part is None:
        raise ValueError("this worker has no part of the value")
    return part
