"""What a capture has to know of torch's operations: which leave features apart, which draw masks, which write in place.

Rule: an operation that is not listed mixes features and is computed on whole ones, which is always right.
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
"""`x += y` and its like."""
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
        "relu",
        "relu_",
        "sigmoid",
        "sigmoid_",
        "tanh",
        "tanh_",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "abs",
        "neg",
        "square",
        "sin",
        "cos",
        "erf",
        "clamp",
        "pow",
        "add",
        "add_",
        "sub",
        "sub_",
        "mul",
        "mul_",
        "div",
        "div_",
        "contiguous",
        "clone",
        "detach",
        "float",
        "half",
        "double",
        "bfloat16",
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
    """Whether every element of the result depends on the same element of the inputs alone."""
    if module is not None:
        return type(module) in _EACH_MODULE
    return node.target in (_EACH_METHOD if node.op == "call_method" else _EACH_FUNCTION)


def each_channel(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether every channel (dimension 1) of the result depends on the same channel of the input alone."""
    if module is not None:
        return type(module) in _POOL_MODULES
    return node.op == "call_function" and node.target in _POOL_FUNCTIONS


def draws_masks(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it is a dropout, in training at least, whose masks all workers draw alike (`chance`)."""
    if module is not None:
        return isinstance(module, tuple(MODULES))
    return bool(node.meta["draws"]) and node.op == "call_function" and name_of(node).rstrip("_") in FUNCTIONS


def draws_inside(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it has a dropout inside, which draws where it is computed (`chance.draws_by_itself`)."""
    if module is None:
        return "dropout_p" in node.kwargs
    kinds = tuple(MODULES)
    return any(isinstance(inner, kinds) or _rate(inner) > 0 for inner in module.modules())


def _rate(module: nn.Module) -> float:
    rate = getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, float | int) else 0.0


def name_of(node: fx.Node) -> str:
    """The plain name of an operation, "view"."""
    return str(getattr(node.target, "__name__", node.target))


def reshapes(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether it takes the same elements in the same order under other sizes."""
    return isinstance(module, nn.Flatten | nn.Unflatten) or (module is None and name_of(node) in _VIEWS)


def counts(node: fx.Node) -> bool:
    """Whether it makes a tensor whose elements know their number."""
    return node.op == "call_function" and name_of(node) in _COUNTING


def takes_apart(node: fx.Node) -> bool:
    """Whether it only looks into a tuple, a dict or an object."""
    if node.target not in (operator.getitem, getattr):
        return False
    parent: Any = node.args[0]
    return isinstance(parent, fx.Node) and not isinstance(parent.meta["values"][0], torch.Tensor)


def written(node: fx.Node, module: nn.Module | None) -> fx.Node | None:
    """The value that it writes over, if any."""
    inplace = getattr(module, "inplace", False) is True or node.kwargs.get("inplace") is True
    name = name_of(node)
    trailing = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
    first = node.args[0] if node.args else None
    writes = inplace or trailing or node.target in WRITING
    return first if writes and isinstance(first, fx.Node) else None
