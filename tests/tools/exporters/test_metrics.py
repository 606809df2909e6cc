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

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sample_history import sampled, step

from topotrain.comm.transport.listener import MAX_UNPROVEN
from topotrain.config.job import ConfigError
from topotrain.tools import http_server
from topotrain.tools.exporters import metrics
from topotrain.tools.exporters.metrics import ALL, STATES, MetricsServer, metrics_answer
from topotrain.tools.recording.recorded_lines import TimedEvent

ROOT = Path(__file__).parents[3]
TOKEN = "0123456789abcdef"
UNPROVEN = ssl._create_unverified_context()
NAME = re.compile(r"\btopotrain_[a-z0-9_]+")


@contextmanager
def served(text: str = "0", token: str = "") -> "Iterator[MetricsServer]":
    with closing(MetricsServer(text, {metrics.VARIABLE: token} if token else {})) as export:
        export.follow(SimpleNamespace(read=sampled))
        yield export


def port_of(export: MetricsServer) -> int:
    return int(export.url.rsplit(":", 1)[1].partition("/")[0])


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


def test_prometheus_reads_the_last_figures_of_a_job_in_the_format_that_it_asks_for() -> None:
    with served() as export:
        code, text, kind = fetch(export.url)
        history = sampled()
        export.follow(SimpleNamespace(read=lambda: history))
        history.add(TimedEvent(99.0, step("worker 0/0", 40)))
        _, later, open_kind = fetch(export.url, Accept="application/openmetrics-text; version=1.0.0")
    assert code == 200 and kind.startswith("text/plain; version=")
    assert open_kind.startswith("application/openmetrics-text") and later.endswith("# EOF\n")
    assert values(later)["topotrain_worker_steps_total", "0", "worker 0/0"] == 40
    found = values(text)
    assert (
        found.items()
        >= {
            ("topotrain_worker_steps_total", "0", "worker 0/0"): 12,
            ("topotrain_worker_loss", "1", "worker 1/0"): 0.75,
            ("topotrain_worker_staleness_p95_versions", "1", "worker 1/0"): 3,
            ("topotrain_worker_logged_value", "0", 'accuracy "of" all', "worker 0/0"): 0.5,
            ("topotrain_process_memory_bytes", "0", "server 0/0"): 5_000_000,
            ("topotrain_server_updates_total", "0", "server 0/0"): 30,
            ("topotrain_job_info", "Downpour", "digits"): 1,
            ("topotrain_job_running",): 1,
            ("topotrain_job_incidents_total",): 4,
            ("topotrain_job_steps_total",): 12,
            ("topotrain_job_progress_ratio",): 0.25,
            ("topotrain_process_state", "0", "worker 0/0", "computes"): 1,
        }.items()
    )
    states = [value for name, value in found.items() if name[0] == "topotrain_process_state"]
    assert sum(states) == 3 and len(states) == 3 * len(STATES)


def test_every_metric_has_help_and_its_type_and_what_is_not_known_is_left_out() -> None:
    text = metrics_answer(sampled().summary()).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in ALL:
        family = families[metric.name.removesuffix("_total")]
        assert family.documentation == metric.help and metric.help.endswith(".")
        assert family.type == ("counter" if metric.is_counter else "gauge")
    assert len(families) == len(ALL)
    unknown = values(metrics_answer({}).body.decode())
    assert {name for name, *_ in unknown} == {
        f"topotrain_job_{name}" for name in ("info", "running", "incidents_total")
    }


def test_a_page_of_another_site_is_refused_and_other_names_of_this_machine_are_not() -> None:
    with served() as export:
        assert fetch(export.url, Host="evil.example:80")[:2] == (403, "this address is for this machine only\n")
        assert fetch(export.url, Host=f"localhost:{port_of(export)}")[0] == 200
        assert fetch(export.url.replace("/metrics", "/other"))[:2] == (404, "the metrics are at /metrics\n")
        assert fetch(export.url.replace("/metrics", "/../metrics"))[0] == 404
    with served("localhost:0", TOKEN) as export:
        assert fetch(export.url)[0] == 401, "a token counts on loopback, too"
        assert fetch(export.url, Authorization=f"Bearer {TOKEN}")[0] == 200
    if Path("/proc/net/if_inet6").exists():
        with served("[::1]:0") as export:
            assert fetch(export.url)[0] == 200 and "[::1]" in export.url


def test_an_address_for_other_machines_needs_a_token_and_speaks_tls() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError as error:
            pytest.skip(f"this machine has no other address than loopback: {error}")
        here = str(probe.getsockname()[0])
    with pytest.raises(ConfigError, match=rf"--metrics.*{here}:0.*TOPOTRAIN_METRICS_TOKEN"):
        MetricsServer(f"{here}:0", {})
    with served(f"{here}:0", TOKEN) as export:
        assert export.url.startswith(f"https://{here}:")
        assert fetch(export.url)[0] == 401
        assert fetch(export.url, Authorization="Bearer " + TOKEN[:-1])[0] == 401
        assert fetch(export.url, Authorization=f"Bearer {TOKEN}", Host="gpu7")[0] == 200
        with socket.create_connection((here, port_of(export))) as silent:
            # It says nothing, and others are served meanwhile.
            assert fetch(export.url, Authorization=f"Bearer {TOKEN}")[0] == 200
            silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"topotrain" not in silent.recv(4096)


def test_a_wrong_address_and_a_missing_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        (text, "--metrics.*must be PORT or ADDRESS:PORT", "") for text in ("", "x", ":1", "70000", "1.5", "-1", "１２")
    ]
    wrong += [("0.0.0.0:0", r"--metrics.*0\.0\.0\.0.*every interface", TOKEN), ("0", "at least 16 characters", "short")]
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        wrong.append((str(port), rf"--metrics = {port}: must be a free port, .*another process listens there", ""))
        for text, said, token in wrong:
            with pytest.raises(ConfigError, match=said):
                MetricsServer(text, {metrics.VARIABLE: token} if token else {})
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'topotrain\[metrics\]'"):
        MetricsServer("9400", {})


def test_the_dashboard_and_the_documentation_name_the_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "examples/grafana/topotrain.json").read_text())
    panels = [json.dumps(panel) for panel in dashboard["panels"]]
    named, known = {*NAME.findall(json.dumps(dashboard))} - {"topotrain_"}, {metric.name for metric in ALL}
    assert named <= known and all(NAME.search(panel) for panel in panels)
    # Those that no panel needs are few.
    unused = ("job_elapsed_seconds", "job_loss", "job_running", "worker_steps_total")
    assert known - named <= {f"topotrain_{name}" for name in unused}
    asked = set(re.findall(r'state=~"([^"\\]+)', "".join(panels).replace('\\"', '"'))[0].split("|"))
    assert asked <= set(STATES)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    text = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    section = text.split("## Metrics for Prometheus")[1].split("\n## ")[0]
    assert {
        f"topotrain_{name}" for name in re.findall(r"`((?:job|worker|server|process)_[a-z0-9_]+)`", section)
    } == known


def test_silent_and_slow_clients_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    before = threading.active_count()
    with served() as export, ExitStack() as stack:
        address = "127.0.0.1", port_of(export)
        slow = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(100)]
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
