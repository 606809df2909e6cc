"""docs/journey-batch.md against a traced run: one batch passes the functions that the page names, in order."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from in_process_job import Trainer, building, job_of, run_local
from journey_pages import Tracer, check_order, own_files, stops_in
from torch.utils.data import DataLoader, TensorDataset

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import Message
from topotrain.training.data.data_client import DataClient
from topotrain.training.data.data_messages import Lease, LeaseRequest
from topotrain.training.data.distributed_loader import DataPlan, ShardedLoader

PAGE = Path(__file__).parents[2] / "docs" / "journey-batch.md"
READER = Address(Role.WORKER, 0, 0)
MOST_FILES = 17  # two of them compare the batches of the workers
"""Files that the batch enters. The number may only become smaller."""


class BatchTracer(Tracer):
    """Follows the reader's batch, and messages about leases."""

    _reader: int | None = None

    def watch(self, read: Callable[[], object]) -> None:
        """Note what this call enters on its thread, and what its messages enter on others."""
        self._reader, self.watching = threading.get_ident(), True
        try:
            read()
        finally:
            self.watching = False

    def concerns(self, frame: FrameType, caller: bool, first: bool) -> bool:
        message = frame.f_locals.get("message")
        if isinstance(message, Message):
            return isinstance(message, Lease | LeaseRequest)
        return caller or (first and self.watching and threading.get_ident() == self._reader)


@pytest.fixture(scope="module")
def seen() -> list[str]:
    """The functions that the first batch of a group passes."""
    tracer = BatchTracer()

    def script(t: Trainer) -> None:
        plan = DataPlan(t.me.group, 2, 0, 1, (), "lease", False, 0, 1, t.me == READER)
        data = TensorDataset(torch.arange(96.0))
        client = t.worker.client.extension(DataClient)
        batches = iter(ShardedLoader(DataLoader(data, batch_size=8), plan, client, t.worker))
        if t.me == READER:
            tracer.watch(lambda: next(batches))
        batches.close()

    with tracer.everywhere():
        run_local(job_of(nworker_groups=2, nworkers_per_group=1, nservers_per_group=1), building(), script)
    return list(tracer.seen)


def test_the_batch_passes_the_stops_in_the_order_of_the_page(seen: list[str]) -> None:
    check_order(stops_in(PAGE.read_text(encoding="utf-8")), seen, PAGE)


def test_the_batch_enters_few_files(seen: list[str]) -> None:
    assert len(own_files(seen)) <= MOST_FILES, sorted(own_files(seen))
