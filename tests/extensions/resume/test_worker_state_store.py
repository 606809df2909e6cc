"""What workers leave at server (0,0): whole or not at all, the newest, and never without bounds."""

from dataclasses import replace

import pytest
import torch

from topotrain.config.topology import Address, Role
from topotrain.core.protocol import ProtocolError, decode, encode
from topotrain.extensions.resume import worker_state_store
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
