"""A loader that gives batches of two sizes is still the script's loader."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from topotrain.tools.probe.batch_sizes import BatchWatch, watch_batches


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


def given(loader: DataLoader[object], watch: BatchWatch) -> list[tuple[int, int]]:
    """For each batch its samples, and the samples that the watch has counted."""
    return [(len(batch[0] if isinstance(batch, list) else batch), watch.step_over()) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_second_batch_is_cut_while_it_is_asked_for(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(32)), batch_size=8, num_workers=workers)
    watch = BatchWatch()
    watch_batches(loader, watch)
    assert isinstance(loader, DataLoader) and len(loader) == 4
    assert given(loader, watch) == [(8, 8)] * 4
    watch.let_alternate(2)
    assert given(loader, watch) == [(2, 2), (8, 8)] * 2
    watch.let_alternate(0)
    assert given(loader, watch) == [(8, 8)] * 4
    assert watch.full == 8 and watch.small == 2


def test_a_pass_that_is_left_early_does_not_spoil_the_next() -> None:
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=8, num_workers=1)
    watch = BatchWatch()
    watch_batches(loader, watch)
    watch.let_alternate(2)
    next(iter(loader))
    watch.step_over()
    assert all(samples == counted for samples, counted in given(loader, watch))


def test_a_stream_and_a_loader_without_batches() -> None:
    stream, single = DataLoader(Numbers(), batch_size=4), DataLoader(torch.zeros(3, 5), batch_size=None)
    for loader in (stream, single):
        watch = BatchWatch()
        watch_batches(loader, watch)
        watch.let_alternate(1)
        assert all(samples == counted for samples, counted in given(loader, watch))
