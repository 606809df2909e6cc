"""Check keys and values of a key-value store, and map values to table rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from topotrain.config.job import ConfigError
from topotrain.extensions.tables.frontend.value_layout import ValueLayout
from topotrain.extensions.tables.table_spec import TableSpec

Key = int | str
HALVES = ("float16", "bfloat16")
"""The dtypes of keys that servers keep as float32, as the optimizers of MXNet do with `multi_precision`."""


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """One key: the table's specification, and the value's dtype and layout in rows."""

    spec: TableSpec
    layout: ValueLayout
    dtype: torch.dtype

    @property
    def table(self) -> str:
        return self.spec.name


def is_list(key: Any) -> bool:
    return isinstance(key, list | tuple)


def as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def pairs(key: Any, value: Any, lists: bool = False) -> list[tuple[Key, Any]]:
    """Return keys with their values. With `lists`, one key may have several values."""
    if not is_list(key):
        if isinstance(value, list | tuple) and not lists:
            if len(value) != 1:
                raise ConfigError(f"kv key {key!r}", f"{len(value)} values", "one key has one value")
            value = value[0]
        _check_key(key)
        return [(key, value)]
    if value is None:
        value = [None] * len(key)
    if not isinstance(value, list | tuple) or len(value) != len(key):
        count = len(value) if isinstance(value, list | tuple) else 1
        raise ConfigError("kv keys", f"{len(key)} keys, {count} values", "must be as many values as keys")
    for each in key:
        _check_key(each)
    return list(zip(key, value, strict=True))


def _check_key(key: Any) -> None:
    # To isinstance a bool is an int, too.
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigError("kv key", key, "must be a text or a whole number, or a list of them")


def tensor_of(key: Key, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a value as a CPU tensor without history."""
    # A number has the dtype of its key. At `init` there is no key yet.
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=dtype or torch.float32)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"kv key {key!r}", type(value).__name__, "must be a tensor, a numpy array or a number")
    if value.device.type != "cpu":
        raise ConfigError(f"kv key {key!r}", str(value.device), "must be on the CPU")
    if value.layout not in (torch.strided, torch.sparse_coo):
        raise ConfigError(f"kv key {key!r}", str(value.layout), "must be dense or sparse COO")
    detached: torch.Tensor = value.detach()
    return detached


def rows_of(kept: KeyLayout, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row numbers and rows of a value. A sparse value has only some of them."""
    value = value.to(kept.spec.torch_dtype)
    if value.layout is torch.strided or value.dim() < 2:
        return torch.arange(kept.layout.rows), kept.layout.split(value.to_dense())
    # Before it, an index may occur several times, and `index_put_` would keep one of its values.
    value = value.coalesce()
    first, *others = value.indices()
    slices, places = torch.unique(first, return_inverse=True)
    rows = torch.zeros(len(slices), *value.shape[1:], dtype=value.dtype)
    rows.index_put_((places, *others), value.values())
    return kept.layout.expand(slices), kept.layout.split(rows)


def rows_of_each(key: Key, ids: Any, count: int) -> list[Any]:
    """Return the row numbers for each of several outs of one key."""
    # A list of numbers, or one tensor, is for all of them.
    if not is_list(ids) or not any(isinstance(each, torch.Tensor | list | tuple) for each in ids):
        return [ids] * count
    if len(ids) not in (1, count):
        accepted = f"must be {count}, as many as outs, or one"
        raise ConfigError(f"kv.row_sparse_pull {key!r}", f"{len(ids)} row_ids", accepted)
    return list(ids) * (count if len(ids) == 1 else 1)


def summed(values: list[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = values[0]
    # Always in the same order, for the same bits.
    for value in values[1:]:
        # Not in place: the first value is the caller's.
        total = total + value
    return total
