"""What an operation costs, counted while it runs on fake tensors: floating point operations, and bytes touched.

Matrix products, convolutions and attention by torch's own formulas; anything else counts one operation per element
of its result. A view costs nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def storage(tensor: torch.Tensor) -> int:
    """A number that tensors over the same memory share, for as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors anywhere in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is done inside: `flops`, and `touched` (bytes read and written, without views)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation below, then count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, made = list(tensors((args, kwargs))), list(tensors(out))
        known = set(map(storage, read))
        if not func._schema.is_mutable and all(storage(tensor) in known for tensor in made):
            return out
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        else:
            self.flops += max((tensor.numel() for tensor in made), default=0)
        self.touched += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
        return out
