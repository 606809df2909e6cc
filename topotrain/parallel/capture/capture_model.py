"""A model's forward as a graph (torch.fx): what is computed from what, where in the user's code, in whose scope.

torch.fx: Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning in Python", 2022.
Layers of torch.nn are one node each, and so is a module placed as a whole (`devices.place`). With an example of the
arguments, sizes that do not depend on the number of samples are plain numbers, so loops and checks on them are no
obstacle. Without one (before the first forward) the capture may have to stop at them; it says so.
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
    """A captured forward. Nodes have meta "line" ("file:line" of the user's code) and "device" (name or "").

    leaves: names of all modules that are one node where they are called, in definition order.
    stored: the whole model's parameters and buffers, by all their names.
    by_mode: the forward looks at `training`, or hands it on, so it must be captured for training and for evaluation.
    unfinished: why the graph ends early, "" if it does not: only without an example.
    """

    graph: fx.Graph
    leaves: tuple[str, ...]
    stored: Mapping[str, StoredTensor]
    by_mode: bool = False
    unfinished: str = ""


def capture(model: nn.Module, training: bool = True) -> CapturedForward:
    """Capture a forward before its arguments are known; arguments with defaults count as not given.

    Raises:
        ConfigError: it decides on data, takes *args, or does something else that no example would cure; it names the
            file and line of the user's code.
    """
    return trace(model, stored(model), None, (), NOTHING, training)


def trace(
    model: nn.Module,
    whole: Mapping[str, StoredTensor],
    bench: FakeEvaluator | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool,
) -> CapturedForward:
    """Capture a forward; with a bench, for these arguments, and nodes have their meta "values" and "draws".

    Raises:
        ConfigError: as `capture`, or the arguments do not fit.
    """
    tracer = Tracer(model, bench, _bind(model, args, kwargs) if bench else None)
    unfinished = ""
    with prepared(model, tracer, training):
        try:
            tracer.trace(model)
        except NeedsExample as error:
            unfinished = str(error)
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's code, or torch on what it was given, makes of it
            if bench is None and not isinstance(error, NameError | ImportError | AttributeError):
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
