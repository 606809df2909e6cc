"""Costs and memory of a split model in a job, and the check that they fit."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset

from topotrain.config.job import Job, Schedule
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Topology
from topotrain.parallel.api.example_inputs import ExampleInputs, inputs_of
from topotrain.parallel.capture.capture_model import CapturedForward
from topotrain.parallel.estimate.cost_report import CostReport, buffer_bytes, estimate_costs
from topotrain.parallel.estimate.memory_check import check, memory_limits
from topotrain.parallel.estimate.process_memory import ProcessNeed, WorkerLoad, loads, needs
from topotrain.parallel.placement.assign_modules import Assignment
from topotrain.parallel.placement.parameter_owners import ParameterOwners, divide
from topotrain.parallel.program.build_program import program
from topotrain.parallel.runtime.local_model import described
from topotrain.training.data.sampling import cut


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model. Only sizes, dtypes and devices of its tensors matter.

    Attributes:
        samples: number of samples in the arguments.
        shares: each worker's samples in a step.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    samples: int
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A model to split, with all that a placement and its memory are computed from.

    Attributes:
        captured: the captured forward of `model`.
        found: the assignments of the job file and the script, by `assign_modules.assignments`.
        call: the call of the forward. None: its shapes are not known.
        state_factor: elements of optimizer state per element of a parameter.
    """

    job: Job
    topology: Topology
    model: nn.Module
    captured: CapturedForward
    found: Mapping[str, Assignment]
    call: ModelCall | None
    state_factor: float = 0.0


def costs_of(asked: PlacementRequest, found: Mapping[str, Assignment]) -> CostReport:
    """Compute the cost of these assignments. Raises ConfigError if they do not fit."""
    call, workers = asked.call, asked.topology.workers_per_group
    assert call is not None
    made = program(
        asked.captured, found, asked.model, call.args, call.kwargs, call.samples, workers, asked.model.training
    )
    division = divide(asked.model, found, workers)
    # Of the class, because the `forward` of the object may have been replaced.
    named = inspect.signature(type(asked.model).forward).bind(asked.model, *call.args, **call.kwargs).arguments
    return estimate_costs(made, asked.model, division, call.shares, asked.job.microbatches, named)


def needs_of(
    asked: PlacementRequest, found: Mapping[str, Assignment], costs: CostReport | None
) -> tuple[ProcessNeed, ...]:
    """Compute the memory of all processes, without activations if `costs` is None."""
    division = divide(asked.model, found, asked.topology.workers_per_group)
    if costs is None:
        loaded = tuple(WorkerLoad(buffer_bytes(division, w)) for w in range(asked.topology.workers_per_group))
    else:
        loaded = loads(costs, asked.job.schedule)
    return needs(asked.job, asked.topology, schema_of(division), asked.state_factor, loaded)


def schema_of(division: ParameterOwners) -> tuple[Parameter, ...]:
    """Return the schema: one entry for each share of a parameter."""
    return tuple(described(whole, share) for whole in division.parameters for share in whole.shares)


def call_of(job: Job, model: nn.Module, given: ExampleInputs) -> ModelCall:
    """Return a call for the batch of a group, with the samples of each worker."""
    cluster, workers = job.cluster, job.cluster.nworkers_per_group
    batch = given.samples * (workers if job.per_worker_batch else 1)
    # BatchNorm refuses a batch of one sample in training.
    least = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1
    shares = [high - low for low, high in cut(batch, workers, cluster.shares, least)]
    # A worker without samples repeats one sample.
    return ModelCall(given.args, given.kwargs, given.samples, tuple(max(1, share) for share in shares))


def check_memory(asked: PlacementRequest, loader: Any, host: int) -> None:
    """Refuse a job if its processes on this host would not fit in memory.
    Args:
        asked: the model; `found` places every module. The call is taken from the loader. If the loader does not give
            it, activations are not counted.
        loader: the loader of the script, before it is divided among the workers.
        host: the number of this host in the topology.

    Raises:
        ConfigError: a process or the host has too little memory. The error names the process, its need and the limit,
            and what would help.
    """
    planned = needs_of(asked, asked.found, _bill_if_known(asked, loader))
    check(planned, memory_limits(), host)


def _bill_if_known(asked: PlacementRequest, loader: Any) -> CostReport | None:
    """Return the costs if the loader gives the arguments of the forward, else None."""
    # The samples of a stream could not be read again.
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        given = inputs_of(asked.model, loader, asked.job.schedule is Schedule.k1F1B)
        return costs_of(replace(asked, call=call_of(asked.job, asked.model, given)), asked.found)
    except Exception:  # the first step reports the error better
        return None
