"""Goodput of worker groups with failures of chips, in virtual time: `python -m benchmarks.goodput`.

Each worker group has its share of the chips, and makes rounds of computing and of a push. The failures of chips are a
Poisson process. A group stands still for a while when one of its chips fails. Failures while it stands still change
nothing. The product's own server takes every push, and decides which groups are in a round. Its model has 64 elements.

Goodput is the share of the time in which groups compute, less what is lost in any case. A group that waits for others
does not compute.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import torch

from topotrain.config.job import ChangeMethod, Cluster, Job, LRGen, Updater, UpdaterType
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory
from topotrain.launch.runtime.server_composition import make_server
from topotrain.tools.simulator.islands.cell_model import outer_plan
from topotrain.tools.simulator.sim_cluster import parameters

YEAR_S = 365.25 * 24 * 3600
ROUND_S = 24.0
"""Seconds of computing between two pushes, as in Decoupled DiLoCo."""
_ELEMENTS = 64
_REVISION = 1
_SERVER = Address(Role.SERVER, 0, 0)


@dataclass(frozen=True, slots=True)
class ChipFailures:
    """How often chips fail, and what it costs.

    Attributes:
        chips: of the whole job.
        mtbi_s: mean time between two interruptions of one chip.
        stall_s: for so long a group stands still after a failure.
        base: the share of the time that is lost in any case.
    """

    chips: int
    mtbi_s: float = YEAR_S
    stall_s: float = 18.0
    base: float = 0.05

    def rate(self, islands: int) -> float:
        """Failures per second of one group that computes."""
        return self.chips / islands / self.mtbi_s

    def formula(self, islands: int) -> float:
        """The goodput of so many groups that never wait: (1 - b) / (1 + n s / T)."""
        return (1 - self.base) / (1 + self.rate(islands) * self.stall_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of one simulation.

    Attributes:
        failures, islands, quorum: what was simulated.
        share: the goodput.
        pushes: of all groups.
        rounds: that the server has made of them.
        stalls: failures for which a group has stood still.
        seconds: of virtual time.
    """

    failures: ChipFailures
    islands: int
    quorum: int
    share: float
    pushes: int
    rounds: int
    stalls: int
    seconds: float


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


class RoundServer:
    """The product's server of a job of so many groups, without a transport.

    Args:
        islands: the number of worker groups.
        quorum: of the cluster block.
    """

    def __init__(self, islands: int, quorum: int) -> None:
        outer = Updater(type=UpdaterType.kSGD, learning_rate=LRGen(type=ChangeMethod.kFixed, base_lr=1.0))
        block = Cluster(nworker_groups=islands, server_worker_separate=True, outer=outer, quorum=quorum, sync_freq=24)
        job = Job(cluster=block)
        topology = layout(block)
        plan = outer_plan(job, topology, parameters(_ELEMENTS))
        self._server = make_server(_SERVER, job, topology, PrivateMemory())
        self._workers = [topology.workers(group)[0] for group in range(islands)]
        self._steps = [0] * islands
        self._hyper = plan.hyper
        self._body = torch.zeros(_ELEMENTS)
        for worker in self._workers:
            for part in plan.schema.parts():
                self._server.handle(worker, part)
        self._server.handle(self._workers[0], m.Init(0, body=self._body))
        for worker in self._workers:
            self._server.handle(worker, m.Fetch(1))

    @property
    def rounds(self) -> int:
        """The updates that the server has made."""
        return self._server.state.version

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


class GoodputSimulation:
    """The groups of one job in virtual time.

    Args:
        failures: of the chips.
        islands: the number of worker groups.
        quorum: of the cluster block. 0: all wait for each other in each round.
        seed: of the failures.
    """

    def __init__(self, failures: ChipFailures, islands: int, quorum: int = 1, seed: int = 0) -> None:
        self._failures, self._islands, self._quorum = failures, islands, quorum
        self._rng = random.Random(f"{seed} {failures} {islands} {quorum}")
        self._rate = failures.rate(islands)
        self._server = RoundServer(islands, quorum)
        self._under_way: set[int] = set()  # groups with a push that is in no round yet
        self._due: set[int] = set()  # those of them that have computed for another push meanwhile
        self._ends = [0.0] * islands  # of the time that is counted
        self._computed = 0
        self._pushes = self._stalls = 0
        self._now = 0.0
        self._events = [(self._period(), group) for group in range(islands)]
        heapify(self._events)

    def run(self, pushes: int) -> Goodput:
        """Go on until so many pushes were made; the result so far."""
        while self._pushes < pushes:
            self._now, group = heappop(self._events)
            self._ends[group] = self._now
            self._computed += 1
            if group in self._under_way:
                # As in a job: the next push follows the round of the last one.
                self._due.add(group)
            else:
                self._push(group)
            if self._quorum:
                heappush(self._events, (self._now + self._period(), group))
        share = (1 - self._failures.base) * self._computed * ROUND_S / math.fsum(self._ends)
        counts = (self._pushes, self._server.rounds, self._stalls)
        return Goodput(self._failures, self._islands, self._quorum, share, *counts, self._now)

    def _push(self, group: int) -> None:
        waiting = [group]
        while waiting:
            pushing = waiting.pop()
            self._pushes += 1
            self._under_way.add(pushing)
            for done in self._server.push(pushing):
                self._under_way.discard(done)
                if done in self._due:
                    self._due.discard(done)
                    waiting.append(done)
                if not self._quorum:
                    self._ends[done] = self._now
                    heappush(self._events, (self._now + self._period(), done))

    def _period(self) -> float:
        """Draw how long a group takes for the computing of a round."""
        at, stalls = self._rng.expovariate(self._rate), 0
        while at < ROUND_S:
            at += self._rng.expovariate(self._rate)
            stalls += 1
        self._stalls += stalls
        return ROUND_S + stalls * self._failures.stall_s


LEAST_ROUNDS = 10
"""The rounds of each group that a simulation has at least."""
_ERROR = 0.0015
"""The standard deviation of a simulated goodput."""
_MOST_PUSHES = 100_000


def pushes_for(failures: ChipFailures, islands: int) -> int:
    """The number of pushes of a simulation of these failures."""
    rate = failures.rate(islands)
    still = rate * failures.stall_s
    # The number of failures is a Poisson number, so that its relative error is one over its square root.
    stalls = (failures.formula(islands) * still / (1 + still) / _ERROR) ** 2
    return max(min(math.ceil(stalls / (rate * ROUND_S)), _MOST_PUSHES), LEAST_ROUNDS * islands)


def simulated(failures: ChipFailures, islands: int, quorum: int = 1, pushes: int = 0) -> Goodput:
    """Simulate these failures, with as many pushes as the goodput needs, or with so many."""
    return GoodputSimulation(failures, islands, quorum).run(pushes or pushes_for(failures, islands))


def main() -> None:
    """Print the goodput of the published layouts."""
    print(f"{'chips':>11}  {'islands':>7}  {'published':>9}  {'formula':>7}  {'simulated':>9}")
    for (chips, islands), paper in PUBLISHED.items():
        found = simulated(ChipFailures(chips), islands)
        formula = found.failures.formula(islands)
        print(f"{chips:>11,}  {islands:>7,}  {paper:>9.0%}  {formula:>7.1%}  {found.share:>9.1%}", flush=True)


if __name__ == "__main__":
    main()
