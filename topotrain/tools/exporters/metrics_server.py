"""`--metrics PORT`: an HTTP server with the metrics of a job, for Prometheus.

It listens on loopback, unless another address is given. There it speaks TLS, and each request needs a token.
"""

import hmac
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Thread
from typing import Any

from topotrain.comm.security.tls import Certificate
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.listener import Newcomers
from topotrain.comm.transport.tcp import ListenAddress, local_address
from topotrain.comm.transport.tcp_socket import bind, url_of
from topotrain.config.job import ConfigError
from topotrain.tools.exporters.prometheus_metrics import MISSING, exposition
from topotrain.tools.recording.job_history import JobHistory

OPTION = "--metrics"
VARIABLE = "TOPOTRAIN_METRICS_TOKEN"
PATH = "/metrics"
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SHORTEST_TOKEN = 16
_SLOW_S = 10.0
"""Seconds for a whole request."""
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where metrics are served. token: what each request must have; "": none."""

    listen: ListenAddress
    port: int
    token: str = ""


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of the value of `--metrics`; no host: "".

    Raises ConfigError.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (colon and not host):
        raise ConfigError(OPTION, text, "must be PORT or ADDRESS:PORT, such as 9400 or 10.0.0.1:9400")
    return host, int(port)


def parse_address(text: str, environ: Mapping[str, str]) -> MetricsAddress:
    """Parse the value of `--metrics` for this machine. Raises ConfigError."""
    host, port = split_address(text)
    token = environ.get(VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise ConfigError(VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} characters, all of them ASCII")
    try:
        listen = local_address(host.strip("[]") or "127.0.0.1")
    except TransportError as error:
        raise ConfigError(OPTION, text, str(error)) from None
    if not token and not listen.loopback:
        raise ConfigError(OPTION, text, f"other machines reach this address, so it needs a token: set {VARIABLE}")
    if find_spec("prometheus_client") is None:
        raise ConfigError(OPTION, text, MISSING)
    return MetricsAddress(listen, port, token)


class MetricsExport:
    """Serves the metrics of a job from its start to its end.

    Args:
        address: where.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: MetricsAddress) -> None:
        where = f"{address.listen.address}:{address.port}"
        try:
            tls = None if address.listen.loopback else Certificate.make().context
            self._server = _MetricsHttpServer(address, tls)
        except OSError as error:
            raise ConfigError(OPTION, where, f"must be an address to listen at ({error.strerror})") from None
        except TransportError as error:
            raise ConfigError(OPTION, where, str(error)) from None
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL for Prometheus."""
        return self._server.url

    def start(self, history: JobHistory, resumed: bool) -> None:
        self.update(history)

    def update(self, history: JobHistory) -> None:
        self._server.show(history.summary())

    def end(self, code: int) -> None:
        """As `Export.end`."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _MetricsHttpServer(ThreadingHTTPServer):
    """Serves the last summary. tls: for an address that other machines reach."""

    daemon_threads = True

    def __init__(self, address: MetricsAddress, tls: ssl.SSLContext | None) -> None:
        super().__init__((address.listen.address, address.port), _MetricsRequest, bind_and_activate=False)
        self.socket.close()
        self.socket = bind(address.listen.family, address.listen.address, address.port)
        self.server_address = self.socket.getsockname()
        self._address, self._newcomers = address, Newcomers(_SLOW_S)
        self.summary: Mapping[str, Any] = {}
        self.url = url_of(address.listen.address, self.port, "https" if tls else "http") + PATH
        if tls is not None:
            # Each connection shakes hands on its own thread, and not on the one that accepts.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, for which another one may have to end."""
        if self._newcomers.crowded:
            time.sleep(_PAUSE_S)  # their threads close those first, and the server asks again
        return self._newcomers.accept(super().get_request)

    def service_actions(self) -> None:
        """End late connections. `serve_forever` calls this each 0.5 s and after a request."""
        self._newcomers.end_late()

    def show(self, summary: Mapping[str, Any]) -> None:
        # Replaced as a whole: requests have threads of their own.
        self.summary = summary

    def refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return code and text for a request that is refused."""
        # A page of another site may have made its name an address of this machine.
        host = headers.get("Host") or ""
        if self._address.listen.loopback and host.removesuffix(f":{self.port}").lower() not in _LOCAL:
            return 403, "this address is for this machine only"
        given = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if self._address.token and not hmac.compare_digest(given.encode(), self._address.token.encode()):
            return 401, f"the header Authorization must be: Bearer and the text of {VARIABLE}"
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that break off are no news on a job's terminal."""


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
