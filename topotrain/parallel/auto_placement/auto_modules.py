"""Automatic placement of modules for one call of the forward (`placement: kAuto`)."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from topotrain.config.job import ConfigError, Partition
from topotrain.parallel.api.split_costs import PlacementRequest
from topotrain.parallel.auto_placement.cost_model import EVERYWHERE, USUAL, WorkerSpeeds, work_of
from topotrain.parallel.auto_placement.placement_choice import ChosenPlacement, choose
from topotrain.parallel.estimate.cost_report import estimate_costs
from topotrain.parallel.placement.assign_modules import DEFAULT, Assignment
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.program.build_program import program


def place(
    asked: PlacementRequest,
    limits: Sequence[int] | None = None,
    speeds: WorkerSpeeds = USUAL,
    measured: Mapping[str, tuple[float, float]] | None = None,
    copies: int = 3,
    alive: float = 1.0,
) -> tuple[Mapping[str, Assignment], ChosenPlacement]:
    """Assign a worker to every module that is not placed yet.

    The result is the same on all workers of a group if their arguments are. So pass `measured` only where one process
    decides for all, and `limits` only if all workers have the same.

    Args:
        asked: the model and a call of its forward. Its parameters may be on the meta device. Explicit assignments of
            the job file and the script are kept, and those of modules that a partition block matches.
        limits, speeds, measured, copies, alive: see `choose` and `work_of`.

    Returns:
        All assignments, and the chosen placement.

    Raises:
        ConfigError: the forward cannot be split, or no placement fits into `limits`.
    """
    model, assigned, call = asked.model, asked.found, asked.call
    assert call is not None
    modules, blocks = dict(model.named_modules(remove_duplicate=False)), asked.job.partition
    # DEFAULT by a block is the user's choice. Otherwise it is the lack of one, and the module may be placed.
    fixed = {name: one for name, one in assigned.items() if one != DEFAULT or _matched(name, modules.get(name), blocks)}
    workers = len(call.shares)
    cut = program(asked.captured, fixed, model, call.args, call.kwargs, call.samples, workers, model.training)
    costs = estimate_costs(cut, model, divide(model, fixed, workers), call.shares, examples=call.kwargs)
    stays = {name: EVERYWHERE if one.location is None else one.location for name, one in fixed.items()}
    work = work_of(costs, model, stays, copies, speeds, measured, alive)
    if not work.units:
        raise ConfigError("placement", "kAuto", "finds no module to place: the forward calls no module with parameters")
    chosen = choose(work, workers, asked.job.microbatches, limits, speeds)
    placed = {name: Assignment(-1, worker) for name, worker in chosen.locations.items()}
    return {**assigned, **placed, **fixed}, chosen


def _matched(name: str, module: nn.Module | None, blocks: Sequence[Partition]) -> bool:
    """Return whether a block matches a module, one around it, or a parameter in it."""
    texts = [name]
    while texts[-1]:
        texts.append(texts[-1].rpartition(".")[0])
    if module is not None:
        texts += [f"{name}.{own}" for own, _ in module.named_parameters()]
    return any(re.search(block.match, text) for block in blocks for text in texts)


def measure(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Time each module with parameters once on real inputs.

    One call goes before, for work that is done at first use. Gradients that exist are kept. Buffers change, as in any
    forward.

    Returns:
        Seconds of forward and backward, by module name.

    Raises:
        ConfigError: a parameter is on the meta device, so the model cannot be run.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            accepted = f"needs a model that fits into this process; {name} is on the meta device"
            raise ConfigError("--measure", True, accepted)
    seen: dict[str, tuple[float, float]] = {}
    hooks = []

    def timed(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        # Modules inside the timed one are called as well, and would be timed with their hooks.
        if name not in seen and not busy:
            busy.append(name)
            seen[name] = _once(module, given, named)
            busy.clear()

    busy: list[str] = []
    with torch.no_grad():
        model(*args, **kwargs)  # allocators and kernels warm up here, which is not to be measured
    try:
        for name, module in model.named_modules():
            if any(True for _ in module.parameters()) and name:
                # The name is bound by the default, since the loop variable changes.
                hook = lambda m, a, k, out, n=name: timed(n, m, a, k, out)  # noqa: E731
                hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    return seen


def _once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    with torch.enable_grad():
        leaves: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                made = value.detach().clone().requires_grad_()
                leaves.append(made)
                return made * 1  # not a leaf, so that the module may write to it in place
            return value

        given, named = tree_map(leaf, (args, kwargs))
        start = time.perf_counter()
        out = module(*given, **named)
        forward = time.perf_counter() - start
        ends = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        start = time.perf_counter()
        if ends and leaves:
            # Not backward(): gradients that exist must be kept.
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
        return forward, time.perf_counter() - start
