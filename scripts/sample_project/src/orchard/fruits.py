"""Measured fruits: how heavy, how long and how red each is, and whether it is an apple or a pear."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def fruits(count: int, seed: int) -> TensorDataset:
    """Return measures that are made up, and 1 for each pear."""
    made = torch.Generator().manual_seed(seed)
    pear: Tensor = torch.randint(2, (count,), generator=made)
    means = torch.tensor([[0.0, -1.0, 1.0], [0.5, 1.0, -1.0]])
    return TensorDataset(means[pear] + 0.7 * torch.randn(count, 3, generator=made), pear)
