"""The losses of a worker, taken where `backward()` starts and watched.

Worker (0,0) reports at its end if the loss has not fallen, and where groups do not wait once if it rises for good.
Noise must not cause a report, so losses are compared in blocks. A block is above another one if each of its losses is
above each of the other's.

The loss rises if several blocks in a row are above the block with the lowest median, or the last block is at the job's
end. In both cases the median must have lost a large part of the gain so far, and of the lowest median.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from topotrain.config.async_momentum import explanation, groups_apart
from topotrain.core.events import LastingNotice
from topotrain.training.context import Context
from topotrain.training.worker import Worker

_PLAIN = "_topotrain_unscaled"
# Of equal losses, one block of 8 is above another by chance once in C(16, 8) = 12,870 times.
_BLOCK = 8
# The first losses are a block of their own: a job may go wrong within its first 8 steps.
_BEGINNING = 3
_IN_A_ROW = 3
_OF_THE_GAIN = 0.5
_OF_THE_LOWEST = 0.25
# A loss has not fallen if the last eighth of at least so many is not a hundredth below the first.
_STEPS, _FALLEN, _MOST_MEANS = 40, 0.01, 512


class LossTrend:
    """Takes losses one by one and finds out whether they have risen for good."""

    def __init__(self) -> None:
        self._open: list[float] = []
        self._seen = 0
        self._first = 0.0
        self._lowest: tuple[float, ...] = ()
        self._above = 0
        self.latest = math.inf

    def __call__(self, loss: float) -> bool:
        """Take one more; whether the loss is rising."""
        self._seen += 1
        # NaN compares false with everything and would break the order; a loss that is not finite is the worst one.
        self._open.append(math.inf if math.isnan(loss) else loss)
        if self._seen == _BEGINNING:
            self._first, self._lowest = median(self._open), tuple(self._open)
        if len(self._open) < _BLOCK:
            return False
        self._close()
        return self._above >= _IN_A_ROW

    def end(self) -> bool:
        """No more will come; whether the last ones were far above the lowest."""
        # Fewer losses are noise. With no more than the first ones, these are the lowest block themselves.
        if len(self._open) >= _BEGINNING < self._seen:
            self._close()
        return self._above > 0

    @property
    def lowest(self) -> float:
        """The median of the lowest block."""
        return median(self._lowest)

    def _close(self) -> None:
        block, self._open = self._open, []
        self.latest = median(block)
        self._above = self._above + 1 if self._lies_above(block) else 0
        if self.latest < self.lowest:
            self._lowest = tuple(block)

    def _lies_above(self, block: Sequence[float]) -> bool:
        lowest = self.lowest
        if not math.isfinite(lowest):
            return True  # there never was one that could have been lower
        lost = max(_OF_THE_GAIN * (self._first - lowest), _OF_THE_LOWEST * abs(lowest))
        largest = max(loss for loss in self._lowest if math.isfinite(loss))
        return min(block) > largest and self.latest > lowest + (lost if math.isfinite(lost) else 0.0)


class LossFall:
    """Takes losses one by one and finds whether they have fallen, in bounded memory."""

    def __init__(self) -> None:
        self._means: list[float] = []  # of so many losses each
        self._size, self._sum, self._open = 1, 0.0, 0
        self._first: list[float] = []

    def __call__(self, loss: float) -> None:
        """Take one more."""
        if len(self._first) < _BLOCK:
            self._first.append(loss)
        self._sum, self._open = self._sum + loss, self._open + 1
        if self._open == self._size:
            self._means.append(self._sum / self._size)
            self._sum, self._open = 0.0, 0
        if len(self._means) == _MOST_MEANS:
            self._means = [(one + other) / 2 for one, other in zip(self._means[::2], self._means[1::2], strict=True)]
            self._size *= 2

    def stayed(self) -> tuple[float, float] | None:
        """Return the first and last losses if they have certainly not fallen, else None."""
        part = max(_BLOCK, len(self._means) // 8)
        if len(self._means) < _STEPS:
            return None
        first, last = sum(self._means[:part]) / part, sum(self._means[-part:]) / part
        # A job that learns within its first steps has a low mean of its first part.
        before = min(first, median(self._first))
        return (first, last) if math.isfinite(last) and last > before - _FALLEN * abs(before) else None


class LossWatch:
    """Reports a loss that has not fallen, or that rises where groups train apart."""

    def __init__(self, here: Context, worker: Worker) -> None:
        self._here, self._worker = here, worker
        apart = here.is_main and groups_apart(here.place.topology) > 1
        self._trend: LossTrend | None = LossTrend() if apart else None
        # Losses of several optimizers, as of a GAN, are no single one, and one that is continued may have been low.
        judged = here.is_main and len(worker.optimizers) == 1 and here.resumed is None
        self._fall: LossFall | None = LossFall() if judged else None

    def __call__(self, loss: float) -> None:
        """Take the loss at which a backward has begun."""
        if self._fall is not None:
            self._fall(loss)
        if self._trend is not None and self._trend(loss):
            self._report(self._trend)

    def end(self) -> None:
        """Judge the last losses, at the end of the script."""
        if self._trend is not None and self._trend.end():
            self._report(self._trend)
        stayed = self._fall.stayed() if self._fall is not None and self._worker.tally.steps >= _STEPS else None
        if stayed is not None:
            job, topology = self._here.place.job, self._here.place.topology
            why = explanation(job, topology, self._worker.momentum)
            text = "the loss has not fallen ({:#.3g} to {:#.3g})".format(*stayed) + (f". {why}" if why else "")
            self._here.emit(LastingNotice(str(self._here.me), text))

    def _report(self, trend: LossTrend) -> None:
        self._trend = None
        why = explanation(self._here.place.job, self._here.place.topology, self._worker.momentum)
        lowest = f"{trend.lowest:.3g} at its lowest" if math.isfinite(trend.lowest) else "never finite"
        latest = f"{trend.latest:.3g}" if math.isfinite(trend.latest) else "not finite"
        self._here.emit(LastingNotice(str(self._here.me), f"the loss is rising: {latest} now, {lowest}. {why}"))


def watch_losses(worker: Worker, watch: LossWatch, at_close: ExitStack) -> None:
    """Add every backward's scalar root to the tally; `watch` gets those on the CPU.

    Until `at_close` is closed, which gives torch its own functions back.
    """
    # PyTorch has no hook for the root of a backward. `Tensor.backward` looks this function up at every call, so both
    # ways to start one come here. Only worker processes of a job are changed.
    scaler = torch.amp.GradScaler
    for owner, name, function in (
        (torch.autograd, "backward", _watched(torch.autograd.backward, worker, watch)),
        (scaler, "scale", _remembered(scaler.scale)),
    ):
        at_close.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)


def _watched(backward: Callable[..., None], worker: Worker, watch: LossWatch) -> Callable[..., None]:
    # The name `tensors` is torch's: callers may pass it by keyword.
    def watched(tensors: torch.Tensor | Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor | GradientEdge) else list(tensors)
        # A scaled loss has grown by the scale; the attribute leads to the loss before it.
        # A root may also be a `GradientEdge`. A complex one is no loss that can be compared.
        plain = [getattr(root, _PLAIN, root) for root in roots]
        losses = [_value(x) for x in plain if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_complex()]
        spans = worker.client.channel.spans
        spans.since("forward")
        # A backward also adds to gradients of other optimizers' parameters, which a lazy step may still read.
        if worker.lazy and len(worker.optimizers) > 1:
            worker.client.values.settle()
        worker.path.look()
        with spans.span("backward"):
            backward(tensors, *args, **kwargs)
        spans.mark()
        if not worker.path.private:
            worker.tally.add_backward(losses)
            for loss in losses:
                if isinstance(loss, float):
                    watch(loss)

    return watched


def _value(loss: torch.Tensor) -> float | torch.Tensor:
    """The loss as a number, or as a tensor if it is on a device."""
    # Reading a value from a device would wait until the device has done all its work.
    return float(loss.detach()) if loss.device.type == "cpu" else loss.detach().double().reshape(())


def _remembered(scale: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        # A scaler that is disabled returns the loss itself.
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _PLAIN, outputs.detach())
        return scaled

    return remembered
