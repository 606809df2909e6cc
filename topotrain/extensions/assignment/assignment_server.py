"""Assignments on a server: values that scripts set (`tt.assign`).

An assignment is a decision of the server group, like a step: all shards make it or none, at one place of the log. Its
commit has no gradients, and does not count as a step.

A fresh process repeats its script from an earlier place. So each assignment names its place in the script, and one that
a server has made already changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.model.body_codec import present_body
from topotrain.core.model.schema import typed
from topotrain.core.server.component_state import DeclaredState, State
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import Outbox, ServerExtension, StepResult
from topotrain.extensions.assignment.assignment_client import sender_of
from topotrain.extensions.assignment.assignment_messages import AssignedBucket, AssignedElements, Assignment
from topotrain.extensions.checkpointing.shard_snapshot import ValueChanger


@dataclass(slots=True)
class _WorkerPart:
    """The messages of one worker about its group's assignment."""

    head: Assignment | None = None
    buckets: dict[int, AssignedBucket] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.head is not None and len(self.buckets) == self.head.buckets

    def begin(self, head: Assignment) -> None:
        # The first one counts: a transport may repeat it.
        self.head = self.head or head


@dataclass(slots=True)
class _GroupAssignment:
    """The assignment of one worker group that is under way."""

    step: int
    parts: dict[int, _WorkerPart] = field(default_factory=dict)
    bodies: dict[int, torch.Tensor] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def head(self) -> Assignment:
        """The head of the first worker; those of the others name the same place."""
        head = self.parts[min(self.parts)].head
        assert head is not None
        return head

    def part(self, worker: int) -> _WorkerPart:
        return self.parts.setdefault(worker, _WorkerPart())

    def drop_values(self) -> None:
        self.bodies.clear()
        self.masks.clear()

    @property
    def has_masks(self) -> bool:
        """Whether the elements of all buckets are here for which they were announced."""
        buckets = (bucket for part in self.parts.values() for bucket in part.buckets.values())
        return all(bucket.bucket in self.masks for bucket in buckets if bucket.masked)


class MadeAssignments(DeclaredState):
    """The assignments of one worker group that its servers have made, by place."""

    STATE = ("_last", "_between")

    def __init__(self) -> None:
        self._last: tuple[int, int, int] = (0, -1, 0)  # stream and batch of the last place in a pass, and their number
        self._between: dict[int, int] = {}  # place between two passes -> number

    def make(self, head: Assignment) -> bool:
        """Note an assignment. False: it was made before."""
        stream, batch, last = self._last
        if head.stream < 0:
            known = self._between.get(head.stream, 0)
        else:
            known = last if (stream, batch) == (head.stream, head.batch) else 0
        if head.number < known:
            return False
        if head.stream < 0:
            self._between[head.stream] = head.number + 1
        else:
            self._last = (head.stream, head.batch, head.number + 1)
        return not head.repeated


class AssignmentServer(ServerExtension, ValueChanger):
    """The assignments of a server's worker groups.

    Args:
        server: the server.
    """

    messages = (Assignment, AssignedBucket, AssignedElements)

    def __init__(self, server: Server) -> None:
        self._server = server
        self._open: dict[int, _GroupAssignment] = {}
        self._made = {group: MadeAssignments() for group in server.groups}

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        model = self._server.state.model
        # The worker's memory is read where it is. Without a model no size is known.
        if viewable or model is None:
            return None
        if isinstance(message, AssignedElements):
            return torch.empty(_mask_bytes(model.bucket(message.bucket)), dtype=torch.uint8)
        if isinstance(message, AssignedBucket):
            return model.flats.view(f"assigned {sender.group}", model.bucket(message.bucket))
        return super().place(sender, message, viewable)

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """Keep a part of an assignment until its step is decided."""
        assert isinstance(message, Assignment | AssignedBucket | AssignedElements)
        if self._server.contributions.current_source(sender, message.step) is None:
            return ()
        model, now = self._server.state.known, self._of(sender.group, message.step)
        if isinstance(message, Assignment):
            now.part(sender.index).begin(message)
        elif isinstance(message, AssignedBucket):
            self._keep_bucket(model, now, sender, message)
        else:
            self._keep_elements(model, now, sender, message)
        return ()

    def _of(self, group: int, step: int) -> _GroupAssignment:
        now = self._open.get(group)
        if now is None or now.step != step:
            now = self._open[group] = _GroupAssignment(step)
        return now

    def _keep_bucket(
        self, model: ParameterShard, now: _GroupAssignment, sender: Address, message: AssignedBucket
    ) -> None:
        bucket = model.bucket(message.bucket)
        m.check_bits(message.changed, len(bucket.pieces), sender, f"the pieces of bucket {bucket.id}")
        if sender.index != sender_of(model.map, bucket):
            raise m.ProtocolError(f"{sender} assigns bucket {bucket.id}, on which another worker decides")
        body = typed(present_body(message), model.values(bucket.id))
        now.part(sender.index).buckets.setdefault(bucket.id, message)
        now.bodies.setdefault(bucket.id, body)

    def _keep_elements(
        self, model: ParameterShard, now: _GroupAssignment, sender: Address, message: AssignedElements
    ) -> None:
        bucket, body = model.bucket(message.bucket), present_body(message)
        if sender.index != sender_of(model.map, bucket) or body.nbytes != _mask_bytes(bucket):
            raise m.ProtocolError(f"{sender}: {body.nbytes} bytes of elements of bucket {bucket.id}")
        bits = np.unpackbits(body.view(torch.uint8).numpy(), count=bucket.hi - bucket.lo, bitorder="little")
        now.masks.setdefault(bucket.id, torch.from_numpy(bits).bool())

    @property
    def _workers(self) -> int:
        return self._server.state.topology.workers_per_group

    # --- the decided assignment --------------------------------------------------------------------------------------

    def may_stage(self, group: int, step: int) -> bool:
        """Whether an assignment is complete here, if the group commits one.

        Raises:
            StepError: the workers of the group are at different places of the script.
        """
        model = self._server.state.known
        if all(commit.counts for commit in model.staging[group].commits.values()):
            return True
        now = self._open.get(group)
        if now is None or now.step != step or len(now.parts) < self._workers:
            return False
        if not all(part.complete for part in now.parts.values()):
            return False
        self._check_places(now)
        return now.has_masks

    @staticmethod
    def _check_places(now: _GroupAssignment) -> None:
        parts = sorted(now.parts.items())
        heads = [(worker, part.head) for worker, part in parts if part.head is not None]
        first, head = heads[0]
        for worker, other in heads[1:]:
            if _place(other) != _place(head):
                raise StepError(
                    f"workers {first} and {worker} of a group are at different places of the script in tt.assign; "
                    f"all workers of a group must enter it between the same two steps, and equally often"
                )

    def apply_step(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Outbox:
        """As `ServerExtension.apply_step`: set the values."""
        if commits[min(commits)].counts:
            return ()
        now = self._open[group]
        if self._made[group].make(now.head):
            self._set(now)
        now.drop_values()
        return ()

    def follows_step(self, group: int) -> bool:
        """As `ValueChanger.follows_step`, until the next step is over."""
        return group in self._open and self._open[group].head.follows_step

    def step_over(self, result: StepResult) -> Outbox:
        # Snapshots still ask about an assignment when it is over.
        if result.counts:
            self._open.pop(result.group, None)
        return ()

    def _set(self, now: _GroupAssignment) -> None:
        model, state = self._server.state.known, self._server.state
        changed = {number: bucket.changed for part in now.parts.values() for number, bucket in part.buckets.items()}
        for number, bits in sorted(changed.items()):
            values, new = model.values(number), now.bodies[number]
            mask = now.masks.get(number)
            if mask is not None:
                values[mask] = new[mask]
                continue
            bucket, present = model.bucket(number), m.bits_to_int(bits)
            for i, piece in enumerate(bucket.pieces):
                if present >> i & 1:
                    here = bucket.place(piece)
                    values[here].copy_(new[here])
        # Other server groups get the change as they get an update.
        if state.common and state.topology.synced:
            self._server.exchange.send(model.group_sync.updated(sorted(changed)))

    # --- the workers of a group, and a second copy -------------------------------------------------------------------

    def reset_group(self, group: int, ended: bool) -> None:
        """As `ServerExtension.reset_group`. Assignments that are made stay."""
        self._open.pop(group, None)

    def state_dict(self) -> State:
        return {
            "open": {
                group: {
                    "step": now.step,
                    "parts": {worker: (part.head, part.buckets) for worker, part in now.parts.items()},
                    "bodies": now.bodies,
                    "masks": now.masks,
                }
                for group, now in self._open.items()
            },
            "made": {group: made.state_dict() for group, made in self._made.items()},
        }

    def load_state_dict(self, state: State) -> None:
        self._open = {
            group: _GroupAssignment(
                now["step"],
                {worker: _WorkerPart(head, dict(buckets)) for worker, (head, buckets) in now["parts"].items()},
                dict(now["bodies"]),
                dict(now["masks"]),
            )
            for group, now in state["open"].items()
        }
        for group, made in state["made"].items():
            self._made[group].load_state_dict(made)


def _place(head: Assignment) -> tuple[int, int, int, bool]:
    return head.stream, head.batch, head.number, head.repeated


def _mask_bytes(bucket: Bucket) -> int:
    return (bucket.hi - bucket.lo + 7) // 8
