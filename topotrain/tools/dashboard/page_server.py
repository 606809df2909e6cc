"""The server of the page, of one run or of several side by side.

GET  /login?token=T       the one-time token for a cookie, with which the others are below a path of random letters
GET  /                    the page, and its files below /static/
GET  /api/view            the view of a run: ?run=1 the second one
GET  /api/runs            the curves and settings of all runs: ?known=7,9 null if these are their cursors
GET  /api/view?cursor=N   what is new behind an earlier answer, about a second later
GET  /api/log             the last lines of a log: ?process=worker 0/0
GET  /metrics             the figures for Prometheus

The server has threads of its own. When a page asks, it reads the history that the launcher keeps for its recording, or
the recording. So a launcher without an open page does nothing more than one that serves none.
"""

import json
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from topotrain.config.job import ConfigError
from topotrain.tools.dashboard import page_access
from topotrain.tools.dashboard.page_access import PageAccess
from topotrain.tools.dashboard.page_files import LIBRARY, LIVE, LONE, SCRIPT, STYLE, page_files, tail_of
from topotrain.tools.dashboard.run_comparison import (
    RunFigures,
    add_new_runs,
    compared,
    named_runs,
    read_runs,
    run_figures,
    runs_of,
)
from topotrain.tools.exporters.metrics import MISSING, available, metrics_answer
from topotrain.tools.http_server import (
    HttpAnswer,
    HttpError,
    HttpRequest,
    HttpServer,
    ListeningSocket,
    listen,
    plain_text,
)
from topotrain.tools.monitor.terminal import say
from topotrain.tools.recording.job_history import HistorySource, JobHistory

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_TURNS = 2
"""A page that was answered asks again within so many turns, unless it was closed."""
_LOOK_S = 0.01
TURN_S = 1.0
"""Seconds between two answers to a page."""
LOOK_S = 3.0
"""Seconds between two looks for runs that have begun in a folder."""


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
        yield f"{bound.url}{page_access.LOGIN}?token={access.token}"
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
        bound = listen(port, host)
        with served_page(bound, runs) as url:
            announce(bound, url)
            while (stop := signal.sigtimedwait({signal.SIGINT, signal.SIGTERM}, LOOK_S)) is None:
                add_new_runs(folders, runs, stack)
    return 128 + stop.si_signo


class PageRoutes:
    """The addresses of the server, and the answer of each.

    Args:
        runs: by their workspaces, which have the logs.
        access: gives the cookie.
        turn_s: for which each request for what is new is held, so that pages ask about that often.
        lone: no other run will come, so that pages do not ask for one.
    """

    headers = HEADERS

    def __init__(self, runs: Mapping[Path, HistorySource], access: PageAccess, turn_s: float, lone: bool) -> None:
        self._runs, self._access, self._turn_s, self._lone = runs, access, turn_s, lone
        self._files = page_files()
        self._ending = threading.Event()
        self._expected: deque[float] = deque(maxlen=64)
        """Until when each answered page must ask again."""
        self._compared: dict[Path, tuple[int, RunFigures]] = {}
        """The figures of each run up to a cursor."""

    def end(self) -> None:
        """Answer each page once more, with the end of a job, also those that are held."""
        self._ending.set()
        while any(until > time.monotonic() for until in tuple(self._expected)):
            time.sleep(_LOOK_S)

    def admits(self, request: HttpRequest) -> bool:
        return self._access.is_inside(request) and not self._access.refusal(request)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request. Raises HttpError."""
        refusal = self._access.refusal(request)
        if refusal:
            raise HttpError(403, refusal)
        path = self._access.path_of(request)
        query = {name: values[0] for name, values in parse_qs(request.query).items()}
        try:
            match path:
                case page_access.LOGIN:
                    return self._login(request, query)
                case "/":
                    return self._index()
                case "/api/view":
                    return self._view(query)
                case "/api/runs":
                    return self._comparison(query)
                case "/api/log":
                    return self._log(query)
                case page_access.METRICS:
                    if not available():
                        raise HttpError(404, f"the page {MISSING}")
                    return metrics_answer(self._run(query)[1].read().summary(), request.headers.get("accept", ""))
        except ConfigError as error:  # a recording that cannot be read any further
            raise HttpError(500, str(error)) from None
        return self._file(path.removeprefix("/static/"))

    def _login(self, request: HttpRequest, query: Mapping[str, str]) -> HttpAnswer:
        """Give the cookie for the token, and go to the page."""
        # HEAD is sent by programs that look at links, and must not use the token up.
        if request.method != "GET":
            raise HttpError(405, "the token is for GET")
        session = self._access.login(query.get("token", ""))
        root = f"{self._access.root}/"
        cookie = f"{self._access.cookie}={session}; HttpOnly; SameSite=strict; Path={root}"
        headers = {"location": root, "set-cookie": cookie + ("; Secure" if self._access.secure else "")}
        return replace(plain_text(303, ""), headers=headers)

    def _index(self) -> HttpAnswer:
        charts = self._files.library
        script = "" if charts is None else f'{charts.placeholders}<script defer src="static/{charts.name}"></script>'
        index = self._files.index.replace(LIVE, LONE if self._lone else LIVE, 1)
        return _text(index.replace(LIBRARY, script, 1), "text/html")

    def _file(self, name: str) -> HttpAnswer:
        charts = self._files.library
        if name == STYLE:
            return _text(self._files.style, "text/css")
        if name == SCRIPT:
            return _text(self._files.script, "text/javascript")
        if charts is None or name != charts.name:
            raise HttpError(404, "no such file")
        # Its address has its version, so a browser need not ask for it again.
        kept = {"cache-control": "private, max-age=31536000, immutable"}
        return replace(_text(charts.text, "text/javascript"), headers=kept)

    def _view(self, query: Mapping[str, str]) -> HttpAnswer:
        cursor = query.get("cursor", "")
        known = int(cursor) if re.fullmatch("[0-9]{1,18}", cursor) else None
        if known is not None:
            with suppress(IndexError):
                self._expected.pop()
            self._ending.wait(self._turn_s)
        history = self._run(query)[1].read()
        # Where another job has begun in the workspace meanwhile, `since` is its whole view.
        data = history.view() if known is None else history.since(known)
        if data["job"]["ended"] is None and not self._ending.is_set():
            self._expected.append(time.monotonic() + _TURNS * self._turn_s)
        return _json(data)

    def _log(self, query: Mapping[str, str]) -> HttpAnswer:
        """Return the last lines of a process's log."""
        workspace, source = self._run(query)
        process = source.read().process(query.get("process", ""))
        if process is None:
            raise HttpError(404, "no such process")
        text = tail_of(workspace, process)
        return plain_text(200, "This machine has no log of it." if text is None else text)

    def _comparison(self, query: Mapping[str, str]) -> HttpAnswer:
        """Return all runs beside each other, or null; of one alone nothing."""
        # A copy: a run may begin meanwhile.
        several = dict(self._runs) if len(self._runs) > 1 else {}
        figures = {workspace: self._figures(workspace, source.read()) for workspace, source in several.items()}
        if not figures:
            return _json([])
        cursors = [self._compared[workspace][0] for workspace in figures]
        if query.get("known") == ",".join(map(str, cursors)):
            return _json(None)
        runs = compared(named_runs(figures))
        return _json([{**run, "cursor": cursor} for run, cursor in zip(runs, cursors, strict=True)])

    def _figures(self, workspace: Path, history: JobHistory) -> RunFigures:
        """Return the figures of a run; the view is made only where something is new."""
        cursor, known = self._compared.get(workspace, (-1, None))
        if known is None or cursor != history.cursor:
            view = history.view()
            known = run_figures(view)
            self._compared[workspace] = view["cursor"], known
        return known

    def _run(self, query: Mapping[str, str]) -> tuple[Path, HistorySource]:
        """Return the workspace and the history of a request's run."""
        number, runs = query.get("run", "0"), list(self._runs.items())
        if number not in map(str, range(len(runs))):
            raise HttpError(404, "no such run")
        return runs[int(number)]


def _text(text: str, media_type: str) -> HttpAnswer:
    return HttpAnswer(200, text.encode(), f"{media_type}; charset=utf-8")


def _json(data: Any) -> HttpAnswer:
    # Browsers know neither NaN nor Infinity, and a history has none.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return HttpAnswer(200, text.encode(), "application/json")
