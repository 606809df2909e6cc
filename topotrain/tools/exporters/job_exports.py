"""The exports of a job that the options `--log` and `--metrics` ask for."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

from topotrain.config.job import ConfigError, Job
from topotrain.core.events import Notice
from topotrain.tools.exporters import curve_export, curve_files, metrics_server
from topotrain.tools.exporters.curve_export import CurveExport, ExportThread
from topotrain.tools.exporters.tracker import TrackerExport, load
from topotrain.tools.recording.job_history import HistorySource

LOG = "--log"
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
        metrics_server.split_address(metrics)


class JobExports:
    """All exports of a job.

    Neither the job nor another export waits for one that is slow: it finds fewer points of the older parts of curves.

    Args:
        job: the job.
        logs: the values of `--log`.
        metrics: the value of `--metrics`, or "".
        environ: the environment.

    Raises:
        ConfigError: an option is wrong, or its library is missing.
    """

    def __init__(self, job: Job, logs: Sequence[str], metrics: str, environ: Mapping[str, str]) -> None:
        self._exports: dict[str, CurveExport] = {}
        self._threads: list[ExportThread] = []
        self._notices = deque[Notice]()
        self._metrics: metrics_server.MetricsServer | None = None
        check_values(logs, metrics)
        for value in logs:
            self._exports[f"{LOG} {value}"] = _export(value, Path(job.workspace))
        if metrics:
            self._metrics = metrics_server.MetricsServer(metrics, environ)

    @property
    def url(self) -> str:
        """Where the metrics are; "" without them."""
        return "" if self._metrics is None else self._metrics.url

    def follow(self, source: HistorySource) -> None:
        """Export a history from the first event of its job on.

        Until then the workspace may be that of another job.
        """
        self._threads = [ExportThread(name, each, source, self._notices) for name, each in self._exports.items()]
        if self._metrics is not None:
            self._metrics.follow(source)

    def notices(self) -> list[Notice]:
        """Return what the user should know about the exports, once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def end(self, code: int) -> None:
        """Let all exports write what is left of a complete history; code: of the job."""
        until = monotonic() + curve_export.END_S
        for thread in self._threads:
            thread.end(code)
        for thread in self._threads:
            thread.join(until)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


def _export(value: str, workspace: Path) -> CurveExport:
    """Return the export of a value that `check_values` has accepted."""
    kind, _, words = value.partition(":")
    if kind == "python":
        return TrackerExport(load(LOG, value, words))
    if kind == "jsonl":
        return curve_files.JsonLinesExport(Path(words) if words else workspace / curve_files.JSONL, private=not words)
    if not curve_files.has_tensorboard():
        raise ConfigError(LOG, value, curve_files.MISSING)
    folder = Path(words) if words else workspace / curve_files.TENSORBOARD
    return curve_files.TensorBoardExport(folder, private=not words)
