"""The tables of a script: on the servers of its job, or in an ordinary process."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Protocol, cast

import torch

from topotrain.config.job import ConfigError
from topotrain.core.events import Unrepeatable
from topotrain.extensions.elastic.eligibility import TABLES
from topotrain.extensions.tables.row_optimizers import RowOptimizer, make_optimizer
from topotrain.extensions.tables.row_storage import RowStorage
from topotrain.extensions.tables.table_client import TableClient
from topotrain.extensions.tables.table_spec import TableSpec
from topotrain.training.context import Context


class TableBackend(Protocol):
    """Tables by name.

    Ids are ascending 1-D int64 tensors. Rows are [number of ids, width].
    """

    @property
    def rank(self) -> int: ...

    @property
    def workers(self) -> int: ...

    @property
    def import_module(self) -> str:
        """The job's `import`: the module with the user's own optimizers."""
        ...

    def next_number(self) -> int:
        """Return 0, 1, 2, …. The same on all workers that make the same calls."""
        ...

    def open(self, spec: TableSpec) -> None: ...

    def set_optimizer(self, name: str, text: str) -> None:
        """Set the optimizer from the next push on."""
        ...

    def assign(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None: ...

    def push(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Push rows of a table without steps; the tensors are read before this returns."""
        ...

    def push_step(self, name: str, ids: torch.Tensor, rows: torch.Tensor, step: int) -> None: ...

    def pull(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows, with this worker's pushes applied."""
        ...

    def pull_all(self, wanted: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]: ...

    def touched(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all existing rows in batches, in no order."""
        ...

    def stats(self, name: str) -> list[dict[str, Any]]:
        """Return per server "server", "rows", and "bytes" of values, state and index."""
        ...

    def barrier(self) -> None: ...


class LocalTables:
    """The `TableBackend` of an ordinary process: its tables are in the process."""

    rank, workers, import_module = 0, 1, ""
    _numbers = count()  # of the process, since each table has a `LocalTables` of its own

    def __init__(self) -> None:
        self._tables: dict[str, tuple[RowStorage, RowOptimizer | None]] = {}

    def next_number(self) -> int:
        return next(self._numbers)

    def open(self, spec: TableSpec) -> None:
        rows = RowStorage(spec, 0, 1)
        # One shard of one, with the code that servers run.
        self._tables[spec.name] = rows, make_optimizer(rows, spec.optimizer) if spec.optimizer else None

    def set_optimizer(self, name: str, text: str) -> None:
        rows, rule = self._tables[name]
        if rule is None or not rule.set(text):
            self._tables[name] = rows, make_optimizer(rows, text)

    def assign(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._tables[name][0].assign(ids.numpy(), rows)

    def push(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        held, rule = self._tables[name]
        slots = held.slots(ids.numpy())
        if rule is not None:
            # The optimizer works in place, and the rows are the caller's.
            rule.apply(slots, rows.clone())
        elif held.spec.mode == "sync":
            held.scatter(slots, rows)
        else:
            held.scatter(slots, held.gather(slots).add_(rows))

    def push_step(self, name: str, ids: torch.Tensor, rows: torch.Tensor, step: int) -> None:
        self.push(name, ids, rows)

    def pull(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        held, _ = self._tables[name]
        return held.gather(held.slots(ids.numpy()))

    def pull_all(self, wanted: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        return [self.pull(name, ids) for name, ids in wanted]

    def touched(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        held, _ = self._tables[name]
        # The same batch sizes and ascending ids as from a server.
        found, many = torch.from_numpy(held.ids()), held.spec.part_rows
        for at in range(0, len(found), many):
            ids = found[at : at + many].sort().values
            yield ids, self.pull(name, ids)

    def stats(self, name: str) -> list[dict[str, Any]]:
        held, rule = self._tables[name]
        state = 0 if rule is None else rule.state_bytes
        return [{"server": "here", "rows": held.count, "bytes": held.value_bytes + state + held.index_bytes}]

    def barrier(self) -> None:
        """See `TableBackend`. There is no other worker."""


class JobTables:
    """The `TableBackend` of a worker of a job: its tables are on the servers.

    Raises ConfigError for backup workers, or a layout without tables.
    """

    def __init__(self, here: Context) -> None:
        place = here.place
        if place.job.cluster.backup:
            accepted = "must be 0 for a job with tables or sparse weights: rows are pushed by all workers of a step"
            raise ConfigError("cluster.backup", place.job.cluster.backup, accepted)
        self.client = TableClient(here.connect().exchange, place.topology, place.job)
        self.specs: list[TableSpec] = []
        self._here = here
        self._numbers = 0

    @property
    def in_steps(self) -> bool:
        """Whether rows are pushed with the model's steps; those of a `KVStore` are not."""
        return any(spec.mode == "step" for spec in self.specs)

    @property
    def rank(self) -> int:
        return self._here.number

    @property
    def workers(self) -> int:
        topology = self._here.place.topology
        return topology.worker_groups * topology.workers_per_group

    @property
    def import_module(self) -> str:
        return self._here.place.job.import_

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def open(self, spec: TableSpec) -> None:
        # Raises ConfigError here: on the servers a second open would be taken for the same table.
        if any(known.name == spec.name for known in self.specs):
            raise ConfigError("table.name", spec.name, "is in use already; every table of a job needs its own name")
        self.client.open(spec)
        self.specs.append(spec)

    def set_optimizer(self, name: str, text: str) -> None:
        self.client.set_optimizer(name, text)

    def assign(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.client.assign(name, ids, rows)

    def push(self, name: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.client.push(name, ids, rows)

    def push_step(self, name: str, ids: torch.Tensor, rows: torch.Tensor, step: int) -> None:
        # The client counts the worker's steps itself.
        self.client.push(name, ids, rows)

    def pull(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self.client.pull(name, ids)

    def pull_all(self, wanted: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        # All requests first, so that the tables are pulled in one round trip.
        asked = [self.client.pull_async(name, ids) for name, ids in wanted]
        return [self.client.wait(pull) for pull in asked]

    def touched(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in self.client.touched(name):
            yield ids, self.client.pull(name, ids)

    def stats(self, name: str) -> list[dict[str, Any]]:
        return [
            {"server": str(server), "rows": size.rows, "bytes": size.value_bytes + size.state_bytes + size.index_bytes}
            for server, size in zip(self._here.connect().exchange.channel.servers, self.client.stats(name), strict=True)
        ]

    def barrier(self) -> None:
        self.client.barrier()


class TableOptimizer:
    """The optimizer of tables as the servers know it. `read` returns its present text."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self.text = read()

    def send_changes(self, backend: TableBackend, tables: Iterable[str]) -> None:
        text = self._read()
        # Before a push: a scheduler may have changed the rate since the last one.
        if text != self.text:
            self.text = text
            for name in tables:
                backend.set_optimizer(name, text)


def tables_of(here: Context | None) -> TableBackend:
    """Return the tables of this process."""
    if here is None:
        return LocalTables()
    if here.tables is None:
        here.open_tables(JobTables(here))
        # A worker group cannot restart alone: rows that it has pushed stay in the table.
        here.emit(Unrepeatable(str(here.me), TABLES, job=False))
    return cast(JobTables, here.tables)
