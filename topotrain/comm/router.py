"""The roads of one process: which there are, who lives at them, and which of them leads to whom."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch

from topotrain.comm.backoff import spread
from topotrain.comm.emulation.link import EmulatedNetwork
from topotrain.comm.security.handshake import Identity, NotOurProtocol, Peer
from topotrain.comm.store import Store
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.transport import ConnectionLost, Endpoint, PeerUnreachable, Refused, Transport, TransportError
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.inprocess import InProcessTransport
from topotrain.comm.transport.shared_memory import ProcessMemory, SharedMemoryTransport
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.job import Job, Road
from topotrain.config.topology import Address, Topology, layout
from topotrain.core.protocol import Message

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_LOOK_S, _GLANCE_S = 2.0, 0.5
_NOT_HERE = ("JOB", "FULL")  # the codes of refusals by somebody else, or by one who may have room later
_ROADS = {"tls": "tcp"}  # the road that takes a scheme of another name


def spoken(moves: int) -> str:
    """Under which kind a server is published that has moved so often from one process to another."""
    return f"server-{moves}" if moves else "server"


@dataclass(frozen=True, slots=True)
class ConnectTimeouts:
    """How long a process looks for another one before it gives up.

    again: an address may be known before anybody answers there, so whoever does not answer is called again and again;
    then `waiting` is told whom we wait for, and why it failed the last time.
    """

    seconds: float = 60.0
    again: bool = False
    waiting: Callable[[Address, str], None] = lambda *_: None


class ResumedSnapshot(Protocol):
    """The snapshot that a job goes on from; the transports carry it and read nothing of it."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Where a process belongs: its job, its layout, and how it finds and convinces the others."""

    job: Job
    topology: Topology
    identity: Identity
    store: Store
    sockets: Path  # a private folder with a short path
    host: str = "127.0.0.1"  # the address at which other hosts reach this one
    port: int = 0  # where to listen; 0: the first free one from the job's `start_port` on
    meeting: ConnectTimeouts = ConnectTimeouts()
    resumed: ResumedSnapshot | None = None  # the snapshot that the job goes on from

    @property
    def shared(self) -> bool:
        """The roads show memory."""
        return self.job.cluster.road is not Road.kTcp

    @staticmethod
    def of(
        job: Job, store: Store, token: bytes, sockets: Path, incarnation: int, hosts: Sequence[int], host: str
    ) -> "RouterConfig":
        """A process of a job whose units stand on these hosts."""
        identity = Identity(job.name, token, incarnation, 0, job.digest())
        return RouterConfig(job, layout(job.cluster, hosts), identity, store, sockets, host)


class Router:
    """The roads of one process, and which of them leads to whom.

    Args:
        place: the process.
        shared: memory that the shared-memory road can show.
        pump: reads the connections of a process without threads for it; its peers all stand on this host.
    """

    def __init__(self, place: RouterConfig, shared: ProcessMemory, pump: InlineReader | None = None) -> None:
        road = place.job.cluster.road
        self._local = InProcessTransport(manual=pump is not None)
        self._pump = pump
        self._tcp: TcpTransport | None = None
        self._wires: dict[str, Transport] = {"local": self._local}
        if road is not Road.kTcp:
            self._wires["unix"] = self._unix = SharedMemoryTransport(
                place.identity, str(place.sockets), shared, pump=pump
            )
        if road is not Road.kShm and pump is None:
            cluster = place.job.cluster
            self._wires["tcp"] = self._tcp = TcpTransport(
                place.identity,
                place.port or cluster.start_port,
                place.host,
                network=_network(place),
                lanes=cluster.connections,
                exact=place.port > 0,
                lease_s=cluster.lease_s,
            )
        self._order = ("unix", "tcp") if road is not Road.kTcp else ("tcp",)
        self._store, self._meeting = place.store, place.meeting
        self._published = MaintainedValues(place.store)
        self._topology = place.topology
        self._ways: dict[tuple[Address, Address], Transport] = {}

    def attach(self, me: Address, resident: Endpoint, dial_only: bool = False, inside: bool = True) -> tuple[str, ...]:
        """Let a resident in; returns the URLs at which others reach it. inside: those of this process, too."""
        # Who only calls others needs the one road that leads to all of them; a link, or another host, makes two of it.
        near = self._topology.cluster.link is None and len(set(self._topology.hosts)) < 2
        names = self._order[:1] if dial_only and near else self._order
        urls = [self._wires[n].attach(me, _Port(self, n, me, resident)) for n in names if n in self._wires]
        if inside:
            self._local.attach(me, _Port(self, "local", me, resident))
        return tuple(urls)

    def publish(self, kind: str, me: Address, urls: Sequence[str]) -> None:
        """Tell others of the job where a resident is, also those that ask after the store was wiped."""
        self._published.set(f"{kind}/{me.group}/{me.index}", "\n".join(urls).encode())

    def connect(self, me: Address, peer: Address, kind: str, anew: bool = False) -> None:
        """Open the way to a server that was, or will be, published under `kind`; `anew`: instead of an earlier one."""
        until, pause = time.monotonic() + self._meeting.seconds, _FIRST_PAUSE_S
        while True:
            try:
                self._connect(me, peer, kind, _LOOK_S if self._meeting.again else self._meeting.seconds, anew)
                return
            except TransportError as error:
                if not self._meeting.again or not _may_change(error):
                    raise
                if time.monotonic() + pause > until:
                    raise TransportError(f"{peer} was not there within {self._meeting.seconds:g} s: {error}") from error
                self._meeting.waiting(peer, str(error))
            time.sleep(spread(pause))  # else all would knock at the same moment
            pause = min(2 * pause, _LAST_PAUSE_S)

    def follow(self, me: Address, peer: Address, moves: int) -> int:
        """Open the way to a server with a second copy, in whichever process it speaks; returns how often it has moved.

        moves: how often it had at least. Where a process is published may be where it has died, and another one is
        published then. Where it has not moved and answers, only the way has ended, and what was under way is lost.
        Raises Broken for that, WireError if nobody answers for as long as processes look for each other.
        """
        until, pause = time.monotonic() + self._meeting.seconds, _FIRST_PAUSE_S
        while True:
            try:
                self._connect(me, peer, spoken(moves), _GLANCE_S, anew=True)
                return moves
            except TransportError as error:
                if isinstance(error, Refused) and error.code not in _NOT_HERE:
                    raise
                if time.monotonic() + pause > until:
                    raise TransportError(f"{peer} was not there within {self._meeting.seconds:g} s: {error}") from error
            time.sleep(spread(pause))
            pause = min(2 * pause, _GLANCE_S)
            if moves and not self._is_published(peer, moves) and self._answers(me, peer, moves - 1):
                raise ConnectionLost("it lives, but the way to it has ended")
            if self._is_published(peer, moves + 1):
                moves += 1

    def _is_published(self, peer: Address, moves: int) -> bool:
        return self._store.get(f"{spoken(moves)}/{peer.group}/{peer.index}") is not None

    def _answers(self, me: Address, peer: Address, moves: int) -> bool:
        """Whether the process is there from which a server has moved, as it seemed."""
        try:
            self._connect(me, peer, spoken(moves), _GLANCE_S, anew=True)
        except (TransportError, TimeoutError):
            return False
        return True

    def _connect(self, me: Address, peer: Address, kind: str, seconds: float, anew: bool) -> None:
        try:
            urls = self._store.watch(f"{kind}/{peer.group}/{peer.index}", seconds).decode().split("\n")
        except TimeoutError:
            text = f"{me} found no address of {peer} in the store within {seconds:g} s: is {peer} still starting?"
            raise PeerUnreachable(text) from None
        by_road = {_ROADS.get(url.partition(":")[0], url.partition(":")[0]): url for url in urls}
        fits = self._order if self._topology.together(me, peer) else ("tcp",)
        name = next(name for name in fits if name in by_road)
        if anew and self._tcp is not None and name == "tcp":
            self._tcp.connect(me, peer, by_road[name], anew)
        else:
            self._wires[name].connect(me, peer, by_road[name])
        self.found(me, peer, name)

    def admit(self, decide: Callable[[Peer, bool], None]) -> None:
        """Let `decide` refuse whoever calls over TCP, see `SocketTransport.admit`."""
        if self._tcp is not None:
            self._tcp.admit = decide

    def connect_inside(self, me: Address, peer: Address) -> None:
        """Open the way to a resident of this process."""
        self._local.connect(me, peer, "local:")
        self.found(me, peer, "local")
        self.found(peer, me, "local")

    def found(self, me: Address, peer: Address, name: str) -> None:
        """This road leads to that peer."""
        self._ways[(me, peer)] = self._wires[name]

    def parted(self, me: Address, peer: Address, name: str) -> None:
        """The way to that peer on this road has ended."""
        if self._ways.get((me, peer)) is self._wires[name]:
            del self._ways[(me, peer)]

    def leads(self, me: Address, peer: Address) -> bool:
        """Whether it is known which road leads there."""
        return (me, peer) in self._ways

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Send on the road that leads there; `wait` as in `Transport.send`. Raises WireError if none does."""
        wire = self._ways.get((me, to))
        if wire is not None:
            wire.send(me, to, message, wait)
            return
        for name, candidate in self._wires.items():
            # The peer opened the way and has not spoken yet.
            with suppress(TransportError):
                candidate.send(me, to, message, wait)
                self.found(me, to, name)
                return
        raise ConnectionLost(f"no way from {me} to {to}")

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages out and in, over the roads that leave the process."""
        counts = [wire.traffic() for name, wire in self._wires.items() if name != "local"]
        return sum(out for out, _ in counts), sum(inward for _, inward in counts)

    def turn(self, seconds: float) -> None:
        """With a pump: handle what has come; wait at most so long if nothing has."""
        assert self._pump is not None
        self._pump.turn(seconds)

    def deliver(self) -> None:
        """With a pump: handle what residents of this process have said to each other."""
        self._local.deliver()

    def release(self, me: Address) -> None:
        """With a pump: read on threads from now on; the ways of one resident, who needs them no more, end."""
        assert self._pump is not None
        self._pump.release()
        self._local.release()
        self._unix.leave(me)

    def close(self) -> None:
        """Send what is queued, then end all connections."""
        for wire in self._wires.values():
            wire.close()
        self._published.close()


def _may_change(error: Exception) -> bool:
    """Whether a call that failed like this may go well later."""
    if isinstance(error, Refused):
        return error.code == "FULL"
    return isinstance(error, PeerUnreachable | NotOurProtocol)


def _network(place: RouterConfig) -> EmulatedNetwork | None:
    link = place.job.cluster.link
    if link is None:
        return None
    key = sha256(b"link" + place.identity.token).hexdigest()[:16]  # several jobs may use the folder
    return EmulatedNetwork(link, place.sockets, key, place.topology.host_of)


class _Port:
    """A resident as one road sees it: whoever is heard there can be answered there."""

    def __init__(self, roads: Router, name: str, me: Address, resident: Endpoint) -> None:
        self._roads, self._name, self._me, self._resident = roads, name, me, resident
        self._known: set[Address] = set()

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        return self._resident.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        if sender not in self._known:
            self._known.add(sender)
            self._roads.found(self._me, sender, self._name)
        self._resident.handle(sender, message)

    def lost(self, peer: Address, reason: str) -> None:
        self._known.discard(peer)  # who comes again may come from elsewhere
        self._roads.parted(self._me, peer, self._name)
        self._resident.lost(peer, reason)
