"""Contributions of workers to a step: gradients, ends of backwards, commits.

A step is staged once all its contributions are here. The server then votes for it. `step_execution` carries the step
out when the coordinator has decided it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.profiling.spans import SILENT, Recorder
from topotrain.core.protocol import check_bits, int_to_bits
from topotrain.core.server.component_state import State
from topotrain.core.server.consistency import LoopExits
from topotrain.core.server.gradients.gradient_source import GradientSource, ReducedBucket, StepError, ended_first
from topotrain.core.server.pull_replies import PullReplies
from topotrain.core.server.server_context import ServerContext, ShardState
from topotrain.core.server.server_extension import makes_partial_steps


class HyperParameters:
    """The hyper-parameters of each worker group that uses one server.

    Args:
        state: the server's model.
        groups: the worker groups.
    """

    def __init__(self, state: ShardState, groups: Iterable[int]) -> None:
        self._state = state
        self.of_group = dict.fromkeys(groups, b"")
        """Of each worker group: those of its last commit."""
        self._of_worker: dict[Address, bytes] = {}
        self._checked = b""

    def check(self, hyper: bytes) -> None:
        """Raise StepError for hyper-parameters that the optimizer refuses."""
        # At the commit, and not at the update: no value has changed yet.
        if not hyper or hyper == self._checked:
            return
        try:
            self._state.known.hyper.check(hyper)
        except ConfigError as error:
            raise StepError(str(error)) from error
        self._checked = hyper

    def receive(self, worker: Address, hyper: bytes) -> None:
        """Use the hyper-parameters of a worker for its group."""
        self._of_worker[worker] = self.of_group[worker.group] = hyper

    def last_of(self, worker: Address) -> bytes:
        """The hyper-parameters that a worker sent last."""
        # Workers send them again only when they have changed.
        return self._of_worker.get(worker, b"")

    def use(self, group: int, hyper: bytes) -> None:
        """Use these hyper-parameters for the step of a group that is decided."""
        self.of_group[group] = hyper

    def forget(self, worker: Address) -> None:
        """Forget a worker after the end of its process."""
        self._of_worker.pop(worker, None)

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"of_group": self.of_group, "of_worker": self._of_worker, "checked": self._checked}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self.of_group, self._of_worker = dict(state["of_group"]), dict(state["of_worker"])
        self._checked = state["checked"]


class StepContributions:
    """Receives the workers' contributions on one server, and votes for staged steps.

    Args:
        context: the parts of the server that all others use.
        hyper: the hyper-parameters of the groups.
        replies: the replies to the workers.
    """

    def __init__(self, context: ServerContext, hyper: HyperParameters, replies: PullReplies) -> None:
        self._state, self._groups = state, groups = context.state, context.groups
        self._queue, self._hooks = context.queue, context.hooks
        self._hyper, self._replies = hyper, replies
        self._workers = state.topology.workers_per_group
        self._coordinator = Address(Role.SERVER, state.me.group, 0)
        self._partial = makes_partial_steps(state.job)
        self._spans: Recorder = SILENT
        self._exits = {group: LoopExits(self._workers) for group in groups.groups}

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
            self.add(sender, message, body)

    def add(self, worker: Address, message: m.Push, body: torch.Tensor | None) -> None:
        """Add a worker's gradient of a bucket to the group's current step.

        body: as for `GradientSource.push`.
        """
        staging = self._state.known.staging[worker.group]
        # The source may return its means lazily, so they are sent, or applied, while it goes through its buckets.
        self._send_means(worker.group, message.ordinal, staging.push(worker.index, message, body))

    def backward_end(self, sender: Address, message: m.BackwardEnd) -> None:
        """A worker's backward is over."""
        self._state.known.staging[sender.group].check(sender, message)
        staging = self.current_source(sender, message.step)
        if staging is None:
            return
        self._check_together(sender, message)
        self._send_means(sender.group, message.ordinal, staging.end(sender.index, message))
        # A backward that is still open waits for all workers, also for one with an ended script.
        if staging.waits:
            self.check_all_continue(sender.group)
            self.check_draws(sender.group)
        for extension in self._hooks.backward_ended:
            self._queue.send_all(extension.backward_ended(sender, message))

    def _send_means(self, group: int, ordinal: int, ready: Iterable[ReducedBucket]) -> None:
        model = self._state.known
        staging = model.staging[group]
        # A worker that has not joined its group again does not know the model yet.
        workers = [self._groups.workers[group][index] for index in staging.participants]
        for reduced in ready:
            if model.on_arrival:
                self.update_on_arrival(group, reduced)
                continue
            self._send_mean([it for it in workers if it.index not in reduced.lazy], staging.step, ordinal, reduced)
        closed = staging.closed(ordinal)
        # With updates on arrival the workers wait for values, and for no means.
        if closed is not None and not model.on_arrival:
            there = {*staging.participants} - staging.absent
            absent = () if len(there) == self._workers else tuple(sorted({*range(self._workers)} - there))
            # A lazy worker is told which means it may ask for.
            for worker in workers:
                lazy = worker.index in closed.lazy
                sent, written = (0, closed.kept) if lazy else (closed.contributed, closed.written)
                bits = int_to_bits(sent, len(model.buckets)), int_to_bits(written, model.pieces) if written else b""
                self._queue.send(worker, m.BackwardReduced(staging.step, ordinal, *bits, absent))
        self.try_stage(group)

    def _send_mean(self, workers: Sequence[Address], step: int, ordinal: int, reduced: ReducedBucket) -> None:
        # A mean that is in the workers' memory already is announced by BackwardReduced.
        if not workers or reduced.mean is None:
            return
        model = self._state.known
        bucket = model.bucket(reduced.bucket)
        present = int_to_bits(reduced.present, len(bucket.pieces))
        body = model.codec.mean_body(workers[0].group, bucket, reduced.mean)
        self._queue.send_each(workers, m.ReducedGradient(step, ordinal, reduced.bucket, present, body=body))

    def mean_request(self, sender: Address, message: m.MeanRequest) -> None:
        """A lazy worker asks for the means of its group's last backward."""
        for reduced in self._state.known.staging[sender.group].kept(message.step, message.ordinal):
            self._send_mean([sender], message.step, message.ordinal, reduced)

    def rates(self, sender: Address, message: m.StepRates) -> None:
        """A worker's hyper-parameters, which updates on arrival need before the commit."""
        self._hyper.check(message.hyper)
        self._hyper.receive(sender, message.hyper)

    def update_on_arrival(self, group: int, reduced: ReducedBucket) -> None:
        """Apply a mean that is there (`apply: kOnArrival`)."""
        bucket = self._state.known.bucket(reduced.bucket)
        with self._spans.span("apply", group=group, bucket=bucket.id):
            self._state.known.update_now(group, reduced, self._hyper.of_group[group])
        self._replies.show_early(group, bucket, self._state.version)

    def loop_exited(self, sender: Address, message: m.LoopExited) -> None:
        """A worker has left a loop over its data early."""
        self._exits[sender.group].left(sender.index, message.exits, (message.step, float(message.backwards)))

    def _check_together(self, sender: Address, message: m.BackwardEnd | m.Commit) -> None:
        backward = message.ordinal if isinstance(message, m.BackwardEnd) else float("inf")
        self._exits[sender.group].works(sender.index, message.exits, (message.step, backward))

    def check_all_continue(self, group: int) -> None:
        """Raise StepError if a script of a group has ended while others of it continue."""
        # With backup workers a step is made without a worker that is late, so the numbers of steps differ.
        for index, steps in () if self._partial else self._groups.finished(group).items():
            raise StepError(ended_first(index, steps))

    def check_draws(self, group: int) -> None:
        """Tell worker (0,0), if it waits in a step for workers that wait for its draw."""
        # It knows whether it has drawn. On a transport that reorders, the draw may be on its way.
        for extension in self._hooks.draw_awaited if group == 0 else ():
            # First: in most steps no worker waits for a draw.
            waiting = extension.draw_awaited()
            if waiting:
                first, late = self._groups.workers[0][0], self._state.known.staging[0].awaited_by(0)
                self._queue.send_all((first, it) for who, it in waiting.items() if who.group == 0 and who.index in late)

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
        # A repeated commit of the step that is over gets its reply again, and is not counted.
        if message.step == staging.step - 1 and self._replies.repeat(sender, message.fetch):
            return
        if self.current_source(sender, message.step) is None:
            return
        # First, so that a message that no correct worker sends leaves nothing here.
        self._check_commit(sender, message)
        self.check_all_continue(sender.group)
        if not self._partial:
            self._check_together(sender, message)
        # A worker sends its hyper-parameters only after a change. They are put into the commit, because the commits of
        # a group are compared with each other.
        hyper = message.hyper or self._hyper.last_of(sender)
        self._hyper.receive(sender, hyper)
        staging.commit(sender.index, replace(message, hyper=hyper))
        self.check_draws(sender.group)
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
        if message.optimizer >= model.optimizers:
            raise m.ProtocolError(f"{sender}: {where}: no optimizer {message.optimizer}")
        self._hyper.check(message.hyper)

    def current_source(self, sender: Address, step: int) -> GradientSource | None:
        """The group's source, if `step` is its current step. None: that step is over.

        Raises:
            StepError: the worker is ahead of its group.
        """
        staging = self._state.known.staging[sender.group]
        # A correct worker begins a step only after the reply to the one before.
        if step > staging.step:
            raise StepError(f"worker {sender.index} is in step {step}, the group in step {staging.step}")
        return staging if step == staging.step else None

    # --- the vote ------------------------------------------------------------------------------------------------

    def try_stage(self, group: int) -> None:
        """Vote for the group's step, if all that it needs has just become complete."""
        staging = self._state.known.staging[group]
        for worker, ordinal in staging.take_joins() if staging.commits else ():
            self._queue.send(self._groups.workers[group][worker], m.JoinBackward(staging.step, ordinal))
        # Extensions are asked last: most messages come before the last commit.
        if not self._partial and len(staging.commits) < len(staging.participants):
            return
        if all(each.may_stage(group, staging.step) for each in self._hooks.may_stage) and staging.try_stage():
            self._queue.send(self._coordinator, self._vote(group))

    def _vote(self, group: int) -> m.StepVote:
        model = self._state.known
        vote = model.vote(group, self._state.order.next)
        # A vote with members is of a job with backup workers. It has no tables, and no incarnation (`GroupRestarts`).
        for extension in () if vote.members else self._hooks.amend_vote:
            vote = extension.amend_vote(vote, model.staging[group].commits)
        return vote

    def repeat_votes(self) -> None:
        """Vote again for each step that is staged and not decided."""
        model = self._state.model
        for group, staging in {} if model is None else model.staging.items():
            # The coordinator ignores a vote that it has counted, so all are sent.
            if staging.staged or staging.members:
                self._queue.send(self._coordinator, self._vote(group))

    # --- the workers of a group ----------------------------------------------------------------------------------

    def reset(self, group: int) -> None:
        """Forget the contributions of a group that is gone, unless they are applied."""
        for worker in self._groups.workers[group]:
            self._hyper.forget(worker)
        if self._state.model is not None:
            self._state.model.staging[group].restart()
            self._state.model.codec.forget(group)
        self._exits[group] = LoopExits(self._workers)

    def reset_worker(self, worker: Address) -> None:
        """The same for one worker. Its group continues."""
        self._hyper.forget(worker)
        if self._state.model is not None:
            self._state.model.staging[worker.group].forget(worker.index)

    # --- a second copy -------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return the state, see `component_state`."""
        return {"exits": {group: exits.state_dict() for group, exits in self._exits.items()}}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        for group, exits in state["exits"].items():
            self._exits[group].load_state_dict(exits)
