"""The job's result as a file: `final.safetensors`, which plain PyTorch loads.

    model.load_state_dict(safetensors.torch.load_file("final.safetensors"))

A tied weight is stored once, under its first name; `load_state_dict(..., strict=False)` then restores both, and the
other names stand in the file's metadata ("tied": JSON of name -> names).
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from topotrain.buffers import ModelParts, in_file
from topotrain.job import ConfigError
from topotrain.private import open_for_reading

_APART_BYTES = 64


def save_final(parts: ModelParts, path: Path, more: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Write parameters, `more` of them, and buffers, atomically; nothing that has its memory for itself is copied."""
    tensors, metadata = tensors_of(parts, _apart)
    tensors |= {name: weight.detach().contiguous() for name, weight in more.items()}
    save_tensors(tensors, path, metadata)


def tensors_of(
    parts: ModelParts, take: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by name, contiguous and copied (or as `take` takes them), and a file's metadata."""
    tensors: dict[str, torch.Tensor] = {}
    for described, tensor in zip(parts.parameters, parts.tensors, strict=True):
        tensors[described.name] = take(tensor.detach().contiguous())
    for buffer, content in zip(parts.buffers, parts.buffer_tensors, strict=True):
        tensors[buffer.name] = take(content.detach().contiguous())
    return tensors, metadata_of({p.name: p.aliases for p in parts.parameters})


def metadata_of(aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Of a file that has these parameters; the other names of each."""
    return {"format": "pt", "tied": json.dumps({name: list(more) for name, more in aliases.items() if more})}


def in_one_file(likes: Sequence[torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """Contiguous tensors of these shapes and dtypes, zeroed, over a nameless file of the folder.

    Each has a storage of its own, as a file's writer wants it. Raises ConfigError where the disk has no room.
    """
    ends = list(accumulate(-(-like.nbytes // _APART_BYTES) * _APART_BYTES for like in likes))
    memory = in_file(folder)(ends[-1] if ends else 0, torch.uint8)
    made = []
    for like, end in zip(likes, ends, strict=True):
        at = end - -(-like.nbytes // _APART_BYTES) * _APART_BYTES
        flat = memory[at : at + like.nbytes]
        own = torch.frombuffer(flat.numpy().data, dtype=like.dtype) if like.nbytes else flat.view(like.dtype)
        made.append(own.view(like.shape))
    return made


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The file's writer takes no tensors that share memory."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write contiguous tensors, atomically: under this name there is always a whole file, also after a power cut."""
    temporary = path.with_suffix(".tmp")
    save_file(tensors, str(temporary), metadata=metadata)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` has written. Raises ConfigError for a file that is none."""
    try:
        os.close(open_for_reading(path))  # the file's reader would wait at a named pipe
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError("file", str(path), f"must be a safetensors file: {error}") from None


def to_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """Contiguous tensors on the CPU, none of which shares memory with another, as the bytes of a safetensors file."""
    return save(tensors)


def from_bytes(data: bytes, what: str) -> dict[str, torch.Tensor]:
    """The tensors of `to_bytes`. Raises ConfigError, about the field `what`, for bytes that are none."""
    try:
        return load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(what, f"{len(data)} bytes", f"must be as safetensors writes tensors: {error}") from None
