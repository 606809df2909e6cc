"""`--metrics PORT`: an HTTP server with the metrics of a job, for Prometheus.

It listens on loopback, unless another address is given. There each request needs a token.
"""

import hmac
import socket
import socketserver
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from ipaddress import ip_address
from threading import Thread
from typing import Any

from topotrain.config.job import ConfigError
from topotrain.tools.exporters.prometheus_metrics import MISSING, exposition
from topotrain.tools.recording.job_history import JobHistory

OPTION = "--metrics"
VARIABLE = "TOPOTRAIN_METRICS_TOKEN"
PATH = "/metrics"
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SHORTEST_TOKEN = 16
_SLOW_S = 10.0


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where metrics are served. token: what each request must have; "": none."""

    host: str
    port: int
    token: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, environ: Mapping[str, str]) -> MetricsAddress:
    """Parse the value of `--metrics`. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (colon and not host):
        raise ConfigError(OPTION, text, "must be PORT or ADDRESS:PORT, such as 9400 or 0.0.0.0:9400")
    token = environ.get(VARIABLE, "")
    found = MetricsAddress(host.strip("[]") or "127.0.0.1", int(port), token)
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise ConfigError(VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} characters, all of them ASCII")
    if not token and not found.is_local:
        accepted = f"other machines reach this address, so it needs a token: set {VARIABLE}"
        raise ConfigError(OPTION, text, accepted)
    if find_spec("prometheus_client") is None:
        raise ConfigError(OPTION, text, MISSING)
    return found


class MetricsExport:
    """Serves the metrics of a job from its start to its end.

    Args:
        address: where.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: MetricsAddress) -> None:
        try:
            self._server = _MetricsHttpServer(address)
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise ConfigError(OPTION, where, f"must be an address to listen at ({error.strerror})") from None
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL for Prometheus."""
        return self._server.url

    def start(self, history: JobHistory, resumed: bool) -> None:
        """As `Export.start`."""
        self._server.summary = history.summary()

    def update(self, history: JobHistory) -> None:
        """As `Export.update`."""
        self._server.summary = history.summary()

    def end(self, code: int) -> None:
        """As `Export.end`."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _MetricsHttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: MetricsAddress) -> None:
        self.address = address
        self.summary: dict[str, Any] = {}  # replaced as a whole: requests have threads of their own
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _MetricsRequest)

    def server_bind(self) -> None:
        # That of HTTPServer asks a name server for the name of this machine.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}{PATH}"

    def refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return code and text for a request that is refused."""
        # A page of another site may have made its name an address of this machine.
        host = headers.get("Host") or ""
        if self.address.is_local and host.removesuffix(f":{self.server_port}").lower() not in _LOCAL:
            return 403, "this address is for this machine only"
        given = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.address.token and not hmac.compare_digest(given.encode(), self.address.token.encode()):
            return 401, f"the header Authorization must be: Bearer and the text of {VARIABLE}"
        return None


class _MetricsRequest(BaseHTTPRequestHandler):
    server: _MetricsHttpServer
    timeout = _SLOW_S

    def do_GET(self) -> None:
        refusal = self.server.refusal(self.headers)  # type: ignore[arg-type]
        if refusal is not None:
            self._answer(refusal[0], refusal[1].encode() + b"\n")
        elif self.path.partition("?")[0] != PATH:
            self._answer(404, f"the metrics are at {PATH}\n".encode())
        else:
            found = exposition(self.server.summary, self.headers.get("Accept") or "")
            self._answer(200, found.body, found.content_type)

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: stderr is the terminal of the job."""
