"""Rounds of a quorum: each step counts once in each fragment, and no worker waits for another."""

import threading
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process_job import Result, run_local
from island_jobs import job
from torch import nn

from topotrain.config.job import Cluster, Job, Reduce, Shard
from topotrain.config.topology import Address, layout
from topotrain.core.server.ordered_sum import OrderedMean
from topotrain.extensions.elastic.eligibility import leave_refusal, refusal
from topotrain.extensions.outer_optimizer.outer_rounds import OuterRounds, RoundGradient

GROUPS, STEPS = 3, 17


class Cells(nn.Module):
    """Each step has a cell of its own in each parameter, to which it adds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ParameterList([nn.Parameter(torch.zeros(GROUPS * STEPS)) for _ in range(4)])

    def forward(self, cell: int) -> torch.Tensor:
        return -torch.stack([each[cell] for each in self.cells]).sum()


def build() -> tuple[Any, ...]:
    model = Cells()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def exact(**cluster: Any) -> Job:
    return replace(job(GROUPS, outer="mean", **cluster), reduce=Reduce.kSum)


class Script:
    """Steps of each worker. Those in `late` begin when all others have ended.

    alone: a push of any worker makes a round.
    """

    def __init__(self, late: tuple[int, ...] = (), alone: bool = False) -> None:
        self.late, self.alone, self.ended = late, alone, threading.Event()
        self.running = GROUPS - len(late)
        self.lock = threading.Lock()
        self.seen: dict[Address, list[torch.Tensor]] = {}

    def __call__(self, t: Any) -> None:
        if t.me.group in self.late:
            assert self.ended.wait(20), "the others wait for a worker that makes no step"
        workers, kept = t.topology.workers_per_group, self.seen.setdefault(t.me, [])
        for step in range(STEPS):
            t.optimizer.zero_grad()
            cell = t.me.group * STEPS + step
            # Each worker of the group has a sample, and adds its share.
            t.backward(t.losses(lambda model, _, cell=cell: model(cell) / workers, torch.zeros(workers)))
            t.optimizer.step()
            seen = torch.stack(list(t.model.cells.parameters())).detach()
            assert bool((seen <= 1).all()), "counted twice"
            assert bool((seen[:, cell] == 1).all()), "a step of this worker is lost here"
            kept.append(seen)
        if t.me.group not in self.late and self.alone:
            # The round of the last push is over without those who are late. Of two workers the first that ends may
            # have its last push alone.
            t.worker.client.values.settle()
        with self.lock:
            self.running -= 1
            if not self.running:
                self.ended.set()

    def check(self, found: Result) -> None:
        """Each step counts once in each fragment, and the workers of a group take values behind the same step."""
        assert all(bool((value == 1).all()) for value in found.values.values()), found.values
        for me, steps in self.seen.items():
            assert all(map(torch.equal, steps, self.seen[me._replace(index=0)])), me


IN_STEP = [(1, 0, 1, 0), (1, 0, 1, 3), (1, 0, 2, 1)]
ALONE = [(1, 1, 1, 0), (1, 1, 4, 0), (1, 2, 4, 0), (1, 3, 1, 0)]
PAIRS = [(2, 0, 1, 0), (2, 0, 4, 0), (2, 1, 1, 0), (2, 1, 4, 0), (2, 2, 4, 0), (2, 3, 1, 0)]


@pytest.mark.parametrize(("workers", "quorum", "fragments", "overlap"), IN_STEP + ALONE + PAIRS)
def test_each_step_counts_once_in_each_fragment(workers: int, quorum: int, fragments: int, overlap: int) -> None:
    made = exact(sync_freq=4, fragments=fragments, quorum=quorum, overlap=overlap, nworkers_per_group=workers)
    script = Script()
    script.check(run_local(made, build, script))


@pytest.mark.parametrize(("quorum", "late", "fragments"), [(1, (1, 2), 1), (1, (1, 2), 4), (2, (2,), 4), (2, (0,), 1)])
def test_no_worker_waits_for_one_that_makes_no_step(quorum: int, late: tuple[int, ...], fragments: int) -> None:
    script = Script(late, quorum == 1)
    script.check(run_local(exact(sync_freq=4, fragments=fragments, quorum=quorum), build, script))


def test_values_that_arrive_late_at_one_worker_are_taken_by_both_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 says for some steps that nothing has arrived."""
    script, asked = Script(), {0: 0, 1: 0}

    def run(t: Any) -> None:
        is_over = t.exchange.steps.is_over

        def delayed() -> bool:
            found = is_over()
            asked[t.me.index] += 1
            return found and (t.me.index == 0 or asked[1] % 5 == 0)

        monkeypatch.setattr(t.exchange.steps, "is_over", delayed)
        script(t)

    script.check(run_local(exact(sync_freq=2, quorum=1, nworkers_per_group=2), build, run))


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
