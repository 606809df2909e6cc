"""A worker's process is gone and another takes its place, on real transports and in shared memory, in threads."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.in_process_job import FailureObserver
from topotrain.comm.router import RouterConfig
from topotrain.comm.security.handshake import Identity
from topotrain.comm.store import open_store
from topotrain.comm.transport.shared_memory import socket_directory
from topotrain.config.job import Cluster, Job, OnFailure, Reduce, TransportChoice
from topotrain.config.topology import Address, layout
from topotrain.core.client.client import PeerLost
from topotrain.core.events import Event
from topotrain.extensions.elastic.resize_requests import REPLACED, ResizeRequests, ServerProcess
from topotrain.launch.runtime.process_host import HostOptions, serve
from topotrain.launch.runtime.worker_connections import WorkerConnections
from topotrain.training.adopted_optimizer import adopt
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.map_dataset import STATIC
from topotrain.training.final_parameters import fetch_final
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import Worker, WorkerMemory

BATCHES = 5  # of each group
CELLS = 400  # of each batch


class Ledger(nn.Module):
    """A cell for every batch of every group."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(2, BATCHES, CELLS))


class Process:
    """What one process of a worker does: join, train on some batches of its own, and perhaps come to its end."""

    def __init__(self, place: RouterConfig, me: Address) -> None:
        self.connections = WorkerConnections(place, me)
        workers = place.topology.workers_per_group
        self.mine = slice(me.index * CELLS // workers, (me.index + 1) * CELLS // workers)
        self.model = Ledger()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.0)
        exchange = self.connections.exchange
        self.worker = Worker(
            self.connections.me,
            place.job,
            place.topology,
            describe_model(self.model),
            (self.optimizer,),
            exchange,
            WorkerMemory(self.connections),
        )
        self.worker.start()
        adopt(self.optimizer, self.worker)
        self.stream = STATIC | me.group
        self.at = exchange.extension(DataClient).applied(self.stream)

    def train(self, batches: int) -> None:
        for _ in range(batches):
            self.worker.drawn(self.stream, self.at, 1.0, 1)
            self.optimizer.zero_grad()
            (-self.model.cells[self.connections.me.group, self.at, self.mine].sum()).backward()
            self.optimizer.step()
            self.at += 1

    def push(self) -> None:
        """The first part of a step leaves for the servers."""
        bucket, flats = self.worker.map.buckets[0], self.worker.buffers.flats
        pieces = (1 << len(bucket.pieces)) - 1
        self.connections.exchange.gradients.push(
            self.at, 0, bucket, 1.0, pieces, flats.view("grad", bucket).fill_(-9.0)
        )

    def end(self) -> None:
        self.worker.finish()
        if self.connections.me[1:] == (0, 0):
            fetch_final(self.worker)
        self.connections.close()


class Unread:
    """Events that no launcher reads."""

    def emit(self, event: Event) -> None:
        pass


class LaunchedServers(FailureObserver):
    """Passes requests of the launcher on to the servers of a process."""

    def __init__(self, requests: ResizeRequests, trouble: Callable[[], object]) -> None:
        super().__init__(trouble)
        self._requests = requests

    def on_open(self, servers: ServerProcess) -> None:
        self._requests.open(servers)


def all_of(group: list[Process], do: Callable[[Process], None]) -> None:
    """Workers of a group wait for each other."""
    with ThreadPoolExecutor(len(group)) as pool:
        list(pool.map(do, group))


@pytest.mark.parametrize(
    ("transport", "closed", "number", "workers"),
    [
        # The old process has gone, or is there still when others take its place.
        (TransportChoice.kShm, True, 0, 1),
        (TransportChoice.kTcp, True, 1, 2),
        (TransportChoice.kShm, False, 1, 2),
        (TransportChoice.kTcp, False, 0, 1),
    ],
)
def test_others_take_the_place_of_a_group(
    tmp_path: Path, transport: TransportChoice, closed: bool, number: int, workers: int
) -> None:
    separate = {"server_worker_separate": True, "transport": transport}
    cluster = Cluster(nworker_groups=2, nworkers_per_group=workers, nservers_per_group=2, **separate)  # type: ignore[arg-type]
    job = Job(cluster=cluster, reduce=Reduce.kSum, on_failure=OnFailure.kContinue)
    topology, sockets = layout(cluster), Path(socket_directory())
    (tmp_path / "store").mkdir(mode=0o700)
    troubles: list[str] = []

    def place(incarnation: int = 0) -> RouterConfig:
        store = open_store((tmp_path / "store").as_uri())
        return RouterConfig(job, topology, Identity(job.name, bytes(32), incarnation, 0, job.digest()), store, sockets)

    def start(*groups: int, incarnation: int = 0) -> list[list[Process]]:
        workers = [worker for group in groups for worker in topology.workers(group)]
        with ThreadPoolExecutor(len(workers)) as pool:
            made = list(pool.map(lambda me: Process(place(incarnation), me), workers))
        return [[process for process in made if process.connections.me.group == group] for group in groups]

    launchers = []
    homes = []
    for unit in topology.units:
        if unit.servers:
            launchers.append(ResizeRequests(Unread()))
            options = HostOptions(LaunchedServers(launchers[-1], lambda: troubles.append("a server failed")))
            live = partial(serve, place(), unit.servers, options)
            homes.append(threading.Thread(target=live, daemon=True))
            homes[-1].start()
    groups = start(0, 1)
    for group in groups:
        all_of(group, lambda process: process.train(2))
    dead = groups[number]
    dead[-1].push()  # its servers have a gradient of a step that never comes
    for process in dead if closed else ():
        process.connections.close(finished=False)
    all_of(groups[1 - number], lambda process: process.train(1))
    # Only the launcher knows whether a group of several restarts as a whole, or one worker of it does.
    if workers > 1:
        launchers[0].on_command({"command": REPLACED, "group": number, "incarnation": 1, "index": -1})
    (groups[number],) = start(number, incarnation=1)
    for process in () if closed else dead:
        with pytest.raises(PeerLost):
            process.connections.exchange.channel.wait_until(lambda: False)
        process.connections.close(finished=False)
    for process in groups[number]:
        assert process.at == 2
        assert torch.equal(process.model.cells[number, :2], torch.ones(2, CELLS)), "what was applied is there"
    for group in reversed(groups):
        all_of(group, lambda process: process.train(BATCHES - process.at))
    all_of([process for group in groups for process in group], Process.end)
    assert torch.equal(groups[0][0].model.cells, torch.ones(2, BATCHES, CELLS))
    for home in homes:
        home.join(20)
    shutil.rmtree(sockets, ignore_errors=True)
    assert not troubles and not any(home.is_alive() for home in homes)
