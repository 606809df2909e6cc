"""Reads snapshots from disk. `latest` finds the newest complete one.

    WORKSPACE/manifests/000012/model.safetensors      parameters, which plain PyTorch loads
                               optimizer.safetensors  state of the optimizer: "parameter/entry"
                               workers.safetensors    states of the workers, for the workers of a resumed job
                               tables-0.safetensors   rows of tables, where there are any (`table_file_layout`)
                               manifest.json          written last: without it there is no snapshot

A damaged snapshot is refused. manifest.json has its own hash, and a checksum of every byte of the other files. torch is
imported only when values are read, since a launcher reads manifests, too.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topotrain.config.job import ConfigError
from topotrain.config.private_files import open_for_reading, read_bytes
from topotrain.config.sharding import Parameter, parse
from topotrain.config.topology import Address, Role
from topotrain.core.events import NO_NOTICES, Notifier
from topotrain.core.model.safetensors_layout import FlatFile, TensorDescription, lay_out
from topotrain.core.model.tensor_bytes import bytes_of
from topotrain.core.optim.state_table import Table, from_rows, model_file, state_file
from topotrain.extensions.checkpointing.table_file_layout import StoredTable, entry_of, file_of, tables_file
from topotrain.training.data.batch_ranges import Runs, merged

if TYPE_CHECKING:
    import torch

FOLDER = "manifests"
ASIDE = "manifests.previous"
MANIFEST = "manifest.json"
MODEL, STATE, WORKERS = "model.safetensors", "optimizer.safetensors", "workers.safetensors"
FORMAT, WITH_TABLES = 1, 2
"""Formats of a manifest. A program that knows only the first must refuse a snapshot with tables."""
# A manifest grows with the number of tensors and batch ranges. A larger file is damage, and is not read into memory.
_MOST_MANIFEST = 1 << 28
_CHUNK = 4 << 20
# Errors that parsing damaged JSON data can raise. Each becomes a ConfigError that names the snapshot.
_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


def latest(workspace: Path | str, notifier: Notifier = NO_NOTICES) -> "Manifest | None":
    """The newest complete snapshot of a workspace, or None. Checksums are compared.

    notifier: shows a text about each newer snapshot that is damaged.

    Raises:
        ConfigError: there are snapshots, and none can be read.
    """
    folder = Path(workspace) / FOLDER
    damaged: list[str] = []
    for number in reversed(numbers(folder)):
        try:
            found = Manifest.open(folder / name_of(number))
            found.verify()
        except ConfigError as error:
            # Two snapshots are kept, so one damaged file does not lose the job.
            damaged.append(f"{name_of(number)} {error.accepted}")
            continue
        for text in damaged:
            notifier.notify(f"snapshot {text}; the job goes on from {name_of(number)}")
        return found
    # To begin at the beginning would silently discard the work in the damaged snapshots.
    if damaged:
        raise ConfigError("resume", str(folder), "no snapshot in it can be read: " + "; ".join(damaged))
    return None


def numbers(folder: Path, whole: bool = True) -> list[int]:
    """The snapshots in a folder, oldest first. whole: only those with a manifest."""
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name.isdecimal()]
    except OSError:
        return []
    # A folder without a manifest holds a snapshot that was never completed.
    return sorted(int(name) for name in found if not whole or (folder / name / MANIFEST).exists())


def name_of(number: int) -> str:
    return f"{number:06d}"


def hashed(data: Mapping[str, Any]) -> str:
    return sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def workers_file(sizes: Mapping[Address, int]) -> FlatFile:
    """The layout of the file with workers' states. sizes: bytes of each."""
    told = (TensorDescription(str(worker), "uint8", (size,), (1,)) for worker, size in sorted(sizes.items()))
    return lay_out(told, {"format": "pt"})


def as_manifest(resumed: object) -> "Manifest | None":
    """The snapshot that a process's configuration carries (`RouterConfig.resumed`)."""
    if resumed is None or isinstance(resumed, Manifest):
        return resumed
    # `RouterConfig` is below this package and cannot name the type, so it is checked here.
    raise TypeError(f"resumed = {resumed!r}: must be a Manifest or None")


class Manifest:
    """One snapshot. Make it with `open`.

    Attributes:
        path: its folder.
        number: the number of the snapshot in its job, from 1.
        job, conf: the job's name, and its file as text.
        version, clocks: the version of the values, and the clock of each worker group.
        parameters, optimizer, table: the model, `adapter.OptimizerSpec.to_text`, and the optimizer's state.
        tables: the part of each server of the tables that scripts had opened.
        first_epoch: the epoch of the first batch that is not in the values. None: no worker has read further.
        closed: all epochs before this one are in the values.
        samples: the number of samples of each worker that are in the values.
        rounds: the number of rounds of each fragment with an outer optimizer. Empty: there is none.
    """

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        """Parse a manifest. Raises one of _WRONG for damaged data."""
        self.path = path
        self.number = int(data["number"])
        self.job, self.conf = str(data["job"]), str(data["conf"])
        self.version = int(data["version"])
        self.clocks: Mapping[int, int] = {int(group): int(clock) for group, clock in data["clocks"]}
        self._steps = {int(group): int(steps) for group, steps in data["steps"]}
        first = data["first_epoch"]
        self.first_epoch = None if first is None else int(first)
        # Manifests of older versions lack `closed` and `samples`. `tables` is left out where there are none.
        self.closed = int(data.get("closed", 0))
        self.samples: Mapping[Address, int] = {
            Address(Role.WORKER, int(g), int(i)): int(count) for g, i, count in data.get("samples", ())
        }
        self.rounds = tuple(map(int, data.get("rounds", ())))
        # `merged` again: a reader relies on sorted ranges, and a file may hold anything.
        self._runs: dict[int, Runs] = {
            int(epoch): merged((int(lo), int(hi)) for lo, hi in runs) for epoch, runs in data["epochs"]
        }
        parameters, _, optimizer, _ = json.loads(data["model"])
        self.parameters: tuple[Parameter, ...] = parse(parameters)
        self.optimizer = str(optimizer)
        self.table: Table = from_rows(data["optimizer"], self.parameters)
        self._sizes = {Address(Role.WORKER, int(g), int(i)): int(size) for g, i, size in data["workers"]}
        self.tables = tuple(tuple(map(StoredTable.from_data, kept)) for kept in data.get("tables", ()))
        # The layouts follow from the manifest. Headers on disk are only compared with them and never parsed.
        self.files: Mapping[str, FlatFile] = {
            MODEL: model_file(self.parameters),
            STATE: state_file(self.parameters, self.table),
            WORKERS: workers_file(self._sizes),
            **{file_of(shard): tables_file(kept) for shard, kept in enumerate(self.tables)},
        }
        self._sums = {name: _Sums(layout, data["files"][name]) for name, layout in self.files.items()}

    @staticmethod
    def open(path: Path | str) -> "Manifest":
        """Read manifest.json, and check the sizes and headers of the other files.

        Raises ConfigError.
        """
        path = Path(path)
        try:
            # One byte more than allowed, to tell a file of the largest size from a longer one.
            text = read_bytes(path / MANIFEST, _MOST_MANIFEST + 1)
        except OSError as error:
            raise _damaged(path, f"has no readable {MANIFEST} ({error.strerror})") from None
        try:
            data: dict[str, Any] = json.loads(text) if len(text) <= _MOST_MANIFEST else {}
            told = data.pop("sha256")
            if told != hashed(data):
                raise ValueError("its hash is another")
            if data["format"] not in (FORMAT, WITH_TABLES):
                raise _damaged(path, f"is of format {data['format']}, must be {FORMAT} or {WITH_TABLES}")
            made = Manifest(path, data)
        # _WRONG has ValueError, a base of ConfigError. A precise error must not become "damaged".
        except ConfigError:
            raise
        except _WRONG as error:
            raise _damaged(path, f"has a damaged {MANIFEST} ({_short(error)})") from None
        for name in made.files:
            made._check_header(name)
        return made

    def _check_header(self, name: str) -> None:
        with self._opened(name) as fd:
            layout = self.files[name]
            # The size first: lengths from a file decide about memory only after the file was seen to have them.
            if os.fstat(fd).st_size != layout.size:
                raise _damaged(self.path, f"has {os.fstat(fd).st_size} bytes of {name}, not {layout.size}")
            header = bytearray(len(layout.header))
            self._fill(fd, name, memoryview(header), 0)
            if header != layout.header:
                raise _damaged(self.path, f"has another header in {name}")

    def verify(self) -> None:
        """Compare every byte with its checksum. Raises ConfigError."""
        buffer = memoryview(bytearray(_CHUNK))
        for name in self.files:
            with self._opened(name) as fd:
                for first, last, told in self._sums[name].ranges:
                    found = 0
                    for at in range(first, last, _CHUNK):
                        part = buffer[: min(_CHUNK, last - at)]
                        self._fill(fd, name, part, at)
                        found = zlib.crc32(part, found)
                    if found != told:
                        raise _damaged(self.path, f"has damaged bytes {first} to {last} of {name}")
            # A shard's slice of such a tensor is not contiguous in the file, so its checksum is over the memory order.
            for tensor, lo, hi, told in self._sums[name].scattered:
                if zlib.crc32(self._in_memory_order(name, tensor)[lo:hi]) != told:
                    raise _damaged(self.path, f"has damaged elements of {tensor} in {name}")

    # --- the content ---------------------------------------------------------------------------------------------

    @property
    def epochs(self) -> Sequence[int]:
        """The epochs with batches in the values, without those before `closed`."""
        return tuple(self._runs)

    def runs(self, epoch: int) -> Runs:
        """The batches of an epoch in the values, as ranges of the loader's full list."""
        return self._runs.get(epoch, ())

    def steps(self, group: int) -> int:
        # A group that the job did not have gets the average of the others.
        return self._steps.get(group, sum(self._steps.values()) // max(1, len(self._steps)))

    @property
    def workers(self) -> Sequence[tuple[int, int]]:
        """(group, index) of the workers that left their states."""
        return tuple((worker.group, worker.index) for worker in sorted(self._sizes))

    def worker(self, group: int, index: int) -> bytes | None:
        """The state of a worker. None: it left none. Raises ConfigError."""
        who = Address(Role.WORKER, group, index)
        if who not in self._sizes:
            return None
        entry = self.files[WORKERS].entries[str(who)]
        data = bytearray(self._sizes[who])
        with self._opened(WORKERS) as fd:
            self._fill(fd, WORKERS, memoryview(data), entry.begin)
        return bytes(data)

    def values(self, name: str, lo: int, out: "torch.Tensor") -> None:
        """Read elements of a parameter, from `lo` on in memory order. Raises ConfigError."""
        self._read(MODEL, name, lo, out)

    def state(self, parameter: str, entry: str, lo: int, out: "torch.Tensor") -> None:
        """Read elements of a tensor of the optimizer's state. Raises ConfigError."""
        self._read(STATE, f"{parameter}/{entry}", lo, out)

    def rows(self, shard: int, table: str, column: str, lo: int, out: "torch.Tensor") -> None:
        """Read ids, values or a state column of a table's part. Raises ConfigError."""
        self._read(file_of(shard), entry_of(table, column), lo, out)

    def _read(self, file: str, name: str, lo: int, out: "torch.Tensor") -> None:
        entry = self.files[file].entries.get(name)
        if entry is None:
            raise _damaged(self.path, f"has no {name} in {file}")
        # A server of another model or layout asks for other elements. Nothing is converted silently.
        if str(out.dtype).removeprefix("torch.") != entry.described.dtype or not 0 <= lo <= entry.count - out.numel():
            raise _damaged(self.path, f"has {entry.count} elements of {entry.described.dtype} of {name}")
        if not entry.ordered:
            first, last = lo * entry.itemsize, (lo + out.numel()) * entry.itemsize
            bytes_of(out)[:] = self._in_memory_order(file, name)[first:last]
            return
        with self._opened(file) as fd:
            self._fill(fd, file, bytes_of(out), entry.begin + lo * entry.itemsize)

    def _in_memory_order(self, file: str, name: str) -> bytes:
        """The bytes of a tensor in memory order, where the file has another order."""
        import torch

        entry = self.files[file].entries[name]
        rows = torch.empty(entry.described.shape, dtype=getattr(torch, entry.described.dtype))
        with self._opened(file) as fd:
            self._fill(fd, file, bytes_of(rows), entry.begin)
        flat = torch.empty(entry.count, dtype=rows.dtype)
        # The file is row-major. A copy through the memory's strides gives the order of a server's memory.
        flat.as_strided(entry.described.shape, entry.described.stride).copy_(rows)
        return bytes(bytes_of(flat))

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            fd = open_for_reading(self.path / name)
        except OSError as error:
            raise _damaged(self.path, f"has no readable {name} ({error.strerror})") from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _fill(self, fd: int, name: str, target: memoryview, at: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(fd, [target[done:]], at + done)
            except OSError as error:
                raise _damaged(self.path, f"has an unreadable {name} ({error.strerror})") from None
            # The file was truncated after its size had been compared.
            if count == 0:
                raise _damaged(self.path, f"has a {name} that is cut short")
            done += count


class _Sums:
    """The checksums of one file: of `ranges` of bytes, and of scattered tensors.

    The elements of a scattered tensor have another order in the file than in memory. Together both cover each byte
    after the header once.

    Raises:
        ValueError: they do not.
    """

    def __init__(self, layout: FlatFile, data: Mapping[str, Any]) -> None:
        self.ranges = sorted((int(first), int(last), int(told)) for first, last, told in data["ranges"])
        self.scattered = [(str(name), int(lo), int(hi), int(told)) for name, lo, hi, told in data["scattered"]]
        pieces = [(first, last) for first, last, _ in self.ranges]
        for name, run in self._by_tensor(layout):
            if run != ((0, layout.entries[name].count * layout.entries[name].itemsize),):
                raise ValueError(f"not every element of {name} has a checksum")
            pieces.append((layout.entries[name].begin, layout.entries[name].end))
        # Equal sums and a gapless union together exclude overlaps: every byte has exactly one checksum.
        if sum(last - first for first, last in pieces) != layout.size - len(layout.header):
            raise ValueError("checksums of other bytes than there are")
        # A file without elements, such as that of SGD's state, has a header and no range.
        body = ((len(layout.header), layout.size),) if layout.size > len(layout.header) else ()
        if merged(pieces) != body:
            raise ValueError("not every byte has a checksum")

    def _by_tensor(self, layout: FlatFile) -> Iterator[tuple[str, Runs]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for name, lo, hi, _ in self.scattered:
            if layout.entries[name].ordered:
                raise ValueError(f"{name} is not scattered")
            found.setdefault(name, []).append((lo, hi))
        for name, runs in found.items():
            yield name, merged(runs)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError("resume", str(path), why)


def _short(error: BaseException) -> str:
    return str(error)[:120] or type(error).__name__
