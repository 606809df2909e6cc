"""The way between two servers with second copies ends, with the code of real processes in threads of this one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
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
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core.model.schema import PrivateMemory
from topotrain.extensions.replication.replica_host import ReplicaSlot, ReplicatedServers
from topotrain.extensions.replication.replica_placement import ReplicaPlacement, domains, parse_placement
from topotrain.launch.runtime.process_host import HostedServerFactory, HostOptions
from topotrain.launch.runtime.worker_connections import WorkerConnections

HOSTS = (0, 0, 0, 1, 0, 1)  # of the units: three workers, three servers
WAIT_S = 30.0


ADDRESSES = ("127.0.0.1", "127.0.0.2")
"""Of the hosts."""


class Slot(ReplicaSlot):
    """A slot that the launcher never fills anew; keeps which servers it has missed."""

    def __init__(self, placement: ReplicaPlacement, missed: list[Address]) -> None:
        super().__init__(parse_placement(placement.to_data()))
        self.missed = missed

    def next_placement(self) -> Any:
        threading.Event().wait()

    def on_standby_complete(self, server: Address, standby: int) -> None:
        pass

    def on_standby_differs(self, server: Address, standby: int) -> None:
        pass

    def on_disconnect(self, server: Address) -> None:
        self.missed.append(server)

    def end_process(self, reason: str) -> None:
        pass


class ServerProcesses:
    """Processes in threads."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.topology = layout(job.cluster, HOSTS)
        self.placement = ReplicaPlacement(domains(self.topology))
        self.job_threads = _JobThreads()
        self.routers: dict[int, Router] = {}
        (folder / "store").mkdir(mode=0o700)
        self.url, self.sockets = (folder / "store").as_uri(), Path(mkdtemp(prefix="tt-"))
        self.missed: list[Address] = []

    def place(self, unit: int) -> RouterConfig:
        identity = Identity(self.job.name, b"7" * 32, 0, 0, self.job.digest())
        host = ADDRESSES[HOSTS[unit]]
        return RouterConfig(self.job, self.topology, identity, open_store(self.url), self.sockets, host)

    def begin(self, index: int) -> None:
        me = Address(Role.SERVER, 0, index)
        place = self.place(self.topology.unit_of(me))
        self.routers[index] = router = Router(place, ProcessMemory())
        factory = HostedServerFactory(place, PrivateMemory(), HostOptions())
        slot, observer = Slot(self.placement, self.missed), FailureObserver(self.job_threads.trouble)
        copied = ReplicatedServers(place, router, factory, me, slot, observer)

        def live() -> None:
            with suppress(Exception):
                copied.open()
                copied.wait()
                router.close()

        threading.Thread(target=live, daemon=True).start()

    def sever(self, one: int, other: int) -> None:
        """The way between two servers ends, and nobody has died."""
        wire = self.routers[one]._tcp
        assert wire is not None
        ways = [c for c in wire._connections if c.me.role is c.peer.role is Role.SERVER and c.peer.index == other]
        assert ways
        for way in ways:
            way.cut("the network was down for a moment")


def test_a_way_between_two_servers_that_has_ended_is_made_anew(tmp_path: Path) -> None:
    """What was under way is said again, and the result does not show it."""
    job, cuts = job_of(transport="kTcp", nservers_per_group=3, replicas=2), {2: (1, 0), 3: (0, 2), 6: (2, 0)}
    processes = ServerProcesses(job, tmp_path)
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
    barrier = threading.Barrier(len(workers))

    def script(handle: WorkerHandle) -> None:
        for number, batch in enumerate(vectors(8)):
            barrier.wait(WAIT_S)
            if number in cuts and handle.me.index == 0:
                processes.sever(*cuts[number])
            usual_loop([batch])(handle)

    _train(
        processes.job_threads,
        handles,
        script,
        lambda me: connections[me].close(finished=not processes.job_threads.errors),
    )
    if processes.job_threads.errors:
        raise processes.job_threads.errors[0]
    assert processes.missed
    found = Result.of(handles[0].model, workers=handles, traffic=(0, 0))
    assert found.same_bits(reference(job_of(nservers_per_group=3), building(), usual_loop(vectors(8))))
