"""Access to the page.

* The printed address has a token that works once. It is exchanged for a cookie, which the browser sends from then on.
* A request must name this server in its Host header. So a page of another site cannot reach it under a name of its own
  with an address that changes to this machine (DNS rebinding).
* A request that another page makes is refused by its Origin header, and by Sec-Fetch-Site where the browser sends it.

This module is pure but for the random numbers. The text of a refusal is one line.
"""

import hmac
import secrets
from collections.abc import Iterable

from topotrain.tools.http_server import HttpError, HttpRequest

LOGIN, METRICS = "/login", "/metrics"
_BYTES = 32


class PageAccess:
    """The token, the session and the names of one server.

    Args:
        names: the host names and addresses by which browsers may reach this server, IPv6 addresses in brackets.
        port: of the server. Cookies do not differ by port, so it is in the name of the cookie, and the cookie is for
            `root` alone, the random beginning of the page's path.
        secure: browsers reach the server over TLS.
        open_metrics: `/metrics` needs no cookie, because only this machine reaches the server.
    """

    def __init__(self, names: Iterable[str], port: int, secure: bool = False, open_metrics: bool = False) -> None:
        self._names, self._open_metrics = frozenset(name.lower() for name in names), open_metrics
        self.secure = secure
        self.cookie = f"topotrain-{port}"
        self.root = f"/{secrets.token_urlsafe(_BYTES)}"
        self._token: str | None = secrets.token_urlsafe(_BYTES)
        self._session = ""

    @property
    def token(self) -> str:
        """The token of the printed address; "" when it was used."""
        return self._token or ""

    def login(self, token: str) -> str:
        """Return the value of the cookie for this token, which works once.

        Raises HttpError.
        """
        if self._token is None:
            raise HttpError(403, "this address was used already; `topotrain watch WORKSPACE` prints a new one")
        if not _same(token, self._token):
            raise HttpError(403, "wrong token: open the address that topotrain has printed")
        self._token, self._session = None, secrets.token_urlsafe(_BYTES)
        return self._session

    def is_inside(self, request: HttpRequest) -> bool:
        # A browser sends the cookie to all ports of a machine, but only below this path, which no other server knows.
        return request.path.startswith(f"{self.root}/")

    def path_of(self, request: HttpRequest) -> str:
        """Return the path below `root`, or that of a request from outside."""
        return request.path.removeprefix(self.root) if self.is_inside(request) else request.path

    def refusal(self, request: HttpRequest) -> str:
        """Return why a request is refused; "": it is not."""
        path = self.path_of(request)
        hosts, origins, sites, cookies = (
            request.headers.get_all(name, []) for name in ("host", "origin", "sec-fetch-site", "cookie")
        )
        if len(hosts) != 1 or _name_of(hosts[0]) not in self._names:
            return "this server is not known by the name in the Host header"
        ours = f"{'https' if self.secure else 'http'}://{hosts[0]}".lower()
        if any(origin.lower() != ours for origin in origins):
            return "only this page itself may ask (Origin header)"
        if path != LOGIN and any(site not in ("same-origin", "none") for site in sites):
            return "only this page itself may ask (Sec-Fetch-Site header)"
        if path == LOGIN or (path == METRICS and self._open_metrics):
            return ""
        # A cookie counts only inside the path it was given to.
        if self.is_inside(request) and self._has_session(cookies):
            return ""
        return "no token: open the address that topotrain has printed"

    def _has_session(self, cookies: Iterable[str]) -> bool:
        pairs = (part.strip().partition("=") for value in cookies for part in value.split(";"))
        given = [value for name, _, value in pairs if name == self.cookie]
        return bool(self._session) and any(_same(value, self._session) for value in given)


def _same(given: str, known: str) -> bool:
    # In a time that says nothing about how much of it is right.
    return hmac.compare_digest(given.encode(errors="replace"), known.encode())


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    # Any port: with a tunnel (`ssh -L`) the browser sees another one than this server.
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
