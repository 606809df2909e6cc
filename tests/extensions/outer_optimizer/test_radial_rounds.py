"""Radial-directional averages on servers: which tensors have them, second copies, and which groups a round has."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from faulty_cluster import SimWorker
from in_process_job import Transformer
from island_jobs import OUTER, merged
from replicated_cluster import ReplicatedCluster, flats_of
from replicated_deaths import CrashableCluster
from seeds import every, seeds
from simulation import STORM, ScriptedCluster, ScriptedWorker, trace
from simulation import job as scripted_job
from soak_cases import soaked
from torch import nn

from topotrain.config.job import ConfigError, Merge, Reduce
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import StepOutcome
from topotrain.core.model.schema import PrivateMemory, Schema
from topotrain.core.optim.adapter import describe
from topotrain.core.optim.delayed_nesterov import DelayedNesterov
from topotrain.extensions.outer_optimizer.inner_optimizer import outer_optimizers
from topotrain.extensions.outer_optimizer.radial.radial_marks import MERGE, embeddings_of, mark_radial
from topotrain.extensions.outer_optimizer.radial.radial_products import RadialTensors
from topotrain.extensions.outer_optimizer.radial.radial_rounds import RadialRounds
from topotrain.extensions.outer_optimizer.round_history import RoundHistory
from topotrain.launch.runtime.server_composition import make_server

# --- marks -----------------------------------------------------------------------------------------------------------


def test_which_tensors_are_marked() -> None:
    model = Transformer()
    outer, _ = OUTER["nesterov"]
    (made,) = outer_optimizers(outer, list(model.named_parameters()), 1)
    mark_radial(made, embeddings_of(model))
    names = {id(p): name for name, p in model.named_parameters()}
    marked = {names[id(p)] for group in made.param_groups if group.get(MERGE) for p in group["params"]}
    assert marked == {"qkv.weight", "up.weight", "down.weight"}
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(model.parameters()))
    assert len({group["lr"] for group in made.param_groups}) == 1


def test_a_group_that_is_marked_as_a_whole_stays_one() -> None:
    model = nn.Linear(3, 2, bias=False)
    (made,) = outer_optimizers(OUTER["mean"][0], list(model.named_parameters()), 1)
    mark_radial(made, ())
    (group,) = made.param_groups
    assert group[MERGE] == "kRadial"


# --- second copies of servers ----------------------------------------------------------------------------------------

MODEL = (Parameter("flat", (70,), (1,), "float32", True), Parameter("wide", (40, 9), (9, 1), "float32", True))
ROUNDS = 4


def drawn(group: int, step: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * step + group)
    return [torch.randn(p.count, generator=rng) for p in MODEL]


def described(slice_map: SliceMap, outer: Any) -> Schema:
    """The model, of which one tensor is merged radially."""
    flat, wide = (nn.Parameter(torch.zeros(p.shape)) for p in MODEL)
    made = outer([{"params": [flat]}, {"params": [wide], MERGE: "kRadial"}])
    text = replace(describe(made, [flat, wide]), outer=True).to_text()
    return Schema(MODEL, (), text, slice_map.digest)


class RadialCluster(ReplicatedCluster):
    """Servers with second copies that merge radially, with an outer optimizer that has counts and sums."""

    def _plan(self) -> tuple[Schema, SliceMap]:
        slice_map = cut(MODEL, self.topology.shards, 1)
        return described(slice_map, partial(DelayedNesterov, lr=0.5, delay=3)), slice_map


@cache
def play(kill: tuple[int, int] | None = None) -> RadialCluster:
    made = scripted_job(3, 1, 2, outer=OUTER["delay 3"][0], merge=Merge.kRadial, reduce=Reduce.kMean)

    def train(worker: ScriptedWorker) -> None:
        worker.open(start=1.0)
        for _ in range(ROUNDS):
            worker.step(drawn(worker.me.group, worker.steps))
        worker.step(drawn(worker.me.group, worker.steps), fetch=False)  # what a script has left at its end
        worker.finish()
        if worker.me.group == 0:
            worker.client.values.fetch_final()

    cluster = RadialCluster(made, 1, kill)
    cluster.play(train)
    return cluster


@pytest.mark.simulated
@pytest.mark.parametrize("process", [0, 1])
def test_a_second_copy_makes_the_same_updates(process: int) -> None:
    deaths = 0
    for moment in every(5, play().ticks[process] + 1, 17):
        cluster = play((process, moment))
        deaths += cluster.deaths
        assert all(map(torch.equal, cluster.values(), play().values())), moment
        for index in range(2):
            assert all(map(torch.equal, *map(flats_of, cluster.copies(index)))), moment
    assert deaths


@pytest.mark.simulated
def test_the_updates_of_scripted_workers_are_those_of_plain_pytorch() -> None:
    flat, wide = (nn.Parameter(torch.ones(p.count)) for p in MODEL)
    outer = DelayedNesterov([flat, wide], lr=0.5, delay=3)
    for step in range(ROUNDS):
        pushed = [drawn(group, step) for group in range(3)]
        flat.grad = (pushed[0][0] + pushed[1][0] + pushed[2][0]) / 3
        wide.grad = merged([each[1] for each in pushed])
        outer.step()
    with torch.no_grad():
        for index, value in enumerate((flat, wide)):
            value -= sum(drawn(group, ROUNDS)[index] for group in range(3)).view_as(value) / 3
    cluster, wanted = play(), {0: flat.detach(), 1: wide.detach()}
    for segment in cluster.map.segments:
        found = cluster.speaking(segment.shard).state.known.flats.segment("values", segment)
        part = wanted[segment.parameter][segment.start : segment.start + segment.hi - segment.lo]
        torch.testing.assert_close(found, part, rtol=1e-5, atol=1e-6)


def test_a_reset_tells_steps_of_one_number_apart() -> None:
    made = scripted_job(3, 1, 2, outer=OUTER["mean"][0], merge=Merge.kRadial, reduce=Reduce.kMean)
    topology = layout(made.cluster)
    first, second = (
        make_server(topology.servers(0)[0], made, topology, PrivateMemory()).extension(RadialRounds) for _ in range(2)
    )
    first.reset_group(1, False)
    first.reset_worker(Address(Role.WORKER, 2, 0))
    first.reset_group(7, False)  # of other servers
    state = first.state_dict()
    assert state is not None and state["resets"] == {0: 0, 1: 1, 2: 1}
    second.load_state_dict(state)
    second.reset_group(1, True)
    assert state["resets"] == {0: 0, 1: 1, 2: 1} and second.state_dict()["resets"] == {0: 0, 1: 2, 2: 1}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_too_many_servers_and_groups_for_one_message() -> None:
    cluster = play()
    model = cluster.speaking(0).state.known
    assert RadialTensors(model, 600).divided(0) == {0: [1], 1: [1]}
    with pytest.raises(ConfigError, match=r"cluster\.merge = .*kMean where 2 servers divide .* 5000 worker groups"):
        RadialTensors(model, 5000)


# --- which groups a round has, and what votes have -------------------------------------------------------------------


GROUPS = 4


def scripted(seed: int, merge: Merge, **cluster: Any) -> ScriptedCluster:
    made = scripted_job(GROUPS, 1, 2, outer=OUTER["mean"][0], merge=merge, reduce=Reduce.kMean, **cluster)
    found = ScriptedCluster(made, seed, STORM, MODEL)
    found.schema = described(found.map, partial(torch.optim.SGD, lr=1.0))
    return found


def train(worker: ScriptedWorker) -> None:
    worker.open()
    for _ in range(ROUNDS):
        worker.step(drawn(worker.me.group, worker.steps))
    worker.finish()


@pytest.mark.simulated
@pytest.mark.parametrize("quorum", soaked([0, 2], [3]))
def test_a_round_has_the_groups_of_its_decision_whatever_else_is_staged(quorum: int) -> None:
    sizes = set()
    for seed in seeds(12):
        cluster, updates = scripted(seed, Merge.kRadial, quorum=quorum, **({"slack": 0.0} if quorum else {})), []
        steps = cluster.server(0, 1).steps
        carry_out = steps.carry_out

        def noted(decisions: Any, carry_out: Any = carry_out, updates: Any = updates) -> None:
            updates.append([(decision.group, decision.step) for decision in decisions])
            carry_out(decisions)

        steps.carry_out = noted  # type: ignore[method-assign]
        cluster.play(train)
        wanted = [torch.zeros(p.count) for p in MODEL]
        history = RoundHistory(range(GROUPS), (0,))
        for update in updates:
            share = history.add(0, [group for group, _ in update]).share if quorum else 1.0
            flat, wide = zip(*(drawn(group, step) for group, step in update), strict=True)
            wanted[0] -= share * sum(flat[1:], flat[0]) / len(flat)
            wanted[1] -= share * (merged(list(wide)) if len(wide) > 1 else wide[0])
        for found, value in zip(cluster.values(), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
        sizes |= {len(update) for update in updates}
    assert max(sizes) == (quorum or GROUPS)


@pytest.mark.simulated
@pytest.mark.parametrize("merge", Merge)
def test_votes_have_products_only_where_they_are_needed(merge: Merge) -> None:
    cluster = scripted(1, merge)
    votes = trace(cluster, m.StepVote)
    cluster.play(train)
    # Of each group the pairs (start, step) of all, and one product with each.
    wanted = GROUPS * 16 + GROUPS * 8 if merge is Merge.kRadial else 0
    assert votes and {len(vote.measured) for *_, vote in votes if isinstance(vote, m.StepVote)} == {wanted}


# --- groups and servers die: every shard merges the same groups, with the same factors -------------------------------

ISLANDS, BATCHES = 3, 80
COMMON = 127
"""A cell of each batch, and one that all have in common, in a tensor that two servers divide.

So the lengths of gradients are sqrt(2), their inner products are 1, and the average of k of them has the number
sqrt(2 / (k + k * k)) in each cell of one, whichever server has the cell.
"""
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
            for k in range(1, ISLANDS + 1)
            for of in range(k, ISLANDS + 1)
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
    return Ledger(scripted_job(ISLANDS, 1, 2, **outer), seed, BATCHES, kill, falls=falls)


@cache
def calm(quorum: int) -> tuple[dict[int, int], float]:
    cluster = place(quorum, 0).run()
    assert not cluster.wrong()
    return dict(cluster.ticks), cluster.sim.now


def mortal(quorum: int, seed: int) -> Ledger:
    rng, (moments, end) = random.Random(f"{quorum} {seed}"), calm(quorum)
    server = rng.randrange(2)
    kill = (server, rng.randint(1, moments[server])) if rng.random() < 0.7 else None
    falls = [
        (rng.uniform(0, end), rng.randrange(ISLANDS), rng.choice((0.0, 0.003, 0.05))) for _ in range(rng.randint(1, 4))
    ]
    return place(quorum, seed, kill, tuple(falls))


@pytest.mark.simulated
@pytest.mark.parametrize("quorum", [0, 2])
def test_every_batch_is_in_a_round_that_all_shards_merge_alike(quorum: int) -> None:
    deaths, sizes = 0, set()
    for seed in seeds(5):
        cluster = mortal(quorum, seed).run()
        assert not cluster.wrong(), f"seed {seed}: {cluster.wrong()[:5]}"
        deaths += cluster.deaths + cluster.worker_deaths
        sizes |= cluster.sizes
    assert deaths > len(seeds(5))
    assert sizes >= {2, 3 - quorum // 2}
