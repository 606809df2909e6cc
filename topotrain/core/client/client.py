"""A worker's client of the servers: it pushes gradients, commits steps and receives values.

`Client` knows which server holds which bucket, and what has come back. It computes nothing, and blocks only in its
`Waiter`, which is given to it. In a job the waiter is a condition variable that the transports' reader threads notify.
In a simulation it is a turn of the simulated network. The same class therefore runs in both. What is not needed to
push, commit and receive is an extension (`extension.ClientExtension`), and the client names none.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.bitmaps import NO_REVISION, bits_to_int, int_to_bits
from topotrain.core.client.body_codec import BodyCodec
from topotrain.core.client.client_extension import ClientExtension, LateSteps, overrides
from topotrain.core.client.client_types import JobError, PeerLost, StepEnd, StepOutcome, Waiter, present_body
from topotrain.core.client.model_buffers import ModelBufferClient
from topotrain.core.client.optimizer_state import OptimizerStateClient
from topotrain.core.model import shared_windows
from topotrain.core.model.schema import FlatBuffers, Schema, typed
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol.message_validation import MessageValidator, check_bits
from topotrain.core.server.consistency import pairs
from topotrain.core.transport_contract import TransportError

__all__ = ["Client", "JobError", "StepOutcome", "PeerLost", "StepEnd", "Waiter"]

Handler = Callable[[Address, Any], None]
E = TypeVar("E", bound=ClientExtension)


class Client:
    """One worker's client.

    Args:
        me: this worker.
        topology: the job's layout.
        send: send(to, message); never blocks on the receiver.
        waiter: how to wait.
        shared: the transports show memory, as for `server.Server`.
        incarnation: of the worker's group; above 0 `come_back` must be called before anything else.
        extensions: what is attached from the beginning.
    """

    def __init__(
        self,
        me: Address,
        topology: Topology,
        send: Callable[[Address, m.Message], None],
        waiter: Waiter,
        shared: bool = False,
        incarnation: int = 0,
        extensions: Sequence[ClientExtension] = (),
    ) -> None:
        self.me = me
        self._incarnation = incarnation
        self.servers = topology.servers(topology.server_group_of(me.group))
        self.desk = Address(Role.SERVER, 0, 0)
        self.group_size = topology.workers_per_group
        self.optimizer_state = OptimizerStateClient()
        self.buffers = ModelBufferClient()
        self.windowed = shared and topology.sees_memory(me.group)
        self.gives = topology.collective  # the gradients of its server's shard, as the script left them
        self._beside = self.servers[me.index] if topology.relayed else None
        self._unheard: set[Address] = {*self.servers, self.desk} if incarnation else set()
        self.begun: set[Address] = set()  # servers that know more than a script that was started again, until it steps
        self._adders = self.servers if self._beside is None else (self._beside,)
        self._streams = False
        self._lazy = False
        self._unsettled: tuple[int, StepEnd, Callable[[StepOutcome], None]] | None = None
        self._windows: dict[int, m.SharedBuffer] = {}
        self._say = send
        self._waiter = waiter
        self._manners = MessageValidator(me, topology, shared)
        self._is_open = False
        self._failure: Exception | None = None
        self._round: int | None = None  # the values that are awaited; a road may say others twice
        self._values: set[int] = set()
        self._applied: dict[Address, m.Applied] = {}
        self.clock: Callable[[], float] = lambda: 0.0
        self.waited = 0.0
        """Seconds by `clock` that this worker has waited for others."""
        self._backward: tuple[int, int] | None = None  # (step, ordinal) whose means are awaited
        self._means: dict[int, tuple[int, torch.Tensor]] = {}
        self._reduced: dict[Address, m.BackwardReduced] = {}
        self._exits = 0
        self._unsaid: list[m.LoopExited] = []
        self._fetches = 0  # the same on all workers of the group: they are shown the same moment
        self._leaving = False
        self._reasons: list[m.Fail] = []  # why the servers cannot go on, as they learned it
        self._gone: set[Address] = set()
        self.before_values: Callable[[], None] = lambda: None  # "params" is about to be written
        self.after_values: Callable[[], None] = lambda: None  # new values stand there
        self.spans: Recorder = SILENT
        self.device = torch.device("cpu")  # where the model is
        self._handlers: dict[type[m.Message], Handler] = {
            m.Values: self._take_values,
            m.SharedBuffer: self._take_window,
            m.ReducedGradient: self._reduction,
            m.BackwardReduced: self._reduction,
            m.Applied: self._take_applied,
            m.Fail: self._take_failure,
        }
        self._extensions: dict[type[m.Message], ClientExtension] = {}
        self._before_commit: tuple[Callable[[int, StepEnd], None], ...] = ()
        self._after_commit: tuple[Callable[[StepEnd, StepOutcome], None], ...] = ()
        self._on_lost: tuple[Callable[[Address, str], bool], ...] = ()
        self.late_steps: LateSteps | None = None
        self._attached: dict[type[ClientExtension], ClientExtension] = {}
        for extension in (self.optimizer_state, self.buffers, *extensions):
            self.attach(extension)

    def attach(self, extension: ClientExtension) -> None:
        """Let an extension handle its messages, and take part in commits.

        Raises:
            ValueError: the client handles one of its messages already.
        """
        with self._waiter.update():
            taken = [kind.__name__ for kind in extension.messages if kind in self._handlers]
            if taken:
                raise ValueError(f"{type(extension).__name__} handles {', '.join(taken)}, which something else handles")
            self._attached[type(extension)] = extension
            if isinstance(extension, LateSteps):
                self.late_steps = extension
            self._extensions.update(dict.fromkeys(extension.messages, extension))
            self._handlers.update(dict.fromkeys(extension.messages, extension.handle))
            if overrides(extension, "before_commit"):
                self._before_commit += (extension.before_commit,)
            if overrides(extension, "after_commit"):
                self._after_commit += (extension.after_commit,)
            if overrides(extension, "on_lost"):
                self._on_lost += (extension.on_lost,)
        extension.bind(self)

    def extension(self, kind: type[E]) -> E:
        """The attached extension of this class. Raises KeyError where there is none."""
        found = self._attached[kind]
        assert isinstance(found, kind)
        return found

    def come_back(self) -> None:
        """Tell everybody that this worker stands in for one that is gone; returns when all act on it.

        What the servers say before that may be meant for the one that is gone. Raises JobError where they cannot.
        """
        servers = sorted(self._unheard)
        for server in servers:
            self._send(server, m.WorkerRejoined(self._incarnation))
        self._wait(lambda: not self._unheard)

    def open(
        self,
        schema: Schema,
        slice_map: SliceMap,
        flats: FlatBuffers,
        streams: bool = False,
        adds: bool = False,
        lazy: bool = False,
    ) -> None:
        """Say which model this is. `flats` are the worker's buffers: values land in "params", means in "mean".

        streams: gradients are applied on arrival, and values may come back before the step is committed.
        adds: every backward is reduced by itself, so that all pushes of a step count.
        lazy: `pull: kLazy`, the servers tell of each bucket when it is new.
        """
        held = slice_map.buckets_on(self.me.index)
        codecs = (extension.body_codec(slice_map, flats, adds, held) for extension in self._attached.values())
        self._codec = next((codec for codec in codecs if codec is not None), BodyCodec())
        self._held: dict[int, list[int]] = {server.index: [] for server in self.servers}
        for bucket in held:
            self._held[bucket.shard].append(bucket.id)
        self._count = self._awaited = len(held)
        self._streams = streams and (lazy or not self.windowed)
        self._lazy = lazy
        self.schema = schema
        self.buffers.open(schema.buffers)
        self.map = slice_map
        self.flats = flats
        self._is_open = True
        self._piece_base = [0]
        for bucket in slice_map.buckets:
            self._piece_base.append(self._piece_base[-1] + len(bucket.pieces))
        for server in self.servers:
            for part in schema.parts():
                self._send(server, part)
            if self.windowed:
                self._show("grad", server)

    def _show(self, name: str, server: Address) -> None:
        """Let a server see, and write, its part of a flat buffer."""
        for space in self.map.spaces:
            lo, hi = self.map.ranges[space.index][server.index]
            if hi > lo and space.on(self.me.index):
                self._send(server, m.SharedBuffer(name, space.index, body=self.flats.flat(name, space.index)[lo:hi]))

    def take_windows(self) -> None:
        """Wait for the memory that the parameters are to live in; it becomes the flat buffer "params"."""
        spaces = [space.index for space in self.map.spaces if space.length and space.on(self.me.index)]
        self._wait(lambda: self._windows.keys() >= set(spaces))
        for space in spaces:
            self.flats.put("params", space, shared_windows.seen(self._windows[space], self.map, None))

    # --- the resident's side -------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where a body is to be received (see `wire.Endpoint.place`)."""
        self._manners.check(sender, message)
        if sender in self._unheard:
            return None
        if isinstance(message, m.Values):
            # Values that nobody awaits (a road said them twice) must not overwrite the parameters.
            bucket = self.bucket(sender, message.bucket)
            if self._codec.is_coded(message, bucket):
                return None if viewable else self._codec.landing(message, bucket)
            name = "params" if message.round == self._round else "unwanted"
            return self.flats.view(name, bucket)
        extension = self._extensions.get(type(message))
        if extension is not None:
            return extension.place(sender, message)
        if isinstance(message, m.ReducedGradient) and not viewable:
            bucket = self.bucket(sender, message.bucket)
            coded = self._codec.is_coded(message, bucket)
            return self._codec.landing(message, bucket) if coded else self.flats.view("mean", bucket)
        return None

    def bucket(self, sender: Address, number: int) -> Bucket:
        """The bucket of which a server speaks. Raises ProtocolError where it is not the server's."""
        if not self._is_open:
            raise m.ProtocolError(f"{sender} speaks of bucket {number} before anybody has said which model this is")
        buckets = self.map.buckets if sender == self._beside else self.map.buckets_of(sender.index)
        if not buckets or not buckets[0].id <= number <= buckets[-1].id:
            raise m.ProtocolError(f"bucket {number} is not {sender}'s")
        return self.map.buckets[number]

    def handle(self, sender: Address, message: m.Message) -> None:
        """Take a server's answer, or what another worker sends. Raises ProtocolError."""
        self._manners.check(sender, message)
        with self._waiter.update():
            if sender in self._unheard and not isinstance(message, m.Fail):
                self._hear_again(sender, message)
                return
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(sender, message)

    def _take_window(self, sender: Address, message: m.SharedBuffer) -> None:
        self._windows[message.space] = message

    def _take_applied(self, sender: Address, message: m.Applied) -> None:
        known = self._applied.get(sender)
        if known is None or known.step < message.step:
            self._applied[sender] = message

    def _take_failure(self, sender: Address, message: m.Fail) -> None:
        self._reasons.append(message)
        self._failure = self._failure or JobError(message.text, message.config, message.quarantine)

    def _hear_again(self, server: Address, message: m.Message) -> None:
        if isinstance(message, m.WorkerRejoined) and message.incarnation == self._incarnation:
            self._unheard.discard(server)
            if message.begun:
                self.begun.add(server)

    def _reduction(self, sender: Address, message: m.ReducedGradient | m.BackwardReduced) -> None:
        if not self._is_open or (message.step, message.ordinal) != self._backward:
            return
        if isinstance(message, m.BackwardReduced):
            check_bits(message.contributed, self._bucket_range(sender)[1], f"{sender}: the buckets of a backward")
            self._reduced[sender] = message
            return
        bucket = self.bucket(sender, message.bucket)
        body = present_body(message)
        check_bits(message.present, len(bucket.pieces), f"{sender}: the pieces of bucket {bucket.id}")
        if self._codec.is_coded(message, bucket):
            body = self._codec.mean(bucket, body)
        else:
            body = typed(body, self.flats.view("params", bucket))
        self._means[bucket.id] = (bits_to_int(message.present), body)

    def _take_values(self, sender: Address, message: m.Values) -> None:
        with self.spans.span("pull", round=message.round, bucket=message.bucket):
            self._land(sender, message)

    def _land(self, sender: Address, message: m.Values) -> None:
        if message.round != self._round:
            return
        if message.bucket < 0:
            self._values.update(self._held[sender.index])
            return
        if message.body is None and self.windowed:
            self._values.add(self.bucket(sender, message.bucket).id)
            return
        bucket, body = self.bucket(sender, message.bucket), present_body(message)
        if self._codec.is_coded(message, bucket):
            if message.bucket not in self._values:  # said twice, it must not count twice
                self._codec.values(bucket, body)
        else:
            target = self.flats.view("params", bucket)
            if body.data_ptr() != target.data_ptr():
                target.copy_(typed(body, target))
            if message.version >= 0:  # else they are final: no difference comes after them
                self._codec.restart(bucket)
        self._values.add(message.bucket)

    def lost(self, peer: Address, reason: str) -> None:
        """A connection ended."""
        with self._waiter.update():
            self._gone.add(peer)
            expected = any(on_lost(peer, reason) for on_lost in self._on_lost)
            if not expected and not self._leaving:
                self._failure = self._failure or PeerLost(f"{self.me} lost {peer}: {reason}")

    def _wait(self, ready: Callable[[], bool]) -> None:
        before = self.clock()
        self._waiter.wait(lambda: self._failure is not None or ready())
        self.waited += self.clock() - before
        if self._failure is not None:
            raise self._failure

    # --- for its parts and its extensions (`extension.ClientAccess`) ---------------------------------------------

    def tell(self, to: Address, message: m.Message) -> None:
        """Send a message."""
        self._send(to, message)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what one of them is told. Raises JobError, PeerLost."""
        self._wait(ready)

    @property
    def waiter(self) -> Waiter:
        """How this worker waits."""
        return self._waiter

    # --- values --------------------------------------------------------------------------------------------------

    def give_initial(self, buffer: str) -> None:
        """Group 0: the values that everybody starts from, out of the flat buffer of that name.

        Of each space one worker says them, which is worker 0 where all hold it.
        """
        for bucket in self.map.buckets:
            home = self._home(bucket)
            if self.map.spaces[bucket.space].speaker == self.me.index and home not in self.begun:
                self._send(home, m.Init(bucket.id, body=self.flats.view(buffer, bucket)))

    def fetch(self) -> None:
        """Wait for current values of all slices that this worker holds; they land in the flat buffer "params"."""
        self.settle()
        self._fetches += 1
        with self.receive_values(-1 - self._fetches):
            for server in self.servers:
                self._send(server, m.Fetch(self._fetches))

    @contextmanager
    def receive_values(self, number: int) -> Iterator[None]:
        """The block asks for values; the round of this number is received, and stands in "params" at the block's end.

        Raises JobError, PeerLost.
        """
        self.before_values()
        self._await_values(number)
        yield
        self._wait_values()
        self.after_values()

    def _await_values(self, number: int) -> None:
        with self._waiter.update():
            self._values.clear()
            self._round = number

    def _wait_values(self) -> None:
        with self.spans.span("wait for values"):
            self._wait(lambda: len(self._values) == self._awaited)
        self._round = None

    # --- gradients -----------------------------------------------------------------------------------------------

    def push(
        self,
        step: int,
        ordinal: int,
        bucket: Bucket,
        weight: float,
        present: int,
        body: torch.Tensor,
        fresh: bool = False,
    ) -> None:
        """Send a bucket's local gradient home. The body must stay until the mean is back, or the step committed.

        fresh: with windows, the mean may be written into "grad".
        """
        self._backward = (step, ordinal)
        if self._streams and self._round != step:
            self._await_values(step)  # new values may come before the backward is over
        bits = int_to_bits(present, len(bucket.pieces))
        with self.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
            body = self._codec.push(bucket, weight, present, body)
            self._send(self._adder(bucket), m.Push(step, ordinal, bucket.id, weight, bits, fresh, body=body))

    def rates(self, hyper: bytes) -> None:
        """Say the hyper-parameters of what is pushed from now on and applied on arrival."""
        for server in self.servers:
            self._send(server, m.StepRates(hyper))

    def _home(self, bucket: Bucket) -> Address:
        return self.servers[bucket.shard]

    def _adder(self, bucket: Bucket) -> Address:
        """Whom this worker's part of a sum goes to."""
        return self._beside or self._home(bucket)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int) -> None:
        """This worker's backward is over; `pushed` is a bitmap over all buckets."""
        self._backward = (step, ordinal)
        for server in self._adders:
            lo, count = self._bucket_range(server)
            bits = int_to_bits(pushed >> lo & (1 << count) - 1, count)
            self._send(server, m.BackwardEnd(step, ordinal, weight, bits, self._exits))

    def left_early(self, step: int, backwards: int) -> None:
        """The script left a loop over the loader before its end, after so many backwards of a step; never waits.

        The servers hear of it with whatever this worker says next. A script that an error ends leaves its loops before
        anybody here knows of the error; it says nothing more, and so nobody takes that exit for the cause.
        """
        if self._leaving or self._failure is not None:
            return
        self._exits += 1
        if self.group_size > 1:
            self._unsaid.append(m.LoopExited(self._exits, step, backwards))

    def _send(self, to: Address, message: m.Message) -> None:
        """Send a message, after what is still unsaid."""
        while self._unsaid:
            left = self._unsaid.pop(0)
            for server in self.servers:
                self.mention(server, left)
        self._say(to, message)

    def mention(self, to: Address, message: m.Message) -> None:
        """Send what may be said while an iterator is collected: with the job over, there is nobody to tell."""
        with suppress(TransportError):
            self._say(to, message)

    def _bucket_range(self, server: Address) -> tuple[int, int]:
        """First and number of the buckets whose sums a server tells this worker."""
        buckets = self.map.buckets if self._adders == (server,) else self.map.buckets_of(server.index)
        return (buckets[0].id if buckets else 0), len(buckets)

    def wait_means(self) -> tuple[dict[int, tuple[int, torch.Tensor]], int]:
        """The group's means of this backward: bucket id -> (bitmap of its pieces, 1-D view until the next push).

        And a bitmap over all pieces: those whose mean stands in "grad" already.
        """
        with self.spans.span("wait for means"):
            self._wait(self._all_reduced)
        with self._waiter.update():
            self._backward = None
            written = self._written()
            self._reduced.clear()
            means, self._means = self._means, {}
        return means, written

    def _written(self) -> int:
        bits = 0
        for server, reduced in self._reduced.items():
            if reduced.written:
                bits |= bits_to_int(reduced.written) << self._piece_base[self._bucket_range(server)[0]]
        return bits

    def _all_reduced(self) -> bool:
        if len(self._reduced) < len(self._adders):
            return False
        return len(self._means) == sum(
            bits_to_int(reduced.contributed).bit_count() for reduced in self._reduced.values()
        )

    def edit(self, step: int, bucket: Bucket, body: torch.Tensor) -> None:
        """Send a bucket's gradient as the script left it."""
        with self.spans.span("push (edit)", step=step + 1, bucket=bucket.id):
            self._send(self._home(bucket), m.GradientOverride(step, bucket.id, body=body))

    def commit(self, step: int, end: StepEnd, meanwhile: Callable[[], None] = lambda: None) -> StepOutcome:
        """Commit a step everywhere and wait until it is applied (and, with `fetch`, for the new values).

        meanwhile: what can be done while the servers work; what it raises ends the wait.
        """
        self._begin_commit(step, end)
        meanwhile()
        return self._end_commit(step, end)

    def commit_lazily(self, step: int, end: StepEnd, settled: Callable[[StepOutcome], None]) -> None:
        """Commit a step and go on; what became of it is told to `settled` in the next `settle`, on its thread."""
        self._begin_commit(step, end)
        self._unsettled = (step, end, settled)

    def settle(self) -> None:
        """Wait until the step that was committed lazily is applied, and all its values are here."""
        if self._unsettled is not None:
            (step, end, settled), self._unsettled = self._unsettled, None
            settled(self._end_commit(step, end))

    def wait_for(self, buckets: Set[int]) -> None:
        """Wait for the new values of these buckets only (numbers), if a lazily committed step has not brought them."""
        if self._unsettled is not None and not buckets <= self._values:
            with self.spans.span("wait for values"):
                self._wait(lambda: buckets <= self._values)

    def _begin_commit(self, step: int, end: StepEnd) -> None:
        self.settle()
        for call in self._before_commit:
            call(step, end)
        self._applied.clear()
        self.begun.clear()
        if end.fetch:
            self.before_values()
        if self._pulls(end) and self._round != step:
            self._await_values(step)
        for server in self.servers:
            self._send(server, self._commit_for(server, step, end))

    def _pulls(self, end: StepEnd) -> bool:
        """In a parameter buffer the values are new when the step is applied; lazily they are told bucket by bucket."""
        return end.fetch and (self._lazy or not self.windowed)

    def _end_commit(self, step: int, end: StepEnd) -> StepOutcome:
        late = self.late_steps
        with self.spans.span("wait for apply"):
            self._wait(lambda: (late is not None and late.missed(step)) or self._applied_everywhere(step))
        if late is not None and late.missed(step):
            return late.catch_up()
        if self._pulls(end):
            self._wait_values()
        if end.fetch:
            self.after_values()
        replies = [self._applied[server] for server in self.servers]
        stale = tuple(reply.staleness for reply in replies)
        taken = max(reply.snapshot for reply in replies)
        found_inf, refused = any(r.found_inf for r in replies), tuple(pairs(replies[0].refused))
        leaves = any(reply.leaves for reply in replies)
        outcome = StepOutcome(replies[0].version, stale, found_inf, replies[0].norm, taken, refused, leaves)
        for call in self._after_commit:
            call(end, outcome)
        return outcome

    def _applied_everywhere(self, step: int) -> bool:
        return sum(applied.step == step for applied in self._applied.values()) == len(self.servers)

    def _commit_for(self, server: Address, step: int, end: StepEnd) -> m.Commit:
        buckets, (low, number) = self.map.buckets_of(server.index), self._bucket_range(server)
        first = self._piece_base[buckets[0].id if buckets else 0]
        pieces = sum(len(bucket.pieces) for bucket in buckets)
        mask = (1 << pieces) - 1
        revisions = end.revisions[low : low + number] if end.revisions else (NO_REVISION,) * number
        return m.Commit(
            step=step,
            backwards=end.backwards,
            weight=end.weight,
            inv_scale=end.inv_scale,
            check_finite=end.check_finite,
            clip_norm=end.clip_norm,
            clip_type=end.clip_type,
            fetch=end.fetch,
            revisions=bytes(revisions),
            edited=int_to_bits(end.edited >> first & mask, pieces),
            dropped=int_to_bits(end.dropped >> first & mask, pieces),
            hyper=end.hyper,
            marks=end.marks,
            exits=self._exits,
            samples=end.samples,
        )

    def piece_bit(self, bucket: Bucket, piece: int) -> int:
        """The bit of a bucket's piece in a bitmap over all pieces."""
        return 1 << (self._piece_base[bucket.id] + piece)

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self, steps: int) -> None:
        """The script ended."""
        self.settle()
        for server in self.servers:
            self._send(server, m.Finish(steps))
        self._leaving = self.me.index != 0 or self.me.group != 0

    def final_values(self) -> None:
        """Worker (0,0): wait for the master view after the drain, also of what others hold; it lands in "params"."""
        self._fetches += 1
        self._awaited = len(self.map.buckets)
        with self.receive_values(-1 - self._fetches):
            for server in self.servers:
                self._send(server, m.FinalRequest(-1 - self._fetches))
        self._awaited = self._count

    @property
    def failure(self) -> Exception | None:
        """What this worker was told or saw first that ends the job."""
        return self._failure

    def hear_out(self, late: Callable[[], bool]) -> str:
        """Why the job cannot go on: what a server knows to be the cause, else what was heard first; "": nothing was.

        Waits for the former until it is `late`, or nobody is left who could tell it.
        """
        tellers = {*self.servers, self.desk}
        self._waiter.wait(lambda: any(told.cause for told in self._reasons) or self._gone >= tellers or late())
        known = [told for told in self._reasons if told.cause]
        return next((told.text for told in (*known, *self._reasons)), "")

    def give_up(self, text: str, cause: bool = True) -> None:
        """Tell the servers that this worker cannot go on, and why; cause: as in `message.Fail`."""
        for server in self.servers:
            self.mention(server, m.Fail(text, cause=cause))
        self.leave()

    def leave(self) -> None:
        """From here on, connections may end."""
        self._leaving = True
