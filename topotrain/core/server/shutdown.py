"""The end of a job on the servers: the drain, and the final values.

The result of a job is the values of the masters after the drain. A server that has applied its last update sends
Drained to the same shard of the other groups, when all its messages are answered. Nothing is under way once all servers
have sent it. Then each master's value of a bucket is final and goes to server group 0, where worker (0,0) reads it.
With ring averaging the values of all groups go there, and their mean is final. The model's buffers (BatchNorm
statistics) travel the same way: the first worker of each group that has them leaves them at server (0,0), and worker
(0,0) collects them.
"""

import torch

from topotrain.config.job import Agreement
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import Schema
from topotrain.core.server.component_state import State
from topotrain.core.server.parameter_shard import ParameterShard

Out = list[tuple[Address, m.Message]]

_MOST_ASKS = 64


class Shutdown:
    """The end of the job on one server.

    Args:
        me: the server.
        topology: the layout.
    """

    def __init__(self, me: Address, topology: Topology) -> None:
        self._me = me
        self._groups = set(range(topology.server_groups)) if topology.synced else {me.group}
        self._worker_groups = set(range(topology.worker_groups))
        self._ring = topology.cluster.agreement is Agreement.kRingAverage
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
        self._away: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether no message is left to be sent or received here."""
        if self._me.group != 0:
            return self._handed_on
        wanted = {m.FinalRequest, m.BufferRequest} if self._me.index == 0 else {m.FinalRequest}
        return wanted <= self._answered

    def drained(self, shard: ParameterShard) -> Out:
        """This server has applied its last update and is drained."""
        if self._me.group in self._drained:
            return self._advance(shard)
        self._drained.add(self._me.group)
        others = sorted(self._groups - {self._me.group})
        out: Out = [(Address(Role.SERVER, group, self._me.index), m.Drained()) for group in others]
        return out + self._advance(shard)

    def take(self, sender: Address, message: m.Message, body: torch.Tensor | None, shard: ParameterShard) -> Out:
        """Handle Drained, FinalValue, FinalRequest, ModelBufferValue or BufferRequest."""
        if isinstance(message, m.Drained):
            self._drained.add(sender.group)
        elif isinstance(message, m.FinalValue) and body is not None:
            self._keep_final(sender.group, message.bucket, body, shard)
        elif isinstance(message, m.ModelBufferValue):
            self._keep_buffer(message, body)
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
        if self._ring:
            # The body is a view of a receive buffer.
            self._finals[(group, number)] = body.clone()
        elif (group, number) not in self._finals:
            shard.values(bucket.id).copy_(body)
            self._finals[(group, number)] = None

    def _advance(self, shard: ParameterShard) -> Out:
        out: Out = []
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
        return out

    def _hand_on(self, shard: ParameterShard) -> Out:
        if self._me.group == 0:
            return []
        home = Address(Role.SERVER, 0, self._me.index)
        mine = [b for b in shard.buckets if self._ring or b.master == self._me.group]
        return [(home, m.FinalValue(b.id, body=shard.values(b.id))) for b in mine] if len(self._groups) > 1 else []

    def _complete(self, shard: ParameterShard) -> bool:
        others = sorted(self._groups - {0})
        if not self._ring:
            return all((b.master, b.id) in self._finals for b in shard.buckets if b.master != 0)
        if not all((group, b.id) in self._finals for b in shard.buckets for group in others):
            return False
        for bucket in shard.buckets:
            total = shard.values(bucket.id)
            for group in others:
                theirs = self._finals[(group, bucket.id)]
                assert theirs is not None
                total.add_(theirs)
            total.div_(len(self._groups))
        return True

    def _answer(self, to: Address, ask: m.Message, shard: ParameterShard) -> Out | None:
        if isinstance(ask, m.FinalRequest):
            if not self._final:
                return None
            return [(to, m.Values(ask.round, b.id, -1, body=shard.values(b.id))) for b in shard.buckets]
        # Groups that have left send no buffers.
        there = self._worker_groups - self._away
        wanted = [(group, index) for group in sorted(there) for index in range(self._buffers_each)]
        if not self._buffers_from >= there or not self._buffers_here.issuperset(wanted):
            return None
        found: Out = [(to, m.ModelBufferValue(*key, body=self._buffers[key])) for key in wanted]
        return [*found, (to, m.ModelBufferValue(len(there), -1))]

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
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
            "away": self._away,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._drained, self._away = set(state["drained"]), set(state["away"])
        self._handed_on, self._finals, self._final = state["handed_on"], dict(state["finals"]), state["final"]
        self._asks, self._answered = list(state["asks"]), set(map(m.kind_of, state["answered"]))
        self._buffers, self._buffers_here = dict(state["buffers"]), set(state["buffers_here"])
        self._buffers_from, self._buffers_each = set(state["buffers_from"]), state["buffers_each"]
