"""Servers with second copies in jobs of several worker groups: servers and groups die at any moments, together.

Every batch has a cell of its own, and at the end every cell is exactly 1: in what worker (0,0) has got, and in both
copies of every server.
"""

import random
from functools import cache

import pytest
from replicated_deaths import CrashableCluster
from seeds import seeds, soaked
from simulation import job

from topotrain.config.job import Compression
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.extensions.replication.replicated_server import ReliableChannel
from topotrain.extensions.replication.replication_messages import ResumeConnection

pytestmark = pytest.mark.simulated

LAYOUTS = {
    "downpour": (3, 1, 2, {}),
    "downpour of pairs": (2, 2, 2, {}),
    "downpour on three servers": (3, 1, 3, {}),
    "bounded": (3, 1, 2, {"max_staleness": 1}),
    "in step": (2, 2, 2, {"max_staleness": 0}),
    "warming up": (3, 1, 2, {"warmup_steps": 3}),
    "sandblaster": (1, 2, 2, {}),
    "encoded": (2, 2, 2, {"compression": Compression.kFp16}),
}
SEEDS = 12
FOUND = {"downpour": (5, 8)}
"""Seeds that show a defect which others do not: a mutant of tests/soak/mutants.txt survives without them."""
SERVER = Address(Role.SERVER, 0, 0)


def place(name: str, seed: int, **bad_luck: object) -> CrashableCluster:
    groups, workers, shards, more = LAYOUTS[name]
    return CrashableCluster(job(groups, workers, shards, **more), seed, **bad_luck)  # type: ignore[arg-type]


@cache
def calm(name: str) -> tuple[dict[int, int], float]:
    cluster = place(name, 0).run()
    assert not cluster.wrong()
    return dict(cluster.ticks), cluster.sim.now


def drawn(name: str, seed: int) -> CrashableCluster:
    """One or two deaths of servers, up to three of groups, and sometimes a group that is given up."""
    rng, (groups, _, shards, _), (moments, end) = random.Random(f"{name} {seed}"), LAYOUTS[name], calm(name)
    server = rng.randrange(shards)
    kill, again = (server, rng.randint(1, moments[server])), rng.choice((0, rng.randint(1, 200)))
    falls = [
        (rng.uniform(0, end), rng.randrange(groups), rng.choice((0.0, 0.003, 0.05))) for _ in range(rng.randint(0, 3))
    ]
    if groups > 1 and rng.random() < 0.3:
        falls.append((rng.uniform(0, end), rng.randrange(1, groups), -1.0))
    cluster = place(name, seed, kill=kill, again=again, falls=tuple(falls))
    cluster.transport.loses = rng.random() < 0.5
    return cluster


LATER = ("downpour on three servers", "in step", "sandblaster")


@pytest.mark.parametrize("name", soaked([name for name in LAYOUTS if name not in LATER], LATER))
def test_every_batch_counts_once_whichever_process_dies_when(name: str) -> None:
    deaths = 0
    drawn_seeds = seeds(SEEDS, *FOUND.get(name, ()))
    for seed in drawn_seeds:
        cluster = drawn(name, seed).run()
        assert not cluster.wrong(), f"{name}, seed {seed}: {cluster.wrong()[:5]}"
        deaths += cluster.deaths + cluster.worker_deaths
    assert deaths > len(drawn_seeds)


def test_a_group_that_is_given_up_leaves_nothing_behind() -> None:
    """Also where the coordinator moves just then: its successor is told once more."""
    for moment in range(100, 400, 60):
        cluster = given_up(moment).run()
        assert cluster.deaths == 1 and not cluster.wrong(), moment
        server = cluster.speaking(0)
        assert server.worker_groups.is_away(Address(Role.WORKER, 2, 0))


def given_up(moment: int) -> CrashableCluster:
    return place("downpour", moment, kill=(0, moment), falls=((0.03, 2, -1.0),))


def test_a_copy_that_knows_only_the_dead_takes_the_replacement_as_new() -> None:
    """The other copy had heard of both, the death and the newcomer, and has died before it could tell."""
    primary, worker = place("sandblaster", 0).run().home[SERVER].primaries[SERVER].primary, Address(Role.WORKER, 0, 1)
    line = primary.copy.channels[worker] = ReliableChannel(sent=80, received=57)
    (answer,) = [x for to, x in primary.handle(worker, ResumeConnection(0, restarts=1)) if to == worker]
    assert answer == ResumeConnection(0, answer=True)
    primary.handle(worker, m.WorkerRejoined(1))
    assert primary.copy.channels[worker].restarts == 1 and primary.copy.channels[worker] is not line
    for late in (ResumeConnection(0), ResumeConnection(5, restarts=2)):
        with pytest.raises(m.ProtocolError, match="never had"):
            primary.handle(worker, late)


def test_a_server_that_confirms_too_much_gets_no_message_on_its_connection() -> None:
    """It would count them, and count them again on its next connection."""
    primary, peer = place("sandblaster", 0).run().home[SERVER].primaries[SERVER].primary, Address(Role.SERVER, 0, 1)
    channel = primary.copy.channels[peer]
    channel.send(m.Drained())
    primary.disconnected(peer)
    primary.drop_standby()
    assert [to for to, _ in primary.handle(peer, ResumeConnection(channel.sent + 1))] == []
    assert primary.fault is not None and "were confirmed" in str(primary.fault)
    again = [x for to, x in primary.handle(peer, ResumeConnection(channel.sent - 1)) if to == peer]
    assert again == [ResumeConnection(channel.received, answer=True), m.Drained()]
