"""The two-phase commit over the shards: a step is applied everywhere or nowhere, in one order, whatever goes wrong."""

import pytest
from seeds import seeds
from simulation import STORM, ScriptedCluster, ScriptedWorker, books, job, same, total

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Commit, StepDecision, StepVote
from topotrain.tools.simulator.sim_network import Deadlock

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_between_its_commits_leaves_no_half_step(sent, workers):
    """Its COMMIT of step 1 reaches `sent` of three shards: step 0 counts on all, step 1 on none."""
    for seed in seeds(6):
        cluster, first = ScriptedCluster(job(1, workers, 3), seed, STORM), []
        written = books(cluster)
        cluster.transport.crash(Address(Role.WORKER, 0, 0), after=3 + sent, kind=Commit)

        def script(worker: ScriptedWorker, first=first) -> None:
            worker.open(3.0)
            for step in range(3):
                gradient = worker.numbers()
                first += [gradient] * (step == 0)
                worker.sleep(0.0, 0.01)
                worker.step(gradient)
            worker.finish()

        with pytest.raises(Deadlock, match="worker 0/0"):
            cluster.play(script)
        assert [book.applied for book in written] == [[(0, 0)]] * 3
        assert same(cluster.values(), [3.0 - part for part in total(first)])


def reconnect(cluster: ScriptedCluster, who: Address) -> None:
    """The connections of a process are made anew: workers say again what got lost, shards ask what was decided.

    Messages between servers stay lost: `ask` alone has to make up for them.
    """
    lost, cluster.transport.lost = cluster.transport.lost, []
    cluster.transport.revive(who)
    for sender, to, message in lost:
        if Role.WORKER in (sender.role, to.role):
            cluster.transport.send(sender, to, message)
    for sim_server in cluster.sim_servers.values():
        sim_server.send(sim_server.server.reconnected())


@pytest.mark.parametrize(
    ("shard", "kind", "after", "shape"),
    [(0, StepDecision, 2, (1, 2, 3)), (0, StepDecision, 3, (2, 2, 3)), (2, StepVote, 1, (2, 1, 3))],
)
def test_a_shard_cut_between_its_messages_has_decided_or_asks_and_never_guesses(shard, kind, after, shape):
    """The coordinator is cut in the middle of its second decision: of three shards it told itself and 0 or 1 others."""
    for seed in seeds(15):
        cluster, me = ScriptedCluster(job(*shape), seed, STORM), Address(Role.SERVER, 0, shard)
        written, cut = books(cluster), []
        cluster.transport.crash(me, after=after, kind=kind)

        def revive(cluster=cluster, written=written, cut=cut, me=me) -> None:
            cut.append([len(book.applied) for book in written])
            reconnect(cluster, me)

        cluster.sim.at(5.0, revive)
        wanted, _ = cluster.train(3)
        if kind is StepDecision:
            others = [1] * (4 - after) + [2] * (after - 2)
            assert cut[0][0] == 2 and sorted(cut[0][1:]) == others, "cut where this test wants it"
        else:
            assert max(cut[0]) <= 2 and cut[0][2] <= min(cut[0][:2]), "nobody went on without the lost shard"
        assert written[0].applied == written[1].applied == written[2].applied
        assert len(written[0].applied) == 3 * shape[0]
        assert same(cluster.values(), wanted), f"seed {seed}"
