"""Requests of the user to a running job: who is answered, and over which way a request comes."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.lost_write import lose_one
from topotrain.comm.store import StoreError, open_store, within
from topotrain.comm.store.discovery.job_registry import JobRecord, Registry, UnknownJob
from topotrain.config.job import ConfigError
from topotrain.launch import control_socket, store_requests
from topotrain.launch.control_socket import NAME, ControlSocket, ask, linked_folder
from topotrain.launch.job_requests import ENDED, LEADER_LOST, JobRequest, JobRequests, from_data, to_data
from topotrain.launch.multinode.control_connection import ControlClient
from topotrain.launch.multinode.forwarded_requests import ForwardedRequests, accept
from topotrain.launch.recovery.recovery_actions import AnswerRequest, GroupRequest, ResizeRequest, StopJob, TakeSnapshot
from topotrain.launch.store_requests import StoreRequests, ask_anywhere, ask_over_store
from topotrain.tools.cli import app

SECRET = "5e" * 32


Said = list[dict[str, Any]]
"""What a client is told."""


def test_everybody_who_asked_for_a_change_is_answered_once() -> None:
    requests = JobRequests()
    first, second, other = Said(), Said(), Said()
    requests.add(GroupRequest("leave", 1), first.append)
    requests.add(GroupRequest("leave", 1, 3.0), second.append)
    requests.add(GroupRequest("join", 1), other.append)
    assert len(requests.take()) == 3 and requests.take() == []
    for _ in range(2):
        requests.answer(AnswerRequest("leave", 1, "has left"))
    assert first == second == [{"group": 1, "text": "has left"}]
    assert other == [] and requests.waiting == 1
    requests.close()
    requests.close()
    assert other == [{"error": ENDED}]


def test_a_promise_outlives_the_attempt_and_each_of_equal_requests_has_its_own_answer() -> None:
    requests, clients = JobRequests(), [Said(), Said(), Said()]
    wishes = [ResizeRequest("leave", 1) for _ in clients]
    for wish, client in zip(wishes, clients, strict=True):
        requests.add(wish, client.append)
    promise = requests.promise(wishes[1], 4, {"workers": 2})
    requests.refuse(wishes[0], "another change is under way")
    requests.reply(wishes[2], {"workers": 3})
    assert requests.waiting == 0
    requests.close()
    assert clients[1] == []
    promise.send()
    promise.send("too late")
    assert clients == [
        [{"error": "another change is under way"}],
        [{"workers": 2}],
        [{"workers": 3}],
    ]


@pytest.mark.parametrize(
    "wish", [GroupRequest("join", 3, 2.5), ResizeRequest("leave", 1, 9.0), TakeSnapshot(3.0), StopJob()]
)
def test_requests_travel_as_data(wish: JobRequest) -> None:
    assert from_data(to_data(wish)) == wish


@pytest.mark.parametrize(
    "said",
    [
        *({}, [], "stop", {"verb": "sing"}, {"verb": "snapshot"}, {"verb": "snapshot", "within_s": 0}),
        *({"verb": "snapshot", "within_s": "10"}, {"verb": "leave", "within_s": 10.0}, {"verb": ["stop"]}),
    ],
)
def test_what_is_no_request(said: Any) -> None:
    with pytest.raises(ValueError, match="not a request"):
        from_data(said)


# ---- over the store --------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, answers: dict[str, Any]) -> Iterator[tuple[str, JobRequests]]:
    """A job that looks for requests in its store, and gives these answers by group."""
    url = folder.as_uri()
    requests, over = JobRequests(), threading.Event()
    with closing(open_store(url)) as root:
        registry = Registry(root)
        registry.add(JobRecord("j1", "ours"))
        asked = StoreRequests(within(root, "jobs/j1"), requests)

        def serve() -> None:
            while not over.wait(0.01):
                asked.look()
                for wish in requests.take():
                    assert isinstance(wish, GroupRequest)
                    if wish.group == 9:
                        registry.end("j1", "done")
                    elif wish.group in answers:
                        requests.answer(AnswerRequest(wish.verb, wish.group, **answers[wish.group]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield url, requests
        finally:
            over.set()
            thread.join()


def test_a_request_over_the_store_is_answered(tmp_path: Path) -> None:
    environ = {"TOPOTRAIN_TOKEN": SECRET}
    with served(tmp_path, {1: {"text": "has left"}, 2: {"text": "", "error": "is not there"}}) as (url, _):
        assert ask_over_store(url, "j1", GroupRequest("leave", 1), environ) == {"group": 1, "text": "has left"}
        with pytest.raises(ConfigError, match="--group = 2: is not there"):
            ask_over_store(url, "j1", GroupRequest("leave", 2), environ)
        with pytest.raises(UnknownJob, match="known jobs: j1"):
            ask_over_store(url, "j2", GroupRequest("leave", 1), environ)
        # a job that ends meanwhile does not let its user wait
        with pytest.raises(ConfigError, match="--job = 'j1': must be a job that runs, and this one has ended: done"):
            ask_over_store(url, "j1", GroupRequest("leave", 9), environ)
        with closing(open_store(url)) as root:
            assert root.keys("jobs/j1/") == ["jobs/j1/asked"], "no request and no answer is left in the store"


@pytest.mark.parametrize(("key", "after"), [("/requests/", 0), ("/asked", 0), ("/requests/", 1), ("/answers/", 0)])
def test_a_lost_write_loses_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, after: int) -> None:
    monkeypatch.setattr(store_requests, "_LOOK_S", 0.05)
    with served(tmp_path, {1: {"text": "has left"}}) as (url, _):
        lost = lose_one(monkeypatch, key, after)
        said = ask_over_store(url, "j1", GroupRequest("leave", 1), {"TOPOTRAIN_TOKEN": SECRET})
        assert said == {"group": 1, "text": "has left"} and len(lost) == 1


def test_nonsense_in_the_store_is_answered(tmp_path: Path) -> None:
    with served(tmp_path, {}) as (url, requests), closing(open_store(url)) as root:
        root.set("jobs/j1/requests/ab", b'{"verb": "sing"}')
        root.set("jobs/j1/asked", b"ab")
        assert b"cannot be read" in root.watch("jobs/j1/answers/ab", 10.0)
        assert requests.waiting == 0


# ---- over another unit -----------------------------------------------------------------------------------------------


class Wire(ControlClient):
    """The two ends of a connection between units; what is sent is kept."""

    def __init__(self, leader: int = 0) -> None:
        self.leader = leader
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def send(self, rank: int, words: Any) -> None:
        self.sent.append((rank, words))


def test_a_request_at_another_unit_is_answered_by_the_leader() -> None:
    there, here, requests = Wire(2), Wire(), JobRequests()
    forwards, clients = ForwardedRequests(), [Said(), Said()]
    forwards.use(there)
    for number, client in enumerate(clients):
        forwards.send(GroupRequest("leave", number, 2.0), client.append)
    for rank, words in there.sent:
        assert rank == 2
        accept(requests, here, 3, words["ask"])
    assert requests.take() == [GroupRequest("leave", 0, 2.0), GroupRequest("leave", 1, 2.0)]
    requests.answer(AnswerRequest("leave", 1, "has left"))
    ((rank, words),) = here.sent
    assert rank == 3
    for _ in range(2):
        forwards.receive(words["answer"])
    forwards.close()
    assert clients == [[{"error": ENDED}], [{"group": 1, "text": "has left"}]]


def test_a_request_that_a_lost_leader_has_not_answered_is_an_error() -> None:
    former, present, requests = Wire(0), Wire(2), JobRequests()
    forwards, clients = ForwardedRequests(), [Said(), Said(), Said()]
    forwards.use(former)
    forwards.send(GroupRequest("leave", 0, 2.0), clients[0].append)
    forwards.use(None)
    assert not forwards.has_leader
    forwards.send(GroupRequest("leave", 1, 2.0), clients[1].append)
    forwards.use(present)
    forwards.send(GroupRequest("leave", 2, 2.0), clients[2].append)
    assert clients == [[{"error": LEADER_LOST}], [{"error": LEADER_LOST}], []]
    # What the former leader says about the first request is not an answer to the third one.
    forwards.receive({"number": former.sent[0][1]["ask"]["number"], "said": {"error": "late"}})
    ((rank, words),) = present.sent
    accept(requests, Wire(), 2, words["ask"])
    assert rank == 2 and requests.take() == [GroupRequest("leave", 2, 2.0)]
    assert clients[2] == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "key"), [("get", "asked"), ("keys", ""), ("get", "requests/"), ("set", "requests/"), ("set", "answers/")]
)
def test_one_error_of_the_store_loses_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str, after: bool
) -> None:
    with closing(open_store((tmp_path / "store").as_uri())) as store:
        store.set("requests/ab", b'{"verb": "leave", "workers": 1, "within_s": 5}')
        store.set("asked", b"ab")
        requests = JobRequests()
        taker, failed = StoreRequests(store, requests), lose_one(monkeypatch, key, 0, [name], after)
        for _ in range(3):
            with suppress(StoreError):
                taker.look()
            for wish in requests.take():
                requests.reply(wish, {"text": "has left"})
        assert json.loads(store.get("answers/ab") or b"") == {"text": "has left"}
        assert store.keys("requests/") == [] and failed


# ---- by workspace ----------------------------------------------------------------------------------------------------


@contextmanager
def listening(folder: Path, answer: Callable[[JobRequests, JobRequest], object]) -> Iterator[list[JobRequest]]:
    """A control socket with a loop of its own; yields what it has received."""
    requests, selector, over, received = JobRequests(), selectors.DefaultSelector(), threading.Event(), []  # type: ignore[var-annotated]
    folder.mkdir(parents=True, exist_ok=True)
    ControlSocket(folder, selector, requests).close()
    control = ControlSocket(folder, selector, requests)  # the next attempt of the job

    def loop() -> None:
        while not over.is_set():
            for key, _ in selector.select(0.01):
                key.data()
            for wish in requests.take():
                received.append(wish)
                answer(requests, wish)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield received
    finally:
        over.set()
        thread.join()
        control.close()


def leaves(requests: JobRequests, wish: JobRequest) -> None:
    assert isinstance(wish, GroupRequest)
    requests.answer(AnswerRequest("join", 9, "no"))
    if wish.group == 9:
        requests.close()
    error = "group 3 is not there" if wish.group == 3 else ""
    requests.answer(AnswerRequest(wish.verb, wish.group, "has left", error))


def test_a_workspace_leads_to_a_unit_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}-0").symlink_to(tmp_path / "on another machine")
    with linked_folder(tmp_path, 2) as folder:
        assert (folder.stat().st_mode & 0o777) == 0o700
        with listening(folder, leaves):
            assert ask(tmp_path, GroupRequest("leave", 2)) == {"group": 2, "text": "has left"}
            monkeypatch.setattr(control_socket, "peer", lambda channel: (0, os.geteuid() + 1, 0))
            with pytest.raises(ConfigError, match="ended before it answered"):  # another user is hung up on
                ask(tmp_path, GroupRequest("leave", 2))
    assert not (tmp_path / f"{NAME}-2").is_symlink() and not folder.exists()
    with pytest.raises(ConfigError, match=r"on this machine; from elsewhere use the URL of its store and --job NAME"):
        ask(tmp_path, GroupRequest("leave", 2))


def test_a_request_is_received_and_answered_however_long_the_path_and_nonsense_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / ("long " * 25)
    with listening(workspace / "run", leaves) as received:
        assert ask(workspace, GroupRequest("leave", 2, 3.0)) == {"group": 2, "text": "has left"}
        assert received == [GroupRequest("leave", 2, 3.0)]
        with pytest.raises(ConfigError, match="group 3 is not there"):
            ask(workspace, GroupRequest("leave", 3))
        with pytest.raises(ConfigError, match="has ended"):
            ask(workspace, GroupRequest("leave", 9))
        received.clear()
        monkeypatch.chdir(workspace)
        sing = b'{"verb": "sing", "group": 1, "within_s": 1}\n'
        for said in (b"\n", b"[1]\n", b'{"verb": "leave"}\n', sing, b"x" * 2000):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(f"run/{NAME}")
                caller.sendall(said)
                with suppress(ConnectionResetError):  # who says too much is cut off
                    found = caller.recv(4096)
                    assert found == b"" if len(said) > 1000 else "cannot be read" in json.loads(found)["error"]
    assert not received
    with pytest.raises(ConfigError, match="workspace of a job"):
        ask(workspace, GroupRequest("leave", 2))


STOPPED = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(1)
os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


@pytest.mark.journey
def test_a_stopped_launcher_is_named_to_those_that_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "LOOK_S", 0.05)
    monkeypatch.setattr(control_socket, "ANSWER_S", 0.05)
    (tmp_path / "run").mkdir()
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path / "run" / NAME)]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED)
        with pytest.raises(
            ConfigError, match=rf"launcher \(pid {launcher.pid}\) is stopped.*`kill -CONT {launcher.pid}"
        ):
            ask(tmp_path, TakeSnapshot())
        launcher.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, launcher.pid, os.WCONTINUED)
        with pytest.raises(ConfigError, match=rf"launcher \(pid {launcher.pid}\) has not answered within 0.05 s"):
            ask_anywhere(tmp_path, StopJob(), {})
        with pytest.raises(ConfigError, match="takes no more requests: is it stopped"):
            ask(tmp_path, StopJob())
        launcher.kill()


Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    """Runs a command in this process; returns its code and what it wrote."""
    monkeypatch.setenv("TOPOTRAIN_TOKEN", SECRET)
    monkeypatch.delenv("TOPOTRAIN_RENDEZVOUS", raising=False)
    monkeypatch.setattr("topotrain.launch.store_requests._PATIENCE_S", 0.1)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app.main(words)
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no job: give its WORKSPACE, or the URL of its store with --job ID"),
        (["w", "--job", "j1"], "--job j1: needs the URL of a store, and w is none"),
        (["tcp://h:1"], "give the job, too: --job ID"),
        (["tcp://h:1?job=j1", "--job", "j2"], "--job = 'j2': is not the job of the URL"),
        (["--job", "j1"], "no store: give its URL, or set TOPOTRAIN_RENDEZVOUS"),
        (["--job", "j1", "reddis://h"], "unknown kind 'reddis'"),
    ],
)
def test_how_a_job_may_not_be_named(words: list[str], said: str, told: Told) -> None:
    code, _, err = told("jobs", "leave", *words, "--group", "1")
    assert code == 2 and said in err


def test_where_no_unit_runs_the_store_of_the_launch_leads_to_the_job(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "job"
    store = workspace / "launch" / "night" / "store"
    (workspace / "launch" / "elsewhere").mkdir(parents=True)  # it met in another store
    with served(store, {1: {"text": "has left"}, 2: {"text": "", "error": "is not there"}}) as (url, _):
        assert told("jobs", "leave", str(workspace), "--group", "1") == (0, "topotrain: has left\n", "")
        assert told("jobs", "leave", f"{url}?job=j1", "--group", "1") == (0, "topotrain: has left\n", "")
        code, _, err = told("jobs", "leave", str(workspace), "--group", "2")
        assert (code, err) == (2, "topotrain: error: --group = 2: is not there\n")
        monkeypatch.setattr("topotrain.tools.cli.jobs.NOTICE_S", 0.1)
        code, _, err = told("jobs", "leave", str(workspace), "--group", "9")
        assert code == 2 and err.startswith("topotrain: the job has not answered yet (Ctrl-C")
        with closing(open_store(url)) as root:
            Registry(root).add(JobRecord("j1", "ours"))
            Registry(root).add(JobRecord("j0", "ours", started=time.time() + 9))
            Registry(root).end("j0", "failed")  # the one that runs counts, and not the latest
            assert told("jobs", "leave", str(workspace), "--group", "1")[0] == 0
            Registry(root).end("j1", "done")
    code, _, err = told("jobs", "leave", str(workspace), "--group", "1")
    assert (
        code == 2
        and "must be the workspace of a job that runs; the last one launched there, j0, is over: failed" in err
    )
    code, _, err = told("jobs", "leave", url, "--job", "j1", "--group", "1")
    assert code == 2 and "--job = 'j1': must be a job that runs, and this one has ended: done" in err
    code, _, err = told("jobs", "leave", url, "--job", "j9", "--group", "1")
    assert (code, err) == (2, f"topotrain: error: no job 'j9', known jobs: j0, j1 (store {url})\n")


def test_a_store_that_cannot_be_that_of_the_job_is_bad_input_and_is_not_made(tmp_path: Path, told: Told) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    missing = tmp_path / "missing"
    for url, said in (
        (missing.as_uri(), "this directory does not exist, so no job has met there"),
        (open_to_all.as_uri(), "must belong to this user with mode 0700"),
        ("tcp://127.0.0.1:1", "store tcp://127.0.0.1:1 cannot be reached"),
    ):
        code, out, err = told("jobs", "join", url, "--job", "j1", "--group", "1")
        assert code == 2 and out == "" and said in err and err.count("\n") == 1
    code, _, err = told("jobs", "list", missing.as_uri())
    assert code == 2 and "this directory does not exist" in err
    assert not missing.exists()
    code, _, err = told("jobs", "join", str(missing), "--group", "1")
    assert code == 2 and "there is no such folder" in err


def test_the_list_is_that_of_the_store_also_where_the_url_names_a_job(tmp_path: Path, told: Told) -> None:
    with closing(open_store((tmp_path / "store").as_uri())) as root:
        Registry(root).add(JobRecord("j1", "ours"))
    code, out, _ = told("jobs", "list", (tmp_path / "store").as_uri() + "?job=j1")
    assert code == 0 and "j1  running" in out
