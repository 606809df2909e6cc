"""The model of simulated workers with an outer optimizer: parameters of cells."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from topotrain.config.job import Job
from topotrain.config.sharding import Parameter, SliceMap
from topotrain.config.topology import Topology
from topotrain.core.model.schema import Schema
from topotrain.core.optim.adapter import describe_all
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of


def cell_model(schema: Sequence[Parameter]) -> nn.ParameterDict:
    """Parameters of these lengths, which begin with zeros."""
    return nn.ParameterDict({each.name: torch.zeros(each.shape) for each in schema})


def outer_plan(job: Job, topology: Topology, parameters: Sequence[Parameter]) -> tuple[Schema, SliceMap]:
    """Describe a `cell_model` of these parameters, as a worker of the job does."""
    model = cell_model(parameters)
    inner = InnerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), job.cluster, model.named_parameters())
    parts = describe_model(model, (), inner.optimizers)
    return plan_of(
        topology, parts, replace(describe_all(inner.optimizers, parts.tensors, job.cluster.slicing), outer=True)
    )
