"""A home: message in -> messages out.

One `Server` is one shard of one server group. It keeps the values and the optimizer state of its slice, stages what
the worker groups send, and is the one place where a parameter changes its value. It knows no socket, thread or clock:
the host hands it messages (one at a time) and carries its answers, and a simulation does the same with a pretended
network. What differs between the frameworks is decided elsewhere: whom a gradient waits for in `gradients` and
`consistency`, how server groups agree in `group_sync`, the arithmetic of an update in `update`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from topotrain.config.async_momentum import explanation, momentum_in
from topotrain.config.job import ConfigError, Job, Pull
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.bitmaps import int_to_bits
from topotrain.core.model import shared_windows
from topotrain.core.model.schema import Allocate, FlatBuffers, parse_schema
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.profiling.message_spans import handling
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol.message_validation import MessageValidator, check_bits
from topotrain.core.server.commit_agreement import StepError
from topotrain.core.server.component_state import Component, State, load_states, states_of
from topotrain.core.server.consistency import (
    AWAY,
    IS_BACK,
    REPLACED,
    RESTARTS,
    RESTS,
    SNAPSHOT,
    AppliedBatches,
    ApplyOrder,
    Clocks,
    DecisionLog,
    LoopExits,
    pairs,
)
from topotrain.core.server.gradients.gradient_source import GradientSource, ReducedBucket
from topotrain.core.server.group_sync import Distance
from topotrain.core.server.nonfinite import NOBODY, NonfiniteLimit, complaint
from topotrain.core.server.parameter_shard import ParameterShard, global_norm, step_factor
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.sample_counts import SampleCounts
from topotrain.core.server.server_extension import ExtensionHooks, Outbox, ServerExtension, StepResult
from topotrain.core.server.shutdown import Shutdown
from topotrain.core.server.startup import Startup
from topotrain.core.server.step_policy import ALL_WORKERS, StepPolicy, makes_partial_steps
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots, WorkerStates, takes_snapshots, unread
from topotrain.extensions.checkpointing.shard_snapshot import SnapshotParticipant, SnapshotSource, restore
from topotrain.extensions.checkpointing.snapshot_coordinator import CUT
from topotrain.extensions.checkpointing.snapshot_messages import Remainder, SnapshotPart, SnapshotRequest
from topotrain.extensions.elastic.membership import ElasticGroups
from topotrain.extensions.elastic.membership_messages import (
    AppliedBatchesOfStreams,
    GroupLeaveRequest,
    GroupLeft,
    RestartRequest,
)
from topotrain.training.data.data_messages import Lease

Out = list[tuple[Address, m.Message]]
Deliver = Callable[[Address, m.Message], None]

_MAX_HELD = 1 << 14


class Server:
    """One shard of one server group.

    Args:
        me: this server's address.
        job: the job.
        topology: its layout.
        allocate: allocate(numel, dtype) -> zeroed 1-D tensor for values and means, in memory that the road can show.
        shared: the roads show memory: what workers and servers of a host both need is there only once.
        deliver: told every answer as soon as there is one, so that it is on its way while the next is computed;
            without it, `handle` returns them all.
        resumed: the snapshot that the job goes on from, instead of the values that worker (0,0) gives.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        allocate: Allocate,
        shared: bool = False,
        deliver: Deliver | None = None,
        resumed: SnapshotSource | None = None,
    ) -> None:
        self.me = me
        self.spans: Recorder = SILENT
        self._job = job
        self._topology = topology
        self._allocate = allocate
        self.groups = topology.worker_groups_of(me.group)
        self._workers = {group: topology.workers(group) for group in self.groups}
        self._deliver = deliver
        self._opening = Startup(me, job, topology, allocate, shared, self.send)
        self.model: ParameterShard | None = None
        self._drawer: list[tuple[Address, m.Message]] = []
        self._initialised: set[int] = set()
        self._ready_groups: set[int] = set()
        self._common = False
        self._early: list[tuple[Address, m.Message]] = []
        self._ahead: list[tuple[Address, m.Message]] = []
        self._rested: dict[int, tuple[int, int]] = {}  # group -> its last rest that is over
        self.version = 0
        private = len(self.groups) == 1 and not topology.synced
        lazy = job.pull is Pull.kLazy
        self._partial = makes_partial_steps(job)
        self.readers = PullReplies(
            self.groups, topology.workers_per_group, private, self._opening.buffers, lazy, self._partial
        )
        self._hyper = dict.fromkeys(self.groups, b"")
        self._hyper_of: dict[Address, bytes] = {}
        self._exits = {group: LoopExits(topology.workers_per_group) for group in self.groups}
        self._applied: dict[int, m.Applied] = {}
        self._taken = dict.fromkeys(self.groups, 0)  # steps, of all incarnations of a group
        self._finished: dict[int, dict[int, int]] = {g: {} for g in self.groups}
        self._away: set[int] = set()  # groups that have left the job, and may come back
        self._parting: set[int] = set()  # groups that are to leave after their next step
        self._paused: set[int] = set()  # groups that, as was decided, nobody waits for until they are back
        self._returned: set[int] = set()  # groups that came back before all had the same start
        self.clocks = Clocks(self.groups, job.cluster.max_staleness)
        for group in self.groups:
            if group != 0 and job.warmup_steps:
                self.clocks.leave(group)
        self.log = DecisionLog(topology.shards) if me.index == 0 else None
        """Of the coordinator, shard 0."""
        self._order = ApplyOrder()
        first = 0 if resumed is None else unread(resumed)
        self._streams = AppliedBatches(first, takes_snapshots(job, topology))
        self._samples = SampleCounts(topology, me.group, {} if resumed is None else resumed.samples)
        self._strikes = NonfiniteLimit(job.nonfinite)
        self._ending = Shutdown(me, topology)
        self._regroup = ElasticGroups(me, job, topology, self, self.log, self.send)
        self._members = self._regroup.members
        self._resumed = resumed
        self.snapshots = ServerSnapshots(me, job, topology, resumed, self.send)
        self.manners = MessageValidator(me, topology, shared)
        self._good_hyper = b""
        self._out: Out = []
        self._inside: list[tuple[Address, m.Message]] = []
        self.attach(())

    def attach(self, extensions: Sequence[ServerExtension]) -> None:
        """Give the server its extensions, once, before its first message."""
        self.extensions = tuple(extensions)
        self.hooks = ExtensionHooks(self.extensions)
        self._handlers = {**_HANDLERS, **dict.fromkeys(self.hooks.handlers, Server._extension)}
        self._policy = next((each for each in self.extensions if isinstance(each, StepPolicy)), ALL_WORKERS)
        self.snapshots.add(tuple(each for each in self.extensions if isinstance(each, SnapshotParticipant)))

    # --- the door ------------------------------------------------------------------------------------------------

    def handle(self, sender: Address, message: m.Message) -> Out:
        """Take one message; returns what to send, in order (nothing where `deliver` has been told).

        Raises:
            ProtocolError: no correct peer says this, and it has changed nothing; what else there was to do is done.
        """
        self.manners.check(sender, message)
        self._out = []
        self._inside = []
        try:
            self._take(sender, message)
        finally:
            self._go_on()
        return self._out

    def _go_on(self) -> None:
        while self._inside:
            sender, message = self._inside.pop(0)
            try:
                self._take(sender, message)
            except m.ProtocolError as error:
                # It was held, and it is not the fault of whoever is being heard now.
                if sender == self.me:
                    raise RuntimeError(f"{self.me} contradicts itself: {error}") from error
                self.send(sender, m.Fail(f"{self.me} refuses what {sender} said: {error}"))

    def _take(self, sender: Address, message: m.Message) -> None:
        if self._members.changed and not self._is_heard(sender, message):
            return
        kind = type(message)
        if self.model is None and kind not in _BEFORE_MODEL and kind not in self.hooks.before_model:
            # Only a road that reorders lets anything overtake the model's description.
            self._hold(sender, message)
            return
        try:
            with handling(self.spans, sender, message):
                self._handler(message)(self, sender, message)
        except (StepError, ConfigError) as error:
            self._fail_group(sender.group, str(error))

    def _hold(self, sender: Address, message: m.Message) -> None:
        if len(self._drawer) >= _MAX_HELD:
            raise m.ProtocolError(f"{sender} says too much before {self.me} knows the model")
        self._drawer.append((sender, message))

    def _is_heard(self, sender: Address, message: m.Message) -> bool:
        return sender.role is Role.SERVER or isinstance(message, m.WorkerRejoined) or self._members.hears(sender)

    def _handler(self, message: m.Message) -> Callable[..., None]:
        return self._handlers.get(type(message), Server._extension)

    def send(self, to: Address, message: m.Message) -> None:
        """Send a message; one to this server itself is handled after the message in hand."""
        if self._members.changed and to.role is Role.WORKER and not self._members.hears(to):
            return
        if isinstance(message, Lease):  # also one that was given back by the dead
            self.snapshots.leased(message)
        if to == self.me:
            self._inside.append((to, message))
        elif self._deliver is not None:
            self._deliver(to, message)
        else:
            self._out.append((to, message))

    def _fail_group(self, group: int, text: str, quarantine: bool = False) -> None:
        for worker in self._workers.get(group, ()):
            self.send(worker, m.Fail(f"worker group {group}: {text}", quarantine=quarantine))

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where a body is to be received (see `wire.Endpoint.place`)."""
        self.manners.check(sender, message)
        extension = self.hooks.handlers.get(type(message))
        if extension is not None:
            return extension.place(sender, message, viewable)
        model = self.model
        if model is None:
            return None
        if isinstance(message, m.SharedBuffer):
            return None
        if isinstance(message, m.ModelBufferValue):
            return self._ending.buffer_place(message, model.schema)
        bucket = model.bucket(getattr(message, "bucket", -1))
        if isinstance(message, m.Init):
            return model.flats.view("unwanted" if message.bucket in self._initialised else "values", bucket)
        if isinstance(message, m.StatePart):
            piece = model.piece(message.bucket, message.piece)
            return model.flats.view("scratch", bucket)[piece.lo - bucket.lo : piece.hi - bucket.lo]
        if viewable:
            return None
        if (
            isinstance(message, m.Push | m.GradientOverride)
            and sender.role is Role.WORKER
            and sender.group in self.groups
        ):
            coded = model.codec.landing(sender, bucket) if isinstance(message, m.Push) else None
            return model.flats.view(f"push {sender.group}/{sender.index}", bucket) if coded is None else coded
        if isinstance(message, m.Delta | m.MasterValue | m.RingOffer | m.RingReply | Remainder | m.FinalValue):
            return model.flats.view(f"from {sender.group}", bucket)
        return None

    @property
    def _known(self) -> ParameterShard:
        assert self.model is not None
        return self.model

    # --- joining -------------------------------------------------------------------------------------------------

    def _schema_part(self, sender: Address, message: m.SchemaPart) -> None:
        schema = self._opening.part(sender, message)
        if schema is None:
            return
        if self._opening.describe(sender, schema):
            self._open(sender)
        text = self._opening.difference(sender, schema)
        if text:
            self.send(sender, m.Fail(f"the models of a job's workers must be the same: {text}", True))
        elif sender.role is Role.SERVER:
            self._ready_groups.add(sender.group)
            self._share()
            self._release()
        else:
            self._opening.show(sender)

    def _window(self, sender: Address, message: m.SharedBuffer) -> None:
        if sender.role is Role.SERVER:
            self._opening.window(message)
            self._open(sender)
            return
        if self.model is None:
            self._hold(sender, message)
            return
        if message.name != "grad":
            raise m.ProtocolError(f"a window {message.name!r} from {sender}")
        flat = shared_windows.seen(message, self._known.map, self.me.index)
        self._known.flats.put(f"{message.name} {sender.index} {sender.group}", message.space, flat)

    def _open(self, sender: Address) -> None:
        """Make the model once its description, and the memory that it lives in, are here."""
        if self.model is not None or not self._opening.complete:
            return
        try:
            self.model = self._opening.open(self.hooks)
        except (ValueError, TypeError, ImportError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
            self.send(sender, m.Fail(f"{self.me} cannot build the optimizer: {error}", True))
            return
        if self._resumed is not None and not self._resume(self.model, self._resumed, sender):
            self.model = None
            return
        schema = self.model.schema
        self._ending.expect_buffers(len(schema.buffers))
        for part in schema.parts() if self.me.group != 0 else ():
            self.send(Address(Role.SERVER, 0, self.me.index), part)
        self._inside.extend(self._drawer)
        self._drawer = []
        if self.complete():
            self._all_values_here()

    def _resume(self, model: ParameterShard, source: SnapshotSource, sender: Address) -> bool:
        """Take values and state from the snapshot; False if it is none of this model, which the sender is told."""
        try:
            restore(model, source, self.me.index)
        except ConfigError as error:
            self.send(sender, m.Fail(str(error), True))
            return False
        if self.me.group == 0:
            self._initialised = {bucket.id for bucket in model.buckets}
        # Others wait for the values of group 0, as at any start: these come when every group is there to be spoken to.
        self.version = source.version
        self.clocks.go_on(self._clocks_of(source))
        return True

    def _clocks_of(self, source: SnapshotSource) -> Mapping[int, int]:
        """Those of our groups, where they were groups of that job, too."""
        ours = {group: clock for group, clock in source.clocks.items() if group in self.groups}
        return ours if ours.keys() == set(self.groups) else source.clocks

    def _fail(self, sender: Address, message: m.Fail) -> None:
        """Server group 0 refuses this group's model."""
        for group in self.groups:
            for worker in self._workers[group]:
                self.send(worker, message)

    def _init(self, sender: Address, message: m.Init) -> None:
        if message.bucket in self._initialised:
            return  # said twice; the group may be warming up already
        target = self._known.values(message.bucket)
        body = self._known.body(message)
        if body.data_ptr() != target.data_ptr():
            target.copy_(body)
        self._initialised.add(message.bucket)
        if len(self._initialised) == len(self._known.buckets):
            self._all_values_here()

    def _all_values_here(self) -> None:
        if self.me.group == 0:
            self._share()
        else:
            self._common_start()
        self._release()

    def _share(self) -> None:
        """Give every group the same start: at once, or after group 0's warm-up (`warmup_steps`)."""
        others = range(1, self._topology.server_groups)
        if self._common or self.me.group != 0 or not self.complete() or self._ready_groups != set(others):
            return
        if self.clocks.clock(0) < self._job.warmup_steps and self._runs(0):
            return
        for group in others:
            for bucket in self._known.buckets:
                body = self._known.values(bucket.id).clone()
                self.send(Address(Role.SERVER, group, self.me.index), m.Init(bucket.id, body=body))
        self._common_start()

    def _common_start(self) -> None:
        self._common = True
        self.clocks.set_all(self._job.warmup_steps)
        if self._resumed is not None:
            self.clocks.go_on(self._clocks_of(self._resumed))
        for group in self.groups:
            if self._runs(group) and group not in self._paused:  # shards come to this between different decisions
                self.clocks.join(group)
        for group in sorted(self._returned):
            self._rejoin(group)
        self._known.agreement.begin()
        self._inside += self._early
        self._early = []

    def _runs(self, group: int) -> bool:
        return group not in self._away and not self.ended(group)

    # --- values --------------------------------------------------------------------------------------------------

    def _fetch(self, sender: Address, message: m.Fetch) -> None:
        self.readers.fetch(sender, message, self._known.staging[sender.group].step)
        self._release()

    def _may_read(self, group: int) -> bool:
        if not self._common:
            warming = group == 0 and self.me.group == 0 and self.clocks.clock(0) < self._job.warmup_steps
            return warming and len(self._initialised) == len(self._known.buckets)
        if self._job.cluster.max_staleness == 0 and not self.readers.asked.issuperset(self.clocks.live()):
            return False  # a barrier from the start: nobody's first update may come before somebody's first read
        return self.clocks.may_start(group)

    def _release(self) -> None:
        """Answer the held replies whose time has come."""
        if self.model is not None:
            for worker, reply in self.readers.release(self.model, self.version, self._may_read):
                self._send_reply(worker, reply)

    def _send_reply(self, worker: Address, reply: m.Message) -> None:
        if self.hooks.route_values is not None and isinstance(reply, m.Values):
            self._send_all(self.hooks.route_values.route_values(worker, reply))
        else:
            self.send(worker, reply)

    # --- a step --------------------------------------------------------------------------------------------------

    def _push(self, sender: Address, message: m.Push) -> None:
        staging = self.current_source(sender, message.step)
        if staging is not None:
            bucket = self._known.bucket(message.bucket)
            check_bits(message.present, len(bucket.pieces), f"{sender}: the pieces of bucket {bucket.id}")
            body = self._known.codec.push(sender, message, bucket, self._known.values(message.bucket))
            self._tell_means(sender.group, message.ordinal, staging.push(sender.index, message, body))

    def _backward_end(self, sender: Address, message: m.BackwardEnd) -> None:
        self._known.staging[sender.group].check(sender, message)
        staging = self.current_source(sender, message.step)
        if staging is not None:
            self._check_together(sender, message)
            self._tell_means(sender.group, message.ordinal, staging.end(sender.index, message))
            if staging.waits:
                self._check_nobody_left(sender.group)
            for extension in self.hooks.backward_ended:
                self._send_all(extension.backward_ended(sender, message))

    def _tell_means(self, group: int, ordinal: int, ready: Iterable[ReducedBucket]) -> None:
        staging = self._known.staging[group]
        for reduced in ready:
            if self._known.on_arrival:
                self.update_on_arrival(group, reduced)
                continue
            if reduced.mean is None:
                continue
            bucket = self._known.bucket(reduced.bucket)
            present = int_to_bits(reduced.present, len(bucket.pieces))
            body = self._known.codec.mean_body(group, bucket, reduced.mean)
            mean = m.ReducedGradient(staging.step, ordinal, reduced.bucket, present, body=body)
            for worker in self._workers[group]:
                self.send(worker, mean)
        closed = staging.closed(ordinal)
        if closed is not None and not self._known.on_arrival:
            bits = int_to_bits(closed[0], len(self._known.buckets))
            written = int_to_bits(closed[1], sum(len(bucket.pieces) for bucket in self._known.buckets))
            for worker in self._workers[group]:
                self.send(worker, m.BackwardReduced(staging.step, ordinal, bits, written if closed[1] else b""))
        self.try_stage(group)

    def _rates(self, sender: Address, message: m.StepRates) -> None:
        self._check_hyper(message.hyper)
        self._hyper_of[sender] = self._hyper[sender.group] = message.hyper

    def update_on_arrival(self, group: int, reduced: ReducedBucket) -> None:
        """Apply a mean that is there (`apply: kOnArrival`). Workers that wait for no other group get the values."""
        bucket = self._known.bucket(reduced.bucket)
        with self.spans.span("apply", group=group, bucket=bucket.id):
            self._known.update_now(reduced, self._hyper[group])
        self._show_early(group, bucket, self.version, True)

    def _show_early(self, group: int, bucket: Bucket, version: int, wanted: bool) -> None:
        """A bucket is new: who waits for it, and for no other group, has it before the next one is computed."""
        if wanted and self._common and self._job.cluster.max_staleness is None and not self._partial:
            step = self._known.staging[group].step
            for worker, values in self.readers.stream(self._known, group, bucket, step, version):
                self._send_reply(worker, values)

    def _left_early(self, sender: Address, message: m.LoopExited) -> None:
        self._exits[sender.group].left(sender.index, message.exits, (message.step, float(message.backwards)))

    def _check_together(self, sender: Address, message: m.BackwardEnd | m.Commit) -> None:
        backward = message.ordinal if isinstance(message, m.BackwardEnd) else float("inf")
        self._exits[sender.group].works(sender.index, message.exits, (message.step, backward))

    def _edit(self, sender: Address, message: m.GradientOverride) -> None:
        staging = self.current_source(sender, message.step)
        if staging is not None:
            staging.edit(message, self._known.body(message))
            self.try_stage(sender.group)

    def _commit(self, sender: Address, message: m.Commit) -> None:
        staging = self._known.staging[sender.group]
        if not self._policy.accepts_commit(sender, message, staging.step):
            return
        if message.step == staging.step - 1 and sender.group in self._applied:
            self.readers.repeat(sender, self._applied[sender.group], message.fetch)
            self._release()
            return
        if self.current_source(sender, message.step) is None:
            return
        self._check_commit(sender, message)
        if not self._partial:
            self._check_nobody_left(sender.group)
            self._check_together(sender, message)
        # A worker says its hyper-parameters when they have changed; the group must agree about all of them.
        hyper = message.hyper or self._hyper_of.get(sender, b"")
        self._hyper_of[sender] = self._hyper[sender.group] = hyper
        staging.commit(sender.index, replace(message, hyper=hyper))
        self.try_stage(sender.group)
        for extension in self.hooks.committed:
            self._send_all(extension.committed(sender, message))

    def _check_commit(self, sender: Address, message: m.Commit) -> None:
        known, where = self._known, f"{sender}: the commit of step {message.step}"
        for bits in (message.edited, message.dropped):
            check_bits(bits, known.pieces, where)
        known.staging[sender.group].check(sender, message)
        if message.samples < 0:
            raise m.ProtocolError(f"{where}: {message.samples} samples")
        self._check_hyper(message.hyper)

    def _check_hyper(self, hyper: bytes) -> None:
        """Before any value changes: raises StepError for settings that the optimizer could not go on with."""
        if not hyper or hyper == self._good_hyper:
            return
        try:
            self._known.hyper.check(hyper)
        except ConfigError as error:
            raise StepError(str(error)) from error
        self._good_hyper = hyper

    def current_source(self, sender: Address, step: int) -> GradientSource | None:
        """The gradient source of a worker's group, if a message is of its current step; None: the step is over.

        Raises:
            StepError: the worker is in a later step than its group.
        """
        staging = self._known.staging[sender.group]
        if step > staging.step:
            raise StepError(f"worker {sender.index} is in step {step}, the group in step {staging.step}")
        return staging if step == staging.step else None

    def try_stage(self, group: int) -> None:
        """Send a vote if the step of a group has all that it needs on this shard."""
        staging = self._known.staging[group]
        if self._may_stage(group, staging.step) and staging.try_stage():
            self.send(self._coordinator, self._vote(group))

    def _may_stage(self, group: int, step: int) -> bool:
        gates = self.hooks.may_stage
        return not gates or all(extension.may_stage(group, step) for extension in gates)

    def _vote(self, group: int) -> m.StepVote:
        vote = self._known.vote(group, self._order.next, self._members.incarnation(group))
        for extension in () if vote.members else self.hooks.amend_vote:
            vote = extension.amend_vote(vote, self._known.staging[group].commits)
        return vote

    @property
    def _coordinator(self) -> Address:
        return Address(Role.SERVER, self.me.group, 0)

    # --- the decision --------------------------------------------------------------------------------------------

    def _staged(self, sender: Address, message: m.StepVote) -> None:
        assert self.log is not None
        self._check_refused(message)
        if any(not 0 <= index < self._topology.workers_per_group for index in message.members):
            raise m.ProtocolError(f"step {message.step} of group {message.group}: no such workers: {message.members}")
        self.log.staged(sender.index, message)
        self.decide()

    def decide(self) -> None:
        """On the coordinator: decide every step that is ready."""
        if self.log is None:
            return
        for group, step in self.log.ready(self._policy):
            if self.clocks.may_decide(group):
                self._snapshot_before(group)
                self.tell_shards(self.log.decide(group, step))

    def _ask_apply(self, sender: Address, message: m.StepDecisionRequest) -> None:
        assert self.log is not None
        for decision in self.log.since(message.index):
            self.send(sender, decision)

    def _apply(self, sender: Address, message: m.StepDecision) -> None:
        for decision in self._order.arrive(message):
            try:
                self._carry_out(decision)
            except (StepError, ConfigError) as error:
                self._fail_group(decision.group, str(error))
        self._share()
        self.decide()
        self._release()

    def _carry_out(self, decision: m.StepDecision) -> None:
        if decision.change:
            self._change(decision)
            return
        group, step = decision.group, decision.step
        if self.model is None:
            raise m.ProtocolError(f"a decision about step {step} of group {group} before there is a model")
        staging = self.model.staging[group]
        self._policy.choose(staging, decision)
        if self._partial:
            self._hyper[group] = staging.first.hyper
        refused = dict(self._check_refused(decision))
        skipped = decision.found_inf or (bool(refused) and not self.model.refuse(group, refused.keys()))
        commit, marks = staging.first, staging.marks
        staleness = self.version - self.readers.pulled[group]
        norm = global_norm(decision.power, commit)
        try:
            new = self._streams.verdict(marks, group) == "new"
        except ValueError as error:
            raise StepError(str(error)) from error
        if new:
            self._streams.record(marks, group)
            self._streams.close(self.snapshots.closed)
            if not skipped:
                self._samples.applied(group, staging.commits, refused.keys())
                for bucket in self._known.apply(group, self._hyper[group], commit, norm, staleness):
                    self._show_early(group, bucket, self.version + 1, commit.fetch)
                for extension in self.hooks.apply_step:
                    factor = step_factor(commit, norm)
                    self._send_all(extension.apply_step(group, staging.step, staging.commits, factor))
                self.version += 1
                if self._common:
                    self._meet(self._known.agreement.updated(self._known.touched(group)))
        self._known.codec.step_done(group, new and not skipped, commit.inv_scale)
        snapshot = self.snapshots.step(group, max(commit.marks[::3], default=0) >> 32)
        leaves = group in self._parting
        done = (staging.step, self.version, staleness, skipped, norm, snapshot, decision.refused, leaves)
        self._applied[group] = applied = m.Applied(*done)
        for worker in self._workers[group]:
            if worker.index in staging.commits:
                self.readers.reply(worker, applied, staging.commits[worker.index].fetch)
        result = StepResult(group, staging.step, staging.commits, applied)
        for extension in self.hooks.step_over:
            self._send_all(extension.step_over(result))
        staging.next_step()
        self.clocks.tick(group)
        self._taken[group] += 1
        self._freeze()
        number = self._strikes.step(group, refused)
        if number is not None:
            who = "" if number == NOBODY else str(self._workers[group][number])
            words = complaint(
                who, self._known.parameter(refused[number]), step + 1, self._strikes.most, self._why(group)
            )
            self._fail_group(group, words, self._strikes.quarantine)

    def _why(self, group: int) -> str:
        """What groups that do not wait for each other may have to do with a gradient that is not finite."""
        name = OptimizerSpec.from_text(self._known.schema.optimizer).name
        return explanation(self._topology, momentum_in(name, self._hyper[group]))

    def _check_refused(self, message: m.StepVote | m.StepDecision) -> list[tuple[int, int]]:
        """Raises ProtocolError for workers that the group does not have, and parameters that the model has not."""
        numbers = message.refused
        workers, parameters = self._topology.workers_per_group, len(self._known.schema.parameters)
        if len(numbers) % 2 or any(not NOBODY <= n < workers for n in numbers[::2]):
            raise m.ProtocolError(f"step {message.step} of group {message.group}: no such workers: {numbers[::2]}")
        if any(not -1 <= n < parameters for n in numbers[1::2]):
            raise m.ProtocolError(f"step {message.step} of group {message.group}: no such parameters: {numbers[1::2]}")
        return pairs(numbers)

    def ask(self) -> Out:
        """After a connection was made anew: say again what is staged and undecided, and ask what was decided."""
        self._out = []
        self._regroup.again()
        if self.model is not None:
            for group, staging in self.model.staging.items():
                if staging.staged or staging.members:
                    self.send(self._coordinator, self._vote(group))
        self.send(self._coordinator, m.StepDecisionRequest(self._order.next))
        self._go_on()
        return self._out

    def _rest(self, sender: Address, message: m.GroupIdle) -> None:
        group, wait = sender.group, (message.epoch, message.ordinal)
        over = wait <= self._rested.get(group, (-1, -1))
        live = group in self.clocks.live()
        if message.resting:
            if live and not over:
                self.decree(group, 0, RESTS)
            return
        if not over:
            self._rested[group] = wait
            if not live and self._runs(group):
                self.decree(group, self.clocks.entry(group), IS_BACK)
        self.send(sender, message)

    def decree(self, group: int, clock: int, change: int, members: tuple[int, ...] = ()) -> None:
        """On the coordinator: have all shards carry out a change between the same two steps."""
        if self.log is not None:
            self.tell_shards(self.log.decree(group, clock, change, members))

    def tell_shards(self, decision: m.StepDecision) -> None:
        """Send a decision to all shards of this server group."""
        for server in self._topology.servers(self.me.group):
            self.send(server, decision)

    def _change(self, decision: m.StepDecision) -> None:
        if decision.change in (RESTARTS, RESTS):
            self._paused.add(decision.group)
            self._returned.discard(decision.group)
            self.clocks.leave(decision.group)
        if decision.change == RESTARTS:
            self._regroup.carry_out(decision.group, decision.step)
        elif decision.change == REPLACED:
            self._replace(decision)
        elif decision.change == AWAY:
            self._go_without(decision.group, decision.step)
        elif decision.change == SNAPSHOT:
            self.snapshots.announce(decision.step)
            self._freeze_at_rest()
        elif decision.change == IS_BACK:
            self._paused.discard(decision.group)
            if self._runs(decision.group):
                self.clocks.join(decision.group, decision.step)
        for extension in self.hooks.on_decree.get(decision.change, ()):
            self._send_all(extension.on_decree(decision))

    # --- a group that comes back (`membership`) ------------------------------------------------------------------

    def lost(self, worker: Address) -> Out:
        """A worker's process is gone; whether its script had come to its end is known here."""
        self._out = []
        self._regroup.lost(worker)
        self._go_on()
        return self._out

    def _of_members(self, sender: Address, message: Any) -> None:
        self._regroup.take(sender, message)

    def begun(self, group: int) -> bool:
        """Whether workers of the group have begun to train here."""
        return group in self.readers.asked or any(each.has_begun() for each in self.hooks.has_begun)

    def objection(self) -> str:
        """Why no group can be started again by itself."""
        return _first(extension.refuses_regroup() for extension in self.hooks.refuses_regroup)

    def ended(self, group: int) -> bool:
        """Whether all scripts of the group have come to their end."""
        return len(self._finished[group]) >= self._topology.workers_per_group

    def count(self, group: int, stream: int) -> int:
        """How many batches of a data stream of a group are applied."""
        return self._streams.count(stream, group)

    @property
    def samples(self) -> Mapping[Address, int]:
        """Of each worker, how many of its samples are in the values; those of other server groups' workers are not."""
        return self._samples.counts

    @property
    def undecided(self) -> int:
        """On shard 0: steps of which nothing is decided, though some shard has all it needs for them."""
        return 0 if self.log is None else self.log.undecided

    def streams(self, group: int) -> list[int]:
        """The data streams of a group of which `restarted` needs to know how many batches are applied."""
        return [stream for extension in self.hooks.streams for stream in extension.streams(group)]

    def restarted(self, group: int, applied: Callable[[int], int], ended: bool) -> None:
        """Tell the extensions that the workers of a group are replaced, see `ServerExtension.group_restarted`."""
        for extension in self.hooks.group_restarted:
            self._send_all(extension.group_restarted(group, applied, ended))

    def complete(self) -> bool:
        """Whether the values are known here."""
        return self.model is not None and len(self._initialised) == len(self._known.buckets)

    def forget(self, group: int, ended: bool) -> None:
        """Forget what a group has said, but for what is applied."""
        for extension in self.hooks.reset_group:
            extension.reset_group(group, ended)
        if self.snapshots.under_way:
            self.snapshots.bereft(group, self._states())
        self._ending.forget(group, ended)
        if group not in self.groups:
            return
        self._drawer = [(sender, held) for sender, held in self._drawer if sender not in self._workers[group]]
        self._opening.forget(self._workers[group])
        for worker in self._workers[group]:
            self._hyper_of.pop(worker, None)
        if self.model is not None:
            self.model.staging[group].restart()
            self.model.codec.forget(group)
        self.readers.forget(group)
        self._strikes.forget(group)
        self._parting.discard(group)
        self._rested.pop(group, None)
        self._exits[group] = LoopExits(self._topology.workers_per_group)
        if not ended:
            self._finished[group] = {}

    def misses(self, worker: Address) -> bool:
        """Whether its group has left the job, and nobody waits for it."""
        return worker.role is Role.WORKER and worker.group in self._away

    def _replace(self, decision: m.StepDecision) -> None:
        """One worker has another process. Raises ProtocolError for one that is not ours."""
        if len(decision.members) != 1 or not 0 <= decision.members[0] < self._topology.workers_per_group:
            raise m.ProtocolError(f"another process for workers {decision.members}")
        self._regroup.replace(Address(Role.WORKER, decision.group, decision.members[0]), decision.step)

    def forget_one(self, worker: Address) -> None:
        """Forget what one worker has said, but for what is applied; its group goes on without it."""
        self._drawer = [(sender, held) for sender, held in self._drawer if sender != worker]
        self._opening.forget([worker])
        self._hyper_of.pop(worker, None)
        self.readers.forget_one(worker)
        if self.model is not None:
            self.model.staging[worker.group].forget(worker.index)
        for extension in self.hooks.reset_worker:
            extension.reset_worker(worker)

    def is_back(self, group: int) -> None:
        """Others may have to wait for the group again; those that warm up begin together."""
        if group in self._away:
            self._away.discard(group)
            self._ending.back(group)
            for extension in self.hooks.group_returns:
                extension.group_returns(group)
        self._rejoin(group)

    def _rejoin(self, group: int) -> None:
        if group in self.clocks.live() or not self._runs(group):
            return
        if self._common or group == 0:
            self.decree(group, self.clocks.entry(group), IS_BACK)
        else:
            self._returned.add(group)

    # --- a group that leaves, and may come back ------------------------------------------------------------------

    def may_change(self, group: int, wish: str) -> str:
        """Why the workers of a group cannot leave the job now ("leave"), be given up ("lose"), or come ("join").

        Empty: they can. Only the coordinator knows.
        """
        why = self.objection()
        if why:
            return why
        if wish == "join":
            return "the job is coming to its end" if any(map(self.ended, self.groups)) else ""
        if self.ended(group):
            return "its scripts have come to their end"
        why = _first(extension.refuses_leave() for extension in self.hooks.refuses_leave)
        if why:
            return why
        others = [g for g in self.groups if g != group and self._runs(g)]
        return "" if others else "no other group trains that could read what it leaves"

    def _part(self, sender: Address, message: GroupLeaveRequest) -> None:
        if message.incarnation < self._members.asked(message.group):
            return
        self._parting.add(message.group)
        for extension in self.hooks.group_leaves:
            self._send_all(extension.group_leaves(message.group))

    def _left(self, sender: Address, message: GroupLeft) -> None:
        self._regroup.leave(message.group, message.incarnation)

    def _go_without(self, group: int, incarnation: int) -> None:
        """Nobody waits for the group, and at the job's end nobody misses it; not if it has come back already."""
        if not self._members.deserted(group, incarnation):
            return
        self._away.add(group)
        self._ending.away(group)
        self.clocks.leave(group)
        self._group_over(group)
        if self.model is not None:
            self._snapshot_goes_on()
            self._drain()

    def _neighbor(self, sender: Address, message: Any) -> None:
        body = self._known.body(message)
        if not self._common:
            # A group that has its start already may be faster than the start of ours.
            self._early.append((sender, replace(message, body=body.clone())))
            return
        if self.snapshots.early(message):
            if len(self._ahead) >= _MAX_HELD:
                raise m.ProtocolError(f"{sender} is far ahead of a snapshot that {self.me} does not know")
            self._ahead.append((sender, replace(message, body=body.clone())))
            return
        if isinstance(message, Remainder):
            self.snapshots.remainder(sender.group, message, body)
            return
        agreement = self._known.agreement
        taken = agreement.taken(sender.group, message.bucket)
        self._meet(agreement.meet(sender.group, message, body))
        if self.snapshots.gathers and agreement.taken(sender.group, message.bucket) > taken:
            self.snapshots.late(message, body)
        self._end()

    def _meet(self, out: list[tuple[int, m.Message]]) -> None:
        for group, message in out:
            if isinstance(message, m.Delta):
                message = replace(message, cut=self.snapshots.cut)
            self.send(Address(Role.SERVER, group, self.me.index), message)

    # --- the end -------------------------------------------------------------------------------------------------

    def _finish(self, sender: Address, message: m.Finish) -> None:
        group = self._finished[sender.group]
        group[sender.index] = message.steps
        staging = self._known.staging[sender.group]
        if not self._partial and staging.waits:
            self._check_nobody_left(sender.group)
        for extension in self.hooks.on_finish:
            extension.on_finish(sender)
        self._snapshot_goes_on()
        if not self._runs(sender.group):
            self.clocks.leave(sender.group)
            self._share()
            self.decide()
            self._release()
        self._drain()

    def _drain(self) -> None:
        """Once no worker group here trains any more."""
        if not any(self._runs(g) for g in self.groups):
            self._freeze_at_rest()
            self._meet(self._known.agreement.drain())
            self._end()

    def _check_nobody_left(self, group: int) -> None:
        for index, steps in self._finished[group].items():
            raise StepError(
                f"worker {index} ended its script after {steps} steps while others of its group go on; "
                f"all workers of a synchronous group must take the same steps"
            )

    def _end(self) -> None:
        """Once every worker group here has ended and nothing is under way: say so, and hand on the final values."""
        if not any(self._runs(g) for g in self.groups) and self._known.agreement.drained():
            for to, message in self._ending.drained(self._known.buckets, self._final_view):
                self.send(to, message)

    def _final_view(self, bucket: Bucket) -> torch.Tensor:
        return self._known.values(bucket.id)

    def _close(self, sender: Address, message: Any) -> None:
        if isinstance(message, m.ModelBufferValue) and (
            message.group != sender.group or message.index >= len(self._known.schema.buffers)
        ):
            raise m.ProtocolError(f"{sender} speaks of buffer {message.index} of group {message.group}")
        body = self._known.body(message) if isinstance(message, m.FinalValue) else message.body
        for to, reply in self._ending.take(sender, message, body, self._known.buckets, self._final_view):
            self.send(to, reply)
        if isinstance(message, m.ModelBufferValue) and message.index < 0:
            self._group_over(message.group)

    def _group_over(self, group: int) -> None:
        for extension in self.hooks.group_over:
            self._send_all(extension.group_over(group))

    def has_finished(self, worker: Address) -> bool:
        """Whether the script of a worker of ours has come to its end."""
        if self._opening.schema is None:  # a job may have used only an extension
            return self._scripts_over
        return worker.index in self._finished[worker.group]

    @property
    def running(self) -> bool:
        """Whether a script of a worker of ours has not come to its end."""
        if self._opening.schema is None and self._scripts_over:
            return False
        return any(self._runs(group) for group in self.groups)

    @property
    def _scripts_over(self) -> bool:
        return any(extension.scripts_over() for extension in self.hooks.scripts_over)

    @property
    def distance(self) -> Distance:
        """How far the other server groups were away, so far."""
        return Distance() if self.model is None else self.model.agreement.distance

    @property
    def done(self) -> bool:
        """Nothing is left for this server to do."""
        if self._opening.schema is None:  # a job may have used only an extension
            return any(extension.is_done() for extension in self.hooks.is_done)
        return self._ending.done

    # --- extensions ----------------------------------------------------------------------------------------------

    def _extension(self, sender: Address, message: m.Message) -> None:
        extension = self.hooks.handlers.get(type(message))
        if extension is None:
            raise m.ProtocolError(f"{self.me} has no extension that handles {type(message).__name__}")
        self._send_all(extension.handle(sender, message))
        if self.snapshots.hears_of_states_in(extension):
            self._snapshot_goes_on()
        if extension in self.hooks.may_stage and self.model is not None and sender.group in self.model.staging:
            self.try_stage(sender.group)

    # --- data and optimizer state --------------------------------------------------------------------------------

    def _applied_ask(self, sender: Address, message: m.AppliedBatchesRequest) -> None:
        group = sender.group
        count = self._taken[group] if message.stream < 0 else self._streams.count(message.stream, group)
        self.send(sender, m.AppliedBatchesReply(message.stream, count))

    # --- snapshots (`snapshot_coordinator`)
    # ------------------------------------------------------------------------------

    def _snapshot_ask(self, sender: Address, message: SnapshotRequest) -> None:
        if message.last:
            self._snapshot_last()
        elif not self.snapshots.unkept and self.complete() and (self._common or not self._topology.synced):
            self._announce(self.snapshots.begin(self._states()))

    def _snapshot_last(self) -> None:
        """The job is to end. One whose scripts have come to their ends does so by itself."""
        if self.snapshots.unkept:
            self.snapshots.cannot(self.snapshots.unkept)
        elif not self._common or not any(self.snapshots.steps.values()):
            self.snapshots.cannot("no step was taken yet")
        elif self.running:
            self.snapshots.end()

    def _snapshot_before(self, group: int) -> None:
        """A step is about to be decided, and perhaps one that somebody wants a snapshot of."""
        if self.snapshots.wanted(group) and not self.snapshots.unkept:
            self._announce(self.snapshots.before(group, self._states))

    def _announce(self, number: int) -> None:
        if not number:
            return
        self.decree(self.groups[0], number, SNAPSHOT)
        if self.snapshots.book is not None:
            for other, message in self.snapshots.book.cut(number):
                self.send(other, message)

    def _freeze(self) -> None:
        """If a snapshot is due, this is the moment; what other groups have sent behind theirs was waiting for it."""
        self.snapshots.freeze(self._known, self._facts, self._streams.counts)
        if self._ahead:
            self._inside += self._ahead
            self._ahead = []

    def _freeze_at_rest(self) -> None:
        """A group of several in which nobody trains any more takes no step behind which it could."""
        if self.model is not None and not any(self._runs(group) for group in self.groups):
            self.snapshots.rest()
            self._freeze()

    def _snapshot_part(self, sender: Address, message: SnapshotPart) -> None:
        if sender.role is not Role.SERVER:
            raise m.ProtocolError(f"{sender} has no part in a snapshot")
        if message.stage == CUT:
            self.decree(self.groups[0], message.number, SNAPSHOT)
            return
        self.snapshots.take(sender, message)
        self._snapshot_goes_on()

    def _snapshot_goes_on(self) -> None:
        if self.snapshots.under_way:
            self.snapshots.go_on(self._states())
        else:
            self.snapshots.forget_states()

    def _states(self) -> WorkerStates:
        """What is known here of the workers' states."""
        begun, taken = self.snapshots.states()
        here = [group for group in self.groups if group not in self._away]
        expected = {worker for worker in begun if worker.group in here and not self.has_finished(worker)}
        if self._topology.synced and self.snapshots.book is not None:
            ended = self.snapshots.book.ended()
            others = (worker for worker in begun if worker.group not in self.groups)
            expected |= {worker for worker in others if (worker.group, worker.index) not in ended}
        return WorkerStates(expected, taken, begun, self._streams.counts())

    def _facts(self) -> dict[str, Any]:
        """What a manifest says of this moment."""
        hyper = {group: text.decode() for group, text in self._hyper.items()}
        clocks = {group: self.clocks.clock(group) for group in self.groups}
        readers = {group: range(len(self._workers[group])) if self._partial else (group,) for group in self.groups}
        version: dict[str, Any] = {
            "version": self.version,
            "model": self._known.schema.text(),
            "reads": [[g, min(map(self._streams.reads, readers[g]))] for g in self.groups if g not in self._away],
            "samples": [[who.group, who.index, count] for who, count in sorted(self.samples.items())],
        }
        if self._topology.synced:
            version["ended"] = [[g, index] for g, finished in self._finished.items() for index in sorted(finished)]
        return {**version, "clocks": sorted(clocks.items()), "hyper": sorted(hyper.items())}

    def _send_all(self, out: Outbox) -> None:
        for to, reply in out:
            self.send(to, reply)

    def _state(self, sender: Address, message: Any) -> None:
        if isinstance(message, m.StatePart):
            self._known.piece(message.bucket, message.piece)
            if self._resumed is None:  # else the script's own state is older than what is here
                self._known.state.load(message)
            return
        for part in self._known.state.tell(message.round, sender.index):
            self.send(sender, part)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State | None:
        """Return the state between two messages, see `component_state`. None: not possible after this message."""
        parts = states_of(self._components)
        if parts is None or self._inside:
            return None
        return {
            "schema": "" if self.model is None else self.model.schema.text(),
            "parts": parts,
            "drawer": self._drawer,
            "initialised": self._initialised,
            "ready_groups": self._ready_groups,
            "common": self._common,
            "early": self._early,
            "ahead": self._ahead,
            "rested": self._rested,
            "version": self.version,
            "hyper": self._hyper,
            "hyper_of": self._hyper_of,
            "applied": self._applied,
            "taken": self._taken,
            "finished": self._finished,
            "away": self._away,
            "parting": self._parting,
            "paused": self._paused,
            "returned": self._returned,
            "good_hyper": self._good_hyper,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` of another copy of this server. Raises ProtocolError."""
        if self.model is None and state["schema"]:
            self.make_model(state["schema"])
        load_states(self._components, state["parts"])
        self._drawer, self._early, self._ahead = list(state["drawer"]), list(state["early"]), list(state["ahead"])
        self._initialised, self._ready_groups = set(state["initialised"]), set(state["ready_groups"])
        self._common, self.version = state["common"], state["version"]
        self._hyper, self._hyper_of = dict(state["hyper"]), dict(state["hyper_of"])
        self._rested, self._applied, self._taken = dict(state["rested"]), dict(state["applied"]), dict(state["taken"])
        self._finished = {group: dict(finished) for group, finished in state["finished"].items()}
        self._away, self._parting = set(state["away"]), set(state["parting"])
        self._paused, self._returned = set(state["paused"]), set(state["returned"])
        self._good_hyper = state["good_hyper"]

    def make_model(self, schema: str) -> None:
        """Make the model of another copy of this server from its description."""
        self.model = self._opening.mold(parse_schema(schema), self.hooks)

    @property
    def buffers(self) -> FlatBuffers | None:
        """The buffers of values and gradients, once the model is known."""
        return None if self.model is None else self.model.flats

    @property
    def _components(self) -> dict[str, Component]:
        parts: dict[str, Component] = {
            "startup": self._opening,
            "replies": self.readers,
            "clocks": self.clocks,
            "order": self._order,
            "batches": self._streams,
            "samples": self._samples,
            "nonfinite": self._strikes,
            "shutdown": self._ending,
            "groups": self._regroup,
            "snapshots": self.snapshots,
            **{f"exits {group}": exits for group, exits in self._exits.items()},
            **{type(extension).__name__: extension for extension in self.extensions},
        }
        if self.log is not None:
            parts["log"] = self.log
        return parts if self.model is None else {**parts, "shard": self.model}


def _first(texts: Iterable[str]) -> str:
    """The first text that is not empty; empty: all are."""
    return next(filter(None, texts), "")


_OF_MEMBERS = (m.WorkerRejoined, RestartRequest, AppliedBatchesOfStreams)

# Steps are decided only where the model is known; changes of members are decided before, too.
_BEFORE_MODEL = (
    m.SchemaPart,
    m.SharedBuffer,
    m.StepDecision,
    m.StepDecisionRequest,
    GroupLeft,
    *_OF_MEMBERS,
)

_HANDLERS: Mapping[type[m.Message], Callable[..., None]] = {
    m.SchemaPart: Server._schema_part,
    m.SharedBuffer: Server._window,
    m.Init: Server._init,
    m.Fail: Server._fail,
    m.Fetch: Server._fetch,
    m.Push: Server._push,
    m.StepRates: Server._rates,
    m.BackwardEnd: Server._backward_end,
    m.GradientOverride: Server._edit,
    m.Commit: Server._commit,
    m.StepVote: Server._staged,
    m.StepDecision: Server._apply,
    m.StepDecisionRequest: Server._ask_apply,
    m.GroupIdle: Server._rest,
    m.LoopExited: Server._left_early,
    m.Finish: Server._finish,
    **dict.fromkeys((m.Delta, m.MasterValue, m.RingOffer, m.RingReply, Remainder), Server._neighbor),
    **dict.fromkeys((m.Drained, m.FinalValue, m.FinalRequest, m.ModelBufferValue, m.BufferRequest), Server._close),
    **dict.fromkeys(_OF_MEMBERS, Server._of_members),
    m.AppliedBatchesRequest: Server._applied_ask,
    **dict.fromkeys((m.StateRequest, m.StatePart), Server._state),
    SnapshotRequest: Server._snapshot_ask,
    SnapshotPart: Server._snapshot_part,
    GroupLeaveRequest: Server._part,
    GroupLeft: Server._left,
}
