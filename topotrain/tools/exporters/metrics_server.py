"""`--metrics PORT`: an HTTP server with the metrics of a job, for Prometheus.

It listens on loopback, unless another address is given. There it speaks TLS, and each request needs a token.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

from topotrain.comm.security.tls import Certificate
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.tcp import ListenAddress, local_address
from topotrain.comm.transport.tcp_socket import bind, url_of
from topotrain.config.job import ConfigError
from topotrain.tools.exporters.prometheus_metrics import MISSING, available, exposition
from topotrain.tools.http_server import HttpAnswer, HttpError, HttpRequest, HttpServer, plain_text
from topotrain.tools.recording.job_history import HistorySource

OPTION = "--metrics"
VARIABLE = "TOPOTRAIN_METRICS_TOKEN"
PATH = "/metrics"
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SHORTEST_TOKEN = 16


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
    if not available():
        raise ConfigError(OPTION, text, MISSING)
    return MetricsAddress(listen, port, token)


class MetricsServer:
    """Serves the metrics of a job from its start to its end.

    Args:
        address: where.

    Raises:
        ConfigError: the address cannot be used.
    """

    headers: Mapping[str, str] = {}

    def __init__(self, address: MetricsAddress) -> None:
        listen = address.listen
        where = f"{listen.address}:{address.port}"
        try:
            tls = None if listen.loopback else Certificate.make().context
            sock = bind(listen.family, listen.address, address.port)
        except OSError as error:
            raise ConfigError(OPTION, where, f"must be an address to listen at ({error.strerror})") from None
        except TransportError as error:
            raise ConfigError(OPTION, where, str(error)) from None
        self._loopback, self._token = listen.loopback, address.token
        self._port = int(sock.getsockname()[1])
        self.url = url_of(listen.address, self._port, "https" if tls else "http") + PATH
        self._source: HistorySource | None = None
        self._server = HttpServer(sock, self, "metrics", tls)

    def follow(self, source: HistorySource) -> None:
        """Serve the metrics of this history, as it is at the time of a request."""
        self._source = source

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def admits(self, request: HttpRequest) -> bool:
        """Return False: the whole request of each client has its time."""
        return False

    def answer(self, request: HttpRequest) -> HttpAnswer:
        # A page of another site may have made its name an address of this machine.
        host = request.header("host").removesuffix(f":{self._port}").lower()
        if self._loopback and host not in _LOCAL:
            raise HttpError(403, "this address is for this machine only")
        given = request.header("authorization").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            refusal = plain_text(401, f"the header Authorization must be: Bearer and the text of {VARIABLE}\n")
            return replace(refusal, headers={"www-authenticate": "Bearer"})
        if request.path != PATH:
            raise HttpError(404, f"the metrics are at {PATH}")
        summary = {} if self._source is None else self._source.read().summary()
        found = exposition(summary, request.header("accept"))
        return HttpAnswer(200, found.body, found.content_type)
