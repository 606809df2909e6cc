"""The loss of each step, for the progress table and the curve: seen where `backward()` starts.

No hook of PyTorch sees the root of a backward, so in a job's worker process (and nowhere else) the function that every
backward goes through is wrapped. A scaled loss is told by the scaler which loss it stands for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from topotrain.training.worker import Worker

_PLAIN = "_topotrain_unscaled"


def watch_losses(worker: Worker, hear: Callable[[float], None]) -> None:
    """Add every backward's scalar root to the worker's tally; `hear` is told each that is a number already."""
    torch.autograd.backward = _watched(torch.autograd.backward, worker, hear)
    torch.amp.GradScaler.scale = _remembered(torch.amp.GradScaler.scale)  # type: ignore[method-assign]


def _watched(backward: Callable[..., None], worker: Worker, hear: Callable[[float], None]) -> Callable[..., None]:
    def watched(tensors: torch.Tensor | Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        losses = [_told(getattr(root, _PLAIN, root)) for root in roots if root.numel() == 1]
        spans = worker.exchange.spans
        spans.since("forward")
        with spans.span("backward"):
            backward(tensors, *args, **kwargs)
        spans.mark()
        if not worker.path.private:
            worker.tally.backwards += 1
            for loss in losses:
                worker.tally.loss_sum += loss
                if isinstance(loss, float):
                    hear(loss)

    return watched


def _told(loss: torch.Tensor) -> float | torch.Tensor:
    """A number; on a device that works on its own a tensor, for asking for its value would wait for the device."""
    return float(loss.detach()) if loss.device.type == "cpu" else loss.detach().double().reshape(())


def _remembered(scale: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _PLAIN, outputs.detach())
        return scaled

    return remembered
