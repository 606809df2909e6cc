"""Radial merging while groups and servers die: every shard merges the same groups, with the same factors.

Each batch has a cell of its own in a tensor that two servers divide, and all have one cell in common. So their lengths
are sqrt(2), their inner products are 1, and the average of k of them has the number sqrt(2 / (k + k * k)) in each cell
of one, whichever server has the cell.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from faulty_cluster import SimWorker
from replicated_deaths import CrashableCluster
from simulation import job
from test_same_bits import OUTER
from torch import nn

from topotrain.config.job import Merge, Reduce
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.core.client.client import StepOutcome
from topotrain.core.model.schema import Schema
from topotrain.core.optim.adapter import describe
from topotrain.extensions.outer_optimizer.radial.radial_marks import MERGE

pytestmark = pytest.mark.simulated

GROUPS, BATCHES, SEEDS = 3, 80, 5
COMMON = 127
TENSOR = (Parameter("cells", (128,), (1,), "float32", True),)


class Ledger(CrashableCluster):
    """A cluster with second copies of servers that merge radially."""

    def _plan(self) -> tuple[Schema, SliceMap]:
        tensors = [nn.Parameter(torch.zeros(p.shape)) for p in TENSOR]
        made = torch.optim.SGD([{"params": tensors, MERGE: "kRadial"}], lr=1.0)
        slice_map = cut(TENSOR, self.topology.shards, 1)
        text = replace(describe(made, tensors), outer=True).to_text()
        return Schema(TENSOR, (), text, slice_map.digest), slice_map

    def script(self, worker: SimWorker) -> None:
        step = worker.step

        def with_common_cell(gradient: Sequence[torch.Tensor], **more: Any) -> StepOutcome:
            for part in gradient:
                part[COMMON] = -1.0
            return step(gradient, **more)

        worker.step = with_common_cell  # type: ignore[method-assign]
        super().script(worker)

    def wrong(self) -> list[str]:
        """What should not be. The cells of a round of k groups are there k at a time."""
        found = [each for each in super().wrong() if not each.startswith("cell ")]
        cells = [float(value) for value in self.final[0][:BATCHES]] if self.final else []
        # With a quorum the rate of a round is its share of the groups that take part. No two of these are near.
        wanted = {
            math.sqrt(2 / (k + k * k)) * k / (of if self.job.cluster.quorum else k): k
            for k in range(1, GROUPS + 1)
            for of in range(k, GROUPS + 1)
        }
        rounds = Counter[int]()
        for cell, count in Counter(cells).items():
            near = min(wanted, key=lambda value, cell=cell: abs(value - cell))  # type: ignore[misc]
            if math.isclose(cell, near, rel_tol=1e-5):
                rounds[wanted[near]] += count
            else:
                found.append(f"{count} cells have {cell}, as no round has")
        found += [f"{count} cells of rounds of {size}" for size, count in rounds.items() if count % max(size, 1)]
        self.sizes = set(rounds)
        return found


def place(quorum: int, seed: int, kill: tuple[int, int] | None = None, falls: tuple = ()) -> Ledger:
    outer = {"outer": OUTER["mean"][0], "merge": Merge.kRadial, "quorum": quorum, "reduce": Reduce.kMean}
    return Ledger(job(GROUPS, 1, 2, **outer), seed, BATCHES, kill, falls=falls)


@cache
def calm(quorum: int) -> tuple[dict[int, int], float]:
    cluster = place(quorum, 0).run()
    assert not cluster.wrong()
    return dict(cluster.ticks), cluster.sim.now


def drawn(quorum: int, seed: int) -> Ledger:
    rng, (moments, end) = random.Random(f"{quorum} {seed}"), calm(quorum)
    server = rng.randrange(2)
    kill = (server, rng.randint(1, moments[server])) if rng.random() < 0.7 else None
    falls = [
        (rng.uniform(0, end), rng.randrange(GROUPS), rng.choice((0.0, 0.003, 0.05))) for _ in range(rng.randint(1, 4))
    ]
    return place(quorum, seed, kill, tuple(falls))


@pytest.mark.parametrize("quorum", [0, 2])
def test_every_batch_is_in_a_round_that_all_shards_merge_alike(quorum: int) -> None:
    deaths, sizes = 0, set()
    for seed in range(SEEDS):
        cluster = drawn(quorum, seed).run()
        assert not cluster.wrong(), f"seed {seed}: {cluster.wrong()[:5]}"
        deaths += cluster.deaths + cluster.worker_deaths
        sizes |= cluster.sizes
    assert deaths > SEEDS
    assert sizes >= {2, 3 - quorum // 2}
