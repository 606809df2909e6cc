"""The start of a server: the description of the model, and the memory for it.

The first description counts, and every other must be the same. Where workers and servers share memory, the first
server of a group allocates the buffers and shows them to the others. A server makes its shard when they are here.
"""

from collections.abc import Callable, Iterable

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model import shared_windows
from topotrain.core.model.schema import BufferMemory, Schema, SchemaParts, difference, slice_map_for
from topotrain.core.server.component_state import State
from topotrain.core.server.parameter_shard import ParameterShard, ShardMemory, open_model
from topotrain.core.server.server_extension import ExtensionHooks


class Startup:
    """The start of one shard.

    Args:
        me, job, topology, memory, shared: as for `server.Server`.
        send: send(to, message).
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        send: Callable[[Address, m.Message], None],
    ) -> None:
        self._me, self._job, self._topology, self._memory = me, job, topology, memory
        self._shared, self._send = shared, send
        self.buffers = shared_windows.buffers_of(topology, me.group) if shared else {}
        self.schema: Schema | None = None
        self._map: SliceMap | None = None
        self._windows: shared_windows.Flats = {}
        self._whole: shared_windows.Flats = {}
        self._early: list[m.SharedBuffer] = []
        self._who_first = ""
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
        first = self.schema is None
        if first or self._map is None:
            try:
                self._map = slice_map_for(schema.parameters, self._topology)
            except ValueError as error:  # the worker has cut the same before it said so
                raise m.ProtocolError(f"{sender} describes an impossible model: {error}") from error
            self.schema, self._who_first = schema, self._who(sender)
            self._look_through()
        # A worker of ours has called on all of our servers; another group may know the model before they are there.
        if self._me.index == 0 and self.buffers and not self._whole and sender.role is Role.WORKER:
            self._give_out(self._map)
            return True
        return first

    def difference(self, sender: Address, schema: Schema) -> str:
        """The difference between the first description and this one; "": none."""
        assert self.schema is not None
        return difference(self.schema, schema, self._who_first, self._who(sender))

    def _who(self, sender: Address) -> str:
        if sender.role is Role.SERVER:  # another server group says which model its workers have
            return str(self._topology.workers(self._topology.worker_groups_of(sender.group)[0])[0])
        return str(sender)

    # --- memory --------------------------------------------------------------------------------------------------

    def _give_out(self, slice_map: SliceMap) -> None:
        self._whole = shared_windows.make(slice_map, self._topology, self._me.group, self._memory)
        self._windows = shared_windows.part(self._whole, slice_map, 0)
        for server in self._topology.servers(self._me.group)[1:]:
            for (name, space), flat in shared_windows.part(self._whole, slice_map, server.index).items():
                self._send(server, m.SharedBuffer(name, space, body=flat))

    def show(self, worker: Address) -> None:
        """By the first server: send a worker its parameter buffers."""
        assert self._map is not None
        if self._me.index != 0 or worker.group not in self.buffers:
            return
        for (name, space), flat in self._whole.items():
            if name == self.buffers[worker.group] and self._map.spaces[space].on(worker.index):
                self._send(worker, m.SharedBuffer(name, space, body=flat))

    def window(self, message: m.SharedBuffer) -> None:
        """The first server has sent this shard's part of a buffer."""
        self._early.append(message)
        self._look_through()

    def _look_through(self) -> None:
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

    def open(self, hooks: ExtensionHooks) -> ParameterShard:
        """Make the model; raises whatever an optimizer's constructor may."""
        assert self.schema is not None
        assert self._map is not None
        memory = ShardMemory(self._memory, self._shared, self._windows)
        return open_model(self._me, self._job, self._topology, self.schema, self._map, memory, hooks)

    def mold(self, schema: Schema, hooks: ExtensionHooks) -> ParameterShard:
        """The model of another copy of this server. Raises ValueError."""
        self.schema, self._map = schema, slice_map_for(schema.parameters, self._topology)
        return self.open(hooks)

    def state_dict(self) -> State | None:
        """Return the state, see `component_state`.

        None: not possible while shared memory waits for the description.
        """
        if self._early:
            return None
        parts = {sender: parts.state_dict() for sender, parts in self._parts.items()}
        return {"who_first": self._who_first, "parts": parts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._who_first, self._parts = state["who_first"], {}
        for sender, parts in state["parts"].items():
            self._parts[sender] = SchemaParts()
            self._parts[sender].load_state_dict(parts)
