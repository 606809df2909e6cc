"""Shared context of a client's parts: channel, model, and types of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.body_codec import BodyCodec
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.profiling.spans import SILENT, Clock, Recorder
from topotrain.core.transport_contract import MessageSender, TransportError


class JobError(Exception):
    """A server's refusal in the user's words; other fields as in `message.Fail`."""

    def __init__(self, text: str, config: bool, quarantine: bool = False) -> None:
        super().__init__(text)
        self.config, self.quarantine = config, quarantine


class PeerLost(Exception):
    """A server this worker needs is gone. A consequence, hardly ever the cause."""


class Waiter(Protocol):
    """How a worker waits for the messages that reader threads handle."""

    def update(self) -> AbstractContextManager[object]:
        """Exclusive access for a change. Afterwards a waiting thread checks its condition."""
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` is true, evaluated under exclusive access."""
        ...

    def look(self) -> None:
        """Handle the messages that have arrived, if no reader does that by itself."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of a step.

    version: of the values. staleness: in versions, for each shard. found_inf: a gradient was not finite.
    norm: of the gradient over all parameters, -1 if the worker did not ask for it.
    snapshot: number of the snapshot of the values after this step, 0 if there is none.
    refused: as in `message.Applied`, as pairs. leaves: the group leaves the job after this step.

    late: the group made the step without this worker's gradient and is in step `next` now. The values are those of that
    step.
    repeats: with `late`: the group has not made the step, and repeats its batch in step `next`.
    """

    version: int
    staleness: tuple[int, ...]
    found_inf: bool
    norm: float
    snapshot: int = 0
    refused: tuple[tuple[int, int], ...] = ()
    leaves: bool = False
    late: bool = False
    next: int = -1
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A worker's commit (see `message.Commit`), with bitmaps over all pieces."""

    backwards: int
    weight: float
    fetch: bool
    hyper: bytes
    marks: tuple[int, ...]
    revisions: tuple[int, ...] = ()
    edited: int = 0
    dropped: int = 0
    inv_scale: float = 1.0
    check_finite: bool = False
    clip_norm: float = 0.0
    clip_type: float = 2.0
    samples: int = 0
    optimizer: int = 0
    counts: bool = True
    ages: tuple[int, ...] = ()
    resets: int = 0
    digest: int = 0


VALUE_CHANGE = StepEnd(backwards=0, weight=0.0, fetch=False, hyper=b"", marks=(), counts=False)
"""The commit of a change of values that extensions have sent. It has no gradients."""


class ServerChannel:
    """Sends for one worker, and waits for it.

    Args:
        me: the worker.
        topology: the job's layout.
        sender: sends the worker's messages. It never blocks on the receiver.
        waiter: how to wait.
    """

    def __init__(self, me: Address, topology: Topology, sender: MessageSender, waiter: Waiter) -> None:
        self.me = me
        self.servers = topology.servers(topology.server_group_of(me.group))
        self.first_server = Address(Role.SERVER, 0, 0)
        """The server that has the data service and the store of worker states."""
        self.group_size = topology.workers_per_group
        self.waiter = waiter
        self.spans: Recorder = SILENT
        self.waited = 0.0
        """Seconds that the worker has waited for others, if `measure_waits` was called."""
        self.exits = 0
        """How often the script has left a loop over the loader before its end."""
        self.before_wait: Callable[[], None] = lambda: None
        """Called when the script begins to wait."""
        self._sender = sender
        self._clock: Clock | None = None
        self._unsent_exits: list[m.LoopExited] = []
        self._failure: Exception | None = None
        self._reasons: list[m.Fail] = []
        self._lost: set[Address] = set()
        self._leaving = False

    def record_spans(self, spans: Recorder) -> None:
        """Record from here on what the worker sends and waits for."""
        self.spans = spans

    def measure_waits(self, clock: Clock) -> None:
        """Add up in `waited` the waits by this clock."""
        self._clock = clock

    def now(self) -> float:
        """Return seconds of the clock of `measure_waits`; 0 without one."""
        return 0.0 if self._clock is None else self._clock.now() / 1e9

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, to: Address, message: m.Message) -> None:
        """Send a message, after all loop exits that the servers do not know yet."""
        # An exit is sent with the next message: leaving a loop must not wait, also not for a full connection.
        while self._unsent_exits:
            left = self._unsent_exits.pop(0)
            for server in self.servers:
                self.try_send(server, left)
        self._sender.send(to, message)

    def try_send(self, to: Address, message: m.Message) -> None:
        """Send a message that is dropped if the connection is closed."""
        # An iterator may send it while it is garbage collected, which can happen after the job's end.
        with suppress(TransportError):
            self._sender.send(to, message)

    def exit_loop(self, step: int, backwards: int) -> None:
        """The script left a loop early, after `backwards` of a step. This never waits."""
        if self._leaving or self._failure is not None:
            return
        self.exits += 1
        if self.group_size > 1:
            # Sent with the next message. A script that an error ends leaves its loops first, and then sends no more, so
            # no server takes that exit for the cause.
            self._unsent_exits.append(m.LoopExited(self.exits, step, backwards))

    # --- waiting -------------------------------------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for a reply. Raises JobError or PeerLost if the job cannot go on."""
        self.before_wait()
        before = 0 if self._clock is None else self._clock.now()
        # Any failure ends every wait, because the reply may never come.
        self.waiter.wait(lambda: self._failure is not None or ready())
        if self._clock is not None:
            self.waited += (self._clock.now() - before) / 1e9
        if self._failure is not None:
            raise self._failure

    # --- failures ------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        """The first reason that this worker learned why the job cannot go on."""
        return self._failure

    def on_failure(self, sender: Address, message: m.Fail) -> None:
        """A server refuses to go on."""
        self._reasons.append(message)
        # The first failure stays: later ones are mostly consequences of it.
        self._failure = self._failure or JobError(message.text, message.config, message.quarantine)

    def on_lost(self, peer: Address, reason: str, expected: bool) -> None:
        """A connection ended: the end of the job, unless it was expected or wanted."""
        # Noted in any case, since `await_cause` counts the servers that can still name a cause.
        self._lost.add(peer)
        if not expected and not self._leaving:
            self._failure = self._failure or PeerLost(f"{self.me} lost {peer}: {reason}")

    def await_cause(self, late: Callable[[], bool]) -> str:
        """Why the job cannot go on; "" if no server has sent a reason.

        Waits for a cause until `late` returns true, or the connections to all servers have ended.
        """
        servers = {*self.servers, self.first_server}
        self.waiter.wait(lambda: any(known.cause for known in self._reasons) or self._lost >= servers or late())
        # A cause before the first reason, which may be a consequence of it.
        causes = [known for known in self._reasons if known.cause]
        return next((known.text for known in (*causes, *self._reasons)), "")

    def report_failure(self, text: str, cause: bool = True) -> None:
        """Tell the servers why this worker cannot go on; `cause` as in `message.Fail`."""
        for server in self.servers:
            self.try_send(server, m.Fail(text, cause=cause))
        self.leave()

    def leave(self) -> None:
        """From here on, connections may end."""
        self._leaving = True


class ClientModel:
    """The model of a job, as one worker's client knows it.

    Args:
        channel: the worker's channel to its servers.
        topology: the job's layout.
        shared: the transports show memory, as for `server.Server`.
    """

    def __init__(self, channel: ServerChannel, topology: Topology, shared: bool) -> None:
        self._me = channel.me
        self._servers = channel.servers
        self._relay = channel.servers[channel.me.index] if topology.server_collective else None
        self.windowed = shared and topology.sees_memory(channel.me.group)
        """Whether workers and servers share the memory of parameters and gradients."""
        self.sends_own_shard = topology.collective
        """Whether the worker hands in the gradient of its own server's shard, as the script left it."""
        self.reducers = channel.servers if self._relay is None else (self._relay,)
        """Servers that take this worker's part of a sum."""
        self.is_open = False

    def open(self, slice_map: SliceMap, flats: FlatBuffers, codec: BodyCodec) -> None:
        """The model is known. Values land in the flat buffer "params", means in "mean"."""
        self.map, self.flats, self.codec = slice_map, flats, codec
        self.held = slice_map.buckets_on(self._me.index)
        self.held_by: dict[int, list[int]] = {server.index: [] for server in self._servers}
        for bucket in self.held:
            self.held_by[bucket.shard].append(bucket.id)
        self.first_piece = [0]
        """Of each bucket the number of its first piece, over all buckets; and last the number of all pieces."""
        for bucket in slice_map.buckets:
            self.first_piece.append(self.first_piece[-1] + len(bucket.pieces))
        self.is_open = True

    def bucket(self, sender: Address, number: int) -> Bucket:
        """The bucket that a message names. Raises ProtocolError if it is not the sender's."""
        if not self.is_open:
            raise m.ProtocolError(f"{sender} sends bucket {number} before this worker has described the model")
        # In a collective the server beside this worker sends the sums of all buckets.
        buckets = self.map.buckets if sender == self._relay else self.map.buckets_of(sender.index)
        if not buckets or not buckets[0].id <= number <= buckets[-1].id:
            raise m.ProtocolError(f"bucket {number} is not {sender}'s")
        return self.map.buckets[number]

    def server_of(self, bucket: Bucket) -> Address:
        """The server that stores a bucket."""
        return self._servers[bucket.shard]

    def reducer_of(self, bucket: Bucket) -> Address:
        """The server that takes this worker's part of a bucket's sum."""
        return self._relay or self._servers[bucket.shard]

    def reduced_by(self, server: Address) -> tuple[int, int]:
        """First bucket, and number of buckets, of which a server sends this worker sums."""
        buckets = self.map.buckets if self.reducers == (server,) else self.map.buckets_of(server.index)
        return (buckets[0].id if buckets else 0), len(buckets)

    def piece_bit(self, bucket: Bucket, piece: int) -> int:
        """The bit of a bucket's piece in a bitmap over all pieces."""
        return 1 << (self.first_piece[bucket.id] + piece)
