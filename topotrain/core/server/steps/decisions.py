"""The decisions of one server group, as one shard sees them.

Shards vote, the coordinator decides, and every shard carries out the same list of decisions in its order
(`consistency`). A decision is a step of a worker group, or a change that all shards make between the same two steps.
"""

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import IS_BACK, RESTARTS, RESTS, DecisionLog
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.steps.commit_agreement import StepError
from topotrain.core.server.steps.step_contributions import StepContributions
from topotrain.core.server.steps.step_execution import StepExecution, check_refused


class Decisions:
    """Makes the decisions, on the coordinator, and carries them out.

    Args:
        state, groups, contributions, steps, queue, hooks: the parts of the server that it uses.
    """

    def __init__(
        self,
        state: ShardState,
        groups: WorkerGroups,
        contributions: StepContributions,
        steps: StepExecution,
        queue: MessageQueue,
        hooks: ExtensionHooks,
    ) -> None:
        self._shards = state.topology.servers(state.me.group)
        self._state, self._groups = state, groups
        self._contributions, self._steps = contributions, steps
        self._queue, self._hooks = queue, hooks
        self.log = DecisionLog(state.topology.shards) if state.me.index == 0 else None
        """On the coordinator, which is shard 0."""
        self._rested: dict[int, tuple[int, int]] = {}  # group -> its last wait at an epoch's end that is over

    # --- on the coordinator --------------------------------------------------------------------------------------

    def vote(self, sender: Address, message: m.StepVote) -> None:
        """A shard has all it needs for a step."""
        assert self.log is not None
        check_refused(message, self._state.topology.workers_per_group, len(self._state.known.schema.parameters))
        self.log.staged(sender.index, message)
        self.decide()

    def decide(self) -> None:
        """Decide every step that is ready."""
        if self.log is None:
            return
        for group, step in self.log.ready(self._hooks.policy):
            if self._groups.clocks.may_decide(group):
                for extension in self._hooks.before_decision:
                    extension.before_decision(group)
                self.send(self.log.decide(group, step))

    def decree(self, group: int, clock: int, change: int, members: tuple[int, ...] = ()) -> None:
        """Have all shards make a change between the same two steps."""
        if self.log is not None:
            self.send(self.log.decree(group, clock, change, members))

    def send(self, decision: m.StepDecision) -> None:
        """Send a decision to all shards."""
        for server in self._shards:
            self._queue.send(server, decision)

    def repeat(self, sender: Address, message: m.StepDecisionRequest) -> None:
        """A shard asks for the decisions from a number on."""
        assert self.log is not None
        for decision in self.log.since(message.index):
            self._queue.send(sender, decision)

    def idle(self, sender: Address, message: m.GroupIdle) -> None:
        """A group waits at the end of an epoch, or does not wait any more."""
        group, wait = sender.group, (message.epoch, message.ordinal)
        over = wait <= self._rested.get(group, (-1, -1))
        live = group in self._groups.clocks.live()
        if message.resting:
            if live and not over:
                self.decree(group, 0, RESTS)
            return
        if not over:
            self._rested[group] = wait
            if not live and self._groups.runs(group):
                self._decree_return(group)
        self._queue.send(sender, message)

    def rejoin(self, group: int) -> None:
        """The group has workers again. Groups that warm up start together."""
        if group in self._groups.clocks.live() or not self._groups.runs(group):
            return
        if self._state.common or group == 0:
            self._decree_return(group)
        else:
            self._groups.join_at_start(group)

    def _decree_return(self, group: int) -> None:
        self.decree(group, self._groups.clocks.entry(group), IS_BACK)

    @property
    def undecided(self) -> int:
        """Steps of which nothing is decided, though some shard has all it needs for them."""
        return 0 if self.log is None else self.log.undecided

    # --- on every shard ------------------------------------------------------------------------------------------

    def receive(self, message: m.StepDecision) -> None:
        """Carry out a decision, and those after it that have come before."""
        for decision in self._state.order.arrive(message):
            try:
                if decision.change:
                    self._change(decision)
                else:
                    self._steps.carry_out(decision)
            except (StepError, ConfigError) as error:
                self._steps.fail(decision.group, str(error))

    def _change(self, decision: m.StepDecision) -> None:
        if decision.change in (RESTARTS, RESTS):
            self._groups.pause(decision.group)
        elif decision.change == IS_BACK:
            self._groups.resume(decision.group, decision.step)
        for extension in self._hooks.on_decree.get(decision.change, ()):
            self._queue.send_all(extension.on_decree(decision))

    def catch_up(self) -> None:
        """Send the votes again, over a new connection.

        The server also asks for the decisions that it has missed.
        """
        self._contributions.repeat_votes()
        self._queue.send(self._shards[0], m.StepDecisionRequest(self._state.order.next))

    def reset(self, group: int) -> None:
        """The workers of the group are gone."""
        self._rested.pop(group, None)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"log": None if self.log is None else self.log.state_dict(), "rested": self._rested}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        if self.log is not None:
            self.log.load_state_dict(state["log"])
        self._rested = dict(state["rested"])
