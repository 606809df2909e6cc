"""The job's result as a file: `final.safetensors`, which plain PyTorch loads.

    model.load_state_dict(safetensors.torch.load_file("final.safetensors"))

A tied weight is stored once, under its first name. `load_state_dict(..., strict=False)` then restores all its names,
which are in the file's metadata ("tied": JSON of name -> names).

The format has no complex128. Such a tensor is stored as pairs of float64 and named in the metadata ("complex": JSON of
names). `torch.view_as_complex` restores it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR, EOPNOTSUPP
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from topotrain.config.job import ConfigError
from topotrain.config.private_files import open_file, open_for_reading, sync_folder, write_at
from topotrain.core.model.safetensors_layout import PAIRED, TensorDescription, lay_out
from topotrain.core.model.schema import torch_dtype
from topotrain.core.model.tensor_bytes import bytes_of
from topotrain.training.parameters.flat_parameters import FileMemory, ModelParts
from topotrain.training.worker import Worker

FINAL = "final.safetensors"
_APART_BYTES = 64  # each tensor begins at a multiple, so that every dtype is aligned and vectorized
# Besides its own errors the reader raises whatever a broken header leads to.
_UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


class NotSaved(OSError):
    """Tensors that the disk did not take; names the file and why."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(error.errno, f"{path} cannot be written: {error.strerror or error}")
        self.path = path

    def __str__(self) -> str:
        return str(self.strerror)


def save_final(parts: ModelParts, path: Path, more: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Write parameters, `more` of them, and buffers, atomically."""
    found, metadata = tensors_of(parts)
    tensors = {name: _apart(tensor) for name, tensor in found.items()}
    tensors |= {name: weight.detach().contiguous() for name, weight in more.items()}
    save_tensors(tensors, path, metadata)


def tensors_of(parts: ModelParts) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by name, copied unless contiguous, and a file's metadata."""
    names = [*(p.name for p in parts.parameters), *(b.name for b in parts.buffers)]
    held = zip(names, (*parts.tensors, *parts.buffer_tensors), strict=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in held}
    return tensors, metadata_of({p.name: p.aliases for p in parts.parameters})


def metadata_of(aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Metadata of a file with these parameters; `aliases` are the other names of each."""
    # "format" is what readers of safetensors look at to choose a framework.
    return {"format": "pt", "tied": json.dumps({name: list(more) for name, more in aliases.items() if more})}


def fetch_final(worker: Worker, folder: Path | None = None, alone: bool = False) -> list[torch.Tensor]:
    """Worker (0,0): copy the job's result into the model.

    Returns the model's buffers, averaged over the groups; alone: those of this worker's group.

    If the model is split, parameters of other workers are fetched, too. Parameter i is then `buffers.view("params",
    i)`, and buffers of other workers are in the returned list only.

    folder: memory for the parameters that this worker does not hold is in files there. None: ordinary memory.
    """
    for space in worker.map.spaces:
        # The memory of this host was enough for a part of the model, and may be too small for all of it.
        if folder is not None and not space.on(worker.me.index):
            memory = FileMemory(folder).allocate(space.length, torch_dtype(space.dtype))
            worker.buffers.flats.put("params", space.index, memory)
    worker.client.values.fetch_final()
    found = worker.client.buffers.final()
    # Without servers each group has a model of its own, and group 0's is the result. Averages fit to none of them.
    if worker.job.cluster.nserver_groups == 0 or alone:
        found = {0: found.get(0, {})}
    averaged = []
    for index, buffer in enumerate(worker.parts.buffer_tensors):
        rows = [found[group][index].view(buffer.dtype).reshape(buffer.shape) for group in sorted(found)]
        averaged.append(_averaged(rows))
        if not buffer.is_meta:
            buffer.copy_(averaged[index])
    return averaged


def _averaged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over the worker groups; counters and other whole numbers are group 0's."""
    like = rows[0]
    if len(rows) == 1 or not (like.is_floating_point() or like.is_complex()):
        return like
    # In float64, because float16 sums of many groups could overflow.
    return torch.stack(list(rows)).to(torch.complex128 if like.is_complex() else torch.float64).mean(0).to(like.dtype)


def in_one_file(likes: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """Contiguous zeros of these shapes and dtypes, in one unlinked file.

    Each has a storage of its own. Raises ConfigError if the disk has no room.
    """
    ends = list(accumulate(-(-like.nbytes // _APART_BYTES) * _APART_BYTES for like in likes))
    memory = FileMemory(folder).allocate(ends[-1] if ends else 0, torch.uint8)
    made = []
    for like, end in zip(likes, ends, strict=True):
        at = end - -(-like.nbytes // _APART_BYTES) * _APART_BYTES
        flat = memory[at : at + like.nbytes]
        # A view would share the storage of the whole file, and the writer would refuse it.
        own = torch.frombuffer(flat.numpy().data, dtype=like.dtype) if like.nbytes else flat.view(like.dtype)
        made.append(own.view(like.shape))
    return made


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of just its elements: the tensor itself, or a copy."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write contiguous tensors atomically, also with regard to a power cut.

    Room that `reserve` has taken is used. Raises NotSaved if the disk does not take them, ConfigError for a dtype that
    the format does not know.
    """
    try:
        layout = lay_out((_told(name, tensor) for name, tensor in tensors.items()), metadata)
    except ValueError as error:
        raise ConfigError("tensors", str(path), str(error)) from None
    temporary = _beside(path)
    try:
        with _opened(temporary) as fd:
            _take_room(fd, layout.size)
            # The room that was reserved may be larger than the file.
            os.ftruncate(fd, layout.size)
            write_at(fd, layout.header, 0)
            for name, tensor in tensors.items():
                here = tensor.detach().cpu()
                write_at(fd, bytes_of(here), layout.entries[name].begin)
            # Before the rename: after a power cut the new name must not lead to missing data.
            os.fsync(fd)
        os.replace(temporary, path)
        # The rename itself is on the disk only now.
        sync_folder(path.parent)
    except OSError as error:
        release(path)
        raise NotSaved(path, error) from None


def _told(name: str, tensor: torch.Tensor) -> TensorDescription:
    return TensorDescription(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def reserve(path: Path, nbytes: int) -> None:
    """Reserve `nbytes` on the disk, until `save_tensors` or `release`.

    Raises ConfigError if there is no room, or the file cannot be written.
    """
    release(path)
    try:
        # The last rename would fail, and after all of the training.
        if path.is_dir():
            raise IsADirectoryError(EISDIR, f"{path.name} is a folder", str(path))
        with _opened(_beside(path)) as fd:
            _take_room(fd, nbytes)
    except OSError as error:
        release(path)
        accepted = f"must have room for {nbytes:,} bytes of {path.name} ({error.strerror})"
        raise ConfigError("cluster.workspace", str(path.parent), accepted) from None


def release(path: Path) -> None:
    """Give back room that `reserve` has taken; nothing happens where there is none."""
    with suppress(OSError):
        _beside(path).unlink()


def _beside(path: Path) -> Path:
    return path.with_suffix(".tmp")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


def _take_room(fd: int, nbytes: int) -> None:
    """Allocate blocks on the disk, where the file system can do that. Raises OSError."""
    try:
        # At least 1, because a length of 0 is an error.
        os.posix_fallocate(fd, 0, max(1, nbytes))
    except OSError as error:
        # A network or memory file system may not know how. A full disk then shows when the file is written.
        if error.errno not in (EINVAL, EOPNOTSUPP):
            raise


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of `save_tensors`. Raises ConfigError for any other file."""
    try:
        # It refuses a named pipe, at which the reader would wait for ever.
        os.close(open_for_reading(path))
        with safe_open(str(path), "pt") as file:
            return _out_of_pairs({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118
    except _UNREADABLE as error:
        raise ConfigError("file", str(path), f"must be a safetensors file: {error}") from None


def _out_of_pairs(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, torch.Tensor]:
    names = json.loads(metadata.get(PAIRED, "[]"))
    return {**tensors, **{name: torch.view_as_complex(tensors[name]) for name in names}}


def to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """These tensors, contiguous and on the CPU, as bytes of a safetensors file."""
    # Not `safetensors.torch.save`: it keeps two classes in this process forever for each size of a tensor.
    layout = lay_out((_told(name, tensor) for name, tensor in tensors.items()), {})
    flat = (tensors[name].detach().reshape(-1) for name in layout.entries)
    return b"".join([layout.header, *(each.view(torch.uint8).numpy().data for each in flat)])


def from_bytes(data: bytes, what: str) -> dict[str, torch.Tensor]:
    """The tensors of `to_bytes`. Raises ConfigError, about the field `what`."""
    try:
        # `load` drops the metadata. The header is JSON after its length, in 8 bytes.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _out_of_pairs(load(data), header.get("__metadata__", {}))
    except _UNREADABLE as error:
        raise ConfigError(what, f"{len(data)} bytes", f"must be as safetensors writes tensors: {error}") from None
