"""Numbers and workers of a model's state, for its graph description."""

from dataclasses import dataclass, field

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.parallel.capture import device_scopes
from topotrain.parallel.capture.source_location import user_line
from topotrain.parallel.placement.assign_modules import location_of
from topotrain.parallel.remote.graph_description import StateDescription, TensorForm
from topotrain.training.parameters.flat_parameters import HOME

_MAX_CONSTANT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class TaskCluster:
    """The numbers of tasks, and the worker that computes calls without a scope."""

    workers: int
    servers: int
    first: int = 0


@dataclass(slots=True)
class ModelState:
    """The tensors that a model keeps between calls: parameters, buffers and constants.

    `worker` has the worker of a tensor where it is known. Other tensors get the worker of their first use.
    """

    model: nn.Module
    cluster: TaskCluster
    tensors: list[torch.Tensor] = field(default_factory=list)
    worker: dict[int, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    sealed: bool = False

    @staticmethod
    def of(model: nn.Module, cluster: TaskCluster) -> "ModelState":
        """Number the parameters and buffers. Raises ConfigError for a wrong device."""
        kept = ModelState(model, cluster)
        found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in found:
            kept.names[name] = kept.add(tensor, name)
        return kept

    def add(self, tensor: torch.Tensor, name: str = "") -> int:
        """Return the number of a tensor; a new tensor is added."""
        if id(tensor) not in self.numbers:
            # The states have been described to the workers by then.
            if self.sealed:
                accepted = "uses a tensor that the first call of the model did not have: register it as a buffer"
                raise ConfigError("model.forward", None, accepted, user_line())
            self._check(tensor, name)
            number = self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            place = location(getattr(tensor, device_scopes.PLACE, ""), self.cluster, name)
            if place is not None:
                self.worker[number] = place
        return self.numbers[id(tensor)]

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        home = getattr(tensor, HOME, -1)
        if home >= self.cluster.servers:
            device_scopes.complete(
                device_scopes.DeviceScope("ps", task=home), self.cluster.workers, self.cluster.servers
            )
        if tensor.device.type != "cpu":
            raise ConfigError("model", name, f"is on {tensor.device}: a session takes models on the CPU")
        if tensor.layout is not torch.strided:
            raise ConfigError("model", name, "must be a dense tensor")
        if not name and tensor.nbytes > _MAX_CONSTANT:
            accepted = f"uses a tensor of {tensor.nbytes:,} bytes that is no parameter and no buffer: register it"
            raise ConfigError("model.forward", None, accepted, user_line())

    def states(self) -> tuple[StateDescription, ...]:
        """Return all states and allow no new ones."""
        self.sealed = True
        found = []
        for number, tensor in enumerate(self.tensors):
            # No call has used the tensor, so it may be anywhere.
            worker = self.worker.setdefault(number, self.cluster.first)
            graded = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
            found.append(StateDescription(TensorForm.of(tensor), worker, graded, getattr(tensor, HOME, -1)))
        return tuple(found)


def location(name: str | None, cluster: TaskCluster, where: str = "") -> int | None:
    """Return the worker that a device name means, or None if the name leaves it open.

    Raises:
        ConfigError: the device does not exist.
    """
    if not name or device_scopes.parse(name).job == "ps":
        return None
    return location_of(name, cluster.workers, where, ("CPU",))
