"""One operating-system process of a job: open the roads, let residents in, hand messages over.

It knows addresses, roads and locks, and no algorithm. A server process holds all servers of its unit, a worker process
holds one worker. Server processes meet each other before they let workers in, so that nobody ever has to send a
message for which there is no way yet.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from topotrain.exchange import Exchange
from topotrain.handling import sending
from topotrain.job import Job, Road
from topotrain.message import Message
from topotrain.rendezvous import Store, open_store
from topotrain.server import Server
from topotrain.spans import SILENT, Recorder
from topotrain.topology import Address, Role, Topology, layout
from topotrain.wire import Resident, Wire, WireError
from topotrain.wire.auth import Identity
from topotrain.wire.emulated import Network
from topotrain.wire.local import LocalWire
from topotrain.wire.shm import Memory, ShmWire
from topotrain.wire.tcp import TcpWire

MEETING_S = 60.0
"""How long a process looks for another one's address before it gives up."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process belongs: its job, its layout, and how it finds and convinces the others."""

    job: Job
    topology: Topology
    identity: Identity
    store: Store
    sockets: Path  # a private folder with a short path

    @property
    def shared(self) -> bool:
        """The roads show memory."""
        return self.job.cluster.road is not Road.kTcp

    @staticmethod
    def of(job: Job, rendezvous: str, token: Path, sockets: Path, incarnation: int) -> "Place":
        """Read the token and open the store."""
        identity = Identity(job.name, token.read_bytes(), incarnation, 0, job.digest())
        return Place(job, layout(job.cluster), identity, open_store(rendezvous), sockets)


class Roads:
    """The roads of one process, and which of them leads to whom.

    Args:
        place: the process.
        shared: memory that the shared-memory road can show.
    """

    def __init__(self, place: Place, shared: Memory) -> None:
        road = place.job.cluster.road
        self._wires: dict[str, Wire] = {"local": LocalWire()}
        if road is not Road.kTcp:
            self._wires["unix"] = ShmWire(place.identity, str(place.sockets), shared)
        if road is not Road.kShm:
            self._wires["tcp"] = TcpWire(place.identity, place.job.cluster.start_port, network=_network(place))
        self._order = ("unix", "tcp") if road is not Road.kTcp else ("tcp",)
        self._store = place.store
        self._topology = place.topology
        self._ways: dict[tuple[Address, Address], Wire] = {}

    def attach(self, me: Address, resident: Resident, dial_only: bool = False) -> tuple[str, ...]:
        """Let a resident in; returns the URLs at which others reach it."""
        # Who only calls others needs the one road that leads to all of them; a link makes two out of it.
        names = self._order[:1] if dial_only and self._topology.cluster.link is None else self._order
        urls = [self._wires[n].attach(me, _Port(self, n, me, resident)) for n in names if n in self._wires]
        if not dial_only:
            self._wires["local"].attach(me, _Port(self, "local", me, resident))
        return tuple(urls)

    def publish(self, kind: str, me: Address, urls: Sequence[str]) -> None:
        """Tell others of the job where a resident is."""
        self._store.set(f"{kind}/{me.group}/{me.index}", "\n".join(urls).encode())

    def connect(self, me: Address, peer: Address, kind: str) -> None:
        """Open the way to a server that was, or will be, published under `kind`."""
        urls = self._store.watch(f"{kind}/{peer.group}/{peer.index}", MEETING_S).decode().split("\n")
        by_scheme = {url.partition(":")[0]: url for url in urls}
        fits = self._order if self._topology.together(me, peer) else ("tcp",)
        scheme = next(name for name in fits if name in by_scheme)
        self._wires[scheme].connect(me, peer, by_scheme[scheme])
        self.found(me, peer, scheme)

    def connect_inside(self, me: Address, peer: Address) -> None:
        """Open the way to a resident of this process."""
        self._wires["local"].connect(me, peer, "local:")
        self.found(me, peer, "local")
        self.found(peer, me, "local")

    def found(self, me: Address, peer: Address, name: str) -> None:
        """This road leads to that peer."""
        self._ways[(me, peer)] = self._wires[name]

    def send(self, me: Address, to: Address, message: Message, wait: bool = False) -> None:
        """Send on the road that leads there; `wait` as in `Wire.send`. Raises WireError if none does."""
        wire = self._ways.get((me, to))
        if wire is not None:
            wire.send(me, to, message, wait)
            return
        for name, candidate in self._wires.items():
            # The peer opened the way and has not spoken yet.
            with suppress(WireError):
                candidate.send(me, to, message, wait)
                self.found(me, to, name)
                return
        raise WireError(f"no way from {me} to {to}")

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages out and in, over the roads that leave the process."""
        counts = [wire.traffic() for name, wire in self._wires.items() if name != "local"]
        return sum(out for out, _ in counts), sum(inward for _, inward in counts)

    def close(self) -> None:
        """Send what is queued, then end all connections."""
        for wire in self._wires.values():
            wire.close()


def _network(place: Place) -> Network | None:
    link = place.job.cluster.link
    if link is None:
        return None
    key = sha256(b"link" + place.identity.token).hexdigest()[:16]  # several jobs may use the folder
    return Network(link, place.sockets, key, place.topology.host_of)


class _Port:
    """A resident as one road sees it: whoever is heard there can be answered there."""

    def __init__(self, roads: Roads, name: str, me: Address, resident: Resident) -> None:
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
        self._resident.lost(peer, reason)


# --- servers -----------------------------------------------------------------------------------------------------


class _ServerResident:
    """A server at its address: one message at a time, answers in the order in which they were decided."""

    def __init__(
        self,
        make: Callable[[Callable[[Address, Message], None]], Server],
        roads: Roads,
        change: threading.Condition,
        trouble: Callable[[], None],
    ) -> None:
        self.server = make(self._answer)
        self.workers: set[Address] = set()
        self._roads = roads
        self._lock = threading.Lock()
        self._change = change
        self._trouble = trouble

    def place(self, sender: Address, message: Message, viewable: bool) -> torch.Tensor | None:
        with self._lock:
            return self.server.place(sender, message, viewable)

    def handle(self, sender: Address, message: Message) -> None:
        if sender.role is Role.WORKER and sender not in self.workers:
            self.workers.add(sender)
        try:
            with self._lock:
                self.server.handle(sender, message)
        except Exception:
            self._trouble()
            raise
        if self.server.done:
            with self._change:
                self._change.notify_all()

    def _answer(self, to: Address, answer: Message) -> None:
        # A peer that is gone is the supervisor's business: the answer has nobody to go to.
        with suppress(WireError), sending(self.server.spans, to, answer):
            self._roads.send(self.server.me, to, answer)

    def lost(self, peer: Address, reason: str) -> None:
        with self._change:
            self.workers.discard(peer)
            self._change.notify_all()

    @property
    def done(self) -> bool:
        return self.server.done and not self.workers


def serve(
    place: Place,
    addresses: Sequence[Address],
    serving: Callable[[Address, tuple[str, ...]], None],
    trouble: Callable[[], None],
    recorder: Callable[[Address, Sequence[int]], Recorder] = lambda *_: SILENT,
) -> tuple[int, int]:
    """Live as the servers of one process until the job has no more use for them.

    Args:
        place: the process.
        addresses: its servers.
        serving: told each server's URLs once it can be reached.
        trouble: called on a reader's thread, inside `except`, when a server cannot go on.
        recorder: makes what a server tells its spans to, from its address and the worker groups that it serves.

    Returns:
        Bytes of messages out and in.
    """
    torch.set_flush_denormal(True)  # tiny momentum values would make an update several times slower
    memory = Memory()
    roads = Roads(place, memory)
    change = threading.Condition()
    allocate = memory.allocate if place.shared else _zeros
    residents = []
    for me in addresses:
        make = partial(Server, me, place.job, place.topology, allocate, place.shared)
        residents.append(_ServerResident(make, roads, change, trouble))
        server = residents[-1].server
        server.spans = recorder(me, server.groups)
    urls = {r.server.me: roads.attach(r.server.me, r) for r in residents}
    for me in addresses:
        roads.publish("door", me, urls[me])
    for me in addresses:
        for peer in _peers(me, place.topology):
            if peer in urls:
                roads.connect_inside(me, peer)
            else:
                roads.connect(me, peer, "door")
    for me in addresses:
        roads.publish("server", me, urls[me])
        serving(me, urls[me])
    with change:
        while not all(resident.done for resident in residents):
            change.wait(place.job.cluster.poll_time / 1000)
    roads.close()
    return roads.traffic()


def _zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def _peers(me: Address, topology: Topology) -> list[Address]:
    """Whom a server calls on: its coordinator, and its own shard in the groups before it."""
    peers = [Address(Role.SERVER, me.group, 0)] if me.index else []
    groups = range(me.group) if topology.synced else range(min(me.group, 1))
    return peers + [Address(Role.SERVER, group, me.index) for group in groups]


# --- workers -----------------------------------------------------------------------------------------------------


class Monitor:
    """How a live worker waits: on a condition variable that the roads' readers notify."""

    def __init__(self, poll_s: float) -> None:
        self._condition = threading.Condition()
        self._poll_s = poll_s
        self._ready: Callable[[], bool] | None = None

    @contextmanager
    def update(self) -> Iterator[None]:
        """A change; whoever waits is woken if it was what he waits for."""
        with self._condition:
            yield
            if self._ready is not None and self._ready():
                self._condition.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true."""
        with self._condition:
            self._ready = ready
            try:
                while not ready():
                    self._condition.wait(self._poll_s)
            finally:
                self._ready = None


class WorkerRoads:
    """A worker's side of the roads: connected to the servers of its group and to server (0,0)."""

    def __init__(self, place: Place, me: Address) -> None:
        self.memory = Memory()
        self._shared = place.shared
        self._roads = Roads(place, self.memory)
        monitor = Monitor(place.job.cluster.poll_time / 1000)
        send = partial(self._roads.send, me, wait=True)  # the script's thread is the one that may
        self.exchange = Exchange(me, place.topology, send, monitor, place.shared)
        self._roads.attach(me, self.exchange, dial_only=True)
        for server in dict.fromkeys((*self.exchange.servers, self.exchange.desk)):
            self._roads.connect(me, server, "server")

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, in memory that the road can show."""
        return self.memory.allocate(numel, dtype) if self._shared else _zeros(numel, dtype)

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages out and in."""
        return self._roads.traffic()

    def close(self) -> None:
        """Leave: what is queued is sent first."""
        self.exchange.leave()
        self._roads.close()
