"""A component that is made from the state of another behaves like it, whatever happened before and comes after."""

from collections.abc import Callable
from dataclasses import dataclass
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

Event = Callable[[Any], Any]


def worker(index: int, group: int = 0) -> Address:
    return Address(Role.WORKER, group, index)


@dataclass(frozen=True)
class Case:
    """A component, how a new one is made, and a random event: a call that may return something, or raise."""

    make: Callable[[], Any]
    event: Callable[[Random], Event]


def clocks(rng: Random) -> Event:
    group = rng.randrange(3)
    return rng.choice(
        [
            lambda c: c.tick(group),
            lambda c: c.leave(group),
            lambda c: c.join(group),
            lambda c: [(c.clock(g), c.lead(g), c.may_start(g), c.may_decide(g)) for g in range(3)],
        ]
    )


def decisions(rng: Random) -> Event:
    group, step, shard = rng.randrange(2), rng.randrange(3), rng.randrange(2)
    refused = (rng.randrange(3), rng.randrange(4)) if rng.random() < 0.3 else ()
    members = tuple(sorted(rng.sample(range(3), 2))) if rng.random() < 0.4 else ()
    vote = m.StepVote(
        group, step, rng.random() < 0.8, 1.5, False, rng.randrange(4), 0, refused, members, rng.randbytes(2)
    )

    def decide(log: DecisionLog) -> list[m.StepDecision]:
        return [log.decide(*ready) for ready in log.ready()]

    return rng.choice(
        [
            *[lambda log: log.staged(shard, vote)] * 4,
            decide,
            lambda log: log.since(0),
            lambda log: log.restart(group, rng.randrange(2)),
            lambda log: log.replace(group, shard, step),
            lambda log: log.undecided,
        ]
    )


def order(rng: Random) -> Event:
    decision = m.StepDecision(rng.randrange(12), 0, 0, False, 0.0)
    return lambda each: each.arrive(decision)


def exits(rng: Random) -> Event:
    who, count, place = rng.randrange(2), rng.randrange(4), (rng.randrange(6), float(rng.randrange(2)))
    return rng.choice([lambda each: each.left(who, count, place), lambda each: each.works(who, count, place)])


def batches(rng: Random) -> Event:
    stream = rng.randrange(3) << 32 | (STATIC if rng.random() < 0.5 else 0) | rng.randrange(2)
    marks, group = (stream, rng.randrange(4), rng.randrange(4)), rng.randrange(2)

    def record(each: AppliedBatches) -> str:
        verdict = each.verdict(marks, group)
        if verdict == "new":
            each.record(marks, group)
        return verdict

    return rng.choice([*[record] * 4, lambda each: each.close(rng.randrange(3)), lambda each: each.counts()])


def listed_batches() -> AppliedBatches:
    made = AppliedBatches()
    made.keep_until_closed()
    return made


def nonfinite(rng: Random) -> Event:
    group, refused = rng.randrange(2), rng.sample(range(3), rng.randrange(3))
    return rng.choice([*[lambda each: each.step(group, refused)] * 5, lambda each: each.forget(group)])


BUCKETS = (Bucket(0, 0, 0, 0, 4, 0, ()), Bucket(1, 0, 0, 4, 8, 1, ()))


class Synced:
    """One side of group synchronization with values of its own, which its state has, too."""

    def __init__(self, ring: bool) -> None:
        self.values = torch.arange(8.0)
        view = SimpleNamespace(buckets=BUCKETS, values=lambda number: self.values[4 * number : 4 * number + 4])
        arguments: tuple[Any, int] = (view, 2)
        self.sync = RingSync(0, 3, *arguments) if ring else MasterSync(0, *arguments)
        self.sync.begin()

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "sync": self.sync.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.sync.load_state_dict(state["sync"])


def synced(rng: Random) -> Event:
    number, sync = rng.randrange(2), rng.randrange(1, 4)
    kind = rng.choice([m.Delta, m.MasterValue, m.PairOffer, m.PairReply])
    message, body = kind(number, sync), torch.full((4,), float(rng.randrange(5)))

    def update(each: Synced) -> Any:
        each.values += 1
        return each.sync.updated([number])

    return rng.choice(
        [
            *[update] * 4,
            lambda each: each.sync.meet(1, message, body),
            lambda each: each.values.tolist(),
            lambda each: (each.sync.distance, each.sync.drained(), each.sync.taken(1, number)),
        ]
    )


def members(rng: Random) -> Event:
    group, number, who = rng.randrange(2), rng.randrange(3), worker(rng.randrange(2), rng.randrange(2))
    return rng.choice(
        [
            lambda each: each.expect(group, number),
            lambda each: each.join(who, number),
            lambda each: each.restart(group, number),
            lambda each: (each.is_current(who), each.is_newest(who), each.newest(group), each.incarnation(group)),
            lambda each: (each.pending(), each.is_empty(group, number), each.changed),
        ]
    )


def answers(rng: Random) -> Event:
    part = AppliedBatchesOfStreams(rng.randrange(2), rng.randrange(2), rng.randrange(2), 2, (rng.randrange(9), 3))
    return lambda each: each.add(part)


def position(rng: Random) -> Event:
    epoch, lease = rng.randrange(3), rng.randrange(3)
    return rng.choice(
        [
            *[lambda each: each.add_lease(epoch, lease, 4 * lease)] * 3,
            lambda each: each.close(epoch),
            lambda each: each.applied({epoch << 32 | lease: 2, epoch << 32 | STATIC: 3}),
        ]
    )


def texts(rng: Random) -> Event:
    part, number = rng.randrange(2), rng.randrange(2)
    message = SnapshotPart(number, 0, part, 2, ('{"a":', "1}")[part])
    return lambda each: each.add(Address(Role.SERVER, 0, rng.randrange(1, 2)), message)


def made_assignments(rng: Random) -> Event:
    stream = rng.choice((-2, -1, 5, 6))
    head = Assignment(0, 0, stream, 0 if stream < 0 else rng.randrange(2), rng.randrange(3), False, False)
    return lambda each: each.make(head)


def leases(rng: Random) -> Event:
    who, epoch, ordinal = worker(rng.randrange(2), rng.randrange(2)), rng.randrange(2), rng.randrange(4)
    drawn = DrawnBatches(epoch, ordinal, False, (1,), (ordinal,))
    return rng.choice(
        [
            *[lambda q: q.handle(who, LeaseRequest(epoch, ordinal, 40, 7, 0, rng.random() < 0.5))] * 4,
            lambda q: q.handle(who, LeaseRelease(epoch, ordinal, 3)),
            lambda q: q.handle(worker(0), drawn),
            lambda q: q.handle(who, DrawRequest(epoch, ordinal)),
            lambda q: q.handle(who, PassBegun(epoch, 0, 5, content=1 + ordinal)),
            lambda q: q.group_leaves(who.group),
            lambda q: q.group_over(who.group),
            lambda q: q.group_returns(who.group),
            lambda q: q.group_restarted(who.group, dict.fromkeys(q.streams(who.group), 1), False),
            lambda q: (q.streams(0), q.refuses_leave(), q.open_epochs, q.kept_chunks),
        ]
    )


def left_states(rng: Random) -> Event:
    who, number = worker(rng.randrange(2)), rng.choice([EPOCH, SINCE, 1, 2])
    body = torch.full((5,), rng.randrange(9), dtype=torch.uint8)
    part = WorkerStatePart(0, who.index, number, rng.randrange(2), rng.randrange(1, 3), 5, body=body)
    return rng.choice(
        [
            *[lambda each: each.handle(who, part)] * 3,
            lambda each: each.handle(who, WorkerStateRequest(rng.randrange(2))),
            lambda each: (each.snapshot_states(1), each.epoch_states()),
            lambda each: each.forget_snapshots(1),
        ]
    )


TWO_BY_TWO = layout(Cluster(nworker_groups=2, nworkers_per_group=2, server_worker_separate=True))


def called_values(rng: Random) -> Event:
    who, number, job = worker(rng.randrange(2), rng.randrange(2)), rng.choice([-1, 0, 0, 1]), rng.random() < 0.5
    body = torch.full((1,), rng.randrange(9), dtype=torch.uint8)
    place = () if number < 0 else (1, 2, 3, 4)
    value = WorkerValue(*who[1:], job, number, 0, 1, rng.choice("aaab"), place, body=rng.choice([body, None]))
    return rng.choice(
        [
            *[lambda each: each.handle(who, value)] * 5,
            lambda each: each.handle(who, PassedCall(job, max(0, number), 4, rng.random() < 0.2)),
            lambda each: each.group_over(who.group),
            lambda each: each.group_returns(who.group),
        ]
    )


CASES = {
    "clocks": Case(lambda: Clocks(range(3), 1), clocks),
    "decision log": Case(lambda: DecisionLog(2), decisions),
    "apply order": Case(ApplyOrder, order),
    "loop exits": Case(lambda: LoopExits(2), exits),
    "applied batches": Case(listed_batches, batches),
    "nonfinite limit": Case(lambda: NonfiniteLimit(NonFinite.kSkip), nonfinite),
    "master sync": Case(lambda: Synced(ring=False), synced),
    "ring sync": Case(lambda: Synced(ring=True), synced),
    "members": Case(lambda: Members(range(2)), members),
    "coordinator answers": Case(CoordinatorAnswers, answers),
    "made assignments": Case(MadeAssignments, made_assignments),
    "data position": Case(lambda: DataPosition(2, 1, {0: ((0, 2),)}), position),
    "text parts": Case(TextParts, texts),
    "lease queue": Case(lambda: LeaseQueue(2, 2, singly=True), leases),
    "worker states": Case(WorkerStateStore, left_states),
    "worker values": Case(lambda: ValueServer(SimpleNamespace(), TWO_BY_TWO), called_values),
}


def outcome(component: Any, event: Event) -> Any:
    try:
        return event(component)
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
    case, rng = CASES[name], Random(seed)
    first, reference = case.make(), case.make()  # of the same constructor and the same events
    for _ in range(before):
        event_seed = rng.random()
        for each in (first, reference):
            outcome(each, case.event(Random(event_seed)))
    copy = copied(first, case.make)
    assert plain(copy.state_dict()) == plain(reference.state_dict())
    for _ in range(20):
        event_seed = rng.random()
        said = [plain(outcome(each, case.event(Random(event_seed)))) for each in (copy, reference)]
        assert said[0] == said[1]
    assert plain(copy.state_dict()) == plain(reference.state_dict())
