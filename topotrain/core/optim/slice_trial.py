"""Trial of the script's own optimizer: on slices it may compute something else."""

import json
from collections.abc import Callable
from dataclasses import replace

import torch

from topotrain.config.job import Slicing
from topotrain.core.optim.adapter import OptimizerSpec, SliceUpdate, UnsupportedOptimizer
from topotrain.core.optim.kernel_choice import OWN_ERRORS

TOLERANCE = 1e-4  # relative to the largest change of a value: kernels may round in other places


def check_parts(spec: OptimizerSpec, slicing: Slicing, module: str) -> None:
    """Raise UnsupportedOptimizer if a class differs on parts of tensors."""
    for name, numbers in spec.optimizers:
        if not name.startswith(f"{module}:"):
            continue
        # A warm-up begins with rates at which nothing would be seen.
        groups = [{**each, **({"lr": 0.1} if isinstance(each.get("lr"), float) else {})} for each in spec.groups]
        for text in {json.dumps([groups[number]]) for number in numbers}:
            one = OptimizerSpec.from_text(f'{{"name": "{name}", "groups": {text}, "assignment": []}}')
            whole = _trial(one, module, text, lambda *tensors: [tensors])
            # What fails on whole tensors is refused by the servers.
            if whole is not None and not _agree(whole, _trial(one, module, text, lambda a, b: [[a], [b]])):
                raise UnsupportedOptimizer("optimizer", name, "must treat each tensor alone: a server has some of them")
            slices = whole if slicing is Slicing.kTensor else _trial(one, module, text, _slices)
            if whole is not None and not _agree(whole, slices):
                accepted = (
                    "must compute the same on a slice of a tensor, or have whole ones: cluster { slicing: kTensor }"
                )
                raise UnsupportedOptimizer("optimizer", name, accepted)


def _slices(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[each.view(-1)[:128] for each in tensors], [each.view(-1)[128:] for each in tensors]]


def _agree(whole: torch.Tensor, parts: torch.Tensor | None) -> bool:
    return parts is not None and bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max())


def _trial(
    spec: OptimizerSpec, module: str, hyper: str, owned: Callable[..., list[list[torch.Tensor]]]
) -> torch.Tensor | None:
    """The change of two tensors by steps of these owners; None: it has failed."""
    with torch.random.fork_rng(devices=()):
        values, *gradients = torch.randn(4, 2, 16, 24, generator=torch.Generator().manual_seed(1)).unbind()
        for each in (values, *gradients):
            each[0, 8:] *= 0.05  # no part is like another
        begin = values.clone()
        try:
            parts = [
                SliceUpdate(replace(spec, assignment=(0,) * len(held)), [(n, n, v) for n, v in enumerate(held)], module)
                for held in owned(*values)
            ]
            for part, grads in (pair for each in gradients for pair in zip(parts, owned(*each), strict=True)):
                part.apply(hyper.encode(), dict(enumerate(grads)))
        except OWN_ERRORS:
            return None
        return values - begin
