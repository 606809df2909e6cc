"""Example arguments of a model's forward, known before training starts.

They come from the loader or from the command line. The arguments of the forward are the first parts of the batch, as
many as the forward needs. If a batch has names, the forward gets the parts with the names of its arguments.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from topotrain.config.job import ConfigError
from topotrain.training.rng_state import RngState

OPTION = "--input"
SAY = f"say what the forward is called with, one {OPTION} per tensor, such as {OPTION} 32x1x8x8 or {OPTION} 32x64:int64"

_TEXT = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(?:torch\.)?(\w+))?")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ExampleInputs:
    """Example arguments for one batch of `samples`. `origin`: where they come from."""

    samples: int
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    def text(self) -> str:
        """Return shapes and dtypes in words."""
        parts = [_words(value) for value in self.args]
        parts += [f"{name}={_words(value)}" for name, value in self.kwargs.items()]
        return f"{', '.join(parts)} ({self.origin})"


def parse_inputs(texts: Sequence[str]) -> ExampleInputs:
    """Parse arguments such as "32x1x8x8", "32x64:int64" or "mask=32x64:bool".

    The first size is the number of samples and must be the same in all.

    Raises:
        ConfigError: a text has another form, or the numbers of samples differ.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for text in texts:
        found = _TEXT.fullmatch(text)
        dtype = getattr(torch, (found and found[3]) or "float32", None)
        if found is None or not isinstance(dtype, torch.dtype):
            accepted = "must be sizes with the samples first, and a dtype if it is not float32: 32x1x8x8, 32x64:int64"
            raise ConfigError(OPTION, text, accepted)
        sizes = [int(size) for size in found[2].split("x")]
        if min(sizes) < 1:
            raise ConfigError(OPTION, text, "must have sizes of at least 1")
        # Expanded from one element: only sizes and dtype are needed.
        made = torch.empty((), dtype=dtype).expand(sizes)
        if found[1]:
            kwargs[found[1]] = made
        else:
            args.append(made)
    counts = {tensor.shape[0] for tensor in (*args, *kwargs.values())}
    if len(counts) != 1:
        raise ConfigError(OPTION, " ".join(texts), "must all begin with the same number of samples")
    return ExampleInputs(counts.pop(), tuple(args), kwargs, f"from {OPTION}")


def inputs_of(model: nn.Module, loader: Any, everything: bool = False) -> ExampleInputs:
    """Return the arguments that the first batch of a loader gives to a forward.

    Args:
        model: its forward names the arguments.
        loader: a DataLoader.
        everything: pass all parts of a batch that the forward takes, because it computes the loss.

    Raises:
        ConfigError: the arguments cannot be found. The error names the option that gives them.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError("tt.prepare", type(loader).__name__, f"got no DataLoader from which to take shapes: {SAY}")
    try:
        with RngState(0):  # the random numbers that the script draws later stay the same
            batch, count = _batch(loader)
    except Exception as error:  # whatever the script's own dataset raises
        accepted = f"raised {type(error).__name__} when a sample was read ({error}): {SAY}"
        raise ConfigError("loader.dataset", type(loader.dataset).__name__, accepted) from error
    args, kwargs = _arguments(model, batch, everything)
    if not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        raise ConfigError("loader", type(batch).__name__, f"gives no tensor that the forward takes: {SAY}")
    return ExampleInputs(count, args, kwargs, "from the loader's first batch")


def _batch(loader: DataLoader[Any]) -> tuple[Any, int]:
    """Return a batch made of one repeated sample, and its number of samples."""
    data = loader.dataset
    count = loader.batch_size
    if isinstance(data, IterableDataset):
        sample = next(iter(data))
    elif count is not None:
        sample = data[0]
    elif loader.batch_sampler is not None:
        indices = list(next(iter(loader.batch_sampler)))
        sample, count = data[indices[0]], len(indices)
    else:
        sample = data[next(iter(loader.sampler))]
    if count is not None:
        # One sample is read and repeated, since only the sizes of a batch are needed.
        return loader.collate_fn([sample] * count), count
    whole = loader.collate_fn(sample)  # the dataset itself gives batches
    return whole, _samples(whole)


def _samples(batch: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return int(leaves[0].shape[0])


def _arguments(model: nn.Module, batch: Any, everything: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    taken = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        # Arguments with defaults are passed, too, if the batch has their names.
        return (), {one.name: batch[one.name] for one in taken if one.name in batch}
    if not isinstance(batch, tuple | list):
        return (batch,), {}
    positional = [one for one in taken if one.kind in _POSITIONAL]
    needed = [one for one in positional if everything or one.default is inspect.Parameter.empty]
    most = len(batch) if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in taken) and everything else 0
    count = max(1, len(needed), most)
    required = sum(one.default is inspect.Parameter.empty for one in positional)
    if required > len(batch):
        raise ConfigError("loader", f"batches of {len(batch)} parts", f"the forward needs {required} arguments: {SAY}")
    return tuple(batch[:count]), {}


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{'x'.join(map(str, value.shape)) or 'a number'} {str(value.dtype).removeprefix('torch.')}"
