"""`--metrics PORT`: the metrics of a job in Prometheus' text format, over HTTP.

They are made from the summary of the job's history. Names follow Prometheus' rules: base units at the end, `_total` for
counters. The label `process` is the name of a worker or server, and `group` the number of its group.

The server listens on loopback, unless another address is given. There it speaks TLS, and each request needs a token.
"""

import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.tools.http_server import (
    HttpAnswer,
    HttpError,
    HttpRequest,
    HttpServer,
    ListeningSocket,
    listen,
    plain_text,
)
from topotrain.tools.recording.job_history import HistorySource

OPTION = "--metrics"
VARIABLE = "TOPOTRAIN_METRICS_TOKEN"
PATH = "/metrics"
_SHORTEST_TOKEN = 16
MISSING = "needs prometheus_client: pip install 'topotrain[metrics]'"
STATES = ("starting", "computes", "waits", "applies", "stopped", "dead", "restarts", "away", "finished")


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


def available() -> bool:
    """Return whether prometheus_client is installed, without importing it."""
    return find_spec("prometheus_client") is not None


def metrics_answer(summary: Mapping[str, Any], accept: str = "") -> HttpAnswer:
    """Return the metrics of a job that have a value.

    summary: of its `JobHistory`. accept: the header of the request; "": the text format.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_SummaryCollector(summary))
    encode, content_type = choose_encoder(accept)
    return HttpAnswer(200, encode(registry), content_type)


@dataclass(frozen=True, slots=True, eq=False)  # the registry keeps it by identity
class _SummaryCollector:
    """A collector of prometheus_client for one summary."""

    summary: Mapping[str, Any]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in ALL:
            family: Any = (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(metric.name, metric.help)
            for labels, value in _rows(metric, self.summary):
                family.add_sample(metric.name, labels, float(value))
            if family.samples:
                yield family


def _rows(metric: JobMetric, summary: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and the value of each sample."""
    if metric is INFO:
        yield {name: str(summary.get(name) or "") for name in ("name", "framework")}, 1
    elif metric is RUNNING:
        yield {}, summary.get("state") == "running"
    elif metric is INCIDENTS:
        # The list has the last ones only.
        yield {}, max((each["number"] + 1 for each in summary.get("incidents", ())), default=0)
    elif not metric.of and summary.get(metric.key) is not None:
        yield {}, summary[metric.key]
    for process in (process for kind in metric.of for process in summary.get(kind, ())):
        labels, value = _labels(process["name"]), process.get(metric.key)
        if metric is STATE:
            yield from (({**labels, "state": state}, value == state) for state in STATES)
        elif metric is LOGGED:
            yield from (({**labels, "name": name}, each) for name, each in (value or {}).items() if each is not None)
        elif value is not None:
            yield labels, value


def _labels(process: str) -> dict[str, str]:
    return {"process": process, "group": process.partition(" ")[2].partition("/")[0]}


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of the value of `--metrics`; no host: "".

    Raises ConfigError.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (colon and not host):
        raise ConfigError(OPTION, text, "must be PORT or ADDRESS:PORT, such as 9400 or 10.0.0.1:9400")
    return host, int(port)


class MetricsServer:
    """Serves the metrics of a job from its start to its end.

    Args:
        text: the value of `--metrics`.
        environ: may have a token, which each request must have then.

    Raises:
        ConfigError: the address cannot be used on this machine.
    """

    headers: Mapping[str, str] = {}

    def __init__(self, text: str, environ: Mapping[str, str]) -> None:
        self._token = _token(environ)
        self._bound = _bind(text, bool(self._token))
        self.url = self._bound.url + PATH
        self._source: HistorySource | None = None
        self._server = HttpServer(self._bound, self, "metrics")

    def follow(self, source: HistorySource) -> None:
        """Serve the metrics of this history, as it is at the time of a request."""
        self._source = source

    def close(self) -> None:
        self._server.close()

    def admits(self, request: HttpRequest) -> bool:
        """Return False: the whole request of each client has its time."""
        return False

    def answer(self, request: HttpRequest) -> HttpAnswer:
        # A page of another site may have made its name an address of this machine.
        host = request.headers.get("host", "").removesuffix(f":{self._bound.port}").lower()
        if self._bound.address.loopback and host not in self._bound.names:
            raise HttpError(403, "this address is for this machine only")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            refusal = plain_text(401, f"the header Authorization must be: Bearer and the text of {VARIABLE}\n")
            return replace(refusal, headers={"www-authenticate": "Bearer"})
        if request.path != PATH:
            raise HttpError(404, f"the metrics are at {PATH}")
        summary = {} if self._source is None else self._source.read().summary()
        return metrics_answer(summary, request.headers.get("accept", ""))


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get(VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise ConfigError(VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} characters, all of them ASCII")
    return token


def _bind(text: str, has_token: bool) -> ListeningSocket:
    host, port = split_address(text)
    if not available():
        raise ConfigError(OPTION, text, MISSING)
    bound = listen(port, host.strip("[]") or "127.0.0.1", OPTION, OPTION)
    if not has_token and not bound.address.loopback:
        bound.sock.close()
        raise ConfigError(OPTION, text, f"other machines reach this address, so it needs a token: set {VARIABLE}")
    return bound
