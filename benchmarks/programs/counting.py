"""Counts the bytes that torch's operations read and write, in the processes of a job.

Where a forkserver has imported this module the servers of its jobs are counted: all that they do while they handle
messages, step by step. The counts go to a file in the folder of the variable FOLDER, one file per process, with the
counts of every step that is over. Without the variable the module changes nothing.

Rule: an operation reads each of its inputs once and writes each of its outputs once, whatever caches hold. Views cost
nothing.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER = "BENCH_PASSES"

Counts = dict[str, list[int]]
"""Operation -> [calls, bytes read, bytes written]."""

_OVERWRITES = ("copy_", "zero_", "fill_")
"""Operations in place that do not read what they write."""


class CountingMode(TorchDispatchMode):
    """Counts the operations of this thread while it is entered."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = traffic(func, args, kwargs, result)
        if read or written:
            one = self.counts.setdefault(str(func.overloadpacket).removeprefix("aten."), [0, 0, 0])
            one[0], one[1], one[2] = one[0] + 1, one[1] + read, one[2] + written
        return result


def traffic(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[int, int]:
    """The bytes that a call of an operation has read and written."""
    schema = func._schema
    if any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns):
        return 0, 0  # a view
    name = schema.name.removeprefix("aten::")
    reads: dict[tuple[int, int], int] = {}  # each memory once, as in dot(x, x)
    writes: dict[tuple[int, int], int] = {}
    values = {arg.name: value for arg, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    for arg in schema.arguments:
        tensors = _tensors(values.get(arg.name))
        changed = arg.alias_info is not None and arg.alias_info.is_write
        # The fused kernels of optimizers write a gradient only where they scale it.
        changed = changed and not (arg.name == "grads" and values.get("grad_scale") is None)
        if changed:
            writes.update(_memory(tensors))
        if not changed or not (arg.is_out or name in _OVERWRITES):
            reads.update(_memory(tensors))
    if not writes and not name.startswith("empty"):
        writes.update(_memory(_tensors(result)))
    return sum(reads.values()), sum(writes.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for one in value if isinstance(one, torch.Tensor)] if isinstance(value, list | tuple) else []


def _memory(tensors: Iterable[torch.Tensor]) -> dict[tuple[int, int], int]:
    return {(one.data_ptr(), one.nbytes): one.nbytes for one in tensors}


class ServerCounts:
    """The counts of a process's servers, by step and backward: "3/0" is the first backward of step 3."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps, self._depth = folder, dict[str, Counts](), 0

    def around(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted. Messages without a step are those of the start, and are not."""

        def counted(server: Any, sender: Any, message: Any) -> Any:
            step = getattr(message, "step", None)
            if step is None or self._depth:
                return handle(server, sender, message)
            key = f"{step}/{getattr(message, 'ordinal', 0)}"
            if key not in self._steps:
                self._write()
                self._steps[key] = {}
            self._depth += 1
            try:
                with CountingMode(self._steps[key]):
                    return handle(server, sender, message)
            finally:
                self._depth -= 1

        return counted

    def _write(self) -> None:
        # Written aside and renamed, so that a reader finds a whole file.
        own = self._folder / f"{os.getpid()}.part"
        own.write_text(json.dumps(self._steps))
        own.replace(own.with_suffix(".json"))


def install(folder: str) -> None:
    """Count in this process from now on."""
    from topotrain.core.server.server import Server

    counts = ServerCounts(Path(folder))
    Server.handle = counts.around(Server.handle)  # type: ignore[method-assign]


if folder := os.environ.get(FOLDER):
    install(folder)
