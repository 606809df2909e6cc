"""Where the new processes of a worker group begin, by the states that the former ones have saved."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.extensions.resume.previous_run import PreviousRun, find
from topotrain.extensions.resume.worker_state import WorkerState


class SavedStates:
    """A worker whose group has saved states at the begin of these passes. None: a worker has saved none."""

    def __init__(self, *passes: int | None) -> None:
        self.blobs = [None if number is None else blob(number) for number in passes]

    def load(self, index: int) -> tuple[torch.Tensor | None, None]:
        return self.blobs[index], None

    def load_group(self) -> list[torch.Tensor | None]:
        return self.blobs

    def applied(self, stream: int) -> int:
        return 0


def blob(passes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(WorkerState(passes, 10 * passes).to_bytes()), dtype=torch.uint8)


def found(index: int, *passes: int | None, alike: bool = True) -> PreviousRun:
    saved = SavedStates(*passes)
    identity = SimpleNamespace(incarnation=1)
    place = SimpleNamespace(identity=identity, job=Job())
    here: Any = SimpleNamespace(
        resumed=None, me=Address(Role.WORKER, 1, index), place=place, alike={"inner optimizer"} if alike else set()
    )
    worker: Any = SimpleNamespace(client=SimpleNamespace(extension=lambda kind: saved), optimizers=[None])
    return find(here, worker)


@pytest.mark.parametrize("passes", [(2, 1), (1, 2), (None, 2), (2, None)], ids=str)
def test_workers_that_share_a_replica_begin_at_the_same_pass(passes: tuple[int | None, int | None]) -> None:
    """Batches of passes before the last of these count, so no worker of the group has one to read there."""
    first, second = found(0, *passes), found(1, *passes)
    assert (first.first, second.first) == (2, 2)
    saved = passes[0]
    assert (None if first.lead is None else first.lead.passes) == saved == (second.lead and second.lead.passes)


def test_each_other_worker_begins_at_its_own_pass() -> None:
    assert [found(index, 2, 1, alike=False).first for index in (0, 1)] == [2, 1]
