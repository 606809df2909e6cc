"""A process that runs the user's script, and measures steps when it is told to.

The script runs as plain Python. The forkserver calls `run`. Orders and answers are lines of JSON on the channel. Behind
its first step, and behind each order, the script waits inside `optimizer.step()` for the next one, and ends without it.

    {"steps": N, "seconds": S, "threads": T, "sizes": B}   make at most N steps, or as many as S seconds take
"""

import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from topotrain.launch.runtime.child_channel import threads
from topotrain.launch.runtime.entry_points import run_program
from topotrain.tools.probe.machine_timing import time_kernels, time_optimizer
from topotrain.tools.probe.probe_file import ProbedBatch
from topotrain.tools.probe.script_steps import (
    LEAST_STEPS,
    SMALL_SHARE,
    BatchWatch,
    StepRecorder,
    StepTimes,
    medians,
    spread,
)
from topotrain.training.context import observe_prepare

_ENOUGH = 2 * LEAST_STEPS
"""Steps that are made however long they take."""
_NOTHING = "there is nothing to measure"


# No Exception, which a script may catch around its steps.
class MeasuredEnough(BaseException):
    """Leaves the script: all is measured."""


class OrderedSteps:
    """Lets a script make as many steps as it is told to.

    kernels: the first answer has the times of kernels, and of the script's optimizers on a server.
    """

    def __init__(self, channel: socket.socket, kernels: bool) -> None:
        self._channel, self._orders, self._kernels = channel, channel.makefile("r", encoding="utf-8"), kernels
        self._watch = BatchWatch()
        self.recorder = StepRecorder(self._watch, self._step_over)
        self._began = time.perf_counter()
        self._most, self._until = 1, 0.0

    def answer(self, **words: Any) -> None:
        """Answer the last order. Ends this process if the other side is gone."""
        try:
            self._channel.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            os._exit(1)

    def ended(self) -> None:
        if not self.recorder.calls:
            self.answer(failed=f"ended without calling topotrain.prepare: {_NOTHING}")
        elif self.recorder.count == 0:
            self.answer(failed=f"made no step with the optimizer that it gave to tt.prepare: {_NOTHING}")
        else:
            self.answer(ended=True, **self._measured())

    def _step_over(self) -> None:
        made = len(self.recorder.steps)
        late = time.perf_counter() > self._until and made >= min(self._most, _ENOUGH)
        if made < self._most and not late:
            return
        # Before the kernels: this has the time since the start.
        measured = self._measured()
        if self._kernels and self.recorder.count == 1:
            measured["kernels"] = asdict(time_kernels())
            measured["optimizer"] = asdict(time_optimizer(self.recorder.made))
        self.answer(ended=False, **measured)
        line = self._orders.readline()
        if not line:
            raise MeasuredEnough
        order = json.loads(line)
        self._watch.let_alternate(self._small_size() if order["sizes"] else 0)
        torch.set_num_threads(order["threads"] or threads(os.environ))
        self._most, self._until = order["steps"], time.perf_counter() + order["seconds"]
        self.recorder.clear()

    def _measured(self) -> dict[str, Any]:
        recorder, watch = self.recorder, self._watch
        full, small = ([s for s in recorder.steps if s.samples == size] for size in (watch.full, watch.small))
        rows = zip(recorder.parts.parameters, recorder.ready(), strict=True)
        return {
            "count": recorder.count,
            "seconds": time.perf_counter() - self._began,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "model": [
                {"name": p.name, "shape": p.shape, "dtype": p.dtype, "trainable": p.trainable, "ready": ready}
                for p, ready in rows
            ],
            "full": step_fields(full, small) if full else None,
        }

    def _small_size(self) -> int:
        """Return the samples of a small batch; 0: there is none."""
        # Batch norm has no variance of one sample.
        norms = (isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self.recorder.made.model.modules())
        small = max(2 if any(norms) else 1, self._watch.full // SMALL_SHARE)
        return small if small < self._watch.full else 0


def step_fields(full: Sequence[StepTimes], small: Sequence[StepTimes]) -> dict[str, Any]:
    """Return a probe's fields for two sizes of batch, and the mean seconds of a pass.

    A line goes through the larger batch. By chance a smaller one takes longer, or less than its share. So the line is
    kept from falling with more samples, and from falling below zero without any.
    """
    step, fixed, per_sample = medians(full), 0.0, 0.0
    # Steps without any batch say nothing.
    if small and 0 < small[0].samples < step.samples:
        part = medians(small)
        slope = (step.computing - part.computing) / (step.samples - part.samples)
        per_sample = min(max(0.0, slope), step.computing / step.samples)
        fixed = max(0.0, step.computing - per_sample * step.samples)
    batch = ProbedBatch(
        size=max(1, full[0].samples),
        forward_s=step.forward,
        backward_s=step.backward,
        other_s=step.other,
        optimizer_s=step.optimizer,
        fixed_s=fixed,
        per_sample_s=per_sample,
        steps=len(full),
    )
    return {"batch": asdict(batch), "spread": spread(full), "computing": fmean(each.computing for each in full)}


def run(spec: dict[str, Any], channel: socket.socket, fds: Sequence[int]) -> int:
    """Run the program of a specification; return 0, for its errors are answers."""
    steps = OrderedSteps(channel, spec["kernels"])
    observe_prepare(steps.recorder)
    try:
        run_program(spec["program"], spec["args"])
    except MeasuredEnough:
        return 0
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        steps.answer(failed=_said(error, spec["program"]))
    else:
        steps.ended()
    return 0


def _said(error: BaseException, program: str) -> str:
    """Return an error of the script in one line, with its place in the script."""
    words = " ".join(str(error).split())
    name = Path(program).name
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == name]
    place = f" (line {lines[-1]})" if lines and lines[-1] else ""
    return f"{type(error).__name__}: {words}{place}" if words else f"{type(error).__name__}{place}"
