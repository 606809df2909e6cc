"""Whole jobs on this machine, parts played in place of training: the outcome, its cause, and that nobody is left."""

import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from tests.support.launch_targets import CALLS, launch, marked, parts, processes, small_job, wait_for
from tests.support.refused_forks import VARIABLE
from topotrain.config.job import ConfigError
from topotrain.config.topology import layout
from topotrain.core.events import Exited, Failed, Incident, Notice, Output, Saved, Serving, Started, Unsaved, from_json
from topotrain.launch import job_shutdown, local, run_loop
from topotrain.launch.agent import workspace
from topotrain.launch.agent.pipes import LineReader
from topotrain.launch.agent.unit_process import UnitProcess, start_unit
from topotrain.launch.control_socket import ask
from topotrain.launch.job_requests import JobRequests
from topotrain.launch.local import LocalLauncher
from topotrain.launch.recovery import attempt_state
from topotrain.launch.recovery.recovery_actions import StopJob

pytestmark = pytest.mark.journey


@pytest.fixture
def deaths():
    """The end of a process wakes this one, as in a program in which a DataLoader has had processes."""
    former = signal.signal(signal.SIGCHLD, lambda *_: None)
    yield lambda event=None: os.kill(os.getpid(), signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, former)


def test_a_job_that_goes_well_whatever_signals_come_that_are_no_requests(tmp_path, mark, deaths):
    roles = parts(worker_0_0="talk")
    outcome, events = launch(tmp_path, roles, deaths, nservers_per_group=2, nservers_per_procs=2)
    assert (outcome.code, outcome.cause) == (0, None)
    residents = {"worker 0/0", "worker 0/1", "server 0/0", "server 0/1"}
    assert outcome.exits == dict.fromkeys(residents | {"unit 0", "unit 1"}, 0)
    assert outcome.pids == {event.who: event.pid for event in events if isinstance(event, Started)}
    assert outcome.pids["server 0/0"] == outcome.pids["server 0/1"]
    assert "".join(event.text for event in events if isinstance(event, Output)).count("two") == 1
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o700
    assert not (tmp_path / "run" / "control").exists()
    assert os.stat(tmp_path / "run" / "token").st_mode & 0o777 == 0o600
    assert len((tmp_path / "run" / "token").read_bytes()) == 32
    entries = {entry["roles"][0]: entry for entry in processes(tmp_path)}
    assert entries.keys() == {"launcher", "forkserver", "unit 0", "unit 1", "server 0/0", "worker 0/0", "worker 0/1"}
    servers = entries["server 0/0"]
    assert (servers["unit"], servers["rank"], servers["servers"]) == (0, None, [[0, 0], [0, 1]])
    assert servers["address"] == [f"test://{servers['pid']}"]
    assert entries["worker 0/1"]["rank"] == 1 and entries["worker 0/1"]["workers"] == [[0, 1]]
    assert {entry["exit"] for role, entry in entries.items() if role != "launcher"} == {0}


def test_processes_are_listed_while_they_run_and_a_signal_ends_them(tmp_path, mark):
    seen = []

    def interrupt(event):
        if (tmp_path / "processes.json").exists() and not seen:
            seen.extend(processes(tmp_path))
            os.kill(os.getpid(), signal.SIGTERM)

    part = "brood"
    outcome, _ = launch(tmp_path, parts(worker_0_0=part, worker_0_1="deaf", server_0_0="stay"), interrupt)
    assert (outcome.code, outcome.cause) == (143, None)
    assert {entry["pid"] for entry in seen if entry["roles"] != ["launcher"]} >= set(outcome.pids.values())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def on_serving(who, do):
    done = []

    def hear(event):
        if isinstance(event, Serving) and event.who == who and not done:
            done.append(do())

    return hear


@pytest.mark.parametrize(("answer", "kind", "restarts"), [("saves", Saved, None), ("unsaved", Unsaved, 3)])
def test_sigterm_ends_a_job_when_its_first_server_has_answered(tmp_path, mark, answer, kind, restarts):
    hear = on_serving("server 0/0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    roles = parts(worker_0_0="stay", worker_0_1="stay", server_0_0=answer)
    outcome, events = launch(tmp_path, roles, hear, grace_s=100.0, restarts=restarts)
    assert (outcome.code, outcome.cause) == (143, None)
    assert [type(event) for event in events if isinstance(event, Saved | Unsaved)] == [kind]
    assert outcome.seconds < 50


def test_a_grace_that_is_over_and_a_second_sigterm_end_a_job(tmp_path, mark):
    roles = parts(worker_0_0="stay", worker_0_1="stay", server_0_0="stay")
    hear = on_serving("server 0/0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launch(tmp_path / "over", roles, hear, grace_s=0.3)[0].code == 143

    def twice(event):
        hear(event)
        if isinstance(event, Notice) and event.text.startswith("asked to end"):
            os.kill(os.getpid(), signal.SIGTERM)

    hear = on_serving("server 0/0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome, _ = launch(tmp_path / "twice", roles, twice, grace_s=100.0)
    assert outcome.code == 143 and outcome.seconds < 50


class Doubled(JobRequests):
    """Gets each request twice, so that one look finds both."""

    def add(self, wish, client):
        super().add(wish, client)
        super().add(wish, client)


@pytest.mark.parametrize("asks", ["twice at once", "and is signalled"])
def test_two_who_ask_for_the_end_at_once_lose_no_snapshot(tmp_path, mark, monkeypatch, asks):
    if asks == "twice at once":
        monkeypatch.setattr(local, "JobRequests", Doubled)

    def end():
        if asks == "twice at once":
            threading.Thread(target=lambda: ask(tmp_path, StopJob())).start()
        else:  # both before the loop looks at its signals
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    roles = parts(worker_0_0="stay", worker_0_1="stay", server_0_0="saves")
    outcome, events = launch(tmp_path, roles, on_serving("server 0/0", end), grace_s=100.0)
    assert outcome.code == 143
    assert [type(event) for event in events if isinstance(event, Saved)] == [Saved]


def test_a_job_that_comes_to_its_end_meanwhile_has_ended_well(tmp_path, mark, deaths):
    asks = on_serving("server 0/0", lambda: os.kill(os.getpid(), signal.SIGTERM))

    def hear(event):
        asks(event)
        if isinstance(event, Notice) and event.text.startswith("asked to end"):
            deaths()
            (tmp_path / "run" / "over").touch()

    roles = parts(worker_0_0="until over", worker_0_1="until over", server_0_0="until over")
    outcome, _ = launch(tmp_path, roles, hear, grace_s=100.0)
    assert (outcome.code, outcome.cause) == (0, None)


def test_the_first_cause_ends_the_job(tmp_path, mark):
    roles = parts(worker_0_1="killed", worker_0_0="lost peer", server_0_0="lost peer")
    outcome, _ = launch(tmp_path, roles)
    assert outcome.code == 1
    assert (outcome.cause.who, outcome.cause.kind) == ("worker 0/1", "died")
    assert outcome.seconds < 50


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        ("execs", "died", "has closed the channel to its unit and still runs"),
        ("closes", "program", "the program has closed descriptors that it did not open"),
    ],
)
def test_an_end_that_was_not_announced_is_a_loss(tmp_path, mark, part, kind, words):
    outcome, _ = launch(tmp_path, parts(worker_0_1=part))
    assert outcome.code == 1
    assert (outcome.cause.who, outcome.cause.kind) == ("worker 0/1", kind)
    assert words in outcome.cause.text + outcome.cause.traceback


REFUSING = replace(CALLS, preload=(*CALLS.preload, "tests.support.refused_forks"))


def test_a_fork_that_the_system_refuses_is_tried_again(tmp_path, mark, monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    job = small_job(tmp_path, parts(worker_0_1="once"), 3, server_worker_separate=True)
    events = []
    outcome = LocalLauncher(REFUSING).start(job, layout(job.cluster), events.append)
    assert outcome.code == 0, outcome
    refused = [event.what for event in events if isinstance(event, Incident) and "Resource temporarily" in event.what]
    assert refused and "could not be started" in refused[0]


def test_a_forkserver_that_cannot_load_its_modules_is_not_tried_again(tmp_path, mark):
    calls = replace(CALLS, preload=(*CALLS.preload, "tests.support.no_such_module"))
    outcome, events = launch(tmp_path, launcher=LocalLauncher(calls), restarts=3)
    assert (outcome.code, outcome.cause.kind) == (2, "config")
    assert "ended with exit code 1 before it could start a process" in outcome.cause.text
    assert "ModuleNotFoundError" in outcome.cause.traceback
    assert not [event for event in events if isinstance(event, Incident)]


def test_a_unit_that_cannot_be_started_again_is_a_loss(tmp_path, mark, monkeypatch):
    started = []

    def refused_twice(*words):
        started.append(words)
        if len(started) in (4, 5):  # the first unit of the second and of the third attempt
            raise BlockingIOError(errno.EAGAIN, "no process")
        return start_unit(*words)

    monkeypatch.setattr(attempt_state, "LEASE_S", 0.3)
    monkeypatch.setattr(run_loop, "start_unit", refused_twice)
    acts = parts(server_0_0="frozen once", worker_0_0="until over", worker_0_1="until over")
    outcome, events = launch(tmp_path, acts, restarts=3, server_worker_separate=True)
    assert (outcome.code, len(started)) == (0, 8), outcome
    found = [event for event in events if isinstance(event, Incident)]
    assert [event.action for event in found] == ["the whole job starts again"] * 3
    assert all("the job could not be started again: [Errno 11] no process" in event.what for event in found[1:])


def raising(error):
    def call(*words):
        raise error

    return call


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fork", r"^the processes of the job cannot be started: no process$"),
        ("disk", r"cluster.workspace = .*No space left on device"),
        ("file", r"^cluster\.workspace = .*must be a folder that can be written"),
    ],
)
def test_a_job_that_cannot_be_started_is_an_error_in_one_line(tmp_path, mark, monkeypatch, what, said):
    (tmp_path / "file").touch()
    if what == "fork":
        monkeypatch.setattr(run_loop, "start_unit", raising(BlockingIOError(errno.EAGAIN, "no process")))
    elif what == "disk":
        full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run"))
        monkeypatch.setattr(workspace, "write_run_files", raising(full))
    with pytest.raises(ConfigError, match=said):
        launch(tmp_path / "file" / "workspace" if what == "file" else tmp_path)


def test_a_unit_that_ends_before_its_processes_is_a_loss(tmp_path, mark, monkeypatch):
    def ends_at_once(place, calls, life, environ, log):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""], bufsize=0, **pipes)
        return UnitProcess(place.rank, process, LineReader(process.stdout.fileno()), log)

    monkeypatch.setattr(run_loop, "start_unit", ends_at_once)
    outcome, _ = launch(tmp_path)
    assert (outcome.code, outcome.cause.kind) == (1, "died")
    assert "ended with exit code 0 before" in outcome.cause.text


def test_what_a_unit_prints_is_no_event_and_does_not_end_the_job(tmp_path, mark, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\n'unit_main' in str(sys.orig_argv) and print('Welcome!')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []  # a job can be started on another thread, too
    thread = threading.Thread(target=lambda: found.extend(launch(tmp_path)))
    thread.start()
    thread.join(20)
    outcome, events = found
    assert (outcome.code, outcome.cause) == (0, None)
    texts = [event.text for event in events if isinstance(event, Notice) and event.who == "unit 0"]
    assert texts == ["sent an event that cannot be read: no event: Expecting value: line 1 column 1 (char 0)"]


def test_servers_that_stay_end_a_job_that_is_in_a_registry_too(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(job_shutdown, "SERVERS_S", 0.5)
    job = replace(small_job(tmp_path, parts(server_0_0="until over")), rendezvous=f"file://{tmp_path}/store")
    outcome = LocalLauncher(CALLS).start(job, layout(job.cluster), lambda event: None)
    assert (outcome.code, outcome.cause.who) == (1, "launcher")
    assert outcome.cause.text == "server 0/0 did not end within 0.5 s after the last worker"


def test_what_a_process_waits_for_after_its_program_is_told(tmp_path, mark):
    def hear(event):
        if isinstance(event, Notice) and "lingerer" in event.text:
            (tmp_path / "run" / "go").touch()

    outcome, events = launch(tmp_path, parts(worker_0_1="lingers"), hear)
    assert (outcome.code, outcome.cause) == (0, None)
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert notice.who == "worker 0/1"
    assert notice.text.startswith("its program has ended, but for the thread 'lingerer'")


def test_the_main_worker_may_report_when_another_one_fails_first(tmp_path, mark):
    failed = []

    def hear(event):
        if isinstance(event, Failed):
            failed.append(event.who)
            (tmp_path / "run" / "peer-was-heard").touch()

    args = ["worker 0/1=misconfigured", "worker 0/0=late program", "server 0/0=stay"]
    outcome, _ = launch(tmp_path, args, hear)
    assert failed == ["worker 0/1", "worker 0/0"]
    assert (outcome.code, outcome.cause.who) == (2, "worker 0/1")


class Process:
    """A launcher in a process of its own."""

    def __init__(self, folder, args):
        command = [sys.executable, "-m", "tests.support.launch_targets", str(folder), *args]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)

    def until(self, kind, who):
        for line in self.process.stdout:
            event = from_json(line.decode())
            if isinstance(event, kind) and event.who == who:
                return event
        raise AssertionError(self.process.stderr.read())

    def end(self):
        """The exit code and what stood on stderr."""
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors.decode()


DEAF = parts(worker_0_0="group", worker_0_1="deaf", server_0_0="deaf")


def test_a_second_ctrl_c_does_not_wait(tmp_path, mark):
    launcher = Process(tmp_path, parts(worker_0_0="stay", worker_0_1="deaf"))
    launcher.until(Notice, "worker 0/1")
    wait_for((tmp_path / "processes.json").exists)
    launcher.process.send_signal(signal.SIGINT)
    launcher.until(Exited, "worker 0/0")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.until(Exited, "unit 1").code == -9
    assert launcher.end() == (130, "")


def test_what_the_listener_raises_ends_the_job(tmp_path, mark):
    def complain(event):
        if isinstance(event, Notice):
            raise LookupError("of the listener")

    with pytest.raises(LookupError):
        launch(tmp_path, DEAF, complain)
    assert marked(mark) == []
