"""N workers of one group as threads of this process, which send through mailboxes."""

import copy
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from topotrain.core.client.client import PeerLost
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.placement.assign_modules import assignments
from topotrain.parallel.placement.parameter_owners import ParameterOwners, divide
from topotrain.parallel.program.build_program import program
from topotrain.parallel.program.split_program import Program
from topotrain.parallel.runtime.channel import ArrivedTensors, TensorKey
from topotrain.parallel.runtime.local_model import localise
from topotrain.parallel.runtime.program_runner import Runner
from topotrain.parallel.runtime.worker_sync import WorkerSync


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
        thread.join(timeout=300)
        assert not thread.is_alive()
    causes = [error for error in errors if not isinstance(error, PeerLost)]
    if errors:
        raise (causes or errors)[0]
    return results


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


def cut(
    model: nn.Module,
    blocks: Sequence[Block],
    args: Sequence[Any],
    workers: int = 2,
    samples: int | None = None,
    training: bool = True,
    **kwargs: Any,
) -> tuple[Program, ParameterOwners]:
    """The program of a model for a call with these arguments, and who holds its parameters."""
    captured = capture(model)
    assigned = assignments(model, Blocks(blocks), workers, captured)
    count = len(args[0]) if samples is None else samples
    made = program(captured, assigned, model, args, kwargs, count, workers, training)
    return made, divide(model, assigned, workers)


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
        first = max(range(self.size), key=lambda me: bool(samples[me]))  # whose share is an example
        self.weights = [float(count) for count in samples]
        self.models, self.runners, self.parts, self.divisions = [], [], [], []
        for me in range(self.size):
            mine = copy.deepcopy(model)
            self.program, division = cut(mine, blocks, shares[first], self.size, samples[first])
            optimizer = torch.optim.SGD(mine.parameters(), lr=lr)
            self.parts.append(localise(mine, optimizer, division, me).parts.tensors)
            self.models.append(mine)
            self.divisions.append(division)
            chances = torch.Generator().manual_seed(7)
            channel = MailboxChannel(self.mailboxes, me)
            sync = WeightedSync(channel, partial(self.weights.__getitem__, me))
            self.runners.append(Runner(self.program, mine, channel, sync=sync, generator=chances, **kwargs))  # type: ignore[arg-type]

    def each(self, use: Callable[[Runner, tuple[Any, ...]], Any]) -> list[Any]:
        """What `use` gives with each worker's runner and arguments; all that was sent has then been taken."""
        found = together(self.size, lambda on: use(self.runners[on.me], self.shares[on.me]), self.mailboxes)
        assert not any(len(store) for store in self.mailboxes.stores)
        return found

    def step(self, loss: Callable[..., torch.Tensor]) -> float:
        """The group's loss; afterwards all parameters have moved as servers move them."""

        def use(runner: Runner, share: tuple[Any, ...]) -> float:
            value = loss(runner(*share), *share)
            value.backward()
            return value.item()

        told = self.each(use)
        self.move()
        return sum(w * v for w, v in zip(self.weights, told, strict=True) if w) / sum(self.weights)

    def move(self) -> None:
        """Move the parameters by their gradients, as servers would."""
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

    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's, put together."""
        found: dict[str, torch.Tensor] = {}
        entries = zip(*self.parts, strict=True)
        for whole in self.divisions[0].parameters:
            held = [next(p for p in next(entries) if not p.is_meta).detach() for _ in whole.shares]
            found[whole.names[0]] = held[0] if len(held) == 1 else torch.cat(held, whole.shares[0].dim)
        return found


def squares(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def learns_the_same(
    model: nn.Module,
    blocks: Sequence[Block],
    shares: Sequence[tuple[Any, ...]],
    loss: Callable[..., torch.Tensor] = squares,
    steps: int = 2,
    exactly: bool = False,
    seed: int | None = None,
    **settings: Any,
) -> Group:
    """The group learns what the whole model learns from all samples that count; return the group.

    seed: of the dropout masks of both.
    """
    group = Group(model, blocks, shares, **settings)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=group.lr)
    counting = [share for share, weight in zip(shares, group.weights, strict=True) if weight]
    whole = [torch.cat([share[k] for share in counting]) for k in range(len(shares[0]))]
    for step in range(steps):
        if seed is not None:
            for runner in group.runners:
                runner._generator = torch.Generator().manual_seed(seed + step)
        told = group.step(loss)
        optimizer.zero_grad()
        if seed is not None:
            torch.manual_seed(seed + step)
        value = loss(model(*whole), *whole)
        value.backward()
        optimizer.step()
        assert told == pytest.approx(value.item(), rel=2e-6)
    found = group.parameters()
    for name, tensor in model.named_parameters():
        assert found[name].shape == tensor.shape
        error = (found[name] - tensor).abs().max().item()
        assert error <= (0.0 if exactly else 2e-6 * max(1.0, tensor.abs().max().item())), (name, error)
    return group
