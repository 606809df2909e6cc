"""Who is let in to the page, by what a request says about itself."""

import pytest

from topotrain.tools.dashboard.page_access import PageAccess
from topotrain.tools.http_server import HttpRequest

NAMES = ("localhost", "127.0.0.1", "[::1]")


def request(path: str = "/", method: str = "GET", **headers: str) -> HttpRequest:
    named = {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return HttpRequest(method, path, "", [(name, value) for name, value in named.items() if value])


@pytest.fixture
def access() -> PageAccess:
    return PageAccess(NAMES, 8000)


def cookie_of(access: PageAccess) -> str:
    return f"other=1; {access.cookie}={access.login(access.token)}"


def test_a_token_works_once_and_its_cookie_from_then_on(access: PageAccess) -> None:
    token = access.token
    assert len(token) >= 43, "256 bits"
    assert not access.login("") and not access.login(token[:-1]) and not access.login("ü" * 43)
    session = access.login(token)
    assert session and session != token
    assert access.login(token) == "" and access.token == ""
    assert "was used already" in access.login_refusal()
    assert access.refusal(request(cookie=f"{access.cookie}={session}")) == ""
    assert access.refusal(request(cookie=f"{access.cookie}={session}x")) != ""
    assert access.refusal(request(cookie=f"topotrain-8001={session}")) != ""


def test_without_a_session_no_cookie_is_right(access: PageAccess) -> None:
    for cookie in ("", f"{access.cookie}=", f"{access.cookie}"):
        assert "no token" in access.refusal(request(cookie=cookie))


def test_only_the_names_and_the_page_of_this_server_are_let_in(access: PageAccess) -> None:
    cookie = cookie_of(access)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost:9"):
        assert access.refusal(request(host=host, cookie=cookie)) == ""
    evil = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example")
    for host in ("", *evil, "localhost.", "0.0.0.0:8000", "::1"):
        assert "Host header" in access.refusal(request(host=host, cookie=cookie))
    twice = HttpRequest("GET", "/", "", [("host", "localhost"), ("host", "evil.example")])
    assert "Host header" in access.refusal(twice)
    for path in ("/", "/api/view", "/login"):
        for origin in ("http://evil.example", "null", "http://localhost:8001", "https://localhost:8000"):
            assert "Origin" in access.refusal(request(path, origin=origin, cookie=cookie))


def test_what_another_site_lets_a_browser_ask_is_refused_but_for_the_printed_address(access: PageAccess) -> None:
    cookie = cookie_of(access)
    for site in ("cross-site", "same-site"):
        assert "Sec-Fetch-Site" in access.refusal(request("/api/view", sec_fetch_site=site, cookie=cookie))
        assert access.refusal(request("/login", sec_fetch_site=site)) == ""
    for site in ("none", "same-origin"):
        assert access.refusal(request("/api/view", sec_fetch_site=site, cookie=cookie)) == ""


def test_figures_need_no_cookie_where_only_this_machine_reaches_the_server() -> None:
    assert PageAccess(NAMES, 1, open_metrics=True).refusal(request("/metrics")) == ""
    assert "no token" in PageAccess(NAMES, 1).refusal(request("/metrics"))
    assert "Host" in PageAccess(NAMES, 1, open_metrics=True).refusal(request("/metrics", host="evil.example"))
