"""Choose which of a process's transports leads to which peer."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from topotrain.comm.backoff import spread
from topotrain.comm.emulation.emulated_tcp import EmulatedTcpTransport
from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.security.handshake import Identity, NotOurProtocol
from topotrain.comm.store import Store
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.transport import ConnectionLost, Endpoint, PeerUnreachable, Refused, Transport, TransportError
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.inprocess import InProcessTransport
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.socket_transport import PeerAdmission, SocketTransport, passes
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.comm.transport.unix_transport import SharedMemoryTransport
from topotrain.config.job import Job, TransportChoice
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.protocol import Message

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_LOOK_S, _SHORT_LOOK_S = 2.0, 0.5
_NOT_HERE = ("JOB", "FULL")  # codes of refusals by another process, or by one that may accept a connection later
_TRANSPORTS = {"tls": "tcp"}  # the transport that takes a scheme of another name


def published_kind(moves: int) -> str:
    """Return the kind under which a server is published after `moves` moves."""
    return f"server-{moves}" if moves else "server"


@dataclass(frozen=True, slots=True)
class ConnectTimeouts:
    """How long a process looks for a peer before it gives up.

    notice: called with a peer that is not there yet and the last failure, before each new try.
    """

    seconds: float = 60.0
    again: bool = False  # retry a peer that does not answer: its address may be known before it listens
    notice: Callable[[Address, str], None] = lambda peer, reason: None


class ResumedSnapshot(Protocol):
    """The snapshot that a job goes on from; the transports read nothing of it."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The identity of a process: its job, its layout, its store and its addresses."""

    job: Job
    topology: Topology
    identity: Identity
    store: Store
    sockets: Path  # a private folder with a short path
    host: str = "127.0.0.1"  # the address at which other hosts reach this one
    port: int = 0  # where to listen; 0: the first free one from the job's `start_port` on
    timeouts: ConnectTimeouts = ConnectTimeouts()
    resumed: ResumedSnapshot | None = None  # the snapshot that the job goes on from

    @property
    def shared(self) -> bool:
        """Whether the transports can share memory."""
        return self.job.cluster.transport is not TransportChoice.kTcp

    @staticmethod
    def of(
        topology: Topology, job: Job, store: Store, token: bytes, sockets: Path, incarnation: int, host: str
    ) -> "RouterConfig":
        """Return the configuration of a process of a job with this layout."""
        identity = Identity(job.name, token, incarnation, 0, job.digest())
        return RouterConfig(job, topology, identity, store, sockets, host)


class Router:
    """The transports of one process, and which of them leads to which peer.

    Args:
        place: the process.
        shared: memory that the shared-memory transport can share.
        pump: reads the connections of a process without threads for it; its peers all run on this host.
    """

    def __init__(
        self,
        place: RouterConfig,
        shared: ProcessMemory,
        pump: InlineReader | None = None,
    ) -> None:
        choice = place.job.cluster.transport
        copied = place.job.cluster.replicas > 1
        self._local = InProcessTransport(manual=pump is not None)
        self._pump = pump
        self._tcp: TcpTransport | None = None
        self._sockets: dict[str, SocketTransport] = {}
        if choice is not TransportChoice.kTcp or copied:
            self._sockets["unix"] = self._unix = SharedMemoryTransport(
                place.identity, str(place.sockets), shared, pump=pump
            )
        if choice is not TransportChoice.kShm and pump is None:
            cluster = place.job.cluster
            network = _network(place)
            make = TcpTransport if network is None else partial(EmulatedTcpTransport, network)
            self._sockets["tcp"] = self._tcp = make(
                place.identity,
                place.port or cluster.start_port,
                place.host,
                lanes=cluster.connections,
                exact=place.port > 0,
                lease_s=cluster.lease_s,
            )
        self._transports: dict[str, Transport] = {"local": self._local, **self._sockets}
        # In the order of preference.
        self._order = ("unix", "tcp") if choice is not TransportChoice.kTcp else ("tcp",)
        self._here = ""  # the address of this host in the URLs of this process
        self._store, self._timeouts = place.store, place.timeouts
        self._published = MaintainedValues(place.store)
        self._topology = place.topology
        self._routes: dict[tuple[Address, Address], Transport] = {}

    def attach(self, me: Address, endpoint: Endpoint, dial_only: bool = False, inside: bool = True) -> tuple[str, ...]:
        """Attach an endpoint; return the URLs at which others reach it.

        inside: endpoints of this process can reach it, too.
        """
        return self.attach_together({me: endpoint}, dial_only, inside)

    def attach_together(
        self, endpoints: Mapping[Address, Endpoint], dial_only: bool = False, inside: bool = True
    ) -> tuple[str, ...]:
        """Attach endpoints at one moment; return the URLs of all of them.

        See `SocketTransport.attach_together` for the reason.
        """
        # An endpoint that only dials needs the one transport that leads to all peers; with an emulated link, or with a
        # second host, there are two of them.
        near = not self._topology.crosses_hosts
        names = self._order[:1] if dial_only and near else self._order
        urls = [
            self._sockets[name].attach_together({me: _Port(self, name, me, each) for me, each in endpoints.items()})
            for name in names
            if name in self._sockets
        ]
        if "tcp" in names and self._tcp is not None:
            self._here = urlsplit(urls[-1]).hostname or ""
        if "unix" in self._sockets and "unix" not in self._order:
            urls = [*self._attach_copies(endpoints), *urls]
        if inside:
            for me, endpoint in endpoints.items():
                # A port of its own: replies must take the transport on which the message came.
                self._local.attach(me, _Port(self, "local", me, endpoint))
        return tuple(urls)

    def _attach_copies(self, endpoints: Mapping[Address, Endpoint]) -> list[str]:
        """Attach endpoints to the transport to standbys of this host; return its URL."""
        ports = {me: _Port(self, "unix", me, each) for me, each in endpoints.items()}
        standbys = all(me.role is Role.STANDBY for me in endpoints)
        url = self._sockets["unix"].attach_together(ports, listens=standbys)
        return [url] if standbys else []

    def publish(self, kind: str, me: Address, urls: Sequence[str]) -> None:
        """Publish the URLs of an endpoint, and keep them in the store if it is wiped."""
        self._published.set(f"{kind}/{me.group}/{me.index}", "\n".join(urls).encode())

    def connect(self, me: Address, peer: Address, kind: str, anew: bool = False) -> None:
        """Connect to a server that was, or will be, published under `kind`.

        anew: replace an earlier connection.
        """
        until, pause = time.monotonic() + self._timeouts.seconds, _FIRST_PAUSE_S
        while True:
            try:
                self._connect(me, peer, kind, _LOOK_S if self._timeouts.again else self._timeouts.seconds, anew)
                return
            except TransportError as error:
                # With `again` the address may have been known before the process listened. Without it the address is
                # fresh, and only a refusal that passes is not final.
                if not passes(error) and not (
                    self._timeouts.again and isinstance(error, PeerUnreachable | NotOurProtocol)
                ):
                    raise
                if time.monotonic() + pause > until:
                    raise self._absent(peer, error) from error
                self._timeouts.notice(peer, str(error))
            time.sleep(spread(pause))  # without jitter all processes would retry at the same moment
            pause = min(2 * pause, _LAST_PAUSE_S)

    def connect_moved(self, me: Address, peer: Address, moves: int) -> int:
        """Connect to a replicated server where it runs now; return its moves.

        A process may have died at the address where it is published. Then its successor is published. If the server has
        not moved and answers, only the connection has ended, and the messages under way are lost.

        Args:
            moves: how often the server had moved at least.

        Raises:
            ConnectionLost: the server has not moved, and answers.
            TransportError: no process answers for as long as processes look for each other.
        """
        until, pause = time.monotonic() + self._timeouts.seconds, _FIRST_PAUSE_S
        while True:
            try:
                self._connect(me, peer, published_kind(moves), _SHORT_LOOK_S, anew=True)
                return moves
            except TransportError as error:
                # An answer of the right process (a wrong secret, another config) would not change.
                if isinstance(error, Refused) and error.code not in _NOT_HERE:
                    raise
                if time.monotonic() + pause > until:
                    raise self._absent(peer, error) from error
            time.sleep(spread(pause))
            pause = min(2 * pause, _SHORT_LOOK_S)
            # Not at moves 0: then the server is published where it is, and was just dialed there.
            if moves and not self._is_published(peer, moves) and self._answers(me, peer, moves - 1):
                raise ConnectionLost("the server is alive, but the connection to it has ended")
            if self._is_published(peer, moves + 1):
                moves += 1

    def _absent(self, peer: Address, error: TransportError) -> TransportError:
        return TransportError(f"{peer} was not there within {self._timeouts.seconds:g} s: {error}")

    def _is_published(self, peer: Address, moves: int) -> bool:
        return self._store.get(f"{published_kind(moves)}/{peer.group}/{peer.index}") is not None

    def _answers(self, me: Address, peer: Address, moves: int) -> bool:
        """Whether the process answers from which the server seemed to have moved."""
        try:
            self._connect(me, peer, published_kind(moves), _SHORT_LOOK_S, anew=True)
        except (TransportError, TimeoutError):
            return False
        return True

    def _connect(self, me: Address, peer: Address, kind: str, seconds: float, anew: bool) -> None:
        try:
            urls = self._store.watch(f"{kind}/{peer.group}/{peer.index}", seconds).decode().split("\n")
        except TimeoutError:
            text = f"{me} found no address of {peer} in the store within {seconds:g} s: is {peer} still starting?"
            raise PeerUnreachable(text) from None
        by_transport = {_TRANSPORTS.get(url.partition(":")[0], url.partition(":")[0]): url for url in urls}
        if peer.role is Role.STANDBY and self._connect_near(me, peer, by_transport, anew):
            return
        fits = self._order if self._topology.together(me, peer) else ("tcp",)
        # Shared memory comes first where both processes are on one host.
        name = next(name for name in fits if name in by_transport)
        if anew and self._tcp is not None and name == "tcp":
            self._tcp.connect(me, peer, by_transport[name], anew)
        else:
            self._transports[name].connect(me, peer, by_transport[name])
        self.add_route(me, peer, name)

    def _connect_near(self, me: Address, standby: Address, urls: Mapping[str, str], anew: bool) -> bool:
        """Connect to a standby over shared memory; return whether it is on this host."""
        # By its address: a standby may have moved to another unit, which the topology does not know.
        if "unix" not in urls or urlsplit(urls.get("tcp", "")).hostname != self._here:
            return False
        try:
            self._sockets["unix"].connect(me, standby, urls["unix"], anew)
        except PeerUnreachable:
            return False  # containers with one address may have folders of their own
        self.add_route(me, standby, "unix")
        return True

    def set_admission(self, admission: PeerAdmission) -> None:
        """Ask this rule about every peer that connects over TCP, or to a standby."""
        if self._tcp is not None:
            self._tcp.set_admission(admission)
            if "unix" not in self._order and "unix" in self._sockets:
                self._sockets["unix"].set_admission(admission)

    def connect_inside(self, me: Address, peer: Address) -> None:
        """Connect two endpoints of this process."""
        self._local.connect(me, peer, "local:")
        self.add_route(me, peer, "local")
        self.add_route(peer, me, "local")

    def add_route(self, me: Address, peer: Address, name: str) -> None:
        """Note that this transport leads to that peer."""
        self._routes[(me, peer)] = self._transports[name]

    def remove_route(self, me: Address, peer: Address, name: str) -> None:
        """Note that the connection to that peer on this transport has ended."""
        # A newer connection may use another transport, and its route stays.
        if self._routes.get((me, peer)) is self._transports[name]:
            del self._routes[(me, peer)]

    def has_route(self, me: Address, peer: Address) -> bool:
        """Whether it is known which transport leads there, and there is a connection."""
        transport = self._routes.get((me, peer))
        # A connection may have ended before `_connect` could note it as a route.
        return transport is not None and transport.connected(me, peer)

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Send on the transport that leads there; `wait` as in `Transport.send`.

        Raises TransportError if no transport leads there.
        """
        transport = self._routes.get((me, to))
        if transport is not None:
            transport.send(me, to, message, wait)
            return
        for name, candidate in self._transports.items():
            # The peer opened the connection and has not sent anything yet.
            with suppress(TransportError):
                candidate.send(me, to, message, wait)
                self.add_route(me, to, name)
                return
        raise ConnectionLost(f"no connection from {me} to {to}")

    def sender(self, me: Address, wait: bool = False) -> "RoutedSender":
        """Return the sender of an endpoint; `wait` as in `Transport.send`."""
        return RoutedSender(self, me, self._routes, wait)

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received over transports that leave the process."""
        counts = [transport.traffic() for transport in self._sockets.values()]
        return sum(out for out, _ in counts), sum(inward for _, inward in counts)

    def sent_by(self, me: Address) -> dict[Address, int]:
        """Return the bytes that an endpoint has sent to each peer outside the process."""
        found: Counter[Address] = Counter()
        for transport in self._sockets.values():
            for (endpoint, peer), count in transport.sent().items():
                if endpoint == me:
                    found[peer] += count
        return dict(found)

    def link_traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received over TCP, which leads to other hosts."""
        return (0, 0) if self._tcp is None else self._tcp.traffic()

    def turn(self, seconds: float) -> None:
        """Handle the messages that have come, after at most `seconds` (needs a pump)."""
        assert self._pump is not None
        self._pump.turn(seconds)

    def deliver(self) -> None:
        """Handle messages between endpoints of this process (needs a pump)."""
        self._local.deliver()

    def release(self, me: Address) -> None:
        """Read on threads from now on, and end the connections of `me` (needs a pump)."""
        assert self._pump is not None
        self._pump.release()
        self._local.release()
        # A process that reads for itself has all its peers on this host.
        self._unix.leave(me)

    def close(self) -> None:
        """Send what is queued, then end all connections."""
        for transport in self._transports.values():
            transport.close()
        self._published.close()


def _network(place: RouterConfig) -> EmulatedNetwork | None:
    link = place.job.cluster.link
    if link is None:
        return None
    key = sha256(b"link" + place.identity.token).hexdigest()[:16]  # several jobs may use the folder
    return EmulatedNetwork(link, place.sockets, key, place.topology)


class _Port:
    """An endpoint as one transport sees it."""

    def __init__(self, router: Router, name: str, me: Address, endpoint: Endpoint) -> None:
        self._router, self._name, self._me, self._endpoint = router, name, me, endpoint
        self._known: set[Address] = set()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self._endpoint.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        # Replies take the transport on which the message came. The set saves that note for every later message.
        if sender not in self._known:
            self._known.add(sender)
            self._router.add_route(self._me, sender, self._name)
        self._endpoint.handle(sender, message)

    def lost(self, peer: Address, reason: str) -> None:
        self._known.discard(peer)  # a peer that reconnects may come over another transport
        self._router.remove_route(self._me, peer, self._name)
        self._endpoint.lost(peer, reason)


class RoutedSender:
    """Sends the messages of one endpoint.

    Args:
        router: sends where no route is known.
        me: the endpoint.
        routes: those of the router.
        wait: as in `Transport.send`.
    """

    def __init__(
        self, router: Router, me: Address, routes: Mapping[tuple[Address, Address], Transport], wait: bool
    ) -> None:
        self._router, self._me, self._routes, self._wait = router, me, routes, wait

    def send(self, to: Address, message: Message) -> None:
        # Not over `Router.send`: this is called for each message of a worker's step.
        transport = self._routes.get((self._me, to))
        if transport is not None:
            transport.send(self._me, to, message, self._wait)
        else:
            self._router.send(self._me, to, message, self._wait)
