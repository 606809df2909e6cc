"""The copies of a server compare what they have become (`replica_checksum`): a wrong bit in one of them is noticed."""

import pytest
import torch
from replicated_cluster import ReplicatedCluster, flats_of
from simulation import ScriptedWorker, job

from topotrain.config.topology import Address, Role
from topotrain.extensions.replication import replica_checksum

STEPS, SERVER = 8, Address(Role.SERVER, 0, 1)


def train(worker: ScriptedWorker, spoil: int = -1) -> None:
    """Before its step `spoil` the first worker turns a bit in a second copy."""
    worker.open(start=1.0)
    cluster: ReplicatedCluster = worker.cluster  # type: ignore[assignment]
    for step in range(STEPS):
        if step == spoil and worker.me.index == 0:
            cluster.sim.sleep(0.01)  # the copies have done the same by then
            flats_of_shadow(cluster)[0].view(torch.int32)[3] ^= 1 << 20
        worker.step(worker.numbers(scale=0.01))
    worker.finish()
    if worker.me.index == 0:
        worker.client.values.fetch_final()
        worker.client.buffers.final()
    cluster.ends[worker.me] = list(worker.values())


def flats_of_shadow(cluster: ReplicatedCluster) -> list[torch.Tensor]:
    copy = next(p.standbys[SERVER].standby.copy for p in cluster.processes.values() if SERVER in p.standbys)
    assert copy is not None
    model = copy.server.state.known
    return [model.flats.flat("values", space.index) for space in model.map.spaces]


def run(spoil: int = -1) -> ReplicatedCluster:
    return ReplicatedCluster(job(workers=2, shards=2), 3).play(lambda worker: train(worker, spoil))


def primary(cluster: ReplicatedCluster):
    return cluster.home[SERVER].primaries[SERVER].primary


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is compared in every third step."""
    monkeypatch.setattr(replica_checksum, "EVERY", 3)


def test_copies_that_did_the_same_never_differ() -> None:
    cluster = run()
    assert primary(cluster).differs == 0 and not primary(cluster)._marks
    assert all(map(torch.equal, *map(flats_of, cluster.copies(1))))


@pytest.mark.parametrize("spoil", [2, 3, 4])
def test_one_wrong_bit_in_a_second_copy_is_found_and_it_is_made_anew(spoil: int) -> None:
    cluster, calm = run(spoil), run()
    assert primary(cluster).differs == 1
    assert primary(cluster).covered, "the new one has everything"
    assert all(map(torch.equal, *map(flats_of, cluster.copies(1))))
    for me, seen in calm.ends.items():
        assert all(map(torch.equal, cluster.ends[me], seen)), "the job goes on with the copy that has spoken"


def test_each_bucket_is_looked_at_once_in_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_checksum, "EVERY", 100)
    server = run().speaking(0)
    buckets = len(server.state.known.buckets)
    server.state.version, found = 1000, 0
    for version in range(900, 1000):
        server.state.version = version + 1
        found += replica_checksum.mark(server, version) is not None
    assert found == len({0, *(bucket.id % 100 for bucket in server.state.known.buckets)}) <= buckets + 1
    assert replica_checksum.mark(server, 1000) is None, "no step was made"
