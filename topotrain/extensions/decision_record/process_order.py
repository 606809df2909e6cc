"""The recording, or the replay, of one process of a job, in files of a folder."""

import json
import os
import sys
from abc import abstractmethod
from pathlib import Path

import torch

from topotrain.config.job import Job
from topotrain.config.private_files import open_file, read_bytes, write_text
from topotrain.config.topology import Address, Role, Topology
from topotrain.core.events import EventSink, ReplayReport
from topotrain.core.model.schema import BufferMemory
from topotrain.core.server.server import Server
from topotrain.core.server.server_context import StartPoint
from topotrain.core.transport_contract import MessageSender
from topotrain.extensions.decision_record.exchange_record import RecordedExchanges, ReplayedExchanges
from topotrain.extensions.decision_record.order_entries import decode_entries
from topotrain.extensions.decision_record.recording_server import RecordingServer, RecordingSink
from topotrain.extensions.decision_record.replay_order import ReplayOrder
from topotrain.extensions.decision_record.replayed_server import ReplayedServer, ReplayObserver, ReplayTask
from topotrain.extensions.decision_record.server_order import ServerOrder
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.training.final_parameters import to_bytes

SETTINGS = "replay.json"
WHOLE_LIFE, REACHED, ENDED, DIFFERS = "whole life", "reached", "ended", "differs"
"""ReplayReport.what."""


def part_of(who: Address, incarnation: int = 0) -> str:
    """Return the name of the part of a recording that a process writes."""
    number = f"-{incarnation}" if who.role is Role.WORKER else ""
    return f"{who.role.name.lower()}-{who.group}-{who.index}{number}"


class ProcessOrder(ServerOrder):
    """Makes the servers of a process, and the choices of its worker."""

    @abstractmethod
    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        """Return the choices between two rounds of a worker's process."""


class FileSink(RecordingSink):
    """Appends to a file, which is made with the first bytes.

    Each write is one call of the system, so that a killed process loses none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._failed = False

    def write(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            if self._file < 0:
                self._file = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if os.write(self._file, data) == len(data):
                return
            reason = "the disk is full"
        except OSError as error:
            reason = str(error.strerror)
        # The job goes on. A part with a gap would replay something else, so that it must not be there.
        self._failed = True
        self._path.unlink(missing_ok=True)
        print(f"the job is not recorded any more: {reason}", file=sys.stderr, flush=True)


class FolderRecording(ProcessOrder):
    """Records into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        sender: MessageSender | None,
        start: StartPoint | None,
    ) -> Server:
        sink = FileSink(self._folder / part_of(me))
        return RecordingServer(me, job, topology, memory, shared, sender, start, sink)

    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        return RecordedExchanges(FileSink(self._folder / part_of(worker, incarnation)))


class FolderReplay(ProcessOrder):
    """Replays what is in a folder.

    Args:
        folder: has the parts of the recording, and SETTINGS.
        sink: gets the reports.
    """

    def __init__(self, folder: Path, sink: EventSink) -> None:
        self._folder, self._sink = folder, sink
        settings = json.loads((folder / SETTINGS).read_text())
        self._whole: bool = settings["whole"]
        self._until: tuple[int, int] | None = None if settings["until"] is None else tuple(settings["until"])

    def make(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        memory: BufferMemory,
        shared: bool,
        sender: MessageSender | None,
        start: StartPoint | None,
    ) -> Server:
        order = ReplayOrder(decode_entries(self._read(part_of(me))), self._whole)
        until = None if self._until is None or self._until[0] != me.group else self._until[1]
        task = ReplayTask(order, ReplayReporter(self._folder, self._sink), until)
        return ReplayedServer(me, job, topology, memory, shared, sender, start, task)

    def choices(self, worker: Address, incarnation: int) -> ExchangeChoices:
        later = (self._folder / part_of(worker, incarnation + 1)).exists()
        data = self._read(part_of(worker, incarnation))
        return ReplayedExchanges(data, self._whole and not later, str(worker))

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        return read_bytes(path) if path.exists() else b""


class ReplayReporter(ReplayObserver):
    """Reports to the launcher, and leaves the values of the last version in a file.

    Args:
        folder: for the values.
        sink: gets the reports.
    """

    def __init__(self, folder: Path, sink: EventSink) -> None:
        self._folder, self._sink = folder, sink

    def on_whole_life(self, server: Server, worker: Address, life: int) -> None:
        self._sink.emit(ReplayReport(str(server.me), WHOLE_LIFE, str(worker), life, ""))

    def on_version(self, server: Server, version: int) -> None:
        write_values(server, self._folder / values_of(server.me))
        self._sink.emit(ReplayReport(str(server.me), REACHED, "", version, ""))

    def on_end(self, server: Server) -> None:
        self._sink.emit(ReplayReport(str(server.me), ENDED, "", server.state.version, ""))

    def on_difference(self, server: Server, text: str) -> None:
        self._sink.emit(ReplayReport(str(server.me), DIFFERS, "", server.state.version, text))


# --- the values of a server ------------------------------------------------------------------------------------------


def values_of(server: Address) -> str:
    """Return the name of the file with the values of a server."""
    return f"values-{server.group}-{server.index}"


def write_values(server: Server, path: Path) -> None:
    """Write the present values of a server's part of the parameters.

    The shapes of all parameters are written, too.
    """
    model = server.state.known
    tensors = {
        f"{segment.start} {segment.parameter}": _flat(model.flats.segment("values", segment)).clone()
        for segment in model.map.segments
        if segment.shard == server.me.index
    }
    shapes = [(p.name, list(p.shape), list(p.stride)) for p in model.schema.parameters]
    file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(file, "wb") as opened:
        opened.write(to_bytes(tensors))
    # Written after the values: a reader that sees this file finds all of them.
    write_text(path.with_suffix(".json"), json.dumps(shapes))


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory."""
    return values if values.dim() == 1 else values.as_strided((values.numel(),), (1,))


def joined_values(
    shapes: list[tuple[str, list[int], list[int]]], parts: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the parameters by name, out of the parts of all servers of a group."""
    flat: dict[int, dict[int, torch.Tensor]] = {}
    for part in parts:
        for key, values in part.items():
            start, _, number = key.partition(" ")
            flat.setdefault(int(number), {})[int(start)] = values
    made = {}
    for at, (name, shape, stride) in enumerate(shapes):
        pieces = flat.get(at, {})
        whole = torch.cat([pieces[start] for start in sorted(pieces)]) if pieces else torch.empty(0)
        made[name] = whole.as_strided(shape, stride)
    return made
