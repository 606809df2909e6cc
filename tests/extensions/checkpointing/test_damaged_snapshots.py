"""Snapshots whose files were damaged, or whose writer was stopped: the right numbers, or a named error.

The suite makes 140 images; TORTURE_IMAGES=4000 in the environment makes as many as that.
"""

import os
import random
import resource
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from reports import EventList, Woken
from snapshot_files import Vault, equal, read
from torch import nn

from topotrain.config import private_files
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import MAX_TEXT, ProtocolError
from topotrain.core.server.server_context import MessageQueue
from topotrain.core.server.server_extension import ExtensionHooks
from topotrain.extensions.checkpointing import checkpoint_writer
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, MANIFEST, MODEL, STATE, WORKERS, latest
from topotrain.extensions.checkpointing.checkpoint_writer import SnapshotFiles, SnapshotWriter
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots
from topotrain.extensions.checkpointing.shard_snapshot import ShardFreezer
from topotrain.extensions.checkpointing.snapshot_coordinator import WriteSnapshot
from topotrain.extensions.checkpointing.snapshot_messages import FROZEN, WRITTEN, SnapshotPart, TextParts

IMAGES = int(os.environ.get("TORTURE_IMAGES", "140"))
ME = Address(Role.SERVER, 0, 0)
_RMTREE = shutil.rmtree


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(30, 20)


def vault() -> Vault:
    return Vault(partial(torch.optim.SGD, momentum=0.9), 2, net=Small)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two snapshots, and what is in them."""
    workspace = tmp_path_factory.mktemp("whole")
    trained, files = vault(), SnapshotFiles(workspace / FOLDER)
    known = {}
    for number in (1, 2):
        trained.train(1).write(files, number)
        known[number] = read(latest(workspace))
    assert not equal(known[1], known[2])
    return workspace / FOLDER, known


# --- damage ------------------------------------------------------------------------------------------------------


def truncated(path: Path, rng: random.Random, other: Path) -> None:
    size = path.stat().st_size
    classes = [0, 1, 7, 8, 9, 100, 511, 512, 513, size // 3, size // 2, size - 512, size - 9, size - 8, size - 1]
    os.truncate(path, max(0, min(size - 1, rng.choice([*classes, rng.randrange(size)]))))


def flipped(path: Path, rng: random.Random, other: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def emptied(path: Path, rng: random.Random, other: Path) -> None:
    """A block that never reached the disk."""
    data, length = bytearray(path.read_bytes()), rng.choice([8, 64, 512, 4096])
    at = rng.randrange(len(data)) // length * length
    data[at : at + length] = bytes(len(data[at : at + length]))
    path.write_bytes(data)


def mixed(path: Path, rng: random.Random, other: Path) -> None:
    """A block, or all, of the same file of the other snapshot."""
    mine, theirs = bytearray(path.read_bytes()), (other / path.name).read_bytes()
    length = rng.choice([64, 512, len(mine)])
    at = rng.randrange(len(mine)) // length * length
    mine[at : at + length] = theirs[at : at + length]
    path.write_bytes(mine)


def longer(path: Path, rng: random.Random, other: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.choice([1, 8, 512])))


def moved(path: Path, rng: random.Random, other: Path) -> None:
    data = bytearray(path.read_bytes())
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    data[a : a + 32], data[b : b + 32] = data[b : b + 32], data[a : a + 32]
    path.write_bytes(data)


def gone(path: Path, rng: random.Random, other: Path) -> None:
    path.unlink()


DAMAGE = (truncated, flipped, emptied, mixed, longer, moved, gone)


def right_or_refused(workspace: Path, known) -> int:
    """The number of what is found, whose values are right; 0: there is none; -1: refused."""
    try:
        found = latest(workspace)
    except ConfigError as error:
        return -1 if error.field == "resume" and "no snapshot in it can be read" in error.accepted else -2
    if found is None:
        return 0
    assert equal(read(found), known[found.number]), f"wrong values of snapshot {found.number}"
    return found.number


def test_damaged_images_never_give_wrong_numbers(whole, tmp_path):
    source, known = whole
    outcomes = dict.fromkeys((-1, 0, 1, 2), 0)
    for image in range(IMAGES):
        rng = random.Random(image)
        workspace = tmp_path / "image"
        shutil.copytree(source, workspace / FOLDER)
        both = rng.random() < 0.2
        for number in (2, 1) if both else (2,):
            name = rng.choice([MODEL, STATE, WORKERS, MANIFEST])
            damage = DAMAGE[image % len(DAMAGE)]
            other = source / f"{3 - number:06d}"
            damage(workspace / FOLDER / f"{number:06d}" / name, rng, other)
        outcome = right_or_refused(workspace, known)
        assert both or outcome > 0, (image, outcome)  # the one before is whole
        outcomes[outcome] += 1
        shutil.rmtree(workspace)
    assert outcomes[1] > IMAGES // 2 and outcomes[-1] > 0


# --- a writer that is stopped ------------------------------------------------------------------------------------


class Recorder:
    """Stands for `os` in the writer, and notes what changes files: with paths relative to a root."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self.paths = root, [], {}

    def __getattr__(self, name):
        return getattr(os, name)

    def _name(self, path) -> str:
        return str(Path(path).relative_to(self.root))

    def open(self, path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        if not Path(path).is_relative_to(self.root):  # another thread of this process reads a file of its own
            return fd
        self.paths[fd] = self._name(path)
        if flags & os.O_CREAT:
            self.log.append(("create", self.paths[fd]))
        return fd

    def mkdir(self, path, mode=0o777):
        os.mkdir(path, mode)
        self.log.append(("makedirs", self._name(path)))

    def ftruncate(self, fd, size):
        os.ftruncate(fd, size)
        self.log.append(("truncate", self.paths[fd], size))

    def pwrite(self, fd, data, at):
        count = os.pwrite(fd, data, at)
        self.log.append(("write", self.paths[fd], at, bytes(data[:count])))
        return count

    def fsync(self, fd):
        os.fsync(fd)
        self.log.append(("sync", self.paths[fd]))

    def replace(self, a, b):
        os.replace(a, b)
        self.log.append(("replace", self._name(a), self._name(b)))

    def unlink(self, path):
        os.unlink(path)
        self.log.append(("unlink", self._name(path)))

    def rmtree(self, path, ignore_errors=False):
        _RMTREE(path, ignore_errors=ignore_errors)
        self.log.append(("rmtree", self._name(path)))


def replay(log, root: Path, rng: random.Random | None) -> None:
    """Do what was noted; with `rng`, what was not waited for at the end may not have reached the disk."""
    synced = {op[1]: at for at, op in enumerate(log) if op[0] == "sync"}
    for at, (what, name, *rest) in enumerate(log):
        path = root / name
        if what == "write" and rng is not None and at > synced.get(name, -1) and rng.random() < 0.5:
            continue
        if what == "create":
            path.touch()
        elif what == "makedirs":
            path.mkdir(parents=True, exist_ok=True)
        elif what == "truncate":
            os.truncate(path, rest[0])
        elif what == "write":
            with open(path, "r+b") as file:
                file.seek(rest[0])
                file.write(rest[1])
        elif what == "replace":
            os.replace(path, root / rest[0])
        elif what == "unlink":
            path.unlink()
        elif what == "rmtree":
            shutil.rmtree(path)


def test_every_prefix_of_what_a_writer_does_leaves_a_whole_snapshot(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "there")
    recorder.root.mkdir()
    monkeypatch.setattr(checkpoint_writer, "os", recorder)
    monkeypatch.setattr(private_files, "os", recorder)
    monkeypatch.setattr(checkpoint_writer.shutil, "rmtree", recorder.rmtree)
    trained, files, known, published = vault(), SnapshotFiles(recorder.root / FOLDER), {}, []
    for number in range(1, 5):
        trained.train(1).write(files, number)
        known[number] = read(latest(recorder.root))
        published.append(len(recorder.log))
    monkeypatch.undo()
    log = recorder.log
    assert {op[0] for op in log} == {"create", "makedirs", "truncate", "write", "sync", "replace", "unlink", "rmtree"}
    few = range(0, len(log) + 1, max(1, len(log) // max(1, IMAGES // 3)))
    for length in few:
        for rng in (None, random.Random(length)):
            root = tmp_path / "image"
            replay(log[:length], root, rng)
            found = right_or_refused(root, known)
            least = sum(end <= length for end in published)
            assert found >= least, (length, found)
            if root.exists():
                shutil.rmtree(root)


# --- texts in parts ----------------------------------------------------------------------------------------------


def test_parts_of_an_older_snapshot_are_forgotten():
    texts = TextParts()
    assert texts.add(ME, SnapshotPart(1, FROZEN, 0, 2, "{")) is None
    assert texts.add(ME, SnapshotPart(2, FROZEN, 0, 1, "{}")) == {}
    assert texts.add(ME, SnapshotPart(1, FROZEN, 1, 2, "}")) is None


def test_parts_that_take_too_much_memory_are_refused():
    texts = TextParts()
    parts = [SnapshotPart(1, stage, number, 4096, " " * MAX_TEXT) for stage in range(2) for number in range(4095)]
    with pytest.raises(ProtocolError, match="too many texts"):
        all(texts.add(ME, part) is None for part in parts)
    # The text that was one too many is forgotten, so the sender can still report an error.
    assert texts.add(ME, SnapshotPart(1, WRITTEN, 0, 1, '{"error":""}')) == {"error": ""}


# --- a disk that takes nothing more ------------------------------------------------------------------------------


class Host:
    """A writer and the one server that it follows."""

    def __init__(self, workspace: Path) -> None:
        self.vault = Vault(partial(torch.optim.SGD, momentum=0.9), 1, net=Small).train(1)
        self.told = EventList()
        self.heard = Woken()
        self.files = SnapshotFiles(workspace / FOLDER)
        writer = SnapshotWriter(self.vault.job, self.vault.topology, self.files, 1, str(ME), self.told)
        queue = MessageQueue(ME, ExtensionHooks(), None)
        self.snapshots = ServerSnapshots(ME, self.vault.job, self.vault.topology, None, queue)
        self.aside = writer.attach(self.snapshots, self.heard)
        self.texts = TextParts()

    def write(self, number: int) -> dict:
        frozen = ShardFreezer(self.vault.models[0], 0).freeze()
        self.heard.clear()
        self.aside.execute(WriteSnapshot(number, ME, frozen, frozen.table))
        assert self.heard.wait(30)
        answers = [self.texts.add(ME, message) for message in self.aside.messages()]
        return next(answer for answer in answers if answer is not None)


@contextmanager
def files_of_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_answer_and_the_next_snapshot_is_written(tmp_path):
    host = Host(tmp_path)
    with files_of_at_most(2000):
        assert "File too large" in host.write(1)["error"]
    assert host.write(2).keys() == {"model.safetensors", "optimizer.safetensors"}


def test_a_disk_that_does_not_answer_is_reported_and_training_goes_on(tmp_path, monkeypatch):
    host, answers = Host(tmp_path), threading.Event()
    write = host.files.write

    def stand_still(*args, **options):
        assert answers.wait(30)
        return write(*args, **options)

    monkeypatch.setattr(checkpoint_writer, "LATE_S", 0.05)
    monkeypatch.setattr(host.files, "write", stand_still)
    # It ends the wait of the disk, too: the snapshot is written once the notice is there.
    monkeypatch.setattr(host.told, "emit", lambda event: (host.told.append(event), answers.set()))
    assert host.write(1).keys() == {"model.safetensors", "optimizer.safetensors"}
    (notice, *_) = host.told
    assert f"the disk of {tmp_path / FOLDER} has not taken a snapshot for" in notice.text
    assert "no other one begins before it has; training goes on" in notice.text
