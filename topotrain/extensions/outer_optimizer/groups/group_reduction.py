"""Gradients that the workers of a group add up among themselves.

The group shares one replica, and its servers may be far away. So no gradient of a local step goes to a server. Each
worker adds up the parts of a share of the buckets, in the canonical order of the group (`Topology.sum_tree`), and sends
the means to the others. These are the bits that a server would have made of the same parts.

All workers of a group take the same decisions between two rounds, since each end of a backward carries what they depend
on: the samples of the step, and whether new values have arrived.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from topotrain.config.job import Job, Reduce
from topotrain.config.sharding import Bucket, SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client import Client
from topotrain.core.client.client_context import JobError, PeerLost
from topotrain.core.client.client_extension import ClientHooks
from topotrain.core.client.group_channel import GroupChannel
from topotrain.core.client.step_exchange import GradientExchange, Means
from topotrain.core.client.value_pull import ValuePull
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import FlatBuffers, typed
from topotrain.core.protocol import bits_to_int, check_bits, int_to_bits
from topotrain.core.server.gradients.backward_means import ReturnedMeans
from topotrain.core.server.gradients.gradient_source import (
    CHANGED_ALIKE,
    MUST_AGREE,
    SAME_BATCHES,
    GroupBuffers,
    ReducedBucket,
    SourceSettings,
    ended_first,
)
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.outer_optimizer.groups.group_messages import (
    PeerBackwardEnd,
    PeerGradient,
    PeerHello,
    PeerMean,
    PeerPause,
)
from topotrain.extensions.outer_optimizer.round_client import RoundClient
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN
from topotrain.training.worker_stats import StepBatches


def shares_of(sizes: Sequence[int], workers: int) -> tuple[int, ...]:
    """Return the worker of each bucket, so that all have about as many bytes.

    The buckets of a worker are consecutive.
    """
    total, before, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        # By the middle of the bucket.
        found.append(min(workers - 1, (2 * before + size) * workers // (2 * total)))
        before += size
    return tuple(found)


def bucket_bytes(slice_map: SliceMap, bucket: Bucket) -> int:
    """The bytes of a bucket."""
    return (bucket.hi - bucket.lo) * slice_map.spaces[bucket.space].itemsize


class PeerChannel(GroupChannel):
    """Gives the messages of the other workers of the group to the reduction.

    Args:
        client: the worker's client.
        sender: sends the worker's messages. It never waits.
        reduction: the worker's part in the sums.
    """

    messages = (PeerHello, PeerGradient, PeerBackwardEnd, PeerMean, PeerPause)
    purpose = "cluster.nworkers_per_group"

    def __init__(self, client: Client, sender: MessageSender, reduction: "GroupReduction") -> None:
        super().__init__(client.channel, sender)
        self._reduction = reduction
        reduction.meet(client, self)
        client.attach(self)

    @property
    def hello(self) -> m.Message:
        return PeerHello()

    def post(self, to: int, message: m.Message) -> None:
        """Send a message without waiting."""
        # A lost worker is noticed by its connection, also while this one waits.
        with suppress(PeerLost):
            self._post(to, message)

    def lost_of(self, workers: Iterable[int]) -> bool:
        """Whether one of these workers is gone."""
        return self._any_left(tuple(workers))

    def refuse_lost(self, workers: Iterable[int]) -> None:
        """Raise PeerLost if one of these workers is gone."""
        self._check(tuple(workers))

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        if isinstance(message, PeerGradient | PeerMean):
            return self._reduction.landing(sender, message)
        return None

    def handle(self, sender: Address, message: m.Message) -> None:
        if isinstance(message, PeerHello):
            self._connected.add(sender.index)
        elif isinstance(message, PeerGradient):
            self._reduction.take_gradient(sender, message)
        elif isinstance(message, PeerBackwardEnd):
            self._reduction.take_end(sender, message)
        elif isinstance(message, PeerMean):
            self._reduction.take_mean(sender, message)
        elif isinstance(message, PeerPause):
            self._reduction.take_pause(sender, message)


class GroupReduction(GradientExchange):
    """One worker's part in the sums of its group.

    Args:
        me: the worker.
        job, topology: as the worker's.
    """

    def __init__(self, me: Address, job: Job, topology: Topology) -> None:
        self._me, self._divide = me, job.reduce is Reduce.kMean
        self._workers, self._tree = topology.workers(me.group), topology.sum_tree(me.group)
        self._others = tuple(worker.index for worker in self._workers if worker != me)
        self._backward = 0  # the number of this worker's next backward, or of the one that is under way
        self._ends: dict[int, dict[int, PeerBackwardEnd]] = {}  # by backward and worker
        self._means: Means = {}  # of the backward that is under way
        self._here = 0  # a bit for each of them
        self._early: list[tuple[Address, PeerGradient | PeerBackwardEnd]] = []
        self._pauses: dict[int, PeerPause] = {}  # the last one of each worker
        self._over = False  # this worker's script has ended
        self.samples = 0
        """Samples of the group in the step that is under way, at its last backward."""
        self.settled = False
        """Whether the new values of the last push had arrived at all workers by then."""
        self.named, self.interval = OWN_TURN, job.cluster.sync_freq // job.cluster.fragments
        """The fragment that the coordinator has named, and the steps between two pushes: as worker 0 knew them then."""
        self._proposed = self.interval
        self.digest = 0
        """As `Commit.digest`, of the last step."""

    def open(self, slice_map: SliceMap, flats: FlatBuffers, batches: StepBatches) -> None:
        """The worker is made of these."""
        self._map, self._flats, self._batches = slice_map, flats, batches
        self._buckets = slice_map.buckets
        sizes = [bucket_bytes(slice_map, bucket) for bucket in self._buckets]
        self._adder = shares_of(sizes, len(self._workers))
        mine = tuple(bucket for bucket in self._buckets if self._adder[bucket.id] == self._me.index)
        self._first = mine[0].id if mine else 0
        self._count = len(mine)
        # A source of the servers, which takes each backward for a step of its own: no sum over backwards is kept.
        buffers = GroupBuffers(flats, self._me.group)
        settings = SourceSettings(len(self._workers), self._tree, mine, buffers, visible=True, divide=self._divide)
        self._source = ReturnedMeans(settings)

    def pushed_share(self) -> frozenset[int]:
        """The buckets of each fragment that this worker pushes for its group."""
        found: set[int] = set()
        for fragment in {space.optimizer for space in self._map.spaces}:
            buckets = [each for each in self._buckets if self._map.spaces[each.space].optimizer == fragment]
            pushers = shares_of([bucket_bytes(self._map, bucket) for bucket in buckets], len(self._workers))
            found |= {bucket.id for bucket, by in zip(buckets, pushers, strict=True) if by == self._me.index}
        return frozenset(found)

    def meet(self, client: Client, peers: PeerChannel) -> None:
        """Use this client, and this way to the other workers."""
        # A pull of its own, of which no values are awaited: gradients overwrite nothing that servers still read.
        self.bind(client.channel, client.model, ValuePull(client.channel, client.model), ClientHooks())
        self._steps, self._rounds, self._peers = client.steps, client.extension(RoundClient), peers

    # --- a backward of this worker ---------------------------------------------------------------------------------

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
        """Give a bucket's local gradient to the worker that adds it up."""
        bits = int_to_bits(present, len(bucket.pieces))
        message = PeerGradient(self._backward, bucket.id, weight, bits, body=body)
        with self.channel.spans.span("push", step=step + 1, ordinal=ordinal, bucket=bucket.id):
            if self._adder[bucket.id] != self._me.index:
                self._peers.post(self._adder[bucket.id], message)
                return
            with self.channel.waiter.update():
                self.take_gradient(self._me, message)

    def end_backward(self, step: int, ordinal: int, weight: float, pushed: int, absent: bool = False) -> None:
        """As `GradientExchange.end_backward`. step: the number of local steps."""
        bits = int_to_bits(pushed, len(self._buckets))
        settled, samples = self._steps.is_over(), self._batches.unused
        named, batches = self._rounds.named, len(self._batches)
        message = PeerBackwardEnd(
            self._backward, step, weight, bits, samples, settled, named, self._proposed, batches, self.digest
        )
        self._post_all(message)
        with self.channel.waiter.update():
            self.take_end(self._me, message)

    def wait_means(self) -> tuple[Means, int]:
        """As `GradientExchange.wait_means`.

        Raises:
            JobError: the workers of the group do not run the same backwards.
            PeerLost: a worker is gone.
        """
        with self.channel.spans.span("wait for means"):
            self.channel.wait_until(
                lambda: self._is_over() or bool(self._refusal()) or self._peers.lost_of(self._missing())
            )
        with self.channel.waiter.update():
            refusal = self._refusal()
            if refusal:
                raise JobError(refusal, config=False)
            if not self._is_over():
                self._peers.refuse_lost(self._missing())
            ends = self._ends.pop(self._backward)
            means, self._means, self._here = self._means, {}, 0
            self._backward += 1
        self.samples = sum(end.samples for end in ends.values())
        self.settled = all(end.settled for end in ends.values())
        # What one worker knows is enough. What another knows it may have learned a step later.
        self.named, self.interval = ends[0].named, ends[0].interval
        return means, 0

    def _is_over(self) -> bool:
        ends = self._ends.get(self._backward, {})
        return len(ends) == len(self._workers) and not _pushed(ends.values()) & ~self._here

    def _missing(self) -> set[int]:
        """The workers of which something is awaited."""
        ends = self._ends.get(self._backward, {})
        awaited = _pushed(ends.values()) & ~self._here
        found = {index for index in self._others if index not in ends}
        return found | {self._adder[bucket.id] for bucket in self._buckets if awaited >> bucket.id & 1}

    def _refusal(self) -> str:
        """Why this backward has no end; "" if it may have one."""
        ends = self._ends.get(self._backward, {})
        mine = ends.get(self._me.index)
        if mine is None:
            return ""
        same = "all workers of a group must run the same backwards (or make one private: `with tt.local():`)"
        for worker, end in ends.items():
            if end.step != mine.step:
                return (
                    f"unequal numbers of backwards in one step: worker {self._me.index} of the group makes backward "
                    f"{self._backward + 1} in its step {mine.step + 1}, and worker {worker} in its step "
                    f"{end.step + 1}; {same}"
                )
            pair = f"workers {self._me.index} and {worker} of a group"
            if end.batches != mine.batches:
                return f"{pair} take different batches into step {mine.step + 1}: {SAME_BATCHES}"
            if end.digest != mine.digest:
                return f"{pair} disagree about {MUST_AGREE['digest']} in step {mine.step}: {CHANGED_ALIKE}"
        for worker, pause in self._pauses.items():
            if pause.backwards > self._backward or not (pause.over or pause.steps > mine.step):
                continue
            if pause.over:
                return ended_first(worker, pause.steps)
            return (
                f"unequal numbers of backwards in one step: worker {worker} of the group made {pause.steps} steps with "
                f"{pause.backwards} backwards, and worker {self._me.index} is in backward {self._backward + 1} of its "
                f"step {mine.step + 1}; {same}"
            )
        return ""

    # --- steps -----------------------------------------------------------------------------------------------------

    def propose(self, interval: int) -> None:
        """Tell the group with the next backward how many steps are between two pushes."""
        self._proposed = interval

    def step_over(self) -> None:
        """The local step is made."""
        self.samples, self.settled = 0, False

    def pause(self, steps: int, over: bool = False) -> None:
        """This worker makes no backward before a round is over, or none any more.

        steps: those that it has made.
        """
        self._over = self._over or over
        self._post_all(PeerPause(self._backward, steps, self._over))
        # What had arrived by then is of an earlier push.
        self.settled, self.named = False, OWN_TURN

    def _post_all(self, message: m.Message) -> None:
        for other in self._others:
            self._peers.post(other, message)

    # --- messages, under the waiter --------------------------------------------------------------------------------

    def landing(self, sender: Address, message: PeerGradient | PeerMean) -> torch.Tensor:
        """Where a gradient or a mean is to be received."""
        if isinstance(message, PeerMean):
            return self._flats.view("mean", self._bucket(sender, message.bucket, sender.index))
        # Of each sender apart: they are added in order when all are here.
        return self._flats.view(f"part {sender.index}", self._bucket(sender, message.bucket, self._me.index))

    def _bucket(self, sender: Address, number: int, adder: int) -> Bucket:
        """A bucket that this worker adds up. Raises ProtocolError for another one."""
        if number >= len(self._buckets) or self._adder[number] != adder:
            raise m.ProtocolError(f"{sender} sends bucket {number}, which worker {adder} does not add up")
        return self._buckets[number]

    def take_gradient(self, sender: Address, message: PeerGradient) -> None:
        """A worker's part of a bucket. Raises ProtocolError."""
        bucket = self._bucket(sender, message.bucket, self._me.index)
        check_bits(message.present, len(bucket.pieces), sender, f"the pieces of bucket {bucket.id}")
        self._take(sender, message)

    def take_end(self, sender: Address, message: PeerBackwardEnd) -> None:
        """A worker has ended a backward. Raises ProtocolError."""
        check_bits(message.pushed, len(self._buckets), sender, "the buckets of a backward")
        if not self._backward <= message.backward <= self._backward + 1:
            raise m.ProtocolError(f"{sender} ends backward {message.backward}, the group is in {self._backward}")
        self._ends.setdefault(message.backward, {}).setdefault(sender.index, message)
        self._take(sender, message)

    def _take(self, sender: Address, message: PeerGradient | PeerBackwardEnd) -> None:
        """Add a message to the sums, now or when the backward before it is over."""
        present = self._source.step
        if message.backward == present + 1 and len(self._early) <= len(self._workers) * (self._count + 1):
            # The sender has all means and ends of the present backward, of which some are still on their way here.
            self._early.append((sender, message))
            return
        if message.backward != present:
            raise m.ProtocolError(f"{sender} is in backward {message.backward}, the group in {present}")
        self._feed(sender, message)
        while self._source.closed(0) is not None:
            self._source.next_step()
            early, self._early = self._early, []
            for worker, each in early:
                self._feed(worker, each)

    def _feed(self, sender: Address, message: PeerGradient | PeerBackwardEnd) -> None:
        if isinstance(message, PeerGradient):
            like = self._flats.view("local", self._buckets[message.bucket])
            push = m.Push(message.backward, 0, message.bucket, message.weight, message.present)
            self._send_means(self._source.push(sender.index, push, typed(present_body(message), like)))
        else:
            # The bits of the buckets that this worker adds up.
            bits = bits_to_int(message.pushed) >> self._first & (1 << self._count) - 1
            end = m.BackwardEnd(message.backward, 0, message.weight, int_to_bits(bits, self._count))
            self._send_means(self._source.end(sender.index, end))

    def _send_means(self, reduced: Iterable[ReducedBucket]) -> None:
        for each in reduced:
            assert each.mean is not None
            self._note_mean(each.bucket, each.present, each.mean)
            bits = int_to_bits(each.present, len(self._buckets[each.bucket].pieces))
            self._post_all(PeerMean(self._source.step, each.bucket, bits, body=each.mean))

    def take_mean(self, sender: Address, message: PeerMean) -> None:
        """Another worker has added up a bucket. Raises ProtocolError."""
        bucket = self._bucket(sender, message.bucket, sender.index)
        check_bits(message.present, len(bucket.pieces), sender, f"the pieces of bucket {bucket.id}")
        if message.backward != self._backward:
            raise m.ProtocolError(f"{sender} sends a mean of backward {message.backward}, not of {self._backward}")
        like = self._flats.view("mean", bucket)
        self._note_mean(bucket.id, bits_to_int(message.present), typed(present_body(message), like))

    def _note_mean(self, bucket: int, present: int, mean: torch.Tensor) -> None:
        self._means[bucket] = (present, mean)
        self._here |= 1 << bucket

    def take_pause(self, sender: Address, message: PeerPause) -> None:
        """A worker makes no backward before a round is over."""
        self._pauses[sender.index] = message


def _pushed(ends: Iterable[PeerBackwardEnd]) -> int:
    """Return the buckets of which some worker has a gradient, a bit for each."""
    found = 0
    for end in ends:
        found |= bits_to_int(end.pushed)
    return found
