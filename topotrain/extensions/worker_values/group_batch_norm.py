"""`SyncBatchNorm` over the workers of a group, without torch.distributed."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.training.context import Context

GatherStatistics = Callable[[torch.Tensor], torch.Tensor]
"""Gathers a row of each worker, with its gradient. A worker with weight 0 has none."""


def normalize_over_group(here: Context, model: nn.Module, gather: GatherStatistics) -> None:
    """Let a model's SyncBatchNorm modules take the statistics of the group's batch.

    Raises:
        ConfigError: the model is split, so that a module may run on one worker only.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if found and here.will_split(model):
        raise ConfigError("model", f"SyncBatchNorm {found[0][0]}", "must be BatchNorm in a model that is split")
    for _, module in found:
        # On the instance, so that torch's class stays as it is.
        module.forward = partial(_forward, module, gather)  # type: ignore[method-assign]
        here.at_close.callback(module.__dict__.pop, "forward", None)


def _forward(module: nn.SyncBatchNorm, gather: GatherStatistics, batch: torch.Tensor) -> torch.Tensor:
    """Normalize a batch (samples, channels, …) by statistics of all workers' samples."""
    if not module.training:
        return type(module).forward(module, batch)
    wide = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    over = [dim for dim in range(batch.dim()) if dim != 1]
    var, mean = torch.var_mean(wide, over, correction=0)
    count = mean.new_full((1,), batch.numel() // batch.shape[1])
    rows = gather(torch.cat([count, mean, var])[None])
    counts, means, variances = rows.split([1, len(mean), len(mean)], dim=1)  # type: ignore[no-untyped-call]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    _track(module, mean.detach(), var.detach() * total / (total - 1))
    shape = [1, -1, *[1] * (batch.dim() - 2)]
    found = (wide - mean.view(shape)) * torch.rsqrt(var + module.eps).view(shape)
    if module.affine:
        found = found * module.weight.view(shape) + module.bias.view(shape)
    result: torch.Tensor = found.to(batch.dtype)
    return result


@torch.no_grad()
def _track(module: nn.SyncBatchNorm, mean: torch.Tensor, var: torch.Tensor) -> None:
    """Update the running averages as torch does."""
    if module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if factor is None else factor
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor or 0.0)
    module.running_var.lerp_(var.to(module.running_var.dtype), factor or 0.0)
