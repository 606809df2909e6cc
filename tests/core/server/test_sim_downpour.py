"""Downpour on the simulated network: what asynchronous worker groups must not lose, double, mix or wait for."""

import pytest
import torch
from faulty_network import NetworkFaults
from seeds import seeds
from simulated_downpour import downpour
from simulation import STORM, VIEWS, ScriptedCluster, ScriptedWorker, books, job, parameters, same, total
from torch.utils.data import DataLoader

from topotrain.core.protocol import ReducedGradient

pytestmark = pytest.mark.simulated

LAYOUTS = [(groups, workers, shards) for groups, workers in ((2, 1), (2, 2), (3, 2)) for shards in (1, 2, 3)]
SEEDS = 112  # times nine layouts: more than a thousand in `make soak`


@pytest.mark.parametrize(("groups", "workers", "shards"), LAYOUTS)
def test_every_update_counts_exactly_once(groups, workers, shards):
    for seed in seeds(SEEDS):
        cluster = ScriptedCluster(job(groups, workers, shards), seed, STORM)
        wanted, final = downpour(cluster)
        assert same(cluster.values(), wanted), f"seed {seed}: an update was lost or counted twice"
        assert same(final, wanted), f"seed {seed}: worker 0/0 has other values than the servers"


def test_every_update_counts_exactly_once_where_bodies_are_views():
    for seed in seeds(40):
        cluster = ScriptedCluster(job(*LAYOUTS[seed % len(LAYOUTS)]), seed, VIEWS)
        wanted, final = downpour(cluster)
        assert same(cluster.values(), wanted) and same(final, wanted), f"seed {seed}"


def test_every_update_counts_exactly_once_with_many_buckets(monkeypatch):
    import faulty_cluster

    from topotrain.config.sharding import cut
    from topotrain.core.model import schema as shard

    def small(*args, **_):
        return cut(*args, bucket_bytes=512)

    monkeypatch.setattr(faulty_cluster, "cut", small)
    monkeypatch.setattr(shard, "cut", small)
    schema = parameters(300, 150)
    for seed in seeds(20):
        cluster = ScriptedCluster(job(2, 2, 2), seed, STORM, schema)
        assert len(cluster.map.buckets) > 3
        wanted, final = downpour(cluster, steps=2)
        assert same(cluster.values(), wanted) and same(final, wanted), f"seed {seed}"


def test_defect_1_no_gradient_of_two_groups_in_one_sum():
    """Group 1 pushes multiples of 1024 only, group 0 smaller numbers only: a mixed sum shows in any element."""
    for seed in seeds(60):
        cluster, seen = ScriptedCluster(job(2, 2, 2), seed, STORM), []

        def look(sender, to, message, cluster=cluster, seen=seen):
            if isinstance(message, ReducedGradient):
                space = cluster.map.spaces[cluster.map.buckets[message.bucket].space]
                body = message.body.view(getattr(torch, space.dtype))
                seen.append((to.group, body.abs().max().item(), bool((body % 1024 == 0).all())))

        def script(scripted: ScriptedWorker) -> None:
            scripted.open()
            for _ in range(3):
                scripted.step(scripted.numbers(1, 100, scale=1024.0 if scripted.me.group else 1.0))
            scripted.finish()

        cluster.transport.observers.append(look)
        cluster.play(script)
        assert all(small < 512 for group, small, _ in seen if group == 0)
        assert all(pure for group, _, pure in seen if group == 1)
        assert {group for group, _, _ in seen} == {0, 1}


def test_defect_1_a_2x2_downpour_ends_on_every_seed():
    """Worst cases of timing: one worker a thousand times slower than the others. A hang is a Deadlock here."""
    for seed in seeds(60):
        cluster = ScriptedCluster(job(2, 2, 1 + seed % 3), seed, STORM)
        slow = cluster.workers[seed % 4]

        def script(scripted: ScriptedWorker, slow=slow) -> None:
            scripted.open()
            for _ in range(3):
                scripted.sleep(0.0, 5.0 if scripted.me == slow else 0.005)
                scripted.step(scripted.numbers())
            scripted.finish()

        cluster.play(script)
        assert cluster.server(0, 0).state.version == 6


# --- staleness ---------------------------------------------------------------------------------------------------


def race(
    seed: int, groups: int, staleness: int | None, steps: int = 6, shards: int = 2, weather: NetworkFaults = STORM
):
    """Groups of very different and changing speed; returns the shards' books and all the workers' outcomes."""
    cluster = ScriptedCluster(job(groups, 1, shards, max_staleness=staleness), seed, weather)
    written, outcomes = books(cluster), []

    def script(scripted: ScriptedWorker) -> None:
        scripted.open()
        for _ in range(steps):
            scripted.sleep(0.0, scripted.cluster.random.choice((0.001, 0.05, 0.3)))
            outcomes.append((scripted.me.group, scripted.steps, scripted.step(scripted.numbers())))
        scripted.finish()

    cluster.play(script)
    return written, outcomes


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_clock_lead_stays_within_max_staleness(bound):
    worst = oldest = 0
    groups = 3
    for seed in seeds(40):
        written, outcomes = race(seed, groups, bound)
        worst = max(worst, *(lead for book in written for lead in book.leads))
        oldest = max(oldest, *(old for _, _, outcome in outcomes for old in outcome.staleness))
    assert worst == bound, "the bound must be kept, and reached"
    assert 0 < oldest <= (2 * bound + 1) * (groups - 1)


def test_without_max_staleness_the_lead_has_no_bound():
    assert max(lead for seed in seeds(10) for book in race(seed, 3, None)[0] for lead in book.leads) > 3


def test_staleness_is_what_an_independent_count_finds():
    for seed in seeds(40):
        written, outcomes = race(seed, 2 + seed % 2, (None, 2)[seed % 2])
        for shard, book in enumerate(written):
            counted = dict(zip(book.applied, book.staleness, strict=True))
            reported = {(group, step): outcome.staleness[shard] for group, step, outcome in outcomes}
            assert reported == counted, f"seed {seed}"
            assert book.server.state.version == len(book.applied)


def test_with_a_bound_of_0_the_updates_come_in_group_order_and_the_result_is_one():
    """Gradients depend on what was read, in real numbers: any other order or moment of reading gives other bits."""
    results = []
    for seed in seeds(40):
        cluster = ScriptedCluster(job(3, 1, 2, max_staleness=0), seed, STORM, rate=0.1)
        written = books(cluster)

        def script(scripted: ScriptedWorker) -> None:
            scripted.open(1.0)
            for step in range(4):
                scripted.sleep(0.0, 0.1)
                scripted.step([torch.sin(part * (scripted.me.group + 2) + step) for part in scripted.values()])
            scripted.finish()

        results.append(cluster.play(script).values())
        for book in written:
            assert book.applied == [(group, step) for step in range(4) for group in range(3)], f"seed {seed}"
        assert same(results[0], results[-1]), f"seed {seed}"


# --- groups of their own speed -----------------------------------------------------------------------------------


def test_groups_of_different_speed_finish_independently():
    """The fast group's end does not move by a microsecond when the slow one gets slower."""
    ends = []
    for slowness in (1.0, 100.0):
        cluster = ScriptedCluster(job(2, 2, 2), 0, NetworkFaults(delay=(0.001, 0.001)))
        end = {}

        def script(scripted: ScriptedWorker, slowness=slowness, end=end) -> None:
            scripted.open()
            for _ in range(5):
                scripted.cluster.sim.sleep(slowness if scripted.me.group else 0.01)
                scripted.step(scripted.numbers())
            scripted.finish()
            end[scripted.me.group] = scripted.cluster.sim.now

        cluster.play(script)
        assert end[0] < end[1]
        ends.append(end)
    assert ends[0][0] == ends[1][0]


def test_leases_give_the_slow_group_fewer_batches_and_every_batch_once():
    for seed in seeds(8):
        cluster = ScriptedCluster(job(2, 2, 2), seed, STORM)
        batches: dict[tuple[int, int], list[list[int]]] = {}

        def script(scripted: ScriptedWorker, cluster=cluster, batches=batches) -> None:
            torch.manual_seed(5)
            worker = cluster.worker(
                scripted.me, (model := torch.nn.Linear(1, 1)), torch.optim.SGD(model.parameters(), lr=0.0)
            )
            loader = cluster.loader(worker, DataLoader(torch.arange(160.0).reshape(160, 1), 4, shuffle=True), "lease")
            for batch in loader:
                batches.setdefault(scripted.me[1:], []).append(batch.flatten().int().tolist())
                scripted.cluster.sim.sleep(0.3 if scripted.me.group else 0.03)
                model(batch).sum().backward()
                worker.optimizers[0].step()
            worker.finish()

        cluster.play(script)
        seen = sorted(sample for rows in batches.values() for row in rows for sample in row)
        assert seen == list(range(160)), f"seed {seed}"
        slow, fast = len(batches[(1, 0)]), len(batches[(0, 0)])
        assert slow + fast == 40 and slow < fast / 2, f"seed {seed}: {fast} and {slow} batches"
        assert len(batches[(1, 1)]) == slow and len(batches[(0, 1)]) == fast


def test_defect_6_servers_go_on_when_group_0_ends():
    for seed in seeds(20):
        cluster, pushed = ScriptedCluster(job(2, 1 + seed % 2, 2), seed, STORM), []

        def script(scripted: ScriptedWorker, cluster=cluster, pushed=pushed) -> None:
            scripted.open()
            for _ in range(1 if scripted.me.group == 0 else 6):
                scripted.cluster.sim.sleep(0.01)
                pushed.append(scripted.numbers())
                scripted.step(pushed[-1])
            scripted.finish()
            if scripted.me == cluster.workers[0]:
                assert cluster.server(0, 0).state.version < 7
                scripted.client.values.fetch_final()
                assert cluster.server(0, 0).state.version == 7, "the result is read after the drain"
                assert same(scripted.values(), [-part for part in total(pushed)]), f"seed {cluster.sim.seed}"

        cluster.play(script)
        assert cluster.server(0, 0).state.version == 7


def test_defect_7_share_memory_false_does_not_leave_groups_stale():
    """Two groups in one unit, no memory in common: at each step a group sees all that the servers had by then."""
    for seed in seeds(20):
        cluster = ScriptedCluster(job(2, 1, 2, nworkers_per_procs=2, share_memory=False), seed, STORM)
        assert cluster.topology.sharing(0) == ()
        last = {}

        def script(scripted: ScriptedWorker, last=last) -> None:
            scripted.open()
            for _ in range(3):
                scripted.sleep(0.0, 0.01)
                scripted.step(scripted.numbers())
            scripted.cluster.sim.sleep(1.0)  # everybody's updates are applied
            scripted.step([part * 0 for part in scripted.numbers()])
            last[scripted.me.group] = scripted.values()
            scripted.finish()

        cluster.play(script)
        assert same(last[0], last[1]) and same(last[0], cluster.values()), f"seed {seed}"


@pytest.mark.parametrize("bound", [0, 1])
def test_a_group_that_waits_for_batches_holds_no_other_up(bound):
    """The bound on the clock lead and the wait at an epoch's end must not wait for each other.

    Nor may a group come back with values older than the bound allows, or its workers with different ones.
    """
    for seed in seeds(12):
        cluster = ScriptedCluster(job(2, 1 + seed % 2, 2, max_staleness=bound), seed, STORM)
        seen: list[list[int]] = []
        read: dict[tuple[int, int], torch.Tensor] = {}

        def script(scripted: ScriptedWorker, cluster=cluster, seen=seen, read=read, seed=seed) -> None:
            model = torch.nn.Linear(1, 1)
            worker = cluster.worker(scripted.me, model, torch.optim.SGD(model.parameters(), lr=2**-10))
            plain = DataLoader(torch.arange(60.0).reshape(60, 1), 4, shuffle=True)
            loader = cluster.loader(worker, plain, "lease")
            for _ in range(2):
                for batch in loader:
                    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
                    same_moment = read.setdefault((scripted.me.group, worker.tally.steps), mine)
                    assert torch.equal(mine, same_moment), f"seed {seed}: replicas of one group differ"
                    seen.append(batch.flatten().int().tolist())
                    cluster.sim.sleep(0.3 if scripted.me.group else 0.03)
                    model(batch).sum().backward()
                    worker.optimizers[0].step()
            worker.finish()
            assert worker.tally.staleness_max <= 2 * bound + 1, f"seed {seed}"

        cluster.play(script)
        assert sorted(sample for row in seen for sample in row) == sorted([*range(60)] * 2), f"seed {seed}"
        assert cluster.server(0, 0).worker_groups.clocks.live() == [], "all groups have ended"


def test_workers_that_ask_for_values_equally_often_get_the_same_ones_however_far_apart_they_ask():
    """Between two questions of the second worker another group makes a step, and the first one has asked twice."""
    cluster = ScriptedCluster(job(2, 2))
    seen, moments = {}, {0: (0.2, 0.4), 1: (0.6, 0.8)}

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        if worker.me.group == 0:
            for moment in moments[worker.me.index]:
                cluster.sim.sleep(moment - cluster.sim.now)
                worker.client.values.fetch()
            seen[worker.me.index] = worker.values()
            cluster.sim.sleep(1.0 - cluster.sim.now)
        else:
            for moment in (0.1, 0.3, 0.5, 0.7):
                cluster.sim.sleep(moment - cluster.sim.now)
                worker.step([torch.ones(p.shape) for p in cluster.schema.parameters])
        worker.finish()

    cluster.play(script)
    assert same(seen[0], seen[1])
    assert float(seen[0][0][0]) == -4.0, "two steps of two workers were there at the second question of the first one"
