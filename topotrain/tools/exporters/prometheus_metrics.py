"""The metrics of a job in Prometheus' text format.

They are made from the summary of its history. Names follow Prometheus' rules: base units at the end, `_total` for
counters. The label `process` is the name of a worker or server, and `group` the number of its group.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

MISSING = "needs prometheus_client: pip install 'topotrain[metrics]'"
STATES = ("starting", "computes", "waits", "applies", "stopped", "dead", "restarts", "away", "finished")


def available() -> bool:
    """Return whether prometheus_client is installed, without importing it."""
    return find_spec("prometheus_client") is not None


@dataclass(frozen=True, slots=True)
class JobMetric:
    """A metric with one value for the job, or for each process.

    key: in the summary. of: the lists of the summary that have it; (): the job.
    """

    name: str
    help: str
    key: str
    of: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


_W, _S = ("workers",), ("servers",)
METRICS = (
    JobMetric("topotrain_job_elapsed_seconds", "Seconds since the start of the job.", "elapsed_s"),
    JobMetric("topotrain_job_progress_ratio", "Share of the job's samples that are done.", "progress"),
    JobMetric("topotrain_job_remaining_seconds", "Estimate of the seconds to the end of the job.", "eta_s"),
    JobMetric("topotrain_job_epoch", "Number of the epoch that is under way, from 0.", "epoch"),
    JobMetric("topotrain_job_steps_total", "Steps of the worker that has made most.", "step"),
    JobMetric("topotrain_job_loss", "Mean of the last losses of the workers that are there.", "loss"),
    JobMetric(
        "topotrain_job_samples_per_second", "Samples that all workers together read per second.", "samples_per_s"
    ),
    JobMetric("topotrain_job_sent_bytes_per_second", "Bytes that all processes send per second.", "bytes_per_s"),
    JobMetric("topotrain_worker_steps_total", "Steps of the worker.", "step", _W),
    JobMetric("topotrain_worker_loss", "The loss that the worker has reported last.", "loss", _W),
    JobMetric("topotrain_worker_samples_per_second", "Samples that the worker reads per second.", "samples_per_s", _W),
    JobMetric(
        "topotrain_worker_staleness_mean_versions",
        "Mean staleness of its gradients, of the last seconds.",
        "staleness_mean",
        _W,
    ),
    JobMetric(
        "topotrain_worker_staleness_p95_versions",
        "95 of 100 gradients of the last seconds were at most so stale.",
        "staleness_p95",
        _W,
    ),
    JobMetric(
        "topotrain_worker_staleness_max_versions",
        "Staleness of its stalest gradient of the last seconds.",
        "staleness_max",
        _W,
    ),
    JobMetric("topotrain_worker_waiting_ratio", "Share of its time in which the worker waits.", "waiting_share", _W),
    JobMetric("topotrain_server_updates_total", "Steps that the server has applied.", "updates", _S),
    JobMetric("topotrain_process_memory_bytes", "Resident memory of the process.", "memory_bytes", _W + _S),
)
INFO = JobMetric("topotrain_job_info", "Always 1. Its labels are the name and the framework of the job.", "")
RUNNING = JobMetric("topotrain_job_running", "1 while the job runs, else 0.", "state")
INCIDENTS = JobMetric(
    "topotrain_job_incidents_total", "Losses of processes that the job has survived, and resizes.", "incidents"
)
STATE = JobMetric(
    "topotrain_process_state", "1 for the present state of the process, 0 for all others.", "state", _W + _S
)
LOGGED = JobMetric("topotrain_worker_logged_value", "The last value that the script has logged with tt.log.", "log", _W)
ALL = (*METRICS, INFO, RUNNING, INCIDENTS, STATE, LOGGED)
_LABELS = ("process", "group")


@dataclass(frozen=True, slots=True)
class Exposition:
    """The answer to a request for metrics."""

    body: bytes
    content_type: str


def exposition(summary: Mapping[str, Any], accept: str = "") -> Exposition:
    """Return the metrics of a job.

    summary: of `JobHistory`. accept: the header of the request; "": the text format.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_SummaryCollector(summary))
    encode, content_type = choose_encoder(accept)
    return Exposition(encode(registry), content_type)


@dataclass(frozen=True, slots=True)
class _Row:
    labels: tuple[str, ...]
    value: float


class _SummaryCollector:
    """A collector of prometheus_client for one summary."""

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._summary = summary

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics that have a value."""
        summary = self._summary
        for metric in METRICS:
            yield from _family(metric, _LABELS if metric.of else (), _rows(metric, summary))
        info = tuple(str(summary.get(name) or "") for name in ("name", "framework"))
        yield from _family(INFO, ("name", "framework"), [_Row(info, 1)])
        yield from _family(RUNNING, (), [_Row((), summary.get("state") == "running")])
        # The list has the last ones only.
        incidents = max((each["number"] + 1 for each in summary.get("incidents", ())), default=0)
        yield from _family(INCIDENTS, (), [_Row((), incidents)])
        yield from _family(STATE, (*_LABELS, "state"), _states(summary))
        yield from _family(LOGGED, (*_LABELS, "name"), _logged(summary))


def _family(metric: JobMetric, labels: tuple[str, ...], rows: Iterable[_Row]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family: Any = (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(
        metric.name, metric.help, labels=labels
    )
    for row in rows:
        family.add_metric(row.labels, row.value)
    if family.samples:
        yield family


def _rows(metric: JobMetric, summary: Mapping[str, Any]) -> Iterator[_Row]:
    if not metric.of:
        if summary.get(metric.key) is not None:
            yield _Row((), summary[metric.key])
        return
    for process in _processes(metric, summary):
        if process.get(metric.key) is not None:
            yield _Row(_labels(process), process[metric.key])


def _states(summary: Mapping[str, Any]) -> Iterator[_Row]:
    for process in _processes(STATE, summary):
        for state in STATES:
            yield _Row((*_labels(process), state), process.get("state") == state)


def _logged(summary: Mapping[str, Any]) -> Iterator[_Row]:
    for worker in _processes(LOGGED, summary):
        for name, value in (worker.get("log") or {}).items():
            yield _Row((*_labels(worker), name), value)


def _processes(metric: JobMetric, summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (process for kind in metric.of for process in summary.get(kind, ()))


def _labels(process: Mapping[str, Any]) -> tuple[str, str]:
    name = process["name"]
    return name, name.partition(" ")[2].partition("/")[0]
