"""The addresses of the page's server.

GET  /login?token=T       the one-time token for a cookie, with which the others are below a path of random letters
GET  /                    the page, and its files below /static/
GET  /api/view            the view of a run: ?run=1 the second one
GET  /api/runs            the curves and settings of all runs: ?known=7,9 null if these are their cursors
GET  /api/view?cursor=N   what is new behind an earlier answer, about a second later
GET  /api/log             the last lines of a log: ?process=worker 0/0
GET  /metrics             the figures for Prometheus
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from topotrain.config.job import ConfigError
from topotrain.tools.dashboard.page_access import PageAccess
from topotrain.tools.dashboard.page_files import LIBRARY, LIVE, LONE, SCRIPT, STYLE, page_files
from topotrain.tools.dashboard.process_logs import tail_of
from topotrain.tools.dashboard.run_comparison import RunFigures, compared, run_figures
from topotrain.tools.dashboard.run_folders import named_runs
from topotrain.tools.exporters.metrics import MISSING, available, metrics_answer
from topotrain.tools.http_server import HttpAnswer, HttpError, HttpRequest, plain_text
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
        return self._is_inside(request) and not self._refusal(request)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request. Raises HttpError."""
        refusal = self._refusal(request)
        if refusal:
            raise HttpError(403, refusal)
        path, query = self._path(request), {name: values[0] for name, values in parse_qs(request.query).items()}
        try:
            match path:
                case "/login":
                    return self._login(request, query)
                case "/":
                    return self._index()
                case "/api/view":
                    return self._view(query)
                case "/api/runs":
                    return self._comparison(query)
                case "/api/log":
                    return self._log(query)
                case "/metrics":
                    if not available():
                        raise HttpError(404, f"the page {MISSING}")
                    return metrics_answer(self._run(query)[1].read().summary(), request.header("accept"))
        except ConfigError as error:  # a recording that cannot be read any further
            raise HttpError(500, str(error)) from None
        return self._file(path.removeprefix("/static/"))

    def _is_inside(self, request: HttpRequest) -> bool:
        # A browser sends the cookie to all ports of a machine, but only below this path, which no other server knows.
        return request.path.startswith(f"{self._access.root}/")

    def _path(self, request: HttpRequest) -> str:
        return request.path.removeprefix(self._access.root) if self._is_inside(request) else request.path

    def _refusal(self, request: HttpRequest) -> str:
        inside = self._is_inside(request)
        # A cookie counts only inside the path it was given to.
        headers = [(name, value) for name, value in request.headers if inside or name != "cookie"]
        return self._access.refusal(replace(request, path=self._path(request), headers=headers))

    def _login(self, request: HttpRequest, query: Mapping[str, str]) -> HttpAnswer:
        """Give the cookie for the token, and go to the page."""
        # HEAD is sent by programs that look at links, and must not use the token up.
        if request.method != "GET":
            raise HttpError(405, "the token is for GET")
        session = self._access.login(query.get("token", ""))
        if not session:
            raise HttpError(403, self._access.login_refusal())
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
