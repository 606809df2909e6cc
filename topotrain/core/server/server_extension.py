"""Extensions of a server: their messages, and hooks into steps, groups and the job.

A server is given its extensions when it is made, and knows none of them by name. `launch.runtime.server_composition` is
the one place that does. Every method of `ServerExtension` does nothing by default. A server looks once which extension
overrides which method (`ExtensionHooks`), so that a hook without a user costs an empty loop.

An extension returns what is to be sent. The server sends it at once, in the order of the list, and in the order of the
extensions where several have something to send.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.model.schema import FlatBuffers
from topotrain.core.server.component_state import State
from topotrain.core.server.gradients.gradient_source import GradientSource, SourceSettings
from topotrain.core.server.server_codec import ServerBodyCodec

Outbox = Sequence[tuple[Address, m.Message]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of a worker group that is over.

    commits: of the workers whose gradients made the step, by index. applied: the reply to them.
    """

    group: int
    step: int
    commits: Mapping[int, m.Commit]
    applied: m.Applied


class ServerExtension:
    """One feature of one server. A subclass overrides what it needs."""

    messages: tuple[type[m.Message], ...] = ()
    """The types of messages that this extension handles."""
    before_model: tuple[type[m.Message], ...] = ()
    """Those of `messages` that it handles before the server knows the model; the others are held until then."""

    decrees: tuple[int, ...] = ()
    """Values of `StepDecision.change` of which `on_decree` is told."""

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Memory for the body of one of `messages`, or None (see `Endpoint.place`).

        Raises ProtocolError for a message that has no body.
        """
        raise m.ProtocolError(f"{type(message).__name__} has no body")

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """Handle one of `messages`. Raises ProtocolError for what no correct peer sends."""
        return ()

    # --- the model -----------------------------------------------------------------------------------------------

    def server_codec(self, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> ServerBodyCodec | None:
        """The encoding of pushes, means and values, if this extension decides that.

        The server asks when it knows the model. shard, flats: the server's part of the model, and its buffers.
        """
        return None

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource | None:
        """The source of a worker group's gradients, if this extension decides that.

        The server asks when it knows the model. job: as it is carried out on this model.
        """
        return None

    # --- a step --------------------------------------------------------------------------------------------------

    def backward_ended(self, sender: Address, message: m.BackwardEnd) -> Outbox:
        """A worker has ended a backward of its group's current step."""
        return ()

    def committed(self, sender: Address, message: m.Commit) -> Outbox:
        """A worker has committed its group's current step."""
        return ()

    def route_values(self, worker: Address, values: m.Values) -> Outbox:
        """Send values to a worker. An extension may send them another way."""
        return ((worker, values),)

    def may_stage(self, group: int, step: int) -> bool:
        """Whether this extension has all that it needs for a step that every worker of the group has committed.

        The server asks again after each message that the extension has handled.
        """
        return True

    def amend_vote(self, vote: m.StepVote, commits: Mapping[int, m.Commit]) -> m.StepVote:
        """The shard's vote on a staged step, with what this extension has of the step taken into account."""
        return vote

    def apply_step(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Outbox:
        """The step counts, and the shard's values have just changed.

        factor: what every gradient of the step is multiplied by, for loss scaling and clipping.
        """
        return ()

    def step_over(self, result: StepResult) -> Outbox:
        """The step was applied or skipped. What is returned is sent before the replies to the step's workers."""
        return ()

    # --- entries of the decision log that are no step ----------------------------------------------------------------

    def on_decree(self, decision: m.StepDecision) -> Outbox:
        """A decision whose `change` is one of `decrees` is carried out on this shard."""
        return ()

    # --- a worker, a group, and the job ------------------------------------------------------------------------------

    def on_finish(self, worker: Address) -> None:
        """The script of a worker has come to its end."""

    def reset_group(self, group: int, ended: bool) -> None:
        """The workers of a group are gone: what they have sent counts only as far as it is applied.

        ended: all their scripts had come to their end.
        """

    def reset_worker(self, worker: Address) -> None:
        """The same of one worker, whose group goes on without it."""

    def snapshot_under_way(self) -> int:
        """The number of the snapshot for which workers leave their states now; 0: none."""
        return 0

    def has_begun(self) -> bool:
        """Whether workers have already left something here that no later worker would repeat."""
        return False

    def state_dict(self) -> State | None:
        """The state, from which a second copy of the server is made, see `component_state`. None: not possible now."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` of the same extension of another copy."""

    def refuses_regroup(self) -> str:
        """Why no worker group can restart, leave or join while the others go on; empty: they can."""
        return ""

    def refuses_leave(self) -> str:
        """Why no worker group can leave the job now; empty: they can."""
        return ""

    def streams(self, group: int) -> Sequence[int]:
        """Data streams of a group. `group_restarted` needs to know how many of their batches are applied."""
        return ()

    def group_restarted(self, group: int, applied: Callable[[int], int], ended: bool) -> Outbox:
        """The workers of a group are gone, and others will come in their place.

        applied: how many batches of a data stream count. ended: all scripts of the group had come to their end.
        """
        return ()

    def group_leaves(self, group: int) -> Outbox:
        """The workers of a group are to leave the job after their next step."""
        return ()

    def group_over(self, group: int) -> Outbox:
        """The workers of a group have left the job, or their scripts have ended. May be called twice."""
        return ()

    def group_returns(self, group: int) -> None:
        """The workers of a group that had left the job are back."""

    def scripts_over(self) -> bool:
        """In a job whose workers have described no model: whether all scripts have come to their end."""
        return False

    def is_done(self) -> bool:
        """In a job whose workers have described no model: whether nothing is left for this server to do."""
        return False


class ExtensionHooks:
    """The extensions of one server by the hooks that they override, in the order of the extensions."""

    def __init__(self, extensions: Sequence[ServerExtension]) -> None:
        self.handlers = {kind: extension for extension in extensions for kind in extension.messages}
        self.before_model = frozenset(kind for extension in extensions for kind in extension.before_model)
        self.server_codecs = overriding(extensions, ServerExtension.server_codec)
        self.gradient_sources = overriding(extensions, ServerExtension.gradient_source)
        self.backward_ended = overriding(extensions, ServerExtension.backward_ended)
        self.committed = overriding(extensions, ServerExtension.committed)
        self.route_values = next(iter(overriding(extensions, ServerExtension.route_values)), None)
        self.may_stage = overriding(extensions, ServerExtension.may_stage)
        self.amend_vote = overriding(extensions, ServerExtension.amend_vote)
        self.apply_step = overriding(extensions, ServerExtension.apply_step)
        self.step_over = overriding(extensions, ServerExtension.step_over)
        self.on_decree = {
            change: tuple(each for each in extensions if change in each.decrees)
            for change in {change for extension in extensions for change in extension.decrees}
        }
        self.on_finish = overriding(extensions, ServerExtension.on_finish)
        self.reset_group = overriding(extensions, ServerExtension.reset_group)
        self.reset_worker = overriding(extensions, ServerExtension.reset_worker)
        self.snapshot_under_way = overriding(extensions, ServerExtension.snapshot_under_way)
        self.has_begun = overriding(extensions, ServerExtension.has_begun)
        self.refuses_regroup = overriding(extensions, ServerExtension.refuses_regroup)
        self.refuses_leave = overriding(extensions, ServerExtension.refuses_leave)
        self.streams = overriding(extensions, ServerExtension.streams)
        self.group_restarted = overriding(extensions, ServerExtension.group_restarted)
        self.group_leaves = overriding(extensions, ServerExtension.group_leaves)
        self.group_over = overriding(extensions, ServerExtension.group_over)
        self.group_returns = overriding(extensions, ServerExtension.group_returns)
        self.scripts_over = overriding(extensions, ServerExtension.scripts_over)
        self.is_done = overriding(extensions, ServerExtension.is_done)

    def server_codec(self, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> ServerBodyCodec:
        """The codec of the first extension that brings one, or the default."""
        found = (extension.server_codec(slice_map, shard, flats) for extension in self.server_codecs)
        return next((codec for codec in found if codec is not None), None) or ServerBodyCodec()

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource | None:
        """The gradient source of the first extension that brings one."""
        found = (extension.gradient_source(job, slice_map, settings) for extension in self.gradient_sources)
        return next((source for source in found if source is not None), None)


def overriding(extensions: Sequence[ServerExtension], method: Callable[..., object]) -> tuple[ServerExtension, ...]:
    """The extensions whose class has a method of its own in the place of this one of `ServerExtension`."""
    name = method.__name__
    return tuple(extension for extension in extensions if getattr(type(extension), name) is not method)
