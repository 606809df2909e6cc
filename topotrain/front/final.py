"""The job's result as a file: `final.safetensors`, which plain PyTorch loads.

    model.load_state_dict(safetensors.torch.load_file("final.safetensors"))

A tied weight is stored once, under its first name; `load_state_dict(..., strict=False)` then restores both, and the
other names stand in the file's metadata ("tied": JSON of name -> names).
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from topotrain.buffers import ModelParts
from topotrain.job import ConfigError


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
    tied = {p.name: list(p.aliases) for p in parts.parameters if p.aliases}
    return tensors, {"format": "pt", "tied": json.dumps(tied)}


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
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError("file", str(path), f"must be a safetensors file: {error}") from None
