"""Local SGD with an outer optimizer (DiLoCo) by hand: one process of plain PyTorch, with the bits of a job."""

import copy
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def train(
    model: nn.Module,
    inner: Callable[[Any], torch.optim.Optimizer],
    outer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    batches: Sequence[Batches],
    sync_freq: int,
) -> None:
    """Train one island on each list of batches; `outer` changes the model once in `sync_freq` steps of each."""
    islands = [copy.deepcopy(model) for _ in batches]
    optimizers = [inner(island.parameters()) for island in islands]
    for first in range(0, len(batches[0]), sync_freq):
        for island, optimizer, mine in zip(islands, optimizers, batches, strict=True):
            for x, y in mine[first : first + sync_freq]:
                optimizer.zero_grad()
                loss_of(island(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for agreed, *own in zip(model.parameters(), *(i.parameters() for i in islands), strict=True):
                agreed.grad = reduce(torch.add, [agreed - p for p in own]) / len(own)
            if full := first + sync_freq <= len(batches[0]):
                outer.step()
            for agreed, *own in zip(model.parameters(), *(i.parameters() for i in islands), strict=True):
                agreed.sub_(0.0 if full else agreed.grad)  # a last round of fewer steps is the mean of the islands
                for p in own:
                    p.copy_(agreed)
