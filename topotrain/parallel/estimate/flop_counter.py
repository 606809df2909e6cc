"""Counter of floating point operations and bytes touched on fake tensors.

Matrix products, convolutions and attention are counted by torch's own formulas. Any other operation counts one per
element of its result. A view costs nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def storage(tensor: torch.Tensor) -> int:
    """Return a number that all tensors over the same memory share while it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside the block.

    Attributes:
        flops: floating point operations.
        touched: bytes read and written, without views.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, made = list(tensors((args, kwargs))), list(tensors(out))
        known = set(map(storage, read))
        # A view: all results lie in memory of the arguments, and nothing was written.
        if not func._schema.is_mutable and all(storage(tensor) in known for tensor in made):
            return out
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        else:
            self.flops += max((tensor.numel() for tensor in made), default=0)
        self.touched += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
        return out
