"""Marks of the tensors that are merged radially, which a worker tells the servers.

The marks are settings of the outer optimizer's groups, and so a part of the model's description.
"""

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import Merge

MERGE = "merge"
"""The setting of a group with tensors that are not merged by their mean."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def embeddings_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings: each of their rows is a vector by itself."""
    return [p for module in model.modules() if isinstance(module, _EMBEDDINGS) for p in module.parameters()]


def mark_radial(outer: Optimizer, averaged: Collection[nn.Parameter]) -> None:
    """Put the tensors that are merged radially into marked groups of their own.

    Tensors of one dimension are merged by their mean.

    averaged: other tensors that are merged by their mean.
    """
    without = set(map(id, averaged))
    for group in tuple(outer.param_groups):
        radial = [p for p in group["params"] if p.dim() > 1 and id(p) not in without]
        marked = set(map(id, radial))
        rest = [p for p in group["params"] if id(p) not in marked]
        if radial and rest:
            group["params"] = rest
            outer.add_param_group({**group, "params": radial, MERGE: Merge.kRadial.value})
        elif radial:
            group[MERGE] = Merge.kRadial.value
