"""Workers that wait at the tables of a server: for rows, or at a barrier."""

from collections.abc import Sequence

from topotrain.config.topology import Address
from topotrain.core import protocol as m
from topotrain.core.server.component_state import DeclaredState
from topotrain.extensions.tables.push_modes import StepTable, TableShard
from topotrain.extensions.tables.table_messages import TableBarrier, TablePull, TableRows
from topotrain.extensions.tables.table_spec import unpack_ids

# Bounds of the memory that a faulty worker can take.
_MAX_BARRIERS = 1 << 10
# Pulls of one worker that wait: as many parts as a pull of millions of rows has.
_MAX_WAITING = 1 << 13


class TableReplies:
    """Messages to send, collected while a server handles one message or one step."""

    def __init__(self, workers: Sequence[Address]) -> None:
        self._workers = workers
        self._out: list[tuple[Address, m.Message]] = []

    def begin(self) -> None:
        """Begin with no messages."""
        # A message that was refused halfway leaves replies behind, which must not be sent with the next one's.
        self._out = []

    def send(self, to: Address, message: m.Message) -> None:
        self._out.append((to, message))

    def broadcast(self, message: m.Message) -> None:
        self._out += [(worker, message) for worker in self._workers]

    def fail(self, text: str, config: bool = False) -> None:
        """End the job: report an error of a script (of its configuration) to every worker."""
        self.broadcast(m.Fail(text, config))

    def take_all(self) -> list[tuple[Address, m.Message]]:
        out, self._out = self._out, []
        return out


class WaitingPulls(DeclaredState):
    """Pulls that wait until their worker may read the rows."""

    # A server with a table has no state at all (`TableServer`), so no pull waits here.
    STATE = ("_steps",)

    def __init__(self, replies: TableReplies) -> None:
        self._replies = replies
        self._pulls: list[tuple[Address, TableShard, TablePull]] = []
        self._steps: dict[int, int] = {}  # group -> its steps that are over

    def steps_over(self, group: int) -> int:
        """Return the number of steps of a worker group that are over."""
        return self._steps.get(group, 0)

    def step_over(self, group: int, step: int) -> None:
        self._steps[group] = step + 1

    def add(self, sender: Address, table: TableShard, message: TablePull) -> None:
        """Let a pull wait. Raises ProtocolError if too many of this worker wait."""
        if sum(worker == sender for worker, _, _ in self._pulls) >= _MAX_WAITING:
            raise m.ProtocolError(f"{sender} sent more than {_MAX_WAITING} pulls of rows that are not there yet")
        self._pulls.append((sender, table, message))

    def reply_ready(self) -> None:
        # All are tried: a pull of one table may be ready while an older one of another table is not.
        waiting, self._pulls = self._pulls, []
        for sender, table, message in waiting:
            if not self._may_read(sender, table, message.seen):
                self._pulls.append((sender, table, message))
                continue
            try:
                rows = table.rows.gather(table.rows.slots(unpack_ids(message.ids)))
            except LookupError as error:
                self._replies.fail(f"tables: {error.args[0]}")
                continue
            self._replies.send(sender, TableRows(message.round, body=rows.view(-1) if rows.numel() else None))

    def _may_read(self, sender: Address, table: TableShard, seen: int) -> bool:
        if isinstance(table, StepTable):
            return self.steps_over(sender.group) >= seen
        return table.may_read(sender, seen)


class TableBarriers(DeclaredState):
    """Barriers of all workers. That at the end of all scripts has a number below 0."""

    STATE = ("_arrived", "_finished", "last_passed")

    def __init__(self, workers: Sequence[Address], replies: TableReplies) -> None:
        self._workers, self._replies = workers, replies
        self._arrived: dict[int, set[Address]] = {}
        self._finished: set[Address] = set()
        self.last_passed = False
        """Whether all scripts have come to the barrier at their end."""

    @property
    def all_finished(self) -> bool:
        return len(self._finished) == len(self._workers)

    def arrive(self, sender: Address, number: int) -> None:
        """A worker is at a barrier. The last one opens it. Raises ProtocolError."""
        if number not in self._arrived and len(self._arrived) >= _MAX_BARRIERS:
            raise m.ProtocolError(f"{sender} is at barrier {number}, while {len(self._arrived)} are not passed")
        arrived = self._arrived.setdefault(number, set())
        arrived.add(sender)
        self._check()
        if len(arrived) == len(self._workers):
            del self._arrived[number]
            self.last_passed = self.last_passed or number < 0
            self._replies.broadcast(TableBarrier(0, number))

    def finish(self, sender: Address) -> None:
        self._finished.add(sender)
        self._check()

    def _check(self) -> None:
        for number, arrived in self._arrived.items():
            missing = [worker for worker in self._workers if worker in self._finished and worker not in arrived]
            # A finished worker still comes to the last barrier, which has a number below 0.
            if missing and number >= 0:
                self._replies.fail(f"{missing[0]} ended while {min(arrived)} waits for all workers at a barrier")
