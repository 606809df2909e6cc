"""A module with rows that are no parameters of the model."""

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer


class RowModule(nn.Module, ABC):
    """A module with rows outside the model's parameters, such as `tt.Embedding`."""

    @abstractmethod
    def follow(self, optimizer: Optimizer) -> None:
        """In an ordinary process: let `step()` update rows, `zero_grad()` clear them."""
