"""N workers of one group as threads of this process, which send through mailboxes; and graphs cut by hand."""

import copy
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from topotrain.core.client.client import PeerLost
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.placement.assign_modules import assignments
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.program.build_program import program
from topotrain.parallel.program.split_program import (
    LayoutEdge,
    LocationKind,
    Program,
    ProgramStep,
    ResultRef,
    StepKind,
    SymbolicShape,
    ValueLocation,
)
from topotrain.parallel.runtime.channel import ArrivedTensors, TensorKey
from topotrain.parallel.runtime.local_model import localise
from topotrain.parallel.runtime.program_runner import Runner
from topotrain.parallel.runtime.worker_sync import WorkerSync

BATCH, SAME, OWN, WHOLE = (
    ValueLocation(LocationKind.BATCH),
    ValueLocation(LocationKind.SAME),
    ValueLocation(LocationKind.OWN),
    ValueLocation(LocationKind.WHOLE),
)


def at(worker: int) -> ValueLocation:
    return ValueLocation(LocationKind.AT, worker=worker)


def feature(dim: int) -> ValueLocation:
    return ValueLocation(LocationKind.FEATURE, dim=dim)


class GroupMailboxes:
    """The tensors that have arrived at each worker. A worker that leaves with an error ends the others, as in a job."""

    def __init__(self, size: int) -> None:
        self.stores, self.changed, self.lost = [ArrivedTensors() for _ in range(size)], threading.Condition(), False
        self.sent: list[tuple[int, int, TensorKey, int]] = []

    def lose(self) -> None:
        with self.changed:
            self.lost = True
            self.changed.notify_all()


class MailboxChannel:
    """The channel of one worker, which puts tensors into the mailboxes of the others."""

    def __init__(self, mailboxes: GroupMailboxes, me: int) -> None:
        self.mailboxes, self.me, self.size = mailboxes, me, len(mailboxes.stores)

    def send(self, to: int, key: TensorKey, tensor: torch.Tensor, grad: bool = False) -> None:
        with self.mailboxes.changed:
            self.mailboxes.stores[to].put(self.me, key, tensor.detach().clone(), grad)
            self.mailboxes.sent.append((self.me, to, key, tensor.numel()))
            self.mailboxes.changed.notify_all()

    def arrived(self, source: int, key: TensorKey) -> bool:
        with self.mailboxes.changed:
            return self.mailboxes.stores[self.me].has(source, key)

    def receive(self, source: int, key: TensorKey) -> tuple[torch.Tensor, bool]:
        self.wait_any([(source, key)])
        with self.mailboxes.changed:
            return self.mailboxes.stores[self.me].pop(source, key)

    def wait_any(self, wanted: Collection[tuple[int, TensorKey]]) -> None:
        assert wanted
        mine = self.mailboxes.stores[self.me]
        with self.mailboxes.changed:
            came = self.mailboxes.changed.wait_for(
                lambda: self.mailboxes.lost or any(mine.has(*one) for one in wanted), timeout=30
            )
            if self.mailboxes.lost:
                raise PeerLost("another worker is gone")
            assert came, f"worker {self.me} waits for ever for {wanted}"


class WeightedSync(WorkerSync):
    """The weight of a worker comes from a function."""

    def __init__(self, channel: MailboxChannel, weight: Callable[[], float]) -> None:
        super().__init__(channel)  # type: ignore[arg-type]
        self._weight = weight

    def weight(self) -> float:
        return self._weight()


def make_runner(
    program: Program, model: nn.Module, channel: MailboxChannel, weight: Callable[[], float], *args: Any, **kwargs: Any
) -> Runner:
    return Runner(program, model, channel, *args, sync=WeightedSync(channel, weight), **kwargs)  # type: ignore[arg-type]


def together(size: int, work: Callable[[MailboxChannel], Any], mailboxes: GroupMailboxes | None = None) -> list[Any]:
    """What each worker's `work` returns; raises the first error that is not a consequence of another's."""
    mailboxes = mailboxes or GroupMailboxes(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def live(me: int) -> None:
        try:
            results[me] = work(MailboxChannel(mailboxes, me))
        except BaseException as error:
            errors.append(error)
            mailboxes.lose()

    threads = [threading.Thread(target=live, args=(me,), daemon=True) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    causes = [error for error in errors if not isinstance(error, PeerLost)]
    if errors:
        raise (causes or errors)[0]
    return results


class Cut:
    """Builds a graph by hand: steps in order, a move where an argument is asked for in another layout."""

    def __init__(self, workers: int) -> None:
        self.workers, self.steps, self.edges = (
            workers,
            list[ProgramStep](),
            dict[tuple[int, ValueLocation], LayoutEdge](),
        )

    def step(
        self, kind: StepKind, target: Any, layout: ValueLocation, shape: SymbolicShape | None, *args: Any, **kwargs: Any
    ) -> ResultRef:
        number = len(self.steps)
        random = kwargs.pop("random", False)
        name = target if isinstance(target, str) else target.__name__
        self.steps.append(
            ProgramStep(number, name, kind, target, layout, args, kwargs, shape, random, f"net.py:{number + 1}")
        )
        return ResultRef(number)

    def input(self, name: str, shape: SymbolicShape, layout: ValueLocation = BATCH) -> ResultRef:
        return self.step(StepKind.INPUT, name, layout, shape)

    def module(self, name: str, layout: ValueLocation, shape: SymbolicShape, *args: Any, **kwargs: Any) -> ResultRef:
        return self.step(StepKind.MODULE, name, layout, shape, *args, **kwargs)

    def call(
        self,
        function: Callable[..., Any],
        layout: ValueLocation,
        shape: SymbolicShape | None,
        *args: Any,
        **kwargs: Any,
    ) -> ResultRef:
        return self.step(StepKind.FUNCTION, function, layout, shape, *args, **kwargs)

    def move(self, ref: ResultRef, target: ValueLocation) -> ResultRef:
        step = self.steps[ref.number]
        if step.layout == target:
            return ref
        edge = self.edges.setdefault(
            (ref.number, target), LayoutEdge(len(self.edges), ref.number, step.layout, target, step.shape)
        )
        return replace(ref, edge=edge.number)

    def program(self, output: Any) -> Program:
        names = tuple(step.target for step in self.steps if step.kind is StepKind.INPUT)
        return Program(self.workers, tuple(self.steps), tuple(self.edges.values()), names, output)


def rows(*sizes: int, dtype: str = "float32") -> SymbolicShape:
    """One row of these sizes for each sample."""
    return SymbolicShape((0, *sizes), dtype, 0)


NUMBER = SymbolicShape((), "float32")


def mean_gradients(models: Sequence[nn.Module], weights: Sequence[float]) -> dict[str, torch.Tensor | None]:
    """As servers would: the weighted mean over the workers, no gradient counts as zero."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in models[0].named_parameters():
        grads = [dict(model.named_parameters())[name].grad for model in models]
        terms = [grad * weight for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        found[name] = None if not terms else sum(terms[1:], terms[0]) / sum(weights)
        assert parameter.requires_grad
    return found


@dataclass
class Block:
    """Of `partition` in a conf."""

    match: str
    partition_dim: int = -1
    location: int | None = None


@dataclass
class Blocks:
    """A conf."""

    partition: Sequence[Block]


class Group:
    """A model cut by capture and inference; every worker holds its parts only, and servers are emulated.

    Args:
        shares: each worker's arguments.
        kwargs: of the runners.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        shares: Sequence[tuple[Any, ...]],
        lr: float = 0.1,
        samples: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        self.size, self.lr, self.shares, self.mailboxes = len(shares), lr, shares, GroupMailboxes(len(shares))
        samples = samples or [len(share[0]) for share in shares]
        self.weights = [float(count) for count in samples]
        self.models, self.runners, self.parts, self.divisions = [], [], [], []
        for me in range(self.size):
            mine = copy.deepcopy(model)
            captured = capture(mine)
            assigned = assignments(mine, Blocks(blocks), self.size, captured)
            division = divide(mine, assigned, self.size)
            optimizer = torch.optim.SGD(mine.parameters(), lr=lr)
            self.parts.append(localise(mine, optimizer, division, me).parts.tensors)
            self.program = program(captured, assigned, mine, shares[0], {}, samples[0], self.size)
            self.models.append(mine)
            self.divisions.append(division)
            chances = torch.Generator().manual_seed(7)
            weight = partial(self.weights.__getitem__, me)
            self.runners.append(
                make_runner(self.program, mine, MailboxChannel(self.mailboxes, me), weight, generator=chances, **kwargs)
            )

    def step(self, loss: Callable[..., torch.Tensor]) -> float:
        """The group's loss; afterwards all parameters have moved as servers move them."""

        def work(channel: MailboxChannel) -> float:
            value = loss(self.runners[channel.me](*self.shares[channel.me]), *self.shares[channel.me])
            value.backward()
            return value.item()

        told = together(self.size, work, self.mailboxes)
        assert not any(len(store) for store in self.mailboxes.stores)  # all that was sent has been taken
        counts = [runner.counts for runner in self.runners]
        with torch.no_grad():
            for entry in zip(*self.parts, strict=True):
                grads = [
                    (w, p.grad) for w, p in zip(counts, entry, strict=True) if not p.is_meta and p.grad is not None
                ]
                if not grads:
                    continue
                scaled = [grad if len(set(counts)) == 1 else w * grad for w, grad in grads]
                total = self.size if len(set(counts)) == 1 else sum(counts)
                gradient = sum(scaled[1:], scaled[0]) / total
                for held in entry:
                    if not held.is_meta:
                        held.add_(gradient, alpha=-self.lr)
                        held.grad = None
        return sum(w * v for w, v in zip(self.weights, told, strict=True) if w) / sum(self.weights)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's, put together."""
        found: dict[str, torch.Tensor] = {}
        entries = zip(*self.parts, strict=True)
        for whole in self.divisions[0].parameters:
            held = [next(p for p in next(entries) if not p.is_meta).detach() for _ in whole.shares]
            found[whole.names[0]] = held[0] if len(held) == 1 else torch.cat(held, whole.shares[0].dim)
        return found
