"""The forkserver that units of a host share: who gets which, whom it outlives, and that it ends with its last user."""

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from tests.support.launch_targets import MARK, PLAY, marked, wait_for
from topotrain.core.events import Notice, from_json
from topotrain.launch import RUN_VARIABLE, own_python, shared_forkserver
from topotrain.launch.agent import file_locks, forkserver, orphans, temporary_folders
from topotrain.launch.agent.forkserver_handle import ForkserverHandle
from topotrain.launch.launchers.env_tables import LaunchInfo

SLOW = "tests.support.slow_import"
ENDED = (0, -signal.SIGKILL)  # a loaded machine takes longer than its patience
USER = """
import sys
from topotrain.launch import shared_forkserver
shared = shared_forkserver.join(sys.argv[1], preload=sys.argv[2:])
print(shared.process.pid, shared.path, flush=True)
sys.stdin.read()
shared.leave()
print("left", flush=True)
"""


class User:
    """A process with a share."""

    def __init__(self, job, *preload, **environ):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", USER, job, *preload]
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environ}, start_new_session=True
        )
        pid, self.path = self.process.stdout.readline().split()
        self.forkserver = int(pid)

    def leave(self):
        out, _ = self.process.communicate(timeout=300)
        assert out == "left\n" and self.process.returncode == 0

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def job(monkeypatch, tmp_path):
    """The name of a job; no process of the test is left at its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    wait_for(lambda: marked(mark) == [])


def spawn(path, part, mark, folder):
    """Ask for a child in the name of a job; return its connection, its channel, and its pid when it plays."""
    client = forkserver.ForkserverClient(path)
    ours, theirs = socket.socketpair()
    who = "worker 0/0"
    spec = {"who": who, "args": [f"{who}={part}"], "program": "", "run_dir": str(folder)}
    with open(folder / "out", "ab") as out, theirs:
        environ = {**os.environ, RUN_VARIABLE: mark}
        streams = {"control": theirs.fileno(), "stdout": out.fileno(), "stderr": out.fileno()}
        client.spawn(forkserver.ForkRequest(who=who, call=PLAY, spec=spec, environ=environ, **streams))
    answers = []
    while not answers:
        answers = client.receive()
        assert answers is not None, "the forkserver is gone"
    with ours.makefile("rb") as lines:
        while not isinstance(from_json(next(lines).decode()), Notice):
            pass
    return client, ours, answers[0]["pid"]


@pytest.mark.journey
def test_units_of_a_job_share_one_and_others_do_not(job):
    users = [
        User(job),
        User(job),
        User(job + "2"),
        User(job, LC_NUMERIC="C.UTF-8"),
        User(job, RANK="3", OMP_NUM_THREADS="7"),
    ]
    one, same, other_job, other_imports, other_rank = [user.forkserver for user in users]
    assert one == same == other_rank
    assert len({one, other_job, other_imports}) == 3
    for user in users:
        user.leave()
        assert (user.forkserver in marked(job)) is (user is not users[-1] and user.forkserver == one)


@pytest.mark.journey
def test_a_killed_unit_takes_neither_the_forkserver_nor_a_child_of_another_with_it(job, tmp_path):
    starter, other = User(job), User(job)
    client, channel, pid = spawn(other.path, "deaf", "a" * 32, tmp_path)
    starter.kill()
    # It still answers, and forks.
    second, second_channel, _ = spawn(other.path, "deaf", "b" * 32, tmp_path)
    assert pid in marked(job)
    for each in (client, channel, second, second_channel):
        each.close()
    other.leave()
    assert not os.path.exists(os.path.dirname(other.path))


@pytest.mark.journey
@pytest.mark.parametrize("preload", [(), (SLOW,)], ids=["serving", "importing"])
def test_it_ends_when_its_last_unit_is_killed(job, preload):
    users = [User(job, *preload), User(job, *preload)]
    if not preload:
        forkserver.ForkserverClient(users[0].path).close()
    for user in users:
        assert user.forkserver in marked(job)
        user.kill()
    # Of an import, too, which takes longer than the test waits.
    wait_for(lambda: marked(job) == [])
    # What a killed user has left is no obstacle for the next one.
    after = User(job, *preload)
    assert after.forkserver != users[0].forkserver
    after.leave()


@pytest.mark.journey
def test_a_job_whose_folder_was_cleaned_up_goes_on_with_a_forkserver_of_its_own(job, tmp_path):
    shared = shared_forkserver.join(job, preload=())
    handle = ForkserverHandle("", tmp_path / "log", "c" * 32, shared)
    shutil.rmtree(os.path.dirname(shared.path))
    with pytest.raises(FileNotFoundError):
        handle.up((), os.environ)
    path = handle.up((), os.environ, again=True)
    assert path != shared.path and handle.process.poll() is None
    forkserver.ForkserverClient(path).close()
    handle.close()


@pytest.mark.journey
def test_it_ends_when_its_last_unit_was_killed_before_it_could_notice(job):
    folder, lock = temporary_folders.make()
    os.mkfifo(folder / "life", 0o600)
    life = os.open(folder / "life", os.O_RDWR)
    with open(folder / "life", "rb", buffering=0) as reading:
        for fd in (life, lock):  # as the kernel does for a killed unit
            os.close(fd)
        command = [*own_python("topotrain.launch.shared_forkserver"), str(folder), SLOW]
        assert subprocess.run(command, stdin=reading, timeout=300, check=False).returncode == 0
    assert not folder.exists()


@pytest.mark.journey
def test_a_dead_forkserver_is_started_again(job):
    shared = shared_forkserver.join(job, preload=())
    first = shared.process.pid
    os.kill(first, signal.SIGKILL)
    shared.process.wait(10)
    assert shared.process.returncode == -signal.SIGKILL
    assert shared.up(os.environ) == shared.path
    assert shared.process.pid != first
    assert shared.leave() in ENDED
    assert shared.leave() is None


@pytest.mark.journey
def test_it_ends_also_where_its_folder_was_cleaned_up(job):
    shared = shared_forkserver.join(job, preload=())
    shutil.rmtree(Path(shared.path).parent)
    assert shared.leave() in ENDED
    user = User(job)
    Path(user.path).with_name(".topotrain-folder").unlink()
    user.kill()
    wait_for(lambda: marked(job) == [])
    shutil.rmtree(Path(user.path).parent)


@pytest.mark.journey
def test_a_fork_has_the_mark_of_its_job_and_the_forkserver_has_none(job, tmp_path):
    shared = shared_forkserver.join(job, preload=())
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    children = [spawn(shared.path, "deaf", mark, tmp_path) for mark in marks]
    for mark, (_, _, pid) in zip(marks, children, strict=True):
        assert orphans.marked(mark) == [pid]
    orphans.sweep(marks[0])
    assert orphans.marked(marks[0]) == [] and orphans.marked(marks[1]) == [children[1][2]]
    with pytest.raises(subprocess.TimeoutExpired):
        shared.process.wait(0)
    for client, channel, _ in children:
        client.close()
        channel.close()
    assert shared.leave() in ENDED


@pytest.mark.journey
def test_only_this_user_reaches_it(job):
    shared = shared_forkserver.join(job, preload=())
    folder = Path(shared.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder.iterdir()} == {0}
    shared.leave()


def test_a_folder_that_others_can_open_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(temporary_folders, "base", lambda: tmp_path)
    made = []

    def mkdir(path, mode):
        made.append(path)
        os.mkdir(path, 0o777)
        os.chmod(path, 0o777)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert shared_forkserver.join("job", preload=()) is None
    assert len(made) == 1


def test_a_unit_that_is_stopped_while_it_starts_one_keeps_no_other_unit_waiting(monkeypatch, tmp_path):
    monkeypatch.setattr(temporary_folders, "base", lambda: tmp_path)
    monkeypatch.setattr(file_locks, "LOCK_S", 0.05)
    stopped, share, found = [], temporary_folders.share, []

    def shared(name):
        path, lock = share(name)
        stopped.append(os.open(path / "gate", os.O_RDWR | os.O_CREAT, 0o600))
        fcntl.flock(stopped[0], fcntl.LOCK_EX)
        return path, lock

    monkeypatch.setattr(temporary_folders, "share", shared)
    # On a thread, because this test is about a wait without an end.
    thread = threading.Thread(target=lambda: found.append(shared_forkserver.join("job", preload=())), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [None]
    os.close(stopped[0])


def test_the_name_of_a_job_is_the_same_for_its_units_and_has_no_secret():
    one, other = (LaunchInfo(rank, 2, "redis://me:secret@host/1?job=a") for rank in (0, 1))
    assert one.scope({}) == other.scope({"RANK": "1"})
    assert "secret" not in one.scope({}) and "me" not in one.scope({})
    others = ["redis://me:secret@host/1?job=b", "redis://host2/1?job=a", "redis://host/2?job=a"]
    assert len({LaunchInfo(0, 2, url).scope({}) for url in [one.rendezvous, *others]}) == 4
    meets = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    env = LaunchInfo(0, 2, "env://")
    assert env.scope(meets) != env.scope({**meets, "MASTER_PORT": "2"})
