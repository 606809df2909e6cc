"""Moves of values between workers as nodes of autograd, with gradients sent back.

`SendActivation` sends a worker's part of a value, and `ReceiveActivation` assembles the parts that arrive. The backward
of each does the work of the other. Every send and every receive returns a token. `TieTokens` makes all tokens inputs of
the model's output, so every backward runs all moves once, even if this worker's own loss depends on none.

No backward waits forever. Autograd runs a graph in descending order of creation, and since tokens are tied to the
output, a SendActivation is never delayed. Times of execution in the forward are one order over all workers, in which a
part is sent before it is received. Of all nodes that are still to run in the backward on any worker, the latest waits
for no other, because sending does not wait.

"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch.autograd import Function

from topotrain.parallel.program.layouts import Box, Transfer, box, sizes_of, transfers, within
from topotrain.parallel.program.split_program import LayoutEdge
from topotrain.parallel.runtime.channel import ArrivedTensors, TensorKey
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.worker_sync import WorkerSync


@dataclass(slots=True)
class ForwardMessages:
    """A worker's messages of one forward and its backward. `own`: those to itself."""

    channel: NetworkChannel
    forward: int
    weights: tuple[float, ...]
    device: torch.device
    sync: WorkerSync
    own: ArrivedTensors = field(default_factory=ArrivedTensors)

    @property
    def me(self) -> int:
        """This worker's index in the group."""
        return self.channel.me

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool) -> None:
        """Send a tensor to a worker, possibly this one, see `NetworkChannel.send`."""
        if to == self.me:
            self.own.put(to, key, _copy(tensor), grad)
        else:
            self.channel.send(to, key, tensor, grad)

    def receive(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        """Return a tensor on the model's device, possibly from this worker itself."""
        if source == self.me:
            return self.own.pop(source, key)
        # Fails with the reason, instead of waiting, if the other script has left out the backward.
        self.sync.wait(source, key)
        tensor, grad = self.channel.receive(source, key)
        return tensor.to(self.device), grad

    def missing(self, move: "EdgeTransfer") -> list[tuple[int, TensorKey]]:
        """Return the incoming tensors of a move that have not arrived yet."""
        key = move.key(False)
        return [
            (t.source, key) for t in move.incoming if t.source != self.me and not self.channel.arrived(t.source, key)
        ]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfers of one edge on one worker, for given numbers of samples.

    `have` and `want` are its boxes of the whole tensor before and after the move.
    """

    edge: LayoutEdge
    outgoing: tuple[Transfer, ...]
    incoming: tuple[Transfer, ...]
    have: Box | None
    want: Box | None

    @staticmethod
    def of(edge: LayoutEdge, me: int, samples: Sequence[int]) -> "TransferPlan":
        """Return the plan of worker `me` for each worker's number of samples."""
        found = transfers(edge, samples)
        return TransferPlan(
            edge,
            tuple(t for t in found if t.source == me),
            tuple(t for t in found if t.target == me),
            box(edge.source, me, edge.shape, samples),
            box(edge.target, me, edge.shape, samples),
        )


class EdgeTransfer:
    """Executes a plan for one micro-batch."""

    def __init__(self, plan: TransferPlan, micro: int, messages: ForwardMessages) -> None:
        self.edge, self.micro, self.messages = plan.edge, micro, messages
        self.outgoing, self.incoming = plan.outgoing, plan.incoming
        self._have, self._want = plan.have, plan.want
        self._answers: tuple[Transfer, ...] = ()

    def key(self, backward: bool) -> TensorKey:
        """Return the key of the boxes."""
        return TensorKey(self.messages.forward, self.micro, self.edge.number, backward)

    def leave(self, part: torch.Tensor) -> torch.Tensor | None:
        """Send this worker's part. Returns the token if there will be a gradient."""
        if part.requires_grad and torch.is_grad_enabled():
            token: torch.Tensor = SendActivation.apply(part, self)  # type: ignore[no-untyped-call]
            return token
        self.send(part, False)
        return None

    def arrive(self, anchor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the value in the target layout, and the token if a gradient is wanted."""
        value, answers = self._assemble()
        # a value without samples has no sender, and the script's backward must still work
        wanted = bool(answers) or (not self.incoming and value.is_floating_point())
        if not wanted or not torch.is_grad_enabled():
            return value, None
        self._answers = answers
        arrived, token = ReceiveActivation.apply(anchor, [value], self)  # type: ignore[no-untyped-call]
        return arrived, token

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return the target's part of a value that this worker has as a whole."""
        return value if self._want == self._have else value[within(_box(self._want), _box(self._have))]

    def send(self, part: torch.Tensor, grad: bool) -> None:
        """Send each target its box."""
        have = _box(self._have)
        if part.shape != torch.Size(sizes_of(have)):
            raise ValueError(f"this worker's part has shape {tuple(part.shape)}, the plan has {sizes_of(have)}")
        for transfer in self.outgoing:
            # Copied at once, because a later step may write to the value.
            self.messages.send(transfer.target, self.key(False), part[within(transfer.box, have)], grad)

    def _assemble(self) -> tuple[torch.Tensor, tuple[Transfer, ...]]:
        want, whole, answers = _box(self._want), None, []
        for transfer in self.incoming:
            tensor, grad = self.messages.receive(transfer.source, self.key(False))
            if grad:
                answers.append(transfer)
            if transfer.box == want:
                whole = tensor
                continue
            if whole is None:
                whole = tensor.new_empty(sizes_of(want))
            whole[within(transfer.box, want)] = tensor
        if whole is None:  # no samples
            dtype = getattr(torch, self.edge.shape.dtype)
            whole = torch.empty(sizes_of(want), dtype=dtype, device=self.messages.device)
        return whole, tuple(answers)

    def answer(self, gradient: torch.Tensor | None) -> None:
        """Send each source the gradient of its box."""
        want = _box(self._want)
        for transfer in self._answers:
            if gradient is None:
                nothing = torch.empty(0, device=self.messages.device)
                self.messages.send(transfer.source, self.key(True), nothing, False)
            else:
                self.messages.send(transfer.source, self.key(True), gradient[within(transfer.box, want)], True)

    def collect(self) -> torch.Tensor | None:
        """Return the gradient of this worker's part, or None if no worker has one."""
        have, found = _box(self._have), list[tuple[Transfer, torch.Tensor]]()
        for transfer in self.outgoing:
            gradient, there = self.messages.receive(transfer.target, self.key(True))
            # Relative to the group's loss, worker k scales gradients by W / w_k (w: the weights, W: their sum).
            if there:
                factor = self.messages.weights[transfer.target] / self.messages.weights[self.messages.me]
                found.append((transfer, gradient if factor == 1.0 else gradient * factor))
        if not found:
            return None
        # In the order of workers, so that the bits of the sum are the same in every run.
        if found[0][0].box == have:  # every receiver got the whole part
            return reduce(torch.add, [gradient for _, gradient in found])
        # Receivers that have no gradient leave gaps, which mean zero.
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
        """Send the part."""
        # None means that there is no gradient, and saves the memory of zeros.
        ctx.set_materialize_grads(False)
        ctx.move = move
        move.send(part.detach(), True)
        return torch.zeros((), device=part.device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Collect the gradient."""
        return ctx.move.collect(), None


class ReceiveActivation(Function):
    """(anchor, [value], move) -> value, token.

    The anchor is a leaf that requires a gradient. Without one autograd would not run the backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: list[torch.Tensor], move: EdgeTransfer) -> Any:
        """Take the value out of the list and return it as a node's result."""
        ctx.set_materialize_grads(False)
        ctx.move = move
        # In a list autograd does not see it as an input, so the output is the tensor itself.
        arrived = value.pop()
        return arrived, torch.zeros((), device=arrived.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send the gradient back."""
        ctx.move.answer(gradients[0])
        return None, None, None


class TieTokens(Function):
    """(sync, factor, count, results and tokens) -> the first `count`, unchanged.

    The backward is counted in `sync`, and multiplies gradients of results by `factor`.
    """

    @staticmethod
    def forward(ctx: Any, sync: WorkerSync, factor: float, count: int, *tensors: torch.Tensor) -> Any:
        """Return an alias of each result. Not a view, because the script may write to it."""
        ctx.set_materialize_grads(False)
        ctx.state = sync, factor, len(tensors) - count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the scaled gradients of the results."""
        sync, factor, rest = ctx.state
        # One backward of the script runs this node once, whichever outputs it starts from.
        sync.begun()
        return None, None, None, *(_scaled(gradient, factor) for gradient in gradients), *[None] * rest


def _scaled(gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    if gradient is None or factor == 1.0:
        return gradient
    # 0 × inf would be NaN, and the samples of this worker must not count.
    return torch.zeros_like(gradient) if factor == 0 else gradient * factor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _box(part: Box | None) -> Box:
    if part is None:
        raise ValueError("this worker has no part of the value")
    return part
