"""Servers with second copies whose processes have addresses of their own, as on several hosts: workers find them.

The code of real processes, in threads of this one. A process that is killed hears and says nothing more from then on,
and its port is closed.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from in_process_job import (
    FailureObserver,
    Result,
    WorkerHandle,
    _enlist,
    _JobThreads,
    _train,
    building,
    job_of,
    reference,
    usual_loop,
    vectors,
    whole,
)

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport.shared_memory import ProcessMemory, socket_directory
from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.protocol import Message
from topotrain.extensions.replication.replica_host import PrimaryEndpoint, ReplicaSlot, ReplicatedServers
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domains, parse_placement
from topotrain.launch.runtime.process_host import HostedServerFactory, HostOptions
from topotrain.launch.runtime.worker_connections import WorkerConnections

HOSTS = (0, 0, 0, 1, 0, 1)  # of the units: three workers, three servers
WAIT_S = 30.0


ADDRESSES = ("127.0.0.1", "127.0.0.2")
"""Of the hosts."""


@contextmanager
def dropped_event(speaker: PrimaryEndpoint) -> Iterator[list[Any]]:
    """An event of a process that is dead: nothing of it is sent."""
    with speaker._lock:
        yield []


def dropped(to: Address, message: Message) -> None:
    """A message of a process that is dead."""


class RecordingSlot(ReplicaSlot):
    """What the launcher is told about one slot, and sends to it."""

    def __init__(self, processes: "ServerProcesses") -> None:
        super().__init__(parse_placement(processes.placement.to_data()))
        self.owner, self.placements = processes, SimpleQueue[Any]()

    def next_placement(self) -> Any:
        return self.placements.get()

    def on_standby_complete(self, server: Address, standby: int) -> None:
        self.owner.covered(server, standby)

    def on_standby_differs(self, server: Address, standby: int) -> None:
        pass

    def on_disconnect(self, server: Address) -> None:
        self.owner.missed.append(server)

    def end_process(self, reason: str) -> None:
        pass


class ServerProcesses:
    """Processes in threads."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.topology = layout(job.cluster, HOSTS)
        self.placement = ReplicaPlacement(domains(self.topology))
        self.job_threads, self.complete = _JobThreads(), threading.Condition()
        self.routers: dict[int, Router] = {}
        self.processes: dict[int, ReplicatedServers] = {}
        self.slots: dict[int, RecordingSlot] = {}
        self.threads: list[threading.Thread] = []
        (folder / "store").mkdir(mode=0o700)
        self.url, self.sockets = (folder / "store").as_uri(), Path(socket_directory())
        self.missed: list[Address] = []

    def place(self, unit: int, number: int = 0) -> RouterConfig:
        identity = Identity(self.job.name, b"7" * 32, number, 0, self.job.digest())
        host = ADDRESSES[HOSTS[unit]]
        return RouterConfig(self.job, self.topology, identity, open_store(self.url), self.sockets, host)

    def covered(self, server: Address, shadows: int) -> None:
        with self.complete:
            self.placement.covered(server.index, shadows)
            self.complete.notify_all()

    def begin(self, index: int, number: int = 0) -> None:
        me = Address(Role.SERVER, 0, index)
        place = self.place(self.topology.unit_of(me), number)
        self.routers[index] = router = Router(place, ProcessMemory())
        self.slots[index], observer = RecordingSlot(self), FailureObserver(self.trouble(router))
        factory = HostedServerFactory(place, PrivateMemory(), HostOptions())
        copied = self.processes[index] = ReplicatedServers(place, router, factory, me, self.slots[index], observer)

        def live() -> None:
            with suppress(Exception):
                copied.open()
                copied.wait()
                router.close()

        self.threads.append(threading.Thread(target=live, daemon=True))
        self.threads[-1].start()

    def trouble(self, router: Router) -> Any:
        return lambda: (
            self.job_threads.trouble() if router in self.routers.values() else None
        )  # errors of a killed process do not count

    def kill(self, index: int, number: int) -> None:
        """Once all have two copies: this process dies, and a fresh one takes its place."""
        everybody = set(self.placement.servers)
        with self.complete:
            assert self.complete.wait_for(lambda: self.placement._covered == everybody, WAIT_S)
        dead, _ = self.processes.pop(index), self.slots.pop(index)
        for speaker in dead._primaries.values():
            speaker._event = partial(dropped_event, speaker)  # type: ignore[method-assign]  # else it would tell of its end
            speaker.send = dropped  # type: ignore[method-assign]
        dead._primaries.clear()  # nor does it look for others
        router = self.routers.pop(index)
        assert router._tcp is not None
        router._tcp._watch.close()
        for wire in router._sockets.values():
            wire._residents.clear()
            if wire._listener is not None:
                wire._listener.stop()
            for connection in list(wire._connections):
                connection.cut("killed")
        assert self.placement.lost(index)
        self.placement.filled(index)
        for slot in self.slots.values():
            slot.placements.put(parse_placement(self.placement.to_data()))
        self.begin(index, number)

    def sever(self, one: int, other: int) -> None:
        """The way between two servers ends, and nobody has died."""
        wire = self.routers[one]._tcp
        assert wire is not None
        ways = [c for c in wire._connections if c.me.role is c.peer.role is Role.SERVER and c.peer.index == other]
        assert ways
        for way in ways:
            way.cut("the network was down for a moment")


def run(folder: Path, kills: dict[int, int], cuts: dict[int, tuple[int, int]]) -> None:
    """Kill servers and cut ways before some batches: the result does not show it."""
    job = job_of(transport="kTcp", nservers_per_group=3, replicas=2)
    processes = ServerProcesses(job, folder)
    for index in processes.placement.servers:
        processes.begin(index)
    workers = processes.topology.workers(0)
    with ThreadPoolExecutor(len(workers)) as pool:
        connections = dict(
            zip(workers, pool.map(lambda w: WorkerConnections(processes.place(w.index), w), workers), strict=True)
        )
    processes.job_threads.exchanges.update({me: each.exchange for me, each in connections.items()})
    handles = [
        _enlist(job, processes.topology, me, building(), each.exchange, each, whole, each.memory)
        for me, each in connections.items()
    ]
    barrier, deaths = threading.Barrier(len(workers)), iter(range(1, 100))

    def mortal(handle: WorkerHandle) -> None:
        for number, batch in enumerate(vectors(8)):
            barrier.wait(WAIT_S)
            if number in kills and handle.me.index == 0:
                processes.kill(kills[number], next(deaths))
            if number in cuts and handle.me.index == 0:
                processes.sever(*cuts[number])
            usual_loop([batch])(handle)

    _train(
        processes.job_threads,
        handles,
        mortal,
        lambda me: connections[me].close(finished=not processes.job_threads.errors),
    )
    if processes.job_threads.errors:
        raise processes.job_threads.errors[0]
    assert bool(cuts) is (len(processes.missed) > 0) or kills
    found = Result.of(handles[0].model, workers=handles, traffic=(0, 0))
    assert found.same_bits(reference(job_of(nservers_per_group=3), building(), usual_loop(vectors(8))))


def test_workers_find_a_server_that_has_moved_to_another_host(tmp_path: Path) -> None:
    run(tmp_path, {2: 0, 4: 1, 6: 0}, {})


def test_a_way_between_two_servers_that_has_ended_is_made_anew(tmp_path: Path) -> None:
    """To the first server where it began, and where it has moved; what was under way is said again."""
    run(tmp_path, {}, {2: (1, 0), 3: (0, 2), 6: (2, 0)})
