"""From a model and what its forward is called with to a placement of its modules: `placement: kAuto`."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from topotrain.config.job import ConfigError
from topotrain.parallel.capture.capture_model import CapturedForward
from topotrain.parallel.estimate.cost_report import bill
from topotrain.parallel.placement.assign_modules import DEFAULT, Assignment
from topotrain.parallel.placement.auto_placement import ChosenPlacement, choose
from topotrain.parallel.placement.cost_model import EVERYWHERE, USUAL, WorkerSpeeds, work_of
from topotrain.parallel.placement.parameter_owners import divide
from topotrain.parallel.program.build_program import program


class MatchedBlock(Protocol):
    """A `partition` block, as far as it says whom it means."""

    @property
    def match(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model; of tensors only sizes, dtypes and devices count.

    samples: in the arguments. shares: each worker's samples in a step.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    samples: int
    shares: tuple[int, ...]


def place(
    model: nn.Module,
    captured: CapturedForward,
    said: Mapping[str, Assignment],
    blocks: Sequence[MatchedBlock],
    call: ModelCall,
    microbatches: int = 1,
    limits: Sequence[int] | None = None,
    speeds: WorkerSpeeds = USUAL,
    measured: Mapping[str, tuple[float, float]] | None = None,
    copies: int = 3,
    alive: float = 1.0,
) -> tuple[Mapping[str, Assignment], ChosenPlacement]:
    """Give every module that nobody has placed a worker.

    The same for all workers of a group as long as their arguments are; so give `measured` only where one process
    decides for all, and `limits` only where all know the same.

    Args:
        model: whole; its parameters may be on the meta device.
        captured: of this model.
        said: by `assign.assignments`; what is in there because somebody has said it stays.
        blocks: the job's partition blocks; what they match stays, too.
        call: of the forward.
        microbatches, limits, speeds, measured, copies, alive: see `choose` and `work_of`.

    Returns:
        all assignments, and what was chosen.

    Raises:
        ConfigError: the forward cannot be cut, or nothing fits into `limits`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    fixed = {name: one for name, one in said.items() if one != DEFAULT or _matched(name, modules.get(name), blocks)}
    workers = len(call.shares)
    cut = program(captured, fixed, model, call.args, call.kwargs, call.samples, workers, model.training)
    costs = bill(cut, model, divide(model, fixed, workers), call.shares, examples=call.kwargs)
    stays = {name: EVERYWHERE if one.location is None else one.location for name, one in fixed.items()}
    work = work_of(costs, model, stays, copies, speeds, measured, alive)
    if not work.units:
        raise ConfigError("placement", "kAuto", "finds no module to place: the forward calls none that has parameters")
    chosen = choose(work, workers, microbatches, limits, speeds)
    placed = {name: Assignment(-1, worker) for name, worker in chosen.locations.items()}
    return {**said, **placed, **fixed}, chosen


def _matched(name: str, module: nn.Module | None, blocks: Sequence[MatchedBlock]) -> bool:
    """Whether a block means it: by its name, that of a module it is in, or that of a parameter inside."""
    texts = [name]
    while texts[-1]:
        texts.append(texts[-1].rpartition(".")[0])
    if module is not None:
        texts += [f"{name}.{own}" for own, _ in module.named_parameters()]
    return any(re.search(block.match, text) for block in blocks for text in texts)


def measure(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Time each module that computes something itself, once, on real inputs: name -> seconds forward and backward.

    One call goes before it, for what is made at the first use. Gradients that are there stay; buffers change, as in
    any forward.

    Raises:
        ConfigError: a parameter is on the meta device, so nothing can be computed.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            accepted = f"needs a model that fits into this process; {name} is on the meta device"
            raise ConfigError("--measure", True, accepted)
    seen: dict[str, tuple[float, float]] = {}
    hooks = []

    def timed(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        if name not in seen and not busy:
            busy.append(name)
            seen[name] = _once(module, given, named)
            busy.clear()

    busy: list[str] = []
    with torch.no_grad():
        model(*args, **kwargs)
    try:
        for name, module in model.named_modules():
            if any(True for _ in module.parameters()) and name:
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
                return made * 1  # so that it may be written over
            return value

        given, named = tree_map(leaf, (args, kwargs))
        start = time.perf_counter()
        out = module(*given, **named)
        forward = time.perf_counter() - start
        ends = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        start = time.perf_counter()
        if ends and leaves:
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
        return forward, time.perf_counter() - start
