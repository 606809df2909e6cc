"""Backup workers: a step does without the slowest workers (Chen et al., 2016).

Rule: the coordinator decides which workers' gradients make a step, from those that all shards have, and its decision
names the workers. So the mean is over the same workers on every shard. Pushes of other workers for that step do not
count. A late worker gets a message, then the values between two steps, and does its batch again. A data stream belongs
to one worker, so a batch counts once, in whichever step it counts.

At the end of an epoch late workers have batches left. A worker without batches waits for them, and no step waits for
that worker.
"""

from collections.abc import Collection

from topotrain.config.job import Job
from topotrain.config.sharding import SliceMap
from topotrain.config.topology import Address, Topology
from topotrain.core.protocol import Commit, Message, ProtocolError, StepDecision, extra_round
from topotrain.core.server.consistency import SHOWS
from topotrain.core.server.gradients.gradient_source import GradientSource, SourceSettings
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import GradientExtension, Outbox, StepPolicy, StepResult
from topotrain.extensions.backup_workers.backup_messages import StepCatchUp, StepCaughtUp, StepMissed
from topotrain.extensions.backup_workers.quorum_pushes import QuorumPushes


class Quorum:
    """The workers of a group that a step waits for.

    Args:
        workers: how many the group has.
        spare: how many of them a step does without.
    """

    def __init__(self, workers: int, spare: int) -> None:
        self._workers, self._spare = workers, spare
        self._waiting: dict[int, tuple[int, int]] = {}  # worker -> round and epoch of its question
        self._through: dict[int, int] = {}  # worker -> the last epoch that it has no batch of any more
        self._idle: set[int] = set()  # has nothing to contribute: waits, or has left its loop, or its script
        self._finished: set[int] = set()
        self._asked: dict[int, int] = {}
        self._dead: set[int] = set()  # the process is gone, and its successor has contributed nothing yet

    @property
    def needed(self) -> int:
        """The number of contributions that make a step."""
        # No step waits for a worker without a batch or without a process.
        return max(1, min(self._workers - self._spare, self._workers - len(self._idle | self._dead)))

    def ask(self, worker: int, message: StepCatchUp) -> list[tuple[int, int]]:
        """Handle a worker's question; return the (worker, round) to be sent values now.

        A repeated question counts once.
        """
        # Also without a request (round 0): the worker has left its loop, and the others must not wait for its batches.
        if message.through > self._through.get(worker, -1):
            self._through[worker] = message.through
            self._idle.add(worker)
        # After a reconnect a question may arrive twice. Its number makes it count once.
        if message.round > self._asked.get(worker, 0):
            self._asked[worker] = message.round
            if message.through < 0:
                return [(worker, message.round), *self.released()]
            self._waiting[worker] = (message.round, message.through)
        return self.released()

    def works(self, worker: int, epoch: int) -> list[tuple[int, int]]:
        """Note that a worker does a batch of this epoch; return as `ask`."""
        self._dead.discard(worker)
        # The worker has used all batches of the epochs before.
        if epoch > self._through.get(worker, -1):
            self._through[worker] = epoch - 1
            self._idle.discard(worker)
        return self.released()

    def gone(self, worker: int) -> None:
        """Note that a worker's process is gone. The epochs that it has used stay so."""
        self._dead.add(worker)
        # The new process counts its questions from 1 again, and has its script to run.
        self._finished.discard(worker)
        self._waiting.pop(worker, None)
        self._asked.pop(worker, None)

    def finish(self, worker: int) -> list[tuple[int, int]]:
        """Note the end of a worker's script; return as `ask`."""
        self._finished.add(worker)
        self._idle.add(worker)
        return self.released()

    def released(self) -> list[tuple[int, int]]:
        """Return the workers that waited for an epoch that all have now used, as `ask`."""
        # A worker reports no epoch after its script has ended, so it must not hold back the others.
        going = [worker for worker in range(self._workers) if worker not in self._finished]
        behind = min((self._through.get(worker, -1) for worker in going), default=-1)
        found = sorted((worker, number) for worker, (number, epoch) in self._waiting.items() if epoch <= behind)
        for worker, _ in found:
            del self._waiting[worker]
            self._idle.discard(worker)
        return found


class BackupWorkers(GradientExtension, StepPolicy):
    """The rule of one shard for the late workers of its group."""

    messages = (StepCatchUp,)
    decrees = (SHOWS,)

    def __init__(self, server: Server, job: Job, topology: Topology) -> None:
        self._server = server
        (self._group,) = server.groups
        self._workers = topology.workers(self._group)
        self._spare = job.cluster.backup
        self._reset()

    def _reset(self) -> None:
        self._quorum = Quorum(len(self._workers), self._spare)
        self._counted: dict[int, int] = {}  # worker -> the last step in which it counted
        self._owed: dict[int, int] = {}  # worker -> the snapshot that it has yet to be sent
        self._late: list[int] = []  # of the decided step: workers that had committed it, and are no part of it

    def reset_group(self, group: int, ended: bool) -> None:
        if group == self._group:
            self._reset()

    def reset_worker(self, worker: Address) -> None:
        # The new process may commit a step with the number in which its predecessor counted.
        self._counted.pop(worker.index, None)
        # For a snapshot that is under way the new process has to leave its state, too.
        snapshot = max((each.requested_states() for each in self._server.hooks.requested_states), default=0)
        if snapshot:
            self._owed[worker.index] = snapshot
        # Only the coordinator has a log of decisions, and only there is the quorum maintained.
        if self._server.decisions.log is not None:
            self._quorum.gone(worker.index)
            self._announce(self._quorum.released())

    def gradient_source(self, job: Job, slice_map: SliceMap, settings: SourceSettings) -> GradientSource:
        return QuorumPushes(settings)

    # --- on the coordinator ----------------------------------------------------------------------------------------

    def enough(self, members: Collection[int]) -> bool:
        return len(members) >= self._quorum.needed

    def handle(self, sender: Address, message: Message) -> Outbox:
        """Handle a request for the values, or the end of a worker's epoch."""
        if isinstance(message, StepCatchUp):
            self._announce(self._quorum.ask(sender.index, message))
        return ()

    def on_finish(self, worker: Address, steps: int) -> None:
        if self._server.decisions.log is not None:
            self._announce(self._quorum.finish(worker.index))

    def _announce(self, found: list[tuple[int, int]]) -> None:
        """Have all shards send these workers the values between the same two steps."""
        if found:
            members = tuple(number for pair in found for number in pair)
            self._server.decisions.decree(self._group, 0, SHOWS, members)
        self._server.decisions.decide()  # a step may need fewer contributions than before

    # --- on every shard --------------------------------------------------------------------------------------------

    def accepts_commit(self, sender: Address, message: Commit, step: int) -> bool:
        """As `StepPolicy.accepts_commit`; a worker that is too late gets a message."""
        # The upper 32 bits of a batch's mark are its epoch.
        if self._server.decisions.log is not None and message.marks:
            self._announce(self._quorum.works(sender.index, message.marks[0] >> 32))
        # A repeated commit of a step in which the worker counted gets its reply again like any other duplicate.
        if message.step >= step or message.step <= self._counted.get(sender.index, -1):
            return True
        self._send_missed(sender, message.step)
        return False

    def choose(self, staging: GradientSource, decision: StepDecision) -> None:
        assert isinstance(staging, QuorumPushes)
        members = decision.members
        # All shards reported these workers as complete before the decision, so a missing one means a broken protocol.
        if not members or list(members) != sorted(set(staging.members) & set(members)):
            raise ProtocolError(f"step {decision.step} is made of {members}, and {list(staging.members)} are here")
        self._counted |= dict.fromkeys(members, decision.step)
        self._late = staging.choose(members)

    def step_over(self, result: StepResult) -> Outbox:
        snapshot = result.applied.snapshot
        if snapshot:
            # The number of a snapshot comes with the reply to a step, and late workers get no such reply.
            self._owed = {w.index: snapshot for w in self._workers if w.index not in result.commits}
        for index in self._late:
            self._send_missed(self._workers[index], result.step)
        return ()

    def _send_missed(self, worker: Address, step: int) -> None:
        # The coordinator alone sends it: all shards have carried out the same decision.
        if self._server.decisions.log is not None:
            self._server.queue.send(worker, StepMissed(step))

    def on_decree(self, decision: StepDecision) -> Outbox:
        """Send some workers the present values.

        Raises:
            ProtocolError: the group does not have these workers, or there are no values yet.
        """
        flat = decision.members
        if len(flat) % 2 or any(not 0 <= index < len(self._workers) for index in flat[::2]):
            raise ProtocolError(f"values for workers that there are not: {flat}")
        # A decree is carried out between the same two steps on every shard, so the shards' values fit together.
        for index, number in zip(flat[::2], flat[1::2], strict=True):
            self._show(self._workers[index], number, self._owed.pop(index, 0))
        return ()

    def _show(self, worker: Address, number: int, snapshot: int) -> None:
        """Reply to a worker's StepCatchUp with the values and the step of its group."""
        server = self._server
        if server.model is None:
            raise ProtocolError(f"{worker} is to be shown values before there are any")
        for values in server.replies.show(server.model, worker.index, extra_round(number), server.state.version):
            server.queue.send(worker, values)
        # After the values, because the client reads its buffers once it has StepCaughtUp of all shards.
        step = server.model.staging[worker.group].step
        server.queue.send(worker, StepCaughtUp(number, step, server.state.version, snapshot))

    def state_dict(self) -> None:
        """Return None: `replication_rules` refuse a second copy."""
