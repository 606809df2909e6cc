"""Fingerprint of a loader's data, by which workers find out that it differs.

The batches of a loader are divided among workers that all would draw the same ones. Where a script has divided its data
already (a `Subset` for each rank, a sampler or a stream that looks at the rank), a part of it would never be read.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from topotrain.training.data.sampling import digest, hash_of, index_sampler
from topotrain.training.rng_state import RngState, stand

_MOST = 1 << 16  # elements of one tensor that are looked at
ANY = -1
"""In the place of a fingerprint of random number generators: the sampler draws from none."""


class _Samples(Dataset[int]):
    """Fingerprints of one sample, read twice with the same random numbers."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> int:
        with RngState(self._seed):
            return content(self._dataset[0])


def sample_of(loader: DataLoader[Any], seed: int) -> int:
    """Fingerprint of a sample of a loader with a sampler; 0: not known."""
    samples = _Samples(loader.dataset, seed)
    try:
        # In a process of the loader, where it has some: files that a dataset opens there must not be open before.
        found = DataLoader(
            samples,
            batch_size=None,
            num_workers=min(1, loader.num_workers),
            multiprocessing_context=loader.multiprocessing_context,
            worker_init_fn=loader.worker_init_fn,
            generator=torch.Generator(),
        )
        one, two = found if loader.num_workers else (samples[0], samples[1])
    except Exception:  # a data set with other keys; what fails in the script's loop, too, can be understood there
        return 0
    # A sample that is another one each time says nothing.
    return one if one == two else 0


def knows_ranks(loader: DataLoader[Any]) -> bool:
    """Whether the sampler may look at the rank."""
    sampler: Any = index_sampler(loader)
    orders = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(orders) not in (RandomSampler, SequentialSampler)


def dice() -> int:
    """Fingerprint of the random number generators."""
    return hash_of(b"".join(state.numpy().tobytes() for state in stand().values()))


def first_indices(loader: DataLoader[Any]) -> tuple[int, int]:
    """Fingerprints of the first indices that would be drawn here, and of their `dice`."""
    found = []
    try:
        for start in (stand(), 1):
            with RngState(start):
                # A copy: the sampler may have random numbers of its own.
                sampler = deepcopy(index_sampler(loader), {id(loader.dataset): loader.dataset})
                found.append(digest([next(iter(sampler))]))
    except Exception:  # a sampler that cannot be copied
        return 0, 0
    return found[0], ANY if found[0] == found[1] else dice()


def content(data: Any) -> int:
    """Fingerprint of tensors, arrays, numbers and texts in a sample or batch; 0: none."""
    try:
        found = b"".join(_parts(data))
    except Exception:  # a tensor of a kind that has no plain memory
        return 0
    return hash_of(found) if found else 0


def _parts(data: Any) -> Iterator[bytes]:
    if isinstance(data, torch.Tensor):
        yield f"{tuple(data.shape)} {data.dtype}".encode()
        part = data.detach().cpu().reshape(-1)[:_MOST].contiguous()
        yield part.view(torch.uint8).numpy().tobytes()
    elif isinstance(data, numpy.ndarray) and not data.dtype.hasobject:
        yield f"{data.shape} {data.dtype}".encode() + data.reshape(-1)[:_MOST].tobytes()
    elif isinstance(data, Mapping):
        yield from _parts(list(data.items()))
    elif isinstance(data, list | tuple):
        for part in data:
            yield from _parts(part)
    elif isinstance(data, str | bytes | int | float):
        yield repr(data).encode()
