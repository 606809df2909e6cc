"""Who is let in to the page, by what a request says about itself."""

from email.message import Message

import pytest

from topotrain.tools.dashboard.page_access import PageAccess
from topotrain.tools.http_server import HttpError, HttpRequest

NAMES = ("localhost", "127.0.0.1", "[::1]")


def refusal(access: PageAccess, path: str = "/", inside: bool = True, **headers: str) -> str:
    """Why a request is refused; one with the cookie, unless it has another one."""
    named = {"host": "localhost:8000", "cookie": f"other=1; {access.cookie}={access._session}"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    found = Message()
    for name, value in named.items():
        if value:
            found[name] = value
    return access.refusal(HttpRequest("GET", f"{access.root if inside else ''}{path}", "", found))


@pytest.fixture
def access() -> PageAccess:
    made = PageAccess(NAMES, 8000)
    made.login(made.token)
    return made


def test_a_token_works_once_and_only_its_cookie_inside_its_path_is_right(access: PageAccess) -> None:
    fresh = PageAccess(NAMES, 8000)
    assert len(fresh.token) >= 43, "256 bits"
    for wrong in ("", fresh.token[:-1], "ü" * 43):
        with pytest.raises(HttpError, match="wrong token"):
            fresh.login(wrong)
    for cookie in ("", f"{fresh.cookie}=", fresh.cookie):
        assert "no token" in refusal(fresh, cookie=cookie)
    token = fresh.token
    session = fresh.login(token)
    assert session not in ("", token) and fresh.token == ""
    with pytest.raises(HttpError, match="was used already"):
        fresh.login(token)
    assert refusal(fresh) == "" and "no token" in refusal(fresh, inside=False)
    for cookie in (f"{fresh.cookie}={session}x", f"topotrain-8001={session}"):
        assert "no token" in refusal(fresh, cookie=cookie)


def test_only_the_names_and_the_page_of_this_server_are_let_in(access: PageAccess) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost:9"):
        assert refusal(access, host=host) == ""
    evil = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example")
    for host in ("", *evil, "localhost.", "0.0.0.0:8000", "::1"):
        assert "Host header" in refusal(access, host=host)
    twice = Message()
    for host in ("localhost", "evil.example"):
        twice["Host"] = host
    assert "Host header" in access.refusal(HttpRequest("GET", "/", "", twice))
    for path in ("/", "/api/view", "/login"):
        for origin in ("http://evil.example", "null", "http://localhost:8001", "https://localhost:8000"):
            assert "Origin" in refusal(access, path, origin=origin)
    for site, allowed in (("cross-site", False), ("same-site", False), ("none", True), ("same-origin", True)):
        assert ("Sec-Fetch-Site" not in refusal(access, "/api/view", sec_fetch_site=site)) == allowed
        assert refusal(access, "/login", sec_fetch_site=site, cookie="") == "", "the printed address"


def test_figures_need_no_cookie_where_only_this_machine_reaches_the_server() -> None:
    lone = PageAccess(NAMES, 1, open_metrics=True)
    assert refusal(lone, "/metrics", inside=False) == "" and "Host" in refusal(lone, "/metrics", host="evil.example")
    assert "no token" in refusal(PageAccess(NAMES, 1), "/metrics")
