"""The page's server over loopback: strangers, files, logs, what is new, and readers that are too slow."""

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from growing_recording import STARTED, GrowingRecording, step
from page_client import PageClient

from tests.support.recorded_jobs import job_of, recorder_of
from topotrain.config.job import ConfigError
from topotrain.core.events import Notice, Started
from topotrain.tools import http_server
from topotrain.tools.dashboard.page_files import LIBRARY, page_files
from topotrain.tools.dashboard.page_server import served_page
from topotrain.tools.dashboard.run_comparison import add_new_runs, read_runs, runs_of
from topotrain.tools.recording.job_history import JobHistory
from topotrain.tools.recording.recorded_lines import RecordingEnd
from topotrain.tools.recording.recording_file import FILE, QUIET_S, RecordedWorkspace, RecordingFollower

QUICK_S = 0.02
EVIL = "</script><img src=x onerror=alert(1)>"


@contextmanager
def served(*workspaces: Path, turn_s: float = QUICK_S, host: str = "127.0.0.1") -> Iterator[PageClient]:
    """A server of these workspaces, and a client that has not logged in."""
    with ExitStack() as stack:
        runs = {each: stack.enter_context(closing(RecordedWorkspace(each))) for each in workspaces}
        yield PageClient(stack.enter_context(served_page(http_server.listen(host=host), runs, turn_s)))


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[GrowingRecording]:
    with closing(GrowingRecording(tmp_path, nworkers_per_group=2, server_worker_separate=True)) as made:
        made.add(1.0, Started("worker 0/0", 4711), step("worker 0/0", 1), step("worker 0/1", 1))
        yield made


@pytest.fixture
def stranger(recording: GrowingRecording) -> Iterator[PageClient]:
    with served(recording.workspace) as client:
        yield client


@pytest.fixture
def page(stranger: PageClient) -> PageClient:
    assert stranger.login().status == 303
    return stranger


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


# ---- strangers -------------------------------------------------------------------------------------------------------

PATHS = ("/", "/static/page.js", "/api/view", "/api/runs", "/api/view?cursor=0", "/api/log?process=worker+0/0", "/x")


def test_strangers_and_other_pages_are_told_nothing(stranger: PageClient) -> None:
    for path in PATHS:
        answer = stranger.get(path)
        assert (answer.status, answer.text) == (403, "no token: open the address that topotrain has printed\n")
    figures = stranger.get("/metrics")
    assert figures.status == 200 and figures.headers["content-type"].startswith("text/plain")
    assert 'topotrain_worker_loss{group="0",process="worker 0/0"} 0.5' in figures.text
    stranger.login()
    for path in PATHS:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
            answer = stranger.get(path, **headers)
            assert answer.status == 403 and answer.text.count("\n") == 1


def test_the_token_is_exchanged_once(stranger: PageClient) -> None:
    for path in ("/login", "/login?token=", "/login?token=wrong", stranger.login_path[:-1]):
        answer = stranger.get(path)
        assert answer.status == 403 and "wrong token" in answer.text and "set-cookie" not in answer.headers
    # Programs that look at links must not use it up.
    assert stranger.ask("HEAD", stranger.login_path).status == 405
    answer = stranger.login()
    root = answer.headers["location"]
    assert answer.status == 303 and len(root) > 40
    attributes = {part.strip() for part in answer.headers["set-cookie"].split(";")[1:]}
    # Browsers send cookies to all ports of a host, but only below their path.
    assert attributes == {"HttpOnly", "SameSite=strict", f"Path={root}"}
    assert PageClient(stranger.url, stranger.cookie).get("/").status == 403
    assert stranger.get("/").status == 200
    again = stranger.get(stranger.login_path)
    assert again.status == 403 and "was used already" in again.text


def test_no_path_leads_to_another_file(page: PageClient) -> None:
    for path in (
        *("/static/../page_server.py", "/static/..%2fpage_server.py", "/static/%2e%2e/page_server.py", "/static/"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/index.html%00.js", "/static/nothing.js"),
        *("/../etc/passwd", "//etc/passwd", "/static/..\\page_server.py", "/page/index.html"),
    ):
        answer = page.get(path)
        assert answer.status == 404 and "import" not in answer.text and "root:" not in answer.text


def test_the_page_and_all_its_files_are_served_and_need_nothing_from_elsewhere(page: PageClient) -> None:
    files = page_files()
    library = files.library
    assert library is not None
    index = page.get("/").text
    assert f'src="static/{library.name}"' in index and LIBRARY not in index and "://" not in index
    answer = page.get(f"/static/{library.name}")
    assert answer.text == library.text and "immutable" in answer.headers["cache-control"]
    assert library.name == f"plotly-{version('plotly')}.min.js", "its address changes with its version"
    for name, text, kind in (("page.js", files.script, "javascript"), ("style.css", files.style, "css")):
        answer = page.get(f"/static/{name}")
        assert answer.text == text
        assert answer.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert "://" not in answer.text.replace("http://www.w3.org/", ""), name


def test_methods_and_sizes_are_limited_and_all_answers_have_the_policy(page: PageClient) -> None:
    for answer in (
        *(page.get("/"), page.get("/nothing"), page.get("/", Host="evil.example"), page.get("/api/view")),
        *(page.ask(method, "/api/view", {"Origin": page.origin}) for method in ("POST", "PUT", "DELETE")),
    ):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
        assert "server" not in answer.headers
    assert (answer.status, answer.text) == (405, "only GET and HEAD\n")
    assert page.ask("HEAD", "/").text == "" and int(page.ask("HEAD", "/").headers["content-length"]) > 1000
    with socket.create_connection((page.host, page.port)) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 4000)
        assert endless.recv(100).startswith(b"HTTP/1.0 431 ")


# ---- what the page is told -------------------------------------------------------------------------------------------


def test_the_view_and_then_what_is_new(page: PageClient, recording: GrowingRecording) -> None:
    view = page.get("/api/view").data
    assert view["job"]["name"] == "digits" and page.get("/api/runs").data == []
    assert [process["name"] for process in view["processes"]] == ["worker 0/0", "worker 0/1", "server 0/0"]
    updates = page.updates()
    assert next(updates)["processes"] == view["processes"]
    recording.add(2.0, step("worker 0/0", 2, 0.25), Notice("worker 0/0", EVIL))
    delta = next(updates)
    assert delta["cursor"] > view["cursor"] and "processes" not in delta and "whole" not in delta
    losses = {series["of"]: series["points"] for series in delta["series"] if series["metric"] == "loss"}
    assert losses["worker 0/0"] == [[2.0, 2, 0.25]]
    (told,) = delta["story"]
    assert EVIL in told["text"], "text is told as it is, and shown as text"
    recording.add(2.5, step("worker 0/0", 3, float("nan")))
    points = {series["id"]: series["points"] for series in next(updates)["series"]}
    assert points["worker 0/0:loss"] == [[2.5, 3, None]], "JSON has no such number"
    recording.add(3.0, RecordingEnd(0))
    (delta,) = updates
    assert delta["job"]["ended"] == 3.0 and delta["job"]["code"] == 0
    assert page.get("/api/view").data["cursor"] == delta["cursor"]


def test_a_job_whose_launcher_is_gone_is_lost_until_it_or_another_one_goes_on(
    page: PageClient, recording: GrowingRecording
) -> None:
    path = recording.workspace / FILE
    updates = page.updates()
    next(updates)
    past = path.stat().st_mtime - QUIET_S - 1
    os.utime(path, (past, past))
    delta = next(data for data in updates if data["job"]["lost"])
    assert "its launcher is gone" in delta["story"][-1]["text"] and delta["job"]["ended"] is None
    assert delta["states"]["worker 0/0"][-1][1] == "dead"
    assert page.get("/metrics").text.count("topotrain_job_running 0.0") == 1
    recording.add(9.0, step("worker 0/0", 9))
    delta = next(data for data in updates if not data["job"]["lost"])
    assert delta["states"]["worker 0/0"][-1][1] == "computes"
    with closing(GrowingRecording(recording.workspace, "letters", STARTED + 60, nworkers_per_group=3)):
        view = next(updates)
    assert view["whole"] and view["job"]["name"] == "letters"


def test_a_run_that_begins_later_comes_behind_the_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(closing(GrowingRecording(tmp_path / "b", "b")))
        runs = read_runs(runs_of([tmp_path]), stack)
        client = PageClient(stack.enter_context(served_page(http_server.listen(), runs, QUICK_S)))
        client.login()
        assert client.get("/api/runs").data == []
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / FILE).touch()  # without its header
        add_new_runs([tmp_path], runs, stack)
        assert client.get("/api/runs").data == []
        stack.enter_context(closing(GrowingRecording(tmp_path / "a", "a")))
        add_new_runs([tmp_path], runs, stack)
        assert [run["name"] for run in client.get("/api/runs").data] == ["b", "a"]
        for path, name in (("/api/view", "b"), ("/api/view?run=0", "b"), ("/api/view?run=1", "a")):
            assert client.get(path).data["job"]["name"] == name
        assert next(client.updates("1"))["job"]["name"] == "a"
        assert {client.get(f"/api/view?run={wrong}").status for wrong in ("2", "-1", "A", "01")} == {404}


def test_only_runs_with_something_new_are_compared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewed: list[str] = []
    view = JobHistory.view
    monkeypatch.setattr(JobHistory, "view", lambda history: viewed.append(history.summary()["name"]) or view(history))
    with ExitStack() as stack:
        one, two = (stack.enter_context(closing(GrowingRecording(tmp_path / name, name))) for name in ("one", "two"))
        client = stack.enter_context(served(one.workspace, two.workspace))
        client.login()
        before = client.get("/api/runs").text
        assert client.get("/api/runs").text == before and viewed == ["one", "two"]
        known = ",".join(str(run["cursor"]) for run in json.loads(before))
        assert client.get(f"/api/runs?known={known}").data is None
        two.add(1.0, step("worker 0/0", 1))
        assert [run["columns"]["step"] for run in client.get(f"/api/runs?known={known}").data] == ["0", "1"]
        assert viewed == ["one", "two", "two"]


def test_a_recording_of_a_later_version_is_said_in_one_line(tmp_path: Path) -> None:
    with closing(GrowingRecording(tmp_path)), served(tmp_path) as client:
        client.login()
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).write_text('{"at":0,"event":"Recording","version":99,"topotrain":"9.9"}\n')
        for _ in range(2):
            answer = client.get("/api/view")
            assert answer.status == 500 and "version 99" in answer.text and answer.text.count("\n") == 1


def test_the_page_of_a_launcher_reads_no_file_and_asks_for_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RecordingFollower, "_open")
    with (
        recorder_of(job_of(tmp_path)) as recorder,
        served_page(http_server.listen(), {tmp_path: recorder}, QUICK_S, lone=True) as url,
    ):
        page = PageClient(url)
        page.login()
        assert 'data-source="lone"' in page.get("/").text, "it need not ask for other runs"
        assert page.get("/api/view").data["processes"] == []
        recorder(step("worker 0/0", 7))
        until(lambda: page.get("/api/view?cursor=0").data["job"]["step"] == 7)


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_log_of_a_process_is_plain_text_and_costs_no_view(
    page: PageClient, recording: GrowingRecording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(JobHistory, "view")
    logs = recording.workspace / "logs"
    logs.mkdir()
    (logs / "worker-0-0.log").write_text("".join(f"line {n}\n" for n in range(9999)) + EVIL + "\n")
    (logs / "servers-unit-2.log").write_text("of the server\n")
    answer = page.get("/api/log?process=worker+0/0")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.endswith(f"line 9998\n{EVIL}") and "line 9000\n" not in answer.text
    assert page.get("/api/log?process=server%200/0").text == "of the server"
    assert page.get("/api/log?process=worker+0/1").text == "This machine has no log of it."
    (logs / "worker-0-1.log").touch()
    assert page.get("/api/log?process=worker+0/1").text == "", "which the page calls nothing yet"
    colored = "\x1b[1;31mloss\x1b[0m 0.5\t\x1b]8;;http://x\x1b\\link\x1b]0;title\x07\x1b[2K\x1b(B\x9b1mé\x08\x00 [1m]"
    (logs / "worker-0-0.log").write_text(f"{colored}\nnext\x1b[A\n")
    assert page.get("/api/log?process=worker+0/0").text == "loss 0.5\tlinké [1m]\nnext", "nothing is for a terminal"
    (recording.workspace / "x.log").write_text("secret")
    paths = ("../../etc/passwd", "worker+0/0/../../x", "/etc/passwd")
    for name in ("", "worker+0/9", *paths, "unit+0", "worker+0/0%00"):
        answer = page.get(f"/api/log?process={name}")
        assert (answer.status, answer.text) == (404, "no such process\n")


# ---- readers ---------------------------------------------------------------------------------------------------------


def test_a_reader_that_takes_nothing_is_dropped(
    page: PageClient, recording: GrowingRecording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_ADMITTED", 1)
    monkeypatch.setattr(http_server._Exchange, "timeout", 2.0)
    # No buffer on the way takes all of it.
    recording.add(2.0, *(Notice("worker 0/0", "x" * 4000) for _ in range(4000)))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((page.host, page.port))
        slow.sendall(f"GET {page.root}/api/view HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\n\r\n".encode())
        until(lambda: page.get("/static/page.js").status == 503)
        assert page.get("/metrics").status == 200, "others are answered meanwhile"
        until(lambda: page.get("/static/page.js").status == 200)


def test_the_end_of_the_server_tells_what_came_last_and_leaves_nothing(recording: GrowingRecording) -> None:
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    with served(recording.workspace):  # what is imported and opened once
        pass
    before, files, heard = threads(), len(os.listdir("/proc/self/fd")), list[Any]()
    with served(recording.workspace, turn_s=60.0) as client:
        assert "page" in threads()
        client.login()
        updates = client.updates()
        next(updates)
        asking = threading.Thread(target=lambda: heard.extend(updates))
        asking.start()
        recording.add(9.0, RecordingEnd(0))
    asking.join()
    assert [data["job"]["ended"] for data in heard] == [9.0]
    with pytest.raises(OSError):
        client.get("/")
    until(lambda: threads() <= before and len(os.listdir("/proc/self/fd")) <= files)


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_refused() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "no such host"):
        with pytest.raises(ConfigError, match=r"^--host"):
            http_server.listen(host=host)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"^--watch = {port}: must be a free port, or 0 for any: another process listens there$"
        with pytest.raises(ConfigError, match=said):
            http_server.listen(port, port_option="--watch")


def test_an_address_that_others_reach_has_tls(recording: GrowingRecording, monkeypatch: pytest.MonkeyPatch) -> None:
    found = http_server.local_address("127.0.0.1")
    monkeypatch.setattr(http_server, "local_address", lambda host: replace(found, loopback=False))
    bound = http_server.listen(host="127.0.0.1")
    source = RecordedWorkspace(recording.workspace)
    with closing(source), served_page(bound, {recording.workspace: source}, QUICK_S) as url:
        assert url.startswith("https://127.0.0.1:")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", bound.port)) as sock, context.wrap_socket(sock) as channel:
            assert channel.version() == "TLSv1.3"
            from hashlib import sha256

            shown = sha256(channel.getpeercert(binary_form=True) or b"").hexdigest()
            assert bound.fingerprint.replace(":", "").lower() == shown
            path = PageClient(url).login_path
            channel.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{bound.port}\r\n\r\n".encode())
            answer = channel.recv(4096).decode()
            assert "303" in answer.splitlines()[0] and "; secure" in answer.lower()
        with socket.create_connection(("127.0.0.1", bound.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP")


# ---- silent connections ----------------------------------------------------------------------------------------------


def test_a_connection_without_an_allowed_request_ends(
    monkeypatch: pytest.MonkeyPatch, recording: GrowingRecording
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    request = b"GET /api/view HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(recording.workspace, turn_s=2.0) as client:
        client.login()
        for text in (b"", b"GET /", request):
            with socket.create_connection((client.host, client.port), 20) as sock:
                sock.sendall(text)
                while sock.recv(4096):
                    pass
        updates = client.updates()
        next(updates)
        recording.add(3.0, step("worker 0/0", 2))
        assert next(updates), "a request of the page itself waits for its turn"
