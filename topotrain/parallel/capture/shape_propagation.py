"""What a forward's values look like, found by computing on fake tensors: shapes without memory, for any batch size.

Everything is computed with three numbers of samples. What scales with them is the batch dimension; a number that grows
with them by the same step each time is linear in them; anything else is not known for other batches, and refused where
it would have to be.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from topotrain.parallel.program.split_program import SizeArgument, SymbolicShape

# Two numbers show a line, the third that it is one. None is 1, which would hide in broadcasts, and they have no divisor
# in common that the user's batches may have, so that what only holds for even numbers is not taken for a rule.
_COUNTS = ((2, 1), (3, 2), (4, 4))

Values = tuple[Any, ...]
"""One value for each number of samples."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer of the whole model: how large it is, where it lives ("meta" if it is nowhere here)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    graded: bool


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor's shape; `odd` says why it cannot be cut into the samples' shares ("": it can)."""

    shape: SymbolicShape
    odd: str = ""


def stored(model: nn.Module) -> dict[str, StoredTensor]:
    """All parameters and buffers, by each of their names."""
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: StoredTensor(tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in found}


@dataclass(frozen=True, slots=True)
class DropoutMasks:
    """What a node draws. masks: of each, in order, its tensor for each number of samples, and the chance of an element
    to stay; None if it draws anything else."""

    masks: tuple[tuple[Values, float], ...] | None = ()

    def __bool__(self) -> bool:
        return self.masks is None or bool(self.masks)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what draws random numbers inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[tuple[torch.Tensor, float]] = []
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            self.masks.append((args[0].detach(), float(args[1]) if len(args) > 1 else 0.5))
        else:
            self.others = self.others or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _drawn(seen: Sequence[_Draws]) -> DropoutMasks:
    """What a node has drawn with each number of samples."""
    if any(one.others for one in seen) or len({tuple(keep for _, keep in one.masks) for one in seen}) > 1:
        return DropoutMasks(None)
    rows = zip(*(one.masks for one in seen), strict=True)
    return DropoutMasks(tuple((tuple(tensor for tensor, _ in row), row[0][1]) for row in rows))


class FakeEvaluator:
    """Computes a graph's nodes on fake tensors.

    Args:
        model: may hold meta parameters, and parts: what counts is `stored`.
        samples: of the example.
        device: where parameters live that are not here.
    """

    def __init__(self, model: nn.Module, whole: Mapping[str, StoredTensor], samples: int, device: torch.device) -> None:
        self._model = model
        self._whole = whole
        self._samples = samples
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[str, torch.Tensor] = {}
        self.counts = tuple(max(samples, 1) * times + more for times, more in _COUNTS)

    def example(self, value: Any) -> Values:
        """An argument of the forward: its tensors, with each number of samples in the place of its own."""
        return tuple(tree_map(partial(self._scaled, count), value) for count in self.counts)

    def _scaled(self, count: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = list(value.shape)
        found = next((d for d, size in enumerate(sizes) if size == self._samples), -1)
        if found >= 0:
            sizes[found] = count
        with self._mode:
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

    def attribute(self, name: str) -> Values:
        """A parameter, a buffer, or a tensor that is a plain attribute."""
        if name in self._whole:
            return (self._state(name),) * len(self.counts)
        found: Any = self._model
        for part in name.split("."):
            found = getattr(found, part)
        return (found,) * len(self.counts)

    def _state(self, name: str) -> torch.Tensor:
        if name not in self._made:
            is_like = self._whole[name]
            device = self._device if is_like.device.type == "meta" else is_like.device
            with self._mode:
                made = torch.empty(is_like.shape, dtype=is_like.dtype, device=device, requires_grad=is_like.graded)
            self._made[name] = made
        return self._made[name]

    def run(self, node: fx.Node) -> tuple[Values, DropoutMasks]:
        """A node's results, and what it draws."""
        found, seen = [], []
        for index in range(len(self.counts)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_value, index))
            with torch.enable_grad(), self._mode, _Draws() as draws:
                result = self._call(node, args, kwargs)
            found.append(tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result))
            seen.append(draws)
        return tuple(found), _drawn(seen)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self._model.get_submodule(str(node.target))
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        state = {name: self._state(f"{node.target}.{name}") for name in names}
        with flat_weights(module, state):
            return functional_call(module, state, args, kwargs)


@contextmanager
def flat_weights(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """torch's recurrent modules keep a list of their weights beside the parameters, which functional_call passes by."""
    kept = []
    for prefix, inner in module.named_modules():
        if isinstance(inner, nn.RNNBase):
            kept.append((inner, inner._flat_weights))
            names = (f"{prefix}.{name}".lstrip(".") for name in inner._flat_weights_names)
            inner.__dict__["_flat_weights"] = [state.get(name) for name in names]
    try:
        yield
    finally:
        for inner, weights in kept:
            inner.__dict__["_flat_weights"] = weights


def _value(index: int, node: fx.Node) -> Any:
    return node.meta["values"][index]


def number(values: Values, counts: tuple[int, ...]) -> SizeArgument | int | None:
    """A whole number as one that is linear in the samples; None if it is not."""
    if values == (values[0],) * len(values):
        return int(values[0])
    step, rest = divmod(values[1] - values[0], counts[1] - counts[0])
    more = values[0] - step * counts[0]
    if rest or any(value != step * count + more for value, count in zip(values, counts, strict=True)):
        return None
    return SizeArgument(step, more)


def form(values: Values, counts: tuple[int, ...]) -> TensorShape:
    """A tensor's shape for any number of samples."""
    dtype = str(values[0].dtype).removeprefix("torch.")
    shapes = [tuple(value.shape) for value in values]
    if len(set(map(len, shapes))) > 1:
        return TensorShape(SymbolicShape(shapes[0], dtype), "its number of dimensions depends on the number of samples")
    growing = {d: number(sizes, counts) for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1}
    if not growing:
        return TensorShape(SymbolicShape(shapes[0], dtype))
    (dim, size), *others = growing.items()
    if others:
        return TensorShape(SymbolicShape(shapes[0], dtype), "several of its dimensions grow with the number of samples")
    if not isinstance(size, SizeArgument) or size.more:
        return TensorShape(
            SymbolicShape(shapes[0], dtype), f"its dimension {dim} is no multiple of the number of samples"
        )
    sizes = tuple(0 if d == dim else n for d, n in enumerate(shapes[0]))
    return TensorShape(SymbolicShape(sizes, dtype, dim, size.per_sample))


def every(test: Callable[[Any], bool], values: Values) -> bool:
    """Whether it holds with every number of samples."""
    return all(map(test, values))
