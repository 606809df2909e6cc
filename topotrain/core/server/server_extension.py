"""The interface of features outside the core: messages, and hooks of a server.

A server is given its extensions after it is made, and knows none of them by name. `launch.runtime.server_composition`
is the one place that does. Every method of `ServerExtension` does nothing by default.

An extension returns the messages to send. The server sends them at once, in the order of the list, and in the order of
the extensions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.events import Event
from topotrain.core.model.body_codec import ServerBodyCodec
from topotrain.core.model.schema import BucketValues, FlatBuffers
from topotrain.core.protocol import Commit, ProtocolError, StepDecision
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.gradients.gradient_source import GradientSource, SourceSettings, StagedGradient
from topotrain.core.server.group_sync import GroupSync


def makes_partial_steps(job: Job) -> bool:
    """Whether a step may be made of the contributions of some of a group's workers."""
    return job.cluster.backup > 0


class StepPolicy:
    """The rule that a step needs all workers. An extension may be another StepPolicy."""

    replies_in_part = False
    """Whether the reply to a step has only the values that its optimizer changes."""

    def accepts_commit(self, sender: Address, message: Commit, step: int) -> bool:
        """Whether the server handles this commit while the group is in `step`."""
        return True

    def enough(self, members: Collection[int]) -> bool:
        """Whether the contributions of these workers, which all shards have, make a step."""
        return True

    def updates(self, steps: Sequence[tuple[int, int]]) -> Sequence[Sequence[tuple[int, int]]]:
        """The updates of the values to decide now, each of one or more of these steps.

        steps: the (group, step) that all shards have, in group order. Those that are left out are asked for again.
        """
        return [(step,) for step in steps]

    def joint_gradient(self, sources: Mapping[int, GradientSource]) -> StagedGradient:
        """The gradient of an update that these worker groups' staged steps make together."""
        raise NotImplementedError

    def before_update(self, groups: Sequence[int], first: Commit, hyper: bytes) -> bytes | float:
        """An update is about to be made of a step of each of these groups, on this shard.

        first: a commit of it. hyper: as it was sent. Returns the hyper-parameters to use, or a rate: the gradient times
        it is then subtracted from the values, and the optimizer makes no step.
        """
        return hyper

    def on_replace(self, group: int, worker: int) -> None:
        """The coordinator has just decreed that one worker of a group has a new process."""

    def choose(self, staging: GradientSource, decision: StepDecision) -> None:
        """Keep the contributions of which the decided step is made.

        Raises:
            ProtocolError: something of the step is missing here, so it cannot have been decided.
        """
        if not staging.staged:
            step, group = decision.step, decision.group
            raise ProtocolError(f"a decision about step {step} of group {group}, which is not staged here")


ALL_WORKERS = StepPolicy()


Outbox = Sequence[tuple[Address, m.Message]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of a worker group that is over.

    commits: of the workers with gradients in the step, by index. applied: the reply to them. counts: as in `Commit`.
    """

    group: int
    step: int
    commits: Mapping[int, m.Commit]
    applied: m.Applied
    counts: bool = True


class ServerExtension(DeclaredState):
    """One feature of one server. A subclass overrides what it needs."""

    messages: tuple[type[m.Message], ...] = ()
    """The types of messages that this extension handles."""
    before_model: tuple[type[m.Message], ...] = ()
    """Those of `messages` that it handles before the server knows the model; the others are held until then."""
    observes: tuple[type[m.Message], ...] = ()
    """Types of messages of which `on_sent` is told."""
    decrees: tuple[int, ...] = ()
    """Values of `StepDecision.change` of which `on_decree` is told."""

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Memory for the body of one of `messages`, or None (see `Endpoint.place`).

        Raises:
            ProtocolError: the message has no body.
        """
        raise m.ProtocolError(f"{type(message).__name__} has no body")

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """Handle one of `messages`. Raises ProtocolError for what no correct peer sends."""
        return ()

    def on_handled(self, extension: "ServerExtension") -> None:
        """Another extension has handled a message."""

    def accepts(self, sender: Address, message: m.Message) -> bool:
        """Whether the server handles a message of this sender. False drops it."""
        return True

    def may_send(self, to: Address, message: m.Message) -> bool:
        """Whether the server sends a message to this receiver. False drops it."""
        return True

    def on_sent(self, to: Address, message: m.Message) -> None:
        """The server sends a message of one of the types in `observes`."""

    # --- a step --------------------------------------------------------------------------------------------------

    def may_stage(self, group: int, step: int) -> bool:
        """Whether this extension has all it needs for a step that all workers committed.

        The server asks again after each message that the extension has handled.
        """
        return True

    def amend_vote(self, vote: m.StepVote, commits: Mapping[int, m.Commit]) -> m.StepVote:
        """The shard's vote on a staged step, changed by this extension's part of it."""
        return vote

    def before_decision(self, group: int) -> None:
        """The coordinator is about to decide a step of this group."""

    def apply_step(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Outbox:
        """The step counts, and the shard's values have just changed.

        factor: what every gradient of the step is multiplied by, for loss scaling and clipping.
        """
        return ()

    def amend_reply(self, group: int, applied: m.Applied, first: m.Commit) -> m.Applied:
        """The reply to the workers of a step; first: the commit of the first of them."""
        return applied

    def step_over(self, result: StepResult) -> Outbox:
        """The step is over. The messages are sent before the replies to its workers."""
        return ()

    def on_decree(self, decision: m.StepDecision) -> Outbox:
        """A decision with a `change` out of `decrees` is carried out on this shard."""
        return ()

    # --- a worker, a group, and the job ------------------------------------------------------------------------------

    def draw_awaited(self) -> Mapping[Address, m.Message]:
        """The workers that wait for a draw of worker (0,0), and a message to it for each."""
        return {}

    def on_lost(self, worker: Address) -> None:
        """The process of a worker is gone."""

    def on_finish(self, worker: Address, steps: int) -> None:
        """The script of a worker has ended after so many steps. May raise StepError."""

    def on_reconnect(self) -> None:
        """A connection to another server is new, and earlier messages may be lost."""

    def reset_group(self, group: int, ended: bool) -> None:
        """The workers of a group are gone, and all of theirs that is not applied is void.

        ended: all their scripts had ended.
        """

    def reset_worker(self, worker: Address) -> None:
        """One worker is gone, and its group continues without it."""

    def group_over(self, group: int) -> Outbox:
        """The workers of a group have left or ended. This may be called twice."""
        return ()

    def has_begun(self) -> bool:
        """Whether workers have left something here that no later worker would repeat."""
        return False

    def scripts_over(self) -> bool:
        """Whether all scripts have ended, in a job without a model."""
        return False

    def is_done(self) -> bool:
        """Whether nothing is left for this server to do, in a job without a model."""
        return False

    def requested_states(self) -> int:
        """The number under which workers leave their states on this server now; 0: none."""
        return 0


class GradientExtension(ServerExtension):
    """An extension that decides how gradients are added up, or how values travel."""

    def server_codec(self, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> ServerBodyCodec | None:
        """The encoding of pushes, means and values, if this extension decides that.

        shard, flats: the server's part of the model, and its buffers.
        """
        return None

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource | None:
        """The source of a worker group's gradients, if this extension decides that.

        job: as it is carried out on this model.
        """
        return None

    def backward_ended(self, sender: Address, message: m.BackwardEnd) -> Outbox:
        """A worker has ended a backward of its group's current step."""
        return ()

    def committed(self, sender: Address, message: m.Commit) -> Outbox:
        """A worker has committed its group's current step."""
        return ()

    def route_values(self, worker: Address, values: m.Values) -> Outbox:
        """Send values to a worker. An extension may send them another way."""
        return ((worker, values),)


class RegroupExtension(ServerExtension):
    """An extension that takes part when worker groups restart, leave or join."""

    def refuses_regroup(self) -> str:
        """Why no group can restart, leave or join while others go on; empty: they can."""
        return ""

    def lacks_workers(self) -> bool:
        """Whether a group goes on without a worker, which is to come back."""
        return False

    def refuses_leave(self) -> str:
        """Why no worker group can leave the job now; empty: they can."""
        return ""

    def streams(self, group: int) -> Sequence[int]:
        """The data streams of a group: `group_restarted` needs their applied batches."""
        return ()

    def group_restarted(self, group: int, applied: Mapping[int, int], ended: bool) -> Outbox:
        """The workers of a group are gone, and others will come in their place.

        applied: how many batches of each data stream count; a missing stream has none. ended: all scripts of the group
            had come to their end.
        """
        return ()

    def group_leaves(self, group: int) -> Outbox:
        """The workers of a group are to leave the job after their next step."""
        return ()

    def group_returns(self, group: int) -> None:
        """The workers of a group that had left the job are back."""


class ExchangeExtension(ServerExtension):
    """An extension that takes part in the exchange of server groups."""

    def group_sync(self, values: BucketValues) -> GroupSync | None:
        """How the server agrees with other groups, if this extension decides that."""
        return None

    def take_exchange(self, sender: Address, message: m.Message, body: torch.Tensor) -> bool:
        """Take a message of another server group. True: this extension handles it."""
        return False

    def exchanged(self, message: m.Message, body: torch.Tensor) -> None:
        """The values have just taken what another server group has sent."""

    def amend_exchange(self, message: m.Message) -> m.Message:
        """Return a message about this server's values as another group receives it."""
        return message

    def on_drain(self) -> None:
        """No worker group of this server group trains any more."""


class StepStartExtension(ServerExtension):
    """An extension that acts between two decided steps, and must know the next one."""

    def before_apply(self, group: int, first: m.Commit) -> None:
        """A decided step of a group is about to be carried out on this shard.

        first: the commit of the first of its workers.
        """


class TimedExtension(ServerExtension):
    """An extension that asks the server's timer for messages (`ServerTimer`)."""

    def on_timer(self) -> None:
        """The timer has a host. Messages that were asked for before do not come any more."""


class ReportingExtension(ServerExtension):
    """An extension that reports something when its server has no work left."""

    def events(self) -> Sequence[Event]:
        """The coordinator has no work left: return its reports."""
        return ()

    def interim_events(self) -> Sequence[Event]:
        """The job goes on: return what a report needs if the job fails.

        It is called on another thread than that of the messages.
        """
        return ()


class ExtensionHooks:
    """The extensions of one server by the hooks that they override, in their order."""

    def __init__(self, extensions: Sequence[ServerExtension] = ()) -> None:
        self.attach(extensions)

    def attach(self, extensions: Sequence[ServerExtension]) -> None:
        """Find once which extension overrides which method."""
        # Hooks run for every message and step. A hook that no extension overrides costs an empty loop.
        self.extensions = tuple(extensions)
        self.policy = next((each for each in extensions if isinstance(each, StepPolicy)), ALL_WORKERS)
        self.handlers = {kind: extension for extension in extensions for kind in extension.messages}
        self.before_model = frozenset(kind for extension in extensions for kind in extension.before_model)
        self.on_handled = overriding(extensions, ServerExtension.on_handled)
        self.accepts = overriding(extensions, ServerExtension.accepts)
        self.may_send = overriding(extensions, ServerExtension.may_send)
        observed = {kind for extension in extensions for kind in extension.observes}
        self.on_sent = {kind: tuple(each for each in extensions if kind in each.observes) for kind in observed}
        self.may_stage = overriding(extensions, ServerExtension.may_stage)
        self.amend_vote = overriding(extensions, ServerExtension.amend_vote)
        self.before_decision = overriding(extensions, ServerExtension.before_decision)
        self.apply_step = overriding(extensions, ServerExtension.apply_step)
        self.amend_reply = overriding(extensions, ServerExtension.amend_reply)
        self.step_over = overriding(extensions, ServerExtension.step_over)
        changes = {change for extension in extensions for change in extension.decrees}
        self.on_decree = {change: tuple(each for each in extensions if change in each.decrees) for change in changes}
        self.draw_awaited = overriding(extensions, ServerExtension.draw_awaited)
        self.on_lost = overriding(extensions, ServerExtension.on_lost)
        self.on_finish = overriding(extensions, ServerExtension.on_finish)
        self.on_reconnect = overriding(extensions, ServerExtension.on_reconnect)
        self.reset_group = overriding(extensions, ServerExtension.reset_group)
        self.reset_worker = overriding(extensions, ServerExtension.reset_worker)
        self.group_over = overriding(extensions, ServerExtension.group_over)
        self.has_begun = overriding(extensions, ServerExtension.has_begun)
        self.scripts_over = overriding(extensions, ServerExtension.scripts_over)
        self.is_done = overriding(extensions, ServerExtension.is_done)
        self.requested_states = overriding(extensions, ServerExtension.requested_states)
        gradients = tuple(each for each in extensions if isinstance(each, GradientExtension))
        self.server_codecs = overriding(gradients, GradientExtension.server_codec)
        self.gradient_sources = overriding(gradients, GradientExtension.gradient_source)
        self.backward_ended = overriding(gradients, GradientExtension.backward_ended)
        self.committed = overriding(gradients, GradientExtension.committed)
        # One extension only: values that two of them route would arrive twice.
        self.route_values = next(iter(overriding(gradients, GradientExtension.route_values)), None)
        regroups = tuple(each for each in extensions if isinstance(each, RegroupExtension))
        self.refuses_regroup = overriding(regroups, RegroupExtension.refuses_regroup)
        self.refuses_leave = overriding(regroups, RegroupExtension.refuses_leave)
        self.lacks_workers = overriding(regroups, RegroupExtension.lacks_workers)
        self.streams = overriding(regroups, RegroupExtension.streams)
        self.group_restarted = overriding(regroups, RegroupExtension.group_restarted)
        self.group_leaves = overriding(regroups, RegroupExtension.group_leaves)
        self.group_returns = overriding(regroups, RegroupExtension.group_returns)
        starts = tuple(each for each in extensions if isinstance(each, StepStartExtension))
        self.before_apply = overriding(starts, StepStartExtension.before_apply)
        timed = tuple(each for each in extensions if isinstance(each, TimedExtension))
        self.on_timer = overriding(timed, TimedExtension.on_timer)
        reporting = tuple(each for each in extensions if isinstance(each, ReportingExtension))
        self.reporting = overriding(reporting, ReportingExtension.events)
        self.interim = overriding(reporting, ReportingExtension.interim_events)
        exchanges = tuple(each for each in extensions if isinstance(each, ExchangeExtension))
        self.group_syncs = overriding(exchanges, ExchangeExtension.group_sync)
        self.take_exchange = overriding(exchanges, ExchangeExtension.take_exchange)
        self.exchanged = overriding(exchanges, ExchangeExtension.exchanged)
        self.amend_exchange = overriding(exchanges, ExchangeExtension.amend_exchange)
        self.on_drain = overriding(exchanges, ExchangeExtension.on_drain)

    def server_codec(self, slice_map: SliceMap, shard: int, flats: FlatBuffers) -> ServerBodyCodec:
        """The codec of the first extension that brings one, or the default."""
        found = (extension.server_codec(slice_map, shard, flats) for extension in self.server_codecs)
        return next((codec for codec in found if codec is not None), None) or ServerBodyCodec()

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource | None:
        """The gradient source of the first extension that brings one."""
        found = (extension.gradient_source(job, slice_map, settings) for extension in self.gradient_sources)
        return next((source for source in found if source is not None), None)

    def group_sync(self, values: BucketValues) -> GroupSync | None:
        """How the server agrees with others, by the first extension that decides it."""
        found = (extension.group_sync(values) for extension in self.group_syncs)
        return next((group_sync for group_sync in found if group_sync is not None), None)


_Extension = TypeVar("_Extension", bound=ServerExtension)


def overriding(extensions: Iterable[_Extension], method: Callable[..., object]) -> tuple[_Extension, ...]:
    """The extensions that override this method of a class of extensions."""
    name = method.__name__
    return tuple(extension for extension in extensions if getattr(type(extension), name) is not method)
