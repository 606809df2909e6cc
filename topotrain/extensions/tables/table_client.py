"""Client of one worker for tables: open, pull, push.

    tables = TableClient(client, topology, job)      # one per worker, with cluster.nserver_groups = 1
    tables.open(TableSpec("words", -1, 64, optimizer=optimizer_text(SGD([p], lr=0.1)), init="normal 0 0.01"))
    rows = tables.pull("words", ids)                 # (n, 64)
    tables.push("words", ids, gradients)             # rows that are named twice are added up
    tables.close()                                   # at the end of the script, before the worker finishes

The mode of the table (`TableSpec`) decides when a push counts:

* "step": the push belongs to the next step that the worker commits, so the worker pushes between backward and
  `optimizer.step()`. Weights, loss scale, clipping and skipping are those of the dense gradients. A pull after
  `step()` sees the push. Of other worker groups it sees the pushes that are applied by then, which may be more than the
  parameters had. The worker needs a prepared model.
* "sync": a pull sees at least all pushes of this worker. It waits until every worker of the job has pushed as often.
* "async": each push is applied when it arrives. A pull sees the pushes of this worker.

One worker sets the rows of a table with init "given" by `assign`, and the other workers wait for it at `barrier`.

An error on a server ends the job. The next wait raises `JobError` with the reason.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Topology
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, StepEnd
from topotrain.core.client.client_extension import ClientExtension
from topotrain.extensions.tables.row_optimizers import check_optimizer
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
    rows: int
    value_bytes: int
    state_bytes: int
    index_bytes: int


@dataclass(slots=True)
class _Open:
    spec: TableSpec
    number: int
    pushes: int = 0

    def next_push(self) -> int:
        """Count a push, and return its number from 1."""
        self.pushes += 1
        return self.pushes


@dataclass(slots=True)
class PendingPull:
    """Rows that are being received. `TableClient.wait` returns them.

    buffer: the rows by shard. order: the position of each requested row in the buffer.
    """

    buffer: torch.Tensor
    order: torch.Tensor | None = None
    # Round -> rows of the buffer. Empty: all are here.
    rounds: dict[int, tuple[int, int]] = field(default_factory=dict)


class TableClient(ClientExtension):
    """The tables of a job for one worker; see above.

    Raises ConfigError if the layout has not just one server group.
    """

    messages = TABLE_REPLIES

    def __init__(self, client: Client, topology: Topology, job: Job) -> None:
        groups = job.cluster.nserver_groups
        if groups != 1:
            raise ConfigError(
                "cluster.nserver_groups", groups, "must be 1 in a job with tables: each row is on one server"
            )
        self._channel, self._job = client.channel, job
        self._servers = client.channel.servers
        self._shards = topology.shards
        self._tables: dict[str, _Open] = {}
        # Numbers go out in order, also from autograd's threads.
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(self._servers, 0)
        self._rounds = count(1)
        self._steps = 0
        self._opened: set[tuple[Address, int]] = set()
        self._under_way: dict[int, PendingPull] = {}
        self._sizes: dict[int, TableSize] = {}
        self._lists: dict[int, Ids] = {}
        self._barriers: set[tuple[Address, int]] = set()
        self._barriers_met = 0
        self._closed = False
        client.attach(self)

    # --- messages of servers --------------------------------------------------------------------------------------

    def place(self, sender: Address, message: m.Message) -> torch.Tensor | None:
        number = message.round if isinstance(message, TableRows) else -1
        pull = self._under_way.get(number)
        # A repeated reply. Its rows must not be written into a buffer that the caller has by now.
        if pull is None or number not in pull.rounds:
            return None
        lo, hi = pull.rounds[number]
        return pull.buffer[lo:hi].view(-1)

    def handle(self, sender: Address, message: m.Message) -> None:
        if isinstance(message, TableOpen):
            self._opened.add((sender, message.table))
        elif isinstance(message, TableRows):
            pull = self._under_way.pop(message.round, None)
            if pull is not None:
                # The rows are in the buffer since `place`.
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
        # A push or pull from here on belongs to the next step.
        self._steps = step + 1
        if any(table.spec.mode == "step" for table in self._tables.values()):
            # Every server counts the step, also a server without any of its rows.
            for server in self._servers:
                self._send(server, TableStep, step)

    # --- tables --------------------------------------------------------------------------------------------------

    def open(self, spec: TableSpec) -> None:
        """Open a table on all servers, and wait for them.

        A table may be opened again with the same description. Raises ConfigError if the table cannot have this
        optimizer, or is open with another description, JobError if another worker describes it differently.
        """
        known = self._tables.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ConfigError("table.name", spec.name, "is open already with another description")
            return
        if spec.optimizer:
            check_optimizer(spec, spec.optimizer, self._job.import_)
        table = _Open(spec, len(self._tables))
        text = spec.to_text()
        for server in self._servers:
            self._send(server, TableOpen, table.number, text)
        self._channel.wait_until(lambda: all((s, table.number) in self._opened for s in self._servers))
        self._tables[spec.name] = table

    def spec(self, name: str) -> TableSpec:
        return self._table(name).spec

    def set_optimizer(self, name: str, text: str) -> None:
        """Set the optimizer of all later pushes (`row_optimizers.optimizer_text`).

        Another class drops the state of the rows. The same class only changes settings. In "sync" tables one worker
        calls this, in "step" tables one worker of each group. Raises ConfigError.
        """
        table = self._table(name)
        check_optimizer(table.spec, text, self._job.import_)
        # The turn of the next push. Other workers may be some turns behind, and keep the old settings until then.
        since = self._steps if table.spec.mode == "step" else table.pushes + 1
        for server in self._servers:
            self._send(server, TableRule, table.number, since, text)

    def pull(self, name: str, ids: torch.Tensor | Iterable[int]) -> torch.Tensor:
        """Return rows, (number of ids, width). See `pull_async`."""
        return self.wait(self.pull_async(name, ids))

    def pull_async(self, name: str, ids: torch.Tensor | Iterable[int]) -> PendingPull:
        """Request rows, and return at once: `wait` returns them. Raises IndexError."""
        table, wanted = self._table(name), self._ids(name, ids)
        spec = table.spec
        by_shard, ranges = self._by_shard(spec, wanted)
        order = None
        # The replies fill contiguous parts of the buffer.
        if by_shard is not None:
            positions = np.empty(len(wanted), dtype=np.int64)
            positions[by_shard] = np.arange(len(wanted))
            order, wanted = torch.from_numpy(positions), wanted[by_shard]
        pull = PendingPull(torch.empty(len(wanted), spec.width, dtype=spec.torch_dtype), order)
        # The servers hold the request until so many turns of this worker are applied.
        seen = self._steps if spec.mode == "step" else table.pushes
        asks: list[tuple[Address, int, bytes]] = []
        # A reply may arrive as soon as its request is sent, so all of them are known before.
        with self._channel.waiter.update():
            for server, lo, hi in ranges:
                for at in range(lo, hi, spec.part_rows):
                    end = min(at + spec.part_rows, hi)
                    number = next(self._rounds)
                    pull.rounds[number] = (at, end)
                    self._under_way[number] = pull
                    asks.append((server, number, pack_ids(wanted[at:end])))
        for server, number, raw in asks:
            self._send(server, TablePull, table.number, number, seen, raw)
        return pull

    def wait(self, pull: PendingPull) -> torch.Tensor:
        """Wait for the rows of a pull, and return them in the order of its ids.

        Raises JobError if the job has failed, PeerLost if a server is lost.
        """
        self._channel.wait_until(lambda: not pull.rounds)
        return pull.buffer if pull.order is None else pull.buffer.index_select(0, pull.order)

    def push(self, name: str, ids: torch.Tensor | Iterable[int], rows: torch.Tensor) -> None:
        """Send rows, (number of ids, width), to their servers. They are copied here.

        Raises IndexError if the table cannot have such a row, ValueError if the rows have another size.
        """
        table = self._table(name)
        named, values = self._sorted(table.spec, self._ids(name, ids), rows)
        number = table.next_push()
        turn = self._steps if table.spec.mode == "step" else number
        for server, last, raw, body in self._parts(table.spec, named, values):
            self._send(server, TablePush, table.number, turn, last, raw, body=body)

    def assign(self, name: str, ids: torch.Tensor | Iterable[int], rows: torch.Tensor) -> None:
        """Set rows to these values, and wait until the servers have them."""
        table = self._table(name)
        named, values = self._sorted(table.spec, self._ids(name, ids), rows)
        for server, _, raw, body in self._parts(table.spec, named, values):
            self._send(server, TableAssign, table.number, raw, body=body)
        # A server replies to this after the rows that were sent before.
        self.stats(name)

    def stats(self, name: str) -> list[TableSize]:
        table = self._table(name)
        rounds = {server: next(self._rounds) for server in self._servers}
        for server, number in rounds.items():
            self._send(server, TableStatsRequest, table.number, number)
        self._channel.wait_until(lambda: self._sizes.keys() >= set(rounds.values()))
        return [self._sizes.pop(rounds[server]) for server in self._servers]

    def touched(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows that exist, shard by shard: 1-D int64, ascending."""
        table = self._table(name)
        for server in self._servers:
            first, more = 0, True
            while more:
                number = next(self._rounds)
                self._send(server, TableList, table.number, number, first)
                self._channel.wait_until(lambda r=number: r in self._lists)  # type: ignore[misc]
                ids = self._lists.pop(number)
                # A full message may have more behind it. Slots keep their order, so new rows are at the end.
                first, more = first + len(ids), len(ids) == MAX_IDS
                ids = np.sort(ids)
                # As many at a time as one message of rows has.
                for at in range(0, len(ids), table.spec.part_rows):
                    yield torch.from_numpy(ids[at : at + table.spec.part_rows])

    def barrier(self, last: bool = False) -> None:
        """Wait for all workers of the job. `last`: the barrier at the end of all scripts.

        The servers have then handled all earlier messages about tables.
        """
        self._barriers_met += 0 if last else 1
        number = -1 if last else self._barriers_met
        for server in self._servers:
            self._send(server, TableBarrier, number)
        replies = {(server, number) for server in self._servers}
        self._channel.wait_until(lambda: replies <= self._barriers)
        with self._channel.waiter.update():
            self._barriers -= replies

    def close(self) -> None:
        """Announce that this worker uses no table any more.

        May be called twice, and without any table.
        """
        if not self._closed:
            self._closed = True
            for server in self._servers:
                self._send(server, TablesFinished)

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
        """Return ascending rows. Rows that are named twice are added up."""
        if rows.numel() != len(ids) * spec.width:
            raise ValueError(
                f"{rows.numel()} elements for {len(ids)} rows of table {spec.name!r}, which has rows of {spec.width}"
            )
        values = rows.detach().to("cpu", spec.torch_dtype).reshape(len(ids), spec.width)
        if (np.diff(ids) > 0).all():
            return ids, values
        known, place = np.unique(ids, return_inverse=True)
        index = torch.from_numpy(place)[None]
        # By torch's own `coalesce`, so that the bits are those of a sparse gradient.
        summed = torch.sparse_coo_tensor(index, values, (len(known), spec.width), check_invariants=False).coalesce()
        return known, summed.values()

    def _parts(
        self, spec: TableSpec, ids: Ids, rows: torch.Tensor
    ) -> Iterator[tuple[Address, bool, bytes, torch.Tensor | None]]:
        """Yield (server, whether it is the server's last, ids, rows) of each message."""
        by_shard, ranges = self._by_shard(spec, ids)
        for server, lo, hi in ranges:
            # At least one message, which may be empty: all servers count the same pushes.
            for at in range(lo, max(lo + 1, hi), spec.part_rows):
                end = min(at + spec.part_rows, hi)
                which = np.arange(at, end) if by_shard is None else by_shard[at:end]
                # Copied when its message is sent: the rows may be too large to be in memory twice.
                body = rows.index_select(0, torch.from_numpy(which)).view(-1) if len(which) else None
                yield server, end == hi, pack_ids(ids[which]), body

    def _by_shard(self, spec: TableSpec, ids: Ids) -> tuple[Ids | None, list[tuple[Address, int, int]]]:
        """Return the order of ids by shard, and (server, first, last) in it.

        None: the ids are in this order, as always with one shard.
        """
        shards, order = (ids + spec.first) % self._shards, None
        if np.any(shards[1:] < shards[:-1]):
            # Stable, so that the ids of a shard stay in order.
            order = np.argsort(shards, kind="stable")
            shards = shards[order]
        ends = np.searchsorted(shards, np.arange(self._shards), side="right").tolist()
        return order, list(zip(self._servers, [0, *ends], ends, strict=False))

    def _send(self, server: Address, kind: type[Any], *values: object, body: torch.Tensor | None = None) -> None:
        with self._lock:
            number = self._numbers[server]
            self._numbers[server] += 1
            self._channel.send(server, kind(number, *values, body=body))
