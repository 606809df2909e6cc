"""Build the program of a captured forward: locations of values, and edges.

The assignment of a module or a device scope decides where a step is computed. Other steps follow their inputs. Nothing
here depends on the worker.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from topotrain.parallel.capture.capture_model import CapturedForward, trace
from topotrain.parallel.capture.op_rules import (
    draws_inside,
    draws_masks,
    takes_apart,
    written,
)
from topotrain.parallel.capture.shape_propagation import FakeEvaluator, RandomDraws, form, number
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.program.layout_inference import (
    ADVICE,
    BATCH,
    OWN,
    SAME,
    WHOLE,
    InferredLayouts,
    has_tensors,
    refused,
)
from topotrain.parallel.program.split_program import (
    DropoutMask,
    LayoutEdge,
    Program,
    ProgramStep,
    ResultRef,
    StepKind,
    ValueLocation,
)

_KINDS = {
    "placeholder": StepKind.INPUT,
    "call_module": StepKind.MODULE,
    "call_function": StepKind.FUNCTION,
    "call_method": StepKind.METHOD,
    "get_attr": StepKind.ATTRIBUTE,
}
_AGAIN = (
    "has a dropout inside an activation checkpoint (torch.utils.checkpoint), which would draw another mask in the "
    "backward; leave the checkpoint out, or put the dropout behind it"
)
_CHANCE = (
    "draws random numbers, which differ from worker to worker; draw them outside and pass them as an argument "
    "(attention's dropout: pass dropout_p by its name)"
)


def program(
    captured: CapturedForward,
    assignments: Mapping[str, Assignment],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    samples: int,
    workers: int,
    training: bool = True,
) -> Program:
    """Build the program of a forward for given arguments.

    Args:
        captured: the result of `capture`, made when the model was still whole.
        assignments: of its modules, by `assign_modules.assignments`.
        model: whole or localized. Parameters may be on the meta device. No memory of their size is allocated.
        args, kwargs: the arguments of the call. Only sizes, dtype and device of tensors matter.
        samples: the number of samples in the arguments. In each tensor the first dimension of this size counts the
            samples. A tensor without such a dimension is the same for all samples.
        workers: workers of a group.
        training: the value of `self.training` if the forward reads it or passes it on (`CapturedForward.by_mode`).
            Other forwards need one program for both modes.

    Raises:
        ConfigError: the forward cannot be captured, or a value that cannot be sent would have to be. The error names
            the line of the user's code.
    """
    evaluator = FakeEvaluator(model, captured.stored, samples, _device(captured, (args, kwargs)))
    found = trace(model, captured.stored, evaluator, args, kwargs, training)
    return _Cut(found, captured, assignments, model, evaluator.counts, workers).program()


def _device(captured: CapturedForward, arguments: Any) -> torch.device:
    given = (leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    held = (stored.device for stored in captured.stored.values() if stored.device.type != "meta")
    return next(held, None) or next(given, None) or torch.device("cpu")


class _Cut:
    def __init__(
        self,
        found: CapturedForward,
        before: CapturedForward,
        assignments: Mapping[str, Assignment],
        model: nn.Module,
        counted: tuple[int, ...],
        workers: int,
    ) -> None:
        self._graph = found.graph
        self._found = InferredLayouts(before, assignments, model, counted, workers)
        self._model = model
        self._counts = counted
        self._workers = workers
        self._steps: list[ProgramStep] = []
        self._edges: dict[tuple[int, ValueLocation], LayoutEdge] = {}

    def program(self) -> Program:
        self._drop_unused()
        inputs = []
        output: Any = None
        for node in self._graph.nodes:
            if node.op == "output":
                output = self._arguments(node.args[0], BATCH, node)
            # Numbers made of sizes become part of the arguments of other steps (`SizeArgument`).
            elif has_tensors(node) or node.op == "placeholder" or not _sized(node):
                inputs += [str(node.target)] if node.op == "placeholder" else []
                self._add(node)
        self._check_writes()
        return Program(self._workers, tuple(self._steps), tuple(self._edges.values()), tuple(inputs), output)

    def _drop_unused(self) -> None:
        # From the end: a node that is dropped may have been the only user of its inputs.
        for node in reversed(list(self._graph.nodes)):
            looks = node.op == "get_attr" or (
                node.op.startswith("call") and (takes_apart(node) or not has_tensors(node))
            )
            if looks and not node.users:
                self._graph.erase_node(node)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._model.get_submodule(str(node.target)) if node.op == "call_module" else None

    # --- one step --------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        module = self._module(node)
        random = draws_masks(node, module)
        inside = self._inside(node)
        if node.meta["draws"].again:
            raise refused(node, _AGAIN)
        # Random numbers other than masks would differ from worker to worker.
        if node.meta["draws"] and not random and not inside and not draws_inside(node, module):
            raise refused(node, _CHANCE)
        layout, reads = self._found.place(node, module)
        shape = None
        if isinstance(node.meta["values"][0], torch.Tensor):
            found = self._found.form(node, module)
            # After the layout of the inputs: only the values show whether the result still has samples.
            layout = self._found.settled(node, layout, found)
            self._found.forms[node] = found
            shape = found.shape
        args = self._arguments(node.args, reads, node)
        kwargs = self._arguments(dict(node.kwargs), reads, node)
        self._found.layouts[node] = layout
        self._found.numbers[node] = len(self._steps)
        step = ProgramStep(
            len(self._steps),
            node.name,
            _KINDS[node.op],
            node.target,
            layout,
            args,
            MappingProxyType(kwargs),
            shape,
            random,
            node.meta["line"],
            inside,
        )
        self._steps.append(step)

    def _inside(self, node: fx.Node) -> tuple[DropoutMask, ...]:
        """Return the masks that a step draws itself, if they are all and can be cut."""
        drawn: RandomDraws = node.meta["draws"]
        found = [(form(values, self._counts), keep) for values, keep in drawn.masks or ()]
        if any(one.odd for one, _ in found):
            return ()
        orders = [_order(values[0]) for values, _ in drawn.masks or ()]
        return tuple(DropoutMask(one.shape, keep, order) for (one, keep), order in zip(found, orders, strict=True))

    # --- what it reads ---------------------------------------------------------------------------------------------

    def _arguments(self, value: Any, reads: ValueLocation, user: fx.Node) -> Any:
        if isinstance(value, fx.Node):
            return self._argument(value, reads, user)
        if isinstance(value, slice):
            return slice(*(self._arguments(part, reads, user) for part in (value.start, value.stop, value.step)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._arguments(item, reads, user) for item in value))
        if isinstance(value, tuple | list):
            items = [self._arguments(item, reads, user) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._arguments(item, reads, user) for key, item in value.items()}
        return value

    def _argument(self, node: fx.Node, reads: ValueLocation, user: fx.Node) -> Any:
        if node not in self._found.numbers:
            size = (
                number(node.meta["values"], self._counts)
                if all(type(each) is int for each in node.meta["values"])
                else None
            )
            if size is None:
                accepted = f"needs {node.name}, a number that is not linear in the number of samples; {ADVICE}"
                raise refused(user, accepted)
            return size
        target = self._target(node, reads, user)
        if target is None or target == self._found.layouts[node]:
            return ResultRef(self._found.numbers[node])
        return ResultRef(self._found.numbers[node], self._edge(node, target, user))

    def _target(self, node: fx.Node, reads: ValueLocation, user: fx.Node) -> ValueLocation | None:
        """Return the layout in which a step needs a value, or None if as it is."""
        layout = self._found.layouts[node]
        # Every worker computes such a value itself.
        if layout == SAME:
            return None
        by_shares = reads in (BATCH, SAME, OWN)
        if layout == OWN:
            if by_shares:
                return None
            raise refused(
                user,
                f"needs {node.name} ({node.meta['line']}), which each worker has computed from its own share of the "
                f"batch and which has no sample dimension any more; {ADVICE}",
            )
        if not by_shares:
            return reads
        if layout == BATCH:
            return None
        # A value in parts without samples cannot be sent by samples, so each worker gets all of it.
        batched = node not in self._found.forms or self._found.forms[node].shape.batch >= 0
        return BATCH if batched else WHOLE

    def _edge(self, node: fx.Node, target: ValueLocation, user: fx.Node) -> int:
        # A value that several steps need in the same layout is moved once.
        key = (self._found.numbers[node], target)
        if key not in self._edges:
            found = self._found.forms.get(node)
            why = "it is not a single tensor" if found is None else found.odd
            if found is None or why:
                made = f"{node.name} ({node.meta['line']})"
                raise refused(user, f"needs {made} from other workers, and it cannot be cut: {why}; {ADVICE}")
            self._edges[key] = LayoutEdge(len(self._edges), key[0], self._found.layouts[node], target, found.shape)
        return self._edges[key].number

    # --- checks ----------------------------------------------------------------------------------------------------

    def _check_writes(self) -> None:
        """Refuse writes in place to a value that is also moved and used elsewhere."""
        # Other workers would keep the value of before the write.
        moved = {number for number, _ in self._edges}
        for node in self._graph.nodes:
            if node.op == "output":
                continue
            over = written(node, self._module(node))
            if over is not None and len(over.users) > 1 and self._found.numbers.get(over) in moved:
                raise refused(node, f"writes to {over.name} in place, but other workers need it; make a new tensor")


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in the order of memory; () if it is contiguous."""
    strides: tuple[int, ...] = tensor.stride()
    return () if tensor.is_contiguous() else tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


def _sized(node: fx.Node) -> bool:
    """Return whether a node is a number or choice made of sizes, which needs no step."""
    return all(isinstance(value, bool | int | float) for value in node.meta["values"])
