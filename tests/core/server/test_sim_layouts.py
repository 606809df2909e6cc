"""Layouts on the simulated network: every update counts once, groups go at their own speed, server groups agree."""

import pytest
import torch
from faulty_network import NetworkFaults
from seeds import seeds
from simulation import SMALL, STORM, VIEWS, ScriptedCluster, ScriptedWorker, books, job, parameters, same, total
from torch.utils.data import DataLoader

from topotrain.config.job import Agreement, Grads
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Init

pytestmark = pytest.mark.simulated

DOUBLE = parameters(150, 256, dtype="float64")
"""Averaging halves: in double, multiples of 2^16 stay exact for more rounds than these tests have."""
SCALE = float(1 << 16)
TWICE = NetworkFaults(delay=(0.0005, 0.004), late=0.03, duplicate=1.0, reorder=0.3)
NETWORKS = (STORM, TWICE, VIEWS)
MEANS = [Agreement.kRingAverage, Agreement.kGossip]
"""Of these the result is the mean over the groups."""
SUMS = [Agreement.kMaster, *MEANS]

LAYOUTS = {
    "sandblaster": job(1, 3, 2),
    "downpour": job(2, 1, 1),
    "downpour of pairs": job(2, 2, 2),
    "downpour of hidden pairs": job(2, 2, 2, grads=Grads.kHidden),
    "downpour on three shards": job(3, 2, 3),
    "downpour in units of two": job(2, 1, 2, nworkers_per_procs=2, share_memory=False),
    "in step": job(3, 1, 2, max_staleness=0),
    "pairs in step": job(2, 2, 2, max_staleness=0),
    "bound of 1": job(3, 1, 2, max_staleness=1),
    "bound of 3": job(3, 1, 1, max_staleness=3),
    "hogwild": job(2, 1, 2, nserver_groups=2),
    "hogwild of three": job(3, 1, 1, nserver_groups=3, sync_freq=3),
    "hogwild of pairs": job(4, 2, 2, nserver_groups=2, sync_freq=2),
    "ring average": job(2, 1, 2, nserver_groups=2, sync_freq=3, agreement=Agreement.kRingAverage),
    "ring average of three": job(3, 1, 2, nserver_groups=3, agreement=Agreement.kRingAverage),
    "gossip": job(2, 1, 1, nserver_groups=2, agreement=Agreement.kGossip),
    "gossip of three": job(3, 1, 2, nserver_groups=3, sync_freq=3, agreement=Agreement.kGossip),
}


def agreed(cluster: ScriptedCluster, start, wanted) -> list[torch.Tensor]:
    """What the groups agree on, where `wanted` is the start less all gradients."""
    count = cluster.topology.server_groups if cluster.job.cluster.agreement in MEANS else 1
    return [(start * count - (start - part)) / count for part in wanted]


def checked(cluster: ScriptedCluster, steps: int = 5) -> list[int]:
    """Run a job and compare all that can be known of it; return how far each read was ahead of the slowest group."""
    leads, start, seed = [], 7 * SCALE, f"seed {cluster.sim.seed}"
    written = {group: books(cluster, group) for group in range(cluster.topology.server_groups)}
    outcomes = {}
    scale = SCALE if cluster.topology.synced else 1.0
    wanted, final = cluster.train(steps, start, scale, (0.001, 0.05, 0.3, 2.0), outcomes)
    assert same(final, agreed(cluster, start, wanted)), f"{seed}: an update was lost or counted twice"
    assert cluster.topology.synced or same(cluster.values(), wanted), seed
    for group, shards in written.items():
        first = shards[0].applied
        theirs = cluster.topology.worker_groups_of(group)
        assert all(book.applied == first for book in shards), f"{seed}: shards of different orders"
        assert sorted(first) == [(each, step) for each in theirs for step in range(steps)], seed
        if cluster.job.cluster.max_staleness == 0:
            assert first == [(each, step) for step in range(steps) for each in theirs], seed
        for shard, book in enumerate(shards):
            told = {key: outcomes[key].staleness[shard] for key in first}
            assert told == dict(zip(book.applied, book.staleness, strict=True)), seed
            assert book.server.state.version == len(first)
            leads += book.leads
    return leads


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_update_counts_once_in_one_order_and_is_as_old_as_told(name):
    of, leads = LAYOUTS[name], []
    for seed in seeds(40):
        schema = DOUBLE if of.cluster.nserver_groups > 1 else SMALL
        leads += checked(ScriptedCluster(of, seed, NETWORKS[seed % 3], schema))
    bound = of.cluster.max_staleness
    if bound is not None:
        assert max(leads) == bound, "the bound must be kept, and reached"
    elif name == "downpour on three shards":
        assert max(leads) > 2, "without a bound there is none"


def test_every_update_counts_once_with_many_buckets(monkeypatch):
    import faulty_cluster

    from topotrain.config.sharding import cut
    from topotrain.core.model import schema as shard

    def small(*args, **_):
        return cut(*args, bucket_bytes=512)

    monkeypatch.setattr(faulty_cluster, "cut", small)
    monkeypatch.setattr(shard, "cut", small)
    for seed in seeds(20):
        cluster = ScriptedCluster(job(2, 2, 2), seed, STORM, parameters(300, 150))
        assert len(cluster.map.buckets) > 3
        wanted, final = cluster.train(steps=2)
        assert same(cluster.values(), wanted) and same(final, wanted), f"seed {seed}"


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


@pytest.mark.parametrize(("bound", "workers"), [(None, 2), (0, 2), (1, 1)])
def test_leases_give_each_batch_once_and_the_slow_group_fewer_and_no_group_waits_for_it(bound, workers):
    """The bound on the clock lead and the wait at an epoch's end must not wait for each other.

    Nor may a group come back with values older than the bound allows, or its workers with different ones.
    """
    for seed in seeds(12):
        cluster = ScriptedCluster(job(2, workers, 2, max_staleness=bound), seed, STORM)
        batches: dict[tuple[int, int], list[list[int]]] = {}
        written, tallies = books(cluster), {}
        read: dict[tuple[int, int], torch.Tensor] = {}

        def script(
            scripted: ScriptedWorker, cluster=cluster, batches=batches, read=read, seed=seed, tallies=tallies
        ) -> None:
            torch.manual_seed(5)
            model = torch.nn.Linear(1, 1)
            worker = cluster.worker(scripted.me, model, torch.optim.SGD(model.parameters(), lr=2**-10))
            plain = DataLoader(torch.arange(60.0).reshape(60, 1), 4, shuffle=True)
            loader = cluster.loader(worker, plain, "lease")
            for _ in range(2):
                for batch in loader:
                    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
                    same_moment = read.setdefault((scripted.me.group, worker.tally.steps), mine)
                    assert torch.equal(mine, same_moment), f"seed {seed}: replicas of one group differ"
                    batches.setdefault(scripted.me[1:], []).append(batch.flatten().int().tolist())
                    cluster.sim.sleep(0.3 if scripted.me.group else 0.03)
                    model(batch).sum().backward()
                    worker.optimizers[0].step()
            worker.finish()
            tallies[scripted.me.group] = worker.tally

        cluster.play(script)
        seen = sorted(sample for rows in batches.values() for row in rows for sample in row)
        assert seen == sorted([*range(60)] * 2), f"seed {seed}"
        assert cluster.server(0, 0).worker_groups.clocks.live() == [], "all groups have ended"
        for group, tally in tallies.items():
            told = [old for book in written for (g, _), old in zip(book.applied, book.staleness) if g == group]
            assert tally.staleness_max == max(told) <= (99 if bound is None else 2 * bound + 1), f"seed {seed}"
            assert tally.staleness_mean == pytest.approx(sum(told) / len(told))
        fast, slow = (len(batches[group, 0]) for group in (0, 1))
        assert len(batches[0, workers - 1]) == fast and len(batches[1, workers - 1]) == slow
        assert slow < (fast / 2 if bound is None else fast + 1), f"seed {seed}: {fast} and {slow} batches"


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


# --- server groups -----------------------------------------------------------------------------------------------


def delayed(cluster: ScriptedCluster, wait) -> None:
    """Messages arrive so many seconds later: `wait` is asked for (sender, receiver, message)."""
    depart = cluster.transport._travel

    def slowly(me, to, message, late):
        cluster.sim.at(cluster.sim.now + wait(me, to, message), lambda: depart(me, to, message, late))

    cluster.transport._travel = slowly


def test_training_goes_on_while_an_exchange_is_missing():
    """The neighbor is away for a while: no worker waits for it, and nothing is missing in the end."""
    cluster = ScriptedCluster(job(2, 1, 1, nserver_groups=2), 1, None, DOUBLE)
    neighbor, home = Address(Role.SERVER, 1, 0), cluster.server(0, 0)
    cluster.sim.at(0.05, lambda: cluster.transport.pause(neighbor))
    met = []

    def back() -> None:
        met.append(home.state.version)
        cluster.transport.resume(neighbor)

    cluster.sim.at(10.0, back)
    wanted, final = cluster.train(30, 7 * SCALE, SCALE)
    assert met == [30], "group 0 did all its steps while its neighbor was away"
    assert same(final, wanted)


@pytest.mark.parametrize("agreement", SUMS)
def test_an_update_that_is_faster_than_the_start_is_not_overwritten(agreement):
    """Group 1 has its start and sends what it learned to group 2, whose start is still on its way."""
    cluster = ScriptedCluster(job(3, 1, 1, nserver_groups=3, agreement=agreement), 0, None, DOUBLE)
    last = Address(Role.SERVER, 2, 0)
    delayed(cluster, lambda me, to, message: 1.0 if to == last and isinstance(message, Init) else 0.0)
    wanted, final = cluster.train(4, 7 * SCALE, SCALE)
    assert same(final, agreed(cluster, 7 * SCALE, wanted))
