"""What a server keeps of all tables: who calls them what, who has pushed, whose pull has to wait.

Rule: what one worker says about tables is taken in the order in which it was said, and once; early messages wait in a
drawer. Of a step the server asks four things: whether all its rows are here, what they add to the vote, to apply them,
and to forget them. A worker's mistake is told to all workers in its own words; what only a broken peer can
send is a ProtocolError.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from topotrain.config.job import ConfigError, Job, NonFinite, Reduce
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.optim.adapter import clip_bounds
from topotrain.core.optim.state_table import StateError
from topotrain.core.server.component_state import State
from topotrain.core.server.nonfinite import NOBODY, NonfiniteLimit, all_finite
from topotrain.core.server.parameter_shard import norm_of, to_power
from topotrain.core.server.server_extension import RegroupExtension, StepResult
from topotrain.extensions.checkpointing.shard_snapshot import FrozenShard, SnapshotParticipant, SnapshotSource
from topotrain.extensions.elastic.eligibility import TABLES
from topotrain.extensions.tables.push_modes import KINDS, StepTable, SyncTable, TableShard
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
    TableRows,
    TableRule,
    TablesFinished,
    TableStats,
    TableStatsRequest,
    TableStep,
)
from topotrain.extensions.tables.table_snapshot import StoredRows, TableCopier
from topotrain.extensions.tables.table_spec import Ids, TableSpec, difference, pack_ids, unpack_ids

Out = list[tuple[Address, m.Message]]
Found = dict[str, tuple[Ids, torch.Tensor]]

_MAX_EARLY, _MAX_EARLY_BYTES = 1 << 12, 1 << 26
_MAX_BARRIERS = 1 << 10
_MAX_HELD = 1 << 13  # pulls of one worker that wait: as many parts as a pull of millions of rows has
_MAX_TABLES = 1 << 12


@dataclass(slots=True)
class _Client:
    """One worker, as the book knows it."""

    next: int = 0
    early: dict[int, m.Message] = field(default_factory=dict)
    early_bytes: int = 0  # of the bodies of these
    tables: dict[int, TableShard] = field(default_factory=dict)
    steps: int = 0  # whose rows are all here
    bye: bool = False


class TableServer(RegroupExtension, SnapshotParticipant):
    """The tables of one server.

    Args:
        me: the server.
        job, topology: its job.
        source: the snapshot that the job goes on from.
    """

    messages = before_model = TABLE_REQUESTS

    def __init__(self, me: Address, job: Job, topology: Topology, source: SnapshotSource | None = None) -> None:
        self._me = me
        self._job = job
        self._topology = topology
        self._workers = [w for group in range(topology.worker_groups) for w in topology.workers(group)]
        self._clients = {worker: _Client() for worker in self._workers}
        self._tables: dict[str, TableShard] = {}
        self._copier = TableCopier()
        self._kept = StoredRows(source, me.index, topology.shards)
        self._over: dict[int, int] = {}  # group -> its steps that are over
        self._means: dict[tuple[int, int], Found] = {}
        self._held: list[tuple[Address, TableShard, TablePull]] = []
        self._barriers: dict[int, set[Address]] = {}
        self._at_end = False
        self._out: Out = []
        self._clip = clip_bounds(job.updater)
        self._most = 0 if job.nonfinite is NonFinite.kAllow else NonfiniteLimit(job.nonfinite).most

    # --- the door ------------------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Every worker has said that it is through with tables."""
        return all(client.bye for client in self._clients.values())

    def scripts_over(self) -> bool:
        """All scripts have come to the barrier at their end."""
        return self._at_end

    def has_begun(self) -> bool:
        """Whether any script has a table."""
        return bool(self._tables)

    def refuses_regroup(self) -> str:
        """What a group has pushed into a table stays in it, so no group can start again by itself."""
        return TABLES if self._tables else ""

    @property
    def unkept(self) -> str:
        """Why no snapshot can be taken now; empty: one can."""
        return next((table.unkept for table in self._tables.values() if table.unkept), "")

    def freeze(self, frozen: FrozenShard) -> FrozenShard:
        """With the rows as they are now. Raises StateError where no snapshot can have them."""
        if self.unkept:
            raise StateError(self.unkept)
        return self._copier.freeze(frozen, self._tables.values())

    def place(self, sender: Address, message: m.Message, viewable: bool) -> torch.Tensor | None:
        """Where rows are to be received. Raises ProtocolError."""
        if not isinstance(message, TablePush | TableAssign):
            return super().place(sender, message, viewable)
        table = self._table(sender, message.table)
        return torch.empty(len(_ids(table, message.ids)) * table.spec.width, dtype=table.spec.torch_dtype)

    def handle(self, sender: Address, message: m.Message) -> Out:
        """One message about tables, which is told once and in its turn; returns what to send."""
        client = self._client(sender)
        number = getattr(message, "number", -1)
        if number < client.next:
            return []
        if number != client.next and number not in client.early:
            client.early_bytes += 0 if message.body is None else message.body.nbytes
            if len(client.early) >= _MAX_EARLY or client.early_bytes > _MAX_EARLY_BYTES:
                raise m.ProtocolError(f"{sender}: message {client.next} about tables never came")
        client.early.setdefault(number, message)
        self._out = []
        while client.next in client.early:
            now = client.early.pop(client.next)
            client.next += 1
            client.early_bytes = 0 if not client.early else client.early_bytes
            self._take(sender, client, now)
        return self._out

    def _take(self, sender: Address, client: _Client, message: m.Message) -> None:
        try:
            _HANDLERS[type(message)](self, sender, client, message)
        except ConfigError as error:
            self._fail(f"tables: {error}", config=True)
        except LookupError as error:
            self._fail(f"tables: {error.args[0]}", config=False)

    def _fail(self, text: str, config: bool) -> None:
        self._out += [(worker, m.Fail(text, config)) for worker in self._workers]

    def _client(self, sender: Address) -> _Client:
        client = self._clients.get(sender)
        if client is None:
            raise m.ProtocolError(f"{sender} has no tables")
        return client

    def _table(self, sender: Address, number: int) -> TableShard:
        table = self._client(sender).tables.get(number)
        if table is None:
            raise m.ProtocolError(f"{sender} has not opened a table number {number}")
        return table

    # --- tables --------------------------------------------------------------------------------------------------

    def _open(self, sender: Address, client: _Client, message: TableOpen) -> None:
        spec = TableSpec.from_text(message.spec)
        known = self._tables.get(spec.name)
        if known is None:
            known = self._made(spec)
            self._kept.refill(known)
            self._tables[spec.name] = known
        text = difference(known.spec, spec)
        if text:
            self._fail(text, config=True)
            return
        client.tables[message.table] = known
        self._out.append((sender, TableOpen(0, message.table, "")))

    def _made(self, spec: TableSpec) -> TableShard:
        if len(self._tables) >= _MAX_TABLES:
            raise ConfigError("table.name", spec.name, f"is one too many: a job may have {_MAX_TABLES} tables")
        shards, module = self._topology.shards, self._job.import_
        try:
            return KINDS[spec.mode](spec, self._me.index, shards, self._workers, module, self._clip, self._most)
        except (MemoryError, RuntimeError, OverflowError) as error:
            size = f"{spec.rows} rows of {spec.row_bytes} bytes"
            raise ConfigError("table.rows", size, f"there is no room for it: {error}") from error

    def _rows(self, table: TableShard, message: TablePush | TableAssign) -> tuple[Ids, torch.Tensor | None]:
        ids = _ids(table, message.ids)
        table.rows.check(ids, unique=True)
        body, width = message.body, table.spec.width
        if (0 if body is None else body.nbytes) != len(ids) * table.spec.row_bytes:
            raise m.ProtocolError(
                f"table {table.spec.name!r}: {0 if body is None else body.nbytes} bytes for {len(ids)} rows of {width}"
            )
        return ids, None if body is None else body.view(table.spec.torch_dtype).view(-1, width)

    def _push(self, sender: Address, client: _Client, message: TablePush) -> None:
        table = self._table(sender, message.table)
        ids, rows = self._rows(table, message)
        if isinstance(table, StepTable) and message.turn < self._over.get(sender.group, 0):
            return  # the step is over
        table.push(sender, message.turn, message.last, ids, rows)
        if isinstance(table, SyncTable) and (text := table.waits_in_vain()):
            self._fail(text, config=False)
        self._answer_held()

    def _give(self, sender: Address, client: _Client, message: TableAssign) -> None:
        table = self._table(sender, message.table)
        ids, rows = self._rows(table, message)
        # What a script gives before its first step it had given before the snapshot: what is here is younger.
        if rows is not None and not (table.restored and client.steps == 0):
            table.rows.give(ids, rows)

    def _set_rule(self, sender: Address, client: _Client, message: TableRule) -> None:
        self._table(sender, message.table).set_rule(sender, message.since, message.optimizer)

    def _pull(self, sender: Address, client: _Client, message: TablePull) -> None:
        table = self._table(sender, message.table)
        table.rows.check(_ids(table, message.ids), unique=False)
        if sum(who == sender for who, _, _ in self._held) >= _MAX_HELD:
            raise m.ProtocolError(f"{sender} asks on and on for rows that it has to wait for")
        self._held.append((sender, table, message))
        self._answer_held()

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        for sender, table, message in held:
            if not self._may_read(sender, table, message.seen):
                self._held.append((sender, table, message))
                continue
            try:
                rows = table.rows.gather(table.rows.slots(unpack_ids(message.ids)))
            except LookupError as error:
                self._fail(f"tables: {error.args[0]}", config=False)
                continue
            self._out.append((sender, TableRows(message.round, body=rows.view(-1) if rows.numel() else None)))

    def _may_read(self, sender: Address, table: TableShard, seen: int) -> bool:
        if isinstance(table, StepTable):
            return self._over.get(sender.group, 0) >= seen
        return table.may_read(sender, seen)

    def _stats(self, sender: Address, client: _Client, message: TableStatsRequest) -> None:
        table = self._table(sender, message.table)
        rows = table.rows
        sizes = rows.count, rows.value_bytes, table.state_bytes, rows.index_bytes
        self._out.append((sender, TableStats(message.round, *sizes)))

    def _list(self, sender: Address, client: _Client, message: TableList) -> None:
        ids = self._table(sender, message.table).rows.ids()
        if message.first < 0:
            raise m.ProtocolError(f"rows from number {message.first} on")
        self._out.append((sender, TableIds(message.round, pack_ids(ids[message.first : message.first + MAX_IDS]))))

    def _barrier(self, sender: Address, client: _Client, message: TableBarrier) -> None:
        if message.round not in self._barriers and len(self._barriers) >= _MAX_BARRIERS:
            raise m.ProtocolError(f"{sender} is at barrier {message.round}, while {len(self._barriers)} are not passed")
        there = self._barriers.setdefault(message.round, set())
        there.add(sender)
        self._check_barriers()
        if len(there) == len(self._workers):
            del self._barriers[message.round]
            self._at_end = self._at_end or message.round < 0
            self._out += [(worker, TableBarrier(0, message.round)) for worker in self._workers]

    def _check_barriers(self) -> None:
        """Nobody waits for a worker whose script has ended; at the barrier of the end (a round below 0) they come."""
        for number, there in self._barriers.items():
            gone = [worker for worker in self._workers if self._clients[worker].bye and worker not in there]
            if gone and number >= 0:
                self._fail(f"{gone[0]} ended while {min(there)} waits for all workers at a barrier", config=False)

    def _bye(self, sender: Address, client: _Client, message: TablesFinished) -> None:
        client.bye = True
        self._check_barriers()
        for table in self._tables.values():
            if text := table.ended(sender):
                self._fail(text, config=False)

    # --- a step of the model ---------------------------------------------------------------------------------------

    def _step(self, sender: Address, client: _Client, message: TableStep) -> None:
        client.steps = message.step + 1

    @property
    def _of_steps(self) -> list[StepTable]:
        return [table for table in self._tables.values() if isinstance(table, StepTable)]

    def may_stage(self, group: int, step: int) -> bool:
        """All rows of this step are here."""
        for worker in self._topology.workers(group) if self._tables else ():
            client = self._clients[worker]
            if client.steps <= step and any(isinstance(table, StepTable) for table in client.tables.values()):
                return False
        return True

    def _found(self, group: int, step: int, commits: Mapping[int, m.Commit]) -> Found:
        """The gradients of a step, by table."""
        found = self._means.get((group, step))
        if found is None:
            found = self._means[group, step] = {}
            tree, divide = self._topology.sum_tree(group), self._job.reduce is Reduce.kMean
            for table in self._of_steps:
                mean = table.mean(group, step, commits, tree, divide)
                if mean is not None:
                    found[table.spec.name] = mean
        return found

    def amend_vote(self, vote: m.StepVote, commits: Mapping[int, m.Commit]) -> m.StepVote:
        """What this shard says of a staged step, with its rows taken into account."""
        commit, checked = commits[0], bool(self._most) or commits[0].check_finite
        if not self._tables or not (checked or commit.clip_norm > 0):
            return vote
        grads = [rows for _, rows in self._found(vote.group, vote.step, commits).values()]
        if checked and not all(all_finite(g.reshape(-1)) for g in grads):
            refused = vote.refused if commit.check_finite else (*vote.refused, NOBODY, -1)
            return replace(vote, finite=False, power=0.0, refused=refused)
        if vote.refused:  # the rows of these workers are in the means already
            return replace(vote, finite=False, power=0.0)
        finite, power = vote.finite, vote.power
        if commit.clip_norm > 0:
            norms = [norm_of(g, commit.clip_type) * commit.inv_scale for g in grads if len(g)]
            if vote.infinity:
                power = max([power, *norms])
            else:
                power += sum(to_power(norm, commit.clip_type) for norm in norms)
        return replace(vote, finite=finite, power=power)

    def apply_step(self, group: int, step: int, commits: Mapping[int, m.Commit], factor: float) -> Out:
        """The step counts: its rows change. factor: of every gradient."""
        self._out = []
        if text := self._kept.missed:
            self._fail(f"tables: {text}", config=True)
        if self._tables:
            for name, found in self._found(group, step, commits).items():
                table = self._tables[name]
                assert isinstance(table, StepTable)
                try:
                    table.apply_step(group, step, found, factor)
                except (ConfigError, LookupError) as error:
                    self._fail(f"tables: {error}", config=False)
        return self._out

    def step_over(self, result: StepResult) -> Out:
        """The step is applied, or skipped: its rows are forgotten, and who waited for it reads."""
        self._out = []
        group, step = result.group, result.step
        self._means.pop((group, step), None)
        self._over[group] = step + 1
        for table in self._of_steps:
            table.drop(group, step)
        self._answer_held()
        return self._out

    def state_dict(self) -> State | None:
        """Return the state, see `component_state`. None: not possible once there is a table."""
        if self._tables:
            return None
        clients = {
            worker: (client.next, client.early, client.early_bytes, client.steps, client.bye)
            for worker, client in self._clients.items()
        }
        return {"clients": clients, "over": self._over, "barriers": self._barriers, "at_end": self._at_end}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._clients = {
            worker: _Client(number, dict(early), early_bytes, {}, steps, bye)
            for worker, (number, early, early_bytes, steps, bye) in state["clients"].items()
        }
        self._barriers = {number: set(there) for number, there in state["barriers"].items()}
        self._over, self._at_end = dict(state["over"]), state["at_end"]


def _ids(table: TableShard, raw: bytes) -> Ids:
    """The rows that a message names. Raises ProtocolError for more than fit into one, since memory is made for them."""
    ids = unpack_ids(raw)
    if len(ids) > table.spec.part_rows:
        most = table.spec.part_rows
        raise m.ProtocolError(f"{len(ids)} rows of table {table.spec.name!r} in a message, at most {most}")
    return ids


_HANDLERS: Mapping[type[m.Message], Callable[..., Any]] = {
    TableOpen: TableServer._open,
    TablePush: TableServer._push,
    TableStep: TableServer._step,
    TablePull: TableServer._pull,
    TableAssign: TableServer._give,
    TableRule: TableServer._set_rule,
    TableStatsRequest: TableServer._stats,
    TableBarrier: TableServer._barrier,
    TableList: TableServer._list,
    TablesFinished: TableServer._bye,
}
