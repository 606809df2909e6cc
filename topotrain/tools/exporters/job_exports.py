"""The exports of a job that the options `--log` and `--metrics` ask for."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Topology
from topotrain.core.events import Event, Notice, Resized
from topotrain.tools.exporters import jsonl_export, metrics_server, tensorboard_export, tracker_export
from topotrain.tools.exporters.export_thread import Export, ExportThreads
from topotrain.tools.recording.job_start import JobStart

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
    """All exports of a job; a listener of its events.

    Args:
        job: the job.
        logs: the values of `--log`.
        metrics: the value of `--metrics`, or "".
        environ: the environment.

    Raises:
        ConfigError: an option is wrong, or its library is missing.
    """

    def __init__(self, job: Job, logs: Sequence[str], metrics: str, environ: Mapping[str, str]) -> None:
        self._exports: dict[str, Export] = {}
        self._threads: ExportThreads | None = None
        self._closing = ExitStack()
        self._start: JobStart | None = None
        self.url = ""
        """Where the metrics are; "" without them."""
        check_values(logs, metrics)
        for value in logs:
            self._exports[f"{LOG} {value}"] = _export(value, Path(job.workspace))
        if metrics:
            served = metrics_server.MetricsExport(metrics_server.parse_address(metrics, environ))
            self._closing.callback(served.close)
            self.url = served.url
            self._exports[f"{metrics_server.OPTION} {metrics}"] = served

    @property
    def has_begun(self) -> bool:
        """Whether the job is named."""
        return self._start is not None

    def begin(self, job: Job, topology: Topology, resumed: bool = False) -> None:
        """Name the job. Nothing is written before its first event.

        Until then the workspace may be that of another job. resumed: it goes on from a snapshot.
        """
        self._start = JobStart(job, topology, time.time(), resumed)

    def __call__(self, event: Event) -> None:
        """Take an event of the job."""
        start = self._start
        if start is None:
            return
        if self._threads is None:
            self._threads = ExportThreads(self._exports, start.header)
        self._threads.put(event)
        if isinstance(event, Resized):
            self._start = start.after(event)
            self._threads.put(self._start.header)

    def notices(self) -> list[Notice]:
        """Return what the user should know about the exports, once."""
        return [] if self._threads is None else self._threads.notices()

    def end(self, code: int) -> None:
        """Let all exports write what is left; code: the exit code of the job."""
        if self._threads is not None:
            self._threads.end(code)

    def close(self) -> None:
        """Stop serving."""
        self._closing.close()


def _export(value: str, workspace: Path) -> Export:
    """Return the export of a value that `check_values` has accepted."""
    kind, _, words = value.partition(":")
    match kind:
        case "tensorboard":
            if not tensorboard_export.is_installed():
                raise ConfigError(LOG, value, tensorboard_export.MISSING)
            folder = Path(words) if words else workspace / tensorboard_export.FOLDER
            return tensorboard_export.TensorBoardExport(folder, private=not words)
        case "jsonl":
            file = Path(words) if words else workspace / jsonl_export.FILE
            return jsonl_export.JsonLinesExport(file, private=not words)
        case _:
            return tracker_export.TrackerExport(tracker_export.load(LOG, value, words))
