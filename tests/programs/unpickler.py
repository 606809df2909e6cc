"""An optimizer of the user's own that unpickles where it computes, which is in the servers."""

import pickle
from fractions import Fraction

import torch

_BYTES = pickle.dumps(Fraction(1, 3))


class Unpickling(torch.optim.SGD):
    def step(self, closure: object = None) -> None:
        pickle.loads(_BYTES)
        super().step()
