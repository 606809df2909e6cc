"""Properties of torch operations that a capture and a split need.

The tables list operations that keep features apart, draw dropout masks, or write in place. An operation that is not
listed is taken to mix features. It gets whole features as input, which is always correct.
"""

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as f

from topotrain.parallel.runtime.dropout import FUNCTIONS, MODULES

WRITING = tuple(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
)
"""Operators that write in place, such as `x += y`."""
_EACH_MODULE = (
    *MODULES,
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Threshold, nn.Identity),
)
_EACH_FUNCTION = frozenset(
    (
        *(f.dropout, f.dropout1d, f.dropout2d, f.dropout3d, f.alpha_dropout, f.feature_alpha_dropout),
        *(torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.abs, torch.neg),
        *(torch.square, torch.sin, torch.cos, torch.erf, torch.clamp, torch.pow, torch.clone, torch.detach),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum),
        *(f.relu, f.relu6, f.leaky_relu, f.elu, f.selu, f.celu, f.gelu, f.silu, f.mish, f.sigmoid, f.tanh),
        *(f.hardtanh, f.hardswish, f.hardsigmoid, f.softplus, f.softsign, f.logsigmoid),
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.abs),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    )
)
_EACH_METHOD = frozenset(
    (
        *("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "exp", "log", "sqrt", "rsqrt", "abs", "neg"),
        *("square", "sin", "cos", "erf", "clamp", "pow", "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"),
        *("contiguous", "clone", "detach", "float", "half", "double", "bfloat16"),
    )
)
_POOL_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
_POOL_FUNCTIONS = frozenset(
    (f.max_pool1d, f.max_pool2d, f.avg_pool1d, f.avg_pool2d, f.adaptive_avg_pool1d, f.adaptive_avg_pool2d)
)
_VIEWS = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"))
_COUNTING = frozenset(("arange", "linspace", "eye", "randperm"))


def each_element(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether each element depends only on the same element of the inputs."""
    if module is not None:
        # The exact type, because a subclass may compute something else.
        return type(module) in _EACH_MODULE
    return node.target in (_EACH_METHOD if node.op == "call_method" else _EACH_FUNCTION)


def each_channel(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a channel (dimension 1) depends only on the same input channel."""
    if module is not None:
        return type(module) in _POOL_MODULES
    return node.op == "call_function" and node.target in _POOL_FUNCTIONS


def draws_masks(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a node is a dropout with masks that all workers draw alike."""
    # A module counts in both modes, since it may draw in training only.
    if module is not None:
        return isinstance(module, tuple(MODULES))
    return bool(node.meta["draws"]) and node.op == "call_function" and name_of(node).rstrip("_") in FUNCTIONS


def draws_inside(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a node has a dropout inside; see `dropout.draws_by_itself`."""
    if module is None:
        return "dropout_p" in node.kwargs
    kinds = tuple(MODULES)
    return any(isinstance(inner, kinds) or _rate(inner) > 0 for inner in module.modules())


def _rate(module: nn.Module) -> float:
    rate = getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, float | int) else 0.0


def name_of(node: fx.Node) -> str:
    """Return the plain name of an operation, such as "view"."""
    return str(getattr(node.target, "__name__", node.target))


def reshapes(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a node keeps all elements in their order and changes only sizes."""
    return isinstance(module, nn.Flatten | nn.Unflatten) or (module is None and name_of(node) in _VIEWS)


def counts(node: fx.Node) -> bool:
    """Return whether a node makes a tensor with values that depend on the position."""
    return node.op == "call_function" and name_of(node) in _COUNTING


def takes_apart(node: fx.Node) -> bool:
    """Return whether a node only takes an item of a tuple or dict, or an attribute."""
    if node.target not in (operator.getitem, getattr):
        return False
    parent: Any = node.args[0]
    return isinstance(parent, fx.Node) and not isinstance(parent.meta["values"][0], torch.Tensor)


def written(node: fx.Node, module: nn.Module | None) -> fx.Node | None:
    """Return the value that a node writes in place, or None."""
    # torch's own convention: a name that ends with one underscore writes in place.
    inplace = getattr(module, "inplace", False) is True or node.kwargs.get("inplace") is True
    name = name_of(node)
    trailing = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
    first = node.args[0] if node.args else None
    writes = inplace or trailing or node.target in WRITING
    return first if writes and isinstance(first, fx.Node) else None
