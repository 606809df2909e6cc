"""Shapes of a forward's values for any batch size, computed on fake tensors.

Fake tensors have shapes and no memory. Each value is computed with three numbers of samples:

- A dimension that scales with them is the batch dimension.
- A number that grows in equal steps is linear in them.
- Anything else is unknown for other batch sizes, and refused where it would be needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from topotrain.parallel.program.split_program import SizeArgument, SymbolicShape

# Two points define a line, and the third checks it. No number is 1, which would hide in broadcasts. The numbers have no
# common divisor, so a property of even batch sizes alone is not taken for a property of all.
_COUNTS = ((2, 1), (3, 2), (4, 4))

Values = tuple[Any, ...]
"""One value for each number of samples that is tried."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer of the whole model, without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # "meta": this process does not hold the tensor
    graded: bool  # requires a gradient


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor's shape. `odd`: why it cannot be cut by samples, or ""."""

    shape: SymbolicShape
    odd: str = ""


def stored(model: nn.Module) -> dict[str, StoredTensor]:
    """Return all parameters and buffers of a model, by each of their names."""
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: StoredTensor(tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in found}


@dataclass(frozen=True, slots=True)
class RandomDraws:
    """The random numbers that a node draws.

    `masks` has one entry per mask, in order: its tensor for each number of samples, and the probability that an element
    is kept. None means that the node draws other random numbers. `again`: its backward draws them once more.
    """

    masks: tuple[tuple[Values, float], ...] | None = ()
    again: bool = False

    def __bool__(self) -> bool:
        return self.masks is None or bool(self.masks)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the random draws of the operations inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[tuple[torch.Tensor, float]] = []
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every dropout of torch draws its mask with this one operation.
        if func is torch.ops.aten.bernoulli_.float:
            self.masks.append((args[0].detach(), float(args[1]) if len(args) > 1 else 0.5))
        else:
            self.others = self.others or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _drawn(seen: Sequence[_Draws]) -> RandomDraws:
    """Combine the draws of a node with each number of samples."""
    if any(one.others for one in seen) or len({tuple(keep for _, keep in one.masks) for one in seen}) > 1:
        return RandomDraws(None)
    rows = zip(*(one.masks for one in seen), strict=True)
    return RandomDraws(tuple((tuple(tensor for tensor, _ in row), row[0][1]) for row in rows))


class FakeEvaluator:
    """Computes the nodes of a graph on fake tensors.

    Args:
        model: may hold meta parameters or parts of parameters. Their shapes are taken from `whole`.
        whole: all parameters and buffers, from `stored`.
        samples: the number of samples of the example.
        device: the device of parameters that this process does not hold.
    """

    def __init__(self, model: nn.Module, whole: Mapping[str, StoredTensor], samples: int, device: torch.device) -> None:
        self._model = model
        self._whole = whole
        self._samples = samples
        self._device = device
        # Modules may hold real tensors as plain attributes.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[str, torch.Tensor] = {}
        self.counts = tuple(max(samples, 1) * times + more for times, more in _COUNTS)

    def example(self, value: Any) -> Values:
        """Return an argument of the forward for each number of samples."""
        return tuple(tree_map(partial(self._scaled, count), value) for count in self.counts)

    def _scaled(self, count: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = list(value.shape)
        # The first dimension of the batch's size counts the samples. Others of that size are features by chance.
        found = next((d for d, size in enumerate(sizes) if size == self._samples), -1)
        if found >= 0:
            sizes[found] = count
        with self._mode:
            return torch.empty(sizes, dtype=value.dtype, device=value.device)

    def attribute(self, name: str) -> Values:
        """Return a parameter, a buffer, or a tensor that is a plain attribute."""
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

    def run(self, node: fx.Node) -> tuple[Values, RandomDraws]:
        """Return the results of a node, and its random draws."""
        found, seen = [], []
        for index in range(len(self.counts)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), partial(_value, index))
            # With gradients, so that a capture inside torch.no_grad() finds the same operations.
            with torch.enable_grad(), self._mode, _Draws() as draws:
                result = self._call(node, args, kwargs)
            found.append(tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, result))
            seen.append(draws)
        if seen[-1].masks and node.op == "call_module":
            return tuple(found), replace(_drawn(seen), again=self._draws_again(node, args, kwargs))
        return tuple(found), _drawn(seen)

    def _draws_again(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Whether a module's backward draws masks: a checkpoint runs its forward again."""

        def graded(x: Any) -> Any:
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.detach().requires_grad_().clone() if is_float else x

        with torch.enable_grad(), self._mode, _Draws() as draws:
            result = self._call(node, *tree_map(graded, (args, kwargs)))
            ends = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
            before = len(draws.masks)
            torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        return len(draws.masks) > before

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
    """Replace the list of weights that torch's recurrent modules keep."""
    # They keep it beside their parameters, and `functional_call` does not replace the tensors in it.
    kept = []
    for prefix, inner in module.named_modules():
        if isinstance(inner, nn.RNNBase):
            kept.append((inner, inner._flat_weights))
            names = (f"{prefix}.{name}".lstrip(".") for name in inner._flat_weights_names)
            # Past the module's __setattr__, which would register the tensors.
            inner.__dict__["_flat_weights"] = [state.get(name) for name in names]
    try:
        yield
    finally:
        for inner, weights in kept:
            inner.__dict__["_flat_weights"] = weights


def _value(index: int, node: fx.Node) -> Any:
    return node.meta["values"][index]


def number(values: Values, counts: tuple[int, ...]) -> SizeArgument | int | None:
    """Return an integer as a linear function of the samples, or None if it is not."""
    if values == (values[0],) * len(values):
        return int(values[0])
    step, rest = divmod(values[1] - values[0], counts[1] - counts[0])
    more = values[0] - step * counts[0]
    if rest or any(value != step * count + more for value, count in zip(values, counts, strict=True)):
        return None
    return SizeArgument(step, more)


def form(values: Values, counts: tuple[int, ...]) -> TensorShape:
    """Return a tensor's shape for any number of samples."""
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
            SymbolicShape(shapes[0], dtype), f"its dimension {dim} is not a multiple of the number of samples"
        )
    sizes = tuple(0 if d == dim else n for d, n in enumerate(shapes[0]))
    return TensorShape(SymbolicShape(sizes, dtype, dim, size.per_sample))
