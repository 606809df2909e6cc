"""A component that is made from the state of another behaves like it, whatever happened before and comes after."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from topotrain.config.job import Cluster, NonFinite
from topotrain.config.sharding import Bucket
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.server.component_state import Component
from topotrain.core.server.consistency import STATIC, AppliedBatches, ApplyOrder, Clocks, DecisionLog, LoopExits
from topotrain.core.server.gradients.gradient_source import StepError
from topotrain.core.server.group_sync import MasterSync, RingSync
from topotrain.core.server.nonfinite import NonfiniteLimit
from topotrain.extensions.assignment.assignment_messages import Assignment
from topotrain.extensions.assignment.assignment_server import MadeAssignments
from topotrain.extensions.checkpointing.data_position import DataPosition
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotPart, TextParts
from topotrain.extensions.elastic.membership import CoordinatorAnswers, Members
from topotrain.extensions.elastic.membership_messages import AppliedBatchesOfStreams
from topotrain.extensions.replication.state_codec import StateReader, StateWriter
from topotrain.extensions.resume.worker_state_messages import WorkerStatePart, WorkerStateRequest
from topotrain.extensions.resume.worker_state_store import EPOCH, SINCE, WorkerStateStore
from topotrain.extensions.worker_values.value_messages import PassedCall, WorkerValue
from topotrain.extensions.worker_values.value_server import ValueServer
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest, LeaseRelease, LeaseRequest, PassBegun
from topotrain.training.data.lease_queue import LeaseQueue

Call = Callable[[Any, Random], Any]
"""Something that happens to a component: it may return something, or raise. Random numbers come from the second one."""

TWO_BY_TWO = layout(Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True))


def worker(index: int, group: int = 0) -> Address:
    return Address(Role.WORKER, group, index)


def any_worker(r: Random) -> Address:
    return worker(r.randrange(2), r.randrange(2))


def full(size: int, r: Random) -> torch.Tensor:
    return torch.full((size,), r.randrange(9), dtype=torch.uint8)


def listed_batches() -> AppliedBatches:
    made = AppliedBatches()
    made.keep_until_closed()
    return made


def vote(log: DecisionLog, r: Random) -> None:
    refused = (r.randrange(3), r.randrange(4)) if r.random() < 0.3 else ()
    members = tuple(sorted(r.sample(range(3), 2))) if r.random() < 0.4 else ()
    finite, applied = r.random() < 0.8, r.randrange(4)
    log.staged(
        r.randrange(2),
        m.StepVote(r.randrange(2), r.randrange(3), finite, 1.5, False, applied, 0, refused, members, r.randbytes(2)),
    )


def record(each: AppliedBatches, r: Random) -> str:
    stream = r.randrange(3) << 32 | (STATIC if r.random() < 0.5 else 0) | r.randrange(2)
    marks, group = (stream, r.randrange(4), r.randrange(4)), r.randrange(2)
    verdict = each.verdict(marks, group)
    if verdict == "new":
        each.record(marks, group)
    return verdict


BUCKETS = (Bucket(0, 0, 0, 0, 4, 0, ()), Bucket(1, 0, 0, 4, 8, 1, ()))


class Synced:
    """One side of group synchronization with values of its own, which its state has, too."""

    def __init__(self, ring: bool) -> None:
        self.values = torch.arange(8.0)
        view = SimpleNamespace(buckets=BUCKETS, values=lambda number: self.values[4 * number : 4 * number + 4])
        arguments: tuple[Any, int] = (view, 2)
        self.sync = RingSync(0, 3, *arguments) if ring else MasterSync(0, *arguments)
        self.sync.begin()

    def update(self, number: int) -> Any:
        self.values += 1
        return self.sync.updated([number])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "sync": self.sync.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.sync.load_state_dict(state["sync"])


def met(each: Synced, r: Random) -> Any:
    kind = r.choice([m.Delta, m.MasterValue, m.PairOffer, m.PairReply])
    return each.sync.meet(1, kind(r.randrange(2), r.randrange(1, 4)), torch.full((4,), float(r.randrange(5))))


SYNCED: Sequence[Call] = (
    *[lambda each, r: each.update(r.randrange(2))] * 4,
    met,
    lambda each, r: each.values.tolist(),
    lambda each, r: (each.sync.distance, each.sync.drained(), each.sync.taken(1, r.randrange(2))),
)


def assigned(each: MadeAssignments, r: Random) -> bool:
    stream = r.choice((-2, -1, 5, 6))
    return each.make(Assignment(0, 0, stream, 0 if stream < 0 else r.randrange(2), r.randrange(3), False, False))


def left_state(each: WorkerStateStore, r: Random) -> Any:
    who, number = worker(r.randrange(2)), r.choice([EPOCH, SINCE, 1, 2])
    part = WorkerStatePart(0, who.index, number, r.randrange(2), r.randrange(1, 3), 5, body=full(5, r))
    return each.handle(who, part)


def called(each: ValueServer, r: Random) -> Any:
    who, number, job, body = any_worker(r), r.choice([-1, 0, 0, 1]), r.random() < 0.5, full(1, r)
    place = () if number < 0 else (1, 2, 3, 4)
    value = WorkerValue(*who[1:], job, number, 0, 1, r.choice("aaab"), place, body=r.choice([body, None]))
    return each.handle(who, value)


CASES: Mapping[str, tuple[Callable[[], Any], Sequence[Call]]] = {
    "clocks": (
        lambda: Clocks(range(3), 1),
        (
            lambda c, r: c.tick(r.randrange(3)),
            lambda c, r: c.leave(r.randrange(3)),
            lambda c, r: c.join(r.randrange(3)),
            lambda c, r: [(c.clock(g), c.lead(g), c.may_start(g), c.may_decide(g)) for g in range(3)],
        ),
    ),
    "decision log": (
        lambda: DecisionLog(2),
        (
            *[vote] * 4,
            lambda log, r: [log.decide(*ready) for ready in log.ready()],
            lambda log, r: log.since(0),
            lambda log, r: log.restart(r.randrange(2), r.randrange(2)),
            lambda log, r: log.replace(r.randrange(2), r.randrange(2), r.randrange(3)),
            lambda log, r: log.undecided,
        ),
    ),
    "apply order": (
        ApplyOrder,
        (lambda each, r: each.arrive(m.StepDecision(r.randrange(12), 0, 0, False, 0.0)),),
    ),
    "loop exits": (
        lambda: LoopExits(2),
        (
            lambda each, r: each.left(r.randrange(2), r.randrange(4), (r.randrange(6), float(r.randrange(2)))),
            lambda each, r: each.works(r.randrange(2), r.randrange(4), (r.randrange(6), float(r.randrange(2)))),
        ),
    ),
    "applied batches": (
        listed_batches,
        (*[record] * 4, lambda each, r: each.close(r.randrange(3)), lambda each, r: each.counts()),
    ),
    "nonfinite limit": (
        lambda: NonfiniteLimit(NonFinite.kSkip),
        (
            *[lambda each, r: each.step(r.randrange(2), r.sample(range(3), r.randrange(3)))] * 5,
            lambda each, r: each.forget(r.randrange(2)),
        ),
    ),
    "master sync": (lambda: Synced(ring=False), SYNCED),
    "ring sync": (lambda: Synced(ring=True), SYNCED),
    "members": (
        lambda: Members(range(2)),
        (
            lambda each, r: each.expect(r.randrange(2), r.randrange(3)),
            lambda each, r: each.join(any_worker(r), r.randrange(3)),
            lambda each, r: each.restart(r.randrange(2), r.randrange(3)),
            lambda each, r: [(each.is_current(w), each.is_newest(w)) for g in (0, 1) for w in TWO_BY_TWO.workers(g)],
            lambda each, r: [(each.newest(g), each.incarnation(g), each.is_empty(g, r.randrange(3))) for g in (0, 1)],
            lambda each, r: (each.pending(), each.changed),
        ),
    ),
    "coordinator answers": (
        CoordinatorAnswers,
        (
            lambda each, r: each.add(
                AppliedBatchesOfStreams(r.randrange(2), r.randrange(2), r.randrange(2), 2, (r.randrange(9), 3))
            ),
        ),
    ),
    "made assignments": (MadeAssignments, (assigned,)),
    "data position": (
        lambda: DataPosition(2, 1, {0: ((0, 2),)}),
        (
            *[lambda each, r: each.add_lease(r.randrange(3), lease := r.randrange(3), 4 * lease)] * 3,
            lambda each, r: each.close(r.randrange(3)),
            lambda each, r: each.applied({r.randrange(3) << 32 | r.randrange(3): 2, r.randrange(3) << 32 | STATIC: 3}),
        ),
    ),
    "text parts": (
        TextParts,
        (
            lambda each, r: each.add(
                Address(Role.SERVER, 0, 1),
                SnapshotPart(r.randrange(2), 0, part := r.randrange(2), 2, ('{"a":', "1}")[part]),
            ),
        ),
    ),
    "lease queue": (
        lambda: LeaseQueue(2, 2, singly=True),
        (
            *[
                lambda q, r: q.handle(
                    any_worker(r), LeaseRequest(r.randrange(2), r.randrange(4), 40, 7, 0, r.random() < 0.5)
                )
            ]
            * 4,
            lambda q, r: q.handle(any_worker(r), LeaseRelease(r.randrange(2), r.randrange(4), 3)),
            lambda q, r: q.handle(
                worker(0), DrawnBatches(r.randrange(2), chunk := r.randrange(4), False, (1,), (chunk,))
            ),
            lambda q, r: q.handle(any_worker(r), DrawRequest(r.randrange(2), r.randrange(4))),
            lambda q, r: q.handle(any_worker(r), PassBegun(r.randrange(2), 0, 5, content=1 + r.randrange(4))),
            lambda q, r: q.group_leaves(r.randrange(2)),
            lambda q, r: q.group_over(r.randrange(2)),
            lambda q, r: q.group_returns(r.randrange(2)),
            lambda q, r: q.group_restarted(g := r.randrange(2), dict.fromkeys(q.streams(g), 1), False),
            lambda q, r: (q.streams(0), q.refuses_leave(), q.open_epochs, q.kept_chunks),
        ),
    ),
    "worker states": (
        WorkerStateStore,
        (
            *[left_state] * 3,
            lambda each, r: each.handle(worker(r.randrange(2)), WorkerStateRequest(r.randrange(2))),
            lambda each, r: (each.snapshot_states(1), each.epoch_states()),
            lambda each, r: each.forget_snapshots(1),
        ),
    ),
    "worker values": (
        lambda: ValueServer(SimpleNamespace(), TWO_BY_TWO),  # type: ignore[arg-type]
        (
            *[called] * 5,
            lambda each, r: each.handle(
                any_worker(r), PassedCall(r.random() < 0.5, r.randrange(2), 4, r.random() < 0.2)
            ),
            lambda each, r: each.group_over(r.randrange(2)),
            lambda each, r: each.group_returns(r.randrange(2)),
        ),
    ),
}


def outcome(component: Any, calls: Sequence[Call], seed: float) -> Any:
    """What the call of a seed returns, or how it fails."""
    r = Random(seed)
    try:
        return r.choice(calls)(component, r)
    except (m.ProtocolError, StepError, ValueError) as error:
        return repr(error)


def plain(value: Any) -> Any:
    """For comparison: messages with their bodies, and tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, m.Message):
        return m.encode(value), plain(value.body)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, Address):
        return [plain(item) for item in value]
    return value


def copied(component: Component, make: Callable[[], Any]) -> Any:
    """A new component with the state of another, by the bytes in which a server is transferred."""
    writer = StateWriter(None)
    reader = StateReader(writer.bytes(state=writer.write(component.state_dict())))
    copy = make()
    copy.load_state_dict(reader.read(reader.trees["state"]))
    return copy


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 1 << 32), before=st.integers(0, 40))
@settings(max_examples=examples(40))
def test_a_copy_goes_on_as_its_original(name: str, seed: int, before: int) -> None:
    (make, calls), rng = CASES[name], Random(seed)
    first, reference = make(), make()  # of the same constructor and the same calls
    for event in [rng.random() for _ in range(before)]:
        for each in (first, reference):
            outcome(each, calls, event)
    copy = copied(first, make)
    assert plain(copy.state_dict()) == plain(reference.state_dict())
    for event in [rng.random() for _ in range(20)]:
        assert plain(outcome(copy, calls, event)) == plain(outcome(reference, calls, event))
    assert plain(copy.state_dict()) == plain(reference.state_dict())
