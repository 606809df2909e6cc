"""The steps that are decided: new values, and the replies to the workers.

`decisions` calls `carry_out` once per decided step, on every shard in the same order.
"""

from collections.abc import Mapping

from topotrain.config.async_momentum import explanation, momentum_in
from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.optim.adapter import OptimizerSpec
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import AppliedBatches, pairs
from topotrain.core.server.gradients.gradient_source import GradientSource
from topotrain.core.server.groups.group_exchange import GroupExchange
from topotrain.core.server.groups.worker_groups import WorkerGroups
from topotrain.core.server.message_queue import MessageQueue
from topotrain.core.server.nonfinite import NOBODY, NonfiniteLimit, complaint
from topotrain.core.server.parameter_shard import ParameterShard, global_norm, step_factor
from topotrain.core.server.server_extension import ExtensionHooks, StepResult
from topotrain.core.server.shard_state import ShardState
from topotrain.core.server.steps.commit_agreement import StepError
from topotrain.core.server.steps.hyper_parameters import HyperParameters
from topotrain.core.server.steps.pulls import Pulls
from topotrain.core.server.steps.sample_counts import SampleCounts
from topotrain.core.server.steps.step_policy import makes_partial_steps


class StepExecution:
    """Carries out the decided steps of the worker groups on one server.

    Args:
        state, groups, hyper, pulls, exchange, queue, hooks: the parts of the server that it uses.
    """

    def __init__(
        self,
        state: ShardState,
        groups: WorkerGroups,
        hyper: HyperParameters,
        pulls: Pulls,
        exchange: GroupExchange,
        queue: MessageQueue,
        hooks: ExtensionHooks,
    ) -> None:
        self._state, self._groups, self._hyper, self._pulls = state, groups, hyper, pulls
        self._exchange, self._queue, self._hooks = exchange, queue, hooks
        job, self._topology, start = state.job, state.topology, state.start
        self._partial = makes_partial_steps(job)
        self.batches = AppliedBatches(start.first_epoch)
        self._samples = SampleCounts(self._topology, state.me.group, start.samples)
        self._strikes = NonfiniteLimit(job.nonfinite)
        self._taken = dict.fromkeys(groups.groups, 0)  # steps, of all incarnations of a group

    @property
    def samples(self) -> Mapping[Address, int]:
        """Of each worker of this server group: how many of its samples are in the values."""
        return self._samples.counts

    def applied_batches(self, sender: Address, message: m.AppliedBatchesRequest) -> None:
        """Reply with the number of applied batches of a stream, or of steps of the group."""
        group = sender.group
        count = self._taken[group] if message.stream < 0 else self.batches.count(message.stream, group)
        self._queue.send(sender, m.AppliedBatchesReply(message.stream, count))

    # --- the decided step ----------------------------------------------------------------------------------------

    def carry_out(self, decision: m.StepDecision) -> None:
        """Update the values, or skip the step.

        The replies are held until their groups may read.
        """
        group, step, model = decision.group, decision.step, self._state.model
        if model is None:
            raise m.ProtocolError(f"a decision about step {step} of group {group} before there is a model")
        staging = model.staging[group]
        self._hooks.policy.choose(staging, decision)
        if self._partial:
            self._hyper.use(group, staging.first.hyper)
        refused = dict(check_refused(decision, self._topology.workers_per_group, len(model.schema.parameters)))
        skipped = decision.found_inf or (bool(refused) and not model.refuse(group, refused.keys()))
        commit, staleness = staging.first, self._state.version - self._pulls.replies.pulled[group]
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
        for bucket in model.apply(group, self._hyper.of_group[group], commit, norm, staleness):
            if commit.fetch:
                self._pulls.show_early(group, bucket, state.version + 1)
        for extension in self._hooks.apply_step:
            factor = step_factor(commit, norm)
            self._queue.send_all(extension.apply_step(group, staging.step, staging.commits, factor))
        state.count_update()
        if state.common:
            self._exchange.send(model.agreement.updated(model.touched(group)))

    def _end_step(self, group: int, staging: GradientSource, applied: m.Applied) -> None:
        for extension in self._hooks.amend_reply:
            applied = extension.amend_reply(group, applied, staging.first)
        for worker in self._groups.workers[group]:
            if worker.index in staging.commits:
                self._pulls.replies.reply(worker, applied, staging.commits[worker.index].fetch)
        result = StepResult(group, staging.step, staging.commits, applied)
        staging.next_step()
        self._groups.clocks.tick(group)
        self._taken[group] += 1
        for each in self._hooks.step_over:
            self._queue.send_all(each.step_over(result))

    def _complain(self, group: int, step: int, refused: dict[int, int]) -> None:
        """End the group if a worker of it has sent too many non-finite gradients."""
        number = self._strikes.step(group, refused)
        if number is None:
            return
        model, who = self._state.known, "" if number == NOBODY else str(self._groups.workers[group][number])
        # Groups that do not wait for each other may have come to it by their momentum.
        momentum = momentum_in(OptimizerSpec.from_text(model.schema.optimizer).name, self._hyper.of_group[group])
        why = explanation(self._topology, momentum)
        text = complaint(who, model.parameter(refused[number]), step + 1, self._strikes.most, why)
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

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {
            "batches": self.batches.state_dict(),
            "samples": self._samples.state_dict(),
            "nonfinite": self._strikes.state_dict(),
            "taken": self._taken,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.batches.load_state_dict(state["batches"])
        self._samples.load_state_dict(state["samples"])
        self._strikes.load_state_dict(state["nonfinite"])
        self._taken = dict(state["taken"])


def check_refused(message: m.StepVote | m.StepDecision, workers: int, parameters: int) -> list[tuple[int, int]]:
    """The (worker, parameter) pairs that a vote or a decision refuses.

    workers, parameters: the numbers of them that a group and the model have.

    Raises:
        ProtocolError: workers that the group does not have, or parameters that the model does not have.
    """
    numbers, where = message.refused, f"step {message.step} of group {message.group}"
    if len(numbers) % 2 or any(not NOBODY <= n < workers for n in numbers[::2]):
        raise m.ProtocolError(f"{where}: no such workers: {numbers[::2]}")
    if any(not -1 <= n < parameters for n in numbers[1::2]):
        raise m.ProtocolError(f"{where}: no such parameters: {numbers[1::2]}")
    if isinstance(message, m.StepVote) and any(not 0 <= index < workers for index in message.members):
        raise m.ProtocolError(f"{where}: no such workers: {message.members}")
    return pairs(numbers)
