"""Record a forward as a graph description by running it once on fake tensors.

Every call of a public function of torch is one node (`torch.overrides.TorchFunctionMode`). So the other process runs
what the script would have run, layer by layer, with the same kernels and the same autograd. Sizes are those of the
example. A call with other sizes is recorded again.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from topotrain.config.job import ConfigError
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.capture.shape_propagation import flat_weights
from topotrain.parallel.capture.source_location import definition, line_of, user_line
from topotrain.parallel.estimate.flop_counter import storage
from topotrain.parallel.remote.allowed_functions import FUNCTIONS, name_of
from topotrain.parallel.remote.argument_codec import CallInput, NodeOutput, StateRef
from topotrain.parallel.remote.graph_description import GraphDescription, GraphNode, TensorForm
from topotrain.parallel.remote.state_numbers import ModelState, location

_FIELD = "model.forward"
_STATISTICS = (1, 2)  # batch_norm writes to these arguments without a new version number
_LOOKS = frozenset(
    f"torch.Tensor.{name}"
    for name in ("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "nonzero")
)
_DECIDES = "decides or counts by a tensor's values, but a session must run the same functions for all data"


def record(kept: ModelState, args: Sequence[Any], kwargs: Mapping[str, Any], loss: bool = False) -> GraphDescription:
    """Record the computation of a model for given arguments, in its present mode.

    Args:
        loss: the result must be a loss.

    Raises:
        ConfigError: the forward cannot be recorded. The error names the line of the user's code.
    """
    model = kept.model
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [_fake(tensor) for tensor in kept.tensors]
        inputs = [_fake(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        waiting = iter(inputs)
        given = tree_map(
            lambda leaf: next(waiting) if isinstance(leaf, torch.Tensor) else leaf, (tuple(args), dict(kwargs))
        )
        recorder = _Recorder(kept, fakes, inputs)
        state = {name: fakes[number] for name, number in kept.names.items()}
        # With gradients, so that only `no_grad` blocks of the forward itself show in the nodes.
        with recorder.watching(model), flat_weights(model, state), recorder, torch.enable_grad():
            output = _call(model, state, *given)
        if loss:
            _check_loss(output, definition(model))
        described = recorder.described(output)
    return GraphDescription(tuple(map(TensorForm.of, inputs)), tuple(recorder.nodes), described)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's log of failures on fake tensors, which are also raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _check_loss(output: Any, line: str) -> None:
    if not isinstance(output, torch.Tensor) or output.numel() != 1 or not output.requires_grad:
        what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        accepted = "must return the loss to be trained: a tensor with one element that depends on a parameter"
        raise ConfigError(_FIELD, what, accepted, line)


def _call(model: nn.Module, state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    try:
        return functional_call(model, state, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(_FIELD, None, _DECIDES, line_of(error)) from None
    except ConfigError:
        raise
    except Exception as error:
        accepted = f"cannot be captured: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(_FIELD, None, accepted, line_of(error)) from error


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
    )


class _Recorder(TorchFunctionMode):
    """Records calls. `_known` maps tensors to references, `_alive` keeps the tensors."""

    def __init__(self, kept: ModelState, fakes: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._kept = kept
        self.nodes: list[GraphNode] = []
        # Kept alive, because `_known` has ids, which Python gives to other objects again.
        self._alive: list[torch.Tensor] = [*fakes, *inputs]
        self._known: dict[int, NodeOutput | CallInput | StateRef] = {id(t): StateRef(n) for n, t in enumerate(fakes)}
        self._known |= {id(tensor): CallInput(number) for number, tensor in enumerate(inputs)}
        self._inside: list[str] = []  # devices of the modules that run now
        self._written: dict[int, str] = {}  # memory that was written in place, and the function that did

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name_of(func) in _LOOKS:
            raise ConfigError(_FIELD, None, _DECIDES, user_line())
        # A function that writes in place raises the version of its argument.
        before = [(t, t._version) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        changed = [tensor for tensor, version in before if tensor._version != version]
        # Calls that only look at sizes are not repeated by the other process.
        if made or changed:
            if name_of(func).endswith("batch_norm"):
                changed += [args[n] for n in _STATISTICS if n < len(args) and isinstance(args[n], torch.Tensor)]
            self._note(func, args, kwargs, result, [tensor for tensor, _ in before], changed)
        return result

    # --- where ------------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Track the modules with a forward that is running."""

        def enter(module: nn.Module, args: Any) -> None:
            self._inside.append(getattr(module, device_scopes.PLACE, "") or "")

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()

        hooks = []
        for module in model.modules():
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _worker(self, used: Sequence[NodeOutput | CallInput | StateRef], line: str) -> int:
        """Return the worker of a call."""
        cluster = self._kept.cluster
        scope = device_scopes.current()
        # The scope of the call decides, then the scopes of the modules around it, then the workers of its inputs.
        named = ["" if scope is None else str(scope), *reversed(self._inside)]
        for name in named:
            found = location(name, cluster, line)
            if found is not None:
                return found
        for ref in used:
            if isinstance(ref, StateRef) and ref.number in self._kept.worker:
                return self._kept.worker[ref.number]
        values = [ref.node for ref in used if isinstance(ref, NodeOutput)]
        return self.nodes[max(values)].worker if values else cluster.first

    # --- what -------------------------------------------------------------------------------------------------------

    def _note(
        self,
        func: object,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        read: list[torch.Tensor],
        changed: list[torch.Tensor],
    ) -> None:
        line, name = user_line(), name_of(func)
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("torch.autocast", True, "is not known to a session: convert with .to(dtype)", line)
        if name not in FUNCTIONS:
            accepted = f"calls {name}, which a session does not run"
            raise ConfigError(_FIELD, None, accepted, line)
        used: list[NodeOutput | CallInput | StateRef] = []
        plain = [self._plain(arg, used, name, line) for arg in args]
        # A new tensor is made on the worker that needs it.
        kept = ((key, value) for key, value in kwargs.items() if key not in ("device", "pin_memory"))
        named = tuple((key, self._plain(value, used, name, line)) for key, value in kept)
        worker = self._worker(used, line)
        # A state without a scope belongs to the worker of its first use.
        for ref in used:
            if isinstance(ref, StateRef):
                self._kept.worker.setdefault(ref.number, worker)
        for tensor in read:
            self._reads(tensor, worker, line)
        for tensor in changed:
            self._writes(tensor, worker, name, line)
        self._learn(result, NodeOutput(len(self.nodes)))
        self.nodes.append(GraphNode(name, worker, tuple(plain), named, torch.is_grad_enabled(), line))

    def _learn(self, result: Any, ref: NodeOutput) -> None:
        if isinstance(result, torch.Tensor):
            if id(result) not in self._known:  # a function that writes in place returns its argument
                self._known[id(result)] = ref
                self._alive.append(result)
        elif isinstance(result, tuple | list):
            for number, item in enumerate(result):
                self._learn(item, NodeOutput(ref.node, (*ref.path, number)))

    def _plain(self, value: Any, used: list[Any], name: str, line: str) -> Any:
        if isinstance(value, torch.Tensor):
            used.append(self._ref(value, line))
            return used[-1]
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple):
            return tuple(self._plain(item, used, name, line) for item in value)
        if isinstance(value, list):
            return [self._plain(item, used, name, line) for item in value]
        if isinstance(value, dict):
            return {key: self._plain(item, used, name, line) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._plain(part, used, name, line) for part in (value.start, value.stop, value.step)))
        plain = value is None or value is Ellipsis or type(value) in (bool, int, float, str)
        if plain or isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
            return value
        raise ConfigError(_FIELD, None, f"gives {name} a {type(value).__name__}, which cannot be recorded", line)

    def _ref(self, tensor: torch.Tensor, line: str) -> NodeOutput | CallInput | StateRef:
        found = self._known.get(id(tensor))
        if found is not None:
            return found
        if isinstance(tensor, torch._subclasses.FakeTensor):
            raise ConfigError(_FIELD, None, "uses a tensor that was not made by a public function of torch", line)
        return StateRef(self._kept.add(tensor))  # a constant of the forward, or a parameter that a module keeps twice

    # --- writing in place -------------------------------------------------------------------------------------------

    def _writes(self, tensor: torch.Tensor, worker: int, name: str, line: str) -> None:
        """Refuse a write in place on a worker that does not hold the tensor."""
        # Another worker may have a copy from before the write.
        if self._worker_of(self._known.get(id(tensor))) != worker:
            self._refuse_write(name, line)
        self._written[storage(tensor)] = name

    def _reads(self, tensor: torch.Tensor, worker: int, line: str) -> None:
        written = self._written.get(storage(tensor))
        if written is not None and self._worker_of(self._known.get(id(tensor))) != worker:
            self._refuse_write(written, line)

    def _worker_of(self, ref: NodeOutput | CallInput | StateRef | None) -> int | None:
        if isinstance(ref, NodeOutput):
            return self.nodes[ref.node].worker
        return self._kept.worker.get(ref.number) if isinstance(ref, StateRef) else None

    def _refuse_write(self, name: str, line: str) -> NoReturn:
        accepted = f"{name} writes in place to an argument, or to a value that another worker needs: make a new tensor"
        raise ConfigError(_FIELD, None, accepted, line)

    def described(self, output: Any) -> Any:
        """Return the output of the model with references, or raise ConfigError."""
        return self._plain(output, [], "its caller", definition(self._kept.model))
