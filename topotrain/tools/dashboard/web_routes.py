"""The addresses of the page's server, as a Starlette application.

The module is imported where a page is served.

GET  /login?token=T     the one-time token for a cookie, with which the others are below a path of random letters
GET  /                  the page, and its files below /static/
GET  /api/view          the view of a run: ?run=B the second one
GET  /api/events        the same, and then what is new, as server-sent events
GET  /api/log           the last lines of a log: ?process=worker 0/0
GET  /metrics           the figures for Prometheus
"""

import asyncio
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topotrain.comm.transport.listener import Newcomers
from topotrain.tools.dashboard.event_streams import EventStream, RunTicker
from topotrain.tools.dashboard.page_access import LOGIN, METRICS, PageAccess, PageRequest
from topotrain.tools.dashboard.page_files import INDEX, page_files
from topotrain.tools.dashboard.process_logs import tail_of
from topotrain.tools.dashboard.watched_run import WatchedRun

FIRST = "A"
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


class PageRoutes:
    """The addresses of the server, and the answer of each.

    Args:
        ticker: has the runs.
        access: gives the cookie.
        secure: browsers reach the server over TLS.
    """

    def __init__(self, ticker: RunTicker, access: PageAccess, secure: bool) -> None:
        self._ticker, self._access, self._secure = ticker, access, secure
        self._files = page_files()

    def application(self, newcomers: Newcomers) -> ASGIApp:
        """Return the application, behind the checks of `PageAccess`.

        newcomers: connections that end soon unless they make a request that is allowed.
        """
        routes = [
            Route(LOGIN, self.login),
            Route("/", self.index),
            Route("/static/{name}", self.static),
            Route("/api/view", self.view),
            Route("/api/events", self.events),
            Route("/api/log", self.log),
            Route(METRICS, self.metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _failed}
        return AccessGuard(Starlette(routes=routes, exception_handlers=handlers), self._access, newcomers)

    async def login(self, request: Request) -> Response:
        """Give the cookie for the token, and go to the page."""
        # HEAD is sent by programs that look at links, and must not use the token up.
        if request.method != "GET":
            raise HTTPException(405, "the token is for GET")
        session = self._access.login(request.query_params.get("token", ""))
        if not session:
            raise HTTPException(403, self._access.login_refusal())
        response = RedirectResponse(f"{self._access.root}/", status_code=303)
        response.set_cookie(
            self._access.cookie,
            session,
            path=f"{self._access.root}/",
            secure=self._secure,
            httponly=True,
            samesite="strict",
        )
        return response

    async def index(self, request: Request) -> Response:
        """Return the page."""
        return self._file(INDEX)

    async def static(self, request: Request) -> Response:
        """Return a file of the page."""
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404, "no such file")
        return Response(found.text, media_type=found.media_type)

    async def view(self, request: Request) -> Response:
        """Return the whole view of a run."""
        run = self._run(request)
        run.poll()
        return Response(run.view().text, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Return the view of a run, and then what is new."""
        run = self._run(request)
        if not self._ticker.open():
            raise HTTPException(503, f"more than {self._ticker.limits.most} pages are open")
        # Starlette calls whatever an endpoint returns.
        return cast(Response, EventStream(run, self._ticker))

    async def log(self, request: Request) -> Response:
        """Return the last lines of a process's log."""
        run = self._run(request)
        process = run.process(request.query_params.get("process", ""))
        if process is None:
            raise HTTPException(404, "no such process")
        text = await asyncio.to_thread(tail_of, run.workspace, process)
        return PlainTextResponse("This machine has no log of it." if text is None else text)

    async def metrics(self, request: Request) -> Response:
        """Return the figures of the first run for Prometheus."""
        try:
            from topotrain.tools.exporters.prometheus_metrics import MISSING, exposition
        except ImportError:
            raise HTTPException(404, "this installation has no metrics") from None
        if find_spec("prometheus_client") is None:
            raise HTTPException(404, f"the page {MISSING}")
        run = self._run(request)
        run.poll()
        found = exposition(run.summary(), request.headers.get("accept", ""))
        return Response(found.body, headers={"content-type": found.content_type})

    def _run(self, request: Request) -> WatchedRun:
        run = self._ticker.runs.get(request.query_params.get("run", FIRST))
        if run is None:
            raise HTTPException(404, "no such run")
        if run.problem:
            raise HTTPException(500, run.problem)
        return run


class AccessGuard:
    """Refuses requests as `PageAccess` says, and adds the headers of all responses.

    An ASGI application around another one.
    """

    def __init__(self, app: ASGIApp, access: PageAccess, newcomers: Newcomers) -> None:
        self._app, self._access, self._newcomers = app, access, newcomers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(message)
            await send(message)

        # A browser sends the cookie to all ports of a machine, but only below this path, which no other server knows.
        inside = scope["path"].startswith(f"{self._access.root}/")
        if inside:
            scope = {**scope, "path": scope["path"].removeprefix(self._access.root)}
        refusal = self._access.refusal(_request_of(scope, inside))
        if inside and not refusal:
            self._newcomers.admit(tuple(scope["client"]))
        app = PlainTextResponse(f"{refusal}\n", status_code=403) if refusal else self._app
        await app(scope, receive, with_headers)


def _request_of(scope: Scope, inside: bool) -> PageRequest:
    """Return the checked parts. A cookie counts only inside the path it was given to."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = [(name, value) for name, value in pairs if inside or name != "cookie"]
    return PageRequest(scope["method"], scope["path"], scope["scheme"], headers)


def _add_headers(message: MutableMapping[str, Any]) -> None:
    own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    message["headers"] = [*message.get("headers", ()), *own]


async def _refused(request: Request, error: HTTPException) -> Response:
    return PlainTextResponse(f"{error.detail}\n", status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    print(f"topotrain: warning: the page's server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return PlainTextResponse("the server has failed; topotrain has printed why\n", status_code=500)
