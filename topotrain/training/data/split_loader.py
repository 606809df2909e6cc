"""A loader to evaluate with, of which each worker reads a part."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from topotrain.training.data.loader_view import LoaderView
from topotrain.training.data.map_dataset import DataPlan, LoaderCopy
from topotrain.training.data.sampling import draw_epoch, index_sampler, is_list, length_of, share_of_loaded


class SplitLoader(LoaderView):
    """This worker's share of each batch, in order. A batch without one is left out.

    Every sample is read by one worker. The script's random numbers move on as in the plain script, and the order of a
    sampler that draws is the one of the job's seed, the same on all workers.
    """

    def __init__(self, loader: DataLoader[Any], plan: DataPlan) -> None:
        super().__init__(loader)
        self._plan = plan

    def __iter__(self) -> Iterator[Any]:
        inner = LoaderCopy(self._loader, self._plan)
        if isinstance(self._loader.dataset, IterableDataset):
            return self._stream(inner)
        mine = self._mine()
        if type(getattr(index_sampler(self._loader), "sampler", None)) is not SequentialSampler:
            # The plain loader would draw here.
            for _ in index_sampler(self._loader):
                pass
        inner.read(mine)
        return iter(inner.loader)

    def __len__(self) -> int:
        return len(self._mine())

    def _mine(self) -> list[Any]:
        """The indices of each of this worker's batches, or its keys."""
        plan = self._plan
        drawn = draw_epoch(self._loader, plan.seed, 0)
        if self._loader.batch_sampler is None:
            return drawn[plan.index :: plan.workers]
        batches = [batch if is_list(batch) else list(batch) for batch in drawn]
        return [batch[slice(*bounds)] for batch in batches if len(range(*(bounds := plan.bounds(len(batch)))))]

    def _stream(self, inner: LoaderCopy) -> Iterator[Any]:
        for batch in inner.loader:
            if inner.collates:
                samples, data, _ = batch
            else:
                size = length_of(batch)
                data, samples = share_of_loaded(batch, size, self._plan.bounds(size), 1)
            if samples:
                yield data
