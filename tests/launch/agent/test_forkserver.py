"""The forkserver with real processes: what a child finds, what its end is told as, and whom it does not outlive."""

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import uuid

import pytest

from tests.support.launch_targets import MARK, PLAY, marked, wait_for
from topotrain.core.events import Failed, Notice, from_json
from topotrain.launch.agent import forkserver
from topotrain.launch.agent.pipes import LineReader

pytestmark = pytest.mark.journey


class Host:
    """A forkserver and one requester."""

    def __init__(self, folder, preload=()):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environ = {**os.environ, MARK: self.mark}
        self.running = forkserver.start(folder / "forkserver.log", preload, self.environ)
        self.client = forkserver.ForkserverClient(self.running.path)
        self.answers = []
        self.controls = {}

    def spawn(self, part, who="worker 0/0", fds=(), call=PLAY, **environ):
        ours, theirs = socket.socketpair()
        if who in self.controls:
            self.controls[who].close()
        self.controls[who] = ours
        spec = {"who": who, "args": [f"{who}={part}"], "program": "", "run_dir": str(self.folder)}
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err, theirs:
            request = forkserver.ForkRequest(
                who=who,
                call=call,
                spec=spec,
                control=theirs.fileno(),
                stdout=out.fileno(),
                stderr=err.fileno(),
                fds=fds,
                cwd=os.getcwd(),
                environ={**self.environ, "GREETING": "hello"} | environ,
            )
            self.client.spawn(request)
        return self.answer(lambda answer: answer.get("who") == who)["pid"]

    def answer(self, wanted):
        while not any(map(wanted, self.answers)):
            answers = self.client.receive()
            assert answers is not None, "the forkserver is gone"
            self.answers += answers
        found = next(filter(wanted, self.answers))
        self.answers.remove(found)
        return found

    def exit(self, pid):
        return self.answer(lambda answer: answer.get("pid") == pid and "exit" in answer)["exit"]

    def heard(self, kind, who="worker 0/0"):
        """The first event of a kind that the child tells."""
        channel = self.controls[who]
        lines = LineReader(channel.fileno())
        while True:
            for line in lines.read() or []:
                event = from_json(line.decode())
                if isinstance(event, kind):
                    return event
            assert lines.open, (self.folder / "err").read_text()

    def close(self):
        """Nobody is left."""
        self.client.close()
        for control in self.controls.values():
            control.close()
        code = self.running.close()
        wait_for(lambda: marked(self.mark) == [], 5)
        assert not os.path.exists(self.running.directory)
        return code


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"))
    yield host
    assert host.close() == 0


def test_a_child_finds_what_was_asked_for(host):
    reading, writing = os.pipe()
    os.write(writing, b"extra")
    pid = host.spawn("world", fds=(reading,))
    for fd in (reading, writing):
        os.close(fd)
    assert host.exit(pid) == 7, (host.folder / "err").read_text()
    assert (host.folder / "out").read_text() == f"cwd {os.getcwd()}\nfds ['extra']\n"


def test_an_exception_is_told_printed_and_becomes_the_exit_code(host):
    assert host.exit(host.spawn("raise")) == 1
    failed = host.heard(Failed)
    assert (failed.kind, failed.text) == ("internal", "RuntimeError: boom")
    assert failed.traceback == (host.folder / "err").read_text()
    assert host.exit(host.spawn("misconfigured")) == 2
    assert host.heard(Failed).kind == "config"
    assert host.exit(host.spawn("finish", call="tests.support.launch_targets:nobody")) == 1
    assert "nobody" in host.heard(Failed).text


def test_signals_go_through_the_forkserver(host):
    deaf, other = host.spawn("deaf", "worker 0/0"), host.spawn("stay", "worker 0/1")
    assert host.heard(Notice).text == "deaf"
    host.client.signal(deaf, signal.SIGTERM)
    host.client.signal(other, signal.SIGTERM)
    assert host.exit(other) == -signal.SIGTERM
    host.client.signal(deaf, signal.SIGKILL, group=True)
    assert host.exit(deaf) == -signal.SIGKILL


def test_it_is_told_when_a_child_is_frozen_and_when_it_goes_on(host):
    pid, other = host.spawn("stay", "worker 0/0"), host.spawn("stay", "worker 0/1")
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        assert host.answer(lambda answer: "frozen" in answer) == {"pid": pid, "frozen": True}
        os.kill(pid, signal.SIGCONT)
        assert host.answer(lambda answer: "frozen" in answer) == {"pid": pid, "frozen": False}
    os.kill(pid, signal.SIGSTOP)
    host.answer(lambda answer: "frozen" in answer)
    host.client.signal(pid, signal.SIGKILL, group=True)
    assert host.exit(pid) == -signal.SIGKILL
    host.client.signal(other, signal.SIGTERM)
    assert host.exit(other) == -signal.SIGTERM
    assert [answer for answer in host.answers if answer["pid"] in (pid, other)] == []


def test_a_dead_child_takes_its_process_group_with_it(host):
    pid = host.spawn("group")
    assert host.heard(Notice).text == "brood"
    os.kill(pid, signal.SIGKILL)
    assert host.exit(pid) == -signal.SIGKILL
    wait_for(lambda: marked(host.mark) == [host.running.process.pid])


def test_children_end_with_their_requester_or_their_control_channel(host):
    client, host.client = host.client, forkserver.ForkserverClient(host.running.path)
    host.spawn("group", "worker 0/1")
    assert host.heard(Notice, "worker 0/1").text == "brood"
    host.client.close()
    wait_for(lambda: marked(host.mark) == [host.running.process.pid])
    host.client = client
    pid = host.spawn("deaf")
    assert host.heard(Notice).text == "deaf"
    host.controls["worker 0/0"].close()
    assert host.exit(pid) == -signal.SIGKILL


def test_a_requester_that_reads_nothing_does_not_stop_the_others(host):
    client, host.client = host.client, forkserver.ForkserverClient(host.running.path)
    pid = host.spawn("stay", "worker 0/1")
    for _ in range(1000):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            # The forkserver has stopped reading when this requester has no space left to ask.
            assert select.select([], [host.client], [], 5)[1]
            host.client.signal(pid, number)
    silent, host.client = host.client, client
    # The forkserver answers it all the same, and later the one that has read nothing.
    assert host.exit(host.spawn("finish")) == 0
    host.client = silent
    host.client.signal(pid, signal.SIGKILL, group=True)
    assert host.exit(pid) == -signal.SIGKILL
    host.client.close()
    host.answers, host.client = [], client


LOAD = """
import gc
import weakref
from topotrain.launch.agent import forkserver
ours, childs = type("Ours", (), {}), type("Childs", (), {})
weakref.finalize(ours, print, "ours is destroyed")
before = [each["collections"] for each in gc.get_stats()]
forkserver.load(["asyncio", "xml.dom.minidom"])
assert [each["collections"] for each in gc.get_stats()] == before
assert gc.isenabled() and gc.get_freeze_count() > 1000
weakref.finalize(childs, print, "the child's is destroyed")
"""


def test_an_import_in_advance_collects_no_garbage_and_its_objects_are_not_destroyed_by_children():
    done = subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout == "the child's is destroyed\n"


def test_more_descriptors_than_a_request_has_space_for_are_refused(host):
    with open(os.devnull) as file, pytest.raises(ValueError, match="at most 63 are possible"):
        host.spawn("finish", fds=(file.fileno(),) * 64)


def test_only_this_user_reaches_the_socket(host, monkeypatch):
    monkeypatch.setattr(forkserver, "peer", lambda connection: (0, os.getuid() + 1, 0))
    with pytest.raises(PermissionError, match="belongs to another user"):
        forkserver.ForkserverClient(host.running.path)
    folder = os.stat(os.path.dirname(host.running.path))
    assert stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid()


def test_nobody_outlives_the_forkserver(tmp_path):
    host = Host(tmp_path)
    host.spawn("deaf")
    assert host.heard(Notice).text == "deaf"
    host.running.process.send_signal(signal.SIGTERM)  # whoever signals everybody does not mean it
    assert host.exit(host.spawn("finish", "worker 0/1")) == 0
    host.running.process.send_signal(signal.SIGKILL)
    assert host.client.receive() is None or host.client.receive() is None
    host.running.process.wait(5)
    wait_for(lambda: marked(host.mark) == [], 5)
    host.close()


def test_with_torch_loaded_children_may_have_children_and_compute_with_as_many_threads_as_the_user_says(tmp_path):
    """Without a number: with one."""
    host = Host(tmp_path, preload=("torch",))
    assert host.exit(host.spawn("torch world")) == 0, (tmp_path / "err").read_text()
    for number, (said, found) in enumerate((("2,1", "[2, 2] 2,1"), (None, "[1, 1] 1"))):
        host.environ.pop("OMP_NUM_THREADS", None)  # conftest sets it
        given = {} if said is None else {"OMP_NUM_THREADS": said}
        who = f"worker 0/{number}"
        assert host.exit(host.spawn("threads", who, **given)) == 0, (tmp_path / "err").read_text()
        assert host.heard(Notice, who).text == found
    assert host.exit(host.spawn("threads", OMP_NUM_THREADS="many")) == 2
    assert "OMP_NUM_THREADS = 'many': must be a whole number from 1" in host.heard(Failed).text
    host.close()
