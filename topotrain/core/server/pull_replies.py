"""Replies to pulls: when they are sent, and which values each worker group gets.

A reply waits until its group may go on (`consistency.Clocks`). All workers of a group get the values of the same
moment, however far apart they are served. Workers with a parameter buffer on the server's host find the values there
(see `shared_windows`), and get a message without a body. A worker of a split model is sent the buckets that it holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from topotrain.config.job import Pull
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role
from topotrain.core.model.shared_windows import VALUES
from topotrain.core.protocol import Applied, Fetch, Message, ProtocolError, Values
from topotrain.core.server.component_state import DeclaredState, State, field_values
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server_context import ServerContext
from topotrain.core.server.server_extension import makes_partial_steps

_MOST_HELD = 64  # replies to one worker, which waits for each before it asks again


@dataclass(frozen=True, slots=True)
class _Held:
    """A reply that is not sent yet. `round` is that of its Values."""

    worker: Address
    round: int
    applied: Applied | None
    fetch: bool


class ReplyParts(DeclaredState):
    """The buckets that the reply to a group's last step has.

    These are all, or those that the optimizer of the step changes (`StepPolicy.replies_in_part`).
    """

    STATE = ("_optimizer",)

    def __init__(self, context: ServerContext) -> None:
        self._state, self._hooks = context.state, context.hooks
        self._optimizer: dict[int, int] = {}  # by group, of its last step. Missing: the reply has all buckets

    def begin(self, group: int, optimizer: int) -> None:
        """A group's step with this optimizer is decided."""
        if self._hooks.policy.replies_in_part:
            self._optimizer[group] = optimizer

    def have(self, group: int, bucket: Bucket) -> bool:
        """Whether the reply has this bucket."""
        optimizer = self._optimizer.get(group)
        return optimizer is None or self._state.known.map.spaces[bucket.space].optimizer == optimizer


class PullReplies:
    """Sends the replies of one server once their groups may read.

    Args:
        context: the parts of the server that all others use.
        buffers: group -> name of its workers' parameter buffer. Other groups are sent their values.
    """

    def __init__(self, context: ServerContext, buffers: Mapping[int, str]) -> None:
        self._state, self._groups = state, groups = context.state, context.groups
        self._queue, self._hooks = context.queue, context.hooks
        job = state.job
        self._warms_up = job.warmup_steps if state.me.group == 0 else 0
        self._barrier = job.cluster.max_staleness == 0
        # A group with a bound may have to wait after its step, and values that it got early would be old by then.
        self._shows_early = job.cluster.max_staleness is None and not makes_partial_steps(job)
        # In partial steps a worker may still read one moment when the others have made the next.
        self._apart = makes_partial_steps(job)
        self._copies: dict[int, tuple[int, torch.Tensor]] = {}  # bucket -> its values at a version
        self._lazy = job.pull is Pull.kLazy  # the workers wait for each bucket by itself
        self._workers = state.topology.workers_per_group
        self._all_workers = tuple(range(self._workers))
        # A worker group that alone changes the values is shown the values themselves, and no copy of them.
        self._private = len(groups.groups) == 1 and not state.topology.synced
        self._buffers = buffers
        self.pulled = dict.fromkeys(groups.groups, 0)  # version that each group was shown last
        self.asked: set[int] = set()  # groups that have asked for values
        self._fetched: dict[Address, tuple[int, int]] = {}  # round of the last Fetch, and the group's step then
        self._shown: dict[int, int] = {}
        self._streamed: dict[int, tuple[int, set[int]]] = {}  # group -> the step and buckets that it was sent early
        self._fixed: dict[int, int] = {}  # group -> the step of which `pulled` is the version already
        self._held: list[_Held] = []
        self._applied: dict[int, Applied] = {}  # group -> the reply to its last step
        self.parts = ReplyParts(context)

    # --- requests ------------------------------------------------------------------------------------------------

    def fetch(self, sender: Address, message: Fetch) -> None:
        """A worker asks for values."""
        self._hold_fetch(sender, message, self._state.known.staging[sender.group].step)
        self.release()

    def _hold_fetch(self, worker: Address, message: Fetch, step: int) -> None:
        now = (message.round, step)
        before = self._fetched.get(worker, now)
        if message.round < before[0] or (message.round == before[0] and now != before):
            return  # repeated, and answered long ago: another moment's values would falsify the staleness
        self._check_held(worker)
        # Remembered after the reply, too, because a transport may repeat the request.
        self._fetched[worker] = now
        self.asked.add(worker.group)
        self._held.append(_Held(worker, -1 - message.round, None, True))

    def reply(self, worker: Address, applied: Applied, fetch: bool) -> None:
        """A worker's step is applied; it wants values, too, with `fetch`."""
        self._applied[worker.group] = applied
        self._held.append(_Held(worker, applied.step, applied, fetch))

    def repeat(self, worker: Address, fetch: bool) -> bool:
        """Reply again to a commit of the group's last step. False: there was no step."""
        applied = self._applied.get(worker.group)
        if applied is None:
            return False
        self._check_held(worker)
        # The worker gets values only if they are still those of that step.
        self.reply(worker, applied, fetch and (self._apart or self._shown.get(worker.group) == applied.step))
        self.release()
        return True

    def _check_held(self, worker: Address) -> None:
        """Raise ProtocolError for a worker with too many requests."""
        # Only a transport that repeats messages makes two requests of one.
        if sum(held.worker == worker for held in self._held) >= _MOST_HELD:
            raise ProtocolError(f"{worker} asks on and on for values: {_MOST_HELD} requests wait for replies")

    def forget(self, group: int) -> None:
        """Forget a group with new processes, which number their requests from the start."""
        self._held = [held for held in self._held if held.worker.group != group]
        self._fetched = {worker: asked for worker, asked in self._fetched.items() if worker.group != group}
        for known in (self._shown, self._streamed, self._fixed):
            known.pop(group, None)

    def forget_one(self, worker: Address) -> None:
        """Forget one worker with a new process."""
        self._held = [held for held in self._held if held.worker != worker]
        self._fetched.pop(worker, None)

    # --- replies -------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Send held replies to groups that may read now."""
        model = self._state.model
        if model is None:
            return
        # Replies that still wait are put back in their order.
        waiting, self._held = self._held, []
        for held in waiting:
            if not self._may_read(held.worker.group) or not self._all_wait(held, waiting):
                self._held.append(held)
                continue
            # The values come first: in shared memory a worker reads them as soon as it has the Applied of its step.
            if held.fetch:
                self._send_values(model, held)
            if held.applied is not None:
                self._queue.send(held.worker, held.applied)

    def _may_read(self, group: int) -> bool:
        clocks = self._groups.clocks
        # Before the common start only group 0 trains, in its warm-up.
        if not self._state.common:
            return group == 0 and clocks.clock(0) < self._warms_up and self._state.complete
        # A barrier from the start: no group's first update may come before another group's first read.
        if self._barrier and not self.asked.issuperset(clocks.live()):
            return False
        return clocks.may_start(group)

    def show_early(self, group: int, bucket: Bucket, version: int) -> None:
        """Send a new bucket before the next one is computed, if its group never waits."""
        if self._shows_early and self._state.common and self.parts.have(group, bucket):
            model = self._state.known
            self._stream(model, group, bucket, model.staging[group].step, version)

    def _stream(self, model: ParameterShard, group: int, bucket: Bucket, step: int, version: int) -> None:
        # Values in shared memory must not change while a worker still computes with the old ones.
        if group in self._buffers and not self._lazy:
            return
        known, buckets = self._streamed.get(group, (-1, set()))
        if known != step:
            self._streamed[group] = (step, buckets := set())
            if not model.on_arrival:  # else the step counts as read when it is applied as a whole
                self._fixed[group], self.pulled[group] = step, version
        buckets.add(bucket.id)
        if group in self._buffers:
            self._fill(model, self._buffers[group], bucket)
            values = Values(step, bucket.id, version)
        else:
            # One message object for all owners: the difference to earlier values is encoded once per group.
            model.codec.show(group, bucket, model.values(bucket.id), anew=False)
            values = self._message(model, group, bucket, step, version, new=True)
        for index in self._owners(model, bucket):
            if index in model.staging[group].participants:
                self._send(Address(Role.WORKER, group, index), values)

    def _send(self, worker: Address, values: Values) -> None:
        """Send values. An extension may send them another way."""
        router = self._hooks.route_values
        if router is None:
            self._queue.send(worker, values)
        else:
            self._queue.send_all(router.route_values(worker, values))

    def _owners(self, model: ParameterShard, bucket: Bucket) -> Sequence[int]:
        """The workers of a group that hold a bucket."""
        return model.map.spaces[bucket.space].owners or self._all_workers

    def _all_wait(self, held: _Held, waiting: Sequence[_Held]) -> bool:
        """Whether all workers of a group wait that must wait for this reply."""
        group = held.worker.group
        # A parameter buffer is the workers' own parameters: it is written only while none of them computes.
        if not held.fetch or group not in self._buffers or self._shown.get(group) == held.round:
            return True
        waits = {h.worker for h in waiting if h.worker.group == group and h.round == held.round}
        return len(waits) == len(self._state.known.staging[group].participants)

    def _send_values(self, model: ParameterShard, held: _Held) -> None:
        group = held.worker.group
        if group in self._buffers:
            self._show_in_buffer(model, held)
            return
        new = self._shows_now(held)
        step, early = self._streamed.get(group, (-1, set()))
        for bucket in model.buckets:
            if step == held.round and bucket.id in early:
                continue
            if held.applied is not None and not self.parts.have(group, bucket):
                continue
            # After a fetch the worker may hold no earlier values, so an encoding starts from whole ones.
            if new:
                model.codec.show(group, bucket, model.values(bucket.id), anew=held.applied is None)
            # The first of a group has everything shown, for the others too: their moment is this one.
            values = self._message(model, group, bucket, held.round, self.pulled[group], new)
            if held.worker.index in self._owners(model, bucket):
                self._send(held.worker, values)

    def _message(
        self, model: ParameterShard, group: int, bucket: Bucket, number: int, version: int, new: bool
    ) -> Values:
        """The values of a bucket for a group. new: no worker of the group has got them."""
        difference = model.codec.difference(group, bucket)
        if difference is not None:
            return Values(number, bucket.id, version, coded=True, body=difference)
        # One copy per version for all workers: those that are late still read it when the values have moved on.
        if self._apart:
            return Values(number, bucket.id, version, body=self._copy(model, bucket, version))
        body = model.flats.view(VALUES if self._private else f"out {group}", bucket)
        if new and not self._private:
            # A copy: other groups change the values while this one is served.
            body.copy_(model.values(bucket.id))
        return Values(number, bucket.id, version, body=body)

    def _copy(self, model: ParameterShard, bucket: Bucket, version: int) -> torch.Tensor:
        """A bucket's values at this version: the present one, or that of the last call."""
        known = self._copies.get(bucket.id)
        if known is None or known[0] != version:
            known = self._copies[bucket.id] = version, model.values(bucket.id).clone()
        return known[1]

    def show(self, model: ParameterShard, worker: int, number: int, version: int) -> Iterator[Message]:
        """The values as they are, for one worker. number: their round."""
        for bucket in model.buckets:
            if worker in self._owners(model, bucket):
                body = self._copy(model, bucket, version)
                yield Values(number, bucket.id, version, body=body)

    def _shows_now(self, held: _Held) -> bool:
        """Whether this is the first worker of its group that gets this moment."""
        group = held.worker.group
        shown = self._shown.get(group)
        # A worker may have asked twice before another one of its group asks. That one gets the later moment both times:
        # with a moment in between, the two would go on with different values.
        if shown is not None and (shown == held.round or shown < held.round < 0):
            return False
        self._shown[group] = held.round
        # Buckets that were sent early have fixed the version already.
        if self._fixed.get(group) != held.round:
            # The staleness of the group's next gradient counts from here.
            self.pulled[group] = self._state.version
        return True

    def _show_in_buffer(self, model: ParameterShard, held: _Held) -> None:
        name = self._buffers[held.worker.group]
        step, early = self._streamed.get(held.worker.group, (-1, set()))
        if self._shows_now(held):
            for bucket in model.buckets:
                if step != held.round or bucket.id not in early:
                    self._fill(model, name, bucket)
        if held.applied is None or self._lazy:  # else the worker waits for the Applied of its step
            self._send(held.worker, Values(held.round, -1, self._state.version))

    def _fill(self, model: ParameterShard, name: str, bucket: Bucket) -> None:
        # The buffer VALUES is the shard's own: its update has changed it already.
        if name != VALUES:
            model.flats.view(name, bucket).copy_(model.values(bucket.id))

    def state_dict(self) -> State:
        return {
            "copies": self._copies,
            "pulled": self.pulled,
            "asked": self.asked,
            "fetched": self._fetched,
            "shown": self._shown,
            "streamed": self._streamed,
            "fixed": self._fixed,
            "applied": self._applied,
            "parts": self.parts.state_dict(),
            "held": [field_values(held) for held in self._held],
        }

    def load_state_dict(self, state: State) -> None:
        self._copies, self.pulled, self.asked = dict(state["copies"]), dict(state["pulled"]), set(state["asked"])
        self._fetched, self._shown, self._fixed = dict(state["fetched"]), dict(state["shown"]), dict(state["fixed"])
        self._streamed = {group: (step, set(buckets)) for group, (step, buckets) in state["streamed"].items()}
        self._applied = dict(state["applied"])
        self.parts.load_state_dict(state["parts"])
        self._held = [_Held(*values) for values in state["held"]]
