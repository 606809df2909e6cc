"""`tt.state_dict` and `tt.save`: a model's present state, and a script's files."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.config.private_files import sync_folder
from topotrain.training import context as process
from topotrain.training.parameters.divided_model import DividedModel


def state_dict(model: nn.Module) -> dict[str, Any] | None:
    """A copy of `model.state_dict()` on the main worker, None on the others.

    If the model is split, all workers of the main worker's group must call this after the same step. Those of other
    groups may. The values are the ones that the main worker has just pulled. Those of a split model are on the CPU, in
    an unlinked file of the workspace, because the memory may be too small for them.

    Raises:
        ConfigError: the split model is another one; a worker of the group goes on without the call.
    """
    process.use()
    here = process.current()
    # At the end of the job the model is whole again.
    if here is not None and here.split is not None and not here.split.over:
        return _gathered(here, here.split, model)
    if here is not None and not here.is_main:
        return None
    held = model.state_dict()
    # Copies: the next step() would change the values while the script still writes them.
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in held.items()}


def _gathered(here: process.Context, cut: DividedModel, model: nn.Module) -> dict[str, Any] | None:
    if not cut.is_of(model):
        raise ConfigError("tt.state_dict", type(model).__name__, "must be the model that tt.prepare split")
    # The main worker's group alone has the values of this step.
    if here.me.group:
        return None
    found = cut.gather("tt.state_dict")
    return None if found is None else {name: value for first, value in found.items() for name in cut.names[first]}


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` on the main worker, complete or not at all; nothing on the others.

    The file is written under another name in the same folder, and renamed when it is on the disk. A process that dies
    meanwhile leaves the earlier file. No worker waits: another one that reads the file must wait for it, such as with
    `tt.broadcast`. In an ordinary process it saves.

    Args:
        state: anything that `torch.save` takes, such as `tt.state_dict(model)`. That of other workers is not looked at.
        path: the file, in a folder that is there.

    Raises:
        OSError: the file cannot be written.
    """
    here = process.current()
    if here is not None and not here.is_main:
        return
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            # Before the rename: after a power cut the new name must not lead to missing data.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_folder(path.parent)
