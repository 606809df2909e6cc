"""MXNet's key-value store as `tt.kvstore`: explicit pushes and pulls by key.

    kv = tt.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(3, 4))
    kv.set_optimizer(tt.kvstore.SGD(lr=0.1))
    kv.push("w", gradient)
    kv.pull("w", out=w)

The interface is that of Chen et al., 2015, and Li et al., 2014. A key is a table of the job's servers
(`extensions.tables`), and its rows are rows of the value. Nothing of it stays in this process. One script may have
several stores, of one kind or of several. In an ordinary process there is one worker.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from topotrain.compat.mxnet.values import (
    HALVES,
    Key,
    KeyLayout,
    as_list,
    is_list,
    pairs,
    rows_of,
    rows_of_each,
    summed,
    tensor_of,
)
from topotrain.config.job import ConfigError
from topotrain.extensions.tables.frontend.optimizer_factories import SGD, Adagrad, Adam, SparseAdam
from topotrain.extensions.tables.frontend.table_registry import LocalTables, TableBackend, TableOptimizer, tables_of
from topotrain.extensions.tables.frontend.value_layout import ValueLayout
from topotrain.extensions.tables.row_optimizers import check_optimizer, optimizer_text
from topotrain.extensions.tables.table_spec import DTYPES, TableSpec
from topotrain.training import context as process

__all__ = ["SGD", "Adagrad", "Adam", "KVStore", "SparseAdam", "create"]

KINDS = {"local": "sync", "dist_sync": "sync", "dist_async": "async"}
_SAME = {
    **dict.fromkeys(("device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"), "local"),
    **dict.fromkeys(("dist", "dist_device_sync", "dist_sync_device"), "dist_sync"),
    **dict.fromkeys(("dist_device_async", "dist_async_device"), "dist_async"),
}
_REFUSED = {
    "set_gradient_compression": "cluster.compression is the job's, and keys are sent as they are",
    "save_optimizer_states": "the optimizer's state is on the servers. Save the values that kv.pull gives",
    "load_optimizer_states": "the optimizer's state is on the servers, and begins with kv.set_optimizer",
}
"""Methods of MXNet's store that this one does not have, and why."""


def create(name: str = "local") -> "KVStore":
    """Make a store. All workers of a job make the same stores in the same order.

    Args:
        name: "dist_sync": a push counts when every worker has pushed the key, and the sum of all is one update.
            "dist_async": every push is an update of its own. "local": this process's alone.

    MXNet's names for stores with devices are accepted, too: "dist_device_sync" is a "dist_sync".

    Raises:
        ConfigError: another name.
    """
    given = name.lower() if isinstance(name, str) else ""
    kind = _SAME.get(given, given)
    if kind not in KINDS:
        raise ConfigError("tt.kvstore.create", name, f"must be one of {', '.join(KINDS)}")
    return KVStore(given, kind, LocalTables() if kind == "local" else tables_of(process.current()))


class KVStore:
    """A key-value store; made by `create`."""

    def __init__(self, name: str, kind: str, backend: TableBackend) -> None:
        self._name, self._kind = name, kind
        self._backend = backend
        # Part of the tables' names: several stores may use the same keys.
        self._number = backend.next_number()
        self._keys: dict[Key, KeyLayout] = {}
        self._optimizer: Optimizer | None = None
        self._factor = 1.0
        self._rule = TableOptimizer(self._rule_now)
        self._updater: Callable[[Key, torch.Tensor, torch.Tensor], object] | None = None

    def __getattr__(self, name: str) -> Any:
        # Of names that are no attributes.
        why = _REFUSED.get(name)
        raise AttributeError(f"tt.kvstore has no {name}" + (f": {why}" if why else ""))

    @property
    def type(self) -> str:
        """The name that the store was made with."""
        return self._name

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do this: only "optimizer" is known. Raises ValueError."""
        if capability.lower() != "optimizer":
            raise ValueError(f"unknown capability: {capability}")
        return True

    @property
    def rank(self) -> int:
        """This worker's number, 0 to num_workers - 1."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """How many workers push to the store."""
        return self._backend.workers

    def barrier(self) -> None:
        """Return when every worker has called this as often as this one."""
        self._backend.barrier()

    _barrier = barrier

    # --- values --------------------------------------------------------------------------------------------------

    def init(self, key: Key | Sequence[Key], value: Any) -> None:
        """Declare keys with their first values.

        All workers call this, and the values of worker 0 count.

        Args:
            key: a text or a number, or a list of them.
            value: a CPU tensor or numpy array of any shape, or a number; for a list of keys a list. A sparse COO
                tensor makes a table with zeros in all other rows, which take no memory until they are pushed or pulled.
                The servers keep float16 and bfloat16 as float32.

        Raises:
            ConfigError: the key exists with another shape or dtype, or in a local store, or the value is none of the
                above.
        """
        for each, one in pairs(key, value):
            self._init(each, tensor_of(each, one))
        # No worker pulls a key before worker 0 has assigned it.
        self._backend.barrier()

    def _init(self, key: Key, value: torch.Tensor) -> None:
        known = self._keys.get(key)
        if known is not None:
            if (known.layout.shape, known.dtype) != (tuple(value.shape), value.dtype):
                given = f"{tuple(value.shape)} of {value.dtype}"
                has = f"{known.layout.shape} of {known.dtype}"
                raise ConfigError(f"kv.init {key!r}", given, f"is there already with shape {has}")
            # As in MXNet: between workers the first value stays.
            if self._kind == "local":
                raise ConfigError(f"kv.init {key!r}", tuple(value.shape), "is there already: kv.push changes its value")
            return
        dtype = str(value.dtype).removeprefix("torch.")
        kept = "float32" if dtype in HALVES else dtype
        if kept not in DTYPES:
            raise ConfigError(f"kv.init {key!r}", dtype, f"must be one of {', '.join((*DTYPES, *HALVES))}")
        layout = ValueLayout.of(tuple(value.shape))
        if not layout.rows:
            raise ConfigError(f"kv.init {key!r}", tuple(value.shape), "must have a row")
        # A sparse value may have millions of rows, and only those in use take memory.
        dense = value.layout is torch.strided or value.dim() < 2
        made = KeyLayout(
            TableSpec(
                f"kv{self._number}/{key!r}",
                layout.rows,
                layout.width,
                kept,
                KINDS[self._kind],
                self._rule_now(),
                "given" if dense else "zeros",
                dense=dense,
                # Small keys begin on different servers, instead of all on the first.
                first=len(self._keys),
            ),
            layout,
            value.dtype,
        )
        self._backend.open(made.spec)
        self._keys[key] = made
        if self._backend.rank == 0:
            self._put(made, value)

    def _put(self, entry: KeyLayout, value: torch.Tensor) -> None:
        self._backend.assign(entry.table, *rows_of(entry, value))

    def push(self, key: Key | Sequence[Key], value: Any, priority: int = 0) -> None:
        """Send a value to the servers; several values of one key (a list) are summed.

        Without an optimizer the sum replaces the value ("dist_async": is added to it). With one it is the gradient. A
        sparse COO tensor sends, and changes, its rows alone, except in a key that was dense at `init` and has an
        optimizer. Returns at once, and the value may be changed afterwards.

        Raises:
            ConfigError: an unknown key, or another shape or dtype than the key's.
        """
        for each, values in pairs(key, value, lists=True):
            entry = self._known(each)
            if isinstance(values, list | tuple) and not values:
                raise ConfigError(f"kv.push {each!r}", values, "must have a value")
            total = summed([self._checked(each, entry, one).to(entry.spec.torch_dtype) for one in as_list(values)])
            if self._updater is not None:
                self._update(self._updater, each, entry, total)
                continue
            # Before the push for which the settings count: messages of a worker are handled in order.
            self._send_optimizer()
            # An optimizer of whole keys moves all rows, also those with a zero gradient.
            ids, rows = rows_of(entry, total.to_dense() if entry.spec.dense and self._rule.text else total)
            factor = self._factor * getattr(self._optimizer, "rescale_grad", 1.0)
            self._backend.push(entry.table, ids, rows * factor if factor != 1.0 else rows)

    def _update(self, updater: Any, key: Key, entry: KeyLayout, received: torch.Tensor) -> None:
        stored = self.pull(key)
        updater(key, received.to(entry.dtype), stored)
        self._put(entry, stored)

    def pull(self, key: Key | Sequence[Key], out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Write the value of a key into `out` (a tensor, or several), and return it.

        Without `out` it returns a new tensor. With "dist_sync" it is the value after this worker's last push, so it
        waits for the pushes of the others.

        Raises:
            ConfigError: an unknown key, or an `out` of another shape or dtype.
        """
        wanted = [(each, self._known(each), targets) for each, targets in pairs(key, out, lists=True)]
        # All keys at once: one round trip instead of one for each key.
        pulled = self._backend.pull_all([(entry.table, torch.arange(entry.layout.rows)) for _, entry, _ in wanted])
        found = []
        for (each, entry, targets), rows in zip(wanted, pulled, strict=True):
            value = entry.layout.join(rows).reshape(entry.layout.shape).to(entry.dtype)
            found.append(self._written(each, entry, value, targets))
        return found if is_list(key) else found[0]

    def pushpull(self, key: Key | Sequence[Key], value: Any, out: Any = None, priority: int = 0) -> Any:
        """`push`, then `pull`; without `out`, into `value`."""
        self.push(key, value, priority)
        return self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Key | Sequence[Key], value: Any, out: Any = None, priority: int = 0) -> Any:
        """`init`, then `pull`: all workers get worker 0's value."""
        self.init(key, value)
        return self.pull(key, out, priority)

    def row_sparse_pull(self, key: Key | Sequence[Key], out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Pull rows of a key, by number: only these travel.

        Args:
            key: of at least two dimensions; its rows are counted along the first.
            out: None: a sparse COO tensor of the key's shape is returned. Or a dense tensor of that shape, in which the
                rows `row_ids` are written and the others stay. Or a sparse COO tensor that takes the result. Or a list
                of these.
            row_ids: whole numbers, of any shape, in any order. A number may occur several times. For a list `out` a
                list of as many tensors, or the rows of all.

        Raises:
            ConfigError: an unknown key, a key without rows, or a row number out of range.
        """
        found: list[Any] = []
        for (each, targets), (_, ids) in zip(pairs(key, out, lists=True), pairs(key, row_ids, lists=True), strict=True):
            entry = self._known(each)
            if is_list(targets):
                wanted = rows_of_each(each, ids, len(targets))
                found.append([self._pull_rows(each, entry, *one) for one in zip(targets, wanted, strict=True)])
            else:
                found.append(self._pull_rows(each, entry, targets, ids))
        return found if is_list(key) else found[0]

    def _pull_rows(self, key: Key, entry: KeyLayout, target: Any, ids: Any) -> torch.Tensor:
        if not isinstance(target, torch.Tensor | None):
            raise ConfigError(f"kv.row_sparse_pull {key!r}", type(target).__name__, "out must be a tensor or None")
        numbers = self._row_numbers(key, entry, ids)
        if target is not None:
            self._checked(key, entry, target)
        rows = entry.layout.join(self._backend.pull(entry.table, entry.layout.expand(numbers)))
        rows = rows.reshape(len(numbers), *entry.layout.shape[1:]).to(entry.dtype)
        if target is not None and target.layout is torch.strided:
            # The rows that were not asked for stay as they are in a dense target.
            with torch.no_grad():
                target[numbers] = rows
            return target
        # The numbers are unique and sorted, so torch need not coalesce or check them.
        made = torch.sparse_coo_tensor(
            numbers[None], rows, entry.layout.shape, is_coalesced=True, check_invariants=False
        )
        if target is None:
            return made
        # A target with elements in it keeps its number of sparse dimensions in a copy.
        return target.sparse_resize_and_clear_(made.shape, made.sparse_dim(), made.dense_dim()).copy_(made)

    def _row_numbers(self, key: Key, entry: KeyLayout, ids: Any) -> torch.Tensor:
        if len(entry.layout.shape) < 2:
            raise ConfigError(f"kv.row_sparse_pull {key!r}", entry.layout.shape, "must have at least two dimensions")
        if ids is None:
            raise ConfigError(f"kv.row_sparse_pull {key!r}", None, "row_ids must be whole numbers")
        try:
            given = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"kv.row_sparse_pull {key!r}", ids, "row_ids must be whole numbers") from None
        # MXNet's arrays are float32, also of row numbers. An empty list becomes float32, too.
        if given.is_floating_point() and torch.equal(given, given.long().to(given.dtype)):
            given = given.long()
        if given.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            raise ConfigError(f"kv.row_sparse_pull {key!r}", str(given.dtype), "row_ids must be whole numbers")
        numbers: torch.Tensor = torch.unique(given.long())
        wrong = numbers[(numbers < 0) | (numbers >= entry.layout.shape[0])]
        if len(wrong):
            raise ConfigError(
                f"kv.row_sparse_pull {key!r}", int(wrong[0]), f"must be a row, 0 to {entry.layout.shape[0] - 1}"
            )
        return numbers

    # --- the optimizer -------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer, rescale_grad: float = 1.0) -> None:
        """Make a push a gradient from here on, which the servers apply.

        All workers call this.

        Args:
            optimizer: `tt.kvstore.SGD(lr=0.1)` and its siblings, or any element-wise `torch.optim` object. Its class
                and the numbers of its first group count, and are read again at every push.
            rescale_grad: factor of every push, such as 1 / (batch size x workers). One that
                `tt.kvstore.SGD(lr=0.1, rescale_grad=0.5)` was given counts, too.

        Raises:
            ConfigError: an optimizer that the servers cannot run.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "kv.set_optimizer", type(optimizer).__name__, "must be tt.kvstore.SGD(lr=0.1), or a torch.optim object"
            )
        if not isinstance(rescale_grad, int | float) or not math.isfinite(rescale_grad):
            raise ConfigError(
                "kv.set_optimizer rescale_grad", rescale_grad, "must be a number, such as 1 / kv.num_workers"
            )
        text = optimizer_text(optimizer)
        for entry in self._keys.values():
            # Refused here, at the line of the script, and not by a server.
            check_optimizer(entry.spec, text, self._backend.import_module)
        self._optimizer, self._factor, self._updater = optimizer, float(rescale_grad), None
        self._send_optimizer()

    def set_updater(self, updater: Callable[[Key, torch.Tensor, torch.Tensor], object]) -> None:
        """Let `updater(key, received, stored)` change `stored` at a push to a local store.

        Raises:
            ConfigError: another kind of store: servers run no function of a script.
        """
        if self._kind != "local":
            raise ConfigError("kv.set_updater", self._name, "must be a local store; kv.set_optimizer is for servers")
        self._updater = updater

    _set_updater = set_updater

    def _rule_now(self) -> str:
        return "" if self._optimizer is None else optimizer_text(self._optimizer)

    def _send_optimizer(self) -> None:
        # For a sync push the servers take those of worker 0. Other workers may be some pushes ahead of it.
        sends = self._backend.rank == 0 or self._kind == "dist_async"
        self._rule.send_changes(self._backend, (entry.table for entry in self._keys.values() if sends))

    # --- checks --------------------------------------------------------------------------------------------------

    def _known(self, key: Key) -> KeyLayout:
        entry = self._keys.get(key) if isinstance(key, int | str) else None
        if entry is None:
            known = ", ".join(map(repr, list(self._keys)[:20])) or "none yet"
            raise ConfigError("kv key", key, f"was never given to kv.init; the store's keys: {known}")
        return entry

    def _checked(self, key: Key, entry: KeyLayout, value: Any) -> torch.Tensor:
        tensor = tensor_of(key, value, entry.dtype)
        if tuple(tensor.shape) != entry.layout.shape:
            raise ConfigError(f"kv key {key!r}", tuple(tensor.shape), f"must have the shape {entry.layout.shape}")
        if tensor.dtype != entry.dtype:
            raise ConfigError(f"kv key {key!r}", str(tensor.dtype), f"must be {entry.dtype}")
        return tensor

    def _written(self, key: Key, entry: KeyLayout, value: torch.Tensor, targets: Any) -> Any:
        if targets is None:
            return value
        for target in as_list(targets):
            if not isinstance(target, torch.Tensor):
                raise ConfigError(f"kv key {key!r}", type(target).__name__, "out must be a tensor, or several")
            self._checked(key, entry, target)
            with torch.no_grad():
                target.copy_(value)
        return targets
