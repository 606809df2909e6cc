"""The exports of a job that the options `--log` and `--metrics` ask for."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from time import monotonic
from typing import Any

from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Notice
from topotrain.tools.exporters.curve_exports import (
    JSONL,
    TENSORBOARD,
    CurveExport,
    CurvePoint,
    JsonLinesExport,
    TensorBoardExport,
    TrackerExport,
    load,
)
from topotrain.tools.exporters.metrics import MetricsServer, split_address
from topotrain.tools.recording.job_history import HistorySource, HistoryStart

LOG = "--log"
EVERY_S = 0.5
"""Seconds between two looks at the history."""
END_S = 30.0
"""Seconds that the end of a job waits for its exports to write what is left."""
_LONGEST = 300  # characters of an error
_KINDS = ("tensorboard", "jsonl", "python")
_ACCEPTED = "must be tensorboard[:DIR], jsonl[:FILE] or python:MODULE:CLASS"


def check_values(logs: Sequence[str], metrics: str) -> None:
    """Raise ConfigError for wrong values of `--log` and `--metrics`.

    Only values that are wrong on every machine are refused.
    """
    for value in logs:
        if value.partition(":")[0] not in _KINDS:
            raise ConfigError(LOG, value, _ACCEPTED)
        if list(logs).count(value) > 1:
            raise ConfigError(LOG, value, "is given twice")
    if metrics:
        split_address(metrics)


class JobExports:
    """All exports of a job, each with a thread of its own.

    Neither the job nor another export waits for one that is slow: it finds fewer points of the older parts of curves.
    An exception of an export ends that export, and not the job.

    Args:
        job: the job.
        logs: the values of `--log`.
        metrics: the value of `--metrics`, or "".
        environ: the environment.

    Raises:
        ConfigError: an option is wrong, or its library is missing.
    """

    def __init__(self, job: Job, logs: Sequence[str], metrics: str, environ: Mapping[str, str]) -> None:
        check_values(logs, metrics)
        self._exports = {f"{LOG} {value}": _export(value, Path(job.workspace)) for value in logs}
        self._threads: dict[str, Thread] = {}
        self._notices = deque[Notice]()
        self._ended, self._code = Flag(), 0
        self._metrics = MetricsServer(metrics, environ) if metrics else None

    @property
    def url(self) -> str:
        """Where the metrics are; "" without them."""
        return "" if self._metrics is None else self._metrics.url

    def follow(self, source: HistorySource) -> None:
        """Export a history from the first event of its job on.

        Until then the workspace may be that of another job.
        """
        for name, export in self._exports.items():
            thread = Thread(target=self._run, args=(name, export, source), name=f"export {name}", daemon=True)
            self._threads[name] = thread
            thread.start()
        if self._metrics is not None:
            self._metrics.follow(source)

    def notices(self) -> list[Notice]:
        """Return what the user should know about the exports, once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def end(self, code: int) -> None:
        """Let all exports write what is left of a complete history; code: of the job."""
        until, self._code = monotonic() + END_S, code
        self._ended.set()
        for name, thread in self._threads.items():
            thread.join(max(0.0, until - monotonic()))
            if thread.is_alive():
                self._notify(name, f"has not ended {END_S:.0f} s after the job, and is left behind")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _run(self, name: str, export: CurveExport, source: HistorySource) -> None:
        try:
            self._follow(export, source)
        except Exception as error:
            # Errors of trackers may be pages long.
            why = next(iter(str(error).splitlines()), "")[:_LONGEST]
            self._notify(name, f"has failed: {type(error).__name__}: {why}; the job continues without it")

    def _follow(self, export: CurveExport, source: HistorySource) -> None:
        ended, cursor = False, None
        while not ended:
            ended = self._ended.wait(EVERY_S)
            history = source.read()
            if not history.has_job:
                continue
            if cursor is None:
                # The curves of earlier starts are written already.
                cursor = history.start.cursor
                export.start(history)
            delta = history.since(cursor)
            cursor = delta["cursor"]
            export.write(sorted(_points(delta, history.start), key=lambda point: point.time))
        if cursor is not None:
            export.end(self._code)

    def _notify(self, name: str, text: str) -> None:
        self._notices.append(Notice("launcher", f"{name} {text}"))


def _points(delta: Mapping[str, Any], start: HistoryStart) -> Iterator[CurvePoint]:
    for series in delta["series"]:
        for at, step, value in series["points"]:
            number = math.nan if value is None else float(value)
            yield CurvePoint(start.time + at - start.at, int(step), series["of"], series["metric"], number)


def _export(value: str, workspace: Path) -> CurveExport:
    """Return the export of a value that `check_values` has accepted."""
    kind, _, words = value.partition(":")
    if kind == "python":
        return TrackerExport(load(LOG, value, words))
    if kind == "jsonl":
        return JsonLinesExport(Path(words) if words else workspace / JSONL, private=not words)
    if find_spec("tensorboard") is None:
        raise ConfigError(LOG, value, "needs tensorboard: pip install 'topotrain[tensorboard]'")
    return TensorBoardExport(Path(words) if words else workspace / TENSORBOARD, private=not words)
