"""Which rounds of a quorum are over, what groups weigh in them, and which groups may restart, leave and join."""

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from island_jobs import job

from topotrain.config.job import Cluster, Job, Reduce, Shard
from topotrain.config.topology import layout
from topotrain.core.server.ordered_sum import OrderedMean
from topotrain.extensions.elastic.eligibility import leave_refusal, refusal
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds, RoundGradient

GROUPS = 3


def exact(**cluster: Any) -> Job:
    return replace(job(GROUPS, outer="mean", **cluster), reduce=Reduce.kSum)


def rounds(quorum: int, live: tuple[int, ...], fragments: dict[int, int]) -> list[list[int]]:
    """The groups of the rounds that are over, of those that have pushed these fragments."""
    staging = {group: SimpleNamespace(first=SimpleNamespace(optimizer=its)) for group, its in fragments.items()}
    clocks = SimpleNamespace(live=lambda: list(live))
    server = SimpleNamespace(
        groups=live,
        worker_groups=SimpleNamespace(clocks=clocks),
        state=SimpleNamespace(known=SimpleNamespace(staging=staging)),
    )
    policy = OuterRounds(server, exact(sync_freq=4, fragments=4, quorum=quorum))  # type: ignore[arg-type]
    return [[group for group, _ in update] for update in policy.updates([(group, 7) for group in sorted(fragments)])]


@pytest.mark.parametrize("arrival", list(permutations(range(3))))
def test_the_weight_of_a_group_has_the_same_bits_in_any_order_of_its_commits(arrival: tuple[int, ...]) -> None:
    weights, values = (0.1, 0.2, 0.3), torch.arange(1.0, 40.0, dtype=torch.float64)
    in_order = {worker: SimpleNamespace(weight=weight) for worker, weight in enumerate(weights)}
    arrived = {worker: in_order[worker] for worker in arrival}

    def mean(commits: dict[int, Any]) -> torch.Tensor:
        def source(sign: float, its: dict[int, Any]) -> Any:
            return SimpleNamespace(commits=its, present=lambda bucket: 1, gradient=lambda bucket: values * sign)

        sources = {0: source(1.0, commits), 1: source(-0.7, {0: SimpleNamespace(weight=1.0)})}
        bucket: Any = None
        return RoundGradient(sources, OrderedMean(((0, 1),)), bucket, ()).gradient(bucket).clone()

    assert torch.equal(mean(arrived), mean(in_order))


def test_which_rounds_are_over() -> None:
    live = (0, 1, 2, 3)
    assert rounds(0, live, {0: 1, 1: 1, 2: 1}) == []
    assert rounds(0, live, {0: 1, 1: 1, 2: 1, 3: 1}) == [[0, 1, 2, 3]]
    assert rounds(0, (0, 2), {0: 1, 2: 1}) == [[0, 2]], "the others have ended, or are gone"
    assert rounds(2, live, {0: 1}) == []
    assert rounds(2, live, {0: 1, 3: 1}) == [[0, 3]]
    assert rounds(2, live, {0: 2, 1: 1, 3: 1}) == [[1, 3]], "another fragment is no part of the round"
    assert rounds(3, live, {0: 2, 1: 1, 2: 2, 3: 1}) == [[1, 3]], "no group could push any more: the one behind comes"
    assert rounds(3, live, {0: 0, 1: 3, 2: 0, 3: 3}) == [[1, 3]], "fragment 3 comes before fragment 0 of the next turn"
    assert rounds(3, live, {0: 0, 1: 3, 2: 0, 3: 0}) == [[0, 2, 3]], "a round of a quorum is over, and no smaller one"
    assert rounds(0, live, {0: 0, 1: 3, 2: 0, 3: 0}) == [[1]]
    assert rounds(1, live, {2: 0}) == [[2]]
    assert rounds(2, live, {}) == []


def test_which_groups_can_restart_leave_and_join() -> None:
    def refusals(**cluster: Any) -> tuple[str, str]:
        made: Cluster = exact(sync_freq=4, **cluster).cluster
        topology = layout(made)
        return refusal(Job(cluster=made), topology, 1), leave_refusal(Job(cluster=made), topology, 1)

    assert refusals(quorum=1, fragments=2) == ("", "")
    restarts, leaves = refusals()
    assert not restarts and leaves.startswith("with shard: kStatic, the default with cluster.outer, each group")
    restarts, leaves = refusals(fragments=2)
    assert not restarts and leaves.startswith("with shard: kStatic"), "in step, too"
    leasing = exact(sync_freq=4, fragments=2)
    assert leave_refusal(replace(leasing, shard=Shard.kLease), layout(leasing.cluster), 1) == ""
