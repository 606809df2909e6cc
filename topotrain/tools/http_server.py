"""A small HTTP server inside a process that has other things to do.

* Each request has a connection and a thread of its own, and at most `_HEAD_BYTES` for its line and headers.
* A connection ends unless its request comes in time. Of too many, a newcomer pushes out a random one (`Newcomers`).
* A request that the responder admits has no limit of time, as long as its client takes bytes. There are at most
  MOST_ADMITTED at once.
* Nothing is printed but a failure of the responder: stderr is the terminal of a job.
"""

import io
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from errno import EADDRINUSE
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any, Protocol

from topotrain.comm.security.tls import Certificate
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.listener import Newcomers, shut_down
from topotrain.comm.transport.tcp import ListenAddress, local_address
from topotrain.comm.transport.tcp_socket import bind, url_of
from topotrain.config.job import ConfigError

REQUEST_S = 10.0
"""Seconds that a connection has for a request."""
MOST_ADMITTED = 64
_STALLED_S = 15.0  # in which a client must take or send something
_HEAD_BYTES = 16 << 10
_PIECE_BYTES = 64 << 10
_END_S = 2.0
_PAUSE_S = 0.01
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A socket that listens for HTTP clients.

    names: the hosts that a browser may name. tls: where other machines reach it. fingerprint: of the certificate; "":
    there is none.
    """

    sock: socket.socket
    address: ListenAddress
    names: tuple[str, ...] = _LOOPBACK_NAMES
    tls: ssl.SSLContext | None = None
    fingerprint: str = ""

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self.sock.getsockname()[1])

    @property
    def url(self) -> str:
        """The address without a path."""
        return url_of(self.address.address, self.port, "https" if self.tls else "http")


def listen(
    port: int = 0, host: str = "127.0.0.1", port_option: str = "--port", host_option: str = "--host"
) -> ListeningSocket:
    """Listen for HTTP clients, over TLS if other machines reach the address.

    port: 0 for any free one. host: an address or a name of this machine. Raises ConfigError with these options.
    """
    try:
        address = local_address(host)
        certificate = None if address.loopback else Certificate.make()
        sock = bind(address.family, address.address, port)
    except TransportError as error:  # also: TLS needs a package that is missing
        raise ConfigError(host_option, None, str(error)) from None
    except OSError as error:
        taken = "another process listens there" if error.errno == EADDRINUSE else f"it cannot be used: {error.strerror}"
        raise ConfigError(port_option, port, f"must be a free port, or 0 for any: {taken}") from None
    if certificate is None:
        return ListeningSocket(sock, address)
    fingerprint = certificate.binding.hex(":").upper()
    return ListeningSocket(sock, address, (str(address), host), certificate.context, fingerprint)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without a body."""

    method: str
    path: str
    query: str
    headers: Message


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    code: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


def plain_text(code: int, text: str) -> HttpAnswer:
    """Return an answer of plain text."""
    return HttpAnswer(code, text.encode(), "text/plain; charset=utf-8")


class HttpError(Exception):
    """A request that is answered with this code and one line."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class HttpResponder(Protocol):
    """Answers GET and HEAD, on several threads. headers: of all answers."""

    headers: Mapping[str, str]

    def admits(self, request: HttpRequest) -> bool:
        """Return whether the sender has proven itself."""
        ...

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer, possibly after a while. Raises HttpError."""
        ...


class HttpServer(ThreadingHTTPServer):
    """Serves a responder from its making until `close`, on a thread of its own.

    name: of the thread.
    """

    daemon_threads = True

    def __init__(self, bound: ListeningSocket, responder: HttpResponder, name: str) -> None:
        super().__init__(bound.sock.getsockname(), _Exchange, bind_and_activate=False)
        self.socket.close()
        self.socket, self.responder, self.name, self._tls = bound.sock, responder, name, bound.tls
        self._newcomers, self._admitted = Newcomers(REQUEST_S), set[socket.socket]()
        self._changed = Condition()
        self._thread = Thread(target=self.serve_forever, name=name, daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, for which another one may have to end."""
        try:
            if self._newcomers.crowded:
                raise BlockingIOError
            sock, peer = super().get_request()
            if self._tls is not None:
                # Each connection shakes hands on its own thread, and not on this one.
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            # The loop asks again at once: threads close connections first, or the server ends.
            time.sleep(_PAUSE_S)
            raise
        with self._changed:
            pushed = self._newcomers.add(sock, peer)
        if pushed is not None:
            shut_down(pushed)
        return sock, peer

    def service_actions(self) -> None:
        """End late connections. `serve_forever` calls this each 0.5 s and after a request."""
        with self._changed:
            self._newcomers.end_late()

    def admit(self, sock: Any) -> bool:
        """Let a connection live as long as it needs; False if too many do."""
        with self._changed:
            if len(self._admitted) >= MOST_ADMITTED:
                return False
            self._newcomers.remove(sock)
            self._admitted.add(sock)
            return True

    def close_request(self, request: Any) -> None:
        super().close_request(request)
        with self._changed:
            self._newcomers.remove(request)
            self._admitted.discard(request)
            self._changed.notify_all()

    def close(self) -> None:
        """Listen no more; answers to admitted requests have two seconds."""
        shut_down(self.socket)  # wakes the loop, which would look up after half a second
        self.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: not self._admitted, _END_S)
            self._newcomers.end_late(float("inf"))
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients that break off are no news on a job's terminal."""


class _Head(io.BufferedReader):
    """The line and headers of a request. Raises HTTPException if they are too long."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._left = _HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left)
        self._left -= len(line)
        if self._left <= 0:
            raise HTTPException(f"more than {_HEAD_BYTES} bytes")
        return line


class _Exchange(BaseHTTPRequestHandler):
    server: HttpServer
    timeout = _STALLED_S
    rbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self._send(self._answer_to(HttpRequest(self.command, path, query, self.headers)))

    do_HEAD = do_GET

    def _answer_to(self, request: HttpRequest) -> HttpAnswer:
        try:
            if self.server.responder.admits(request) and not self.server.admit(self.request):
                raise HttpError(503, f"more than {MOST_ADMITTED} requests at once")
            return self.server.responder.answer(request)
        except HttpError as error:
            return plain_text(error.code, f"{error}\n")
        except Exception as error:
            text = f"topotrain: warning: {self.server.name}: {type(error).__name__}: {error}"
            print(text, file=sys.stderr, flush=True)
            return plain_text(500, "the server has failed; topotrain has printed why\n")

    def _send(self, answer: HttpAnswer) -> None:
        self.send_response_only(answer.code)
        own = {"content-type": answer.content_type, "content-length": str(len(answer.body))}
        for name, value in {**self.server.responder.headers, **own, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = memoryview(answer.body)
        # The limit of time is for each piece.
        for at in range(0, len(body), _PIECE_BYTES):
            self.wfile.write(body[at : at + _PIECE_BYTES])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, or has a method that the class does not have (501)."""
        unknown = code == 501
        self._send(plain_text(405 if unknown else code, "only GET and HEAD\n" if unknown else f"{message}\n"))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
