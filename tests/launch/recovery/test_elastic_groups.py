"""Groups that leave a job and come to it, without any: wishes, events and times go in, decisions come out."""

import contextlib
import json
import selectors
import socket
import threading
from dataclasses import replace

import pytest

from topotrain.config.job import Apply, Cluster, ConfigError, Grads, Job, OnFailure, Shard
from topotrain.config.topology import layout
from topotrain.core.events import Agreed, Exited, Failed, Finished, Incident, Joined, Left, Lost, Started, StepDone
from topotrain.extensions.elastic.eligibility import absent_groups, leave_refusal
from topotrain.launch.control_socket import NAME, ControlSocket, ask
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.recovery.recovery_actions import (
    AnswerRequest,
    AskServers,
    EndProcess,
    FailJob,
    GroupRequest,
    ReportGone,
    RestartGroup,
    RestartJob,
)
from topotrain.launch.recovery.recovery_policy import RecoveryPolicy, recovery

CLUSTER = Cluster(nworker_groups=3, server_worker_separate=True)
JOB = Job(cluster=CLUSTER, on_failure=OnFailure.kContinue, restarts=1)
EVERYBODY = ("worker 0/0", "worker 1/0", "worker 2/0", "server 0/0")
BEGAN = 100.0


def machine(job: Job = JOB) -> RecoveryPolicy:
    made = recovery(job, layout(job.cluster), BEGAN)
    assert made is not None
    for number, who in enumerate(EVERYBODY):
        if who not in made.missing:
            made.on_event(Started(who, number), BEGAN)
    return made


def wish(made: RecoveryPolicy, verb: str, group: int, at: float = 105.0) -> list[object]:
    return list(made.on_group_request(GroupRequest(verb, group, 3.0)))


def refused(found: list[object]) -> str:
    (answer,) = found
    assert isinstance(answer, AnswerRequest)
    assert answer.error
    return answer.error


def agree(made: RecoveryPolicy, verb: str, group: int, text: str = "", at: float = 105.0) -> list[object]:
    return list(made.on_event(Agreed("server 0/0", group, verb, text), at))


def lost(who: str) -> Lost:
    return Lost(who, 7, f"{who} (pid 7) was killed by SIGKILL", "")


def gone(made: RecoveryPolicy, group: int, incarnation: int = 0) -> None:
    """The group leaves in order."""
    assert wish(made, "leave", group) == [AskServers("leave", group, incarnation)]
    assert agree(made, "leave", group) == []
    made.on_event(Exited(f"worker {group}/0", group, 0), 106.0)


def test_a_group_leaves_once_the_servers_agree_and_its_processes_have_ended() -> None:
    made = machine()
    assert wish(made, "leave", 2) == [AskServers("leave", 2)]
    assert agree(made, "leave", 2) == []
    ended = Exited("worker 2/0", 2, 0)
    assert made.on_event(ended, 106.0) == [
        ended,
        Left(2, "has left", 6.0),
        ReportGone(2, 1),
        AnswerRequest("leave", 2, "group 2 has left"),
    ]
    assert made.missing == {"worker 2/0"}
    for who in ("worker 0/0", "worker 1/0", "server 0/0"):
        made.on_event(Finished(who, 1, 1, 0.0, 0, 0, 0), 107.0)
        made.on_event(Exited(who, 1, 0), 107.0)
    assert made.complete


def test_what_the_servers_do_not_agree_to_does_not_happen() -> None:
    made = machine()
    wish(made, "leave", 2)
    assert refused(agree(made, "leave", 2, "it is too late")) == "group 2 cannot leave: it is too late"
    assert wish(made, "leave", 2) == [AskServers("leave", 2)]


def test_who_does_not_leave_in_time_is_ended() -> None:
    made = machine()
    wish(made, "leave", 2)
    agree(made, "leave", 2)
    assert made.due == 108.0
    assert made.poll(107.9) == []
    assert made.poll(108.0) == [EndProcess("worker 2/0")]
    assert made.due is None
    _, left, *_ = made.on_event(Exited("worker 2/0", 2, -9), 108.1)
    assert isinstance(left, Left)
    assert left.how == "did not leave within 3 s and was ended"


def test_who_dies_while_leaving_is_not_started_again() -> None:
    made = machine()
    wish(made, "leave", 2)
    agree(made, "leave", 2)
    assert made.on_event(lost("worker 2/0"), 106.0) == [EndProcess("worker 2/0")]
    _, left, *_ = made.on_event(Exited("worker 2/0", 2, -9), 106.0)
    assert isinstance(left, Left)
    assert left.how == "was lost while it left"


def test_a_worker_that_dies_before_the_servers_agree_starts_again_and_says_so() -> None:
    made = machine()
    wish(made, "leave", 2)
    incident, again, answer = made.on_event(lost("worker 2/0"), 105.5)
    assert isinstance(incident, Incident)
    assert again == RestartGroup(2, 1, incident.what)
    assert "try again" in refused([answer])
    assert agree(made, "leave", 2) == []  # nobody waits for it now


def test_the_servers_are_told_which_incarnation_is_to_leave() -> None:
    """One that has died meanwhile, as they may know before we do, starts again and stays."""
    made = machine()
    made.on_event(lost("worker 2/0"), 105.0)
    assert wish(made, "leave", 2) == [AskServers("leave", 2, 1)]


def test_who_ends_its_script_meanwhile_has_not_left() -> None:
    made = machine()
    wish(made, "leave", 2)
    agree(made, "leave", 2)
    made.on_event(Finished("worker 2/0", 1, 1, 0.0, 0, 0, 0), 105.5)
    _, answer = made.on_event(Exited("worker 2/0", 2, 0), 106.0)
    assert "finished its scripts" in refused([answer])
    assert not made.missing


def test_a_group_that_has_left_joins_as_a_new_incarnation() -> None:
    made = machine()
    gone(made, 2)
    assert wish(made, "join", 2) == [AskServers("join", 2)]
    text = "group 2 starts (incarnation 1)"
    assert agree(made, "join", 2, at=110.0) == [
        Joined(2, 1, 10.0),
        RestartGroup(2, 1, "it joins the job"),
        AnswerRequest("join", 2, text),
    ]
    assert not made.missing
    made.on_event(Started("worker 2/0", 17), 111.0)
    made.on_event(StepDone("worker 2/0", 1.0, 1, 8, None, 0.0, 0, 0, 0), 112.0)
    gone(made, 2, incarnation=1)
    wish(made, "join", 2)
    assert agree(made, "join", 2)[1] == RestartGroup(2, 2, "it joins the job")


def test_a_worker_that_joins_too_late_and_ends_with_an_error_is_not_missed() -> None:
    made = machine()
    gone(made, 2)
    wish(made, "join", 2)
    agree(made, "join", 2)
    made.on_event(Started("worker 2/0", 17), 111.0)
    for who in ("worker 0/0", "worker 1/0", "server 0/0"):
        made.on_event(Finished(who, 1, 1, 0.0, 0, 0, 0), 112.0)
        made.on_event(Exited(who, 1, 0), 112.0)
    assert made.on_event(Failed("worker 2/0", "peer", "nobody is there", ""), 113.0) == []
    incident, dismissed = made.poll(115.0)
    assert isinstance(incident, Incident)
    assert incident.action.startswith("nothing is missing")
    assert dismissed == EndProcess("worker 2/0")


def test_the_job_goes_on_without_a_group_that_has_used_up_its_restarts() -> None:
    made = machine()
    assert isinstance(made.on_event(lost("worker 2/0"), 105.0)[1], RestartGroup)
    made.on_event(Exited("worker 2/0", 2, -9), 105.0)
    made.on_event(Started("worker 2/0", 12), 106.0)
    incident, dismissed, asked = made.on_event(lost("worker 2/0"), 107.0)
    assert isinstance(incident, Incident)
    assert "once within 10 minutes, as `restarts` allows" in incident.what
    assert "the job goes on without group 2" in incident.action
    assert (dismissed, asked) == (EndProcess("worker 2/0"), AskServers("lose", 2, 1))
    assert [type(word) for word in made.on_event(Exited("worker 2/0", 12, -9), 107.0)] == [Exited]
    left, told, _ = agree(made, "lose", 2, at=107.5)
    assert (left, told) == (Left(2, "is given up", 7.5), ReportGone(2, 2))
    assert wish(made, "join", 2) == [AskServers("join", 2, 1)]


def sick(who: str) -> Failed:
    return Failed(who, "quarantine", "worker group 2: the gradient of w that worker 2/0 pushed is not finite", "")


def test_a_group_whose_gradients_are_not_finite_is_put_into_quarantine() -> None:
    made = machine()
    incident, dismissed, asked = made.on_event(sick("worker 2/0"), 107.0)
    assert isinstance(incident, Incident)
    assert "of w that worker 2/0 pushed" in incident.what
    assert "the job goes on without group 2" in incident.action
    assert (dismissed, asked) == (EndProcess("worker 2/0"), AskServers("lose", 2))
    assert made.on_event(sick("worker 2/0"), 107.1) == [EndProcess("worker 2/0")]  # another shard has told it, too
    made.on_event(Exited("worker 2/0", 2, 1), 107.2)
    left, told, _ = agree(made, "lose", 2, at=107.5)
    assert (left, told) == (Left(2, "is in quarantine", 7.5), ReportGone(2, 1))
    assert wish(made, "join", 2) == [AskServers("join", 2)]


def test_without_a_group_that_could_go_on_the_job_ends_with_the_message_of_the_failed_one() -> None:
    assert machine().on_event(sick("worker 0/0"), 107.0) == [FailJob((sick("worker 0/0"),))]
    made = machine()
    made.on_event(sick("worker 2/0"), 107.0)
    assert agree(made, "lose", 2, "no other group trains") == [FailJob((sick("worker 2/0"),))]


def test_where_no_group_could_read_what_it_leaves_the_job_ends_with_it() -> None:
    made = machine(replace(JOB, restarts=0))
    made.on_event(lost("worker 2/0"), 107.0)
    (give_up,) = agree(made, "lose", 2, "no other group trains")
    assert isinstance(give_up, FailJob)
    assert give_up.failures[0].who == "worker 2/0"
    (give_up,) = machine(replace(JOB, restarts=0)).on_event(lost("worker 0/0"), 107.0)
    assert isinstance(give_up, FailJob)


def test_the_whole_job_starts_again_without_groups_that_have_left() -> None:
    made = machine()
    gone(made, 2)
    wish(made, "leave", 1)
    assert isinstance(made.on_event(lost("server 0/0"), 108.0)[1], RestartJob)
    assert "whole job is restarting" in refused(wish(made, "join", 2))
    assert (made.missing, made.absent_groups) == ({"worker 2/0"}, {1, 2})
    made.begin_attempt()
    assert made.absent_groups == {1, 2}
    assert made.missing == {"worker 1/0", "worker 2/0"}


def test_what_cannot_be_is_refused_with_the_state_of_all_groups() -> None:
    made = machine()
    assert "groups: 0 trains, 1 trains, 2 trains" in refused(wish(made, "leave", 7))
    assert "writes the result, so it stays to the end" in refused(wish(made, "leave", 0))
    assert refused(wish(made, "join", 1)).startswith("group 1 trains")
    gone(made, 2)
    assert refused(wish(made, "leave", 2)).startswith("group 2 is not there; groups: 0 trains, 1 trains, 2 is not")


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
    assert machine(job).missing == {"worker 1/0", "worker 2/0"}
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
