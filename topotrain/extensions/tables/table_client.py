"""A worker's door to the tables: open, pull, push.

    door = TableClient(client, topology, job)       # one per worker; needs cluster.nserver_groups = 1
    door.open(TableSpec("words", -1, 64, optimizer=rule_text(SGD([p], lr=0.1)), init="normal 0 0.01"))
    rows = door.pull("words", ids)                   # (n, 64): rows as they are; `pull_async` and `wait` overlap
    door.push("words", ids, gradients)               # rows named twice are added up
    door.close()                                     # at the script's end, before the worker's own goodbye

When a push counts is the table's mode (`TableSpec`). "step": it belongs to the step that the worker commits next, so
push between backward and `optimizer.step()`; weights, loss scale, clipping and a skipped step are as for the dense
gradients, and a pull after `step()` sees it (of other worker groups it sees what is applied by then, which may be more
than the parameters had). A worker that pushes to a step table needs a prepared model. "sync": a
pull sees at least all of this worker's pushes; it waits until every worker of the job has made as many. "async":
pushes are applied one by one as they come; a pull sees this worker's own.

Rows of a table with init "given" come from `give`. It returns when the servers have them. Let one worker do it, and
have the others wait at `barrier`.

Whatever goes wrong on a server ends the job: the next wait raises `JobError` with the reason.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, StepEnd
from topotrain.core.client.client_extension import ClientExtension
from topotrain.extensions.tables.row_optimizers import check_rule
from topotrain.extensions.tables.table_messages import (
    MAX_IDS,
    TABLE_REPLIES,
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
from topotrain.extensions.tables.table_spec import Ids, TableSpec, pack_ids, unpack_ids


@dataclass(frozen=True, slots=True)
class TableSize:
    """What one shard holds of a table: rows, and bytes of their values, of optimizer state, and of the index."""

    rows: int
    value_bytes: int
    state_bytes: int
    index_bytes: int


@dataclass(slots=True)
class _Open:
    spec: TableSpec
    number: int
    pushes: int = 0


@dataclass(slots=True)
class PendingPull:
    """Rows on their way: `wait` for them. `buffer` has them by shard, `order` says where each requested row is."""

    rounds: dict[int, tuple[int, int]] = field(default_factory=dict)  # round -> rows of the buffer
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    order: torch.Tensor | None = None


class TableClient(ClientExtension):
    """One worker's door; see above.

    Args:
        client: the worker's client of the servers.
        topology, job: its job.

    Raises:
        ConfigError: the layout has not just one server group.
    """

    messages = TABLE_REPLIES

    def __init__(self, client: Client, topology: Topology, job: Job) -> None:
        groups = job.cluster.nserver_groups
        if groups != 1:
            raise ConfigError("cluster.nserver_groups", groups, "must be 1 in a job with tables: a row has one home")
        self._channel, self._job = client.channel, job
        self._servers = client.channel.servers
        self._shards = topology.shards
        self._tables: dict[str, _Open] = {}
        self._lock = threading.Lock()  # numbers go out in order, also from autograd's threads
        self._numbers = dict.fromkeys(self._servers, 0)
        self._round = 0
        self._steps = 0
        self._opened: set[tuple[Address, int]] = set()
        self._under_way: dict[int, PendingPull] = {}
        self._sizes: dict[int, TableSize] = {}
        self._lists: dict[int, Ids] = {}
        self._barriers: set[tuple[Address, int]] = set()
        self._barriers_met = 0
        self._closed = False
        client.attach(self)

    # --- what servers say ----------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        """Where rows are to be received. Raises ProtocolError for rows that nobody has asked for."""
        number = message.round if isinstance(message, TableRows) else -1
        pull = self._under_way.get(number)
        if pull is None or number not in pull.rounds:
            return None  # said twice
        lo, hi = pull.rounds[number]
        return pull.buffer[lo:hi].view(-1)

    def handle(self, sender: Address, message: m.Message) -> None:
        """An answer."""
        if isinstance(message, TableOpen):
            self._opened.add((sender, message.table))
        elif isinstance(message, TableRows):
            pull = self._under_way.pop(message.round, None)
            if pull is not None:
                del pull.rounds[message.round]
        elif isinstance(message, TableStats):
            size = TableSize(message.rows, message.value_bytes, message.state_bytes, message.index_bytes)
            self._sizes[message.round] = size
        elif isinstance(message, TableBarrier):
            self._barriers.add((sender, message.round))
        elif isinstance(message, TableIds):
            self._lists[message.round] = unpack_ids(message.ids)

    def before_commit(self, step: int, end: StepEnd) -> None:
        """Tell the servers that this step has no more pushes."""
        self._steps = step + 1
        if any(table.spec.mode == "step" for table in self._tables.values()):
            for server in self._servers:
                self._tell(server, TableStep, step)

    # --- tables --------------------------------------------------------------------------------------------------

    def open(self, spec: TableSpec) -> None:
        """Make a table, or join it; returns when every server has it. Again with the same description: nothing.

        Raises:
            ConfigError: an optimizer that the table cannot have, or another description for the same name.
            JobError: another worker describes it differently.
        """
        known = self._tables.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ConfigError("table.name", spec.name, "is open already with another description")
            return
        if spec.optimizer:
            check_rule(spec, spec.optimizer, self._job.import_)
        table = _Open(spec, len(self._tables))
        text = spec.to_text()
        for server in self._servers:
            self._tell(server, TableOpen, table.number, text)
        self._channel.wait_until(lambda: all((s, table.number) in self._opened for s in self._servers))
        self._tables[spec.name] = table

    def spec(self, name: str) -> TableSpec:
        """The description of an open table. Raises KeyError."""
        return self._table(name).spec

    def set_optimizer(self, name: str, text: str) -> None:
        """Pushes from now on are applied by this optimizer (`tablerules.rule_text`); state of another one is forgotten.

        With the same class only the settings change. In "sync" tables one worker says it; in "step" tables one of each
        group is enough. Raises ConfigError.
        """
        table = self._table(name)
        check_rule(table.spec, text, self._job.import_)
        since = self._steps if table.spec.mode == "step" else table.pushes + 1
        for server in self._servers:
            self._tell(server, TableRule, table.number, since, text)

    def pull(self, name: str, ids: torch.Tensor | Iterable[int]) -> torch.Tensor:
        """These rows, (number of ids, width); see `pull_async`."""
        return self.wait(self.pull_async(name, ids))

    def pull_async(self, name: str, ids: torch.Tensor | Iterable[int]) -> PendingPull:
        """Ask for rows; their values come while the script goes on. Raises IndexError for a row that cannot be."""
        table, wanted = self._table(name), self._ids(name, ids)
        spec = table.spec
        shards = (wanted + spec.first) % self._shards
        sorts = bool(np.any(shards[1:] < shards[:-1]))  # not if all are one shard's: then nothing is copied, either
        by_shard = np.argsort(shards, kind="stable") if sorts else np.arange(len(wanted))
        pull = PendingPull(buffer=torch.empty(len(wanted), spec.width, dtype=spec.torch_dtype))
        if sorts:
            order = np.empty(len(wanted), dtype=np.int64)
            order[by_shard] = np.arange(len(wanted))
            pull.order = torch.from_numpy(order)
        ordered = wanted[by_shard]
        ends = np.searchsorted(shards[by_shard], np.arange(self._shards), side="right").tolist()
        seen = self._steps if spec.mode == "step" else table.pushes
        asks: list[tuple[Address, int, bytes]] = []
        with self._channel.waiter.update():
            for server, lo, hi in zip(self._servers, [0, *ends], ends, strict=False):
                for at in range(lo, hi, spec.part_rows):
                    end = min(at + spec.part_rows, hi)
                    self._round += 1
                    pull.rounds[self._round] = (at, end)
                    self._under_way[self._round] = pull
                    asks.append((server, self._round, pack_ids(ordered[at:end])))
        for server, number, raw in asks:
            self._tell(server, TablePull, table.number, number, seen, raw)
        return pull

    def wait(self, pull: PendingPull) -> torch.Tensor:
        """The rows of a pull, in the order of its ids; the tensor is the caller's. Raises JobError, PeerLost."""
        self._channel.wait_until(lambda: not pull.rounds)
        return pull.buffer if pull.order is None else pull.buffer.index_select(0, pull.order)

    def push(self, name: str, ids: torch.Tensor | Iterable[int], rows: torch.Tensor) -> None:
        """Send rows, (number of ids, width), home; they are copied before this returns, and it waits for nobody.

        Raises IndexError for a row that cannot be, ValueError for rows of another size.
        """
        table = self._table(name)
        named, values = self._sorted(table.spec, self._ids(name, ids), rows)
        table.pushes += 1
        turn = self._steps if table.spec.mode == "step" else table.pushes
        for server, last, raw, body in self._parts(table.spec, named, values):
            self._tell(server, TablePush, table.number, turn, last, raw, body=body)

    def give(self, name: str, ids: torch.Tensor | Iterable[int], rows: torch.Tensor) -> None:
        """These rows are so from now on, whatever they were; returns when the servers have them."""
        table = self._table(name)
        named, values = self._sorted(table.spec, self._ids(name, ids), rows)
        for server, _, raw, body in self._parts(table.spec, named, values):
            self._tell(server, TableAssign, table.number, raw, body=body)
        self.stats(name)  # answered behind the last of them

    def stats(self, name: str) -> list[TableSize]:
        """How large the table is on each shard."""
        table = self._table(name)
        rounds = {}
        for server in self._servers:
            self._round += 1
            rounds[server] = number = self._round
            self._tell(server, TableStatsRequest, table.number, number)
        self._channel.wait_until(lambda: self._sizes.keys() >= set(rounds.values()))
        return [self._sizes.pop(rounds[server]) for server in self._servers]

    def touched(self, name: str) -> Iterator[torch.Tensor]:
        """The rows that are there, shard by shard, as many at a time as one message has (1-D int64, ascending)."""
        table = self._table(name)
        for server in self._servers:
            first, more = 0, True
            while more:
                self._round += 1
                number = self._round
                self._tell(server, TableList, table.number, number, first)
                self._channel.wait_until(lambda r=number: r in self._lists)  # type: ignore[misc]
                ids = self._lists.pop(number)
                first, more = first + len(ids), len(ids) == MAX_IDS
                ids = np.sort(ids)
                for at in range(0, len(ids), table.spec.part_rows):
                    yield torch.from_numpy(ids[at : at + table.spec.part_rows])

    def barrier(self, last: bool = False) -> None:
        """Wait until every worker of the job is here; what they said about tables before has been taken by then.

        last: the barrier at the end of all scripts, which is no other one's.
        """
        self._barriers_met += 0 if last else 1
        count = -1 if last else self._barriers_met
        for server in self._servers:
            self._tell(server, TableBarrier, count)
        self._channel.wait_until(lambda: all((server, count) in self._barriers for server in self._servers))

    def close(self) -> None:
        """Nothing more about tables; again: nothing. A worker of a job without tables may say it, too."""
        if not self._closed:
            self._closed = True
            for server in self._servers:
                self._tell(server, TablesFinished)

    # --- parts ---------------------------------------------------------------------------------------------------

    def _table(self, name: str) -> _Open:
        if name not in self._tables:
            raise KeyError(f"table {name!r} is not open; open are: {', '.join(self._tables) or 'none'}")
        return self._tables[name]

    def _ids(self, name: str, ids: torch.Tensor | Iterable[int]) -> Ids:
        if isinstance(ids, torch.Tensor):
            if ids.is_floating_point() or ids.is_complex():
                raise IndexError(f"rows of table {name!r} must be whole numbers, not {ids.dtype}")
            found = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        else:
            found = np.fromiter(ids, dtype=np.int64)
        rows = self._table(name).spec.rows
        if len(found) and (found.min() < 0 or 0 <= rows <= found.max()):
            wrong = found.min() if found.min() < 0 else found.max()
            raise IndexError(f"row {wrong} of table {name!r}: must be 0 to {rows - 1}" if rows > 0 else f"row {wrong}")
        return found

    def _sorted(self, spec: TableSpec, ids: Ids, rows: torch.Tensor) -> tuple[Ids, torch.Tensor]:
        """Each row once, ascending; what was named twice is added up as torch coalesces a sparse gradient."""
        if rows.numel() != len(ids) * spec.width:
            raise ValueError(
                f"{rows.numel()} elements for {len(ids)} rows of table {spec.name!r}, whose rows have {spec.width}"
            )
        values = rows.detach().to("cpu", spec.torch_dtype).reshape(len(ids), spec.width)
        if (np.diff(ids) > 0).all():
            return ids, values
        known, place = np.unique(ids, return_inverse=True)
        index = torch.from_numpy(place)[None]
        summed = torch.sparse_coo_tensor(index, values, (len(known), spec.width), check_invariants=False).coalesce()
        return known, summed.values()

    def _parts(
        self, spec: TableSpec, ids: Ids, rows: torch.Tensor
    ) -> Iterator[tuple[Address, bool, bytes, torch.Tensor | None]]:
        """(server, last, ids, rows) of each message; every server has at least one, which may be empty.

        Rows are copied when it is their turn: a key may be too large to be there twice.
        """
        for server in self._servers:
            mine = np.flatnonzero((ids + spec.first) % self._shards == server.index)
            for at in range(0, max(1, len(mine)), spec.part_rows):
                which = mine[at : at + spec.part_rows]
                body = rows.index_select(0, torch.from_numpy(which)).view(-1) if len(which) else None
                yield server, at + spec.part_rows >= len(mine), pack_ids(ids[which]), body

    def _tell(
        self, server: Address, kind: Callable[..., m.Message], *said: object, body: torch.Tensor | None = None
    ) -> None:
        with self._lock:
            number = self._numbers[server]
            self._numbers[server] += 1
            self._channel.send(server, kind(number, *said, body=body))
