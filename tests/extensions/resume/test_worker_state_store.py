"""What workers leave at server (0,0): whole or not at all, the newest, and never without bounds."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import ProtocolError, decode, encode
from topotrain.extensions.resume import worker_state_store
from topotrain.extensions.resume.pass_states import PassStates
from topotrain.extensions.resume.previous_run import PreviousRun, find
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart, WorkerStateRequest
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE, WorkerStateStore

ME, OTHER = Address(Role.WORKER, 0, 1), Address(Role.WORKER, 1, 0)


def blob(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


def leave(book: WorkerStateStore, who: Address, number: int, data: torch.Tensor, parts: int | None = None) -> None:
    for message in worker_state_store.cut(who, number, data)[:parts]:
        body = book.place(who, message, False).copy_(message.body)
        assert book.handle(who, replace(message, body=body)) == []


def told(book: WorkerStateStore, who: Address, index: int | None = None) -> dict[int, list[int] | None]:
    found: dict[int, list[int] | None] = {}
    arrivals = {EPOCH: worker_state_store.PartialState(), SINCE: worker_state_store.PartialState()}
    for to, reply in book.handle(who, WorkerStateRequest(who.index if index is None else index)):
        assert to == who and isinstance(reply, WorkerStatePart) and decode(*encode(reply)) == reply
        if not reply.parts:
            found[reply.number] = None
        elif (whole := arrivals[reply.number].take(reply, reply.body)) is not None:
            found[reply.number] = whole.tolist()
    return found


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(worker_state_store, "PART", 4)


def test_the_newest_whole_deposit_is_sent_to_its_worker():
    book = WorkerStateStore()
    assert told(book, ME) == {EPOCH: None, SINCE: None}
    leave(book, ME, EPOCH, blob(*range(10)))
    leave(book, OTHER, EPOCH, blob(7))
    leave(book, ME, SINCE, blob(1, 2))
    assert told(book, ME) == {EPOCH: list(range(10)), SINCE: [1, 2]}
    assert told(book, OTHER) == {EPOCH: [7], SINCE: None}
    assert told(book, Address(Role.WORKER, 0, 0), 1) == told(book, ME)  # another worker of the group
    assert told(book, OTHER, 1) == {EPOCH: None, SINCE: None}  # of its own group
    leave(book, ME, EPOCH, blob(*range(20, 32)), parts=2)  # it died meanwhile
    assert told(book, ME) == {EPOCH: list(range(10)), SINCE: [1, 2]}
    leave(book, ME, EPOCH, blob(*range(5)))
    assert told(book, ME) == {EPOCH: list(range(5)), SINCE: None}


def test_parts_of_different_deposits_are_never_put_together():
    book = WorkerStateStore()
    first, second = (worker_state_store.cut(ME, EPOCH, blob(*[n] * 8)) for n in (1, 2))
    for message in (first[0], second[1], second[0], first[1], second[1]):
        book.handle(ME, message)
    found = told(book, ME)[EPOCH]
    assert found is None or len(set(found)) == 2  # nothing tells them apart by themselves: transports keep the order
    longer = worker_state_store.cut(ME, EPOCH, blob(*[3] * 12))
    book = WorkerStateStore()
    for message in (first[0], longer[1], longer[2]):
        book.handle(ME, message)
    assert told(book, ME)[EPOCH] is None


def test_snapshots_are_kept_until_they_are_written_and_no_more_than_two():
    book = WorkerStateStore()
    for number in (1, 2, 3):
        leave(book, ME, number, blob(number))
    leave(book, OTHER, 3, blob(9))
    assert book.snapshot_states(1) == {}
    assert {who: body.tolist() for who, body in book.snapshot_states(3).items()} == {ME: [3], OTHER: [9]}
    book.forget_snapshots(2)
    assert book.snapshot_states(2) == {} and len(book.snapshot_states(3)) == 2
    book.forget_snapshots(3)
    assert book.snapshot_states(3) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"group": 1},
        {"nbytes": 0, "parts": 0},
        {"nbytes": worker_state_store.LARGEST + 1, "parts": 1 << 30},
        {"parts": 2},
        {"part": 1},
        {"part": -1},
        {"number": 0},
        {"number": -3},
    ],
)
def test_what_no_correct_worker_sends_is_refused(change):
    with pytest.raises(ProtocolError):
        WorkerStateStore().place(ME, replace(WorkerStatePart(0, 1, EPOCH, 0, 1, 3), **change), False)
    with pytest.raises(ProtocolError, match="without a body"):
        WorkerStateStore().handle(ME, WorkerStatePart(0, 1, EPOCH, 0, 1, 3))


def test_a_state_and_its_changes_wait_for_batches_of_earlier_passes() -> None:
    saved, counted = [], [3]
    client: Any = SimpleNamespace(save=lambda number, data: saved.append((number, int(data[0]))))
    accounting: Any = SimpleNamespace(first_uncounted=lambda epoch: min(epoch, counted[0]))
    states = PassStates(client, accounting)
    states.begin(3, blob(1))
    states.begin(4, blob(2))
    # In the store is the state of pass 3: rates of pass 4 would be one epoch ahead of it.
    states.change(4, blob(5))
    states.change(4, blob(6))
    assert saved == [(EPOCH, 1)] and states.holds
    counted[0] = 5
    states.save()
    assert saved[1:] == [(EPOCH, 2), (SINCE, 6)] and not states.holds
    states.change(5, blob(7))
    states.change(4, blob(8))
    assert saved[3:] == [(SINCE, 8)]


# --- where the new processes of a worker group begin, by the states that the former ones have saved ------------------


class SavedStates:
    """A worker whose group has saved states at the begin of these passes. None: a worker has saved none."""

    def __init__(self, *passes: int | None) -> None:
        self.blobs = [None if number is None else state_at(number) for number in passes]

    def load(self, index: int) -> tuple[torch.Tensor | None, None]:
        return self.blobs[index], None

    def load_group(self) -> list[torch.Tensor | None]:
        return self.blobs

    def applied(self, stream: int) -> int:
        return 0


def state_at(passes: int) -> torch.Tensor:
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
