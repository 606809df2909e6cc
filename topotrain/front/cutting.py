"""How one model would be cut over the workers of a group, found without a job: for `topotrain plan`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from topotrain.front.autoplace import call_of, placed
from topotrain.front.inputs import Inputs, inputs_of, parse_inputs
from topotrain.front.splitting import tagged
from topotrain.job import ConfigError, Job, Placement, Schedule
from topotrain.slices import Parameter
from topotrain.split.assign import assignments
from topotrain.split.auto import Chosen
from topotrain.split.bill import bill
from topotrain.split.capture import capture
from topotrain.split.division import divide
from topotrain.split.infer import program
from topotrain.split.parts import described
from topotrain.split.placing import measure
from topotrain.split.room import Room, check, room
from topotrain.watch.cut import CutPlan


@dataclass(frozen=True, slots=True)
class Cut:
    """A planned cut: what `plan` shows, and the schema with its parts and owners."""

    plan: CutPlan
    parameters: tuple[Parameter, ...]


def cut_of(job: Job, model: nn.Module, loader: Any, said: Sequence[str] = (), measured: bool = False) -> Cut | None:
    """Cut a model on paper; None where every worker of the job holds all of it.

    Args:
        job: whose groups share a model, by its conf or by the script's tags.
        model: as the script hands it to `prepare`; not changed.
        loader: the script's, which tells the shapes of the forward's arguments.
        said: these instead, as `--input` gives them.
        measured: with kAuto, go by times measured here, and show the result as partition blocks.

    Raises:
        ConfigError: it cannot be cut in this way, or shapes are not known.
    """
    workers = job.cluster.nworkers_per_group
    if workers == 1 or not (job.splits or tagged(model)):
        return None
    captured = capture(model, model.training)
    found = assignments(model, job, workers, captured)
    given = parse_inputs(said) if said else inputs_of(model, loader, job.schedule is Schedule.k1F1B)
    call = call_of(job, model, given)
    chosen: Chosen | None = None
    if job.placement is Placement.kAuto:
        times = measure(model, *_real(given)) if measured else None
        found, chosen = placed(job, model, captured, found, call, times)
    made = program(captured, found, model, given.args, given.kwargs, given.samples, workers, model.training)
    division = divide(model, found, workers)
    costs = bill(made, model, division, call.shares, job.microbatches, _named(model, given))
    parameters = tuple(described(whole, share) for whole in division.parameters for share in whole.shares)
    words = "" if chosen is None else chosen.explain()
    blocks = chosen.conf() if chosen is not None and measured else ""
    plan = CutPlan(costs, given.told(), words, blocks)
    return Cut(CutPlan(costs, given.told(), words, blocks, _warnings(plan, room())), parameters)


def _named(model: nn.Module, given: Inputs) -> Mapping[str, Any]:
    """The forward's arguments by name."""
    return inspect.signature(model.forward).bind(*given.args, **given.kwargs).arguments


def _real(given: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to compute with: those that are sizes only become zeros."""

    def real(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    return tuple(map(real, given.args)), {name: real(value) for name, value in given.kwargs.items()}


def _warnings(plan: CutPlan, here: Room) -> tuple[str, ...]:
    """Who would not fit into what this process may have, if it ran here."""
    found = []
    for worker, need in enumerate(plan.needs()):
        try:
            check(need, here, f"worker {worker}")
        except ConfigError as error:
            found.append(str(error))
    return tuple(found)
