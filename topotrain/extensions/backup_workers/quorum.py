"""Backup workers: a step of a synchronous group is made without the last of its workers (Chen et al., 2016).

Rule: the coordinator decides whose gradients make a step, from what all shards have of it, and its decision names them;
so the mean is over the same workers on every shard. What anybody else pushed for that step counts for nothing: who
comes too late is told so, is shown the values as they are between two steps (the same two on every shard), and does the
batch again. Its data stream is its own, so a batch counts once, whenever it counts.

At the end of an epoch the workers that came late have batches left. Who has none waits for them, and is not waited for.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from topotrain.config.topology import Address
from topotrain.core.protocol import Applied, Message, ProtocolError, StepDecision
from topotrain.core.server.consistency import SHOWS, DecisionLog
from topotrain.core.server.gradient_staging import GradientStaging
from topotrain.extensions.backup_workers.backup_messages import StepCatchUp, StepMissed

_FIRST_ROUND = 1 << 40


def values_round(number: int) -> int:
    """What `message.Values` says that answer a worker's CatchUp of this round: no step's number, and no Fetch's."""
    return -_FIRST_ROUND - number


class Quorum:
    """Whom a step waits for.

    Args:
        workers: how many the group has.
        spare: how many of them a step does without.
    """

    def __init__(self, workers: int, spare: int) -> None:
        self._workers, self._spare = workers, spare
        self._waiting: dict[int, tuple[int, int]] = {}  # worker -> round and epoch of its question
        self._through: dict[int, int] = {}  # worker -> the last epoch that it has no batch of any more
        self._idle: set[int] = set()  # who has nothing to contribute: waits, or has left its loop, or its script
        self._finished: set[int] = set()
        self._asked: dict[int, int] = {}
        self._dead: set[int] = set()  # whose process is gone, and who has not contributed anything since

    @property
    def needed(self) -> int:
        """How many contributions make a step. Who has nothing to contribute is not waited for, nor who is not there."""
        return max(1, min(self._workers - self._spare, self._workers - len(self._idle | self._dead)))

    def ask(self, worker: int, message: StepCatchUp) -> list[tuple[int, int]]:
        """A worker's question; returns who is to be shown the values now, as (worker, round). Said twice, it is one."""
        if message.through > self._through.get(worker, -1):
            self._through[worker] = message.through
            self._idle.add(worker)
        if message.round > self._asked.get(worker, 0):
            self._asked[worker] = message.round
            if message.through < 0:
                return [(worker, message.round), *self.released()]
            self._waiting[worker] = (message.round, message.through)
        return self.released()

    def works(self, worker: int, epoch: int) -> list[tuple[int, int]]:
        """A worker does a batch of this epoch, so it is through with those before; as `ask`."""
        self._dead.discard(worker)
        if epoch > self._through.get(worker, -1):
            self._through[worker] = epoch - 1
            self._idle.discard(worker)
        return self.released()

    def gone(self, worker: int) -> None:
        """A worker's process is gone; the next one asks anew, and is through with what it was through with."""
        self._dead.add(worker)
        self._finished.discard(worker)
        self._waiting.pop(worker, None)
        self._asked.pop(worker, None)

    def finish(self, worker: int) -> list[tuple[int, int]]:
        """A worker's script has come to its end; as `ask`."""
        self._finished.add(worker)
        self._idle.add(worker)
        return self.released()

    def released(self) -> list[tuple[int, int]]:
        """Those who have waited until everybody was through."""
        going = [worker for worker in range(self._workers) if worker not in self._finished]
        behind = min((self._through.get(worker, -1) for worker in going), default=-1)
        found = sorted((worker, number) for worker, (number, epoch) in self._waiting.items() if epoch <= behind)
        for worker, _ in found:
            del self._waiting[worker]
            self._idle.discard(worker)
        return found


class BackupServer(Protocol):
    """What backup asks of its server."""

    def show(self, worker: Address, number: int, values_round: int, snapshot: int) -> None:
        """Send a worker the values, and say in which step the group is: the answer to its question of this number."""
        ...

    def decide(self) -> None:
        """A step may need fewer contributions than before."""
        ...


class BackupWorkers:
    """What one shard does about the workers of its group that are late.

    Args:
        workers: of the group, in order.
        spare: how many of them a step does without.
        home: the server.
        log: of decisions, in the coordinator.
        tell: says a decision to all shards.
        send: says something to a worker.
    """

    def __init__(
        self,
        workers: tuple[Address, ...],
        spare: int,
        home: BackupServer,
        log: DecisionLog | None,
        tell: Callable[[StepDecision], None],
        send: Callable[[Address, Message], None],
    ) -> None:
        self._workers, self._spare, self._home = workers, spare, home
        self._log, self._tell, self._send = log, tell, send
        self.forget()

    def forget(self) -> None:
        """The group is started again."""
        self._quorum = Quorum(len(self._workers), self._spare)
        self._counted: dict[int, int] = {}  # worker -> the last step in which it counted
        self._owed: dict[int, int] = {}  # worker -> the snapshot that it has yet to be told of

    def replaced(self, worker: Address, snapshot: int) -> None:
        """Another process has a worker's place; snapshot: for which its state is wanted, if any."""
        self._counted.pop(worker.index, None)
        if snapshot:
            self._owed[worker.index] = snapshot
        if self._log is not None:
            self._quorum.gone(worker.index)
            self._show(self._quorum.released())

    # --- on the coordinator ----------------------------------------------------------------------------------------

    def enough(self, members: Collection[int]) -> bool:
        """Whether these contributions make a step."""
        return len(members) >= self._quorum.needed

    def ask(self, sender: Address, message: StepCatchUp) -> None:
        """A worker wants to catch up, or is through with an epoch."""
        self._show(self._quorum.ask(sender.index, message))

    def works(self, sender: Address, marks: tuple[int, ...]) -> None:
        """A worker has committed a step on these batches (see `message.Commit`)."""
        if self._log is not None and marks:
            self._show(self._quorum.works(sender.index, marks[0] >> 32))

    def finish(self, sender: Address) -> None:
        """A worker's script has come to its end."""
        if self._log is not None:
            self._show(self._quorum.finish(sender.index))

    def _show(self, found: list[tuple[int, int]]) -> None:
        if found and self._log is not None:
            members = tuple(number for pair in found for number in pair)
            self._tell(self._log.decree(self._workers[0].group, 0, SHOWS, members))
        self._home.decide()

    # --- on every shard --------------------------------------------------------------------------------------------

    def choose(self, staging: GradientStaging, decision: StepDecision) -> list[int]:
        """A step is about to be carried out: only its members' gradients are left. Returns who else had committed it.

        Raises ProtocolError for members of whom something is missing here: they cannot have been named.
        """
        members = decision.members
        if not members or list(members) != sorted(staging.complete.intersection(members)):
            raise ProtocolError(f"step {decision.step} is made of {members}, and {sorted(staging.complete)} are here")
        self._counted |= dict.fromkeys(members, decision.step)
        return staging.choose(members)

    def carried_out(self, step: int, members: Mapping[int, object], late: list[int], applied: Applied) -> None:
        """The step is over; `members` hear of it anyhow, and these had committed it, too."""
        if applied.snapshot:
            self._owed = {w.index: applied.snapshot for w in self._workers if w.index not in members}
        for index in late:
            self._late(self._workers[index], step)

    def too_late(self, sender: Address, step: int) -> bool:
        """A commit of a step that is over; False: the step had counted its gradients."""
        if step <= self._counted.get(sender.index, -1):
            return False
        self._late(sender, step)
        return True

    def _late(self, worker: Address, step: int) -> None:
        if self._log is not None:  # one says so: what the others have decided is the same
            self._send(worker, StepMissed(step))

    def catch_up(self, decision: StepDecision) -> None:
        """It is time to show some workers the values. Raises ProtocolError for workers that the group does not have."""
        flat = decision.members
        if len(flat) % 2 or any(not 0 <= index < len(self._workers) for index in flat[::2]):
            raise ProtocolError(f"values for workers that there are not: {flat}")
        for index, number in zip(flat[::2], flat[1::2], strict=True):
            self._home.show(self._workers[index], number, values_round(number), self._owed.pop(index, 0))
