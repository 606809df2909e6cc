"""Radial-directional averages on servers: which tensors have them, second copies, and which groups a round has."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from in_process_job import Transformer
from island_jobs import OUTER, merged
from replicated_cluster import ReplicatedCluster, flats_of
from seeds import every, seeds, soaked
from simulation import STORM, ScriptedCluster, ScriptedWorker, trace
from simulation import job as scripted_job
from torch import nn

from topotrain.config.job import ConfigError, Merge, Reduce
from topotrain.config.sharding import Parameter, SliceMap, cut
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
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
