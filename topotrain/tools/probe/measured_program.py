"""A process that runs the user's script, and measures steps when it is told to.

The script runs as plain Python. The forkserver calls `run`. Orders and answers are lines of JSON on the control
channel. Behind its first step, and behind each order, the script waits inside `optimizer.step()` for the next one.

    {"steps": N, "seconds": S, "threads": T, "sizes": B}   make at most N steps, or as many as S seconds take
    {"kernels": true}                                      time the update of the script's optimizer, and sums
    {"end": true}                                          leave the script
"""

import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topotrain.launch.runtime.child_channel import threads
from topotrain.launch.runtime.entry_points import run_program
from topotrain.tools.probe.batch_sizes import SMALL_SHARE, BatchWatch
from topotrain.tools.probe.kernel_timing import time_kernels, time_optimizer
from topotrain.tools.probe.step_recorder import LEAST_STEPS, StepListener, StepRecorder, medians
from topotrain.training.context import observe_prepare

_ENOUGH = 2 * LEAST_STEPS
"""Steps that are made however long they take."""
_BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)


# No Exception, which a script may catch around its steps.
class MeasuredEnough(BaseException):
    """Leaves the script: all is measured."""


class OrderChannel:
    """Orders to this process, and its answers."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._orders = channel.makefile("r", encoding="utf-8")

    def say(self, **words: Any) -> None:
        """Answer. Ends this process if the other side is gone."""
        try:
            self._channel.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            os._exit(1)

    def next(self) -> Mapping[str, Any]:
        """Wait for an order; that to end where the other side is gone."""
        line = self._orders.readline()
        return dict(json.loads(line)) if line else {"end": True}


class OrderedSteps(StepListener):
    """Lets a script make as many steps as it is told to.

    Args:
        orders: where orders come from.
        watch: of the batches.
    """

    def __init__(self, orders: OrderChannel, watch: BatchWatch) -> None:
        self._orders, self._watch = orders, watch
        self._began = time.perf_counter()
        self._most, self._until = 1, 0.0
        self.answered = False
        """Whether there was an answer to the last order."""

    def step_over(self, recorder: StepRecorder) -> None:
        made = len(recorder.steps)
        late = time.perf_counter() > self._until and made >= min(self._most, _ENOUGH)
        if made < self._most and not late:
            return
        self.answer(recorder, ended=False)
        self._obey(recorder)

    def answer(self, recorder: StepRecorder, ended: bool) -> None:
        """Answer the last order. ended: the script has come to its end."""
        if self.answered:
            return
        self.answered = True
        full = medians(recorder.steps, self._watch.full)
        small = medians(recorder.steps, self._watch.small) if self._watch.small else None
        self._orders.say(
            ended=ended,
            count=recorder.count,
            seconds=time.perf_counter() - self._began,
            full=None if full is None else asdict(full),
            small=None if small is None else asdict(small),
            ready=recorder.ready(),
            **self._described(recorder),
        )

    def _described(self, recorder: StepRecorder) -> dict[str, Any]:
        made = recorder.made
        return {
            "model": [
                {"name": p.name, "shape": p.shape, "dtype": p.dtype, "trainable": p.trainable}
                for p in recorder.parts.parameters
            ],
            "samples_per_epoch": _samples_per_epoch(made.loader),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _obey(self, recorder: StepRecorder) -> None:
        """Execute orders up to one that needs steps."""
        while True:
            order = self._orders.next()
            self.answered = False
            if order.get("end"):
                raise MeasuredEnough
            if order.get("kernels"):
                self._time_kernels(recorder)
                continue
            self._watch.let_alternate(_small_size(recorder, self._watch.full) if order["sizes"] else 0)
            torch.set_num_threads(order["threads"] or threads(os.environ))
            self._most = order["steps"]
            self._until = time.perf_counter() + order["seconds"]
            recorder.clear()
            return

    def _time_kernels(self, recorder: StepRecorder) -> None:
        self.answered = True
        optimizer = time_optimizer(recorder.parts, recorder.made.optimizers)
        self._orders.say(kernels=asdict(time_kernels()), optimizer=asdict(optimizer))


def _small_size(recorder: StepRecorder, full: int) -> int:
    """Return the samples of a small batch; 0: there is none."""
    # Batch norm has no variance of one sample.
    least = 2 if any(isinstance(module, _BATCH_NORM) for module in recorder.made.model.modules()) else 1
    small = max(least, full // SMALL_SHARE)
    return small if small < full else 0


def _samples_per_epoch(loader: Any) -> int:
    try:
        return 0 if loader is None else len(loader.dataset)
    except TypeError:  # a stream
        return 0


def run(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Run the program of a specification; return 0, for its errors are answers."""
    orders, watch = OrderChannel(channel), BatchWatch()
    steps = OrderedSteps(orders, watch)
    recorder = StepRecorder(watch, steps)
    observe_prepare(recorder)
    try:
        run_program(spec["program"], spec["args"])
    except MeasuredEnough:
        return 0
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        orders.say(failed=_said(error, spec["program"]), prepared=recorder.has_prepared, steps=recorder.count)
        return 0
    if not recorder.has_prepared:
        orders.say(failed="ended without calling topotrain.prepare: there is nothing to measure")
    elif recorder.count == 0:
        orders.say(failed="made no step with the optimizer that it gave to tt.prepare: there is nothing to measure")
    else:
        steps.answer(recorder, ended=True)
    return 0


def _said(error: BaseException, program: str) -> str:
    """Return an error of the script in one line, with its place in the script."""
    words = " ".join(str(error).split())
    name = Path(program).name
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == name]
    place = f" (line {lines[-1]})" if lines and lines[-1] else ""
    return f"{type(error).__name__}: {words}{place}" if words else f"{type(error).__name__}{place}"
