"""The connections over which unit 0 controls the other units of a job.

Each other unit dials unit 0 over the transport of the workers and servers, with the job's secret, and with TLS wherever
another machine can reach the port. The store has the address of unit 0.

* Messages arrive in order and exactly once, also when a connection broke meanwhile (see `reliable_messages.py`).
* Both ends send a heartbeat every BEAT_S. A broken connection is not yet the loss of a unit: `silence_s` returns how
  long nothing has arrived, and the membership decides.
* No caller waits for the network or the store.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from topotrain.comm.security.handshake import Identity
from topotrain.comm.security.secret import job_key
from topotrain.comm.store import Store, StoreError
from topotrain.comm.store.maintained_values import MaintainedValues
from topotrain.comm.transport import ConnectionLost, TransportError
from topotrain.comm.transport.peer_keepalive import LEASE_S
from topotrain.comm.transport.tcp import TcpTransport
from topotrain.config.topology import Address, Role
from topotrain.core.events import Failed
from topotrain.core.protocol import Message, ProtocolError
from topotrain.launch.multinode.node_info import NodeInfo
from topotrain.launch.multinode.node_rendezvous import BEAT_S, welcome_key
from topotrain.launch.multinode.reliable_messages import ReliableEnd, UnitPart, Words

_UNIT_0 = Address(Role.SERVER, 0, 0)
_KEY = "control"  # the store's key of unit 0's address
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class UnitMessage:
    """Unit `rank` has sent a message."""

    rank: int
    words: Words


@dataclass(frozen=True, slots=True)
class UnitVanished:
    """Unit `rank` sends no heartbeat any more."""

    rank: int
    failed: Failed


@dataclass(frozen=True, slots=True)
class UnitReturned:
    """A new process has joined as unit `rank`, which had vanished."""

    rank: int
    unit: NodeInfo


News = UnitMessage | UnitVanished | UnitReturned


class MessageReceiver(Protocol):
    """The membership, which receives each message before the run loop."""

    def receive(self, rank: int, words: Words) -> bool:
        """Process a message; return False for a message to the run loop."""
        ...


@dataclass(frozen=True, slots=True)
class ControlAccess:
    """The common settings of the control connections of one start of a job.

    run: the keys of this start. run_id: its name. secret: the job's secret. start_port: the first port to listen at; 0:
    any. lease_s: the time after which a host that does not answer is out of reach.
    """

    run: Store
    run_id: str
    secret: bytes
    start_port: int = 0
    lease_s: float = LEASE_S

    def transport(self, host: str = "127.0.0.1") -> TcpTransport:
        """Return a transport; `host` matters only if it listens. Raises TransportError."""
        identity = Identity(self.run_id, job_key(self.secret, "control", self.run_id), 0, 0, "")
        return TcpTransport(identity, self.start_port, host, patience=0.0, lease_s=self.lease_s)


class ControlConnection:
    """One unit's end of the control connections.

    `ControlServer` is the end in unit 0, and `ControlClient` the end in another unit.

    Args:
        me: the address of this process.
        receiver: receives messages first.
    """

    def __init__(self, me: Address, receiver: MessageReceiver) -> None:
        self._me, self._receiver = me, receiver
        self._lock = threading.Lock()
        self._transports: list[TcpTransport] = []
        # By process, not by rank: a new process of a unit never receives messages to its predecessor.
        self._ends: dict[Address, ReliableEnd] = {}
        self._ranks: dict[Address, int] = {}
        self._peers: dict[int, Address] = {}  # the process that has a rank now
        self._unconnected: set[Address] = set()  # the next frame of these comes over a new connection
        self._received_at: dict[int, float] = {}
        self._news: deque[News] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._closed = threading.Event()
        self.suspects = False
        """Whether a process has lost a peer, so that a silent unit counts as lost sooner."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        return self._wake_out.fileno()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the units at the other ends."""
        with self._lock:
            return sorted(self._peers)

    @property
    def all_received(self) -> bool:
        """Whether the other units have acknowledged all messages."""
        with self._lock:
            return not any(self._ends[peer].waiting for peer in self._peers.values())

    def suspect(self, on: bool) -> None:
        """Set `suspects`."""
        self.suspects = on

    def silence_s(self, rank: int) -> float:
        """Return the seconds since the last sign of this unit."""
        return time.monotonic() - self._received_at[rank]

    def send(self, rank: int, words: Words) -> None:
        """Send a message to a known unit, now or over its next connection."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is not None:
                self._transmit(peer, self._ends[peer].send(words))

    def news(self) -> list[News]:
        """Return the news since the last call."""
        with self._lock:
            if self._news:
                # One byte stands for all news, which are taken together.
                self._wake_out.recv(4096)
            found = list(self._news)
            self._news.clear()
            return found

    def put(self, news: News) -> None:
        """Add news for the run loop."""
        with self._lock:
            # A single byte for any number of news: the socket's buffer never fills, so this never waits.
            if not self._news and not self._closed.is_set():
                self._wake_in.send(b"!")
            self._news.append(news)

    def close(self) -> None:
        """Send what is queued, within a short time, and end all connections."""
        with self._lock:
            self._closed.set()
            self._wake_out.close()
            self._wake_in.close()
        # Without the lock: the transports' readers may be waiting for it.
        for transport in self._transports:
            transport.close()

    def place(self, sender: Address, message: Message, viewable: bool) -> None:
        """Refuse every payload: control messages have none."""

    def handle(self, sender: Address, message: Message) -> None:
        """Process a part of a message. Raises ProtocolError."""
        if not isinstance(message, UnitPart):
            raise ProtocolError(f"{type(message).__name__} is not a message between units")
        with self._lock:
            end = self._ends.get(sender)
            if end is None:
                raise ProtocolError(f"this process is not unit {sender.index} of the job; another one is")
            words, rank = end.receive(message), self._ranks[sender]
            current = self._peers[rank] == sender  # else it was replaced, and its messages no longer count
            if current:
                self._received_at[rank] = time.monotonic()
            # The first frame of a new connection: all that may have been lost with the old one is sent again.
            if sender in self._unconnected:
                self._unconnected.discard(sender)
                self._transmit(sender, [end.acknowledgement(), *end.unacknowledged()])
            # A heartbeat needs no answer, or the two ends would answer each other forever.
            elif message.number:
                self._transmit(sender, [end.acknowledgement()])
        # Without the lock: the receiver may send, which takes it.
        if words is not None and current and not self._receiver.receive(rank, words):
            self.put(UnitMessage(rank, words))

    def lost(self, peer: Address, reason: str) -> None:
        """Note the end of a connection. The other unit dials again, or this one does."""
        with self._lock:
            self._unconnected.add(peer)

    def _expect(self, rank: int, peer: Address) -> None:
        """Accept messages of this process, and send to it what is for its rank."""
        self._ends[peer], self._ranks[peer], self._peers[rank] = ReliableEnd(), rank, peer
        self._unconnected.add(peer)
        # Its silence counts from here, and not from its predecessor's last message.
        self._received_at[rank] = time.monotonic()

    def _transmit(self, peer: Address, parts: list[UnitPart]) -> None:
        """Send parts if there is a connection; the lock is held, so they stay in order."""
        # Unit 0 may have two, and one of them has the connection. Without it the parts are kept.
        for transport in self._transports:
            with suppress(ConnectionLost):
                for part in parts:
                    transport.send(self._me, peer, part)

    def _beat(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                self._transmit(peer, [self._ends[peer].acknowledgement()])


class ControlServer(ControlConnection):
    """Unit 0's end: it listens, and publishes its address in the store.

    Args:
        access: the settings of the connections.
        words: the word of the process of each other unit.
        receiver: as for `ControlConnection`.
    """

    def __init__(self, access: ControlAccess, words: Mapping[int, str], receiver: MessageReceiver) -> None:
        super().__init__(_UNIT_0, receiver)
        self._access, self._kept = access, MaintainedValues(access.run)
        for rank, word in words.items():
            self._expect(rank, _address(rank, word))

    def start(self, host: str) -> None:
        """Listen at this address, and send heartbeats. Raises TransportError."""
        self.listen(host)
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def listen(self, host: str) -> None:
        """Listen at this address, too, and publish it. Raises TransportError."""
        transport = self._access.transport(host)
        url = transport.attach(self._me, self).encode()
        with self._lock:
            self._transports.append(transport)
        try:
            self._kept.set(_KEY, url)
        except StoreError:
            self._kept.keep(_KEY, url)  # it is written when the store is back

    def open(self, rank: int, word: str) -> None:
        """Accept a new process of that rank, which gets no messages to the former one."""
        with self._lock:
            # A second call must not make a new end, which would lose the numbers of its messages.
            if self._peers.get(rank) == _address(rank, word):
                return
            self._expect(rank, _address(rank, word))
        # Only now: the process dials as soon as it reads this.
        self._kept.keep(welcome_key(rank, word), b"1")

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._kept.close()
        super().close()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._beat()


class ControlClient(ControlConnection):
    """The end of a unit other than unit 0: it dials, and dials again.

    Args:
        access: the settings of the connection.
        rank, word: the rank of this unit, and the word of its process.
        receiver: as for `ControlConnection`.
        away_s: seconds of unit 0's silence after which this unit is alone.
    """

    def __init__(self, access: ControlAccess, rank: int, word: str, receiver: MessageReceiver, away_s: float) -> None:
        super().__init__(_address(rank, word), receiver)
        self._keys, self._url, self._away_s = access.run, "", away_s
        self._transports.append(access.transport())
        self._transports[0].attach_together({self._me: self}, listens=False)
        self._expect(0, _UNIT_0)
        self._broken = threading.Event()

    def start(self) -> None:
        """Dial unit 0 from now on, and send heartbeats."""
        threading.Thread(target=self._run, name="control", daemon=True).start()

    @property
    def alone(self) -> bool:
        """Whether unit 0 has been silent for so long that this unit waits no longer."""
        return self.silence_s(0) > self._away_s

    def lost(self, peer: Address, reason: str) -> None:
        """Note the end of the connection, which is made again."""
        super().lost(peer, reason)
        self._broken.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            # Before dialing: a break that comes meanwhile must not be cleared.
            self._broken.clear()
            if self._dial():
                self._beat()  # at once: unit 0 answers the first frame with what it has kept
                while not self._broken.wait(BEAT_S):
                    self._beat()
            else:
                self._closed.wait(_RETRY_S)

    def _dial(self) -> bool:
        """Connect to unit 0; return whether that was possible."""
        # The last known address comes first, because the store may be away, too.
        if self._url and self._connect():
            return True
        with suppress(StoreError):
            found = (self._keys.get(_KEY) or b"").decode("utf-8", "replace")
            # It has just failed above.
            if found not in ("", self._url):
                self._url = found
                return self._connect()
        return False

    def _connect(self) -> bool:
        with suppress(TransportError, ValueError):  # ValueError: what the store has is no URL
            # anew: the transport may still have the connection that it has just reported as ended
            self._transports[0].connect(self._me, _UNIT_0, self._url, anew=True)
            return True
        return False


def _address(rank: int, word: str) -> Address:
    """Return the address of a unit's process. Raises ValueError for a malformed word."""
    # An address has two numbers: the word distinguishes two processes of one rank.
    return Address(Role.WORKER, int(word, 16), rank)
