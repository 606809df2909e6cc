"""Give a script batches of two sizes from its own loader.

The loader is changed in place, so that the script keeps the object that it has made. A smaller batch has the first
samples of the full one, as a worker of a group has a share of the group's batch.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

SMALL_SHARE = 4
"""A full batch has so many times the samples of a small one."""


class BatchWatch:
    """The known facts of the batches that a script is given."""

    def __init__(self) -> None:
        self.small = 0  # samples in a small batch; 0: there was none
        self.alternates = False  # every second batch is small
        self.given = 0  # samples of the batches since the last step
        self.drawn_at = 0.0  # when the last batch was given, by `time.perf_counter`
        self.full = 0  # samples in the largest batch so far

    def let_alternate(self, small: int) -> None:
        """Let every second batch have so many samples; 0: all batches are full."""
        self.small, self.alternates = small or self.small, bool(small)

    def drawn(self, samples: int) -> None:
        self.given += samples
        self.full = max(self.full, samples)
        self.drawn_at = time.perf_counter()

    def step_over(self) -> int:
        given, self.given = self.given, 0
        return given


class CutBatches:
    """A batch sampler with the batches of another one, some of them made small."""

    def __init__(self, inner: Any, watch: BatchWatch) -> None:
        self._inner, self._watch, self._next_is_small = inner, watch, False
        self.sizes: deque[int] = deque()
        """Of the batches of the present pass that the loader has asked for, and not given yet."""

    def __iter__(self) -> Iterator[Any]:
        # A new one: workers of an earlier pass may have read ahead.
        sizes: deque[int] = deque()
        self.sizes = sizes
        return self._cut(sizes)

    def _cut(self, sizes: deque[int]) -> Iterator[Any]:
        for indices in map(list, self._inner):
            self._next_is_small = self._watch.alternates and not self._next_is_small
            cut = indices[: self._watch.small] if self._next_is_small else indices
            sizes.append(len(cut))
            yield cut

    def __len__(self) -> int:
        return len(self._inner)

    # Scripts ask a batch sampler for its own attributes, and set its epoch.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


def watch_batches(loader: DataLoader[Any], watch: BatchWatch) -> None:
    """Count the batches of a loader, and cut them as `watch` says."""
    sampler = None if loader.batch_sampler is None else CutBatches(loader.batch_sampler, watch)
    if sampler is not None:
        # torch refuses this attribute on a finished loader, because its own parts would then disagree.
        object.__setattr__(loader, "batch_sampler", sampler)

    class WatchedLoader(type(loader)):  # type: ignore[misc]
        """The script's loader, which notes the batches that it gives."""

        def __iter__(self) -> Iterator[Any]:
            batches = super().__iter__()
            sizes = deque() if sampler is None else sampler.sizes
            for batch in batches:
                watch.drawn(sizes.popleft() if sizes else first_size(batch))
                yield batch

    loader.__class__ = WatchedLoader


def first_size(batch: Any) -> int:
    """Return the first size of the first tensor in a batch; 0 without one."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((found for found in map(first_size, batch) if found), 0)
    shape: Any = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else 0
