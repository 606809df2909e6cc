"""What topotrain makes is for its user alone, whatever the umask; what only looks like a file is refused at once."""

import os
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from wait_limit import ended_after

from topotrain.comm.store import StoreError
from topotrain.comm.store.file_store import FileStore
from topotrain.config import job_file
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.private_files import close_folder, make_folder, open_file, write_text
from topotrain.config.topology import Address, Role
from topotrain.extensions.tables.frontend.table_export import read_parts, write_parts
from topotrain.launch.agent.children import ChildSpec, UnitConfig, _open_log
from topotrain.launch.agent.pipes import log_tail
from topotrain.launch.agent.workspace import claimed, claimed_by_unit, prepare
from topotrain.tools.monitor import trace_export
from topotrain.training.final_parameters import load_tensors, save_tensors

UMASKS = (0o000, 0o022, 0o077, 0o277, 0o777)


@contextmanager
def umask(mask: int):
    former = os.umask(mask)
    try:
        yield
    finally:
        os.umask(former)


def modes(root: Path) -> dict[str, str]:
    """Whatever below a folder is not for its owner alone, or not for its owner either."""
    found = {}
    for path in (root, *root.rglob("*")):
        info = path.lstat()
        wanted = 0o700 if stat.S_ISDIR(info.st_mode) else 0o600
        if not stat.S_ISLNK(info.st_mode) and stat.S_IMODE(info.st_mode) != wanted:
            found[str(path.relative_to(root))] = oct(stat.S_IMODE(info.st_mode))
    return found


def job_at(path: Path) -> Job:
    return Job("job", cluster=Cluster(workspace=str(path)))


@pytest.mark.parametrize("mask", UMASKS)
def test_modes_do_not_depend_on_the_umask(tmp_path, mask):
    with umask(mask):
        make_folder(tmp_path / "a" / "b")
        write_text(tmp_path / "a" / "b" / "text", "words")
        save_tensors({"w": torch.ones(3)}, tmp_path / "a" / "final.safetensors", {"format": "pt"})
        write_parts(tmp_path / "a" / "rows", [(torch.arange(2), torch.ones(2, 3))], {})
        with claimed(job_at(tmp_path / "a" / "job")) as workspace:
            prepare(job_at(workspace), workspace, profile=3)
        with claimed_by_unit(job_at(tmp_path / "a" / "unit"), 2, "start"):
            pass
    assert modes(tmp_path / "a") == {}
    assert (tmp_path / "a" / "b" / "text").read_text() == "words"


def test_a_file_is_closed_before_its_first_byte(tmp_path):
    (tmp_path / "old").touch(0o666)
    os.chmod(tmp_path / "old", 0o666)
    fd = open_file(tmp_path / "old", os.O_WRONLY | os.O_CREAT)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    os.close(fd)


def test_a_folder_of_our_own_is_closed_and_one_of_the_users_keeps_its_mode(tmp_path):
    for name in ("logs", "users"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "link").symlink_to("users")
    close_folder(tmp_path / "logs")
    close_folder(tmp_path / "link")
    make_folder(tmp_path / "users")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("logs", "users")] == [0o700, 0o755]


# --- what is no file -----------------------------------------------------------------------------------------------


def read_job(path):
    job_file.load(path)


def read_store(path):
    (path.parent / "store").mkdir(mode=0o700)
    path.rename(path.parent / "store" / "key")
    FileStore(path.parent / "store").get("key")


def read_rows(path):
    path.rename(path.parent / "index.json")
    list(read_parts(path.parent, 3))


FIRST = (Address(Role.WORKER, 0, 0),)
READERS = {
    "a job file": (read_job, ConfigError),
    "a store's value": (read_store, StoreError),
    "final parameters": (load_tensors, ConfigError),
    "rows of a table": (read_rows, ConfigError),
    "a process's log": (
        lambda path: _open_log(path, UnitConfig(Job("job"), 0, "", path, ""), ChildSpec(FIRST, ())),
        OSError,
    ),
    "a trace": (lambda path: trace_export.write([], path), OSError),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_named_pipe_makes_no_process_wait(tmp_path, reader):
    read, error = READERS[reader]
    os.mkfifo(tmp_path / "pipe.conf", 0o600)
    with ended_after(20), pytest.raises(error, match="is a named pipe, must be a file"):
        read(tmp_path / "pipe.conf")


def test_the_tail_of_a_log_that_is_a_pipe_is_empty(tmp_path):
    os.mkfifo(tmp_path / "log")
    with ended_after(20):
        assert log_tail(tmp_path / "log") == ""


# --- the lock of a workspace ---------------------------------------------------------------------------------------

HOLD = """
import fcntl, os, sys
file = open(sys.argv[1])
os.setuid(int(sys.argv[2])) if len(sys.argv) > 2 else None
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextmanager
def held(lock: Path, *user: str):
    """Another process has the lock; its pid."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock), *user], text=True, **pipes) as holder:
        try:
            yield int(holder.stdout.readline())
        finally:
            holder.stdin.close()


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused, claimed(job_at(path)):
        pass
    return str(refused.value)


@pytest.mark.journey
def test_the_holder_is_named_and_not_the_launcher_before_it(tmp_path):
    (tmp_path / "lock").write_text("999999")  # of a launcher long gone
    with held(tmp_path / "lock") as pid:
        assert f"is in use by another job (launcher pid {pid})" in refusal(tmp_path)
    with claimed(job_at(tmp_path)):
        pass


@pytest.mark.journey
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_no_stranger_can_open_the_lock(tmp_path):
    tmp_path.chmod(0o755)
    with claimed(job_at(tmp_path)):
        pass
    tried = "import os; os.setuid(65534); open('lock')"
    done = subprocess.run([sys.executable, "-c", tried], cwd=tmp_path, capture_output=True, text=True)
    assert "PermissionError" in done.stderr


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    assert "lock" in refusal(tmp_path)
