"""`nn.Embedding(sparse=True)` in a prepared model: only touched rows are sent.

The weight stays in the model at full size, and the servers hold the table. In a job only rows that the last forward has
read are up to date. Code that reads the weight elsewhere must call `state_dict()`, which pulls all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from topotrain.config.job import ConfigError
from topotrain.core.client.client import StepEnd
from topotrain.core.model.schema import plain_name
from topotrain.extensions.tables.frontend.embedding import Embedding, clear_with
from topotrain.extensions.tables.frontend.table_registry import JobTables, TableOptimizer, tables_of
from topotrain.extensions.tables.row_optimizers import check_optimizer, optimizer_text
from topotrain.extensions.tables.table_spec import TableSpec
from topotrain.training.context import Context
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

_CHUNK_BYTES = 16 << 20


@dataclass(slots=True)
class SparseWeight:
    """A weight with sparse gradients: its names in the model, its optimizer group."""

    weight: nn.Parameter
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    group: int = 0

    @property
    def table(self) -> str:
        return self.names[0]

    def spec(self, optimizer: Optimizer) -> TableSpec:
        rows, width = self.weight.shape
        kind = str(self.weight.dtype).removeprefix("torch.")
        spec = TableSpec(
            self.table, rows, width, kind, "step", optimizer_text(optimizer, self.group), "given", dense=False
        )
        check_optimizer(spec, spec.optimizer)
        return spec


def has_rows(module: nn.Module) -> bool:
    """Return whether the servers keep a table of rows for this module."""
    sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    return sparse or isinstance(module, Embedding)


def find_sparse(model: nn.Module, optimizer: Optimizer) -> list[SparseWeight]:
    """Return the trained weights of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag`.

    Raises ConfigError if another kind of module uses such a weight, too, or its own module changes it (max_norm).
    """
    found: dict[int, SparseWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            if module.max_norm is not None:
                raise ConfigError(f"{name}.max_norm", module.max_norm, "must be None: forward would change the table")
            weight = cast(nn.Parameter, module.weight)
            # Several modules may share one weight, which is one table.
            entry = found.setdefault(id(weight), SparseWeight(weight))
            entry.names.append(plain_name(f"{name}.weight".lstrip(".")))
            entry.modules.append(module)
    for name, module in model.named_modules():
        # With duplicates: a tied weight would be reported for its first module only.
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            entry_of = found.get(id(parameter))
            if entry_of is not None and module not in entry_of.modules:
                raise ConfigError(
                    f"{name}.{own}",
                    entry_of.names[0],
                    "must not be the weight of an Embedding(sparse=True), which is pulled by rows: use sparse=False",
                )
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for key, entry in found.items():
        if key not in groups:
            raise ConfigError("optimizer", entry.table, "must be in a parameter group, or have requires_grad=False")
    return [replace(entry, group=groups[key]) for key, entry in found.items()]


class RowPaths(WorkerExtension):
    """The rows of one worker's sparse weights and `tt.Embedding`s.

    Raises ConfigError if the layout does not support tables, or a table is not part of the model.
    """

    def __init__(self, here: Context, model: nn.Module, weights: Sequence[SparseWeight], optimizer: Optimizer) -> None:
        self._weights = weights
        self._tables = [module for module in model.modules() if isinstance(module, Embedding)]
        self._rules: dict[str, TableOptimizer] = {}
        self.specs = [table.spec for table in self._tables]
        self.weights: dict[str, torch.Tensor] = {entry.table: entry.weight for entry in weights}
        self._hooks: list[RemovableHandle] = []
        if isinstance(here.tables, JobTables):
            _check_in_model(here.tables, self._tables)
        if not weights and not self._tables:
            return
        # Rows are pulled and pushed in every step, and must not be at another step than the parameters.
        for name in ("n_push", "n_fetch"):
            if getattr(here.place.job.cluster, name) > 1:
                raise ConfigError(
                    f"cluster.{name}", getattr(here.place.job.cluster, name), "must be 1 with tables or sparse weights"
                )
        self._backend = backend = tables_of(here)
        for entry in weights:
            spec = entry.spec(optimizer)
            self._rules[entry.table] = TableOptimizer(partial(optimizer_text, optimizer, entry.group, type(optimizer)))
            backend.open(spec)
            optimizer.state.pop(entry.weight, None)  # the servers keep the state by rows
            if backend.rank == 0:
                # In chunks: a copy of the whole weight may not fit into memory.
                for lo, hi in _chunks(entry.weight):
                    backend.assign(entry.table, torch.arange(lo, hi), entry.weight.detach()[lo:hi].cpu())
            for module in entry.modules:
                self._watch(module, entry)
        if weights:
            backend.barrier()
            fetch = model.register_state_dict_pre_hook(lambda *_: self.fetch())  # type: ignore[no-untyped-call]
            self._hooks.append(fetch)

    def _watch(self, module: nn.Module, entry: SparseWeight) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else kwargs["input"]
            unique = torch.unique(ids.detach().cpu().long())
            known = unique[(unique >= 0) & (unique < len(entry.weight))]  # torch itself reports other ids
            if len(known):
                # The forward reads the weight in place, so its rows are pulled just before.
                rows = self._backend.pull(entry.table, known)
                # `.data`: autograd must neither record this nor see another version of the weight.
                entry.weight.data.index_copy_(0, known.to(entry.weight.device), rows.to(entry.weight.device))

        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def release(self) -> None:
        """Detach from the model. Its weights become ordinary ones."""
        for hook in self._hooks:
            hook.remove()

    def attach(self, worker: Worker) -> None:
        if self._weights or self._tables:
            worker.attach(self)
            clear_with(worker.optimizers[0], self._tables)

    def before_commit(self, step: int, end: StepEnd) -> None:
        # The scaler unscales, and checks for overflow, only the gradients of parameters.
        if end.check_finite and self._tables:
            raise RuntimeError(f"a GradScaler does not see the rows of a tt.Embedding ({self._tables[0].name})")
        # Before the commit: the servers apply the step when all of its rows are there.
        for table in self._tables:
            table.push(step)
        for entry in self._weights:
            self._rules[entry.table].send_changes(self._backend, [entry.table])
            self._backend.push_step(entry.table, *_rows(entry), step)

    def fetch(self) -> None:
        """Pull all rows into the weights."""
        for entry in self._weights:
            for lo, hi in _chunks(entry.weight):
                entry.weight.data[lo:hi] = self._backend.pull(entry.table, torch.arange(lo, hi)).to(entry.weight.device)


def _check_in_model(opened: JobTables, tables: Sequence[Embedding]) -> None:
    named = {table.name for table in tables}
    for spec in opened.specs:
        if spec.mode == "step" and spec.name not in named:
            raise ConfigError("tt.prepare", spec.name, "must be part of the model, as every tt.Embedding")


def _rows(entry: SparseWeight) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = entry.weight.grad
    if gradient is None:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, entry.weight.shape[1], dtype=entry.weight.dtype)
    if not gradient.is_sparse:
        raise RuntimeError(
            f"parameter {entry.table} of an Embedding(sparse=True) has a dense gradient: other code uses it, too"
        )
    # Before it is coalesced, a gradient may name a row several times.
    gradient = gradient.coalesce().cpu()
    return gradient.indices()[0].clone(), gradient.values().clone()


def _chunks(weight: torch.Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // max(1, weight[0:1].nbytes))
    return ((lo, min(lo + step, len(weight))) for lo in range(0, len(weight), step))
