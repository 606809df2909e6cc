"""Serve the page of one run, or of several side by side.

The server has threads of its own. When a page asks, it reads the history that the launcher keeps for its recording, or
the recording. So a launcher without an open page does nothing more than one that serves none.
"""

import ipaddress
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from errno import EADDRINUSE
from itertools import starmap
from pathlib import Path

from topotrain.comm.security.tls import Certificate
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.tcp import local_address
from topotrain.comm.transport.tcp_socket import bind, url_of
from topotrain.config.job import ConfigError
from topotrain.tools.dashboard.page_access import LOGIN, PageAccess
from topotrain.tools.dashboard.page_turns import TURN_S, PageTurns
from topotrain.tools.dashboard.run_folders import named_runs, read_runs
from topotrain.tools.dashboard.web_routes import PageRoutes, WatchedRun
from topotrain.tools.http_server import HttpServer
from topotrain.tools.monitor.monitored_run import say
from topotrain.tools.recording.recorded_workspace import RecordedWorkspace

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Where the page is served, and the names of the options that say so.

    port: 0 for any free one. host: an address or a name of this machine.
    """

    port: int = 0
    host: str = "127.0.0.1"
    port_option: str = "--port"
    host_option: str = "--host"


@dataclass(frozen=True, slots=True)
class BoundPage:
    """A listening socket for the page, with what browsers need to know.

    names: the hosts that a browser may name. fingerprint: of the certificate; "" where there is none.
    """

    sock: socket.socket
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


def bind_page(options: PageOptions) -> BoundPage:
    """Listen for browsers. Raises ConfigError."""
    try:
        address = local_address(options.host)
        certificate = None if address.loopback else Certificate.make()
    except TransportError as error:
        raise ConfigError(options.host_option, None, str(error)) from None
    try:
        sock = bind(address.family, address.address, options.port)
    except OSError as error:
        taken = "another process listens there" if error.errno == EADDRINUSE else f"it cannot be used: {error.strerror}"
        raise ConfigError(options.port_option, options.port, f"must be a free port, or 0 for any: {taken}") from None
    if certificate is None:
        return BoundPage(sock, address.address, _LOOPBACK_NAMES)
    names = (str(address), options.host)
    return BoundPage(sock, address.address, names, certificate.context, certificate.binding.hex(":").upper())


@contextmanager
def served_page(bound: BoundPage, watched: Sequence[WatchedRun], turn_s: float = TURN_S) -> Iterator[str]:
    """Serve the page of these runs for the length of the block.

    Yields the address that works once. turn_s: between two answers to a page.
    """
    runs = dict(zip(named_runs([run.workspace for run in watched]), watched))
    loopback = ipaddress.ip_address(bound.host).is_loopback
    access, turns = PageAccess(bound.names, bound.port, bound.tls is not None, loopback), PageTurns(turn_s)
    server = HttpServer(bound.sock, PageRoutes(runs, turns, access), "page", bound.tls)
    try:
        yield bound.url(access.token)
    finally:
        turns.end()
        server.close()


def announce(bound: BoundPage, url: str) -> None:
    """Print the address on stderr."""
    say(f"the page is at {url}")
    if bound.fingerprint:
        say(f"its certificate is this process's own; SHA-256 {bound.fingerprint}")


def serve_until_stopped(workspaces: Sequence[Path], options: PageOptions) -> int:
    """Serve the page of recorded or running jobs until Ctrl-C; return the exit code.

    Raises ConfigError.
    """
    with ExitStack() as stack:
        # All of a long recording is read here, and not while a browser waits for its first answer.
        found = read_runs(workspaces, lambda each: stack.enter_context(closing(RecordedWorkspace(each))))
        runs = list(starmap(WatchedRun, found.items()))
        # Blocked before threads are made, which inherit that: both signals come to `sigwait` alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        bound = bind_page(options)
        with served_page(bound, runs) as url:
            announce(bound, url)
            number = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 128 + number
