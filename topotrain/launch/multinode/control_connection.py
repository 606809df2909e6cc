"""The connections over which the leader controls the other units of a job.

Each other unit dials the leader over the transport of the workers and servers, with the job's secret, and with TLS
wherever another machine can reach the port. The store has the address of the leader (`leader_election.py`).

* Messages arrive in order and exactly once, also when a connection broke meanwhile (see `reliable_messages.py`).
* A connection belongs to one term: its key is made from it. A unit has a connection to the leader of the highest term
  that it knows, and to no other one.
* Both ends send a heartbeat every BEAT_S. A broken connection is not yet the loss of a unit: `silence_s` returns how
  long nothing has arrived, and the membership decides.
* No caller waits for the network or the store.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

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
from topotrain.launch.multinode.election.leader_election import FIRST_TERM, KEY, LeaderElection, LeaderRecord
from topotrain.launch.multinode.node_info import NodeInfo
from topotrain.launch.multinode.node_rendezvous import BEAT_S, welcome_key
from topotrain.launch.multinode.reliable_messages import ReliableEnd, UnitPart, Words

Receiver = Callable[[int, Words], bool]
_LEADER = Address(Role.SERVER, 0, 0)
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


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """This unit follows unit `rank` from now on. deposed: it has led until now."""

    term: int
    rank: int
    deposed: bool


@dataclass(frozen=True, slots=True)
class LeaderElected:
    """This unit leads from now on, in the place of the unit `former`, which is lost."""

    term: int
    former: int
    lost: Failed


News = UnitMessage | UnitVanished | UnitReturned | LeaderChanged | LeaderElected


class NewsQueue:
    """News for the run loop of a unit, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: deque[News] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        return self._wake_out.fileno()

    def take(self) -> list[News]:
        """Return the news since the last call."""
        with self._lock:
            if self._news:
                # One byte stands for all news, which are taken together.
                self._wake_out.recv(4096)
            found = list(self._news)
            self._news.clear()
            return found

    def put(self, news: News) -> None:
        """Add news."""
        with self._lock:
            self._wake()
            self._news.append(news)

    def put_back(self, news: Sequence[News]) -> None:
        """Return news that were taken, and are for a later reader."""
        with self._lock:
            if news:
                self._wake()
            self._news.extendleft(reversed(news))

    def _wake(self) -> None:
        # A single byte for any number of news: the socket's buffer never fills, so this never waits.
        if not self._news and not self._closed:
            self._wake_in.send(b"!")

    def close(self) -> None:
        """Release the descriptor. News are dropped from here on."""
        with self._lock:
            self._closed = True
            self._wake_out.close()
            self._wake_in.close()


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

    def transport(self, term: int, host: str = "127.0.0.1") -> TcpTransport:
        """Return a transport of a term; `host` matters only if it listens.

        Raises TransportError.
        """
        identity = Identity(self.run_id, job_key(self.secret, "control", self.run_id, str(term)), 0, 0, "")
        return TcpTransport(identity, self.start_port, host, patience=0.0, lease_s=self.lease_s)

    def leader_url(self, term: int) -> str:
        """Return the URL of the leader of a term; "" if it is not in the store.

        Raises StoreError.
        """
        record = LeaderRecord.loaded(self.run.get(KEY))
        return record.url if record is not None and record.term == term else ""


class ControlConnection:
    """One unit's end of the control connections.

    `ControlServer` is the end in the leader, and `ControlClient` the end in another unit.

    Args:
        me: the address of this process.
        queue: receives the messages for the run loop.
        receiver: processes messages first, and returns False for those to the run loop.
    """

    def __init__(self, me: Address, queue: NewsQueue, receiver: Receiver | None = None) -> None:
        self._me, self._queue, self._receiver = me, queue, receiver
        self._lock = threading.Lock()
        self._transports: list[TcpTransport] = []
        # By process, not by rank: a new process of a unit never receives messages to its predecessor.
        self._ends: dict[Address, ReliableEnd] = {}
        self._ranks: dict[Address, int] = {}
        self._peers: dict[int, Address] = {}  # the process that has a rank now
        self._unconnected: set[Address] = set()  # the next frame of these comes over a new connection
        self._received_at: dict[int, float] = {}
        self._closed = threading.Event()
        self.suspects = False
        """Whether a process has lost a peer, so that a silent unit counts as lost sooner."""

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

    def close(self) -> None:
        """Send what is queued, within a short time, and end all connections."""
        self._closed.set()
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
            # Else it was replaced, or this end is of a former term, and its messages no longer count.
            current = self._peers[rank] == sender and not self._closed.is_set()
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
        if words is None or not current or self._receiver is None:
            return
        if not self._receiver(rank, words):
            self._queue.put(UnitMessage(rank, words))

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
    """The leader's end: it listens, and the record of the leader has its address.

    Args:
        access: the settings of the connections.
        queue: as for `ControlConnection`.
        term: the term of the leader.
        lease: of the leader, which sends no decision without it. None: no other unit can lead.
    """

    def __init__(
        self, access: ControlAccess, queue: NewsQueue, term: int = FIRST_TERM, lease: LeaderElection | None = None
    ) -> None:
        super().__init__(_LEADER, queue)
        self._access, self._kept, self.term = access, MaintainedValues(access.run), term
        self._lease, self._held = lease, False
        self.url = ""
        """Where other units connect."""

    def start(self, receiver: Receiver, words: Mapping[int, str]) -> None:
        """Accept the processes with these words, and send heartbeats.

        words: by the ranks of their units. receiver: receives messages first.
        """
        with self._lock:
            self._receiver = receiver
            for rank, word in words.items():
                self._expect(rank, _address(rank, word))
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def listen(self, host: str) -> None:
        """Listen at this address, too, and let units connect there.

        Raises TransportError.
        """
        transport = self._access.transport(self.term, host)
        url = transport.attach(self._me, self)
        with self._lock:
            self._transports.append(transport)
            self.url = url

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
            with self._lock:
                self._resend()

    def _transmit(self, peer: Address, parts: list[UnitPart]) -> None:
        # Heartbeats are sent at all times: another unit may be elected only if the leader is silent.
        # After a long pause of this process there may be another leader, which the next renewal will tell.
        doubtful = self._lease is not None and not self._lease.may_decide(time.monotonic())
        if doubtful and any(part.number for part in parts):
            self._held, parts = True, [part for part in parts if not part.number]
        super()._transmit(peer, parts)

    def _resend(self) -> None:
        """Send what was held back for want of a lease. The lock is held."""
        if self._held and self._lease is not None and self._lease.may_decide(time.monotonic()):
            self._held = False
            for peer in self._peers.values():
                self._transmit(peer, self._ends[peer].unacknowledged())


class ControlClient(ControlConnection):
    """The end of a unit that follows: it dials the leader, and dials again.

    Args:
        access: the settings of the connection.
        rank, word: the rank of this unit, and the word of its process.
        receiver, queue: as for `ControlConnection`.
        term, leader: the term, and the rank of its leader.
    """

    def __init__(
        self,
        access: ControlAccess,
        rank: int,
        word: str,
        receiver: Receiver,
        queue: NewsQueue,
        term: int = FIRST_TERM,
        leader: int = 0,
    ) -> None:
        super().__init__(_address(rank, word), queue, receiver)
        self._access, self._url, self.term = access, "", term
        self.leader = leader
        """The rank of the unit that this unit follows; -1: it has lost its leader."""
        self._transports.append(access.transport(term))
        self._transports[0].attach_together({self._me: self}, listens=False)
        self._expect(leader, _LEADER)
        self._broken = threading.Event()

    def start(self) -> None:
        """Dial the leader from now on, and send heartbeats."""
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def lost(self, peer: Address, reason: str) -> None:
        """Note the end of the connection, which is made again."""
        super().lost(peer, reason)
        self._broken.set()

    def close(self) -> None:
        """End the connection."""
        super().close()
        self._broken.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            # Before dialing: a break that comes meanwhile must not be cleared.
            self._broken.clear()
            if not self._closed.is_set() and self._dial():
                self._beat()  # at once: the leader answers the first frame with what it has kept
                while not self._broken.wait(BEAT_S):
                    self._beat()
            else:
                self._closed.wait(_RETRY_S)

    def _dial(self) -> bool:
        """Connect to the leader; return whether that was possible."""
        # The last known address comes first, because the store may be away, too.
        if self._url and self._connect():
            return True
        with suppress(StoreError):
            found = self._access.leader_url(self.term)
            # It has just failed above.
            if found not in ("", self._url):
                self._url = found
                return self._connect()
        return False

    def _connect(self) -> bool:
        with suppress(TransportError, ValueError):  # ValueError: what the store has is no URL
            # anew: the transport may still have the connection that it has just reported as ended
            self._transports[0].connect(self._me, _LEADER, self._url, anew=True)
            return True
        return False


class ControlChannel:
    """The connections of one unit over all terms, as its run loop sees them.

    Args:
        away_s: seconds of the leader's silence after which this unit goes on alone.
    """

    def __init__(self, away_s: float) -> None:
        self.queue, self._away_s = NewsQueue(), away_s
        self._end: ControlServer | ControlClient | None = None
        self._suspects = False

    def use(self, end: ControlServer | ControlClient) -> None:
        """Send over this end from now on."""
        self._end = end
        end.suspect(self._suspects)

    @property
    def server(self) -> ControlServer | None:
        """The leader's end; None in a unit that follows."""
        return self._end if isinstance(self._end, ControlServer) else None

    def leads_in(self, term: int) -> bool:
        """Return whether this unit leads in this term, and no other unit does by now."""
        server = self.server
        return server is not None and server.term == term

    @property
    def ranks(self) -> list[int]:
        """The ranks of the units at the other ends."""
        return [] if self._end is None else self._end.ranks

    @property
    def all_received(self) -> bool:
        """Whether the other units have acknowledged all messages."""
        return self._end is None or self._end.all_received

    @property
    def silent_s(self) -> float:
        """The seconds since the last sign of the leader; 0 in the leader."""
        end = self._end
        return end.silence_s(end.leader) if isinstance(end, ControlClient) else 0.0

    @property
    def alone(self) -> bool:
        """Whether the leader has been silent for so long that this unit waits no longer."""
        return self.silent_s > self._away_s

    @property
    def suspects(self) -> bool:
        """Whether a process has lost a peer, so that a silent unit counts as lost sooner."""
        return self._suspects

    def suspect(self, on: bool) -> None:
        """Set `suspects`."""
        self._suspects = on
        if self._end is not None:
            self._end.suspect(on)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        return self.queue.fileno()

    def news(self) -> list[News]:
        """Return the news since the last call."""
        return self.queue.take()

    def send(self, rank: int, words: Words) -> None:
        """Send a message to a known unit, now or over its next connection."""
        if self._end is not None:
            self._end.send(rank, words)

    def report(self, words: Words) -> None:
        """Send a message to the leader. In the leader itself this does nothing."""
        end = self._end
        if isinstance(end, ControlClient):
            end.send(end.leader, words)

    def close(self) -> None:
        """End all connections."""
        if self._end is not None:
            self._end.close()
        self.queue.close()


def _address(rank: int, word: str) -> Address:
    """Return the address of a unit's process. Raises ValueError for a malformed word."""
    # An address has two numbers: the word distinguishes two processes of one rank.
    return Address(Role.WORKER, int(word, 16), rank)
