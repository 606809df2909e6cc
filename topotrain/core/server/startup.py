"""The start of a server: model, first values, and one start for all groups."""

from collections.abc import Collection, Iterable

from topotrain.config.job import ConfigError, Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model import shared_windows
from topotrain.core.model.schema import BufferMemory, Schema, SchemaParts, difference, parse_schema, slice_map_for
from topotrain.core.server.component_state import DeclaredState, State
from topotrain.core.server.group_exchange import GroupExchange
from topotrain.core.server.parameter_shard import ParameterShard, ShardMemory, open_model
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_context import MessageQueue, ServerContext
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.step_execution import Decisions


class Startup:
    """The description of one shard's model, and the memory for it.

    The first description counts, and every other must be the same. Where workers and servers share memory, the first
    server of a group allocates the buffers and shows them to the others. A server makes its shard when they are here.

    Args:
        me, job, topology, memory, shared: as for `server.Server`.
        queue: sends messages of the server.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        queue: MessageQueue,
    ) -> None:
        self._me, self._job, self._topology, self._memory = me, job, topology, memory
        self._shared, self._queue = shared, queue
        self.buffers = shared_windows.buffers_of(topology, me.group) if shared else {}
        self.schema: Schema | None = None
        self._map: SliceMap | None = None
        self._windows: shared_windows.Flats = {}
        self._whole: shared_windows.Flats = {}
        self._early: list[m.SharedBuffer] = []
        self._first_worker = ""
        self._parts: dict[Address, SchemaParts] = {}

    def part(self, sender: Address, message: m.SchemaPart) -> Schema | None:
        """Keep a part of a description. Returns the whole, once it is here.

        Raises:
            ProtocolError: the part is not one of a description.
        """
        schema = self._parts.setdefault(sender, SchemaParts()).take(message)
        if schema is not None:
            del self._parts[sender]
        return schema

    def forget(self, workers: Iterable[Address]) -> None:
        """Forget the incomplete descriptions of workers that are gone."""
        for worker in workers:
            self._parts.pop(worker, None)

    def describe(self, sender: Address, schema: Schema) -> bool:
        """Keep a description. Returns whether the model may be complete now.

        Raises:
            ProtocolError: no model has this description.
        """
        first = self._map is None
        if self._map is None:
            try:
                self._map = slice_map_for(schema.parameters, self._topology)
            except ValueError as error:  # a correct worker has made the same map before it described the model
                raise m.ProtocolError(f"{sender} describes an impossible model: {error}") from error
            self.schema, self._first_worker = schema, self._worker_of(sender)
            self._map_early_buffers()
        # A worker connects to all servers of its group before it describes the model, so they can receive windows.
        # The description of another server group may come earlier.
        if self._me.index == 0 and self.buffers and not self._whole and sender.role is Role.WORKER:
            self._allocate_windows(self._map)
            return True
        return first

    def difference(self, sender: Address, schema: Schema) -> str:
        """The difference between the first description and this one; "": none."""
        assert self.schema is not None
        return difference(self.schema, schema, self._first_worker, self._worker_of(sender))

    def _worker_of(self, sender: Address) -> str:
        if sender.role is Role.SERVER:  # another server group describes the model of its workers
            return str(self._topology.workers(self._topology.worker_groups_of(sender.group)[0])[0])
        return str(sender)

    # --- memory --------------------------------------------------------------------------------------------------

    def _allocate_windows(self, slice_map: SliceMap) -> None:
        self._whole = shared_windows.make(slice_map, self._topology, self._me.group, self._memory)
        self._windows = shared_windows.part(self._whole, slice_map, 0)
        for server in self._topology.servers(self._me.group)[1:]:
            for (name, space), flat in shared_windows.part(self._whole, slice_map, server.index).items():
                self._queue.send(server, m.SharedBuffer(name, space, body=flat))

    def show(self, worker: Address) -> None:
        """By the first server: send a worker its parameter buffers."""
        assert self._map is not None
        if self._me.index != 0 or worker.group not in self.buffers:
            return
        for (name, space), flat in self._whole.items():
            if name == self.buffers[worker.group] and self._map.spaces[space].on(worker.index):
                self._queue.send(worker, m.SharedBuffer(name, space, body=flat))

    def window(self, message: m.SharedBuffer) -> None:
        """The first server has sent this shard's part of a buffer."""
        # Its size is known only with the map of the model, so it waits for a description.
        self._early.append(message)
        self._map_early_buffers()

    def _map_early_buffers(self) -> None:
        if self._map is not None:
            for message in self._early:
                self._windows[message.name, message.space] = shared_windows.seen(message, self._map, self._me.index)
            self._early = []

    # --- the model -----------------------------------------------------------------------------------------------

    @property
    def early(self) -> bool:
        """Whether memory has come before a description of the model."""
        return bool(self._early)

    @property
    def complete(self) -> bool:
        """Whether the description and all memory of the model are here."""
        if self._map is None:
            return False
        where = (self._topology, self._map, self._me.group, self._me.index)
        return not self.buffers or self._windows.keys() >= shared_windows.expected(*where)

    def open(self, hooks: ExtensionHooks, resumed: bool = False) -> ParameterShard:
        """Make the model; raises whatever an optimizer's constructor may.

        resumed: as in `open_model`.
        """
        assert self.schema is not None
        assert self._map is not None
        memory = ShardMemory(self._memory, self._shared, self._windows)
        return open_model(self._me, self._job, self._topology, self.schema, self._map, memory, hooks, resumed)

    def open_copy(self, schema: Schema, hooks: ExtensionHooks) -> ParameterShard:
        """The model of another copy of this server. Raises ValueError."""
        self.schema, self._map = schema, slice_map_for(schema.parameters, self._topology)
        return self.open(hooks)

    def state_dict(self) -> State | None:
        # A window is memory of another process, and a copy of its bytes would not be shared.
        if self._early:
            return None
        parts = {sender: parts.state_dict() for sender, parts in self._parts.items()}
        return {"first_worker": self._first_worker, "parts": parts}

    def load_state_dict(self, state: State) -> None:
        self._first_worker, self._parts = state["first_worker"], {}
        for sender, parts in state["parts"].items():
            self._parts[sender] = SchemaParts()
            self._parts[sender].load_state_dict(parts)


_MAX_HELD = 1 << 14  # messages that a faulty worker could otherwise pile up without end


class ModelStart(DeclaredState):
    """Starts one server: makes the model, and gives it its first values.

    Args:
        context: the parts of the server that all others use.
        startup, replies, decisions, exchange: the parts of the server that the start uses.
    """

    STATE = ("_held", "_ready_groups")

    def __init__(
        self,
        context: ServerContext,
        startup: Startup,
        replies: PullReplies,
        decisions: Decisions,
        exchange: GroupExchange,
    ) -> None:
        self._state, self._groups = context.state, context.groups
        self._queue, self._hooks = context.queue, context.hooks
        self._startup, self._replies, self._decisions, self._exchange = startup, replies, decisions, exchange
        self._held: list[tuple[Address, m.Message]] = []
        self._ready_groups: set[int] = set()

    # --- the model -----------------------------------------------------------------------------------------------

    def hold(self, sender: Address, message: m.Message) -> None:
        """Keep a message that has overtaken the model's description."""
        if len(self._held) >= _MAX_HELD:
            raise m.ProtocolError(f"{sender} sends too much before {self._state.me} knows the model")
        self._held.append((sender, message))

    def schema_part(self, sender: Address, message: m.SchemaPart) -> None:
        """A part of a description of the model."""
        schema = self._startup.part(sender, message)
        if schema is None:
            return
        if self._startup.describe(sender, schema):
            self._open(sender)
        text = self._startup.difference(sender, schema)
        if text:
            self._queue.send(sender, m.Fail(f"the models of a job's workers must be the same: {text}", True))
        elif sender.role is Role.SERVER:
            self._ready_groups.add(sender.group)
            self.share()
            self._replies.release()
        else:
            self._startup.show(sender)

    def shared_buffer(self, sender: Address, message: m.SharedBuffer) -> None:
        """Use shared memory of a worker, or of the first server of the group."""
        if sender.role is Role.SERVER:
            self._startup.window(message)
            self._open(sender)
            return
        model = self._state.model
        if model is None:
            self.hold(sender, message)
            return
        if message.name != "grad":
            raise m.ProtocolError(f"a shared buffer {message.name!r} from {sender}, which can only give 'grad'")
        flat = shared_windows.seen(message, model.map, self._state.me.index)
        model.flats.put(f"{message.name} {sender.index} {sender.group}", message.space, flat)

    def _open(self, sender: Address) -> None:
        """Make the model once its description and its memory are here."""
        state = self._state
        if state.model is not None or not self._startup.complete:
            return
        try:
            model = self._startup.open(self._hooks, state.start.resumed)
        # The optimizer may be a class of the user. Any of these errors is a refusal, and the server goes on.
        except (ValueError, TypeError, ImportError, AttributeError, LookupError, RuntimeError, MemoryError) as error:
            self._queue.send(sender, m.Fail(f"{state.me} cannot build the optimizer: {error}", True))
            return
        try:
            state.start.restore(model, state.me.index)
        except ConfigError as error:
            self._queue.send(sender, m.Fail(str(error), True))
            return
        state.open(model)
        if state.start.clocks is not None:
            self._groups.restore_clocks(state.start.clocks)
        self._exchange.expect_buffers(len(model.schema.buffers))
        # Group 0 compares the models, and sends its values only when all other groups have described theirs.
        for part in model.schema.parts() if state.me.group != 0 else ():
            self._queue.send(Address(Role.SERVER, 0, state.me.index), part)
        self._queue.handle_later(self._held)
        self._held = []
        # A snapshot has brought the values already, so no Init will come.
        if state.complete:
            self._values_here()

    def make_model(self, schema: str) -> None:
        """Make the model of another copy of this server from its description."""
        self._state.open(self._startup.open_copy(parse_schema(schema), self._hooks))

    def refused(self, sender: Address, message: m.Fail) -> None:
        """Server group 0 refuses this group's model."""
        for workers in self._groups.workers.values():
            for worker in workers:
                self._queue.send(worker, message)

    # --- the values ----------------------------------------------------------------------------------------------

    def init(self, sender: Address, message: m.Init) -> None:
        """The first values of a bucket."""
        state = self._state
        if state.has_values(message.bucket):
            return  # sent twice; the group may be warming up already
        target, body = state.known.values(message.bucket), state.known.body(message)
        # A body that came over a socket was received into the values themselves (`Server.place`).
        if body.data_ptr() != target.data_ptr():
            target.copy_(body)
        state.add_values(message.bucket)
        if state.complete:
            self._values_here()

    def optimizer_state(self, sender: Address, message: m.StatePart | m.StateRequest) -> None:
        """A worker gives the state of its optimizer, or asks for that of the server."""
        model = self._state.known
        if isinstance(message, m.StateRequest):
            for part in model.state.parts(message.round, sender.index):
                self._queue.send(sender, part)
            return
        model.piece(message.bucket, message.piece)
        # What a resumed script begins with is older than the state of the snapshot.
        if message.round or not self._state.start.resumed:
            model.state.load(message)

    def _values_here(self) -> None:
        if self._state.me.group == 0:
            self.share()
        else:
            self._start_together()
        self._replies.release()

    def share(self) -> None:
        """Give every server group the same start, after the warm-up (`warmup_steps`)."""
        state = self._state
        others = range(1, state.topology.server_groups)
        if state.common or state.me.group != 0 or not state.complete or self._ready_groups != set(others):
            return
        # Group 0 may end before its warm-up is over, and then the others must not wait for ever.
        if self._groups.clocks.clock(0) < state.job.warmup_steps and self._groups.runs(0):
            return
        for group in others:
            for bucket in state.known.buckets:
                # A copy: the next step may change the values before they are sent.
                body = state.known.values(bucket.id).clone()
                self._queue.send(Address(Role.SERVER, group, state.me.index), m.Init(bucket.id, body=body))
        self._start_together()

    def _start_together(self) -> None:
        # First, because a group rejoins at once only where the start is common.
        self._state.start_together()
        for group in self._groups.start_together(self._state.job.warmup_steps, self._state.start.clocks):
            self._decisions.rejoin(group)
        # Last: it keeps the present values as the common ones, and handles exchanges of faster groups.
        self._exchange.begin()

    def reset(self, workers: Collection[Address]) -> None:
        """These workers are gone: forget what is held of them."""
        self._held = [(sender, message) for sender, message in self._held if sender not in workers]
        self._startup.forget(workers)
