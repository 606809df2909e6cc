"""Location and layout of every step of a forward.

A module is computed where the job file or the script has placed it. A step that is not placed follows its inputs.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_model import CapturedForward
from topotrain.parallel.capture.op_rules import counts, each_channel, each_element, reshapes, takes_apart
from topotrain.parallel.capture.shape_propagation import TensorShape, form
from topotrain.parallel.placement.assign_modules import Assignment, location_of
from topotrain.parallel.placement.parameter_owners import cuts_of
from topotrain.parallel.program.split_program import LocationKind, SymbolicShape, ValueLocation

BATCH, WHOLE, SAME, OWN = (
    ValueLocation(where) for where in (LocationKind.BATCH, LocationKind.WHOLE, LocationKind.SAME, LocationKind.OWN)
)
_BOTH = (nn.BatchNorm1d, nn.BatchNorm2d)  # when they are cut, their input is cut in the same way
ADVICE = "place what makes and uses it on one worker with tt.device"


def has_tensors(node: fx.Node) -> bool:
    """Return whether a node's result contains a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta["values"][0]))


def refused(node: fx.Node, accepted: str) -> ConfigError:
    """Return the error for a node that cannot be split, with the user's line."""
    name = str(node.target) if node.op == "call_module" else node.name
    return ConfigError(f"model.forward: {name}", None, accepted, node.meta.get("line", ""))


class InferredLayouts:
    """Numbers, layouts and shapes of the nodes that are steps already.

    Args:
        before: the capture made before parameters were distributed to the workers.
        counted: the numbers of samples with which values were computed.
    """

    def __init__(
        self,
        before: CapturedForward,
        assignments: Mapping[str, Assignment],
        model: nn.Module,
        counted: tuple[int, ...],
        workers: int,
    ) -> None:
        self._before = before
        self._assignments = assignments
        self._model = model
        self._counts = counted
        self._workers = workers
        self.numbers: dict[fx.Node, int] = {}
        self.layouts: dict[fx.Node, ValueLocation] = {}
        self.forms: dict[fx.Node, TensorShape] = {}

    def form(self, node: fx.Node, module: nn.Module | None) -> TensorShape:
        """Return the shape of a node's result.

        It is odd, too, if the samples are no longer contiguous and in order.
        """
        found = form(node.meta["values"], self._counts)
        if found.odd or found.shape.batch < 0:
            return found
        if counts(node):
            return replace(found, odd="its elements depend on the position of the sample in the batch")
        sources = [n for n in node.all_input_nodes if n in self.forms and self.forms[n].shape.batch >= 0]
        if reshapes(node, module) and sources:
            # A reshape may move the batch dimension, as long as the samples stay in as many runs of memory.
            if _ahead(self.forms[sources[0]].shape) != _ahead(found.shape):
                return replace(found, odd="its samples are interleaved")
        elif sources and found.shape.per_sample not in {self.forms[n].shape.per_sample for n in sources}:
            return replace(found, odd="its samples are not contiguous")
        return replace(found, odd=next((self.forms[n].odd for n in sources if self.forms[n].odd), ""))

    def place(self, node: fx.Node, module: nn.Module | None) -> tuple[ValueLocation, ValueLocation]:
        """Return the layout of a node's result, and the layout that its inputs need."""
        if node.op == "placeholder":
            return BATCH, BATCH
        if node.op == "get_attr":
            layout = self._attribute(str(node.target))
            return layout, layout
        if takes_apart(node):
            layout = self.layouts[node.args[0]]  # type: ignore[index]
            return layout, layout
        assigned = self._assigned(str(node.target), module)
        if module is not None and assigned is not None:
            self._check_seen(node, assigned)
            if assigned.location is not None:
                return (ValueLocation(LocationKind.AT, worker=assigned.location),) * 2
            if assigned.dim == 1 and cuts_of(module):
                layout = self._features(node, module)
                # Other cut modules mix features, so each worker reads all of them and computes some of the next.
                return layout, layout if type(module) in _BOTH else WHOLE
            if assigned.dim != 1 or any(True for _ in module.parameters()):
                return BATCH, BATCH
        layout = self._propagate(node, module)
        return layout, layout

    def _assigned(self, name: str, module: nn.Module | None) -> Assignment | None:
        """Return a module's assignment, which may be that of the layer around it."""
        if module is not None and any(True for _ in (*module.parameters(), *module.buffers())):
            # A layer that is traced through may be assigned as a whole, and its inner modules follow it.
            while name not in self._assignments and name:
                name = name.rpartition(".")[0]
        return self._assignments.get(name)

    def _attribute(self, name: str) -> ValueLocation:
        owner, _, own = name.rpartition(".")
        assigned = self._assignments.get(name) or self._assigned(owner, self._model.get_submodule(owner))
        if assigned is None:
            return SAME
        if assigned.location is not None:
            return ValueLocation(LocationKind.AT, worker=assigned.location)
        cut = cuts_of(self._model.get_submodule(owner)).get(own, -1) if assigned.dim == 1 else -1
        return ValueLocation(LocationKind.FEATURE, cut) if cut >= 0 else SAME

    def _features(self, node: fx.Node, module: nn.Module) -> ValueLocation:
        shape = form(node.meta["values"], self._counts).shape
        dim = len(shape.sizes) - 1 if isinstance(module, nn.Linear | nn.Embedding) else 1
        if shape.batch == dim:
            raise refused(node, f"its features are in dimension {dim}, where its samples are")
        if shape.sizes[dim] < self._workers:
            accepted = f"has {shape.sizes[dim]} features: fewer than {self._workers} workers of a group"
            raise refused(node, accepted)
        return ValueLocation(LocationKind.FEATURE, dim)

    def _propagate(self, node: fx.Node, module: nn.Module | None) -> ValueLocation:
        location = location_of(node.meta["device"], self._workers, node.meta["line"])
        if location is not None:
            return ValueLocation(LocationKind.AT, worker=location)
        inputs = [n for n in node.all_input_nodes if has_tensors(n)]
        layouts = [self.layouts[n] for n in inputs]
        if layouts and self._stays_apart(node, module, inputs):
            return layouts[0]
        there = [(self.numbers[n], layout) for n, layout in zip(inputs, layouts) if layout.where is LocationKind.AT]
        # With inputs on several workers the step is computed where the last of them was made.
        if there:
            return max(there, key=lambda pair: pair[0])[1]
        if any(layout.where in (LocationKind.BATCH, LocationKind.FEATURE) for layout in layouts):
            return BATCH
        return OWN if OWN in layouts else SAME

    def _stays_apart(self, node: fx.Node, module: nn.Module | None, inputs: list[fx.Node]) -> bool:
        """Return whether each worker can compute the node on its own features."""
        layout = self.layouts[inputs[0]]
        if layout.where is not LocationKind.FEATURE or any(self.layouts[n] != layout for n in inputs):
            return False
        if each_channel(node, module):
            return layout.dim == 1 and isinstance(node.meta["values"][0], torch.Tensor)
        shapes = {self.forms[n].shape.sizes for n in inputs}
        return each_element(node, module) and shapes == {tuple(form(node.meta["values"], self._counts).shape.sizes)}

    def settled(self, node: fx.Node, layout: ValueLocation, found: TensorShape) -> ValueLocation:
        """Return the final layout of a tensor, once it is known whether it has samples."""
        batched = found.shape.batch >= 0
        # A value made from constants may have samples, too, such as torch.zeros(x.shape[0]).
        if layout in (SAME, OWN) and (batched or found.odd):
            layout = BATCH
        if layout != BATCH:
            return layout
        if not batched and found.odd:
            raise refused(node, f"cannot be computed by shares of the batch: {found.odd}; {ADVICE}")
        if batched:
            return BATCH
        own = any(self.layouts.get(n) == OWN or self._shared(n) for n in node.all_input_nodes)
        return OWN if own else SAME

    def _shared(self, node: fx.Node) -> bool:
        """Return whether a step computed by shares sees only its own share of the value."""
        return self.layouts.get(node) not in (None, SAME) and (
            node not in self.forms or self.forms[node].shape.batch >= 0
        )

    def _check_seen(self, node: fx.Node, assigned: Assignment) -> None:
        """Refuse a scope around a module's call that the first capture did not reach."""
        # The parameters were distributed by the first capture, without the scope.
        if not self._before.unfinished or assigned.location is not None:
            return
        if location_of(node.meta["device"], self._workers, node.meta["line"]) is not None:
            accepted = (
                f"the scope around the call of {node.target} was found too late: the capture before the first batch "
                f"ended at {self._before.unfinished}; put the scope around the making of the module instead"
            )
            raise ConfigError("tt.device", node.meta["device"], accepted, node.meta["line"])


def _ahead(shape: SymbolicShape) -> int:
    """Return the number of separate runs of samples in memory."""
    return int(torch.Size(shape.sizes[: shape.batch]).numel())
