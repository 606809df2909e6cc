"""Folders of a start: gone with it, or with the next one where its process was killed; nothing else is removed."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from topotrain.config.job import ConfigError
from topotrain.launch.agent import file_locks, forkserver, temporary_folders
from topotrain.launch.multinode import node

MAKE = """
import sys
from pathlib import Path
from topotrain.launch.agent import temporary_folders
from topotrain.launch.multinode import node
temporary_folders.base = lambda: Path(sys.argv[1])
with node._private_folder() as own, node._shared_folder(b"key") as shared:
    print(own, shared, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(temporary_folders, "base", lambda: folder)
    return folder


@pytest.mark.journey
def test_what_a_killed_unit_has_left_goes_with_the_next_start(base):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MAKE, str(base)], text=True, **pipes) as unit:
        left = unit.stdout.readline().split()
        with node._private_folder():
            assert all(os.path.isdir(path) for path in left), "a unit that lives keeps its folders"
        unit.send_signal(signal.SIGKILL)
        unit.wait()
    assert len(left) == 2 and all(os.path.isdir(path) for path in left)
    with node._private_folder() as own:
        assert [path.name for path in base.iterdir()] == [own.name]
    assert list(base.iterdir()) == []


def test_folders_of_others_stay(base):
    (base / "topotrain-data").mkdir()
    (base / "topotrain-data" / "file").touch()
    (base / "topotrain-link").symlink_to("topotrain-data")
    (base / "topotrain-file").touch()
    temporary_folders.sweep()
    assert sorted(path.name for path in base.iterdir()) == ["topotrain-data", "topotrain-file", "topotrain-link"]


@pytest.mark.journey
def test_a_forkserver_keeps_its_folder_as_long_as_it_is_used(tmp_path, base):
    running = forkserver.start(tmp_path / "log", preload=())
    temporary_folders.sweep()
    assert os.path.exists(running.path)
    running.close()
    assert list(base.iterdir()) == []


def test_a_folder_that_goes_while_it_is_taken_is_made_again(base, monkeypatch):
    made = []
    usual = temporary_folders.use

    def use(path):
        made.append(path)
        if len(made) == 1:
            path.rmdir()
        return usual(path)

    monkeypatch.setattr(temporary_folders, "use", use)
    path, lock = temporary_folders.share("name")
    os.close(lock)
    assert made == [path, path] and path.is_dir()


def test_a_folder_whose_remover_is_stopped_is_an_error(base, monkeypatch):
    path, lock = temporary_folders.share("name")
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(file_locks, "LOCK_S", 0.05)
    with pytest.raises(TimeoutError, match=r"topotrain-name was locked for 0\.05 s: is the holder of its lock stopped"):
        temporary_folders.use(path)
    os.close(lock)


def test_a_name_that_another_user_has_taken_is_refused(base):
    (base / "topotrain-name").mkdir()
    (base / "topotrain-name").chmod(0o755)
    with pytest.raises(ConfigError, match=r"must belong to this user, with mode 0700"):
        temporary_folders.share("name")
