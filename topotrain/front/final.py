"""The job's result as a file: `final.safetensors`, which plain PyTorch loads.

    model.load_state_dict(safetensors.torch.load_file("final.safetensors"))

A tied weight is stored once, under its first name; `load_state_dict(..., strict=False)` then restores both, and the
other names stand in the file's metadata ("tied": JSON of name -> names).
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from topotrain.buffers import ModelParts


def save_final(parts: ModelParts, path: Path) -> None:
    """Write parameters and buffers, atomically."""
    tensors: dict[str, torch.Tensor] = {}
    for described, tensor in zip(parts.parameters, parts.tensors, strict=True):
        tensors[described.name] = tensor.detach().contiguous().clone()
    for buffer, content in zip(parts.buffers, parts.buffer_tensors, strict=True):
        tensors[buffer.name] = content.detach().contiguous().clone()
    tied = {p.name: list(p.aliases) for p in parts.parameters if p.aliases}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, str(temporary), metadata={"format": "pt", "tied": json.dumps(tied)})
    os.replace(temporary, path)
