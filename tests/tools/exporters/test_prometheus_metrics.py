"""The metrics of a job: served over HTTP, read by Prometheus' own parser; the dashboard and the page name them."""

import json
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sample_history import sampled, step

from topotrain.comm.transport.listener import MAX_UNPROVEN
from topotrain.config.job import ConfigError
from topotrain.tools import http_server
from topotrain.tools.exporters import metrics_server, prometheus_metrics
from topotrain.tools.exporters.metrics_server import MetricsServer
from topotrain.tools.exporters.prometheus_metrics import ALL, STATES, metrics_answer
from topotrain.tools.recording.recorded_lines import TimedEvent

ROOT = Path(__file__).parents[3]
TOKEN = "0123456789abcdef"
UNPROVEN = ssl._create_unverified_context()


@contextmanager
def served(text: str = "0", token: str = "") -> "Iterator[MetricsServer]":
    environ = {metrics_server.VARIABLE: token} if token else {}
    with closing(MetricsServer(text, environ)) as export:
        export.follow(SimpleNamespace(read=sampled))
        yield export


def fetch(url: str, **headers: str) -> tuple[int, str, str]:
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=10, context=UNPROVEN) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def values(text: str) -> dict[tuple[str, ...], float]:
    """The values by name and labels, in the order of the labels' names."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_the_figures_of_a_job() -> None:
    with served() as export:
        code, text, kind = fetch(export.url)
    assert code == 200 and kind.startswith("text/plain; version=")
    found = values(text)
    assert found["topotrain_worker_steps_total", "0", "worker 0/0"] == 12
    assert found["topotrain_worker_loss", "1", "worker 1/0"] == 0.75
    assert found["topotrain_worker_staleness_p95_versions", "1", "worker 1/0"] == 3
    assert found["topotrain_worker_logged_value", "0", 'accuracy "of" all', "worker 0/0"] == 0.5
    assert found["topotrain_process_memory_bytes", "0", "server 0/0"] == 5_000_000
    assert found["topotrain_server_updates_total", "0", "server 0/0"] == 30
    assert found["topotrain_job_info", "Downpour", "digits"] == 1
    assert found["topotrain_job_running",] == 1
    assert found["topotrain_job_incidents_total",] == 4
    assert found["topotrain_job_steps_total",] == 12
    assert found["topotrain_job_progress_ratio",] == 0.25
    states = {name: value for name, value in found.items() if name[0] == "topotrain_process_state"}
    assert states["topotrain_process_state", "0", "worker 0/0", "computes"] == 1
    assert sum(states.values()) == 3 and len(states) == 3 * len(STATES)


def test_every_metric_has_help_and_its_type() -> None:
    text = metrics_answer(sampled().summary()).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in ALL:
        family = families[metric.name.removesuffix("_total")]
        assert family.documentation == metric.help and metric.help.endswith(".")
        assert family.type == ("counter" if metric.is_counter else "gauge")
    assert len(families) == len(ALL)


def test_what_is_not_known_yet_is_left_out() -> None:
    text = metrics_answer({}).body.decode()
    assert {name for name, *_ in values(text)} == {
        "topotrain_job_info",
        "topotrain_job_running",
        "topotrain_job_incidents_total",
    }


def test_requests_see_the_last_state_of_the_job_in_the_format_that_they_ask_for() -> None:
    with served() as export:
        _, text, kind = fetch(export.url, Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
        history = sampled()
        export.follow(SimpleNamespace(read=lambda: history))
        history.add(TimedEvent(99.0, step("worker 0/0", 40)))
        assert values(fetch(export.url)[1])["topotrain_worker_steps_total", "0", "worker 0/0"] == 40


def test_a_page_of_another_site_is_refused() -> None:
    with served() as export:
        assert fetch(export.url, Host="evil.example:80")[:2] == (403, "this address is for this machine only\n")
        port = export.url.rpartition(":")[2].partition("/")[0]
        assert fetch(export.url, Host=f"localhost:{port}")[0] == 200
        assert fetch(export.url.replace("/metrics", "/other"))[:2] == (404, "the metrics are at /metrics\n")
        assert fetch(export.url.replace("/metrics", "/../metrics"))[0] == 404


def outer_address() -> str:
    """An address at which other machines reach this one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no other address than loopback: {error}")
        return str(probe.getsockname()[0])


def test_an_address_for_other_machines_needs_a_token_and_speaks_tls() -> None:
    here = outer_address()
    with pytest.raises(ConfigError, match=rf"--metrics.*{here}:0.*TOPOTRAIN_METRICS_TOKEN"):
        MetricsServer(f"{here}:0", {})
    with served(f"{here}:0", TOKEN) as export:
        assert export.url.startswith(f"https://{here}:")
        assert fetch(export.url)[0] == 401
        assert fetch(export.url, Authorization="Bearer " + TOKEN[:-1])[0] == 401
        assert fetch(export.url, Authorization=f"Bearer {TOKEN}", Host="gpu7")[0] == 200
        with socket.create_connection((here, int(export.url.rsplit(":", 1)[1].partition("/")[0]))) as silent:
            # It says nothing, and others are served meanwhile.
            assert fetch(export.url, Authorization=f"Bearer {TOKEN}")[0] == 200
            silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"topotrain" not in silent.recv(4096)


def test_a_token_counts_on_loopback_too() -> None:
    with served(token=TOKEN) as export:
        assert fetch(export.url)[0] == 401
        assert fetch(export.url, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_wrong_address_and_a_missing_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, said: str, token: str = "") -> None:
        with pytest.raises(ConfigError, match=said):
            MetricsServer(text, {metrics_server.VARIABLE: token} if token else {})

    for text in ("", "x", ":1", "70000", "1.5", "localhost:", "-1", "１２"):
        refused(text, r"--metrics.*must be PORT or ADDRESS:PORT")
    refused("0.0.0.0:0", r"--metrics.*0\.0\.0\.0.*every interface", TOKEN)
    refused("0", "at least 16 characters", "short")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refused(str(port), rf"--metrics = {port}: must be a free port, .*another process listens there")
    monkeypatch.setattr(prometheus_metrics, "find_spec", lambda name: None)
    refused("9400", r"pip install 'topotrain\[metrics\]'")


def test_ipv6_and_names_of_this_machine() -> None:
    with served("localhost:0") as export:
        assert fetch(export.url)[0] == 200
    if socket.has_ipv6:
        try:
            with served("[::1]:0") as export:
                assert fetch(export.url)[0] == 200 and "[::1]" in export.url
        except ConfigError as error:
            pytest.skip(f"no loopback of IPv6: {error}")


# ---- who names them --------------------------------------------------------------------------------------------------

_NAME = re.compile(r"\btopotrain_[a-z0-9_]+")


def expressions(value: Any) -> Iterator[str]:
    """The texts of a dashboard in which metrics are named."""
    if isinstance(value, dict):
        yield from (each for key in ("expr", "query") if isinstance(each := value.get(key), str))
    if isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from expressions(inside)


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "examples/grafana/topotrain.json").read_text())
    named = {name for text in expressions(dashboard) for name in _NAME.findall(text)}
    known = {metric.name for metric in ALL}
    assert named <= known
    # Each panel has its own, and those that no panel needs are few.
    assert all(any(expressions(panel)) for panel in dashboard["panels"])
    assert known - named <= {
        "topotrain_job_elapsed_seconds",
        "topotrain_job_loss",
        "topotrain_job_running",
        "topotrain_worker_steps_total",
    }
    asked = set(re.findall(r'state=~"([^"]+)"', "".join(expressions(dashboard)))[0].split("|"))
    assert asked <= set(STATES)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_page_has_every_metric() -> None:
    text = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    section = text.split("## Metrics for Prometheus")[1].split("\n## ")[0]
    named = {f"topotrain_{name}" for name in re.findall(r"`((?:job|worker|server|process)_[a-z0-9_]+)`", section)}
    assert named == {metric.name for metric in prometheus_metrics.ALL}


def test_silent_and_slow_clients_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    before = threading.active_count()
    with served() as export, ExitStack() as stack:
        port = int(export.url.rsplit(":", 1)[1].partition("/")[0])
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(100)]
        for sock in slow:
            with suppress(OSError):  # pushed out
                sock.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert fetch(export.url)[0] == 200, "a newcomer pushes one of them out"
        until = time.monotonic() + 20.0
        while threading.active_count() - before > MAX_UNPROVEN + 2:  # threads of those pushed out are ending
            assert time.monotonic() < until
            time.sleep(0.02)
        # A byte now and then is no reason to wait longer.
        while any(_takes(sock) for sock in slow):
            assert threading.active_count() - before <= MAX_UNPROVEN + 2
            time.sleep(0.02)


def _takes(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"a")
    except OSError:
        return False
    return True
