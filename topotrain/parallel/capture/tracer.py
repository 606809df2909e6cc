"""The tracer of a capture: answers torch.fx's questions for models that are split.

With a `FakeEvaluator`, every node is computed on fake tensors as soon as it is recorded. Values that do not
depend on the number of samples are then plain Python values for the user's code.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from topotrain.config.job import ConfigError
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.capture.capture_modes import CaptureRecorder, TrainingMode
from topotrain.parallel.capture.op_rules import WRITING
from topotrain.parallel.capture.shape_propagation import FakeEvaluator, RandomDraws, number
from topotrain.parallel.capture.source_location import ADVICE, FIELD, definition, is_leaf, signature, user_line

_ABOUT_SIZE = frozenset(
    ("size", "dim", "ndim", "numel", "nelement", "shape", "stride", "dtype", "device", "is_cuda", "is_floating_point")
)


class NeedsExample(Exception):
    """Raised where a capture cannot continue without example arguments."""


class _Valued(fx.Proxy):
    """A value in the graph. With an evaluator its attributes are known at once."""

    def __getattr__(self, name: str) -> Any:
        values = self.node.meta.get("values")
        # Methods are looked up by fx when they are called. Values such as `shape` become nodes, or plain values.
        if values is None or callable(getattr(values[0], name)):
            return super().__getattr__(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __index__(self) -> int:
        raise self._refused("counts in Python (range, index, int, float)")

    def __int__(self) -> int:
        raise self._refused("counts in Python (range, index, int, float)")

    def __float__(self) -> float:
        raise self._refused("counts in Python (range, index, int, float)")

    def __len__(self) -> int:
        raise self._refused("counts in Python (len)")

    def __setitem__(self, index: Any, value: Any) -> None:
        accepted = "writes into a tensor, which cannot be captured; torch.where and torch.cat make a new one"
        raise ConfigError(FIELD, None, accepted, user_line())

    def write(self, operation: Any, other: Any) -> Any:
        """Record an operation that writes to this value."""
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def _refused(self, does: str) -> Exception:
        tracer: Any = self.tracer
        error: Exception = tracer.undecided(self.node, does)
        return error


for _operation in WRITING:  # fx records `x += y` as `x = x + y`, which is wrong where x has a second name
    setattr(_Valued, f"__{_operation.__name__}__", partialmethod(_Valued.write, _operation))


class Tracer(fx.Tracer, CaptureRecorder):
    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, evaluator: FakeEvaluator | None, given: Mapping[str, Any] | None) -> None:
        fx.Tracer.__init__(self)
        CaptureRecorder.__init__(self)
        self._model = model
        self._evaluator = evaluator
        self._given = given
        self._busy = False  # a node runs in the evaluator: nothing is recorded
        self._thread = threading.get_ident()

    # --- what fx asks ----------------------------------------------------------------------------------------------

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        # A module that runs in the evaluator is one node already, so its own calls are not recorded.
        return forward(*args, **kwargs) if self._busy else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val if self._busy else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Valued(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            # fx would make this node past `create_proxy`, so without values, and store constants on the model.
            names = (name for name, buffer in self.root.named_buffers() if buffer is a)
            name = next(names, None) or self.tensor_attrs.get(a)
            return self.create_proxy("get_attr", name, (), {}).node if name else a
        return super().create_arg(a)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        given: dict[str, Any] = {}
        for name, parameter in signature(self._model).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                accepted = f"takes *{name}; give every argument a name of its own"
                raise ConfigError(FIELD, None, accepted, definition(self._model))
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                if self._given and self._given.get(name):
                    accepted = f"was given {', '.join(self._given[name])} as **{name}; give every argument a name"
                    raise ConfigError(FIELD, None, accepted, definition(self._model))
                continue
            # fx would make an input of every argument. Here those that are not given keep their defaults.
            asked = parameter.default is inspect.Parameter.empty if self._given is None else name in self._given
            if asked:
                given[name] = self._input(name)
        # Positional-only arguments cannot be passed by name.
        positional = [n for n, p in signature(self._model).parameters.items() if p.kind is p.POSITIONAL_ONLY]
        first = [given.pop(name) for name in positional if name in given]
        return (lambda: root_fn(self.root, *first, **given)), []

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        plain: Any = fx.node.map_aggregate((args, dict(kwargs)), self._plain)
        node = super().create_proxy(kind, target, plain[0], plain[1], name, type_expr, proxy_factory_fn).node
        scope = device_scopes.current()
        node.meta.update(line=user_line(), device="" if scope is None else str(scope))
        if self._evaluator is None:
            return self.proxy(node)
        if kind == "get_attr":
            with self._evaluating():
                node.meta.update(values=self._evaluator.attribute(target), draws=RandomDraws())
            return self.proxy(node)
        self._compute(node)
        return self._known(node)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.undecided(obj.node, "decides (if, while, assert, and, or, not)")

    def iter(self, obj: Any) -> Any:
        values = obj.node.meta.get("values")
        if values is None:
            raise NeedsExample(f"{user_line()}: iterates over a value")
        if isinstance(values[0], tuple | list):
            return iter([obj[index] for index in range(len(values[0]))])
        if isinstance(values[0], torch.Tensor) and all(v.dim() > 0 for v in values):
            lengths = {value.shape[0] for value in values}
            if len(lengths) == 1:
                return iter([obj[index] for index in range(lengths.pop())])
            raise self.undecided(obj.node, "iterates over the samples")
        raise self.undecided(obj.node, "iterates over a value")

    # --- with an evaluator -----------------------------------------------------------------------------------------

    def _input(self, name: str) -> Any:
        """Return an argument: a graph value if it contains a tensor, else itself."""
        if self._given is not None:
            assert self._evaluator is not None
            value = self._given[name]
            leaves = tree_leaves(value)
            if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                return value
        node = self.create_node("placeholder", name, (), {})
        node.meta.update(line=definition(self._model), device="", draws=RandomDraws())
        if self._evaluator is None or self._given is None:
            return self.proxy(node)
        with self._evaluating():
            node.meta["values"] = self._evaluator.example(self._given[name])
        return self._known(node)

    def _plain(self, a: Any) -> Any:
        """Return an argument as it is recorded: of a `training`, its value."""
        if not isinstance(a, TrainingMode):
            return a
        self.mode_read()
        return int(a) != 0

    def _compute(self, node: fx.Node) -> None:
        assert self._evaluator is not None
        try:
            with self._evaluating():
                node.meta["values"], node.meta["draws"] = self._evaluator.run(node)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            accepted = f"uses a tensor's values for a number or a size, but a capture knows only shapes; {ADVICE}"
            raise ConfigError(FIELD, None, accepted, node.meta["line"]) from error

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _known(self, node: fx.Node) -> Any:
        """Return the result of a node as the user's code sees it."""
        values = node.meta["values"]
        first = values[0]
        if isinstance(first, torch.device):
            # The node was recorded only to find the value, and no step reads it.
            self.graph.erase_node(node)
            return torch.device(first.type)  # a GPU's number differs from worker to worker
        # A value that does not depend on the samples becomes a plain Python value.
        if node.op != "placeholder" and _is_plain(first) and all(v == first for v in values) and self._holds(node):
            self.graph.erase_node(node)
            return first
        whole: Any = self.proxy(node)
        # Unpacked here, so that the user's code can iterate over the parts and count them.
        if type(first) in (tuple, list, torch.Size) and len({len(value) for value in values}) == 1:
            items = [whole[index] for index in range(len(first))]
            return items if type(first) is list else tuple(items)
        if type(first) is dict:
            return {key: whole[key] for key in first}
        return whole

    def _holds(self, node: fx.Node) -> bool:
        """Return whether a result holds for all numbers of samples, not only those tried."""
        # A choice (bool) that two numbers of samples agree on may be another one for a third number.
        numbers = [n for n in node.all_input_nodes if all(type(v) in (bool, int, float) for v in n.meta["values"])]
        if not numbers or not isinstance(node.meta["values"][0], bool):
            return True
        assert self._evaluator is not None
        counts = self._evaluator.counts
        return len({number(n.meta["values"], counts) for n in numbers}) == 1 and len(node.args) == len(numbers)

    def undecided(self, node: fx.Node, does: str) -> Exception:
        """Return the error for code that needs more of a value than its shape."""
        values = node.meta.get("values")
        if values is None and _about_sizes(node):
            return NeedsExample(f"{user_line()}: {does} by a size")
        if values is None or isinstance(values[0], torch.Tensor):
            what = f"{does} by a tensor's values, and the graph must be the same for all data"
        else:
            what = f"{does} by the number of samples, which differs from worker to worker"
        return ConfigError(FIELD, None, f"{what}; {ADVICE}", user_line())

    def recorded(self, original: Any) -> Any:

        def call(*args: Any, **kwargs: Any) -> Any:
            # Reader threads of the transports make tensors at the same time. Their calls are not part of the forward.
            elsewhere = self._busy or threading.get_ident() != self._thread
            if elsewhere or (original is len and not isinstance(args[0], fx.Proxy)):
                return original(*args, **kwargs)
            return self.create_proxy("call_function", original, args, kwargs)

        return call


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.layout)


def _about_sizes(node: fx.Node) -> bool:
    """Return whether a value is computed from sizes and similar metadata alone."""
    if node.op == "call_method" and node.target in _ABOUT_SIZE:
        return True
    if node.target is getattr and node.args[1] in _ABOUT_SIZE:
        return True
    if node.target is len:
        return True
    return bool(node.all_input_nodes) and all(map(_about_sizes, node.all_input_nodes))
