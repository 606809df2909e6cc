"""The decisions of a server group, and the steps that are decided.

`Decisions` calls `StepExecution.carry_out` once per update, on every shard in the same order. An update is a decided
step of one worker group. A `StepPolicy` may make one update of the steps of several groups.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from topotrain.config.async_momentum import explanation
from topotrain.config.job import ConfigError
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.optim.adapter import OptimizerSpec, momentum_in
from topotrain.core.server.component_state import DeclaredState
from topotrain.core.server.consistency import IS_BACK, RESTARTS, RESTS, AppliedBatches, DecisionLog
from topotrain.core.server.gradients.gradient_source import GradientSource, StepError
from topotrain.core.server.group_exchange import GroupExchange
from topotrain.core.server.nonfinite import NO_WORKER, NonfiniteLimit, nonfinite_message
from topotrain.core.server.parameter_shard import global_norm, step_factor
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_context import ServerContext
from topotrain.core.server.server_extension import StepResult, makes_partial_steps
from topotrain.core.server.step_contributions import HyperParameters, StepContributions


class SampleCounts(DeclaredState):
    """The number of each worker's samples that are in the values of one server group.

    The samples of a gradient count once, when its step changes the values. The counts outlive the worker's process, and
    they are in snapshots.

    Args:
        topology: the job's layout.
        group: the server group.
        before: the counts of an earlier start of the job.
    """

    STATE = ("counts",)

    def __init__(self, topology: Topology, group: int, before: Mapping[Address, int]) -> None:
        there = {who for g in range(topology.worker_groups) for who in topology.workers(g)}
        mine = {who for g in topology.worker_groups_of(group) for who in topology.workers(g)}
        self.counts = {who: before.get(who, 0) for who in sorted(mine)}
        first = Address(Role.WORKER, 0, 0)
        # A resumed job may have fewer workers. The sum over all of them stays the number of samples in the values.
        if first in mine:
            self.counts[first] += sum(count for who, count in before.items() if who not in there)

    def applied(self, group: int, commits: Mapping[int, m.Commit], refused: Collection[int]) -> None:
        """Count a step of a group that is in the values, without these of its workers."""
        for index, commit in commits.items():
            if index not in refused:
                self.counts[Address(Role.WORKER, group, index)] += commit.samples


SEVERAL_GROUPS = -1
"""In the place of a worker group, for an update of several."""


@dataclass(frozen=True, slots=True)
class _DecidedStep:
    """A decided step of a worker group.

    first: the first worker's commit. counts: the step changes the values. norm: of the whole gradient, -1: not clipped.
    """

    decision: m.StepDecision
    staging: GradientSource
    first: m.Commit
    refused: dict[int, int]
    skipped: bool
    counts: bool
    norm: float
    staleness: int


class StepExecution(DeclaredState):
    """Carries out the decided steps of the worker groups on one server.

    Args:
        context: the parts of the server that all others use.
        hyper: the hyper-parameters of the groups.
        replies: the replies to the workers.
        exchange: the messages to other server groups.
    """

    STATE = ("batches", "_samples", "_strikes", "_steps_of", "_last")

    def __init__(
        self, context: ServerContext, hyper: HyperParameters, replies: PullReplies, exchange: GroupExchange
    ) -> None:
        self._state, self._groups = state, groups = context.state, context.groups
        self._queue, self._hooks = context.queue, context.hooks
        self._hyper, self._replies, self._exchange = hyper, replies, exchange
        self._job, self._topology, start = state.job, state.topology, state.start
        job = self._job
        self._partial = makes_partial_steps(job)
        self.batches = AppliedBatches(start.first_epoch)
        self._samples = SampleCounts(self._topology, state.me.group, start.samples)
        self._strikes = NonfiniteLimit(job.nonfinite)
        self._steps_of = dict.fromkeys(groups.groups, 0)  # steps, of all incarnations of a group
        # Of each group: the batches of the last step that had any, and the number of steps from that one on.
        self._last: dict[int, tuple[tuple[int, ...], int]] = {}

    @property
    def samples(self) -> Mapping[Address, int]:
        """Of each worker of this server group: how many of its samples are in the values."""
        return self._samples.counts

    def applied_batches(self, sender: Address, message: m.AppliedBatchesRequest) -> None:
        """Reply with the number of applied batches of a stream, or of steps of the group."""
        group = sender.group
        if message.stream < 0:
            self._queue.send(sender, m.AppliedBatchesReply(message.stream, self._steps_of[group]))
            return
        marks, made = self._last.get(group, ((), 0))
        first = next((marks[i + 1] for i in range(0, len(marks), 3) if marks[i] == message.stream), None)
        count = self.batches.count(message.stream, group)
        reply = m.AppliedBatchesReply(message.stream, count, first or 0, 0 if first is None else made)
        self._queue.send(sender, reply)

    # --- the decided step ----------------------------------------------------------------------------------------

    def carry_out(self, decisions: Sequence[m.StepDecision]) -> None:
        """Update the values, or skip the step, and make the replies to its workers.

        decisions: one step of a worker group, or those of several groups that are one update.
        """
        steps = []
        for decision in decisions:
            try:
                steps.append(self._examine(decision))
            except (StepError, ConfigError) as error:
                # The other decisions belong to other groups, and must be carried out.
                self.fail(decision.group, str(error))
        counted = [step for step in steps if step.counts]
        if counted:
            try:
                self._update(counted)
            except (StepError, ConfigError) as error:
                for step in steps:
                    self.fail(step.decision.group, str(error))
                return
        results = [self._end_step(step) for step in steps]
        # The replies above are held until `release`, so these messages arrive before them. All steps of an update are
        # over by now, so that a snapshot has all of them or none.
        for result in results:
            for each in self._hooks.step_over:
                self._queue.send_all(each.step_over(result))
        for step, result in zip(steps, results, strict=True):
            if result.counts:
                self._count_nonfinite(step.decision.group, step.first, step.refused)

    def _examine(self, decision: m.StepDecision) -> "_DecidedStep":
        """Record the batches of a decided step; find out whether it changes the values."""
        group, model = decision.group, self._state.model
        if model is None:
            raise m.ProtocolError(f"a decision about step {decision.step} of group {group} before there is a model")
        staging = model.staging[group]
        self._hooks.policy.choose(staging, decision)
        for extension in self._hooks.before_apply:
            extension.before_apply(group, staging.first)
        # The last commit of the group may be of a worker that is not in this step.
        if self._partial or staging.hyper_differs:
            self._hyper.use(group, staging.first.hyper)
        refused = dict(check_refused(decision, self._topology.workers_per_group, len(model.schema.parameters)))
        skipped = decision.found_inf or (bool(refused) and not model.refuse(group, refused.keys()))
        # Recorded also for a step that is skipped: its batches are used up, and no other worker must repeat them.
        new = self._record_batches(group, staging.marks)
        if new and not skipped:
            self._samples.applied(group, staging.commits, refused.keys())
        self._replies.parts.begin(group, staging.first.optimizer)
        staleness = self._state.version - self._replies.pulled[group]
        norm = global_norm(decision.power, staging.first)
        return _DecidedStep(decision, staging, staging.first, refused, skipped, new and not skipped, norm, staleness)

    def _record_batches(self, group: int, marks: tuple[int, ...]) -> bool:
        """Whether the batches of the step count now; False: they have counted before."""
        try:
            new = self.batches.verdict(marks, group) == "new"
        except ValueError as error:
            raise StepError(str(error)) from error
        if new:
            self.batches.record(marks, group)
            # A script with several optimizers makes several steps with one batch.
            before, made = self._last.get(group, ((), 0))
            self._last[group] = (marks, 1) if marks else (before, made + 1)
        return new

    def _update(self, steps: Sequence["_DecidedStep"]) -> None:
        """Change the values once, with the gradients of these steps."""
        state, model = self._state, self._state.known
        for bucket in self._applied(steps):
            # The workers receive this bucket while the next one is computed.
            for step in steps:
                if step.first.fetch:
                    self._replies.show_early(step.decision.group, bucket, state.version + 1)
        for step in steps:
            group, staging, factor = step.decision.group, step.staging, step_factor(step.first, step.norm)
            for extension in self._hooks.apply_step:
                self._queue.send_all(extension.apply_step(group, staging.step, staging.commits, factor))
        state.count_update()
        # Updates of the warm-up are no difference: the other groups start from these values.
        if state.common and self._topology.synced:
            for step in steps:
                self._exchange.send(model.group_sync.updated(model.touched(step.decision.group)))

    def _applied(self, steps: Sequence["_DecidedStep"]) -> Iterator[Bucket]:
        """Update the values. Yields each bucket once it is new."""
        model, first = self._state.known, steps[0]
        group = first.decision.group
        groups = [step.decision.group for step in steps]
        hyper = self._hooks.policy.before_update(groups, first.first, self._hyper.of_group[group])
        if len(steps) == 1 and isinstance(hyper, bytes):
            return model.apply(group, hyper, first.first, first.norm, first.staleness)
        sources = {step.decision.group: step.staging for step in steps}
        gradient = self._hooks.policy.joint_gradient(sources) if len(steps) > 1 else first.staging
        if isinstance(hyper, float):
            return model.subtract(gradient, hyper)
        return model.apply_gradient(gradient, SEVERAL_GROUPS, hyper, None)

    def _end_step(self, step: "_DecidedStep") -> StepResult:
        """Reply to the workers of a step, and begin the group's next one."""
        group, staging = step.decision.group, step.staging
        self._state.known.codec.step_done(group, step.counts, step.first.inv_scale)
        applied = m.Applied(
            staging.step, self._state.version, step.staleness, step.skipped, step.norm, refused=step.decision.refused
        )
        for extension in self._hooks.amend_reply:
            applied = extension.amend_reply(group, applied, staging.first)
        for worker in self._groups.workers[group]:
            if worker.index in staging.commits:
                self._replies.reply(worker, applied, staging.commits[worker.index].fetch)
        # Before the next step begins, which has commits of its own.
        result = StepResult(group, staging.step, staging.commits, applied, staging.first.counts)
        staging.next_step()
        if result.counts:
            self._groups.clocks.tick(group)
            self._steps_of[group] += 1
        return result

    def _count_nonfinite(self, group: int, commit: m.Commit, refused: dict[int, int]) -> None:
        """End the group if a worker of it has sent too many non-finite gradients."""
        number = self._strikes.step(group, refused, commit.optimizer)
        if number is None:
            return
        model, worker = self._state.known, "" if number == NO_WORKER else str(self._groups.workers[group][number])
        # Groups that do not wait for each other may have come to it by their momentum.
        momentum = momentum_in(OptimizerSpec.from_text(model.schema.optimizer), self._hyper.of_group[group])
        why = explanation(self._job, self._topology, momentum)
        text = nonfinite_message(worker, model.parameter(refused[number]), commit.step + 1, self._strikes.most, why)
        self.fail(group, text, self._strikes.quarantine)

    # --- the workers of a group ----------------------------------------------------------------------------------

    def fail(self, group: int, text: str, quarantine: bool = False) -> None:
        """Send all workers of a group the reason why they cannot continue."""
        self._queue.send_each(
            self._groups.workers.get(group, ()), m.Fail(f"worker group {group}: {text}", quarantine=quarantine)
        )

    def reset(self, group: int) -> None:
        """Forget the refused gradients of a group that is gone. Applied batches stay."""
        self._strikes.forget(group)


class Decisions(DeclaredState):
    """Makes decisions on the coordinator, and carries them out on every shard.

    `consistency` describes the protocol. A decision is a step of a worker group, or a change that all shards make
    between the same two steps.

    Args:
        context: the parts of the server that all others use.
        contributions: gets the votes of this shard.
        steps: carries out decided steps.
    """

    STATE = ("log", "_rested", "_joined")

    def __init__(self, context: ServerContext, contributions: StepContributions, steps: StepExecution) -> None:
        self._state, self._groups = context.state, context.groups
        self._contributions, self._steps = contributions, steps
        self._queue, self._hooks = context.queue, context.hooks
        me, topology = context.state.me, context.state.topology
        self._shards = topology.servers(me.group)
        self.log = DecisionLog(topology.shards) if me.index == 0 else None
        """On the coordinator, which is shard 0."""
        self._rested: dict[int, tuple[int, int]] = {}  # group -> its last wait at an epoch's end that is over
        self._joined: list[m.StepDecision] = []  # decided steps of an update of which the last is not here yet

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
        # A step that may not be decided yet stays in the log, and is tried again when a clock moves.
        policy, clocks = self._hooks.policy, self._groups.clocks
        for update in policy.updates([each for each in self.log.ready(policy) if clocks.may_decide(each[0])]):
            # Before the decisions get their numbers: extensions may send changes that all shards make first.
            for group, _ in update:
                for extension in self._hooks.before_decision:
                    extension.before_decision(group)
            for group, step in update:
                self.send(self.log.decide(group, step, joined=(group, step) != update[-1]))

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
        # All workers of a group send this. A "rests" of one of them may come after a "goes on" of another, and must
        # not pause the group again.
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
        # An echo for every worker: each waits for its own before it reads values.
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
            if not decision.change:
                self._joined.append(decision)
                if not decision.joined:
                    together, self._joined = self._joined, []
                    self._steps.carry_out(together)
                continue
            try:
                self._change(decision)
            except (StepError, ConfigError) as error:
                # The decisions after this one belong to other groups, too, and must be carried out.
                self._steps.fail(decision.group, str(error))

    def _change(self, decision: m.StepDecision) -> None:
        if decision.change in (RESTARTS, RESTS):
            self._groups.pause(decision.group)
        elif decision.change == IS_BACK:
            self._groups.resume(decision.group, decision.step)
        for extension in self._hooks.on_decree.get(decision.change, ()):
            self._queue.send_all(extension.on_decree(decision))

    def catch_up(self) -> None:
        """Send the votes again, and ask for decisions that this shard has missed."""
        self._contributions.repeat_votes()
        self._queue.send(self._shards[0], m.StepDecisionRequest(self._state.order.next))

    def reset(self, group: int) -> None:
        """The workers of the group are gone."""
        self._rested.pop(group, None)


def check_refused(message: m.StepVote | m.StepDecision, workers: int, parameters: int) -> list[tuple[int, int]]:
    """The (worker, parameter) pairs that a vote or a decision refuses.

    Raises ProtocolError for workers that a group, or parameters that the model, does not have.
    """
    numbers, members = message.refused, message.members if isinstance(message, m.StepVote) else ()
    if not numbers and not members:
        return []
    where = f"step {message.step} of group {message.group}"
    if len(numbers) % 2 or any(not NO_WORKER <= n < workers for n in numbers[::2]):
        raise m.ProtocolError(f"{where}: no such workers: {numbers[::2]}")
    if any(not -1 <= n < parameters for n in numbers[1::2]):
        raise m.ProtocolError(f"{where}: no such parameters: {numbers[1::2]}")
    if any(not 0 <= index < workers for index in members):
        raise m.ProtocolError(f"{where}: no such workers: {members}")
    return m.refused_pairs(numbers)
