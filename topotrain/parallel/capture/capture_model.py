"""Capture a model's forward as a graph of torch.fx.

Each node has the line of the user's code that made it and the device scope it was in. Layers of torch.nn are one node
each, and so is a module placed as a whole (`device_scopes.place`). With example arguments, sizes that do not depend on
the number of samples are plain numbers, so loops over them and checks of them can be captured. Without an example,
before the first forward, the capture may have to stop at them (`unfinished`).

torch.fx: Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning in Python", 2022.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_modes import prepared
from topotrain.parallel.capture.shape_propagation import FakeEvaluator, StoredTensor, stored
from topotrain.parallel.capture.source_location import ADVICE, FIELD, is_leaf, line_of, signature
from topotrain.parallel.capture.tracer import NeedsExample, Tracer

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """A captured forward.

    Nodes have meta "line" ("file:line" of the user's code) and "device" (a name or "").

    Attributes:
        leaves: names of all modules that are one node where they are called, in definition order.
        stored: parameters and buffers of the whole model, by all their names.
        by_mode: the forward reads `training` or passes it on. It must then be captured once for training and once for
            evaluation.
        unfinished: why the graph ends early, or "". Only a capture without an example can end early.
    """

    graph: fx.Graph
    leaves: tuple[str, ...]
    stored: Mapping[str, StoredTensor]
    by_mode: bool = False
    unfinished: str = ""


def capture(model: nn.Module, training: bool = True) -> CapturedForward:
    """Capture a forward before its arguments are known, without optional ones.

    Raises:
        ConfigError: the forward decides on data, takes *args, or does something else that an example would not help
            with. The error names the file and line of the user's code.
    """
    return trace(model, stored(model), None, (), NOTHING, training)


def trace(
    model: nn.Module,
    whole: Mapping[str, StoredTensor],
    evaluator: FakeEvaluator | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool,
) -> CapturedForward:
    """Capture a forward.

    With an `evaluator`, the forward is captured for these arguments and its nodes get meta "values" and "draws".

    Raises:
        ConfigError: as `capture`, or the arguments do not fit the forward.
    """
    tracer = Tracer(model, evaluator, _bind(model, args, kwargs) if evaluator else None)
    unfinished = ""
    with prepared(model, tracer, training):
        try:
            tracer.trace(model)
        except NeedsExample as error:
            unfinished = str(error)
        except ConfigError:
            raise
        except Exception as error:  # the user's code, and torch inside it, may raise anything
            # An example would not help against these errors. Others may come from sizes that are not known yet.
            if evaluator is None and not isinstance(error, NameError | ImportError | AttributeError):
                unfinished = f"{line_of(error)}: {error}"
            else:
                accepted = f"cannot be captured: {type(error).__name__}: {error}; {ADVICE}"
                raise ConfigError(FIELD, None, accepted, line_of(error)) from error
    leaves = tuple(name for name, module in model.named_modules() if name and is_leaf(module))
    return CapturedForward(tracer.graph, leaves, whole, tracer.by_mode, unfinished)


def _bind(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(signature(model).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ConfigError("model(…)", None, f"{error}, for forward{signature(model)}") from None
