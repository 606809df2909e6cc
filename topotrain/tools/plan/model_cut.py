"""Cut one model over the workers of a group without a job, for `topotrain plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError, Job, Placement, Schedule
from topotrain.config.sharding import Parameter
from topotrain.config.topology import layout
from topotrain.parallel.api.automatic_placement import place_call
from topotrain.parallel.api.example_inputs import ExampleInputs, inputs_of, parse_inputs
from topotrain.parallel.api.prepare_split import tagged
from topotrain.parallel.api.split_costs import PlacementRequest, call_of, costs_of, needs_of, schema_of
from topotrain.parallel.capture.capture_model import capture
from topotrain.parallel.estimate.memory_check import MemoryLimits, check, memory_limits
from topotrain.parallel.estimate.process_memory import ProcessNeed
from topotrain.parallel.placement.assign_modules import assignments
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.tools.plan.graph_report import CutPlan


@dataclass(frozen=True, slots=True)
class ModelCut:
    """A planned cut: the plan to show, and the schema with its parts and owners."""

    plan: CutPlan
    parameters: tuple[Parameter, ...]


def cut_of(
    job: Job,
    model: nn.Module,
    loader: Any,
    said: Sequence[str] = (),
    measured: bool = False,
    state_factor: float = 0.0,
) -> ModelCut | None:
    """Cut a model for a plan; return None where every worker holds all of it.

    Args:
        job: its groups share a model, by its conf or by the script's tags.
        model: as the script passes it to `prepare`. It is not changed.
        loader: the script's, which gives the shapes of the forward's arguments.
        said: shapes to use instead, as `--input` gives them.
        measured: with kAuto, use times measured here, and show the result as partition blocks.
        state_factor: elements of optimizer state per element of a parameter.

    Raises:
        ConfigError: the model cannot be cut in this way, or shapes are not known.
    """
    workers = job.cluster.nworkers_per_group
    if workers == 1 or not (job.splits or tagged(model)):
        return None
    # In the mode that the script left it in: dropout and batch norm differ between the two.
    captured = capture(model, model.training)
    found = assignments(model, job, workers, captured)
    given = parse_inputs(said) if said else inputs_of(model, loader, job.schedule is Schedule.k1F1B)
    call = call_of(job, model, given)
    asked = PlacementRequest(job, layout(job.cluster), model, captured, found, call, state_factor)
    here, words, blocks = memory_limits(), "", ""
    if job.placement is Placement.kAuto:
        # Only measuring runs the model, and needs inputs with data.
        chosen = place_call(asked, here, _real(given) if measured else None)
        found, words, blocks = chosen.found, chosen.text, chosen.blocks if measured else ""
    costs = costs_of(asked, found)
    planned = needs_of(asked, found, costs)
    plan = CutPlan(costs, given.text(), planned, here, words, blocks, _warnings(planned, here))
    return ModelCut(plan, schema_of(divide(model, found, workers)))


def _real(given: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments to compute with: sizes without data become zeros."""

    def real(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    return tuple(map(real, given.args)), {name: real(value) for name, value in given.kwargs.items()}


def _warnings(planned: Sequence[ProcessNeed], here: MemoryLimits) -> tuple[str, ...]:
    """Return the parts that would not fit, if the job ran here as this process."""
    try:
        # A plan is often made on another machine than the job's, so this only warns.
        check(planned, here)
    except ConfigError as error:
        return (str(error),)
    return ()
