"""A process unit as a real process: what it tells its launcher, and that it leaves nobody behind."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from tests.support.launch_targets import CALLS, MARK, marked, parts, small_job, wait_for
from topotrain.config.topology import Address, Role, layout
from topotrain.core.events import Exited, Failed, Notice, Output, Serving, Started, from_json
from topotrain.launch import UnitPlace, arguments, choose_cause
from topotrain.launch.agent import orphans, supervisor, workspace
from topotrain.launch.agent.children import Child
from topotrain.launch.agent.pipes import LineReader
from topotrain.launch.agent.unit_process import UnitProcess, UnitProcesses
from topotrain.launch.log_lines import without_stamps

pytestmark = pytest.mark.journey


class Supervised:
    """One unit with its own forkserver, and a launcher's two ends of it."""

    def __init__(self, folder, args=(), rank=0, nprocs=None, **counts):
        self.mark = uuid.uuid4().hex
        job = small_job(folder, args, **counts)
        rendezvous = workspace.prepare(job, folder)
        units = len(layout(job.cluster).units) if nprocs is None else nprocs
        place = UnitPlace(rank, units, rendezvous, str(folder / "run"))
        command = [sys.executable, "-m", "topotrain.launch.agent.unit_main", *arguments(place)]
        command += ["--worker-call", CALLS.worker, "--server-call", CALLS.server, "--preload"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, MARK: self.mark})
        self.events = []

    def until(self, kind, **values):
        """The next event of a kind with these values; what comes before it is kept in `events`."""
        while line := self.process.stdout.readline():
            event = from_json(line.decode())
            self.events.append(event)
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in values.items()):
                return event
        raise AssertionError(f"no {kind.__name__} {values} in {self.events}")

    def rest(self):
        """Everything to the end, and the exit code; nobody is left then."""
        if not self.process.stdout.closed:
            self.events += [from_json(line.decode()) for line in self.process.stdout]
        code = self.process.wait(5)
        self.process.stdin.close()
        self.process.stdout.close()
        wait_for(lambda: marked(self.mark) == [], 5)
        return code

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def unit(tmp_path):
    started = []

    def start(*args, **values):
        started.append(Supervised(tmp_path, *args, **values))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.rest()


def test_only_the_main_worker_is_shown_and_all_have_logs(unit, tmp_path):
    one = unit(parts(worker_0_0="talk", worker_0_1="talk"), nworkers_per_procs=2)
    assert one.rest() == 0
    assert {(event.who, event.code) for event in one.of(Exited)} == {
        (who, 0) for who in ("server 0/0", "worker 0/0", "worker 0/1")
    }
    said = [(event.who, event.stream, event.text) for event in one.of(Output)]
    lines = ["one", "two", "input ''", "� half"]
    assert "".join(text for _, stream, text in said if stream == "stdout") == "\n".join(lines)
    assert "".join(text for _, stream, text in said if stream == "stderr") == "warned\n"
    assert {who for who, _, _ in said} == {"worker 0/0"}
    log = (tmp_path / "logs" / "worker-0-0.log").read_text(errors="replace")
    assert all(line in log for line in [*lines, "warned"])
    assert all("Z worker 0/0 | " in line for line in log.splitlines())
    other = (tmp_path / "logs" / "worker-0-1.log").read_bytes()
    assert sorted(without_stamps(other).decode(errors="replace").splitlines()) == sorted([*lines, "warned"])
    assert other.count(b"Z worker 0/1 | ") == 4  # not what was written below Python's streams
    assert (tmp_path / "logs" / "servers-unit-0.log").read_text() == ""


def test_a_death_without_an_explanation_is_a_failure(unit):
    end = f"ended with exit code 3{supervisor._HOPELESS}"
    one = unit(parts(worker_0_0="exit 3"))
    assert one.rest() == 1
    (failed,) = one.of(Failed)
    pid = next(event.pid for event in one.of(Started) if event.who == "worker 0/0")
    assert failed == Failed("worker 0/0", "program", f"worker 0/0 (pid {pid}) {end}", "last words\n")


def test_asked_to_stop_it_ends_the_deaf_too(unit):
    one = unit(parts(worker_0_0="deaf", server_0_0="stay"))
    one.until(Notice, text="deaf")
    one.process.stdin.write(b'{"command": "stop"}\n')
    one.process.stdin.flush()
    assert one.rest() == 1
    assert {(event.who, event.code) for event in one.of(Exited)} == {("worker 0/0", -9), ("server 0/0", -15)}
    assert one.of(Failed) == []


def test_signaled_with_all_others_it_waits_for_the_launchers_order(unit):
    """Processes that had ended at the signal would have told so before the one that does it of itself."""
    one = unit(parts(worker_0_0="forks", worker_0_1="own handler", server_0_0="stay"), nworkers_per_procs=2, grace_s=60)
    one.until(Notice, text="forked")
    if not any(event.text == "own" for event in one.of(Notice)):
        one.until(Notice, text="own")
    if not any(event.who == "server 0/0" for event in one.of(Serving)):
        one.until(Serving, who="server 0/0")
    pids = {event.who: event.pid for event in one.of(Started)}
    for pid in (one.process.pid, pids["worker 0/0"], pids["server 0/0"], pids["worker 0/1"]):
        os.kill(pid, signal.SIGTERM)
    assert one.until(Exited).who == "worker 0/1"
    assert ["exit code 7" in event.text for event in one.of(Failed)] == [True]
    one.process.stdin.write(b'{"command": "stop"}\n')
    one.process.stdin.flush()
    assert one.rest() == 1
    ends = {(event.who, event.code) for event in one.of(Exited)}
    assert ends == {("worker 0/0", -15), ("worker 0/1", 7), ("server 0/0", -15)}


@pytest.mark.parametrize("whom", ["unit", "worker 0/0"])
def test_signaled_alone_it_ends_when_no_order_comes(unit, whom):
    """For so long as a last snapshot might take."""
    one = unit(parts(worker_0_0="stay", server_0_0="stay"), grace_s=0.01)
    one.until(Serving, who="worker 0/0")
    if not any(event.who == "server 0/0" for event in one.of(Serving)):
        one.until(Serving, who="server 0/0")
    pids = {event.who: event.pid for event in one.of(Started)}
    os.kill(one.process.pid if whom == "unit" else pids[whom], signal.SIGTERM)
    if whom == "unit":
        assert one.rest() == 1
        assert {event.code for event in one.of(Exited)} == {-15}
    else:
        assert one.until(Exited).code == -15
        assert [event.kind for event in one.of(Failed)] == ["died"]


def test_nothing_outlives_the_forkserver(unit):
    one = unit(parts(worker_0_0="group", server_0_0="deaf"))
    one.until(Notice, text="brood")
    stats = [Path(f"/proc/{event.pid}/stat").read_text() for event in one.of(Started)]
    (parent,) = {int(stat.rsplit(")", 1)[1].split()[1]) for stat in stats}
    os.kill(parent, signal.SIGKILL)
    assert one.rest() == 1
    assert [event.kind for event in one.of(Failed)] == ["died"]


def test_a_unit_that_reads_nothing_does_not_stop_its_launcher(tmp_path):
    counting = "import sys; next(sys.stdin); print(sum(1 for _ in sys.stdin))"
    pipe, commands = subprocess.PIPE, 1000
    process = subprocess.Popen([sys.executable, "-c", counting], stdin=pipe, stdout=pipe, bufsize=0)
    process.send_signal(signal.SIGSTOP)
    units = UnitProcesses(selectors.DefaultSelector())
    unit = UnitProcess(0, process, LineReader(process.stdout.fileno()), tmp_path / "log")
    units.add(unit)
    sending = threading.Thread(target=lambda: [units.command("tell", words="x" * 100) for _ in range(commands + 1)])
    sending.start()
    sending.join(5)
    process.send_signal(signal.SIGCONT)
    stuck = sending.is_alive()
    sending.join()
    assert not stuck
    # Every command arrives when it reads again.
    wait_for(lambda: units.write() or not unit.commands.waiting, 5)
    process.stdin.close()
    assert process.stdout.read() == f"{commands}\n".encode()
    units.close()


def test_a_process_that_the_kernel_does_not_end_is_named_and_left(monkeypatch, capsys):
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with monkeypatch.context() as hung:
        hung.setattr(process, "kill", lambda: None)
        hung.setattr(orphans, "KILLED_S", 0.05)
        assert orphans.end(process) is None
    assert f"pid {process.pid} does not end after SIGKILL (is its disk or device hung?)" in capsys.readouterr().err
    assert orphans.end(process) == -signal.SIGKILL


def test_commands_that_a_child_has_no_space_for_arrive_whole(tmp_path):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    child = Child((Address(Role.WORKER, 0, 0),), (), tmp_path / "log", ours, LineReader(ours.fileno()))
    with ours, theirs:
        for number in range(100):
            child.command({"number": number, "text": "x" * 10_000})
        theirs.settimeout(5)
        with theirs.makefile("rb") as lines:
            for number in range(100):
                child.commands.write()
                assert json.loads(lines.readline())["number"] == number


def test_workers_that_share_values_get_one_memfd(unit):
    one = unit(
        parts(worker_0_0="share", worker_1_0="share"), nworker_groups=2, nworkers_per_group=1, nworkers_per_procs=2
    )
    assert one.rest() == 0, one.of(Failed)


def test_a_unit_that_is_told_nonsense_refuses(unit, tmp_path):
    one = unit(nprocs=3)
    assert one.rest() == 2
    (failed,) = one.of(Failed)
    assert (failed.who, failed.kind) == ("unit 0", "config")
    assert failed.text == "nprocs = 3: must be 2, the number of units of this job"


def test_the_cause_is_what_explains_the_others():
    failures = [Failed(str(at), kind, "", "") for at, kind in enumerate(["peer", "internal", "died", "peer", "died"])]
    assert choose_cause(failures) is failures[2]
    assert choose_cause([*failures, Failed("5", "program", "", "")]).who == "5"
    assert choose_cause([]) is None
