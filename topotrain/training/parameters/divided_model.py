"""A model that is divided over the workers of a group."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.worker import Worker

IN_PARTS = "is in parts on several workers: call tt.state_dict(model) on all workers of the group"
STATE_IN_PARTS = "belongs to the parts of a split model, so no other optimizer could load it: it stays on the servers"


class DividedModel(ABC):
    """A model of which this worker holds a part, made by `PrepareExtension.divide`."""

    parts: ModelParts
    """The part of this worker."""
    over: bool
    """Whether the job has ended and the model is whole again."""
    metadata: dict[str, str]
    """Metadata of a file that holds what `gather` returns."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of parameters and buffers of the whole model."""

    @property
    @abstractmethod
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """All names of each tensor that `gather` returns, by its first name."""

    @abstractmethod
    def start(self, worker: Worker) -> None:
        """Connect the workers of the group. The model can be called afterwards."""

    @abstractmethod
    def weight_said(self) -> None:
        """The script sets the next weight. Raises RuntimeError after its forward."""

    @abstractmethod
    def is_of(self, model: nn.Module) -> bool:
        """Whether this is the division of that model."""

    @abstractmethod
    def check_call(self, module: nn.Module) -> None:
        """Raise ConfigError if the script cannot call this module of the model alone."""

    @abstractmethod
    def gather(self, what: str) -> dict[str, torch.Tensor] | None:
        """The whole model by first names on worker 0 of the group, None on the others.

        All workers call it together.

        Args:
            what: what the workers do, for the error where another worker goes on without the call.
        """

    @abstractmethod
    def whole(self, worker: Worker) -> ModelParts:
        """Worker (0,0), at the end: take the job's result and make the model whole again."""
