"""The addresses of the page's server.

GET  /login?token=T       the one-time token for a cookie, with which the others are below a path of random letters
GET  /                    the page, and its files below /static/
GET  /api/view            the view of a run: ?run=1 the second one
GET  /api/runs            the curves and settings of all runs
GET  /api/view?cursor=N   what is new behind an earlier answer, about a second later
GET  /api/log             the last lines of a log: ?process=worker 0/0
GET  /metrics             the figures for Prometheus
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs

from topotrain.config.job import ConfigError
from topotrain.tools.dashboard.chart_library import chart_library
from topotrain.tools.dashboard.page_access import PageAccess
from topotrain.tools.dashboard.page_files import INDEX, LIBRARY, PageFile, page_files
from topotrain.tools.dashboard.page_json import page_json
from topotrain.tools.dashboard.page_turns import PageTurns
from topotrain.tools.dashboard.process_logs import tail_of
from topotrain.tools.dashboard.run_comparison import compared
from topotrain.tools.exporters.prometheus_metrics import MISSING, available, exposition
from topotrain.tools.http_server import HttpAnswer, HttpError, HttpRequest, plain_text
from topotrain.tools.recording.job_history import HistorySource, JobHistory

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run that the page shows. workspace: has the logs of its processes."""

    workspace: Path
    source: HistorySource

    @property
    def history(self) -> JobHistory:
        """The history, with what has come up to now. Raises HttpError."""
        try:
            return self.source.read()
        except ConfigError as error:
            raise HttpError(500, str(error)) from None


class PageRoutes:
    """The addresses of the server, and the answer of each.

    Args:
        runs: by the names that the page shows.
        turns: between two answers about a run.
        access: gives the cookie.
    """

    def __init__(self, runs: Mapping[str, WatchedRun], turns: PageTurns, access: PageAccess) -> None:
        self._runs, self._turns, self._access = runs, turns, access
        self._files, self._library = page_files(), chart_library()
        self.headers = HEADERS

    def admits(self, request: HttpRequest) -> bool:
        """Return whether a request comes from the page."""
        return self._is_inside(request) and not self._refusal(request)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request. Raises HttpError."""
        refusal = self._refusal(request)
        if refusal:
            raise HttpError(403, refusal)
        path, query = self._path(request), {name: values[0] for name, values in parse_qs(request.query).items()}
        match path:
            case "/login":
                return self._login(request, query)
            case "/":
                return self._index()
            case "/api/view":
                return self._view(query)
            case "/api/runs":
                return self._comparison()
            case "/api/log":
                return self._log(query)
            case "/metrics":
                return self._metrics(request, query)
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
        charts = self._library
        script = "" if charts is None else f'{charts.placeholders}<script defer src="static/{charts.name}"></script>'
        index = self._files[INDEX]
        return _of_page(replace(index, text=index.text.replace(LIBRARY, script, 1)))

    def _file(self, name: str) -> HttpAnswer:
        if self._library is not None and name == self._library.name:
            # Its address has its version, so a browser need not ask for it again.
            kept = {"cache-control": "private, max-age=31536000, immutable"}
            return replace(_of_page(PageFile(name, self._library.text)), headers=kept)
        found = self._files.get(name)
        if found is None or name == INDEX:
            raise HttpError(404, "no such file")
        return _of_page(found)

    def _view(self, query: Mapping[str, str]) -> HttpAnswer:
        """Return the whole view of a run, or what is new."""
        cursor = query.get("cursor", "")
        known = int(cursor) if re.fullmatch("[0-9]{1,18}", cursor) else None
        if known is not None:
            self._turns.wait()
        history = self._run(query).history
        # Where another job has begun in the workspace meanwhile, `since` is its whole view.
        data = history.view() if known is None else history.since(known)
        if data["job"]["ended"] is None:
            self._turns.expect()
        return HttpAnswer(200, page_json(data).encode(), "application/json")

    def _log(self, query: Mapping[str, str]) -> HttpAnswer:
        """Return the last lines of a process's log."""
        run = self._run(query)
        process = run.history.process(query.get("process", ""))
        if process is None:
            raise HttpError(404, "no such process")
        text = tail_of(run.workspace, process)
        return plain_text(200, "This machine has no log of it." if text is None else text)

    def _metrics(self, request: HttpRequest, query: Mapping[str, str]) -> HttpAnswer:
        """Return the figures of a run for Prometheus."""
        if not available():
            raise HttpError(404, f"the page {MISSING}")
        found = exposition(self._run(query).history.summary(), request.header("accept"))
        return HttpAnswer(200, found.body, found.content_type)

    def _comparison(self) -> HttpAnswer:
        """Return all runs beside each other; of one alone nothing."""
        several = self._runs if len(self._runs) > 1 else {}
        views = {name: run.history.view() for name, run in several.items()}
        return HttpAnswer(200, page_json(compared(views)).encode(), "application/json")

    def _run(self, query: Mapping[str, str]) -> WatchedRun:
        """Return the run of a request."""
        number, runs = query.get("run", "0"), list(self._runs.values())
        if number not in map(str, range(len(runs))):
            raise HttpError(404, "no such run")
        return runs[int(number)]


def _of_page(file: PageFile) -> HttpAnswer:
    return HttpAnswer(200, file.text.encode(), f"{file.media_type}; charset=utf-8")
