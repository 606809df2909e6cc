"""The exchange of one server with the same shard of other server groups.

It lasts from their common start to the final values.
"""

from dataclasses import replace
from typing import Any

from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.server.component_state import State
from topotrain.core.server.group_sync import Distance, Out
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.shutdown import Shutdown


class GroupExchange:
    """One server's part in group synchronization, and in the end of the job.

    Args:
        state, groups, shutdown, queue, hooks: the parts of the server that it uses.
    """

    def __init__(
        self,
        state: ShardState,
        groups: WorkerGroups,
        shutdown: Shutdown,
        queue: MessageQueue,
        hooks: ExtensionHooks,
    ) -> None:
        self._state, self._groups = state, groups
        self._shutdown, self._queue, self._hooks = shutdown, queue, hooks
        self._early: list[tuple[Address, m.Message]] = []

    @property
    def distance(self) -> Distance:
        """How far the other server groups were away, so far."""
        model = self._state.model
        return Distance() if model is None else model.agreement.distance

    def expect_buffers(self, count: int) -> None:
        """The model has so many buffers, which are collected at the end of the job."""
        self._shutdown.expect_buffers(count)

    def begin(self) -> None:
        """All server groups start from the values that are here now."""
        self._state.known.agreement.begin()
        self._queue.handle_later(self._early)
        self._early = []

    def receive(self, sender: Address, message: Any) -> None:
        """Another server group sends what it has added, or what this one has to add."""
        body = self._state.known.body(message)
        if not self._state.common:
            # The start of a group that is faster has come already.
            self._early.append((sender, replace(message, body=body.clone())))
            return
        if any(extension.take_exchange(sender, message, body) for extension in self._hooks.take_exchange):
            return
        agreement = self._state.known.agreement
        taken = agreement.taken(sender.group, message.bucket)
        self.send(agreement.meet(sender.group, message, body))
        if agreement.taken(sender.group, message.bucket) > taken:
            for extension in self._hooks.exchanged:
                extension.exchanged(message, body)
        self._end()

    def send(self, out: Out) -> None:
        """Send (server group, message) to the same shard of these groups."""
        for group, message in out:
            for extension in self._hooks.amend_exchange:
                message = extension.amend_exchange(message)
            self._queue.send(Address(Role.SERVER, group, self._state.me.index), message)

    def drain(self) -> None:
        """Send what is left, if no worker group here trains any more."""
        if self._groups.any_runs:
            return
        for extension in self._hooks.on_drain:
            extension.on_drain()
        self.send(self._state.known.agreement.drain())
        self._end()

    def _end(self) -> None:
        """Hand on the final values, once nothing more can change them.

        That is when every worker group here has ended and every exchange is answered.
        """
        if not self._groups.any_runs and self._state.known.agreement.drained():
            self._queue.send_all(self._shutdown.drained(self._state.known))

    def close(self, sender: Address, message: Any) -> None:
        """Handle a message of the job's end (`shutdown`).

        Raises ProtocolError for a buffer that the sender does not have.
        """
        model = self._state.known
        if isinstance(message, m.ModelBufferValue) and (
            message.group != sender.group or message.index >= len(model.schema.buffers)
        ):
            raise m.ProtocolError(f"{sender} sends buffer {message.index} of group {message.group}")
        body = model.body(message) if isinstance(message, m.FinalValue) else message.body
        self._queue.send_all(self._shutdown.take(sender, message, body, model))
        if isinstance(message, m.ModelBufferValue) and message.index < 0:
            self.end_group(message.group)

    def end_group(self, group: int) -> None:
        """The workers of a group have left the job, or their scripts have ended."""
        for extension in self._hooks.group_over:
            self._queue.send_all(extension.group_over(group))

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"early": self._early}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._early = list(state["early"])
