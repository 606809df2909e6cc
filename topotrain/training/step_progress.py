"""Reports of a worker's steps: progress, and norms for `debug: true`."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from topotrain.config.async_momentum import explanation
from topotrain.config.private_files import create_text
from topotrain.core.client.client import StepOutcome
from topotrain.core.events import Finished, Notice, Skipped, StepDone
from topotrain.training import context as process
from topotrain.training.context import Connections, Context
from topotrain.training.loss_watch import LossWatch
from topotrain.training.worker import Worker
from topotrain.training.worker_extension import WorkerExtension

INTERVAL_S = 0.25  # steps may take microseconds, and no display needs more than four lines a second


class ProgressReporter(WorkerExtension):
    """Reports progress, at most once in INTERVAL_S and at the worker's end."""

    def __init__(
        self, here: Context, worker: Worker, connections: Connections, rising: LossWatch | None = None
    ) -> None:
        self._rising = rising
        self._loss: float | None = None  # the last one that was reported
        self._here, self._worker, self._connections = here, worker, connections
        self._due = 0.0
        # What the start has waited is no part of the training.
        self._waited_before = worker.client.channel.waited

    def after_step(self, outcome: StepOutcome | None) -> None:
        # The losses of a late step were dropped (`drop_step`).
        if outcome is None or not outcome.late:
            self._worker.tally.count_loss()
        self._report_skips()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._report(now)

    def _report_skips(self) -> None:
        tally = self._worker.tally
        skips = tally.take_skips() if tally.skips else []
        # `skipped` counts these already, so each report has the total at its own step.
        for total, skip in enumerate(skips, tally.skipped - len(skips) + 1):
            self._here.emit(Skipped(str(self._here.me), skip.step, total, skip.by, skip.parameter))

    def _totals(self) -> dict[str, Any]:
        """The fields that `StepDone` and `Finished` share."""
        tally, loop = self._worker.tally, process.latest_loop()
        sent, received = self._connections.traffic()
        return {
            "who": str(self._here.me),
            "samples": tally.samples,
            "staleness_mean": tally.staleness_mean,
            "staleness_max": tally.staleness_max,
            "bytes_out": sent,
            "bytes_in": received,
            "own_s": tally.own_s,
            "late": tally.late,
            "threads": torch.get_num_threads(),
            "bytes_link": self._connections.link_traffic()[0],
            "waited_s": self._worker.client.channel.waited - self._waited_before,
            "staleness_p95": tally.staleness_p95,
            "epoch": -1 if loop is None else loop.epoch,
            "progress": -1.0 if loop is None else loop.estimate(),
        }

    def _report(self, now: float) -> None:
        tally = self._worker.tally
        on_device = isinstance(tally.loss_sum, torch.Tensor)
        loss = tally.take_loss()
        self._loss = self._loss if loss is None else loss
        # On a device single losses are not read, because that would wait for it; their mean is.
        if self._rising is not None and on_device and loss is not None:
            self._rising(loss)
        counts = tally.recent_staleness.report(now)
        recent = () if counts.is_empty else (counts.mean, counts.at_most(0.95), float(counts.most))
        totals = self._totals()
        self._here.emit(StepDone(time=now - tally.started, step=tally.steps, loss=loss, recent=recent, **totals))
        self._here.logged.send_due(now)
        for event in self._connections.reports(now):
            self._here.emit(event)

    def left_job(self) -> None:
        """Report the last steps, and no end."""
        self._report_skips()
        # Otherwise all steps are those of earlier processes of this worker, which have reported them.
        if self._worker.tally.started:
            self._report(time.monotonic())
        for event in self._connections.reports(time.monotonic(), last=True):
            self._here.emit(event)

    def job_over(self) -> None:
        """Report the last steps and the end."""
        tally = self._worker.tally
        self.left_job()
        if tally.lost:
            words = f"{tally.lost} batches of a stream were not there when it was read again: they are lost"
            self._here.emit(Notice(str(self._here.me), words))
        if tally.dropped:
            words = (
                f"{tally.dropped} batches came too late for their step and count for nothing, since the script left "
            )
            self._here.emit(Notice(str(self._here.me), f"{words}its loop before they could be given again"))
        if self._rising is not None:
            self._rising.end()
        if self._loss is not None and not math.isfinite(self._loss) and self._here.is_main:
            why = explanation(self._here.place.job, self._here.place.topology, self._worker.momentum)
            words = f"the last loss is not finite ({self._loss})" + (f". {why}" if why else "")
            self._here.emit(Notice(str(self._here.me), words))
        self._here.emit(Finished(steps=tally.steps, **self._totals()))


class NormLog(WorkerExtension):
    """Writes {"step", "norms": {name: {"value", "grad"}}} after every step.

    "grad" is null for a parameter without a gradient.
    """

    def __init__(self, worker: Worker, path: Path) -> None:
        self._worker = worker
        self._file = create_text(path)

    def after_step(self, outcome: StepOutcome | None) -> None:
        norms = {}
        for tensor, described in zip(self._worker.parts.tensors, self._worker.parts.parameters, strict=True):
            # A meta tensor: another worker of the group holds the parameter.
            if tensor.is_meta:
                continue
            gradient = None if tensor.grad is None else float(torch.linalg.vector_norm(tensor.grad))
            norms[described.name] = {"value": float(torch.linalg.vector_norm(tensor.detach())), "grad": gradient}
        self._file.write(json.dumps({"step": self._worker.tally.steps, "norms": norms}) + "\n")
        # At every step, so that a script that fails leaves the lines of its last steps.
        self._file.flush()
