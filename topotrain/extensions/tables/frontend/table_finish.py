"""The tables at the end of a job: the last pushes, and the rows for worker (0,0)."""

from dataclasses import asdict
from pathlib import Path

import torch

from topotrain.core.events import Tabled
from topotrain.extensions.tables.frontend.sparse_embedding import RowPaths
from topotrain.extensions.tables.frontend.table_export import write_parts
from topotrain.extensions.tables.frontend.table_registry import JobTables
from topotrain.training.context import Context


def stop_pushing(here: Context) -> None:
    """Announce that this worker pushes nothing more."""
    # Before the worker finishes: the servers report workers that would wait for its pushes in vain.
    if isinstance(here.tables, JobTables):
        here.tables.client.close()


def export_tables(here: Context, rows: RowPaths | None) -> dict[str, torch.Tensor]:
    """Write the tables to files on worker (0,0), after all workers.

    Returns the complete weights with sparse gradients, by name.
    """
    tables = here.tables
    if not isinstance(tables, JobTables):
        return {}
    # No worker pushes after this barrier, so the rows are final.
    tables.client.barrier(last=True)
    if not here.is_main:
        return {}
    for spec in tables.specs:
        for held in tables.stats(spec.name):
            here.emit(Tabled(held["server"], spec.name, held["rows"], held["bytes"]))
    if rows is None:
        return {}
    rows.fetch()
    for spec in rows.specs:
        # In batches: a table may be larger than the memory of a worker.
        write_parts(_folder(here, spec.name), tables.touched(spec.name), _described(asdict(spec)))
    return rows.weights


def _folder(here: Context, name: str) -> Path:
    return here.workspace / "tables" / name


def _described(spec: dict[str, object]) -> dict[str, object]:
    kept = {name: spec[name] for name in ("name", "rows", "width", "dtype", "init", "seed")}
    return {**kept, "rows": None if spec["rows"] == -1 else spec["rows"]}
