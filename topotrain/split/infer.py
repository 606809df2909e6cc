"""From a captured forward to the cut graph: where every value is, and what has to travel.

What a module, a scope or nobody says decides where a step is computed; where an input is needed otherwise than it is,
an edge moves it. The same for all workers, so nothing here asks which worker it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from topotrain.job import ConfigError
from topotrain.split.assign import Assignment, location_of
from topotrain.split.capture import Captured, trace
from topotrain.split.division import cuts_of
from topotrain.split.program import Edge, Kind, Layout, Program, Ref, Shape, Step, Where
from topotrain.split.rules import (
    counts,
    draws_inside,
    draws_masks,
    each_channel,
    each_element,
    reshapes,
    takes_apart,
    written,
)
from topotrain.split.values import Bench, Form, form, number

BATCH, WHOLE, SAME, OWN = (Layout(where) for where in (Where.BATCH, Where.WHOLE, Where.SAME, Where.OWN))
_KINDS = {
    "placeholder": Kind.INPUT,
    "call_module": Kind.MODULE,
    "call_function": Kind.FUNCTION,
    "call_method": Kind.METHOD,
    "get_attr": Kind.ATTRIBUTE,
}
_BOTH = (nn.BatchNorm1d, nn.BatchNorm2d)  # cut, and what they read is cut in the same way
_CHANCE = (
    "draws random numbers, other ones on every worker; draw them outside and pass them as an argument "
    "(attention's dropout: pass dropout_p by its name)"
)
_ADVICE = "place what makes and uses it on one worker with tt.device"


def program(
    captured: Captured,
    assignments: Mapping[str, Assignment],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    samples: int,
    workers: int,
    training: bool = True,
) -> Program:
    """Cut a model's forward for such arguments.

    Args:
        captured: by `capture`, while the model was still whole.
        assignments: of its modules, by `assign.assignments`.
        model: whole or localised; parameters may be on the meta device. Nothing of its size is allocated.
        args, kwargs: of a call of the model; of tensors only sizes, dtype and device count.
        samples: the number of samples in them. In each tensor the first dimension of this size counts them, and a
            tensor that has none is the same for all samples.
        workers: of a group.
        training: what `self.training` is where the forward looks at it or hands it on (`Captured.by_mode`); a
            forward that does not needs one program for both.

    Raises:
        ConfigError: the forward cannot be captured, or a value has to travel that cannot; it names the user's line.
    """
    bench = Bench(model, captured.stored, samples, _device(captured, (args, kwargs)))
    found = trace(model, captured.stored, bench, args, kwargs, training)
    return _Cut(found, captured, assignments, model, bench.counts, workers).program()


def _device(captured: Captured, arguments: Any) -> torch.device:
    given = (leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    held = (stored.device for stored in captured.stored.values() if stored.device.type != "meta")
    return next(held, None) or next(given, None) or torch.device("cpu")


def _tensors(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta["values"][0]))


class _Cut:
    def __init__(
        self,
        found: Captured,
        before: Captured,
        assignments: Mapping[str, Assignment],
        model: nn.Module,
        counted: tuple[int, ...],
        workers: int,
    ) -> None:
        self._graph = found.graph
        self._before = before
        self._assignments = assignments
        self._model = model
        self._counts = counted
        self._workers = workers
        self._steps: list[Step] = []
        self._edges: dict[tuple[int, Layout], Edge] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._layouts: dict[fx.Node, Layout] = {}
        self._forms: dict[fx.Node, Form] = {}

    def program(self) -> Program:
        self._drop_unused()
        inputs = []
        output: Any = None
        for node in self._graph.nodes:
            if node.op == "output":
                output = self._arguments(node.args[0], BATCH, node)
            elif _tensors(node) or node.op == "placeholder" or not _sized(node):
                inputs += [str(node.target)] if node.op == "placeholder" else []
                self._add(node)
        self._check_writes()
        return Program(self._workers, tuple(self._steps), tuple(self._edges.values()), tuple(inputs), output)

    def _drop_unused(self) -> None:
        for node in reversed(list(self._graph.nodes)):
            looks = node.op == "get_attr" or (node.op.startswith("call") and (takes_apart(node) or not _tensors(node)))
            if looks and not node.users:
                self._graph.erase_node(node)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._model.get_submodule(str(node.target)) if node.op == "call_module" else None

    # --- one step --------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        module = self._module(node)
        random = draws_masks(node, module)
        if node.meta["draws"] and not random and not draws_inside(node, module):
            raise self._refused(node, _CHANCE)
        layout, reads = self._place(node, module)
        shape = None
        if isinstance(node.meta["values"][0], torch.Tensor):
            found = self._form(node, module)
            layout = self._settled(node, layout, found)
            self._forms[node] = found
            shape = found.shape
        args = self._arguments(node.args, reads, node)
        kwargs = self._arguments(dict(node.kwargs), reads, node)
        self._layouts[node] = layout
        self._numbers[node] = len(self._steps)
        step = Step(
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
        )
        self._steps.append(step)

    def _form(self, node: fx.Node, module: nn.Module | None) -> Form:
        """Its shape; odd, too, if its samples do not lie one after another any more."""
        found = form(node.meta["values"], self._counts)
        if found.odd or found.shape.batch < 0:
            return found
        if counts(node):
            return replace(found, odd="its elements count the samples, from the first on")
        sources = [n for n in node.all_input_nodes if n in self._forms and self._forms[n].shape.batch >= 0]
        if reshapes(node, module) and sources:
            if _ahead(self._forms[sources[0]].shape) != _ahead(found.shape):
                return replace(found, odd="its samples lie interleaved")
        elif sources and found.shape.per_sample not in {self._forms[n].shape.per_sample for n in sources}:
            return replace(found, odd="its samples do not lie one after another")
        return replace(found, odd=next((self._forms[n].odd for n in sources if self._forms[n].odd), ""))

    def _place(self, node: fx.Node, module: nn.Module | None) -> tuple[Layout, Layout]:
        """Where it is computed, and the layout that its inputs need."""
        if node.op == "placeholder":
            return BATCH, BATCH
        if node.op == "get_attr":
            layout = self._attribute(str(node.target))
            return layout, layout
        if takes_apart(node):
            layout = self._layouts[node.args[0]]  # type: ignore[index]
            return layout, layout
        assigned = self._said(str(node.target), module)
        if module is not None and assigned is not None:
            self._check_seen(node, assigned)
            if assigned.location is not None:
                return (Layout(Where.AT, worker=assigned.location),) * 2
            if assigned.dim == 1 and cuts_of(module):
                layout = self._features(node, module)
                return layout, layout if type(module) in _BOTH else WHOLE
            if assigned.dim != 1 or any(True for _ in module.parameters()):
                return BATCH, BATCH
        layout = self._follow(node, module)
        return layout, layout

    def _said(self, name: str, module: nn.Module | None) -> Assignment | None:
        """A module's assignment; what is inside a layer that is one node has the layer's."""
        if module is not None and any(True for _ in (*module.parameters(), *module.buffers())):
            while name not in self._assignments and name:
                name = name.rpartition(".")[0]
        return self._assignments.get(name)

    def _attribute(self, name: str) -> Layout:
        owner, _, own = name.rpartition(".")
        assigned = self._assignments.get(name) or self._said(owner, self._model.get_submodule(owner))
        if assigned is None:
            return SAME
        if assigned.location is not None:
            return Layout(Where.AT, worker=assigned.location)
        cut = cuts_of(self._model.get_submodule(owner)).get(own, -1) if assigned.dim == 1 else -1
        return Layout(Where.FEATURE, cut) if cut >= 0 else SAME

    def _features(self, node: fx.Node, module: nn.Module) -> Layout:
        shape = form(node.meta["values"], self._counts).shape
        dim = len(shape.sizes) - 1 if isinstance(module, nn.Linear | nn.Embedding) else 1
        if shape.batch == dim:
            raise self._refused(node, f"its features are in dimension {dim}, where its samples are")
        if shape.sizes[dim] < self._workers:
            accepted = f"has {shape.sizes[dim]} features: fewer than {self._workers} workers of a group"
            raise self._refused(node, accepted)
        return Layout(Where.FEATURE, dim)

    def _follow(self, node: fx.Node, module: nn.Module | None) -> Layout:
        location = location_of(node.meta["device"], self._workers, node.meta["line"])
        if location is not None:
            return Layout(Where.AT, worker=location)
        inputs = [n for n in node.all_input_nodes if _tensors(n)]
        layouts = [self._layouts[n] for n in inputs]
        if layouts and self._stays_apart(node, module, inputs):
            return layouts[0]
        there = [(self._numbers[n], layout) for n, layout in zip(inputs, layouts) if layout.where is Where.AT]
        if there:
            return max(there, key=lambda pair: pair[0])[1]
        if any(layout.where in (Where.BATCH, Where.FEATURE) for layout in layouts):
            return BATCH
        return OWN if OWN in layouts else SAME

    def _stays_apart(self, node: fx.Node, module: nn.Module | None, inputs: list[fx.Node]) -> bool:
        """Whether each worker can compute it on its own features."""
        layout = self._layouts[inputs[0]]
        if layout.where is not Where.FEATURE or any(self._layouts[n] != layout for n in inputs):
            return False
        if each_channel(node, module):
            return layout.dim == 1 and isinstance(node.meta["values"][0], torch.Tensor)
        shapes = {self._forms[n].shape.sizes for n in inputs}
        return each_element(node, module) and shapes == {tuple(form(node.meta["values"], self._counts).shape.sizes)}

    def _settled(self, node: fx.Node, layout: Layout, found: Form) -> Layout:
        """The layout of a tensor whose shape is known: with samples or without."""
        batched = found.shape.batch >= 0
        if layout in (SAME, OWN) and (batched or found.odd):
            layout = BATCH
        if layout != BATCH:
            return layout
        if not batched and found.odd:
            raise self._refused(node, f"cannot be computed by shares of the batch: {found.odd}; {_ADVICE}")
        if batched:
            return BATCH
        own = any(self._layouts.get(n) == OWN or self._shared(n) for n in node.all_input_nodes)
        return OWN if own else SAME

    def _shared(self, node: fx.Node) -> bool:
        """Whether a step computed by shares sees only its own share of it."""
        return self._layouts.get(node) not in (None, SAME) and (
            node not in self._forms or self._forms[node].shape.batch >= 0
        )

    # --- what it reads ---------------------------------------------------------------------------------------------

    def _arguments(self, value: Any, reads: Layout, user: fx.Node) -> Any:
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

    def _argument(self, node: fx.Node, reads: Layout, user: fx.Node) -> Any:
        if node not in self._numbers:
            size = number(node.meta["values"], self._counts) if _whole_number(node) else None
            if size is None:
                accepted = f"needs {node.name}, a number that is not so many per sample, plus a constant; {_ADVICE}"
                raise self._refused(user, accepted)
            return size
        target = self._target(node, reads, user)
        if target is None or target == self._layouts[node]:
            return Ref(self._numbers[node])
        return Ref(self._numbers[node], self._edge(node, target, user))

    def _target(self, node: fx.Node, reads: Layout, user: fx.Node) -> Layout | None:
        """The layout that it is needed in; None: as it is."""
        layout = self._layouts[node]
        if layout == SAME:
            return None
        by_shares = reads in (BATCH, SAME, OWN)
        if layout == OWN:
            if by_shares:
                return None
            raise self._refused(
                user,
                f"needs {node.name} ({node.meta['line']}), which each worker has computed from its own share of the "
                f"batch and which has no sample dimension any more; {_ADVICE}",
            )
        if not by_shares:
            return reads
        if layout == BATCH:
            return None
        batched = node not in self._forms or self._forms[node].shape.batch >= 0
        return BATCH if batched else WHOLE

    def _edge(self, node: fx.Node, target: Layout, user: fx.Node) -> int:
        key = (self._numbers[node], target)
        if key not in self._edges:
            found = self._forms.get(node)
            why = "it is no single tensor" if found is None else found.odd
            if found is None or why:
                made = f"{node.name} ({node.meta['line']})"
                raise self._refused(user, f"needs {made} from other workers, and it cannot be cut: {why}; {_ADVICE}")
            self._edges[key] = Edge(len(self._edges), key[0], self._layouts[node], target, found.shape)
        return self._edges[key].number

    # --- what cannot be --------------------------------------------------------------------------------------------

    def _check_seen(self, node: fx.Node, assigned: Assignment) -> None:
        """A scope around a module's call counts only if it was seen before the parameters were given away."""
        if not self._before.unfinished or assigned.location is not None:
            return
        if location_of(node.meta["device"], self._workers, node.meta["line"]) is not None:
            accepted = (
                f"the scope around the call of {node.target} was found too late: the capture before the first batch "
                f"ended at {self._before.unfinished}; put the scope around the making of the module instead"
            )
            raise ConfigError("tt.device", node.meta["device"], accepted, node.meta["line"])

    def _check_writes(self) -> None:
        """A value that is written over must not be on its way, or needed as it was."""
        moved = {number for number, _ in self._edges}
        for node in self._graph.nodes:
            if node.op == "output":
                continue
            over = written(node, self._module(node))
            if over is not None and len(over.users) > 1 and self._numbers.get(over) in moved:
                raise self._refused(node, f"writes over {over.name}, which other workers need, too; make a new tensor")

    def _refused(self, node: fx.Node, accepted: str) -> ConfigError:
        name = str(node.target) if node.op == "call_module" else node.name
        return ConfigError(f"model.forward: {name}", None, accepted, node.meta.get("line", ""))


def _sized(node: fx.Node) -> bool:
    """Whether it is a number, or a choice, made of sizes: no step of its own."""
    return all(isinstance(value, bool | int | float) for value in node.meta["values"])


def _whole_number(node: fx.Node) -> bool:
    return all(type(value) is int for value in node.meta["values"])


def _ahead(shape: Shape) -> int:
    """How many runs of samples there are, one after another."""
    return int(torch.Size(shape.sizes[: shape.batch]).numel())
