"""`--metrics PORT`: an HTTP server with the metrics of a job, for Prometheus.

It listens on loopback, unless another address is given. There it speaks TLS, and each request needs a token.
"""

import hmac
from collections.abc import Mapping
from dataclasses import replace

from topotrain.comm.transport import TransportError
from topotrain.comm.transport.tcp import local_address
from topotrain.config.job import ConfigError
from topotrain.tools.exporters.prometheus_metrics import MISSING, available, metrics_answer
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
        host = request.header("host").removesuffix(f":{self._bound.port}").lower()
        if self._bound.address.loopback and host not in self._bound.names:
            raise HttpError(403, "this address is for this machine only")
        given = request.header("authorization").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            refusal = plain_text(401, f"the header Authorization must be: Bearer and the text of {VARIABLE}\n")
            return replace(refusal, headers={"www-authenticate": "Bearer"})
        if request.path != PATH:
            raise HttpError(404, f"the metrics are at {PATH}")
        summary = {} if self._source is None else self._source.read().summary()
        return metrics_answer(summary, request.header("accept"))


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get(VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise ConfigError(VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} characters, all of them ASCII")
    return token


def _bind(text: str, has_token: bool) -> ListeningSocket:
    host, port = split_address(text)
    try:
        if not available():
            raise ConfigError(OPTION, text, MISSING)
        address = local_address(host.strip("[]") or "127.0.0.1")
        if not has_token and not address.loopback:
            raise ConfigError(OPTION, text, f"other machines reach this address, so it needs a token: set {VARIABLE}")
        return listen(address, port, host, OPTION)
    except TransportError as error:
        raise ConfigError(OPTION, text, str(error)) from None
