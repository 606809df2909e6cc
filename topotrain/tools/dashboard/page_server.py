"""Serve the page of one run, or of two side by side.

The server has a thread and an event loop of its own, and reads the recording that the launcher writes. So a launcher
that serves the page does nothing more than one that does not.
"""

import ipaddress
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import EADDRINUSE
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topotrain.comm.security.tls import Certificate
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.listener import Newcomers
from topotrain.comm.transport.tcp import local_address
from topotrain.comm.transport.tcp_socket import bind, url_of
from topotrain.config.job import ConfigError
from topotrain.tools.dashboard.event_streams import RunTicker, StreamLimits
from topotrain.tools.dashboard.page_access import LOGIN, PageAccess
from topotrain.tools.dashboard.watched_run import WatchedRun
from topotrain.tools.recording.recorded_workspace import RecordedWorkspace

PACKAGES = ("starlette", "uvicorn")
MISSING = "the page needs the packages starlette and uvicorn: pip install 'topotrain[watch]'"
_RUNS = ("A", "B")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_NEWCOMER_S = 10.0
"""Seconds in which a connection must have made a request that is allowed."""
_STALLED_MS = 15_000
"""Milliseconds after which the kernel ends a connection that takes no byte."""


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Where the page is served, and the names of the options that say so.

    port: 0 for any free one. host: an address or a name of this machine.
    """

    port: int = 0
    host: str = "127.0.0.1"
    port_option: str = "--port"
    host_option: str = "--host"
    limits: StreamLimits = field(default_factory=StreamLimits)


class PageSocket(socket.socket):
    """A listening socket. A connection that makes no allowed request in time ends."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.newcomers = Newcomers(_NEWCOMER_S)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, for which another one may have to end."""
        # While there is a crowd, the event loop closes those connections first, and asks again.
        return self.newcomers.accept(super().accept)


@dataclass(frozen=True, slots=True)
class BoundPage:
    """A listening socket for the page, with what browsers need to know.

    names: the hosts that a browser may name. fingerprint: of the certificate; "" where there is none.
    """

    sock: PageSocket
    host: str
    names: tuple[str, ...]
    tls: ssl.SSLContext | None = None
    fingerprint: str = ""

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self.sock.getsockname()[1])

    def url(self, token: str) -> str:
        """Return the address that works once."""
        return f"{url_of(self.host, self.port, 'https' if self.tls else 'http')}{LOGIN}?token={token}"


def check_packages() -> None:
    """Raise ConfigError where the packages for the page are missing."""
    if any(find_spec(name) is None for name in PACKAGES):
        raise ConfigError("", None, MISSING)


def bind_page(options: PageOptions) -> BoundPage:
    """Listen for browsers. Raises ConfigError."""
    check_packages()
    try:
        address = local_address(options.host)
        certificate = None if address.loopback else Certificate.make()
    except TransportError as error:
        raise ConfigError(options.host_option, None, str(error)) from None
    try:
        sock = PageSocket(bind(address.family, address.address, options.port))
    except OSError as error:
        taken = "another process listens there" if error.errno == EADDRINUSE else f"it cannot be used: {error.strerror}"
        raise ConfigError(options.port_option, options.port, f"must be a free port, or 0 for any: {taken}") from None
    # Accepted connections inherit it. Without it a browser that has stopped reading would keep its connection.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
    if certificate is None:
        return BoundPage(sock, address.address, _LOOPBACK_NAMES)
    names = (str(address), options.host)
    return BoundPage(sock, address.address, names, certificate.context, certificate.binding.hex(":").upper())


@contextmanager
def served_page(bound: BoundPage, workspaces: Sequence[Path], limits: StreamLimits | None = None) -> Iterator[str]:
    """Serve the page of these runs for the length of the block.

    Yields the address that works once.
    """
    # Not at the top: these modules import the packages of the extra.
    from topotrain.tools.dashboard.http_thread import HttpThread
    from topotrain.tools.dashboard.web_routes import PageRoutes

    runs = {name: WatchedRun(workspace, len(workspaces)) for name, workspace in zip(_RUNS, workspaces)}
    ticker = RunTicker(runs, limits or StreamLimits())
    loopback = ipaddress.ip_address(bound.host).is_loopback
    access = PageAccess(bound.names, bound.port, open_metrics=loopback)
    routes, newcomers = PageRoutes(ticker, access, bound.tls is not None), bound.sock.newcomers
    thread = HttpThread(routes.application(newcomers), bound.sock, bound.tls, ticker, newcomers)
    try:
        yield bound.url(access.token)
    finally:
        thread.close()
        for run in runs.values():
            run.close()


def announce(bound: BoundPage, url: str) -> None:
    """Print the address on stderr."""
    print(f"topotrain: the page is at {url}", file=sys.stderr, flush=True)
    if bound.fingerprint:
        text = f"its certificate is this process's own; SHA-256 {bound.fingerprint}"
        print(f"topotrain: {text}", file=sys.stderr, flush=True)


def serve_until_stopped(workspaces: Sequence[Path], options: PageOptions) -> int:
    """Serve the page of recorded or running jobs until Ctrl-C; return the exit code.

    Raises ConfigError.
    """
    for workspace in workspaces:
        # Only for its errors: a job that has not begun, or a folder that is none of a job.
        RecordedWorkspace(workspace).close()
    # Blocked before threads are made, which inherit that: both signals come to `sigwait` alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    bound = bind_page(options)
    with served_page(bound, workspaces, options.limits) as url:
        announce(bound, url)
        number = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 128 + number
