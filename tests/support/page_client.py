"""A browser of the page, as far as its server sees one: a cookie, and requests over loopback."""

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 20.0
_URL = re.compile(r"(https?)://(\[[^]]+\]|[^:/]+):(\d+)(/login\?token=[\w-]+)")


@dataclass(frozen=True)
class PageAnswer:
    """What a request got."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@dataclass
class PageClient:
    """Asks one server. `url`: the address that works once."""

    url: str
    cookie: str = ""
    root: str = ""
    host: str = field(init=False)
    port: int = field(init=False)
    login_path: str = field(init=False)

    def __post_init__(self) -> None:
        found = _URL.search(self.url)
        assert found is not None, self.url
        self.host, self.port, self.login_path = found.group(2).strip("[]"), int(found.group(3)), found.group(4)

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> PageAnswer:
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)) as connection:
            own = {"Cookie": self.cookie} if self.cookie else {}
            connection.request(method, self._whole(path), body, {**own, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return PageAnswer(response.status, found, response.read().decode())

    def get(self, path: str, **headers: str) -> PageAnswer:
        return self.ask("GET", path, {name.replace("_", "-"): value for name, value in headers.items()})

    def login(self) -> PageAnswer:
        answer = self.get(self.login_path)
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        self.root = answer.headers.get("location", "").rstrip("/")
        return answer

    def _whole(self, path: str) -> str:
        return path if path.startswith(("/login", "/metrics")) else self.root + path

    @contextmanager
    def events(self, path: str = "/api/events") -> "Iterator[Iterator[tuple[str, Any]]]":
        """Yields the server-sent events, each as its name and its data."""
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", self._whole(path), headers={"Cookie": self.cookie})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
            yield _events(response)


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            name = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield name, json.loads(text.removeprefix("data: "))
