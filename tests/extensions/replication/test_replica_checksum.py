"""The copies of a server compare what they have become (`replica_checksum`): a wrong bit in one of them is noticed."""

import pytest
import torch
from replicated_cluster import ReplicatedTown, flats_of
from simulation import Seat, job

from topotrain.config.topology import Address, Role
from topotrain.extensions.replication import replica_checksum

STEPS, SERVER = 8, Address(Role.SERVER, 0, 1)


def train(seat: Seat, spoil: int = -1) -> None:
    """Before its step `spoil` the first worker turns a bit in a second copy."""
    seat.open(start=1.0)
    town: ReplicatedTown = seat.cluster  # type: ignore[assignment]
    for step in range(STEPS):
        if step == spoil and seat.me.index == 0:
            town.sim.sleep(0.01)  # the copies have done the same by then
            flats_of_shadow(town)[0].view(torch.int32)[3] ^= 1 << 20
        seat.step(seat.numbers(scale=0.01))
    seat.finish()
    if seat.me.index == 0:
        seat.client.values.fetch_final()
        seat.client.buffers.final()
    town.ends[seat.me] = list(seat.values())


def flats_of_shadow(town: ReplicatedTown) -> list[torch.Tensor]:
    copy = next(p.standbys[SERVER].standby.copy for p in town.processes.values() if SERVER in p.standbys)
    assert copy is not None
    model = copy.server.state.known
    return [model.flats.flat("values", space.index) for space in model.map.spaces]


def run(spoil: int = -1) -> ReplicatedTown:
    return ReplicatedTown(job(workers=2, shards=2), 3).play(lambda seat: train(seat, spoil))


def primary(town: ReplicatedTown):
    return town.home[SERVER].primaries[SERVER].primary


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is compared in every third step."""
    monkeypatch.setattr(replica_checksum, "EVERY", 3)


def test_copies_that_did_the_same_never_differ() -> None:
    town = run()
    assert primary(town).differs == 0 and not primary(town)._marks
    assert all(map(torch.equal, *map(flats_of, town.copies(1))))


@pytest.mark.parametrize("spoil", [2, 3, 4])
def test_one_wrong_bit_in_a_second_copy_is_found_and_it_is_made_anew(spoil: int) -> None:
    town, calm = run(spoil), run()
    assert primary(town).differs == 1
    assert primary(town).covered, "the new one has everything"
    assert all(map(torch.equal, *map(flats_of, town.copies(1))))
    for me, seen in calm.ends.items():
        assert all(map(torch.equal, town.ends[me], seen)), "the job goes on with the copy that has spoken"


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
