"""A few steps with an optimizer of the user's own that unpickles where it computes, which is in the servers.

The servers import this file as a module.
"""

import pickle
from fractions import Fraction

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

_BYTES = pickle.dumps(Fraction(1, 3))


class Unpickling(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        pickle.loads(_BYTES)
        super().step()


if __name__ == "__main__":
    from tests.programs.pickled import Unpickling as Imported

    model = nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.ones(12, 3)), batch_size=2)
    model, optimizer, loader = tt.prepare(model, Imported(model.parameters(), lr=0.1), data)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
