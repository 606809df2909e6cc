"""Two copies of every server: a process dies at any moment, and nobody can tell afterwards (`state_machine`)."""

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache

import pytest
import torch
from replicated_cluster import ReplicatedCluster, flats_of
from seeds import every
from simulation import ScriptedWorker, job

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema
from topotrain.extensions.replication import replica_checksum
from topotrain.extensions.replication.replicated_server import ReplicatedServer
from topotrain.extensions.replication.state_machine import UNCOUNTED
from topotrain.extensions.replication.state_transfer import restore, save
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.training.data.data_client import DataClient

pytestmark = pytest.mark.simulated

STEPS = 3


def train(worker: ScriptedWorker) -> None:
    """A synchronous script that leases its batches, steps, leaves its state behind, and reads the end."""
    cluster: ReplicatedCluster = worker.cluster  # type: ignore[assignment]
    client, main = worker.client, worker.me.index == 0
    worker.open(start=1.0)
    client.extension(WorkerStateClient).save(-1, torch.arange(1000, dtype=torch.uint8) + worker.me.index)
    leases = []
    for step in range(STEPS):
        leases.append(client.extension(DataClient).lease(0, step, STEPS, 7, step, False))
        rng = torch.Generator().manual_seed(100 * step + worker.me.index)
        shapes = [(p.shape, getattr(torch, p.dtype)) for p in cluster.map.parameters]
        worker.step([torch.randn(shape, generator=rng, dtype=dtype) * 0.3 for shape, dtype in shapes])
    left = client.extension(WorkerStateClient).load(worker.me.index)[0]
    assert left is not None
    worker.finish()
    if main:
        client.values.fetch_final()
        client.buffers.final()
    lines = cluster.lifelines[worker.me]
    lines.leave()
    cluster.sim.wait(lambda: lines.left)
    cluster.ends[worker.me] = [*worker.values(), left, *leases, *worker.outcomes]


def run(
    kill: tuple[int, int] | None = None, again: int = 0, loses: bool = False, servers: int = 2
) -> ReplicatedCluster:
    cluster = ReplicatedCluster(job(workers=2, shards=servers), 1, kill, again)
    cluster.transport.loses = loses
    return cluster.play(train)


@cache
def calm(servers: int) -> ReplicatedCluster:
    cluster = run(servers=servers)
    check(cluster, cluster, servers)
    return cluster


def check(cluster: ReplicatedCluster, undisturbed: ReplicatedCluster, servers: int = 2) -> None:
    """All have seen what would have been seen anyway, and there are two copies of it again."""
    for me, seen in undisturbed.ends.items():
        assert all(map(equal, cluster.ends[me], seen)), me
    assert equal(cluster.values(), undisturbed.values())
    for index in range(servers):
        first, second = cluster.copies(index)
        assert equal(flats_of(first), flats_of(second))
        assert first.state.version == second.state.version == STEPS
        assert first.steps.batches.counts() == second.steps.batches.counts()


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def moments(process: int, servers: int = 2) -> int:
    return calm(servers).ticks[process]


@pytest.mark.parametrize(("process", "loses", "first"), [(0, False, 1), (0, True, 4), (1, False, 3), (1, True, 6)])
def test_a_process_may_die_at_any_moment(process: int, loses: bool, first: int) -> None:
    """Some of them; server 0 decides, leases and keeps what workers leave."""
    for moment in every(first, moments(process) + 1, 11):
        cluster = run((process, moment), loses=loses)
        assert cluster.deaths == 1
        check(cluster, calm(2))


@pytest.mark.parametrize("servers", [2, 3])
def test_it_can_happen_again(servers: int) -> None:
    for moment, later in ((20, 30), (90, 1), (150, 60)):
        cluster = run((servers - 1, moment), later, loses=moment == 90, servers=servers)
        assert cluster.deaths == 2
        check(cluster, calm(servers), servers)


# --- the transfer ------------------------------------------------------------------------------------------------


def copy_of(cluster: ReplicatedCluster) -> ReplicatedServer:
    return next(
        p.primaries[Address(Role.SERVER, 0, 0)].primary.copy for p in cluster.processes.values() if p.number == 0
    )


def fresh(cluster: ReplicatedCluster) -> ReplicatedServer:
    me = Address(Role.SERVER, 0, 0)
    return ReplicatedServer(cluster, me)


@pytest.mark.parametrize("damage", ["short", "text", "component", "nothing"])
def test_bytes_that_are_no_likeness_are_refused(damage: str) -> None:
    data = save(copy_of(calm(2)))
    assert data is not None
    if damage == "short":
        data = data[: data.numel() // 2]
    elif damage == "text":
        data[100:120] = 0
    elif damage == "component":
        text = bytes(data.tolist()).replace(b'"clocks"', b'"sundry"')
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:
        data = data[:0]
    with pytest.raises(m.ProtocolError, match="not the state of a server"):
        restore(fresh(calm(2)), data)


def test_only_plain_data_is_a_state() -> None:
    cluster = run()
    cluster.speaking(0).hyper.of_group[0] = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a state holds a object, which is not plain data"):
        save(copy_of(cluster))


OWN = {
    "_entries",
    "_flat",
    "_views",
    "_scratch",
    "_freezer",
    "_optimizer",
    "spans",
    "_work",
    "_out",
    "_sender",
    "_before",
    "views",
    "_given",
    "_lists",
    "_loose",
}
"""Fields that a copy makes itself. What of the buffers counts is compared by what is sent."""


def differences(a: object, b: object, where: str, seen: set[int]) -> Iterator[str]:
    """The fields in which two object graphs differ, in everything that is data."""
    if type(a) is not type(b):
        yield f"{where}: {a!r:.80} and {b!r:.80}"
    elif isinstance(a, torch.Tensor):
        yield from () if equal(a, b) else (where,)
    elif isinstance(a, dict):
        yield from differences(list(a), list(b), f"keys of {where}", seen)  # type: ignore[call-overload]
        yield from (d for key in a if key in b for d in differences(a[key], b[key], f"{where}[{key}]", seen))  # type: ignore[operator, index]
    elif isinstance(a, list | tuple | deque):
        yield from () if len(a) == len(b) else (f"{where}: {len(a)} and {len(b)}",)  # type: ignore[arg-type]
        yield from (d for n, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}[{n}]", seen))  # type: ignore[call-overload]
    elif callable(a) or isinstance(a, Job | Topology | SliceMap | Schema | torch.dtype) or id(a) in seen:
        return
    elif hasattr(a, "__dict__") or (is_dataclass(a) and not isinstance(a, m.Message)):
        seen.add(id(a))
        names = list(vars(a)) if hasattr(a, "__dict__") else [field.name for field in fields(a)]  # type: ignore[arg-type]
        for name in (name for name in names if name not in OWN):
            yield from differences(getattr(a, name), getattr(b, name), f"{where}.{name}", seen)
    elif a != b:
        yield f"{where}: {a!r:.80} and {b!r:.80}"


def test_no_field_of_any_component_is_forgotten() -> None:
    """After every message of a job whose workers lease, leave their states behind and start anew."""
    cluster = ReplicatedCluster(job(groups=2, workers=2, shards=2), 1)
    found: set[str] = set()
    copied = 0

    def look(sender: Address, to: Address, message: m.Message) -> None:
        nonlocal copied
        if to.role is not Role.SERVER or isinstance(message, UNCOUNTED):
            return
        copy = cluster.home[to].primaries[to].primary.copy
        data, second_copy = save(copy), ReplicatedServer(cluster, to)
        if data is not None:
            restore(second_copy, data)
            copied += 1
            found.update(differences(copy.server, second_copy.server, "server", set()))
            found.update(differences(copy.channels, second_copy.channels, "channels", set()))

    cluster.transport.observers.append(look)

    def script(worker: ScriptedWorker) -> None:
        worker.open()
        worker.client.extension(WorkerStateClient).save(-1, torch.arange(1000, dtype=torch.uint8))
        for step in range(2):
            worker.client.extension(DataClient).lease(0, step, 2, 7, step, False)
            worker.step(worker.numbers())
        worker.finish()

    cluster.play(script)
    assert not found, "\n".join(sorted(found))
    assert copied > 50


# --- copies compare what they have become: a wrong bit in one of them is noticed -------------------------------------

CHECKED_STEPS, SERVER = 8, Address(Role.SERVER, 0, 1)


def train_checked(worker: ScriptedWorker, spoil: int = -1) -> None:
    """Before its step `spoil` the first worker turns a bit in a second copy."""
    worker.open(start=1.0)
    cluster: ReplicatedCluster = worker.cluster  # type: ignore[assignment]
    for step in range(CHECKED_STEPS):
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


def run_checked(spoil: int = -1) -> ReplicatedCluster:
    return ReplicatedCluster(job(workers=2, shards=2), 3).play(lambda worker: train_checked(worker, spoil))


def primary(cluster: ReplicatedCluster):
    return cluster.home[SERVER].primaries[SERVER].primary


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is compared in every third step."""
    monkeypatch.setattr(replica_checksum, "EVERY", 3)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("spoil", [2, 3, 4])
def test_one_wrong_bit_in_a_second_copy_is_found_and_it_is_made_anew(spoil: int) -> None:
    cluster, calm = run_checked(spoil), run_checked()
    assert primary(calm).differs == 0 and not primary(calm)._marks
    assert primary(cluster).differs == 1
    assert primary(cluster).covered, "the new one has everything"
    assert all(map(torch.equal, *map(flats_of, cluster.copies(1))))
    for me, seen in calm.ends.items():
        assert all(map(torch.equal, cluster.ends[me], seen)), "the job goes on with the copy that has spoken"
