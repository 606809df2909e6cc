"""Files of parameters at a step: written as `step-N.safetensors`, and read.

A checkpoint has the contents of `final.safetensors` at an earlier step. Optimizer state is not included.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from topotrain.config.job import ConfigError
from topotrain.config.private_files import make_folder
from topotrain.core.model.schema import plain_name
from topotrain.training import context as process
from topotrain.training.final_parameters import load_tensors, save_tensors

_FIELD = "checkpoint_path"
_SHOWN = 4  # names that an error lists


class ParameterFiles:
    """Writes parameters and buffers in a thread; training waits only for the copy.

    Every file is written. If the last file is still being written when the next is due, training waits for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        make_folder(folder)

    def write(self, step: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """Start to write tensors, which must not change any more."""
        # Raises the error of the last file, if there was one.
        self.wait()
        path = self._folder / f"step-{step}.safetensors"
        self._writing = self._pool.submit(save_tensors, tensors, path, {**metadata, "step": str(step)})

    def wait(self) -> None:
        """Wait until all files are on disk. Raises OSError if one could not be written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Finish the last file, even if training has failed."""
        self._pool.shutdown(wait=True)


def load_checkpoints(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Copy tensors from files into the model by name, one file after another.

    This is what SINGA does. A parameter that is in no file keeps its value. Other names of a file are ignored.

    Returns:
        A sentence for each file about what was found.

    Raises:
        ConfigError: a file is missing or not a safetensors file, a shape differs, or no name fits.
    """
    # Duplicates too: a file may have any of the names of a tied weight.
    places = {
        plain_name(name): tensor
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in named
    }
    return [_load(places, path) for path in paths]


def _load(places: dict[str, torch.Tensor], path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(_FIELD, path, "must be an existing file")
    try:
        held = load_tensors(Path(path))
    except ConfigError as error:
        raise ConfigError(_FIELD, path, error.accepted) from None
    known = {name: tensor for name, tensor in held.items() if name in places}
    if not known:
        raise ConfigError(
            _FIELD, path, f"has no tensor of the model: it has {_names(held)}; the model {_names(places)}"
        )
    # All checks come before the first copy, so that an error leaves the model as it is.
    for name, tensor in known.items():
        if tensor.shape != places[name].shape:
            wanted, found = tuple(places[name].shape), tuple(tensor.shape)
            raise ConfigError(_FIELD, path, f"{name} must have the model's shape {wanted}, but has {found}")
    for name in known:
        if places[name].is_meta and not _elsewhere(places[name]):
            raise ConfigError(_FIELD, path, f"needs a model with values: {name} is on the meta device")
    with torch.no_grad():
        for name, tensor in known.items():
            places[name].copy_(tensor)
    # By identity: one name of a tied weight restores all of them.
    same = {id(places[name]) for name in known}
    missing = [name for name, tensor in places.items() if id(tensor) not in same]
    more = [name for name in held if name not in places]
    text = f"{path}: {len(known)} tensors taken"
    text += f"; not in it: {_names(missing)}" if missing else ""
    return text + (f"; not in the model: {_names(more)}" if more else "")


def _elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether another worker holds, and loads, a tensor."""
    here = process.current()
    return here is not None and any(extension.holds_elsewhere(here, tensor) for extension in here.extensions)


def _names(names: Sequence[str] | dict[str, torch.Tensor]) -> str:
    shown = list(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "") or "nothing"
