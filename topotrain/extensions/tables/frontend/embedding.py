"""`tt.Embedding`: a table only on the servers, with rows made at their first use.

A worker holds the rows of its current batch and no others. `forward` pulls them, and `step()` pushes their gradients.
The servers update them with the table's own optimizer, by the mean over the worker group, as any parameter. In an
ordinary process the table is in that process.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError
from topotrain.extensions.tables.frontend.table_export import read_parts
from topotrain.extensions.tables.frontend.table_registry import TableBackend, TableOptimizer, tables_of
from topotrain.extensions.tables.row_optimizers import check_optimizer, optimizer_text
from topotrain.extensions.tables.table_spec import TableSpec
from topotrain.training import context as process
from topotrain.training.parameters.prepared_objects import RowModule


class Embedding(RowModule):
    """A lookup table without a parameter: ids in, rows out, as `torch.nn.Embedding`.

    All workers make the same tables in the same order. `tt.prepare` connects them to the job with the rest of the
    model.

    Args:
        num_embeddings: the number of ids, from 0. None: any number >= 0 is an id.
        embedding_dim: elements of a row.
        init: the value of a row at its first use: "zeros", "uniform LOW HIGH" or "normal MEAN DEVIATION". It depends
            only on the table's seed and name and on the id.
        optimizer: `tt.kvstore.SGD(lr=…)`, `Adagrad` or `SparseAdam`, or such a torch.optim object. Its settings are
            read at every step.
        dtype: float32 or float64.
        seed: the seed of `init`.
        name: the name of the table, also in reports and files. By default embedding0, embedding1, …

    Raises:
        ConfigError: an argument has another type or value.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        init: str = "normal 0 1",
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        if not isinstance(optimizer, Optimizer):
            raise ConfigError("tt.Embedding optimizer", type(optimizer).__name__, "must be like tt.kvstore.SGD(lr=0.1)")
        rescale = getattr(optimizer, "rescale_grad", 1.0)
        if rescale != 1.0:
            accepted = "must be 1: the gradient of the rows is that of the model's loss"
            raise ConfigError("tt.Embedding optimizer.rescale_grad", rescale, accepted)
        if num_embeddings is not None and (type(num_embeddings) is not int or num_embeddings < 1):
            raise ConfigError("tt.Embedding num_embeddings", num_embeddings, "must be a whole number >= 1, or None")
        if not isinstance(name, str):
            raise ConfigError("tt.Embedding name", name, "must be a text")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.dtype = dtype
        self.optimizer = optimizer
        # A plan makes the model only to measure it, without servers.
        self._backend: TableBackend | None = None if process.planning() else tables_of(process.current())
        # All workers make the same tables in the same order, so the number is the same on all.
        self.name = name or f"embedding{0 if self._backend is None else self._backend.next_number()}"
        # At the end of the job the rows go to workspace/tables/NAME.
        if "/" in self.name or self.name.startswith("."):
            raise ConfigError("tt.Embedding name", name, "must be a valid name of a folder")
        # `cls`: `prepare` changes the class of an optimizer that it adopts.
        self._rule = TableOptimizer(partial(optimizer_text, optimizer, cls=type(optimizer)))
        self.spec = TableSpec(
            self.name,
            -1 if num_embeddings is None else num_embeddings,
            embedding_dim,
            str(dtype).removeprefix("torch."),
            "step",
            self._rule.text,
            init,
            seed,
        )
        # Refused here, at the line of the script, and not by a server.
        check_optimizer(self.spec, self._rule.text)
        # Unique ids, and their rows, of each forward since the last step.
        self._pulled: list[tuple[torch.Tensor, torch.Tensor]] = []
        here = process.current()
        # After `prepare` the worker's steps would not push this table.
        if here is not None and here.worker is not None:
            raise ConfigError("tt.Embedding", self.name, "must be made before tt.prepare, and be part of its model")
        if self._backend is not None:
            self._backend.open(self.spec)
        if here is not None:
            here.kept[f"table {self.name}"] = _Settings(optimizer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids of any shape: [..., embedding_dim].

        Args:
            ids: int64 or int32.

        Raises:
            ValueError: an id is negative or too large.
            TypeError: the ids are not int64 or int32.
        """
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"{self.name}: ids are {kind}, must be a tensor of int64 or int32")
        # Each row travels once, however often the batch names it.
        unique, places = torch.unique(ids.detach().cpu().long(), return_inverse=True)
        if len(unique) and (unique[0] < 0 or (self.num_embeddings is not None and unique[-1] >= self.num_embeddings)):
            wrong = int(unique[0] if unique[0] < 0 else unique[-1])
            most = "" if self.num_embeddings is None else f", below {self.num_embeddings}"
            raise ValueError(f"{self.name}: id {wrong} must be >= 0{most}")
        rows = self._tables.pull(self.name, unique)
        if torch.is_grad_enabled() and self.training:
            # A leaf of the graph: autograd leaves the gradient of the rows in its `grad`, which `gradient` collects.
            rows = rows.detach().requires_grad_()
            self._pulled.append((unique, rows))
        return nn.functional.embedding(places, rows)

    @property
    def _tables(self) -> TableBackend:
        if self._backend is None:
            raise ConfigError("tt.Embedding", self.name, "has no rows while a job is only planned")
        return self._backend

    def follow(self, optimizer: Optimizer) -> None:
        clear_with(optimizer, [self])
        # In an ordinary process the optimizer has no parameter of this table, so a hook pushes.
        optimizer.register_step_post_hook(lambda *_: self.push(0))

    def forget(self) -> None:
        """Drop the accumulated gradients, as `optimizer.zero_grad()` does."""
        self._pulled.clear()

    def gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient since the last step: sorted int64 ids [n], rows [n, dim]."""
        parts = [(ids, rows.grad) for ids, rows in self._pulled if rows.grad is not None]
        if not parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, self.embedding_dim, dtype=self.dtype)
        # The ids of one forward are sorted and unique.
        if len(parts) == 1:
            return parts[0]
        # Several forwards before a step, as with gradient accumulation: equal ids are added up.
        ids, places = torch.unique(torch.cat([ids for ids, _ in parts]), return_inverse=True)
        rows = torch.zeros(len(ids), self.embedding_dim, dtype=self.dtype)
        return ids, rows.index_add_(0, places, torch.cat([grad for _, grad in parts]))

    def push(self, step: int) -> None:
        """Push the gradient as this worker's part of a step."""
        self._rule.send_changes(self._tables, [self.name])
        # Also without rows: every server counts the pushes of all workers.
        self._tables.push_step(self.name, *self.gradient(), step)
        self.forget()

    def stats(self) -> list[dict[str, Any]]:
        """Return per server `server` (its name), `rows`, and `bytes` of rows and state."""
        return self._tables.stats(self.name)

    def touched(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all existing rows in batches: ids, and their rows."""
        return self._tables.touched(self.name)

    def load(self, folder: str | Path) -> None:
        """Load rows from a folder that a job has written.

        All workers must call this. Worker 0 sends the rows.

        Raises:
            ConfigError: the folder does not exist, or has rows of another width or ids that this table does not have.
        """
        if not isinstance(folder, str | Path):
            raise ConfigError("tt.Embedding.load folder", folder, "must be a path, such as workspace/tables/NAME")
        if self._tables.rank == 0:
            for ids, rows in read_parts(Path(folder), self.embedding_dim):
                self._check_loaded(folder, ids)
                # A push or assign names its rows in ascending order, and a file has them in no order.
                self._tables.assign(self.name, *ordered(ids, rows.to(self.dtype)))
        # No worker pulls rows before all are assigned.
        self._tables.barrier()

    def _check_loaded(self, folder: str | Path, ids: torch.Tensor) -> None:
        if len(ids) and (ids.min() < 0 or (self.num_embeddings is not None and ids.max() >= self.num_embeddings)):
            most = "" if self.num_embeddings is None else f" and below {self.num_embeddings}"
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise ConfigError("tt.Embedding.load folder", str(folder), f"has row {wrong}, rows must be >= 0{most}")

    def extra_repr(self) -> str:
        # torch shows this in `print(model)`.
        return f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Embedding":
        raise RuntimeError(f"{self.name} is on the servers: a copy would be another table; make a new tt.Embedding")


class _Settings:
    """Settings of a table's own optimizer, such as a rate, kept as `tt.keep` does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._group = optimizer.param_groups[0]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._group.items() if name not in ("params", "param_names")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._group.update(state)


def clear_with(optimizer: Optimizer, tables: Sequence[Embedding]) -> None:
    """Make `optimizer.zero_grad()` also drop the gradients of rows."""
    # torch has no hook for zero_grad.
    clear: Callable[..., None] = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(set_to_none)
        for table in tables:
            table.forget()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def ordered(ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids in ascending order, and their rows."""
    order = torch.argsort(ids)
    return ids[order], rows[order]
