"""Seconds of a core that the product's operations on tensors take.

A rehearsal has tensors of the right sizes in which every value is zero. So large operations in place are counted and
left out: zero plus zero is zero. Memory that is never written takes no room.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from topotrain.tools.probe.probe_file import Probe

_SMALL = 8192
"""Elements up to which an operation in place is done: counters of an optimizer, flags, and trials of kernels."""
_FUSED = "_fused_"
_COPIES = frozenset({"copy_", "clone", "_to_copy", "_foreach_copy_"})
_MADE = frozenset({"zeros", "empty", "empty_strided", "zeros_like", "empty_like", "new_empty", "new_zeros"})
"""Memory that is asked for, and written later if at all."""


class WorkMeter:
    """Seconds that a thread of a simulated process has worked, and not spent yet.

    coded: messages are encoded. Otherwise the calls of the few operations for a message are in the probe's time of a
    message. optimizes: its optimizer counts. That of a script is in the probe's time of a step.
    """

    def __init__(self, probe: Probe, coded: bool, optimizes: bool = True) -> None:
        self._kernels, self._optimizer = probe.kernels, probe.optimizer
        self._call_s = probe.kernels.operation_s if coded else 0.0
        self._optimizes, self._counting = optimizes, False
        self.pending = 0.0

    def add(self, seconds: float) -> None:
        self.pending += seconds

    def take(self) -> float:
        taken, self.pending = self.pending, 0.0
        return taken

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, operations on tensors count as work."""
        before, self._counting = self._counting, True
        try:
            yield
        finally:
            self._counting = before

    def note(self, name: str, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()) -> None:
        """Count an operation such as "add_", if operations count now.

        tensors: that are given. made: the results that are none of them.
        """
        if not self._counting or name in _MADE:
            return
        if name in _COPIES:
            # A copy reads as much as it writes, and the probe has seconds for each byte that is copied.
            written = made or tensors[: max(1, len(tensors) // 2)]
            self.pending += self._call_s + self._kernels.copy_byte_s * sum(each.nbytes for each in written)
        else:
            self.pending += self._call_s + self._kernels.byte_s * sum(each.nbytes for each in (*tensors, *made))

    def note_optimizer(self, values: Sequence[torch.Tensor]) -> None:
        """Count a call of the optimizer's kernel for values, if operations count now."""
        if self._counting and self._optimizes:
            self.pending += self._optimizer.fixed_s + self._optimizer.element_s * sum(each.numel() for each in values)


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of the thread that has entered this context.

    Large ones in place are not done.
    """

    def __init__(self, meter: WorkMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do, or leave out, one operation."""
        name = func.overloadpacket.__name__
        if name.startswith(_FUSED) and sum(each.numel() for each in args[0]) > _SMALL:
            self._meter.note_optimizer(args[0])
            return None
        given = list(_tensors((*args, *(kwargs or {}).values())))
        if _in_place(name) and given and given[0].numel() > _SMALL and given[0].is_floating_point():
            self._meter.note(name, given)
            # A list of tensors in place has no result.
            return args[0] if isinstance(args[0], torch.Tensor) else None
        result = func(*args, **(kwargs or {}))
        if name.startswith(_FUSED):
            self._meter.note_optimizer(args[0])
            return result
        # A view reads nothing.
        if not func.is_view:
            known = set(map(id, given))
            self._meter.note(name, given, [each for each in _tensors((result,)) if id(each) not in known])
        return result


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))
