"""Batches as lists of indices: draws, shares of workers, and chunks of a draw.

A share is a range of consecutive samples of the group's batch, in rank order, so that the shares together are the
batch.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, pairwise
from operator import index as as_int
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from topotrain.config.job import ConfigError
from topotrain.training.rng_state import RngState, Stand, put_back, stand

# Numbers in one chunk of a broadcast draw: 32 KiB, half of what the fields of a message may have.
CHUNK = 4096
KEY = -(1 << 32)  # in a chunk's sizes: one index that is no list (`batch_size=None`)

AS_IS = "_topotrain_as_is"
"""Attribute of a loader that is not divided, since the script says so. False: it or its dataset is divided already."""

Bounds = tuple[tuple[int, int], ...]
Chunk = tuple[tuple[int, ...], tuple[int, ...], bool]


# --- shares ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def cut(samples: int, workers: int, shares: tuple[float, ...] = (), min_share: int = 1) -> Bounds:
    """[lo, hi) of each worker in a batch of `samples`.

    Shares are equal, or in proportion to `shares`. A share below `min_share` goes to the others: the worker with the
    smallest claim (of equals the last) gets (0, 0), until every share is large enough or one worker is left.
    """
    # The workers that are left of a group may have no claim at all.
    claims = shares if any(shares) else (1,) * workers
    active = list(range(workers))
    while True:
        total = sum(claims[r] for r in active)
        edges, reached = [0], 0.0
        for r in active[:-1]:
            reached += claims[r]
            # 0.7 + 0.2 is a little less than 0.9, and would lose a sample to the next worker.
            edges.append(int(samples * reached / total + 1e-9))
        edges.append(samples)
        # BatchNorm needs two samples to compute a variance.
        if len(active) == 1 or min(hi - lo for lo, hi in pairwise(edges)) >= min_share:
            break
        active.remove(min(reversed(active), key=lambda r: claims[r]))
    mine = dict(zip(active, pairwise(edges)))
    return tuple(mine.get(r, (0, 0)) for r in range(workers))


def is_list(index: Any) -> bool:
    """Whether a sampler's item is a batch of samples, and not the key of one item."""
    return isinstance(index, list | numpy.ndarray | torch.Tensor) and getattr(index, "ndim", 1) == 1


def repeats(samples: int, count: int) -> list[int]:
    """Positions of `count` samples for a worker without a share."""
    # Its collectives and its BatchNorm must take part in the step. At weight 0 its gradient does not count.
    return [i % samples for i in range(count)] if samples else []


def share_of(batch: Any, bounds: tuple[int, int], min_share: int) -> tuple[Any, int]:
    """A worker's part of an index list, and how many of its samples count."""
    lo, hi = bounds
    if hi > lo or len(batch) == 0:
        return batch[lo:hi], hi - lo
    return [batch[i] for i in repeats(len(batch), min_share)], 0


# --- batches that are already loaded -----------------------------------------------------------------------------


def leading(data: Any) -> int | None:
    """The leading dimension of all tensors and arrays in `data`. None: they differ."""
    lengths = {len(leaf) for leaf in _leaves(data)}
    return lengths.pop() if len(lengths) == 1 else None


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, torch.Tensor | numpy.ndarray):
        if data.ndim:
            yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)


def length_of(data: Any) -> int:
    """The leading dimension of a loaded batch. Raises ConfigError if tensors differ."""
    samples = leading(data)
    if samples is None:
        raise ConfigError(
            "the loader's items",
            type(data).__name__,
            "with batch_size=None an item is divided among the workers of a group along the leading dimension of its "
            "tensors: they must agree in it, in (nested) dicts, lists and tuples",
        )
    return samples


def share_of_loaded(data: Any, samples: int, bounds: tuple[int, int], min_share: int) -> tuple[Any, int]:
    """A worker's part of a loaded batch, and how many of its samples count.

    Every tensor, array, and list of `samples` plain values is sliced. Dicts, lists, tuples and named tuples are kept.
    All workers get the other values.
    """
    lo, hi = bounds
    which = slice(lo, hi) if hi > lo else repeats(samples, min_share)
    return _pick(data, which, samples), hi - lo


def _pick(data: Any, which: slice | list[int], samples: int) -> Any:
    if isinstance(data, torch.Tensor | numpy.ndarray):
        return data[which] if data.ndim else data
    if isinstance(data, Mapping):
        picked = {key: _pick(value, which, samples) for key, value in data.items()}
        if not isinstance(data, MutableMapping):
            return picked
        # A copy, because its constructor may need other arguments (a defaultdict's does).
        clone = copy(data)
        clone.update(picked)
        return clone
    if isinstance(data, list | tuple):
        if len(data) == samples and all(isinstance(value, str | bytes | int | float | None) for value in data):
            kept = data[which] if isinstance(which, slice) else [data[i] for i in which]
        else:
            kept = [_pick(value, which, samples) for value in data]
        return type(data)(*kept) if hasattr(data, "_fields") else type(data)(kept)
    return data


# --- drawing -----------------------------------------------------------------------------------------------------


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch, of 63 bits."""
    # With `seed + epoch`, epochs of different jobs would have the same seed.
    return int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest(), "little") >> 1


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """The batch sampler and the samplers below it, each once."""
    batch_sampler = loader.batch_sampler
    found = [batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler]
    return [s for i, s in enumerate(found) if s is not None and all(s is not other for other in found[:i])]


def is_as_is(loader: Any) -> bool:
    """Whether each worker reads this loader as it is."""
    return getattr(loader, AS_IS, False) is True


def index_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that the loader iterates over: the batch sampler, if it has one."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def draw_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> list[Any]:
    """All index lists of an epoch, a function of (seed, epoch) only.

    No generator's state changes. `set_epoch` is called if a sampler has it.
    """
    mixed = epoch_seed(seed, epoch)
    generators = generators_of(loader)
    states = [(g, g.get_state()) for g in generators]
    try:
        # Samplers may draw from any of the global generators, and the script's own draws must not change.
        with RngState(mixed):
            for generator in generators:
                generator.manual_seed(mixed)
            for sampler in samplers(loader):
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(epoch)
            return list(index_sampler(loader))
    finally:
        for generator, state in states:
            generator.set_state(state)


def draw_again(loader: DataLoader[Any], state: Stand, fresh: bool) -> list[Any]:
    """All index lists of an epoch that worker (0,0) drew as a plain loader does.

    No generator's state changes.

    Args:
        state: that of the generators of worker (0,0) before the draw.
        fresh: its loader's iterator was a new one, which draws a seed for its processes.
    """
    generators = generators_of(loader)
    before = stand(generators)
    try:
        put_back(state, generators)
        # In the order of torch: the sampler's iterator, the seed, the batches. Samplers draw at the first or the last.
        drawn = iter(index_sampler(loader))
        if fresh:
            draw_seed(loader)
        return list(drawn)
    finally:
        put_back(before, generators)


def draw_seed(loader: DataLoader[Any]) -> None:
    """Draw the seed that a new iterator of the loader draws for its processes."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The random number generators of a loader and its samplers, each once."""
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers(loader))]
    generators = [g for g in found if isinstance(g, torch.Generator)]
    return [g for i, g in enumerate(generators) if all(g is not other for other in generators[:i])]


def digest(batches: Iterable[Any]) -> int:
    """Hash of an epoch's index lists, 63 bits; 0 if the indices are no integers."""
    batches = [batch if is_list(batch) else [batch] for batch in batches]
    try:
        # The lengths are hashed, too: the same indices in other batches are another epoch.
        numbers = array("q", map(len, batches))
        numbers.extend(map(as_int, chain.from_iterable(batches)))
    except TypeError:
        return 0
    return hash_of(numbers.tobytes())


def hash_of(data: bytes) -> int:
    """Hash of bytes, 63 bits and not 0."""
    # 63 bits, because a field of a message is a signed integer; 0 means that there is no digest.
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1) or 1


def draws_at_once(loader: DataLoader[Any]) -> bool:
    """Whether drawing the next batches early changes nothing.

    That is so for torch's own samplers. Any other one is asked one batch at a time, as the plain loader asks it: it may
    look at the training, or share a random number generator with it.
    """
    sampler: Any = index_sampler(loader)
    # Exact types: a subclass may do anything.
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is RandomSampler:
        # One permutation is drawn as a whole. More is drawn in parts, from a generator of its own if none was given.
        once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        return once or sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


# --- a draw on its way to the other workers ----------------------------------------------------------------------


def in_runs(batches: Iterator[Any], at_once: bool) -> Iterator[tuple[list[Any], list[Chunk]]]:
    """The batches in runs, as worker (0,0) draws them, each with its chunks to send."""
    end = False
    while not end:
        run: list[Any] = []
        room = CHUNK if at_once else 1
        while room > 0 and not end:
            drawn = list(islice(batches, 1))
            end = not drawn
            run += drawn
            # A batch costs its indices and its size, as in `pack`.
            room -= sum(len(batch) + 1 if is_list(batch) else 2 for batch in drawn)
        yield run, list(pack(run, end))


def pack(batches: Sequence[Any], end: bool) -> Iterator[Chunk]:
    """Chunks (sizes, indices, end) of at most CHUNK numbers each.

    A batch that continues in the next chunk has size -n. Raises ConfigError if an index is no integer of 64 bits.
    """
    sizes: list[int] = []
    indices: list[int] = []
    for batch in batches:
        numbers = _integers(batch if is_list(batch) else [batch])
        while True:
            # One for the size of the batch. An empty batch needs no more than that.
            room = CHUNK - len(sizes) - len(indices) - 1
            if room < min(1, len(numbers)):
                yield tuple(sizes), tuple(indices), False
                sizes, indices = [], []
                continue
            part, numbers = numbers[:room], numbers[room:]
            sizes.append(-len(part) if numbers else len(part) if is_list(batch) else KEY)
            indices += part
            if not numbers:
                break
    if sizes or end:
        yield tuple(sizes), tuple(indices), end


def _integers(batch: Any) -> list[int]:
    try:
        return array("q", map(as_int, batch)).tolist()
    except (TypeError, OverflowError):
        raise ConfigError(
            "the loader's sampler",
            batch[0],
            "its indices must be whole numbers of 64 bits, where several workers share its batches",
        ) from None


def received(chunks: Iterator[Chunk]) -> Iterator[Any]:
    """The batches of the chunks that worker (0,0) has sent, on another worker."""
    end = False
    begun: list[int] = []
    while not end:
        sizes, indices, end = next(chunks)
        at = 0
        for size in sizes:
            if size == KEY:
                yield indices[at]
                at += 1
                continue
            # A negative size: the batch goes on, in the next chunk.
            begun.extend(indices[at : at + abs(size)])
            at += abs(size)
            if size >= 0:
                yield begun
                begun = []
