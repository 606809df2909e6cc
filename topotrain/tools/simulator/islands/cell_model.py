"""The model of simulated workers with an outer optimizer: parameters of cells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from topotrain.config.job import Job
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Topology
from topotrain.core.model.schema import Schema
from topotrain.core.optim.adapter import HyperEncoder, describe_all
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of


class CellModel(nn.Module):
    """Parameters of these lengths, which begin with zeros."""

    def __init__(self, schema: Sequence[Parameter]) -> None:
        super().__init__()
        for parameter in schema:
            self.register_parameter(parameter.name, nn.Parameter(torch.zeros(parameter.shape)))


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """The description of a model with an outer optimizer.

    hyper: the hyper-parameters of the outer optimizers, as a commit has them.
    """

    schema: Schema
    slice_map: SliceMap
    hyper: bytes


def outer_plan(job: Job, topology: Topology, parameters: Sequence[Parameter]) -> OuterPlan:
    """Describe a `CellModel` of these parameters, as a worker of the job does."""
    model = CellModel(parameters)
    inner = InnerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), job.cluster, model.named_parameters())
    parts = describe_model(model, (), inner.optimizers)
    spec = replace(describe_all(inner.optimizers, parts.tensors, job.cluster.slicing), outer=True)
    return OuterPlan(*plan_of(topology, parts, spec), HyperEncoder(*inner.optimizers)())
