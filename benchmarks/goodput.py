"""Goodput of worker groups with failures of chips, in virtual time: `python -m benchmarks.goodput`.

Each worker group has its share of the chips, and makes rounds of computing and of a push. The failures of chips are a
Poisson process. A group stands still for a while when one of its chips fails. Failures while it stands still change
nothing. The product's own server takes every push, with `quorum: 1`, and decides which groups are in a round. Its model
has 64 elements.

Goodput is the share of the time in which groups compute, less what is lost in any case.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import torch
from torch import nn

from topotrain.config.job import ChangeMethod, Cluster, Job, LRGen, Updater, UpdaterType
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.optim.adapter import HyperEncoder, describe_all
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.launch.runtime.server_composition import make_server
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of

YEAR_S = 365.25 * 24 * 3600
ROUND_S = 24.0
"""Seconds of computing between two pushes, as in Decoupled DiLoCo."""
STALL_S, LOST = 18.0, 0.05
"""For so long a group stands still after a failure; the share of the time that is lost in any case."""
_ELEMENTS = 64
_REVISION = 1
_SERVER = Address(Role.SERVER, 0, 0)
_ERROR = 0.0015
"""The standard deviation of a simulated goodput."""
_FEWEST_ROUNDS, _MOST_PUSHES = 10, 100_000
PUBLISHED: Mapping[tuple[int, int], float] = {
    (1_200_000, 1): 0.58,
    (1_200_000, 2): 0.70,
    (1_200_000, 8): 0.88,
    (1_200_000, 16): 0.93,
    (2_400_000, 1): 0.40,
    (2_400_000, 8): 0.80,
    (2_400_000, 16): 0.86,
}
"""(chips, groups) -> goodput at one interruption of a chip per year.

From Decoupled DiLoCo (arXiv 2604.21428). One group is its elastic data parallelism. The paper does not say how long a
group stands still. With 18 s and 5 % the formula fits these figures best.
"""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of the chips of a job of so many worker groups."""

    chips: int
    groups: int

    @property
    def rate(self) -> float:
        """Failures per second of one group that computes."""
        return self.chips / self.groups / YEAR_S

    @property
    def formula(self) -> float:
        """The goodput of groups that never wait: (1 - b) / (1 + n s / T)."""
        return (1 - LOST) / (1 + self.rate * STALL_S)

    @property
    def pushes(self) -> int:
        """The number of pushes that a simulation needs."""
        still = self.rate * STALL_S
        # The number of failures is a Poisson number, so that its relative error is one over its square root.
        stalls = (self.formula * still / (1 + still) / _ERROR) ** 2
        return max(min(math.ceil(stalls / (self.rate * ROUND_S)), _MOST_PUSHES), _FEWEST_ROUNDS * self.groups)


class RoundServer:
    """The product's server of a job of so many groups, without a transport."""

    def __init__(self, groups: int) -> None:
        outer = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
        block = Cluster(nworker_groups=groups, server_worker_separate=True, outer=outer, quorum=1, sync_freq=24)
        job = Job(cluster=block)
        topology = layout(block)
        model = nn.ParameterList([torch.zeros(_ELEMENTS)])
        inner = InnerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), block, model.named_parameters())
        parts = describe_model(model, (), inner.optimizers)
        spec = describe_all(inner.optimizers, parts.tensors, block.slicing)
        schema, _ = plan_of(topology, parts, replace(spec, outer=True))
        self._server = make_server(_SERVER, job, topology, PrivateMemory())
        self._workers = [topology.workers(group)[0] for group in range(groups)]
        self._steps = [0] * groups
        self._hyper = HyperEncoder(*inner.optimizers)()
        self._body = torch.zeros(_ELEMENTS)
        for worker in self._workers:
            for part in schema.parts():
                self._server.handle(worker, part)
        self._server.handle(self._workers[0], m.Init(0, body=self._body))
        for worker in self._workers:
            self._server.handle(worker, m.Fetch(1))

    def push(self, group: int) -> Iterator[int]:
        """A group pushes. Yields the groups of which the last push is in a round now."""
        worker, step = self._workers[group], self._steps[group]
        self._steps[group] += 1
        self._server.handle(worker, m.Push(step, _REVISION, 0, 1.0, b"\x01", body=self._body))
        hyper = self._hyper if step == 0 else b""
        commit = m.Commit(step, 1, 1.0, 1.0, False, 0.0, 2.0, True, bytes([_REVISION]), b"\x00", b"\x00", hyper, ())
        for to, message in self._server.handle(worker, commit):
            if isinstance(message, m.Applied):
                yield to.group


def simulated(failures: Failures, pushes: int = 0, seed: int = 0) -> float:
    """The goodput with these failures, over as many pushes as it needs, or over so many."""
    rng, server = random.Random(f"{seed} {failures}"), RoundServer(failures.groups)
    under_way: set[int] = set()  # groups with a push that is in no round yet
    due: set[int] = set()  # those of them that have computed for another push meanwhile
    ends = [0.0] * failures.groups
    events = [(_period(rng, failures.rate), group) for group in range(failures.groups)]
    heapify(events)
    computed = pushed = 0
    while pushed < (pushes or failures.pushes):
        now, group = events[0]
        ends[group], computed = now, computed + 1
        heapreplace(events, (now + _period(rng, failures.rate), group))
        # As in a job: the next push follows the round of the last one.
        waiting = [] if group in under_way else [group]
        due |= {group} & under_way
        while waiting:
            pushing = waiting.pop()
            pushed += 1
            under_way.add(pushing)
            for done in server.push(pushing):
                under_way.discard(done)
                waiting += {done} & due
                due.discard(done)
    return (1 - LOST) * computed * ROUND_S / math.fsum(ends)


def _period(rng: random.Random, rate: float) -> float:
    """Draw how long a group takes for the computing of a round."""
    at, stalls = rng.expovariate(rate), 0
    while at < ROUND_S:
        at += rng.expovariate(rate)
        stalls += 1
    return ROUND_S + stalls * STALL_S


def main() -> None:
    """Print the goodput of the published layouts."""
    print(f"{'chips':>11}  {'islands':>7}  {'published':>9}  {'formula':>7}  {'simulated':>9}")
    for (chips, groups), paper in PUBLISHED.items():
        found = Failures(chips, groups)
        share = simulated(found)
        print(f"{chips:>11,}  {groups:>7,}  {paper:>9.0%}  {found.formula:>7.1%}  {share:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
