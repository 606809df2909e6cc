"""A module whose rows are no parameters of the model."""

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer


class RowModule(nn.Module, ABC):
    """A module whose rows are stored outside the model's parameters, such as `tt.Embedding`."""

    @abstractmethod
    def follow(self, optimizer: Optimizer) -> None:
        """In an ordinary process: `step()` updates the rows, and `zero_grad()` drops their gradients."""
