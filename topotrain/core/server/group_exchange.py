"""The exchange of a server with the same shard of other groups, up to the end."""

from dataclasses import replace
from typing import Any

import torch

from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema
from topotrain.core.server.component_state import DeclaredState, State
from topotrain.core.server.group_sync import Distance, GroupMessages
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server_context import Out, ServerContext

_MOST_ASKS = 64  # held requests: one worker makes two, and restarted processes repeat them


class Shutdown:
    """The end of the job on one server: the drain, and the final values.

    The result of a job is the values of the masters after the drain. A server that has applied its last update sends
    Drained to the same shard of the other groups, when all its messages are answered. Then each master's value of a
    bucket is final and goes to server group 0, where worker (0,0) reads it. Where groups average, the values of all go
    there, and their mean is final. The workers send the model's buffers (BatchNorm statistics) to server
    (0,0), where worker (0,0) collects them.

    Args:
        me: the server.
        topology: the layout.
    """

    def __init__(self, me: Address, topology: Topology) -> None:
        self._me = me
        self._groups = set(range(topology.server_groups)) if topology.synced else {me.group}
        self._worker_groups = set(range(topology.worker_groups))
        self._drained: set[int] = set()
        self._handed_on = False
        self._finals: dict[tuple[int, int], torch.Tensor | None] = {}
        self._final = False
        self._asks: list[tuple[Address, m.Message]] = []
        self._answered: set[type[m.Message]] = set()
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        self._buffers_here: set[tuple[int, int]] = set()
        self._buffers_from: set[int] = set()
        self._buffers_each = 0
        self._writes: dict[tuple[int, int], torch.Tensor] = {}
        self._away: set[int] = set()
        self.done = False
        """Whether no message is left to be sent or received here."""

    def drained(self, shard: ParameterShard) -> Out:
        """This server has applied its last update and is drained."""
        if self._me.group in self._drained:
            return self._advance(shard)
        self._drained.add(self._me.group)
        others = sorted(self._groups - {self._me.group})
        out: Out = [(Address(Role.SERVER, group, self._me.index), m.Drained()) for group in others]
        return out + self._advance(shard)

    def take(self, sender: Address, message: m.Message, body: torch.Tensor | None, shard: ParameterShard) -> Out:
        """Handle a message of the drain, or about final values, buffers or last writes."""
        if isinstance(message, m.Drained):
            self._drained.add(sender.group)
        elif isinstance(message, m.FinalValue) and body is not None:
            self._keep_final(sender.group, message.bucket, body, shard)
        elif isinstance(message, m.ModelBufferValue):
            self._keep_buffer(message, body)
        elif isinstance(message, m.LastWrites):
            if body is not None:
                self._writes[(sender.group, sender.index)] = body
            return [(sender, replace(message, body=None)), *self._advance(shard)]
        else:
            # Only a faulty worker asks so often; its requests must not fill the memory.
            if len(self._asks) >= _MOST_ASKS:
                raise m.ProtocolError(f"{sender}: more than {_MOST_ASKS} requests for final values are held")
            self._asks.append((sender, message))
        return self._advance(shard)

    def expect_buffers(self, count: int) -> None:
        """Set the number of the model's buffers."""
        self._buffers_each = count

    def forget(self, group: int, ended: bool) -> None:
        """Forget the requests of a group with new processes, which will ask again.

        ended: the scripts had ended. Else the new processes send the model's buffers again, too.
        """
        self._asks = [(sender, ask) for sender, ask in self._asks if sender.group != group]
        if not ended:
            self._buffers_from.discard(group)
            self._buffers_here = {key for key in self._buffers_here if key[0] != group}
            self._writes = {key: body for key, body in self._writes.items() if key[0] != group}

    def away(self, group: int) -> None:
        """The workers of a group have left the job. Their buffers are not waited for."""
        self._away.add(group)

    def back(self, group: int) -> None:
        """The workers of a group have come back."""
        self._away.discard(group)

    def buffer_place(self, message: m.ModelBufferValue, schema: Schema) -> torch.Tensor:
        """Memory for a model buffer of a group."""
        if not 0 <= message.index < len(schema.buffers) or message.group not in self._worker_groups:
            raise m.ProtocolError(f"model buffer {message.index} of group {message.group}")
        key = (message.group, message.index)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(schema.buffers[message.index].nbytes, dtype=torch.uint8)
        return self._buffers[key]

    def _keep_buffer(self, message: m.ModelBufferValue, body: torch.Tensor | None) -> None:
        if message.index < 0:
            self._buffers_from.add(message.group)
        elif body is not None:
            self._buffers[(message.group, message.index)] = body
            self._buffers_here.add((message.group, message.index))

    def _keep_final(self, group: int, number: int, body: torch.Tensor, shard: ParameterShard) -> None:
        bucket = shard.buckets[number - shard.buckets[0].id]
        if shard.group_sync.averages:
            # The body is a view of a receive buffer, which the next message of this group overwrites.
            self._finals[(group, number)] = body.clone()
        elif (group, number) not in self._finals:
            # Straight into the values: no update comes any more, and only the master sends this bucket.
            shard.values(bucket.id).copy_(body)
            self._finals[(group, number)] = None

    def _advance(self, shard: ParameterShard) -> Out:
        out: Out = []
        # Once every server has sent Drained, no exchange is under way that could still change a value.
        if self._drained == self._groups and not self._handed_on:
            self._handed_on = True
            out += self._hand_on(shard)
        if self._handed_on and self._me.group == 0 and not self._final:
            self._final = self._complete(shard)
        # A copy, because answered requests are removed on the way.
        for sender, ask in list(self._asks):
            answer = self._answer(sender, ask, shard)
            if answer is not None:
                self._asks.remove((sender, ask))
                self._answered.add(type(ask))
                out += answer
        self.done = self._is_done()
        return out

    def _is_done(self) -> bool:
        if self._me.group != 0:
            return self._handed_on
        # Worker (0,0) asks every server of group 0 for the values, and only server (0,0) for the buffers.
        wanted = {m.FinalRequest, m.BufferRequest} if self._me.index == 0 else {m.FinalRequest}
        return wanted <= self._answered

    def _hand_on(self, shard: ParameterShard) -> Out:
        if self._me.group == 0:
            return []
        home = Address(Role.SERVER, 0, self._me.index)
        sync = shard.group_sync
        mine = [b.id for b in shard.buckets if sync.averages or b.master == self._me.group]
        found: Out = [(home, m.FinalValue(b, body=sync.result(b, shard.values(b)))) for b in mine]
        return found if len(self._groups) > 1 else []

    def _complete(self, shard: ParameterShard) -> bool:
        others = sorted(self._groups - {0})
        if not shard.group_sync.averages:
            return all((b.master, b.id) in self._finals for b in shard.buckets if b.master != 0)
        if not all((group, b.id) in self._finals for b in shard.buckets for group in others):
            return False
        for bucket in shard.buckets:
            # Beside the values, which a snapshot of all groups may still need.
            total = shard.values(bucket.id).clone()
            # In group order, since the order of a floating-point sum is part of the result.
            for group in others:
                theirs = self._finals[(group, bucket.id)]
                assert theirs is not None
                total.add_(theirs)
                self._finals[(group, bucket.id)] = None
            self._finals[(0, bucket.id)] = total.div_(len(self._groups))
        return True

    def _answer(self, to: Address, ask: m.Message, shard: ParameterShard) -> Out | None:
        if isinstance(ask, m.FinalRequest):
            if not self._final:
                return None
            return [(to, m.Values(ask.round, b.id, -1, body=self._final_value(shard, b.id))) for b in shard.buckets]
        # Groups that have left send no buffers.
        there = self._worker_groups - self._away
        wanted = [(group, index) for group in sorted(there) for index in range(self._buffers_each)]
        if not self._buffers_from >= there or not self._buffers_here.issuperset(wanted):
            return None
        found: Out = [(to, m.LastWrites(*key, body=self._writes[key])) for key in sorted(self._writes)]
        found += [(to, m.ModelBufferValue(*key, body=self._buffers[key])) for key in wanted]
        return [*found, (to, m.ModelBufferValue(len(there), -1))]

    def _final_value(self, shard: ParameterShard, bucket: int) -> torch.Tensor:
        mean = self._finals.get((0, bucket))
        return shard.group_sync.result(bucket, shard.values(bucket)) if mean is None else mean

    def state_dict(self) -> State:
        return {
            "drained": self._drained,
            "handed_on": self._handed_on,
            "finals": self._finals,
            "final": self._final,
            "asks": self._asks,
            "answered": {kind.KIND for kind in self._answered},
            "buffers": self._buffers,
            "buffers_here": self._buffers_here,
            "buffers_from": self._buffers_from,
            "buffers_each": self._buffers_each,
            "writes": self._writes,
            "away": self._away,
        }

    def load_state_dict(self, state: State) -> None:
        self._drained, self._away = set(state["drained"]), set(state["away"])
        self._handed_on, self._finals, self._final = state["handed_on"], dict(state["finals"]), state["final"]
        self._asks, self._answered = list(state["asks"]), set(map(m.kind_of, state["answered"]))
        self._buffers, self._buffers_here = dict(state["buffers"]), set(state["buffers_here"])
        self._buffers_from, self._buffers_each = set(state["buffers_from"]), state["buffers_each"]
        self._writes = dict(state["writes"])
        self.done = self._is_done()


class GroupExchange(DeclaredState):
    """One server's part in group synchronization, and in the end of the job.

    Args:
        context: the parts of the server that all others use.
        shutdown: the end of the job on this server.
    """

    STATE = ("_early",)

    def __init__(self, context: ServerContext, shutdown: Shutdown) -> None:
        self._state, self._groups, self._shutdown = context.state, context.groups, shutdown
        self._queue, self._hooks = context.queue, context.hooks
        self._early: list[tuple[Address, m.Message]] = []

    @property
    def distance(self) -> Distance:
        """How far the other server groups were away, so far."""
        model = self._state.model
        return Distance() if model is None else model.group_sync.distance

    def expect_buffers(self, count: int) -> None:
        """The model has so many buffers, which are collected at the end of the job."""
        self._shutdown.expect_buffers(count)

    def begin(self) -> None:
        """All server groups start from the values that are here now."""
        self._state.known.group_sync.begin()
        self._queue.handle_later(self._early)
        self._early = []

    def receive(self, sender: Address, message: Any) -> None:
        """Another server group sends what it has added, or what this one has to add."""
        body = self._state.known.body(message)
        if not self._state.common:
            # The other group has its start already. A copy, because the receive buffer is used again.
            self._early.append((sender, replace(message, body=body.clone())))
            return
        if any(extension.take_exchange(sender, message, body) for extension in self._hooks.take_exchange):
            return
        group_sync = self._state.known.group_sync
        taken = group_sync.taken(sender.group, message.bucket)
        self.send(group_sync.meet(sender.group, message, body))
        # Not for a difference that came twice: a snapshot that is being cut adds it to its own values, too.
        if group_sync.taken(sender.group, message.bucket) > taken:
            for extension in self._hooks.exchanged:
                extension.exchanged(message, body)
        self._end()

    def send(self, out: GroupMessages) -> None:
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
        self.send(self._state.known.group_sync.drain())
        self._end()

    def _end(self) -> None:
        """Hand on the final values, once nothing more can change them."""
        if not self._groups.any_runs and self._state.known.group_sync.drained():
            self._queue.send_all(self._shutdown.drained(self._state.known))

    def close(self, sender: Address, message: Any) -> None:
        """Handle a message of the job's end. Raises ProtocolError for an unknown buffer."""
        model = self._state.known
        if isinstance(message, m.ModelBufferValue) and (
            message.group != sender.group or message.index >= len(model.schema.buffers)
        ):
            raise m.ProtocolError(f"{sender} sends buffer {message.index} of group {message.group}")
        if isinstance(message, m.LastWrites) and (message.group, message.index) != (sender.group, sender.index):
            raise m.ProtocolError(f"{sender} sends what worker {message.group}/{message.index} has changed")
        body = model.body(message) if isinstance(message, m.FinalValue) else message.body
        self._queue.send_all(self._shutdown.take(sender, message, body, model))
        # A worker sends its last buffer when its script has ended.
        if isinstance(message, m.ModelBufferValue) and message.index < 0:
            self.end_group(message.group)

    def end_group(self, group: int) -> None:
        """The workers of a group have left the job, or their scripts have ended."""
        for extension in self._hooks.group_over:
            self._queue.send_all(extension.group_over(group))
