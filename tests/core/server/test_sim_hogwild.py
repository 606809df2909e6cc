"""Distributed Hogwild on the simulated network: server groups agree, and no update is lost or counted twice."""

import pytest
from faulty_network import NetworkFaults
from seeds import seeds
from simulation import STORM, VIEWS, ScriptedCluster, job, parameters, same

from topotrain.config.job import Agreement
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Delta, Init, MasterValue, PairOffer, PairReply

pytestmark = pytest.mark.simulated

DOUBLE = parameters(150, 256, dtype="float64")
"""Averaging halves: in double, multiples of 2^16 stay exact for more rounds than these tests have."""
SCALE = float(1 << 16)
SLOW = NetworkFaults(delay=(0.2, 0.4))


MEANS = [Agreement.kRingAverage, Agreement.kGossip]
"""Of these the result is the mean over the groups."""
SUMS = [Agreement.kMaster, *MEANS]
CASES = [(groups, shards, freq) for groups in (2, 3) for shards in (1, 2) for freq in (1, 3)]


@pytest.mark.parametrize(("groups", "shards", "freq"), CASES)
def test_the_master_view_has_every_update_exactly_once(groups, shards, freq):
    for seed in seeds(40):
        cluster = ScriptedCluster(job(groups, 1, shards, nserver_groups=groups, sync_freq=freq), seed, STORM, DOUBLE)
        start, pushed, final = cluster.train(4, SCALE)
        assert same(final, [a - b for a, b in zip(start, pushed, strict=True)]), f"seed {seed}"


@pytest.mark.parametrize("agreement", MEANS)
@pytest.mark.parametrize(("groups", "shards", "freq"), CASES)
def test_averaging_in_pairs_keeps_the_sum_over_the_groups(groups, shards, freq, agreement):
    for seed in seeds(20):
        made = job(groups, 1, shards, nserver_groups=groups, sync_freq=freq, agreement=agreement, seed=seed)
        cluster = ScriptedCluster(made, seed, STORM, DOUBLE)
        start, pushed, final = cluster.train(4, SCALE)
        wanted = [(a * groups - b) / groups for a, b in zip(start, pushed, strict=True)]
        assert same(final, wanted), f"seed {seed}"


def test_several_worker_groups_on_each_server_group():
    for seed in seeds(30):
        cluster = ScriptedCluster(
            job(4, 1 + seed % 2, 2, nserver_groups=2, sync_freq=1 + seed % 3), seed, STORM, DOUBLE
        )
        start, pushed, final = cluster.train(3, SCALE)
        assert same(final, [a - b for a, b in zip(start, pushed, strict=True)]), f"seed {seed}"


@pytest.mark.parametrize("agreement", SUMS)
def test_groups_agree_where_bodies_are_views(agreement):
    for seed in seeds(20):
        cluster = ScriptedCluster(job(3, 1, 2, nserver_groups=3, agreement=agreement), seed, VIEWS, DOUBLE)
        start, pushed, final = cluster.train(4, SCALE)
        share = 3 if agreement in MEANS else 1
        assert same(final, [(a * share - b) / share for a, b in zip(start, pushed, strict=True)]), f"seed {seed}"


def slow_neighbors(cluster: ScriptedCluster) -> dict[tuple[Address, int], int]:
    """Messages between server groups take a long time, all others none to speak of.

    Returns the sender's version at its last request, by sender and bucket.
    """
    depart, asked = cluster.transport._schedule, {}

    def slowly(me, to, message, late):
        if isinstance(message, Delta | PairOffer):
            asked.setdefault((me, message.bucket), cluster.sim_servers[me].server.state.version)
        if isinstance(message, Delta | MasterValue | PairOffer | PairReply):
            cluster.sim.at(cluster.sim.now + cluster.random.uniform(0.3, 0.6), lambda: depart(me, to, message, late))
        else:
            depart(me, to, message, late)

    cluster.transport._schedule = slowly
    return asked


@pytest.mark.parametrize("agreement", SUMS)
def test_defect_2_updates_between_a_request_and_its_reply_are_kept(agreement):
    """A dozen updates are applied while one exchange is under way; all must be in the result."""
    for seed in seeds(10):
        cluster = ScriptedCluster(job(2, 1, 1, nserver_groups=2, agreement=agreement), seed, STORM, DOUBLE)
        asked = slow_neighbors(cluster)
        between: list[int] = []

        def look(sender, to, message, cluster=cluster, asked=asked, between=between):
            if isinstance(message, MasterValue | PairReply) and (to, message.bucket) in asked:
                between.append(cluster.sim_servers[to].server.state.version - asked.pop((to, message.bucket)))

        cluster.transport.observers.append(look)
        start, pushed, final = cluster.train(20, SCALE)
        share = 2 if agreement in MEANS else 1
        assert same(final, [(a * share - b) / share for a, b in zip(start, pushed, strict=True)]), f"seed {seed}"
        assert max(between) >= 5, "this test must have updates between request and reply"


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
    start, pushed, final = cluster.train(30, SCALE)
    assert met == [30], "group 0 did all its steps while its neighbor was away"
    assert same(final, [a - b for a, b in zip(start, pushed, strict=True)])


def test_an_update_that_is_faster_than_the_start_is_not_overwritten():
    """Group 1 has its start and sends what it learned to group 2, whose start is still on its way."""
    for agreement in SUMS:
        cluster = ScriptedCluster(job(3, 1, 1, nserver_groups=3, agreement=agreement), 0, None, DOUBLE)
        depart, last = cluster.transport._schedule, Address(Role.SERVER, 2, 0)

        def slow_start(me, to, message, late, cluster=cluster, depart=depart, last=last):
            wait = 1.0 if to == last and isinstance(message, Init) else 0.0
            cluster.sim.at(cluster.sim.now + wait, lambda: depart(me, to, message, late))

        cluster.transport._schedule = slow_start
        start, pushed, final = cluster.train(4, SCALE)
        share = 3 if agreement in MEANS else 1
        assert same(final, [(a * share - b) / share for a, b in zip(start, pushed, strict=True)])
