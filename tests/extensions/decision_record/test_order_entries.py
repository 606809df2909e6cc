"""The bytes of a recording: what is written is read, and what is cut off or damaged is found."""

import random
import zlib
from dataclasses import replace

import pytest
import torch
from random_frames import every_message

from topotrain.config.job import Apply, ConfigError, Grads, Job
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.protocol.codec import encode
from topotrain.core.server.consistency import RESTARTS, SNAPSHOT
from topotrain.extensions.decision_record import ordered_messages, replay_order
from topotrain.extensions.decision_record.exchange_record import (
    ExchangeKind,
    RecordedExchanges,
    ReplayedExchanges,
    decode_choices,
)
from topotrain.extensions.decision_record.order_entries import (
    LOST,
    Arrival,
    Entry,
    EntryEncoder,
    ModelKnown,
    OwnMessage,
    StepMade,
    VersionShown,
    decode_entries,
)
from topotrain.extensions.decision_record.ordered_messages import MessageOrder, StepChecks
from topotrain.extensions.decision_record.recording_server import RecordingSink
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart
from topotrain.extensions.resume.worker_state_store import EPOCH

KINDS = (LOST, m.Commit.KIND, m.Fetch.KIND, m.StepVote.KIND, 158)


def some_entries(seed: int, count: int = 300) -> list[Entry]:
    rng = random.Random(seed)
    found: list[Entry] = []
    version = 0
    for _ in range(count):
        sender = Address(rng.choice((Role.WORKER, Role.SERVER)), rng.randrange(300), rng.randrange(3))
        match rng.randrange(6):
            case 0:
                version += rng.random() < 0.8
                found.append(StepMade(rng.randrange(200), version, rng.random() < 0.1))
            case 1:
                found.append(VersionShown(rng.randrange(200), max(0, version - rng.randrange(-1, 5))))
            case 2:
                found.append(OwnMessage(rng.choice(KINDS[1:]), rng.randbytes(rng.randrange(200))))
            case 3:
                found.append(ModelKnown(rng.randbytes(8)))
            case _:
                kind = rng.choice(KINDS)
                found.append(Arrival(sender, kind, rng.randbytes(2) if kind == m.Commit.KIND else b""))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_entries_come_back_and_of_a_recording_that_is_cut_off_those_before_the_cut(seed: int) -> None:
    entries, encoder = some_entries(seed, 40), EntryEncoder()
    parts = [encoder.encode(entry) for entry in entries]
    data = b"".join(parts)
    for cut in range(len(data) + 1):
        whole, length = 0, 0
        while whole < len(parts) and length + len(parts[whole]) <= cut:
            length += len(parts[whole])
            whole += 1
        assert list(decode_entries(data[:cut])) == entries[:whole]


@pytest.mark.parametrize("data", [b"\x07", b"\x08", b"\xff" * 12, b"\x00\x09\x00\x00\x0e"])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(decode_entries(data))


# --- the choices of a worker -----------------------------------------------------------------------------------------


class Bytes(RecordingSink):
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def test_a_worker_makes_the_recorded_choices_whatever_has_come_when() -> None:
    kept = Bytes()
    live = RecordedExchanges(kept)
    assert [live.pushes(1, False), live.pushes(1, True)] == [False, False], "one answer for each step"
    assert live.pushes(2, True) and live.fragment(2, 3) == 3
    assert not live.takes(2, False) and not live.pushes(3, False) and live.takes(3, True)
    assert live.copies(3) == 3
    assert live.fragment(300, 1) == 1
    assert list(decode_choices(kept.data)) == [
        (2, ExchangeKind.PUSH, 0),
        (2, ExchangeKind.FRAGMENT, 3),
        (3, ExchangeKind.TAKE, 0),
        (3, ExchangeKind.COPY, 0),
        (300, ExchangeKind.FRAGMENT, 1),
    ]

    again = ReplayedExchanges(kept.data, True, "worker 1/0")
    assert not again.pushes(1, True) and not again.takes(1, True)
    assert again.pushes(2, False) and again.pushes(2, False) and again.fragment(2, 0) == 3
    assert not again.takes(2, True) and not again.pushes(3, True) and again.takes(3, False)
    assert again.is_copied(3) and not again.is_copied(2) and again.copies(1) == 3
    with pytest.raises(ConfigError, match=r"step 4 of worker 1/0.*a choice behind step 300"):
        again.fragment(4, 0)


def test_choices_behind_the_end_of_a_process_that_has_died_are_its_own() -> None:
    dead = ReplayedExchanges(b"", False, "worker 1/0")
    assert dead.fragment(7, 2) == 2
    with pytest.raises(ConfigError, match="the end of its script"):
        ReplayedExchanges(b"", True, "worker 1/0").fragment(7, 2)


# --- the two bytes by which a replay sees that a script computes something else --------------------------------------

WORKER = Address(Role.WORKER, 1, 0)
COMMIT = m.Commit(3, 1, 6.0, 1.0, False, 0.0, 2.0, True, b"\x01", b"", b"", b"", (7, 0, 0))
GRADIENT = torch.linspace(-1, 1, 500)


def test_every_name_is_that_of_a_message() -> None:
    o = ordered_messages
    names = f"{o._END} {o._SNAPSHOTS} {o._TIMES} {o._COMPARED} {o._GRADIENTS} WorkerStatePart".split()
    known = {kind.__name__ for kind in every_message()}
    assert {*names, *o._START, *o._SUMMED, *o._ASIDE, *replay_order._WORDS} <= known


def push(bucket: int, body: torch.Tensor) -> m.Push:
    return m.Push(3, 1, bucket, 6.0, b"\x01", body=body)


def checks_of(*messages: m.Message, commit: m.Commit = COMMIT) -> bytes:
    checks = StepChecks()
    for message in messages:
        checks.add(WORKER, message)
    return checks.commit(WORKER, commit)


def test_fields_that_commits_have_had_since_change_no_check() -> None:
    """Recordings of earlier releases stay readable."""
    assert zlib.crc32(encode(COMMIT, ("ages", "resets", "digest"))[1]) == 3351706364
    assert checks_of(commit=replace(COMMIT, ages=(1,), resets=2, digest=3)) == checks_of(commit=COMMIT)


def test_a_state_for_a_snapshot_is_in_no_check() -> None:
    """A snapshot comes by the clock, so that its messages are at other places in a replay."""
    state = WorkerStatePart(1, 0, 4, 0, 1, 16, body=torch.ones(16, dtype=torch.uint8))
    assert checks_of(push(0, GRADIENT), state) == checks_of(push(0, GRADIENT))
    order = MessageOrder(Job())
    assert not order.has_order(WORKER, state)
    assert order.has_order(WORKER, WorkerStatePart(1, 0, EPOCH, 0, 1, 16))
    assert not order.has_order(WORKER, m.StepDecision(3, 0, 1, False, 0.0, SNAPSHOT))
    assert order.has_order(WORKER, m.StepDecision(3, 0, 1, False, 0.0, RESTARTS))


def test_gradients_have_an_order_only_where_they_are_applied_at_once() -> None:
    assert not MessageOrder(Job()).has_order(WORKER, push(0, GRADIENT))
    assert MessageOrder(Job(apply=Apply.kOnArrival, grads=Grads.kHidden)).has_order(WORKER, push(0, GRADIENT))
    assert MessageOrder(Job()).has_order(WORKER, COMMIT)


def test_only_between_servers_the_start_has_an_order() -> None:
    order, first = MessageOrder(Job()), m.Init(0, body=GRADIENT)
    assert not order.has_order(WORKER, first)
    assert order.has_order(Address(Role.SERVER, 0, 0), first)
