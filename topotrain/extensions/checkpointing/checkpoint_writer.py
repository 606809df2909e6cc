"""The thread that writes snapshots, and the order in which their files become one that counts.

Rule: training never waits for a disk. What is to be written lies in memory that nobody changes until this thread has
answered; it writes, adds up checksums and waits for the disk at a low priority. The manifest comes last, by way of
another name, when everything else is on disk; what is older goes after that. So whatever stops a writer, at any
moment, there is the snapshot before it, or the new one, whole.
"""

import contextlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Job
from topotrain.config.job_file import dumps
from topotrain.config.private_files import close_folder, make_folder, open_file, sync_folder, write_at
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import Counted, Event, Notice, Saved, Unsaved
from topotrain.core.model.safetensors_layout import FlatFile, bytes_of
from topotrain.core.optim.state_table import model_file, state_file
from topotrain.core.protocol import Message
from topotrain.extensions.checkpointing.checkpoint_reader import (
    ASIDE,
    FOLDER,
    FORMAT,
    MANIFEST,
    MODEL,
    STATE,
    WITH_TABLES,
    WORKERS,
    hashed,
    name_of,
    numbers,
    workers_file,
)
from topotrain.extensions.checkpointing.server_snapshots import ServerSnapshots
from topotrain.extensions.checkpointing.shard_snapshot import TensorSlice
from topotrain.extensions.checkpointing.snapshot_coordinator import (
    END,
    PUBLISHED,
    STEP,
    WRITTEN,
    DropSnapshot,
    PublishSnapshot,
    WriteSnapshot,
    texts,
)
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotPart, SnapshotRequest
from topotrain.extensions.checkpointing.table_file_layout import StoredTable, file_of, tables_file

KEPT = 2
STEPS = "step-"
LEADER = Address(Role.SERVER, 0, 0)
"""Who coordinates the snapshots of a job, and whose host makes them count."""
_NICE = 10
_SUMMED = 16 << 20  # bytes that one checksum covers at most

Emit = Callable[[Event], None]
_Order = WriteSnapshot | PublishSnapshot | DropSnapshot


class SnapshotFiles:
    """The folder of a job's snapshots. Every method may raise OSError.

    Args:
        folder: WORKSPACE/manifests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._origin: int | None = None  # who starts again alone in this life of the job reads it, however old it is

    def begin(self, resumed: Path | None, again: bool, tell: Callable[[str], None] = lambda _: None) -> int:
        """Make room for a start of the job: the number of its first snapshot.

        Those of an earlier run are moved aside, unless this start goes on from one of them (`resumed`), or is the same
        run `again`. Of those the ones that were taken after it are moved aside, too: they are of a past that is undone.

        tell: hears what is moved where, and what is removed, in words for the user.
        """
        ours = resumed is not None and resumed.parent.resolve() == self.folder.resolve()
        self._origin = int(resumed.name) if ours and resumed is not None and resumed.name.isdecimal() else None
        goes_on = again or ours
        found = numbers(self.folder, whole=False)
        undone = [] if again or self._origin is None else [number for number in found if number > (self._origin or 0)]
        if not goes_on and self.folder.exists():
            aside = self._aside(resumed, tell)
            os.replace(self.folder, aside)
            if found:
                tell(f"the snapshots of the earlier run ({_names(found)}) are in {aside} from now on")
            return 1
        if undone:
            aside = self._aside(resumed, tell)
            make_folder(aside)
            links = _links(self.folder)
            for number in undone:
                os.replace(self.folder / name_of(number), aside / name_of(number))
                for link in links.get(number, ()):
                    os.replace(self.folder / link, aside / link)
            tell(f"the snapshots after {self._origin} ({_names(undone)}) are in {aside} from now on")
        self._links()
        return max(found, default=0) + 1

    def _aside(self, resumed: Path | None, tell: Callable[[str], None]) -> Path:
        """A name for a folder of snapshots that are moved aside; what has that name is removed, and told.

        A folder with a snapshot that is kept by its step, or that the job goes on from, stays as it is.
        """
        aside, more = self.folder.with_name(ASIDE), 1
        while _links(aside) or (resumed is not None and resumed.parent.resolve() == aside.resolve()):
            more += 1
            aside = self.folder.with_name(f"{ASIDE}-{more}")
        there = numbers(aside, whole=False)
        if aside.exists():
            shutil.rmtree(aside)
        if there:
            tell(f"the snapshots of the run before it ({_names(there)}), which were in {aside}, are removed")
        return aside

    def write(
        self, number: int, parts: Mapping[str, tuple[FlatFile, Sequence[TensorSlice]]], first: bool
    ) -> dict[str, Any]:
        """Write slabs at their places, and wait for the disk; returns the checksums by file, for the manifest.

        first: write headers, too, which one of the shards does.
        """
        path = self.folder / name_of(number)
        close_folder(self.folder)
        make_folder(path)
        sums = {}
        for name, (layout, slabs) in parts.items():
            with _created(path / name) as fd:
                os.ftruncate(fd, layout.size)
                if first:
                    write_at(fd, layout.header, 0)
                sums[name] = _slabs(fd, layout, slabs)
                os.fsync(fd)
        return sums

    def publish(self, number: int, data: Mapping[str, Any], step: int | None = None) -> Path:
        """Let a snapshot count whose files are on disk, and remove what is older than it and the one before.

        The one that the job went on from stays, and so do those that have a `step`: they are kept by that name, which
        is a link, until somebody removes the link. Returns where the snapshot is.
        """
        path = self.folder / name_of(number)
        link = path if step is None else self.folder / f"{STEPS}{step}"
        if step is not None:  # first, so that nothing prunes it
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
            os.symlink(path.name, link)
        text = json.dumps({**data, "sha256": hashed(data)}, separators=(",", ":"))
        with _created(path / f"{MANIFEST}.tmp") as fd:
            write_at(fd, text.encode(), 0)
            os.fsync(fd)
        os.replace(path / f"{MANIFEST}.tmp", path / MANIFEST)
        for each in (path, self.folder, self.folder.parent):
            sync_folder(each)
        self._prune(number)
        return link

    def _links(self) -> set[int]:
        """The snapshots that are kept by their steps; links to what is gone are removed."""
        for link in self.folder.glob(f"{STEPS}*"):
            if link.is_symlink() and not (link / MANIFEST).exists():
                link.unlink()
        return set(_links(self.folder))

    def _prune(self, newest: int) -> None:
        whole = [number for number in numbers(self.folder) if number <= newest][-KEPT:]
        kept = {*whole, *self._links(), self._origin}
        for number in numbers(self.folder, whole=False):
            if number < newest and number not in kept:
                with contextlib.suppress(OSError):  # what cannot be removed takes nothing from the new one
                    self.drop(number)

    def drop(self, number: int) -> None:
        """Remove a snapshot, its manifest first."""
        path = self.folder / name_of(number)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / MANIFEST)
        shutil.rmtree(path, ignore_errors=True)


class SnapshotWriter:
    """Writes the snapshots of the servers of one process, and says when it is time for one.

    Args:
        job, topology: the job.
        files: the folder.
        first: number of the first snapshot.
        emit: told what is there, and what went wrong; training goes on.
    """

    def __init__(self, job: Job, topology: Topology, files: SnapshotFiles, first: int, who: str, emit: Emit) -> None:
        self._job, self._topology, self._files, self._first = job, topology, files, first
        self._who, self._emit = who, emit
        self._orders: SimpleQueue[tuple[SnapshotPort, _Order]] = SimpleQueue()
        self._answers: SimpleQueue[tuple[SnapshotPort, list[SnapshotPart]]] = SimpleQueue()
        self._begun = False
        self._leader: SnapshotPort | None = None
        self._refusal = ""

    def follow(
        self, me: Address, snapshots: ServerSnapshots, poke: Callable[[], None], from_another: bool = False
    ) -> "SnapshotPort":
        """Write what this server freezes. poke: called on a thread of its own when the server has something to hear.

        from_another: the host of another process has done so before.
        """
        leads = snapshots.book is not None
        aside = SnapshotPort(self._job.snapshot_s if leads else 0.0, poke)
        if leads:
            self._leader, self._refusal = aside, snapshots.refusal
        if leads and snapshots.refusal and self._job.checkpoint_freq:
            self._tell(f"checkpoint_freq: no snapshots are taken, since {snapshots.refusal}")

        def work(what: _Order) -> None:
            self._begin()
            self._orders.put((aside, what))

        if from_another:
            snapshots.succeed(work)
        elif not snapshots.refusal:
            snapshots.follow(work, self._first)
        return aside

    def end(self) -> None:
        """The job is to end: take one more snapshot; Saved or Unsaved is told. On any thread."""
        if self._leader is None or self._refusal:
            self._emit(Unsaved(self._who, self._refusal or "its server has not begun"))
        else:
            self._leader.say([SnapshotRequest(last=True)])

    def _tell(self, text: str) -> None:
        self._emit(Notice(self._who, text))

    def _begin(self) -> None:
        """Two threads: whoever has a low priority must not be in a server's way while it speaks to it."""
        if not self._begun:
            self._begun = True
            for live in (self._live, self._say):
                threading.Thread(target=live, name="snapshots", daemon=True).start()

    def _live(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            aside, what = self._orders.get()
            self._answers.put((aside, self._do(what)))

    def _say(self) -> None:
        while True:
            aside, answer = self._answers.get()
            aside.say(answer)

    def _do(self, what: "_Order") -> list[SnapshotPart]:
        if isinstance(what, DropSnapshot) and not what.number:
            self._emit(Unsaved(self._who, what.why))
            return []
        if isinstance(what, DropSnapshot):
            self._tell(f"snapshot {what.number} was not written: {what.why}; training goes on")
            with contextlib.suppress(OSError):
                self._files.drop(what.number)
            return []
        stage = WRITTEN if isinstance(what, WriteSnapshot) else PUBLISHED
        answer: dict[str, Any] = {}
        try:
            answer = self._write(what) if isinstance(what, WriteSnapshot) else self._publish(what)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
            if isinstance(what, PublishSnapshot):
                self._tell(f"snapshot {what.number} was not written: {error}; training goes on")
                with contextlib.suppress(OSError):
                    self._files.drop(what.number)
        return texts(what.number, stage, answer)

    def _write(self, what: WriteSnapshot) -> dict[str, Any]:
        frozen = what.frozen
        parts = {
            MODEL: (model_file(frozen.parameters), frozen.values),
            STATE: (state_file(frozen.parameters, what.table), frozen.state),
        }
        answer = self._files.write(what.number, parts, first=what.server == LEADER)
        if frozen.tables:
            own = {file_of(what.server.index): (tables_file(frozen.tables), frozen.rows)}
            answer |= self._files.write(what.number, own, first=True)
            answer["tables"] = [table.to_data() for table in frozen.tables]
        return answer

    def _publish(self, what: PublishSnapshot) -> dict[str, Any]:
        layout = workers_file({worker: data.numel() for worker, data in what.deposits.items()})
        slabs = [TensorSlice(str(worker), 0, data) for worker, data in what.deposits.items()]
        kept = self._files.write(what.number, {WORKERS: (layout, slabs)}, first=True)
        files = {name: _joined(part[name] for part in what.written) for name in (MODEL, STATE)}
        tables = _tables(what.written)
        files |= {file_of(shard): what.written[shard][file_of(shard)] for shard in range(len(tables))}
        topology = self._topology
        step = dict(what.facts["steps"])[0]
        path = self._files.publish(
            what.number,
            {
                "format": WITH_TABLES if tables else FORMAT,
                "number": what.number,
                "job": self._job.name,
                "conf": dumps(self._job),
                "layout": [topology.worker_groups, topology.workers_per_group, topology.shards],
                **what.facts,
                **({"tables": tables} if tables else {}),
                "workers": [[worker.group, worker.index, data.numel()] for worker, data in what.deposits.items()],
                "files": {**files, **kept},
            },
            step if what.why == STEP else None,
        )
        self._emit(Saved(self._who, what.number, step, str(path), what.why))
        if what.why == END:
            counts = {str(Address(Role.WORKER, group, index)): count for group, index, count in what.facts["samples"]}
            self._emit(Counted(self._who, counts))
        return {}


class SnapshotPort:
    """What a server's own host has to say to it, between two messages of others.

    Args:
        every_s: seconds from one snapshot to the next; 0: never.
        poke: see `SnapshotWriter.follow`.
    """

    def __init__(self, every_s: float, poke: Callable[[], None]) -> None:
        self._every_s, self._poke = every_s, poke
        self._due = time.monotonic() + every_s
        self._said: SimpleQueue[Message] = SimpleQueue()

    def say(self, messages: Iterable[Message]) -> None:
        """Let the server hear these as soon as it can; on any thread."""
        for message in messages:
            self._said.put(message)
        self._poke()

    def heard(self) -> Iterator[Message]:
        """What there is to hear now."""
        while not self._said.empty():
            yield self._said.get()
        if self._every_s and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            yield SnapshotRequest()


def _links(folder: Path) -> dict[int, list[str]]:
    """The snapshots of a folder that are kept by their steps, each with the names of its links."""
    found: dict[int, list[str]] = {}
    for link in folder.glob(f"{STEPS}*"):
        target = link.resolve().name
        if target.isdecimal() and (link / MANIFEST).exists():
            found.setdefault(int(target), []).append(link.name)
    return found


def _names(found: Sequence[int]) -> str:
    return name_of(found[0]) if len(found) == 1 else f"{name_of(found[0])} to {name_of(found[-1])}"


# --- bytes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """A file that others write at the same time, each its own part."""
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


def _slabs(fd: int, layout: FlatFile, slabs: Sequence[TensorSlice]) -> dict[str, Any]:
    """Write; returns [first, last, checksum] of ranges of bytes, and of scattered tensors with their names."""
    ranges: list[list[int]] = []
    scattered: list[list[Any]] = []
    for slab in sorted(slabs, key=lambda slab: (layout.entries[slab.name].begin, slab.lo)):
        entry, data = layout.entries[slab.name], bytes_of(slab.body)
        if not data:
            continue
        if not entry.ordered:
            _scatter(fd, layout, slab)
            first = slab.lo * entry.itemsize
            scattered.append([slab.name, first, first + len(data), zlib.crc32(data)])
            continue
        first, last = entry.bytes_of(slab.lo, slab.lo + slab.body.numel())
        write_at(fd, data, first)
        if ranges and ranges[-1][1] == first and last - ranges[-1][0] <= _SUMMED:
            ranges[-1] = [ranges[-1][0], last, zlib.crc32(data, ranges[-1][2])]
        else:
            ranges.append([first, last, zlib.crc32(data)])
    return {"ranges": ranges, "scattered": scattered}


def _scatter(fd: int, layout: FlatFile, slab: TensorSlice) -> None:
    """Write elements that do not lie in memory as they stand in the file: runs of those that are neighbors in both."""
    import torch

    entry = layout.entries[slab.name]
    rows = torch.arange(entry.count).view(entry.told.shape)
    places = torch.empty(entry.count, dtype=rows.dtype)
    places.as_strided(entry.told.shape, entry.told.stride).copy_(rows)
    mine = places[slab.lo : slab.lo + slab.body.numel()]
    order = mine.argsort()
    mine, body = mine[order], slab.body[order]
    cuts = [0, *(torch.nonzero(mine[1:] != mine[:-1] + 1).flatten() + 1).tolist(), mine.numel()]
    for lo, hi in pairwise(cuts):
        write_at(fd, bytes_of(body[lo:hi]), entry.begin + int(mine[lo]) * entry.itemsize)


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The checksums of all shards."""
    known = list(parts)
    return {what: [row for part in known for row in part[what]] for what in ("ranges", "scattered")}


def _tables(written: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What each server has written of tables; empty where there are none. Raises ValueError for others on each."""
    tables = [part.get("tables", []) for part in written]
    names = [sorted(StoredTable.from_data(table).name for table in own) for own in tables]
    if any(own != names[0] for own in names):
        raise ValueError(f"the servers had frozen different tables: {names}")
    return tables if names[0] else []


def writer_for(
    job: Job, topology: Topology, servers: Sequence[Address], resumed: Path | None, again: bool, emit: Emit
) -> SnapshotWriter | None:
    """What writes the snapshots of a process's servers; None where the job wants none.

    resumed: the snapshot that the job goes on from. again: it was started before, and is the same run. emit: tells the
    user what comes of it.
    """
    if not wants_snapshots(job):
        return None
    files = SnapshotFiles(Path(job.workspace).absolute() / FOLDER)

    def tell(text: str) -> None:
        emit(Notice(str(servers[0]), text))

    try:
        any_may = job.cluster.replicas > 1  # have to lead
        leads = LEADER in servers
        first = files.begin(resumed, again or not leads, tell) if leads or any_may else 1
    except OSError as error:
        tell(f"no snapshots are written: {error}")
        return None
    return SnapshotWriter(job, topology, files, first, str(servers[0]), emit)
