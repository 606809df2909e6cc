"""The connections of a worker's process to the servers.

It handles addresses and transports, and no algorithm. A process holds one worker.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import torch

from topotrain.comm.router import Router, RouterConfig
from topotrain.comm.store import within
from topotrain.comm.store.discovery.static_addresses import StaticStore
from topotrain.comm.torch_store.c10d_store import TorchStore
from topotrain.comm.transport import ConnectionLost, TransportError
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core.client.client import Client
from topotrain.core.client.group_channel import GroupChannel
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.events import Event
from topotrain.core.protocol import Message
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.elastic.resize_requests import ServerProcess
from topotrain.extensions.host_sums.host_reduction import HostReduction, HostSumClient
from topotrain.extensions.host_sums.host_units import used_unit
from topotrain.extensions.host_sums.sum_writer import HostSumSettings
from topotrain.extensions.replication.replica_connections import ReplicaClientHost, ReplicaConnections
from topotrain.launch.runtime.host_reports import HostReports
from topotrain.launch.runtime.process_host import ConditionWaiter, HostedServers, HostOptions, InlineWaiter
from topotrain.launch.runtime.unit_connections import UnitConnections
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.send_buffers import SendBuffers
from topotrain.training.context import Connections, Connector

_LEAVE_S = 60.0
"""Seconds for which a finished worker waits until both replicas of each server have all its messages."""


class ReplicaDialer(ReplicaClientHost):
    """The process of a worker that uses replicated servers.

    Args:
        router: of the process.
        me: the worker.
        waiter: the wait of the worker.
    """

    def __init__(self, router: Router, me: Address, waiter: ConditionWaiter) -> None:
        self._router, self._me, self._waiter = router, me, waiter

    def send(self, to: Address, message: Message, wait: bool = False) -> None:
        """Send over the router; see `ReplicaClientHost`."""
        self._router.send(self._me, to, message, wait)

    def reconnect(self, connections: ReplicaConnections, server: Address, moves: int) -> None:
        """Connect to a server's replica after the loss of its process or connection."""
        target, args = self._connect, (connections, server, moves)
        # A reader of a connection calls this, and dialing may wait for the new process.
        threading.Thread(target=target, args=args, name=f"to {server}", daemon=True).start()

    def _connect(self, connections: ReplicaConnections, server: Address, moves: int) -> None:
        try:
            connections.connected(server, self._router.connect_moved(self._me, server, moves))
        except ConnectionLost as error:
            connections.failed(server, str(error))
        except (TransportError, TimeoutError) as error:
            connections.failed(server, f"its process has died, and no other one took its place: {error}")

    def on_change(self) -> None:
        """Wake the worker if its condition is met now."""
        with self._waiter.update():
            pass


class WorkerConnections(Connections):
    """A worker's connections to the servers of its group and to server (0,0).

    With an inline layout (`Topology.inline`) the worker's process also runs a server.

    Args:
        place: the settings of the process.
        me: the worker.
        options: of the process.
    """

    def __init__(self, place: RouterConfig, me: Address, options: HostOptions = HostOptions()) -> None:  # noqa: B008
        self.me = me
        self.memory = ProcessMemory()
        self._place = place
        reader = InlineReader() if place.topology.inline else None
        self._router = Router(place, self.memory, reader)
        self._reports = HostReports(place)
        poll_s, observer = place.job.cluster.poll_time / 1000, options.observer
        self._waiter = (
            ConditionWaiter(poll_s, observer)
            if reader is None
            else InlineWaiter(poll_s, self._router, reader, observer)
        )
        # The script's thread may wait for room in a connection, unless it also reads.
        self._sender: MessageSender = self._router.sender(me, wait=reader is None)
        replicated = place.job.cluster.replicas > 1
        self._unit: UnitConnections | None = None
        self._replicas: ReplicaConnections | None = None
        # With replicas messages go through `send` below, which keeps them for a move of the server.
        self.exchange = self._client(place, replicated)
        if replicated:
            servers = dict.fromkeys((*self.exchange.channel.servers, self.exchange.channel.first_server))
            dialer = ReplicaDialer(self._router, me, self._waiter)
            self._replicas = ReplicaConnections(servers, self.exchange, dialer, place.identity.incarnation)
        self._inline_server: HostedServers | None = None
        if reader is not None:
            server = Address(Role.SERVER, 0, me.index)
            # `self` is the memory of this server, too (`allocate`): it shares the worker's.
            self._inline_server = HostedServers(place, self._router, self, [server], options)
        try:
            self._connect()
        except BaseException:  # the caller has no object yet that it could close
            self.close(finished=False)
            raise

    def _connect(self) -> None:
        # First: this worker connects to it below, and workers elsewhere may be waiting for it.
        if self._inline_server is not None:
            self._inline_server.open()
        endpoint = self._replicas or self.exchange
        self._urls = self._router.attach(self.me, endpoint, dial_only=True, inside=self._inline_server is not None)
        if self._unit is not None:
            self._unit.reach_at(self._urls)
        for server in dict.fromkeys((*self.exchange.channel.servers, self.exchange.channel.first_server)):
            if self._inline_server is not None and server in self._inline_server.endpoints:
                self._router.connect_inside(self.me, server)
            elif self._replicas is not None:
                self._replicas.begin(server)
                self._router.connect_moved(self.me, server, 0)
            else:
                self._router.connect(self.me, server, "server")
        # Last: it sends to all servers, and waits for their replies.
        self.exchange.rejoin.announce()
        if isinstance(self._waiter, InlineWaiter):
            self._waiter.begin()

    def send(self, to: Address, message: Message) -> None:
        """Send a message to a server of which there are several replicas."""
        assert self._replicas is not None
        self._replicas.send(to, message, wait=True)

    def _client(self, place: RouterConfig, replicated: bool) -> Client:
        topology, incarnation = place.topology, place.identity.incarnation
        sender = self if replicated else self._sender
        gradients = self._torch_reduction(place) if topology.torch_collective else None
        extensions = client_extensions(topology)
        unit = used_unit(place.job, topology, self.me)
        # A list of addresses names servers only.
        if unit is not None and not isinstance(place.store, StaticStore):
            self._unit = UnitConnections(self._router, self.me, incarnation)
            gradients = reduction = HostReduction(unit, HostSumSettings.of(place.job), self._unit)
            extensions = (*extensions, HostSumClient(unit, reduction))
        return Client(self.me, topology, sender, self._waiter, place.shared, incarnation, extensions, gradients)

    def _torch_reduction(self, place: RouterConfig) -> GradientExchange:
        from topotrain.extensions.collectives.torch_reduction import TorchCollectiveConfig, TorchReduction

        if not place.sockets.parts or len(set(place.topology.hosts)) > 1:  # no folder that all workers share
            store = TorchStore(within(place.store, f"engine/{self.me.group}"))
            return TorchReduction(TorchCollectiveConfig(place.job, store, place.host))
        # Several jobs may use the folder, and every run has a token of its own.
        folder = f"engine-{sha256(b'engine' + place.identity.token).hexdigest()[:16]}"
        return TorchReduction(TorchCollectiveConfig(place.job, str(place.sockets / folder)))

    @property
    def inline_server(self) -> ServerProcess | None:
        """The server in the worker's process."""
        return self._inline_server

    def meet_group(self) -> NetworkChannel:
        """Connect to the other workers of the group, over which one model is split.

        Raises as `join_group`.
        """
        channel = NetworkChannel(self.exchange, self.group_sender, SendBuffers(self.memory))
        self.join_group(channel)
        return channel

    @property
    def group_sender(self) -> MessageSender:
        """Sends to the other workers of the group, without waiting."""
        return self._router.sender(self.me)

    def join_group(self, channel: GroupChannel) -> None:
        """Connect a channel to the other workers of the group.

        All of them call this, once, after the client has sent the model's description: a worker with another model
        fails here.

        Raises:
            ConfigError: the job's processes have no store in which workers could find each other.
            TransportError, JobError, PeerLost: a worker was not there in time, or is gone.
        """
        if isinstance(self._place.store, StaticStore):
            raise ConfigError(
                channel.purpose,
                None,
                "needs a store in which the workers find each other, such as a folder (file://) or tcp://: "
                "a list of addresses names servers only",
            )
        incarnation = self._place.identity.incarnation
        kind = f"worker-{incarnation}" if incarnation else "worker"  # addresses of former processes are of no use
        # Before it connects: workers after this one may be waiting for the URL.
        self._router.publish(kind, self.me, self._urls)
        workers = self._place.topology.workers(self.me.group)
        # Each pair connects once, from the later worker to the earlier one.
        for peer in workers[: self.me.index]:
            self._router.connect(self.me, peer, kind)
            channel.send_hello(peer.index)
        channel.wait_for_hellos(range(self.me.index + 1, len(workers)))

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, in memory that the transport can share."""
        return self.memory.allocate(numel, dtype)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received."""
        return self._router.traffic()

    def link_traffic(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received over TCP."""
        return self._router.link_traffic()

    def reports(self, now: float, last: bool = False) -> Iterator[Event]:
        """Yield the reports that are due; see `context.Connections`."""
        if self._reports.due(now, last):
            yield from self._reports.traffic(self.me, self._router)
            if self._inline_server is not None:
                yield from self._reports.servers(self._inline_server.endpoints, self._router)

    def close(self, finished: bool = True) -> None:
        """Leave after all queued messages are sent.

        finished: the script has finished. Otherwise no process waits for another.
        """
        self.exchange.leave()
        if self._replicas is not None and finished:
            self._replicas.leave()
            # A backup that lacks a message could not replace its primary after this worker is gone.
            until = time.monotonic() + _LEAVE_S
            self._waiter.wait(lambda: self._replicas is None or self._replicas.left or time.monotonic() > until)
        if self._inline_server is not None:
            assert isinstance(self._waiter, InlineWaiter)
            # Also without an end to wait for: only a connection that is read can be closed.
            self._waiter.release(self.me, deliver=finished)
            for endpoint in self._inline_server.endpoints.values():
                endpoint.lost(self.me, "its script has ended")
            if finished:
                # The other workers may still train, and need the server in this process.
                self._inline_server.wait()
        self._router.close()


@dataclass(frozen=True, slots=True)
class WorkerConnector(Connector):
    """Opens a worker's connections when the script first needs them."""

    options: HostOptions = field(default_factory=HostOptions)

    def connect(self, place: RouterConfig, me: Address) -> WorkerConnections:
        """Open the connections; see `context.Connector`."""
        return WorkerConnections(place, me, self.options)
