"""Groups that leave a job and come to it: which may, and the control socket. What is decided: policy.txt."""

import contextlib
import json
import selectors
import socket
import threading
from dataclasses import replace

import pytest

from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, OnFailure, Shard
from topotrain.config.topology import layout
from topotrain.extensions.elastic.eligibility import absent_groups, leave_refusal
from topotrain.launch.control_socket import NAME, ControlSocket, ask
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.recovery.recovery_actions import (
    AnswerRequest,
    GroupRequest,
)

CLUSTER = Cluster(nworker_groups=3, server_worker_separate=True)
JOB = Job(cluster=CLUSTER, on_failure=OnFailure.kContinue, restarts=1)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True)), "leave WORKSPACE --workers 1"),
        (replace(JOB, on_failure=OnFailure.kStop), "kContinue is needed"),
        (replace(JOB, shard=Shard.kStatic), "shard: kStatic"),
        (replace(JOB, apply=Apply.kOnArrival, grads=Grads.kHidden), "kOnArrival"),
        (Job(cluster=Cluster(nworker_groups=2, nserver_groups=2)), "servers of its own"),
        (Job(cluster=Cluster(nworker_groups=2, nworkers_per_group=2, nserver_groups=0)), ""),
        (JOB, ""),
    ],
    ids=["synchronous", "kStop", "static", "on arrival", "hogwild", "no servers", "downpour"],
)
def test_layouts_that_cannot_do_it_say_why(job: Job, words: str) -> None:
    why = leave_refusal(replace(job, cluster=job.cluster), layout(job.cluster), job.cluster.nworker_groups - 1)
    assert (words in why) if words else (why == "" or job.cluster.nserver_groups == 0)


def test_a_job_may_begin_with_some_of_its_groups() -> None:
    job = replace(JOB, start_groups=1)
    assert absent_groups(job, layout(CLUSTER)) == {1, 2}
    for wrong in (replace(JOB, start_groups=4), replace(job, shard=Shard.kStatic)):
        with pytest.raises(ConfigError, match="start_groups"):
            absent_groups(wrong, layout(CLUSTER))


# --- the control socket --------------------------------------------------------------------------------------------


class Porter:
    """A control socket with a loop of its own; `say` answers what is wished."""

    def __init__(self, folder, say) -> None:
        self.heard: list[GroupRequest] = []
        self.selector = selectors.DefaultSelector()
        folder.mkdir(parents=True)
        self.requests = JobRequests()
        self.control_socket = ControlSocket(folder, self.selector, self.requests)
        self.say, self.over = say, False
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def hear(self, wish: GroupRequest) -> None:
        self.heard.append(wish)
        for answer in self.say(wish):
            self.requests.answer(answer)

    def loop(self) -> None:
        while not self.over:
            for key, _ in self.selector.select(0.02):
                key.data()
            for wish in self.requests.take():
                self.hear(wish)
        self.control_socket.close()
        self.requests.close()

    def close(self) -> None:
        self.over = True
        self.thread.join()


def test_a_request_is_received_and_answered_however_long_the_path(tmp_path) -> None:
    folder = tmp_path / ("long " * 25)
    porter = Porter(
        folder / "run", lambda wish: [AnswerRequest("join", 9, "no"), AnswerRequest(wish.verb, wish.group, "has left")]
    )
    try:
        assert ask(folder, GroupRequest("leave", 2, 3.0)) == {"group": 2, "text": "has left"}
        assert porter.heard == [GroupRequest("leave", 2, 3.0)]
    finally:
        porter.close()


def test_a_refusal_and_the_end_of_the_job_are_told(tmp_path) -> None:
    porter = Porter(tmp_path / "run", lambda wish: [AnswerRequest("leave", 2, "", "group 2 is not there")])
    with pytest.raises(ConfigError, match="group 2 is not there"):
        ask(tmp_path, GroupRequest("leave", 2))
    porter.say = lambda wish: setattr(porter, "over", True) or []
    with pytest.raises(ConfigError, match="has ended"):
        ask(tmp_path, GroupRequest("leave", 2))
    porter.close()
    with pytest.raises(ConfigError, match="workspace of a job"):
        ask(tmp_path, GroupRequest("leave", 2))


@pytest.mark.parametrize(
    "said", [b"\n", b"[1]\n", b'{"verb": "leave"}\n', b'{"verb": "sing", "group": 1, "within_s": 1}\n']
)
def test_nonsense_is_answered_and_forgotten(tmp_path, monkeypatch, said: bytes) -> None:
    porter = Porter(tmp_path / "run", lambda wish: [])
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"run/{NAME}")
        caller.sendall(said)
        assert "cannot be read" in json.loads(caller.recv(4096))["error"]
    porter.close()
    assert not porter.heard


def test_a_caller_that_says_too_much_is_cut_off(tmp_path, monkeypatch) -> None:
    porter = Porter(tmp_path / "run", lambda wish: [])
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"run/{NAME}")
        caller.sendall(b"x" * 2000)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(10) == b""
    porter.close()
