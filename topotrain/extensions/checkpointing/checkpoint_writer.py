"""Writes the files of snapshots on a thread of their host.

Training never waits for a disk: the frozen shard does not change until this thread has replied. At any moment the last
snapshot or the new one is complete.
"""

import contextlib
import json
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from topotrain.config.intervals import wants_snapshots
from topotrain.config.job import Job
from topotrain.config.job_file import dumps
from topotrain.config.private_files import close_folder, make_folder, open_file, sync_folder, write_at
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import NO_NOTICES, Counted, EventNotifier, EventSink, Notifier, Saved, Unsaved
from topotrain.core.model.safetensors_layout import FlatFile
from topotrain.core.model.tensor_bytes import bytes_of
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
    STEP,
    DropSnapshot,
    PublishSnapshot,
    SnapshotOrder,
    WriteSnapshot,
)
from topotrain.extensions.checkpointing.snapshot_messages import (
    PUBLISHED,
    WRITTEN,
    SnapshotPart,
    SnapshotRequest,
    snapshot_parts,
)
from topotrain.extensions.checkpointing.table_file_layout import StoredTable, file_of, tables_file

KEPT = 2
STEPS = "step-"
LEADER = Address(Role.SERVER, 0, 0)
"""The coordinator of snapshots. Its host writes the manifests."""
LATE_S = 60.0  # of work on a snapshot, after which the user learns that it takes long
END_S = 15.0  # that the end of a job waits for a snapshot: the launcher ends servers that stay for 20 s
_NICE = 10
_SUMMED = 16 << 20  # bytes that one checksum covers at most


class SnapshotFiles:
    """The folder WORKSPACE/manifests of a job. Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The snapshot that the job resumed from. Processes that restart alone read it, however old it is.
        self._origin: int | None = None

    def begin(self, resumed: Path | None, again: bool, notifier: Notifier = NO_NOTICES) -> int:
        """Prepare the folder for a start of the job. Returns the first snapshot's number.

        Snapshots of an earlier run are moved to another folder, unless this start resumes from one of them (`resumed`),
        or is the same run `again`. notifier: shows texts about what is moved or removed.
        """
        ours = resumed is not None and resumed.parent.resolve() == self.folder.resolve()
        self._origin = int(resumed.name) if ours and resumed is not None and resumed.name.isdecimal() else None
        goes_on = again or ours
        found = numbers(self.folder, whole=False)
        # The job continues from the resumed snapshot, so the newer ones are of a course of training that is given up.
        undone = [] if again or self._origin is None else [number for number in found if number > self._origin]
        if not goes_on and self.folder.exists():
            aside = self._aside(resumed, notifier)
            # Moved and not removed: a start without `--resume` may be a mistake.
            os.replace(self.folder, aside)
            if found:
                notifier.notify(f"the snapshots of the earlier run ({_names(found)}) are in {aside} from now on")
            return 1
        if undone:
            aside = self._aside(resumed, notifier)
            make_folder(aside)
            links = _links(self.folder)
            for number in undone:
                os.replace(self.folder / name_of(number), aside / name_of(number))
                for link in links.get(number, ()):
                    os.replace(self.folder / link, aside / link)
            notifier.notify(f"the snapshots after {self._origin} ({_names(undone)}) are in {aside} from now on")
        self._drop_broken_links()
        # Above unfinished snapshots, too, so that files of different attempts never share a folder.
        return max(found, default=0) + 1

    def _aside(self, resumed: Path | None, notifier: Notifier) -> Path:
        """A name for a folder of older snapshots. A folder with that name is removed."""
        aside, more = self.folder.with_name(ASIDE), 1
        # A folder with a snapshot that is kept by its step, or that the job resumes from, stays.
        while _links(aside) or (resumed is not None and resumed.parent.resolve() == aside.resolve()):
            more += 1
            aside = self.folder.with_name(f"{ASIDE}-{more}")
        there = numbers(aside, whole=False)
        if aside.exists():
            shutil.rmtree(aside)
        if there:
            notifier.notify(f"the snapshots of the run before it ({_names(there)}), which were in {aside}, are removed")
        return aside

    def write(
        self, number: int, parts: Mapping[str, tuple[FlatFile, Sequence[TensorSlice]]], first: bool
    ) -> dict[str, Any]:
        """Write slices at their places, and wait for the disk.

        Returns the checksums by file, for the manifest. first: this shard writes the headers, too.
        """
        path = self.folder / name_of(number)
        # No other user may read a model, whatever the umask was when the folder was made.
        close_folder(self.folder)
        make_folder(path)
        sums = {}
        for name, (layout, slabs) in parts.items():
            with _created(path / name) as fd:
                # The shards write into one file at the same time, so each makes it as large as it will be.
                os.ftruncate(fd, layout.size)
                if first:
                    write_at(fd, layout.header, 0)
                sums[name] = _slabs(fd, layout, slabs)
                # Before the reply: the manifest must not be durable earlier than the bytes that it describes.
                os.fsync(fd)
        return sums

    def publish(self, number: int, data: Mapping[str, Any], step: int | None = None) -> Path:
        """Write the manifest of a snapshot, and remove older snapshots but one.

        The other files are on disk already. A snapshot with a `step` stays until the user removes the link with this
        name. Returns the path of the snapshot.
        """
        path = self.folder / name_of(number)
        link = path if step is None else self.folder / f"{STEPS}{step}"
        # The link first: `_prune` removes a snapshot that no link keeps.
        if step is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
            os.symlink(path.name, link)
        text = json.dumps({**data, "sha256": hashed(data)}, separators=(",", ":"))
        with _created(path / f"{MANIFEST}.tmp") as fd:
            write_at(fd, text.encode(), 0)
            os.fsync(fd)
        # Renaming is atomic: a manifest is there as a whole, or not at all.
        os.replace(path / f"{MANIFEST}.tmp", path / MANIFEST)
        # The names of the manifest, of the snapshot's folder and of the folder around it reach the disk separately.
        for each in (path, self.folder, self.folder.parent):
            sync_folder(each)
        self._prune(number)
        return link

    def _drop_broken_links(self) -> None:
        """Remove the links to snapshots that are gone."""
        for link in self.folder.glob(f"{STEPS}*"):
            if link.is_symlink() and not (link / MANIFEST).exists():
                link.unlink()

    def _prune(self, newest: int) -> None:
        self._drop_broken_links()
        whole = [number for number in numbers(self.folder) if number <= newest][-KEPT:]
        # The previous snapshot stays as well, in case that the newest one is damaged on the disk.
        kept = {*whole, *_links(self.folder), self._origin}
        for number in numbers(self.folder, whole=False):
            if number < newest and number not in kept:
                with contextlib.suppress(OSError):  # the new snapshot is complete whether this one is removed or not
                    self.drop(number)

    def drop(self, number: int) -> None:
        """Remove a snapshot, its manifest first."""
        path = self.folder / name_of(number)
        # Without its manifest a snapshot does not count, so an interrupted removal leaves nothing that looks complete.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / MANIFEST)
        shutil.rmtree(path, ignore_errors=True)


class PortReader(Protocol):
    """The host of a server, which reads the messages of a port."""

    def poke(self) -> None:
        """The port has messages. Any thread may call it."""
        ...


class SnapshotWriter:
    """Writes the snapshots of the servers of one process.

    Args:
        files: the folder. first: number of the first snapshot.
        name: the name of the server in events, which `sink` gets.
    """

    def __init__(
        self, job: Job, topology: Topology, files: SnapshotFiles, first: int, name: str, sink: EventSink
    ) -> None:
        self._job, self._topology, self._files, self._first = job, topology, files, first
        self._name, self._sink, self._notifier = name, sink, EventNotifier(sink, name)
        self._orders: SimpleQueue[tuple[SnapshotPort, SnapshotOrder]] = SimpleQueue()
        self._replies: SimpleQueue[tuple[SnapshotPort, list[SnapshotPart]]] = SimpleQueue()
        self._begun = False
        self._began = math.inf  # when the order that is carried out was begun
        self._leader: SnapshotPort | None = None
        self._refusal = ""

    def attach(self, snapshots: ServerSnapshots, reader: PortReader | None, replaces: bool = False) -> "SnapshotPort":
        """Write the snapshots of a server. Returns the port for messages to the server.

        reader: woken when the port has messages. replaces: another process was the host before.
        """
        leads = snapshots.coordinator is not None
        port = SnapshotPort(self, self._job.snapshot_s if leads else 0.0, reader, self._notifier)
        if leads:
            self._leader, self._refusal = port, snapshots.refusal
        # `snapshot_s` is on by default, so only the explicit `checkpoint_freq` gets a notice.
        if leads and snapshots.refusal and self._job.checkpoint_freq:
            self._notifier.notify(f"checkpoint_freq: no snapshots are taken, since {snapshots.refusal}")
        if replaces:
            # The replicas count snapshots alike. The new host must not set the number back.
            snapshots.replace_host(port)
        elif not snapshots.refusal:
            snapshots.attach_host(port, self._first)
        return port

    def end(self) -> None:
        """Request a last snapshot, from any thread. Emits Saved or Unsaved."""
        # The launcher waits for one of the two events before it ends the processes.
        if self._leader is None or self._refusal:
            self._sink.emit(Unsaved(self._name, self._refusal or "its server has not begun"))
        else:
            self._leader.send([SnapshotRequest(last=True)])

    def submit(self, port: "SnapshotPort", order: SnapshotOrder) -> None:
        """Carry out an order on the writer's thread. The port gets the reply."""
        self._start_threads()
        self._orders.put((port, order))

    def _start_threads(self) -> None:
        # A thread of low priority must not hold a server's lock, so another thread sends the replies.
        # Only when there is something to write: many jobs end before their first snapshot.
        if not self._begun:
            self._begun = True
            for run in (self._execute_orders, self._send_replies):
                threading.Thread(target=run, name="snapshots", daemon=True).start()

    def _execute_orders(self) -> None:
        with contextlib.suppress(OSError):
            # On Linux a priority belongs to a thread. Training keeps the cores, and checksums take what is left.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            port, order = self._orders.get()
            self._began = time.monotonic()
            self._replies.put((port, self._execute(order)))
            self._began = math.inf

    def _send_replies(self) -> None:
        wait_s = LATE_S
        while True:
            try:
                port, reply = self._replies.get(timeout=wait_s)
            except Empty:
                seconds = time.monotonic() - self._began
                if seconds >= LATE_S:
                    wait_s *= 2
                    text = f"the disk of {self._files.folder} has not taken a snapshot for {seconds:.0f} s"
                    self._notifier.notify(f"{text}, and no other one begins before it has; training goes on")
            else:
                wait_s = LATE_S
                port.send(reply)

    def _execute(self, order: SnapshotOrder) -> list[SnapshotPart]:
        if isinstance(order, DropSnapshot) and not order.number:
            self._sink.emit(Unsaved(self._name, order.why))
            return []
        if isinstance(order, DropSnapshot):
            self._notifier.notify(f"snapshot {order.number} was not written: {order.why}; training goes on")
            # A snapshot without a manifest does not count. `_prune` tries again after the next one.
            with contextlib.suppress(OSError):
                self._files.drop(order.number)
            return []
        stage = WRITTEN if isinstance(order, WriteSnapshot) else PUBLISHED
        reply: dict[str, Any] = {}
        try:
            reply = self._write(order) if isinstance(order, WriteSnapshot) else self._publish(order)
        # A full disk costs this snapshot and not the job. The coordinator drops it when all hosts have replied.
        except (OSError, ValueError, RuntimeError) as error:
            reply = {"error": str(error)}
            # For the coordinator PUBLISHED is the end, with or without an error, so the files are removed here.
            if isinstance(order, PublishSnapshot):
                self._notifier.notify(f"snapshot {order.number} was not written: {error}; training goes on")
                with contextlib.suppress(OSError):
                    self._files.drop(order.number)
        return snapshot_parts(order.number, stage, reply)

    def _write(self, order: WriteSnapshot) -> dict[str, Any]:
        frozen = order.frozen
        parts = {
            MODEL: (model_file(frozen.parameters), frozen.values),
            STATE: (state_file(frozen.parameters, order.table), frozen.state),
        }
        # All shards share these files. One of them writes the headers, which are the same for all.
        reply = self._files.write(order.number, parts, first=order.server == LEADER)
        if frozen.tables:
            own = {file_of(order.server.index): (tables_file(frozen.tables), frozen.rows)}
            # Each server has a file of its own for rows, since no server knows how many rows the others have.
            reply |= self._files.write(order.number, own, first=True)
            reply["tables"] = [table.to_data() for table in frozen.tables]
        return reply

    def _publish(self, order: PublishSnapshot) -> dict[str, Any]:
        layout = workers_file({worker: data.numel() for worker, data in order.states.items()})
        slabs = [TensorSlice(str(worker), 0, data) for worker, data in order.states.items()]
        kept = self._files.write(order.number, {WORKERS: (layout, slabs)}, first=True)
        files = {name: _joined(part[name] for part in order.written) for name in (MODEL, STATE)}
        tables = _tables(order.written)
        files |= {file_of(shard): order.written[shard][file_of(shard)] for shard in range(len(tables))}
        topology = self._topology
        step = dict(order.facts["steps"])[0]
        path = self._files.publish(
            order.number,
            {
                # A version without tables must refuse such a snapshot instead of ignoring its rows.
                "format": WITH_TABLES if tables else FORMAT,
                "number": order.number,
                "job": self._job.name,
                "conf": dumps(self._job),
                "layout": [topology.worker_groups, topology.workers_per_group, topology.shards],
                **order.facts,
                **({"tables": tables} if tables else {}),
                "workers": [[worker.group, worker.index, data.numel()] for worker, data in order.states.items()],
                "files": {**files, **kept},
            },
            # Only snapshots by steps are kept for the user. Those by time replace each other.
            step if order.why == STEP else None,
        )
        self._sink.emit(Saved(self._name, order.number, step, str(path), order.why))
        # The job ends here, so no worker will report its samples.
        if order.why == END:
            counts = {str(Address(Role.WORKER, group, index)): count for group, index, count in order.facts["samples"]}
            self._sink.emit(Counted(self._name, counts))
        return {}


class SnapshotPort:
    """Connects a server with the writer of its process, in both directions.

    every_s: seconds from one snapshot to the next. 0: no snapshots by time.
    """

    def __init__(self, writer: SnapshotWriter, every_s: float, reader: PortReader | None, notifier: Notifier) -> None:
        self._writer, self._every_s, self._reader, self._notifier = writer, every_s, reader, notifier
        self._due = time.monotonic() + every_s
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._until = math.inf  # at which the process ends although a snapshot is being written

    def holds_end(self, writing: bool) -> bool:
        """Whether a server of which the job needs no more stays for a snapshot that is being written."""
        self._until = min(self._until, time.monotonic() + END_S)
        if writing and time.monotonic() >= self._until:
            self._notifier.notify(f"the last snapshot was not written within {END_S:.0f} s of the end of training")
            self._notifier = NO_NOTICES  # it is said once
            return False
        return writing

    def execute(self, order: SnapshotOrder) -> None:
        self._writer.submit(self, order)

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages to the server, in its own name. Any thread may call it."""
        for message in messages:
            self._messages.put(message)
        # After the messages are in the queue, or the reader would find it empty and wait.
        if self._reader is not None:
            self._reader.poke()

    def messages(self) -> Iterator[Message]:
        """The messages that the server is to handle now."""
        # There is one reader, so `get` cannot block after `empty` was false.
        while not self._messages.empty():
            yield self._messages.get()
        if self._every_s and time.monotonic() >= self._due:
            # From now and not from the last due time: a process that was stopped requests one snapshot, not several.
            self._due = time.monotonic() + self._every_s
            yield SnapshotRequest()


def _links(folder: Path) -> dict[int, list[str]]:
    """The snapshots that are kept by their steps, with their links."""
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
    """Open a file of which other processes write other parts."""
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


def _slabs(fd: int, layout: FlatFile, slabs: Sequence[TensorSlice]) -> dict[str, Any]:
    """Write slices. Returns [first, last, checksum] of ranges and scattered tensors."""
    ranges: list[list[int]] = []
    scattered: list[list[Any]] = []
    # In file order, so that neighbors join into one range and the manifest stays short.
    for slab in sorted(slabs, key=lambda slab: (layout.entries[slab.name].begin, slab.lo)):
        entry, data = layout.entries[slab.name], bytes_of(slab.body)
        if not data:
            continue
        # The bytes of this slice are scattered over the file, so the checksum covers them in memory order.
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
    """Write a slice that has another order in the file than in memory."""
    entry = layout.entries[slab.name]
    # `places[i]` becomes the place in the file of element i in memory order.
    rows = torch.arange(entry.count).view(entry.described.shape)
    places = torch.empty(entry.count, dtype=rows.dtype)
    places.as_strided(entry.described.shape, entry.described.stride).copy_(rows)
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
    """The tables that each server has written. Raises ValueError if they differ."""
    tables = [part.get("tables", []) for part in written]
    names = [sorted(StoredTable.from_data(table).name for table in own) for own in tables]
    # A table that is opened during the freeze may be on some servers only. Such a snapshot would lose rows.
    if any(own != names[0] for own in names):
        raise ValueError(f"the servers had frozen different tables: {names}")
    return tables if names[0] else []


def writer_for(
    job: Job, topology: Topology, servers: Sequence[Address], resumed: Path | None, again: bool, sink: EventSink
) -> SnapshotWriter | None:
    """The writer of the snapshots of a process's servers. None: the job wants none.

    resumed: the snapshot that the job resumes from. again: the same run was started before. sink: gets events.
    """
    if not wants_snapshots(job):
        return None
    files = SnapshotFiles(Path(job.workspace).absolute() / FOLDER)
    notifier = EventNotifier(sink, str(servers[0]))
    try:
        # With replicas the coordinator may move to this process, which then needs the next number.
        any_may = job.cluster.replicas > 1
        leads = LEADER in servers
        # Only the coordinator's process may move an earlier run aside. Another one would move the new run's snapshots.
        first = files.begin(resumed, again or not leads, notifier) if leads or any_may else 1
    except OSError as error:
        notifier.notify(f"no snapshots are written: {error}")
        return None
    return SnapshotWriter(job, topology, files, first, str(servers[0]), sink)
