"""The tables of one server: opens, pushes, pulls and barriers of all workers.

A mistake of a script is reported to all workers. ProtocolError is for messages that no correct worker sends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.optim.state_table import StateError
from topotrain.core.optim.updater_block import clip_bounds
from topotrain.core.server.component_state import State
from topotrain.core.server.server_extension import Outbox, RegroupExtension, StepResult
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard, SnapshotParticipant, SnapshotSource
from topotrain.extensions.elastic.eligibility import TABLES
from topotrain.extensions.tables.push_modes import KINDS, StepTable, SyncTable, TableShard
from topotrain.extensions.tables.step_gradients import StepGradients, nonfinite_limit
from topotrain.extensions.tables.table_messages import (
    MAX_IDS,
    TABLE_REQUESTS,
    TableAssign,
    TableBarrier,
    TableIds,
    TableList,
    TableOpen,
    TablePull,
    TablePush,
    TableRule,
    TablesFinished,
    TableStats,
    TableStatsRequest,
    TableStep,
)
from topotrain.extensions.tables.table_snapshot import StoredRows, TableCopier
from topotrain.extensions.tables.table_spec import Ids, TableSpec, difference, pack_ids, unpack_ids
from topotrain.extensions.tables.table_waits import TableBarriers, TableReplies, WaitingPulls

# Early messages of one worker take memory until the missing one comes.
_MAX_EARLY, _MAX_EARLY_BYTES = 1 << 12, 1 << 26
_MAX_TABLES = 1 << 12


@dataclass(slots=True)
class _WorkerTables:
    """The tables of one worker by its own numbers, and its messages that came early."""

    worker: Address
    next: int = 0
    early: dict[int, m.Message] = field(default_factory=dict)
    # Of the bodies and texts of the early messages.
    early_bytes: int = 0
    tables: dict[int, TableShard] = field(default_factory=dict)
    # Steps with all of their rows here.
    steps: int = 0

    def table(self, number: int) -> TableShard:
        table = self.tables.get(number)
        if table is None:
            raise m.ProtocolError(f"{self.worker} has not opened a table number {number}")
        return table

    def receive(self, number: int, message: m.Message) -> None:
        """Keep a message until its turn."""
        # The messages of a worker are handled in the order in which they were sent, each once.
        if number in self.early:
            return
        size = _all_bytes(message)
        if number != self.next and (len(self.early) >= _MAX_EARLY or self.early_bytes + size > _MAX_EARLY_BYTES):
            raise m.ProtocolError(f"{self.worker}: message {self.next} about tables never came")
        self.early[number] = message
        self.early_bytes += size

    def next_message(self) -> m.Message | None:
        message = self.early.pop(self.next, None)
        if message is not None:
            self.next += 1
            self.early_bytes -= _all_bytes(message)
        return message


class TableServer(RegroupExtension, SnapshotParticipant):
    """The tables of one server.

    source: the snapshot that the job goes on from.
    """

    messages = before_model = TABLE_REQUESTS

    def __init__(self, me: Address, job: Job, topology: Topology, source: SnapshotSource | None = None) -> None:
        self._me = me
        self._job = job
        self._topology = topology
        workers = [worker for group in range(topology.worker_groups) for worker in topology.workers(group)]
        self._workers = {worker: _WorkerTables(worker) for worker in workers}
        self._tables: dict[str, TableShard] = {}
        self._copier = TableCopier()
        self._restored = StoredRows(source, me.index, topology.shards)
        self._replies = TableReplies(workers)
        self._pulls = WaitingPulls(self._replies)
        self._barriers = TableBarriers(workers, self._replies)
        self._gradients = StepGradients(job, topology, self._tables)

    # --- the job -------------------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        return self._barriers.all_finished

    def scripts_over(self) -> bool:
        return self._barriers.last_passed

    def has_begun(self) -> bool:
        return bool(self._tables)

    def refuses_regroup(self) -> str:
        # The rows that a group has pushed stay in the table, and a fresh process would push them again.
        return TABLES if self._tables else ""

    @property
    def snapshot_obstacle(self) -> str:
        return next((table.snapshot_obstacle for table in self._tables.values() if table.snapshot_obstacle), "")

    def freeze(self, frozen: FrozenShard) -> FrozenShard:
        """Add the rows as they are now to the frozen shard. Raises StateError."""
        # A table may have been opened after the snapshot was announced.
        if self.snapshot_obstacle:
            raise StateError(self.snapshot_obstacle)
        return self._copier.freeze(frozen, self._tables.values())

    # --- messages ------------------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Return memory for the rows of a message. Raises ProtocolError."""
        if not isinstance(message, TablePush | TableAssign):
            return super().place(sender, message, viewable)
        table = self._worker(sender).table(message.table)
        # New memory and no shared buffer: a message may be kept until its turn.
        return torch.empty(len(_ids(table, message.ids)) * table.spec.width, dtype=table.spec.torch_dtype)

    def handle(self, sender: Address, message: m.Message) -> Outbox:
        """Handle a message about tables, and the later ones that came before it."""
        worker = self._worker(sender)
        assert isinstance(message, TABLE_REQUESTS)
        number = message.number
        # A repeated message.
        if number < worker.next:
            return []
        self._replies.begin()
        worker.receive(number, message)
        while (now := worker.next_message()) is not None:
            try:
                self._handle(sender, worker, now)
            # The mistake of a script ends the job with its text. A ProtocolError goes on to the host.
            except ConfigError as error:
                self._replies.fail(f"tables: {error}", config=True)
            except LookupError as error:
                self._replies.fail(f"tables: {error.args[0]}")
        return self._replies.take_all()

    def _handle(self, sender: Address, worker: _WorkerTables, message: m.Message) -> None:
        match message:
            case TablePush():
                self._push(sender, worker.table(message.table), message)
            case TablePull():
                self._pull(sender, worker.table(message.table), message)
            case TableStep():
                worker.steps = message.step + 1
            case TableAssign():
                self._assign(worker, message)
            case TableRule():
                worker.table(message.table).set_optimizer(sender, message.since, message.optimizer)
            case TableOpen():
                self._open(worker, message)
            case TableBarrier():
                self._barriers.arrive(sender, message.round)
            case TableStatsRequest():
                self._stats(sender, worker.table(message.table), message)
            case TableList():
                self._list(sender, worker.table(message.table), message)
            case TablesFinished():
                self._finish(sender)

    def _worker(self, sender: Address) -> _WorkerTables:
        worker = self._workers.get(sender)
        if worker is None:
            raise m.ProtocolError(f"{sender} has no tables")
        return worker

    def _open(self, worker: _WorkerTables, message: TableOpen) -> None:
        spec = TableSpec.from_text(message.spec)
        known = self._tables.get(spec.name)
        if known is None:
            if len(self._tables) >= _MAX_TABLES:
                raise ConfigError("table.name", spec.name, f"is one too many: a job may have {_MAX_TABLES} tables")
            known = _make(spec, self._me.index, self._topology.shards, list(self._workers), self._job)
            self._restored.refill(known)
            self._tables[spec.name] = known
        # The first worker that opens a table describes it. All others must agree.
        text = difference(known.spec, spec)
        if text:
            self._replies.fail(text, config=True)
            return
        worker.tables[message.table] = known
        # Without the description, which may be long.
        self._replies.send(worker.worker, TableOpen(0, message.table, ""))

    def _push(self, sender: Address, table: TableShard, message: TablePush) -> None:
        ids, rows = _rows(table, message)
        # The step may have been applied without this worker.
        if isinstance(table, StepTable) and message.turn < self._pulls.steps_over(sender.group):
            return
        table.push(sender, message.turn, message.last, ids, rows)
        if isinstance(table, SyncTable) and (text := table.waits_in_vain()):
            self._replies.fail(text)
        self._pulls.reply_ready()

    def _assign(self, worker: _WorkerTables, message: TableAssign) -> None:
        table = worker.table(message.table)
        ids, rows = _rows(table, message)
        # Rows that a script assigns before its first step are older than the restored ones.
        if rows is not None and not (table.restored and worker.steps == 0):
            table.rows.assign(ids, rows)

    def _pull(self, sender: Address, table: TableShard, message: TablePull) -> None:
        # Before it may wait: wrong ids are the sender's fault, and are refused with this message.
        table.rows.check(_ids(table, message.ids), unique=False)
        self._pulls.add(sender, table, message)
        self._pulls.reply_ready()

    def _stats(self, sender: Address, table: TableShard, message: TableStatsRequest) -> None:
        rows = table.rows
        sizes = rows.count, rows.value_bytes, table.state_bytes, rows.index_bytes
        self._replies.send(sender, TableStats(message.round, *sizes))

    def _list(self, sender: Address, table: TableShard, message: TableList) -> None:
        ids = table.rows.ids()
        if message.first < 0:
            raise m.ProtocolError(f"rows from number {message.first} on")
        part = ids[message.first : message.first + MAX_IDS]
        self._replies.send(sender, TableIds(message.round, pack_ids(part)))

    def _finish(self, sender: Address) -> None:
        self._barriers.finish(sender)
        for table in self._tables.values():
            if text := table.ended(sender):
                self._replies.fail(text)

    # --- a step of the model ---------------------------------------------------------------------------------------

    def may_stage(self, group: int, step: int) -> bool:
        """Whether all rows of this step are here."""
        for address in self._topology.workers(group) if self._tables else ():
            worker = self._workers[address]
            # TableStep follows the pushes of a step, and messages of a worker are handled in order.
            if worker.steps <= step and any(isinstance(table, StepTable) for table in worker.tables.values()):
                return False
        return True

    def amend_vote(self, vote: m.StepVote, commits: Mapping[int, m.Commit]) -> m.StepVote:
        return self._gradients.amend_vote(vote, commits)

    def apply_step(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Outbox:
        self._replies.begin()
        # Only at the first step is it clear which tables the scripts have.
        if text := self._restored.missed:
            self._replies.fail(f"tables: {text}", config=True)
        for text in self._gradients.apply(group, step, commits, factor):
            self._replies.fail(f"tables: {text}")
        return self._replies.take_all()

    def step_over(self, result: StepResult) -> Outbox:
        self._replies.begin()
        self._pulls.step_over(result.group, result.step)
        # Also of a skipped step, with gradients that were never applied.
        self._gradients.drop(result.group, result.step)
        self._pulls.reply_ready()
        return self._replies.take_all()

    def state_dict(self) -> State | None:
        """Return the state, or None if there is a table."""
        if self._tables:
            return None
        workers = {
            worker: (known.next, known.early, known.early_bytes, known.steps) for worker, known in self._workers.items()
        }
        return {"workers": workers, "pulls": self._pulls.state_dict(), "barriers": self._barriers.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._workers = {
            worker: _WorkerTables(worker, number, dict(early), early_bytes, steps=steps)
            for worker, (number, early, early_bytes, steps) in state["workers"].items()
        }
        self._pulls.load_state_dict(state["pulls"])
        self._barriers.load_state_dict(state["barriers"])


def _make(spec: TableSpec, shard: int, shards: int, workers: Sequence[Address], job: Job) -> TableShard:
    try:
        clip, most = clip_bounds(job.updater), nonfinite_limit(job)
        return KINDS[spec.mode](spec, shard, shards, workers, job.import_, clip, most)
    except (MemoryError, RuntimeError, OverflowError) as error:
        # torch reports missing memory as RuntimeError. The job ends with a text instead of a lost server.
        size = f"{spec.rows} rows of {spec.row_bytes} bytes"
        raise ConfigError("table.rows", size, f"do not fit into memory: {error}") from error


def _ids(table: TableShard, raw: bytes) -> Ids:
    """Return the rows that a message names. Raises ProtocolError for too many."""
    ids = unpack_ids(raw)
    # Memory is made for the rows of each message.
    if len(ids) > table.spec.part_rows:
        most = table.spec.part_rows
        raise m.ProtocolError(f"{len(ids)} rows of table {table.spec.name!r} in a message, at most {most}")
    return ids


def _rows(table: TableShard, message: TablePush | TableAssign) -> tuple[Ids, torch.Tensor | None]:
    ids = _ids(table, message.ids)
    table.rows.check(ids, unique=True)
    body, width, size = message.body, table.spec.width, _body_bytes(message)
    if size != len(ids) * table.spec.row_bytes:
        raise m.ProtocolError(f"table {table.spec.name!r}: {size} bytes for {len(ids)} rows of {width}")
    return ids, None if body is None else body.view(table.spec.torch_dtype).view(-1, width)


def _all_bytes(message: m.Message) -> int:
    """Return the bytes of the rows, and of the numbers or the text beside them."""
    return _body_bytes(message) + sum(len(getattr(message, name, "")) for name in ("ids", "spec", "optimizer"))


def _body_bytes(message: m.Message) -> int:
    return 0 if message.body is None else message.body.nbytes
