"""Jobs that merge by radial-directional averages: the bits of plain PyTorch, over servers, transports and deaths."""

import copy
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_job import Result, Transformer, cross_entropy, mlp, run_hosted, run_local, tokens, vectors
from replicated_cluster import ReplicatedCluster, flats_of
from seeds import every, seeds
from simulation import STORM, ScriptedCluster, ScriptedWorker, trace
from simulation import job as scripted_job
from test_same_bits import OUTER, Batches, adamw, assert_same_bits, building, job, script
from torch import nn

from topotrain.config.job import (
    Compression,
    ConfigError,
    Merge,
    Reduce,
    Slicing,
    TransportChoice,
    UpdaterType,
    Weigh,
)
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


def radial(groups: int = 3, sync_freq: int = 4, **cluster: Any) -> Any:
    return job(groups, sync_freq, merge=Merge.kRadial, **cluster)


def broad() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 5))


def merged(differences: list[torch.Tensor]) -> torch.Tensor:
    """The average of tensors with equal weights, in the steps of the servers."""
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


def expected(batches: Batches, groups: int, sync_freq: int, build: Any = mlp) -> dict[str, torch.Tensor]:
    """The job in one process of plain PyTorch."""
    torch.manual_seed(1)
    agreed = build()
    outer = OUTER["nesterov"][1](agreed.parameters())
    islands = [copy.deepcopy(agreed) for _ in range(groups)]
    inner = [adamw(island.parameters()) for island in islands]
    by_mean = {id(p) for p in agreed.parameters() if p.dim() < 2} | set(map(id, embeddings_of(agreed)))
    parts = [batches[group::groups] for group in range(groups)]
    for first in range(0, len(parts[0]), sync_freq):
        for island, optimizer, mine in zip(islands, inner, parts, strict=True):
            for batch in mine[first : first + sync_freq]:
                optimizer.zero_grad()
                cross_entropy(island, *batch).backward()
                optimizer.step()
        with torch.no_grad():
            for p, *own in zip(agreed.parameters(), *(i.parameters() for i in islands), strict=True):
                found = [p - each for each in own]
                last = first + sync_freq > len(parts[0])
                p.grad = sum(found[1:], found[0]) / groups if last or id(p) in by_mean else merged(found)
                if last:
                    p.sub_(p.grad)
            if not last:
                outer.step()
            for p, *own in zip(agreed.parameters(), *(i.parameters() for i in islands), strict=True):
                for each in own:
                    each.copy_(p)
    return {name: value.detach() for name, value in agreed.named_parameters()}


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cluster", [{}, {"weigh": Weigh.kEqual}], ids=str)
@pytest.mark.parametrize("groups", [2, 3])
def test_a_job_has_the_bits_of_plain_pytorch(groups: int, cluster: dict[str, Any]) -> None:
    batches = vectors(groups * 13)
    wanted = expected(batches, groups, 4)
    found = run_local(radial(groups, **cluster), building(mlp, adamw), script(batches, groups)).values
    assert_same_bits(found, wanted)
    by_mean = run_local(job(groups, **cluster), building(mlp, adamw), script(batches, groups)).values
    assert not torch.allclose(by_mean["0.weight"], wanted["0.weight"], atol=1e-4), "merging makes no difference"


def test_embeddings_are_merged_by_their_mean() -> None:
    """Also where one is the output layer, too."""
    batches = tokens(2 * 7)
    found = run_local(radial(2, 3), building(Transformer, adamw), script(batches, 2)).values
    assert_same_bits(found, expected(batches, 2, 3, Transformer))


def test_float64() -> None:
    batches = [(x.double(), y) for x, y in vectors(2 * 9)]

    def model() -> nn.Module:
        return mlp().double()

    found = run_local(radial(2, 3), building(model, adamw), script(batches, 2)).values
    for name, value in expected(batches, 2, 3, model).items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


DIVIDED = {"nservers_per_group": 3}
"""Servers that divide the tensors of the model among them."""


@cache
def divided_job() -> Result:
    return run_local(radial(**DIVIDED), building(mlp, adamw), script(vectors(3 * 13), 3))


def test_a_tensor_on_several_servers_is_merged_as_a_whole() -> None:
    assert_near(divided_job().values, expected(vectors(3 * 13), 3, 4))


def test_servers_that_merged_their_parts_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadialTensors, "divided", lambda self, fragment: {})
    alone = run_local(radial(**DIVIDED), building(mlp, adamw), script(vectors(3 * 13), 3)).values
    assert not torch.allclose(alone["0.weight"], expected(vectors(3 * 13), 3, 4)["0.weight"], atol=1e-4)


@pytest.mark.parametrize("slicing", [Slicing.kElement, Slicing.kTensor])
def test_neither_slices_nor_whole_tensors_matter(slicing: Slicing) -> None:
    """A tensor in one bucket, in several of one server, and in several of two servers."""
    batches = vectors(3 * 9)
    large, small = (
        run_local(
            radial(nservers_per_group=2, slicing=slicing, slice_bytes=size), building(broad, adamw), script(batches, 3)
        )
        for size in (0, 4096)
    )
    assert_near(large.values, expected(batches, 3, 4, broad))
    assert_same_bits(small.values, large.values)
    buckets = [[len(server.model.buckets) for server in found.servers] for found in (large, small)]
    assert buckets[0] == [1, 1] and max(buckets[1]) > 2


def test_neither_the_transport_nor_the_order_of_arrival_changes_a_bit(tmp_path: Path) -> None:
    made = radial(transport=TransportChoice.kTcp, **DIVIDED)
    found = run_hosted(made, building(mlp, adamw), script(vectors(3 * 13), 3), tmp_path)
    assert_same_bits(found.values, divided_job().values)


def test_of_one_worker_the_difference_is_taken_as_it_is() -> None:
    batches = vectors(9)
    mean, found = (
        run_local(made, building(mlp, adamw), script(batches, 1)).values for made in (job(1), radial(1, **DIVIDED))
    )
    assert_same_bits(found, mean)


@pytest.mark.parametrize("compression", [Compression.kNone, Compression.kInt8])
def test_fragments_and_overlap(compression: Compression) -> None:
    """Each fragment has tensors of its own, and servers that divide them."""
    batches, cluster = vectors(3 * 24), {"fragments": 2, "sync_freq": 4, "overlap": 1, "compression": compression}
    one = run_local(radial(**cluster), building(mlp, adamw), script(batches, 3))
    many = run_local(radial(**cluster, **DIVIDED), building(mlp, adamw), script(batches, 3))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if compression is Compression.kNone else {"rtol": 0, "atol": 0.01}
    for name, value in one.values.items():
        torch.testing.assert_close(many.values[name], value, **tolerance)


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


def play(kill: tuple[int, int] | None = None) -> RadialCluster:
    outer = replace(OUTER["nesterov"][0], type=UpdaterType.kDelayedNesterov, delay=3)
    made = scripted_job(3, 1, 2, outer=outer, merge=Merge.kRadial, reduce=Reduce.kMean)

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


@cache
def calm() -> RadialCluster:
    return play()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.simulated
@pytest.mark.parametrize("process", [0, 1])
def test_a_second_copy_makes_the_same_updates(process: int) -> None:
    deaths = 0
    for moment in every(5, calm().ticks[process] + 1, 17):
        cluster = play((process, moment))
        deaths += cluster.deaths
        assert equal(cluster.values(), calm().values()), moment
        for index in range(2):
            first, second = map(flats_of, cluster.copies(index))
            assert equal(first, second), moment
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
    cluster, wanted = calm(), {0: flat.detach(), 1: wide.detach()}
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
    cluster = calm()
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
@pytest.mark.parametrize("quorum", [0, 2, 3])
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
