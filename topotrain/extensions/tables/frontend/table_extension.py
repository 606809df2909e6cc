"""Tables and sparse weights, as a part of `tt.prepare` and of the end of a job."""

from collections.abc import Sequence

import torch
from torch import nn

from topotrain.extensions.tables.frontend.sparse_embedding import RowPaths, SparseWeight, find_sparse
from topotrain.extensions.tables.frontend.table_finish import export_tables, stop_pushing
from topotrain.training.context import Context, PrepareExtension, PrepareRequest
from topotrain.training.worker import Worker


class TableExtension(PrepareExtension):
    """The rows of tables and sparse weights travel with the steps of a worker."""

    def __init__(self) -> None:
        self._sparse: list[SparseWeight] = []
        self._rows: RowPaths | None = None

    def set_aside(self, here: Context, request: PrepareRequest) -> Sequence[nn.Parameter]:
        self._sparse = find_sparse(request.model, request.optimizer)
        return [entry.weight for entry in self._sparse]

    def connected(self, here: Context, request: PrepareRequest) -> None:
        self._rows = RowPaths(here, request.model, self._sparse, request.optimizer)

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
