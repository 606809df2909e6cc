"""A browser of the page, as far as its server sees one: a cookie, and requests over loopback."""

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
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

    def updates(self, run: str = "0") -> Iterator[Any]:
        """Yield what the page is told: a whole view, and then what is new, until the job has ended."""
        data = self.get(f"/api/view?run={run}").data
        yield data
        while data["job"]["ended"] is None:
            cursor, data = data["cursor"], self.get(f"/api/view?run={run}&cursor={data['cursor']}").data
            if data["cursor"] != cursor:
                yield data
