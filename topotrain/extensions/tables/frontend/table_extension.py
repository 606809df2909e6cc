"""Tables and sparse weights, as a part of `tt.prepare` and of the end of a job."""

from collections.abc import Sequence

import torch
from torch import nn

from topotrain.extensions.tables.frontend.sparse_embedding import RowPaths, SparseWeight, find_sparse, has_rows
from topotrain.extensions.tables.frontend.table_finish import export_tables, stop_pushing
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.worker import Worker


class TableExtension(PrepareExtension):
    """The rows of tables and sparse weights travel with the steps of a worker."""

    def __init__(self) -> None:
        self._sparse: list[SparseWeight] = []
        self._rows: RowPaths | None = None

    def set_aside(self, here: Context, request: PrepareRequest) -> Sequence[nn.Parameter]:
        rows = [module for module in request.model.modules() if has_rows(module)]
        if rows or len(request.optimizers) == 1:
            name = type(rows[0]).__name__ if rows else ""
            optimizer = request.only_optimizer(f"rows of a {name} are in the steps of the only optimizer")
            self._sparse = find_sparse(request.model, optimizer)
        return [entry.weight for entry in self._sparse]

    def connected(self, here: Context, request: PrepareRequest) -> None:
        # Of several optimizers none has rows.
        self._rows = RowPaths(here, request.model, self._sparse, request.optimizers[0])

    def attach(self, here: Context, worker: Worker) -> None:
        if self._rows is not None:
            self._rows.attach(worker)

    def stop_pushing(self, here: Context) -> None:
        stop_pushing(here)

    def export(self, here: Context) -> dict[str, torch.Tensor]:
        return export_tables(here, self._rows)

    def close(self, here: Context) -> None:
        if self._rows is not None:
            self._rows.release()
