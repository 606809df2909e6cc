"""The two bytes by which a replay sees that a script computes something else."""

import zlib
from dataclasses import replace

import torch
from every_message import every_message

from topotrain.config.job import Apply, Grads, Job
from topotrain.config.topology import Address, Role
from topotrain.core import protocol as m
from topotrain.core.protocol.codec import encode
from topotrain.core.server.consistency import RESTARTS, SNAPSHOT
from topotrain.extensions.decision_record import ordered_messages, replay_order
from topotrain.extensions.decision_record.ordered_messages import MessageOrder, StepChecks
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart
from topotrain.extensions.resume.worker_state_store import EPOCH

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


def test_equal_gradients_have_equal_checks_in_any_order_of_buckets() -> None:
    first, second = push(0, GRADIENT), push(1, 2 * GRADIENT)
    assert checks_of(first, second) == checks_of(second, first) == checks_of(first, push(1, 2 * GRADIENT))


def test_another_gradient_has_another_check() -> None:
    found = {checks_of(push(0, GRADIENT * (1 + n * 1e-6))) for n in range(20)}
    assert len(found) > 15
    assert len({check[:1] for check in found}) == 1, "the commit is the same"


def test_another_batch_has_another_check() -> None:
    other = m.Commit(3, 1, 6.0, 1.0, False, 0.0, 2.0, True, b"\x01", b"", b"", b"", (7, 1, 1))
    assert checks_of(commit=COMMIT)[0] != checks_of(commit=other)[0]


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
