"""The steps of the worker groups on one server: pushes in, a vote, a decision, and new values.

A step is staged once all its contributions are here. The server then votes, and `Decisions` carries the step out when
the coordinator has decided it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from topotrain.config.async_momentum import explanation, momentum_in
from topotrain.config.job import ConfigError
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role, Topology
from topotrain.core import protocol as m
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol import Commit, check_bits, int_to_bits
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import IS_BACK, RESTARTS, RESTS, AppliedBatches, DecisionLog, LoopExits, pairs
from topotrain.core.server.gradients.gradient_source import GradientSource, ReducedBucket, StepError
from topotrain.core.server.group_exchange import GroupExchange
from topotrain.core.server.nonfinite import NOBODY, NonfiniteLimit, complaint
from topotrain.core.server.parameter_shard import ParameterShard, global_norm, step_factor
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_context import ServerContext
from topotrain.core.server.server_extension import StepResult, makes_partial_steps


class SampleCounts:
    """The number of each worker's samples that are in the values of one server group.

    With each step a worker sends the number of samples of its gradient. They count once, when the step changes the
    values: not with a gradient that was refused, and not with a step that is not decided. The counts outlive the
    worker's process, and they are in snapshots.

    Args:
        topology: the job's layout.
        group: the server group.
        before: the counts of an earlier start of the job. The counts of workers that exist no more are added to
            those of worker (0,0), so that the sum stays the same.
    """

    def __init__(self, topology: Topology, group: int, before: Mapping[Address, int]) -> None:
        there = {who for g in range(topology.worker_groups) for who in topology.workers(g)}
        mine = {who for g in topology.worker_groups_of(group) for who in topology.workers(g)}
        self.counts = {who: before.get(who, 0) for who in sorted(mine)}
        first = Address(Role.WORKER, 0, 0)
        if first in mine:
            self.counts[first] += sum(count for who, count in before.items() if who not in there)

    def applied(self, group: int, commits: Mapping[int, Commit], refused: Collection[int]) -> None:
        """Count a step of a group that is in the values, without these of its workers."""
        for index, commit in commits.items():
            if index not in refused:
                self.counts[Address(Role.WORKER, group, index)] += commit.samples

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"counts": self.counts}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.counts = dict(state["counts"])


class StepPipeline:
    """Takes the gradients and commits of the workers, and carries out the steps that are decided.

    Args:
        context: the parts of the server that all others use.
        replies: the replies to the workers.
        exchange: the messages to other server groups.
    """

    def __init__(self, context: ServerContext, replies: PullReplies, exchange: GroupExchange) -> None:
        self._state, self._groups = state, groups = context.state, context.groups
        self._queue, self._hooks = context.queue, context.hooks
        self._replies, self._exchange = replies, exchange
        me, job, self._topology, start = state.me, state.job, state.topology, state.start
        self._coordinator = Address(Role.SERVER, me.group, 0)
        self._partial = makes_partial_steps(job)
        self._shows_early = job.cluster.max_staleness is None and not self._partial
        self._spans: Recorder = SILENT
        self.batches = AppliedBatches(start.first_epoch)
        self._samples = SampleCounts(self._topology, me.group, start.samples)
        self._strikes = NonfiniteLimit(job.nonfinite)
        self._exits = {group: LoopExits(self._topology.workers_per_group) for group in groups.groups}
        self.hyper = dict.fromkeys(groups.groups, b"")
        """Of each worker group: the hyper-parameters of its last commit."""
        self._hyper_of: dict[Address, bytes] = {}
        self._good_hyper = b""
        self._applied: dict[int, m.Applied] = {}
        self._taken = dict.fromkeys(groups.groups, 0)  # steps, of all incarnations of a group

    @property
    def samples(self) -> Mapping[Address, int]:
        """Of each worker of this server group: how many of its samples are in the values."""
        return self._samples.counts

    def record_spans(self, spans: Recorder) -> None:
        """Record how long updates on arrival take."""
        self._spans = spans

    # --- what workers send ---------------------------------------------------------------------------------------

    def push(self, sender: Address, message: m.Push) -> None:
        """A worker's gradient of a bucket."""
        staging = self.current_source(sender, message.step)
        if staging is not None:
            model = self._state.known
            bucket = model.bucket(message.bucket)
            check_bits(message.present, len(bucket.pieces), sender, f"the pieces of bucket {bucket.id}")
            body = model.codec.push(sender, message, bucket, model.values(message.bucket))
            self._send_means(sender.group, message.ordinal, staging.push(sender.index, message, body))

    def backward_end(self, sender: Address, message: m.BackwardEnd) -> None:
        """A worker's backward is over."""
        self._state.known.staging[sender.group].check(sender, message)
        staging = self.current_source(sender, message.step)
        if staging is None:
            return
        self._check_together(sender, message)
        self._send_means(sender.group, message.ordinal, staging.end(sender.index, message))
        if staging.waits:
            self.check_all_continue(sender.group)
        for extension in self._hooks.backward_ended:
            self._queue.send_all(extension.backward_ended(sender, message))

    def _send_means(self, group: int, ordinal: int, ready: Iterable[ReducedBucket]) -> None:
        model = self._state.known
        staging = model.staging[group]
        for reduced in ready:
            if model.on_arrival:
                self.update_on_arrival(group, reduced)
                continue
            if reduced.mean is None:
                continue
            bucket = model.bucket(reduced.bucket)
            present = int_to_bits(reduced.present, len(bucket.pieces))
            body = model.codec.mean_body(group, bucket, reduced.mean)
            self._send_group(group, m.ReducedGradient(staging.step, ordinal, reduced.bucket, present, body=body))
        closed = staging.closed(ordinal)
        if closed is not None and not model.on_arrival:
            bits = int_to_bits(closed[0], len(model.buckets))
            written = int_to_bits(closed[1], model.pieces) if closed[1] else b""
            self._send_group(group, m.BackwardReduced(staging.step, ordinal, bits, written))
        self.try_stage(group)

    def rates(self, sender: Address, message: m.StepRates) -> None:
        """A worker's hyper-parameters, which updates on arrival need before the commit."""
        self._check_hyper(message.hyper)
        self._hyper_of[sender] = self.hyper[sender.group] = message.hyper

    def update_on_arrival(self, group: int, reduced: ReducedBucket) -> None:
        """Apply a mean that is there (`apply: kOnArrival`)."""
        bucket = self._state.known.bucket(reduced.bucket)
        with self._spans.span("apply", group=group, bucket=bucket.id):
            self._state.known.update_now(reduced, self.hyper[group])
        self._show_early(group, bucket, self._state.version)

    def _show_early(self, group: int, bucket: Bucket, version: int) -> None:
        """A bucket is new: a group that waits for no other has it before the next bucket is computed."""
        if self._shows_early and self._state.common:
            model = self._state.known
            step = model.staging[group].step
            self._replies.stream(model, group, bucket, step, version)

    def loop_exited(self, sender: Address, message: m.LoopExited) -> None:
        """A worker has left a loop over its data early."""
        self._exits[sender.group].left(sender.index, message.exits, (message.step, float(message.backwards)))

    def _check_together(self, sender: Address, message: m.BackwardEnd | m.Commit) -> None:
        backward = message.ordinal if isinstance(message, m.BackwardEnd) else float("inf")
        self._exits[sender.group].works(sender.index, message.exits, (message.step, backward))

    def check_all_continue(self, group: int) -> None:
        """Raise StepError if a script of a synchronous group has ended while others of the group continue."""
        for index, steps in () if self._partial else self._groups.finished(group).items():
            raise StepError(
                f"worker {index} ended its script after {steps} steps while others of its group go on; "
                f"all workers of a synchronous group must take the same steps"
            )

    def override(self, sender: Address, message: m.GradientOverride) -> None:
        """A bucket's gradient as a script has left it."""
        staging = self.current_source(sender, message.step)
        if staging is not None:
            staging.edit(message, self._state.known.body(message))
            self.try_stage(sender.group)

    def commit(self, sender: Address, message: m.Commit) -> None:
        """A worker has called `optimizer.step()`."""
        staging = self._state.known.staging[sender.group]
        if not self._hooks.policy.accepts_commit(sender, message, staging.step):
            return
        if message.step == staging.step - 1 and sender.group in self._applied:
            self._replies.repeat(sender, self._applied[sender.group], message.fetch)
            return
        if self.current_source(sender, message.step) is None:
            return
        self._check_commit(sender, message)
        self.check_all_continue(sender.group)
        if not self._partial:
            self._check_together(sender, message)
        # A worker sends its hyper-parameters when they have changed; the group must agree about all of them.
        hyper = message.hyper or self._hyper_of.get(sender, b"")
        self._hyper_of[sender] = self.hyper[sender.group] = hyper
        staging.commit(sender.index, replace(message, hyper=hyper))
        self.try_stage(sender.group)
        for extension in self._hooks.committed:
            self._queue.send_all(extension.committed(sender, message))

    def _check_commit(self, sender: Address, message: m.Commit) -> None:
        model, where = self._state.known, f"the commit of step {message.step}"
        for bits in (message.edited, message.dropped):
            check_bits(bits, model.pieces, sender, where)
        model.staging[sender.group].check(sender, message)
        if message.samples < 0:
            raise m.ProtocolError(f"{sender}: {where}: {message.samples} samples")
        self._check_hyper(message.hyper)

    def _check_hyper(self, hyper: bytes) -> None:
        """Before any value changes: raises StepError for settings that the optimizer could not go on with."""
        if not hyper or hyper == self._good_hyper:
            return
        try:
            self._state.known.hyper.check(hyper)
        except ConfigError as error:
            raise StepError(str(error)) from error
        self._good_hyper = hyper

    def current_source(self, sender: Address, step: int) -> GradientSource | None:
        """The group's staging, if a message of `step` is of its current step; None: an older step, which is over.

        Raises:
            StepError: the worker is ahead of its group.
        """
        staging = self._state.known.staging[sender.group]
        if step > staging.step:
            raise StepError(f"worker {sender.index} is in step {step}, the group in step {staging.step}")
        return staging if step == staging.step else None

    def applied_batches(self, sender: Address, message: m.AppliedBatchesRequest) -> None:
        """A worker asks how many batches of a data stream are applied, or how many steps of its group."""
        group = sender.group
        count = self._taken[group] if message.stream < 0 else self.batches.count(message.stream, group)
        self._queue.send(sender, m.AppliedBatchesReply(message.stream, count))

    # --- the vote ------------------------------------------------------------------------------------------------

    def try_stage(self, group: int) -> None:
        """Vote for the group's step, if all that it needs has just become complete."""
        staging = self._state.known.staging[group]
        # Extensions are asked last: most messages come before the last commit.
        if not self._partial and len(staging.commits) < staging.workers:
            return
        if all(each.may_stage(group, staging.step) for each in self._hooks.may_stage) and staging.try_stage():
            self._queue.send(self._coordinator, self._vote(group))

    def _vote(self, group: int) -> m.StepVote:
        model = self._state.known
        vote = model.vote(group, self._state.order.next)
        for extension in () if vote.members else self._hooks.amend_vote:
            vote = extension.amend_vote(vote, model.staging[group].commits)
        return vote

    def repeat_votes(self) -> None:
        """Vote again for each step that is staged and not decided."""
        model = self._state.model
        for group, staging in {} if model is None else model.staging.items():
            if staging.staged or staging.members:
                self._queue.send(self._coordinator, self._vote(group))

    def check_vote(self, message: m.StepVote | m.StepDecision) -> list[tuple[int, int]]:
        """The (worker, parameter) pairs whose gradients are refused.

        Raises:
            ProtocolError: workers that the group does not have, or parameters that the model does not have.
        """
        numbers, members = message.refused, message.members if isinstance(message, m.StepVote) else ()
        if not numbers and not members:
            return []
        where = f"step {message.step} of group {message.group}"
        workers, parameters = self._topology.workers_per_group, len(self._state.known.schema.parameters)
        if len(numbers) % 2 or any(not NOBODY <= n < workers for n in numbers[::2]):
            raise m.ProtocolError(f"{where}: no such workers: {numbers[::2]}")
        if any(not -1 <= n < parameters for n in numbers[1::2]):
            raise m.ProtocolError(f"{where}: no such parameters: {numbers[1::2]}")
        if any(not 0 <= index < workers for index in members):
            raise m.ProtocolError(f"{where}: no such workers: {members}")
        return pairs(numbers)

    # --- the decided step ----------------------------------------------------------------------------------------

    def carry_out(self, decision: m.StepDecision) -> None:
        """The step counts, or is skipped: update the values, and hold the replies until their groups may read."""
        group, step, model = decision.group, decision.step, self._state.model
        if model is None:
            raise m.ProtocolError(f"a decision about step {step} of group {group} before there is a model")
        staging = model.staging[group]
        self._hooks.policy.choose(staging, decision)
        if self._partial:
            self.hyper[group] = staging.first.hyper
        refused = dict(self.check_vote(decision))
        skipped = decision.found_inf or (bool(refused) and not model.refuse(group, refused.keys()))
        commit, staleness = staging.first, self._state.version - self._replies.pulled[group]
        norm = global_norm(decision.power, commit)
        new = self._record_batches(group, staging.marks)
        if new and not skipped:
            self._samples.applied(group, staging.commits, refused.keys())
            self._update(model, group, commit, norm, staleness)
        model.codec.step_done(group, new and not skipped, commit.inv_scale)
        version = self._state.version
        applied = m.Applied(staging.step, version, staleness, skipped, norm, refused=decision.refused)
        self._end_step(group, staging, applied)
        self._complain(group, step, refused)

    def _record_batches(self, group: int, marks: tuple[int, ...]) -> bool:
        """Whether the batches of the step count now; False: they have counted before."""
        try:
            new = self.batches.verdict(marks, group) == "new"
        except ValueError as error:
            raise StepError(str(error)) from error
        if new:
            self.batches.record(marks, group)
        return new

    def _update(self, model: ParameterShard, group: int, commit: m.Commit, norm: float, staleness: int) -> None:
        state, staging = self._state, model.staging[group]
        for bucket in model.apply(group, self.hyper[group], commit, norm, staleness):
            if commit.fetch:
                self._show_early(group, bucket, state.version + 1)
        for extension in self._hooks.apply_step:
            factor = step_factor(commit, norm)
            self._queue.send_all(extension.apply_step(group, staging.step, staging.commits, factor))
        state.count_update()
        if state.common and self._topology.synced:
            self._exchange.send(model.agreement.updated(model.touched(group)))

    def _end_step(self, group: int, staging: GradientSource, applied: m.Applied) -> None:
        for extension in self._hooks.amend_reply:
            applied = extension.amend_reply(group, applied, staging.first)
        self._applied[group] = applied
        for worker in self._groups.workers[group]:
            if worker.index in staging.commits:
                self._replies.reply(worker, applied, staging.commits[worker.index].fetch)
        result = StepResult(group, staging.step, staging.commits, applied)
        staging.next_step()
        self._groups.clocks.tick(group)
        self._taken[group] += 1
        for each in self._hooks.step_over:
            self._queue.send_all(each.step_over(result))

    def _complain(self, group: int, step: int, refused: dict[int, int]) -> None:
        """End the group if one of its workers has sent too many gradients that are not finite."""
        number = self._strikes.step(group, refused)
        if number is None:
            return
        model, who = self._state.known, "" if number == NOBODY else str(self._groups.workers[group][number])
        # Groups that do not wait for each other may have come to it by their momentum.
        momentum = momentum_in(OptimizerSpec.from_text(model.schema.optimizer).name, self.hyper[group])
        why = explanation(self._topology, momentum)
        text = complaint(who, model.parameter(refused[number]), step + 1, self._strikes.most, why)
        self.fail(group, text, self._strikes.quarantine)

    # --- the workers of a group ----------------------------------------------------------------------------------

    def fail(self, group: int, text: str, quarantine: bool = False) -> None:
        """Tell all workers of a group why they cannot continue."""
        self._send_group(group, m.Fail(f"worker group {group}: {text}", quarantine=quarantine))

    def _send_group(self, group: int, message: m.Message) -> None:
        for worker in self._groups.workers.get(group, ()):
            self._queue.send(worker, message)

    def reset(self, group: int) -> None:
        """The workers of a group are gone: forget what they have sent, except for what is applied."""
        for worker in self._groups.workers[group]:
            self._hyper_of.pop(worker, None)
        if self._state.model is not None:
            self._state.model.staging[group].restart()
            self._state.model.codec.forget(group)
        self._strikes.forget(group)
        self._exits[group] = LoopExits(self._topology.workers_per_group)

    def reset_worker(self, worker: Address) -> None:
        """The same of one worker, whose group continues."""
        self._hyper_of.pop(worker, None)
        if self._state.model is not None:
            self._state.model.staging[worker.group].forget(worker.index)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {
            "batches": self.batches.state_dict(),
            "samples": self._samples.state_dict(),
            "nonfinite": self._strikes.state_dict(),
            "exits": {group: exits.state_dict() for group, exits in self._exits.items()},
            "hyper": self.hyper,
            "hyper_of": self._hyper_of,
            "good_hyper": self._good_hyper,
            "applied": self._applied,
            "taken": self._taken,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.batches.load_state_dict(state["batches"])
        self._samples.load_state_dict(state["samples"])
        self._strikes.load_state_dict(state["nonfinite"])
        for group, exits in state["exits"].items():
            self._exits[group].load_state_dict(exits)
        self.hyper, self._hyper_of = dict(state["hyper"]), dict(state["hyper_of"])
        self._good_hyper = state["good_hyper"]
        self._applied, self._taken = dict(state["applied"]), dict(state["taken"])


class Decisions:
    """Makes the decisions of a server group, on the coordinator, and carries them out, on every shard.

    Shards vote, the coordinator decides, and every shard carries out the same list of decisions in its order
    (`consistency`). A decision is a step of a worker group, or a change that all shards make between the same two
    steps.

    Args:
        context: the parts of the server that all others use.
        steps: the steps of the worker groups.
    """

    def __init__(self, context: ServerContext, steps: StepPipeline) -> None:
        self._state, self._groups, self._steps = context.state, context.groups, steps
        self._queue, self._hooks = context.queue, context.hooks
        me, topology = context.state.me, context.state.topology
        self._shards = topology.servers(me.group)
        self.log = DecisionLog(topology.shards) if me.index == 0 else None
        """On the coordinator, which is shard 0."""
        self._rested: dict[int, tuple[int, int]] = {}  # group -> its last wait at an epoch's end that is over

    # --- on the coordinator --------------------------------------------------------------------------------------

    def vote(self, sender: Address, message: m.StepVote) -> None:
        """A shard has all it needs for a step."""
        assert self.log is not None
        self._steps.check_vote(message)
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
        """A connection was made anew: send the votes again, and ask for the decisions that have been missed."""
        self._steps.repeat_votes()
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
