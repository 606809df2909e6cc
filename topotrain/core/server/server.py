"""A parameter server: messages in, messages out.

One `Server` is one shard of one server group. It keeps the values and the optimizer state of its slice, stages what
the worker groups send, and is the one place where a parameter changes its value. It uses no socket, thread or clock:
a host, or a simulated network, gives it one message at a time and carries its answers.

The parts of a server, in the order in which a message meets them: `startup` makes the model and starts it,
`step_contributions` receives gradients and commits, `step_execution` decides on steps and carries them out,
`pull_replies` holds replies until their groups may read, and `group_exchange` sends values to other server groups. All
of them use `server_context`. The frameworks differ in `gradients`, `consistency`, `group_sync` and in the optimizer.
Optional features are extensions (`server_extension`); a server knows none of them by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.model.schema import BufferMemory
from topotrain.core.model.shared_windows import buffers_of
from topotrain.core.profiling.message_spans import handling
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol import MessageValidator
from topotrain.core.server.component_state import Component, State, load_states, states_of
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.core.server.group_exchange import GroupExchange, Shutdown
from topotrain.core.server.parameter_shard import ParameterShard
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_context import (
    MessageQueue,
    Out,
    ServerContext,
    ServerTimer,
    ShardState,
    StartPoint,
    WorkerGroups,
)
from topotrain.core.server.server_extension import ExtensionHooks, ServerExtension
from topotrain.core.server.startup import ModelStart, Startup
from topotrain.core.server.step_contributions import HyperParameters, StepContributions
from topotrain.core.server.step_execution import Decisions, StepExecution
from topotrain.core.transport_contract import MessageSender

# Decisions are among them, because the members of a job may change before a model is known.
_BEFORE_MODEL = frozenset({m.SchemaPart, m.SharedBuffer, m.StepDecision, m.StepDecisionRequest})
"""Messages that are handled before the model is known; others are held until then.

Steps are decided only where the model is known. Changes are decided before, too.
"""

Handler = Callable[[Address, Any], None]
_Extension = TypeVar("_Extension", bound=ServerExtension)


class Server:
    """One shard of one server group.

    Args:
        me: this server's address.
        job: the job.
        topology: its layout.
        memory: for values and means; transports can share it.
        shared: transports share memory: what both workers and servers of a host need exists there only once.
        sender: sends each answer as soon as there is one. None: `handle` returns the answers.
        start: where the job starts.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool = False,
        sender: MessageSender | None = None,
        start: StartPoint | None = None,
    ) -> None:
        self.me, self.shared = me, shared
        self.hooks = ExtensionHooks()
        self.spans: Recorder = SILENT
        self.validator = MessageValidator(me, topology, shared)
        self.state = ShardState(me, job, topology, start or StartPoint())
        self.queue = MessageQueue(me, self.hooks, sender)
        self.timer = ServerTimer(me, self.queue, self.hooks)
        self.worker_groups = WorkerGroups(job, topology, me.group)
        self.groups = self.worker_groups.groups
        self.shutdown = Shutdown(me, topology)
        context = ServerContext(self.state, self.worker_groups, self.queue, self.hooks)
        self.exchange = GroupExchange(context, self.shutdown)
        self.replies = PullReplies(context, buffers_of(topology, me.group) if shared else {})
        self.hyper = HyperParameters(self.state, self.groups)
        self.contributions = StepContributions(context, self.hyper, self.replies)
        self.steps = StepExecution(context, self.hyper, self.replies, self.exchange)
        self.decisions = Decisions(context, self.contributions, self.steps)
        self.startup = Startup(me, job, topology, memory, shared, self.queue)
        self.start = ModelStart(context, self.startup, self.replies, self.decisions, self.exchange)
        self._core_handlers = self._handlers = self._handled_here()

    def attach(self, extensions: Sequence[ServerExtension]) -> None:
        """Give the server its extensions, once, before its first message."""
        self.hooks.attach(extensions)
        # An extension may handle a message of the core first, and then pass it on to the part of the core.
        self._handlers = {**self._core_handlers, **dict.fromkeys(self.hooks.handlers, self._handle_extension)}

    def extension(self, kind: type[_Extension]) -> _Extension:
        """The extension of this class. Raises LookupError if the server has none."""
        found = next((each for each in self.hooks.extensions if isinstance(each, kind)), None)
        if found is None:
            raise LookupError(f"{self.me} has no {kind.__name__}")
        return found

    def record_spans(self, spans: Recorder) -> None:
        """Record from here on how long the server works at what."""
        self.spans = spans
        self.contributions.record_spans(spans)

    # --- messages in -------------------------------------------------------------------------------------------------

    def handle(self, sender: Address, message: m.Message) -> Out:
        """Handle one message. Returns the answers in order, unless a sender sends them.

        Raises:
            ProtocolError: no correct peer sends this message. It has changed nothing.
        """
        self.validator.check(sender, message)
        self.queue.begin()
        try:
            self._receive(sender, message)
        finally:
            # Also after an error: a refused message must not delay the messages of other senders that were held.
            if self.queue.pending:
                self._handle_pending()
        return self.queue.out

    def _handle_pending(self) -> None:
        while self.queue.pending:
            sender, message = self.queue.take()
            try:
                self._receive(sender, message)
            except m.ProtocolError as error:
                # The message was held, so its sender is not the one whose message is being handled.
                if sender == self.me:
                    raise RuntimeError(f"{self.me} contradicts itself: {error}") from error
                self.queue.send(sender, m.Fail(f"{self.me} refuses what {sender} said: {error}"))

    def _receive(self, sender: Address, message: m.Message) -> None:
        # First of all: a message of a process before a restart must be neither held nor refused, but dropped.
        for extension in self.hooks.accepts:
            if not extension.accepts(sender, message):
                return
        kind = type(message)
        if self.state.model is None and kind not in _BEFORE_MODEL and kind not in self.hooks.before_model:
            # Only a transport that reorders lets anything overtake the model's description.
            self.start.hold(sender, message)
            return
        handler = self._handlers.get(kind)
        if handler is None:
            raise m.ProtocolError(f"{self.me} has no extension that handles {kind.__name__}")
        try:
            if self.spans is SILENT:  # most jobs record no spans, and this runs for every message
                handler(sender, message)
            else:
                with handling(self.spans, sender, message):
                    handler(sender, message)
        except (StepError, ConfigError) as error:
            # The user's script or job is at fault, and not the peer: its group fails, and the connection stays.
            self.steps.fail(sender.group, str(error))

    def _handled_here(self) -> Mapping[type[m.Message], Handler]:
        start, given, decisions, exchange = self.start, self.contributions, self.decisions, self.exchange
        handlers: dict[type[m.Message], Handler] = {
            m.SchemaPart: start.schema_part,
            m.SharedBuffer: start.shared_buffer,
            m.Init: start.init,
            m.Fail: start.refused,
            m.StateRequest: start.optimizer_state,
            m.StatePart: start.optimizer_state,
            m.Fetch: self.replies.fetch,
            m.Push: given.push,
            m.BackwardEnd: given.backward_end,
            m.MeanRequest: given.mean_request,
            m.GradientOverride: given.override,
            m.Commit: given.commit,
            m.StepRates: given.rates,
            m.LoopExited: given.loop_exited,
            m.AppliedBatchesRequest: self.steps.applied_batches,
            m.StepVote: decisions.vote,
            m.StepDecision: self._carry_out,
            m.StepDecisionRequest: decisions.repeat,
            m.GroupIdle: decisions.idle,
            m.Finish: self._finish,
        }
        handlers |= dict.fromkeys((m.Delta, m.MasterValue, m.PairOffer, m.PairReply), exchange.receive)
        ends = (m.Drained, m.FinalValue, m.FinalRequest, m.ModelBufferValue, m.LastWrites, m.BufferRequest)
        return handlers | dict.fromkeys(ends, exchange.close)

    def _carry_out(self, sender: Address, message: m.StepDecision) -> None:
        self.decisions.receive(message)
        self._continue()

    def _continue(self) -> None:
        """The clock of a group has moved, or no group waits for it any more."""
        # The common start waits for the clock of group 0, which warms up.
        if not self.state.common:
            self.start.share()
        self.decisions.decide()
        self.replies.release()

    def _finish(self, sender: Address, message: m.Finish) -> None:
        self.worker_groups.finish(sender, message.steps)
        # A worker that waits for this one in a step would wait for ever.
        if self.state.known.staging[sender.group].waits:
            self.contributions.check_all_continue(sender.group)
        for extension in self.hooks.on_finish:
            extension.on_finish(sender, message.steps)
        if not self.worker_groups.runs(sender.group):
            self.worker_groups.clocks.leave(sender.group)
            self._continue()
        self.exchange.drain()

    def _handle_extension(self, sender: Address, message: m.Message) -> None:
        extension = self.hooks.handlers[type(message)]
        self.queue.send_all(extension.handle(sender, message))
        for other in self.hooks.on_handled:
            other.on_handled(extension)
        model = self.state.model
        if extension in self.hooks.draw_awaited and model is not None and sender.group in model.staging:
            self.contributions.check_draws(sender.group)
        # The message may be the last thing that the step of this group has waited for.
        if extension in self.hooks.may_stage and model is not None and sender.group in model.staging:
            self.contributions.try_stage(sender.group)

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where a body is to be received (see `transport.Endpoint.place`)."""
        self.validator.check(sender, message)
        extension = self.hooks.handlers.get(type(message))
        if extension is not None:
            return extension.place(sender, message, viewable)
        model = self.state.model
        # Without a model no size is known: a view is held with its message, any other body is refused.
        if model is None or isinstance(message, m.SharedBuffer):
            return None
        if isinstance(message, m.ModelBufferValue):
            return self.shutdown.buffer_place(message, model.schema)
        if isinstance(message, m.LastWrites):
            return torch.empty(8 * len(model.schema.parameters), dtype=torch.uint8)
        bucket = model.bucket(getattr(message, "bucket", -1))
        match message:
            case m.Init():
                # A repeated one must not overwrite values that have been updated since.
                return model.flats.view("unwanted" if self.state.has_values(message.bucket) else "values", bucket)
            case m.StatePart():
                piece = model.piece(message.bucket, message.piece)
                # The handler copies it at once, so all entries of all workers use one buffer.
                return model.flats.view("scratch", bucket)[bucket.place(piece)]
            # The sender's memory is read where it is: a view needs no buffer and no copy.
            case _ if viewable:
                return None
            case m.Push() | m.GradientOverride() if sender.group in self.groups:
                coded = model.codec.landing(sender, bucket) if isinstance(message, m.Push) else None
                # A buffer per worker: the sum has a fixed order, so it waits for the parts of all. An override comes
                # after the mean, when the worker's part is not needed any more.
                return model.flats.view(f"push {sender.group}/{sender.index}", bucket) if coded is None else coded
            case m.Delta() | m.MasterValue() | m.PairOffer() | m.PairReply() | m.FinalValue():
                # The next message of this group overwrites it, so handlers copy what they keep.
                return model.flats.view(f"from {sender.group}", bucket)
        return None

    # --- calls by the host -----------------------------------------------------------------------------------------

    def lost(self, worker: Address) -> Out:
        """The process of a worker is gone. Whether its script had ended is known here."""
        self.queue.begin()
        for extension in self.hooks.on_lost:
            extension.on_lost(worker)
        self._handle_pending()
        return self.queue.out

    def reconnected(self) -> Out:
        """Send undecided votes again over a new connection, and ask for missed decisions."""
        self.queue.begin()
        for extension in self.hooks.on_reconnect:
            extension.on_reconnect()
        self.decisions.catch_up()
        self._handle_pending()
        return self.queue.out

    # --- what extensions use ---------------------------------------------------------------------------------------

    def reset_group(self, group: int, ended: bool) -> None:
        """Forget the messages of a group's workers, which are gone. Applied steps stay.

        ended: all their scripts had ended. The group may use other servers.
        """
        for extension in self.hooks.reset_group:
            extension.reset_group(group, ended)
        # Server (0,0) collects the model's buffers of every group, also of one that uses other servers.
        self.shutdown.forget(group, ended)
        if group in self.groups:
            self.start.reset(self.worker_groups.workers[group])
            self.contributions.reset(group)
            self.steps.reset(group)
            self.replies.forget(group)
            self.decisions.reset(group)
            self.worker_groups.reset(group, ended)

    def reset_worker(self, worker: Address) -> None:
        """Another process has replaced one worker, and its group has continued."""
        self.start.reset([worker])
        self.replies.forget_one(worker)
        self.contributions.reset_worker(worker)
        for extension in self.hooks.reset_worker:
            extension.reset_worker(worker)

    # --- what others ask -------------------------------------------------------------------------------------------

    @property
    def model(self) -> ParameterShard | None:
        """The model, once it is known."""
        return self.state.model

    def has_finished(self, worker: Address) -> bool:
        """Whether the script of a worker of this server has ended."""
        if self.startup.schema is None:  # a job may have used only an extension
            return self._scripts_over
        return self.worker_groups.has_finished(worker)

    @property
    def running(self) -> bool:
        """Whether some script of a worker of this server has not ended."""
        return self.worker_groups.any_runs and (self.startup.schema is not None or not self._scripts_over)

    @property
    def _scripts_over(self) -> bool:
        return any(extension.scripts_over() for extension in self.hooks.scripts_over)

    @property
    def done(self) -> bool:
        """Nothing is left for this server to do."""
        if self.startup.schema is None:  # a job may have used only an extension
            return any(extension.is_done() for extension in self.hooks.is_done)
        return self.shutdown.done

    # --- a second copy -----------------------------------------------------------------------------------------------

    def state_dict(self) -> State | None:
        """Return the state between two messages, see `component_state`. None: not now."""
        parts = states_of(self._components)
        if parts is None or self.queue.pending:
            return None
        return {"schema": "" if self.model is None else self.model.schema.text(), "parts": parts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict` of another copy. Raises ProtocolError."""
        # Before the components are asked for: the shard is one of them once there is a model.
        if self.model is None and state["schema"]:
            self.start.make_model(state["schema"])
        load_states(self._components, state["parts"])

    @property
    def _components(self) -> dict[str, Component]:
        parts: dict[str, Component] = {
            "state": self.state,
            "startup": self.startup,
            "start": self.start,
            "groups": self.worker_groups,
            "replies": self.replies,
            "hyper": self.hyper,
            "contributions": self.contributions,
            "steps": self.steps,
            "decisions": self.decisions,
            "exchange": self.exchange,
            "shutdown": self.shutdown,
            **{type(extension).__name__: extension for extension in self.hooks.extensions},
        }
        return parts if self.model is None else {**parts, "shard": self.model}


class ServerFactory(ABC):
    """Makes the servers of one process, with all extensions that the job asks for."""

    @abstractmethod
    def make(self, me: Address, sender: MessageSender) -> Server:
        """Return a new server that sends its messages through this sender."""
