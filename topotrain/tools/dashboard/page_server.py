"""Serve the page of one run, or of several side by side.

The server has threads of its own. When a page asks, it reads the history that the launcher keeps for its recording, or
the recording. So a launcher without an open page does nothing more than one that serves none.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from topotrain.comm.transport import TransportError
from topotrain.comm.transport.tcp import local_address
from topotrain.config.job import ConfigError
from topotrain.tools.dashboard.page_access import LOGIN, PageAccess
from topotrain.tools.dashboard.page_routes import PageRoutes
from topotrain.tools.dashboard.run_folders import add_new_runs, read_runs, runs_of
from topotrain.tools.http_server import HttpServer, ListeningSocket, listen
from topotrain.tools.monitor.monitored_run import say
from topotrain.tools.recording.job_history import HistorySource

TURN_S = 1.0
"""Seconds between two answers to a page."""
LOOK_S = 3.0
"""Seconds between two looks for runs that have begun in a folder."""


def bind_page(
    port: int = 0, host: str = "127.0.0.1", port_option: str = "--port", host_option: str = "--host"
) -> ListeningSocket:
    """Listen for browsers.

    port: 0 for any free one. host: an address or a name of this machine. Raises ConfigError with these options.
    """
    try:
        return listen(local_address(host), port, host, port_option)
    except TransportError as error:
        raise ConfigError(host_option, None, str(error)) from None


@contextmanager
def served_page(
    bound: ListeningSocket, runs: Mapping[Path, HistorySource], turn_s: float = TURN_S, lone: bool = False
) -> Iterator[str]:
    """Serve the page of runs, by their workspaces, for the length of the block.

    Yields the address that works once. turn_s: between two answers to a page. lone: no other run will come.
    """
    access = PageAccess(bound.names, bound.port, bound.tls is not None, bound.tls is None)
    routes = PageRoutes(runs, access, turn_s, lone)
    server = HttpServer(bound, routes, "page")
    try:
        yield f"{bound.url}{LOGIN}?token={access.token}"
    finally:
        routes.end()
        server.close()


def announce(bound: ListeningSocket, url: str) -> None:
    say(f"the page is at {url}")
    if bound.fingerprint:
        say(f"its certificate is this process's own; SHA-256 {bound.fingerprint}")


def serve_until_stopped(folders: Sequence[Path], port: int, host: str) -> int:
    """Serve the page of recorded or running jobs until Ctrl-C; return the exit code.

    folders: workspaces, or folders that have some. Raises ConfigError.
    """
    with ExitStack() as stack:
        # All of a long recording is read here, and not while a browser waits for its first answer.
        runs = read_runs(runs_of(folders), stack)
        # Blocked before threads are made, which inherit that: both signals come to `sigwait` alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        bound = bind_page(port, host)
        with served_page(bound, runs) as url:
            announce(bound, url)
            while (stop := signal.sigtimedwait({signal.SIGINT, signal.SIGTERM}, LOOK_S)) is None:
                add_new_runs(folders, runs, stack)
    return 128 + stop.si_signo
