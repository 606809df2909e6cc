"""Jobs with an outer optimizer, and the same training in one process of plain PyTorch."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from in_process_job import cross_entropy, mlp, share_of
from torch import nn

from topotrain.config.job import (
    ChangeMethod,
    Cluster,
    InverseT,
    Job,
    Keep,
    Linear,
    LRGen,
    Merge,
    Step,
    Updater,
    UpdaterType,
)
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.core.optim.lr_schedules import lr
from topotrain.extensions.outer_optimizer.radial.radial_marks import embeddings_of
from topotrain.extensions.outer_optimizer.rounds import fragments_of

Inner = Callable[[Any], torch.optim.Optimizer]
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Values = dict[str, torch.Tensor]
BLEND = 0.25


class BySchedule(torch.optim.SGD):
    """torch's SGD with a rate that is set before each step, by hand."""

    def __init__(self, parameters: Any, rates: Updater) -> None:
        super().__init__(parameters, lr=1.0, momentum=0.9, nesterov=True)
        self.rates, self.rounds = rates, 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = lr(self.rates, self.rounds)
        self.rounds += 1
        super().step(closure)


def updater(kind: UpdaterType, rate: float, momentum: float = 0.0, **more: Any) -> Updater:
    return Updater(type=kind, momentum=momentum, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=rate), **more)


def delayed(delay: int) -> tuple[Updater, Inner]:
    made = updater(UpdaterType.kDelayedNesterov, 0.7, 0.9, delay=delay)
    return made, lambda parameters: DelayedNesterov(parameters, lr=0.7, momentum=0.9, delay=delay)


def scheduled(**schedule: Any) -> tuple[Updater, Inner]:
    rates = Updater(type=UpdaterType.kNesterov, momentum=0.9, learning_rate=LRGen(base_lr=0.7, **schedule))
    return rates, lambda parameters: BySchedule(parameters, rates)


OUTER: dict[str, tuple[Updater, Inner]] = {
    "nesterov": (
        updater(UpdaterType.kNesterov, 0.7, 0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    ),
    "mean": (updater(UpdaterType.kSGD, 1.0), lambda parameters: torch.optim.SGD(parameters, lr=1.0)),
    "adam": (updater(UpdaterType.kAdam, 0.01), lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
    **{f"delay {n}": delayed(n) for n in (2, 3, 4)},
    "linear": scheduled(type=ChangeMethod.kLinear, linear_conf=Linear(change_freq=3, final_lr=0.1)),
    "step": scheduled(type=ChangeMethod.kStep, step_conf=Step(change_freq=2, gamma=0.3)),
    "inverse t": scheduled(type=ChangeMethod.kInverseT, inverset_conf=InverseT(final_lr=2.0)),
}
"""Outer optimizers: their block, and what makes them in plain PyTorch."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def job(groups: int = 3, sync_freq: int = 4, outer: str = "nesterov", **cluster: Any) -> Job:
    apart = {"server_worker_separate": True, "sync_freq": sync_freq, "outer": OUTER[outer][0]}
    return Job(cluster=Cluster(nworker_groups=groups, **(apart | cluster)))


def script(batches: Batches, groups: int, after_backward: Callable[[Any], None] = lambda t: None) -> Any:
    """Train each worker group on every `groups`-th batch."""

    def run(t: Any) -> None:
        for batch in batches[t.me.group :: groups]:
            t.optimizer.zero_grad()
            t.backward(t.losses(cross_entropy, *batch))
            after_backward(t)
            t.optimizer.step()

    return run


def building(model: Callable[[], nn.Module] = mlp, inner: Inner = adamw) -> Callable[[], tuple[Any, ...]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model()
        return made, inner(made.parameters())

    return build


def assert_same_bits(found: Values, wanted: Values) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def assert_near(found: Values, wanted: Values, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


def weighed_mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum in the order of the parts, divided by the weights. Equal weights multiply nothing."""
    if len(set(weights)) == 1:
        weights = [1] * len(parts)
    else:
        parts = [part * weight for part, weight in zip(parts, weights, strict=True)]
    return sum(parts[1:], parts[0]) / sum(weights)


def merged(differences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The radial average of tensors with equal weights, in the steps of the servers."""
    flat, share = [each.reshape(-1) for each in differences], 1 / len(differences)
    lengths = [math.sqrt(float((each.double() * each.double()).sum())) for each in flat]
    factors = [share / length for length in lengths]
    direction = flat[0] * factors[0]
    for each, factor in zip(flat[1:], factors[1:], strict=True):
        direction = direction + each * factor
    scale = math.fsum(lengths) / len(lengths) / math.sqrt(float((direction.double() * direction.double()).sum()))
    found = flat[0] * (factors[0] * scale)
    for each, factor in zip(flat[1:], factors[1:], strict=True):
        found = found + each * (factor * scale)
    return found.view_as(differences[0])


@dataclass
class Islands:
    """Worker groups in one process that exchange one fragment at a time.

    workers: of each group. largest: norm of a gradient. weights: of the groups.
    """

    groups: int = 3
    sync_freq: int = 4
    fragments: int = 1
    overlap: int = 0
    keep: Keep = Keep.kAdd
    outer: str = "nesterov"
    workers: int = 1
    radial: bool = False
    largest: float | None = None
    weights: Sequence[float] = ()
    model: Callable[[], nn.Module] = mlp
    inner: Inner = adamw

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.agreed = self.model()
        self.models = [copy.deepcopy(self.agreed) for _ in range(self.groups)]
        self.optimizers = [self.inner(model.parameters()) for model in self.models]
        parameters = list(self.agreed.parameters())
        found = fragments_of([p.nbytes for p in parameters], self.fragments)
        self.members = [[i for i, its in enumerate(found) if its == number] for number in range(self.fragments)]
        self.optimizers_outside = [OUTER[self.outer][1]([parameters[i] for i in its]) for its in self.members]
        embeddings = set(map(id, embeddings_of(self.agreed)))
        self.by_mean = [not self.radial or p.dim() < 2 or id(p) in embeddings for p in parameters]
        self.rounds = 0
        self.sent: list[list[torch.Tensor]] = []

    def job(self, **layout: Any) -> Job:
        """The same as a job."""
        options: dict[str, Any] = {"fragments": self.fragments, "overlap": self.overlap, "keep": self.keep}
        options |= {"blend": BLEND} if self.keep is Keep.kBlend else {}
        options |= {"nworkers_per_group": self.workers, "merge": Merge.kRadial if self.radial else Merge.kMean}
        return job(self.groups, self.sync_freq, self.outer, **(options | layout))

    def building(self) -> Callable[[], tuple[Any, ...]]:
        return building(self.model, self.inner)

    @property
    def values(self) -> Values:
        return {name: value.detach() for name, value in self.agreed.named_parameters()}

    def add_gradients(self, batches: Batches) -> None:
        """Add the mean of the gradients of a group's workers, for a batch of each group."""
        for model, batch in zip(self.models, batches, strict=True):
            shares = [share_of(batch, index, self.workers) for index in range(self.workers)]
            found = [torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters())) for (x, y), _ in shares]
            for p, *each in zip(model.parameters(), *found, strict=True):
                mean = weighed_mean(each, [samples for _, samples in shares])
                p.grad = mean if p.grad is None else p.grad + mean

    def apply_gradients(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if self.largest is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.largest)
            optimizer.step()
            optimizer.zero_grad()

    def step(self, batches: Batches) -> None:
        self.add_gradients(batches)
        self.apply_gradients()

    @property
    def now(self) -> list[int]:
        """The parameters of the next round."""
        return self.members[self.rounds % self.fragments]

    @torch.no_grad()
    def push(self, last: bool = False) -> None:
        """Exchange a fragment; last: what is left at the end, for which the outer optimizer makes no step."""
        agreed, own = list(self.agreed.parameters()), [list(model.parameters()) for model in self.models]
        self.sent = [[mine[i].clone() for i in self.now] for mine in own]
        for i in self.now:
            parts = [agreed[i] - mine[i] for mine in own]
            by_mean = last or self.by_mean[i]
            agreed[i].grad = weighed_mean(parts, self.weights or [1] * self.groups) if by_mean else merged(parts)
            if last:
                agreed[i].sub_(agreed[i].grad)
        if not last:
            self.optimizers_outside[self.rounds % self.fragments].step()

    @torch.no_grad()
    def take(self, meanwhile: bool = False) -> None:
        """Take the values of the last push; meanwhile: the groups have made steps since."""
        agreed = list(self.agreed.parameters())
        for model, sent in zip(self.models, self.sent, strict=True):
            own = list(model.parameters())
            for i, then in zip(self.now, sent, strict=True):
                if not meanwhile or self.keep is Keep.kDrop:
                    own[i].copy_(agreed[i])
                elif self.keep is Keep.kBlend:
                    own[i].mul_(BLEND).add_(agreed[i], alpha=1 - BLEND)
                else:
                    own[i].copy_(own[i] - then + agreed[i])
        self.rounds += 1

    def train(self, batches: Batches) -> Values:
        interval, under_way, since = self.sync_freq // self.fragments, False, [0] * self.fragments
        for number in range(1, len(batches) // self.groups + 1):
            self.step(batches[(number - 1) * self.groups : number * self.groups])
            since = [steps + 1 for steps in since]
            if under_way and number % interval == self.overlap:
                self.take(True)
                under_way = False
            if number % interval == 0:
                since[self.rounds % self.fragments] = 0
                self.push()
                under_way = self.overlap > 0
                if not under_way:
                    self.take()
        if under_way:
            self.take(True)
        while since[self.rounds % self.fragments]:
            since[self.rounds % self.fragments] = 0
            self.push(last=True)
            self.rounds += 1
        return self.values
