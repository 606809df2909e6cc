"""Who may say what, and that a word out of place costs its sender the connection and nobody anything else."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_frames import every_message
from single_servers import ServerHarness, server, started, worker

from tests.support.in_process_job import FailureObserver, PlainServerFactory
from topotrain.config.job import Algorithm, Cluster
from topotrain.config.topology import Address, layout
from topotrain.core import protocol as m
from topotrain.core.optim.adapter import HyperCheck, OptimizerSpec
from topotrain.core.protocol import MessageValidator, ProtocolError, check_bits
from topotrain.core.server.parameter_shard import to_power
from topotrain.core.server.server import Server
from topotrain.core.server.startup import _MAX_HELD
from topotrain.extensions.checkpointing.snapshot_messages import SnapshotRequest
from topotrain.extensions.collectives.collective_messages import CollectivePart
from topotrain.extensions.replication.state_machine import UNCOUNTED
from topotrain.extensions.tables.table_messages import TablePush
from topotrain.launch.multinode.reliable_messages import UnitPart
from topotrain.launch.runtime.process_host import HostOptions, ServerEndpoint
from topotrain.parallel.runtime.activation_messages import ActivationHello
from topotrain.training.data.data_messages import DrawnBatches, DrawRequest, Lease, LeaseRequest
from topotrain.training.data.lease_queue import LeaseQueue

COMMIT = m.Commit(0, 1, 1.0, 1.0, False, 0.0, 2.0, False, b"\xff", b"", b"", b"", ())


def manners(me: Address, **cluster: Any) -> MessageValidator:
    return MessageValidator(me, layout(Cluster(**cluster)))


def test_every_message_has_a_receiver() -> None:
    heard: set[type[m.Message]] = set()
    for cluster in (
        {"nworkers_per_group": 2, "nservers_per_group": 2},
        {"nworker_groups": 2, "nserver_groups": 2},
        {"nworkers_per_group": 2, "nservers_per_group": 2, "algorithm": Algorithm.kRing},
        {"nworkers_per_group": 2, "backup": 1},
    ):
        topology = layout(Cluster(**cluster))
        for unit in topology.units:
            for me in (*unit.workers, *unit.servers):
                validator = MessageValidator(me, topology)
                heard |= {kind for kind in every_message() if validator.senders(kind)}
    # The rest is between the copies of servers and their peers, or between units.
    assert heard | {*UNCOUNTED, UnitPart} == set(every_message())


TWO_GROUPS = {"nworker_groups": 2, "nserver_groups": 2, "nservers_per_group": 2}


@pytest.mark.parametrize(
    ("me", "sender", "message"),
    [
        (server(), worker(), m.StepDecision(0, 0, 0, False, 0.0)),
        (server(), worker(), m.StepVote(0, 0, True, 0.0, False, 0)),
        (server(), worker(), m.StepDecisionRequest(0)),
        (server(), worker(), m.Delta(0, 1)),
        (server(), worker(), m.Drained()),
        (server(), worker(), Lease(0, 0, 0, 0, 1)),
        (server(), worker(), SnapshotRequest()),
        (server(), worker(), CollectivePart(0, 0, 0, True, 1.0, 1, 1.0, b"", 0)),
        (server(), worker(1), m.Push(0, 0, 0, 1.0, b"\1")),  # of another server group
        (server(), worker(1), COMMIT),
        (server(), worker(5), LeaseRequest(0, 0, 3, 0, 0, False)),  # there is no such group
        (server(), worker(0, 7), m.Fetch(1)),
        (server(1), worker(1), LeaseRequest(0, 0, 3, 0, 0, False)),  # not the coordinator
        (server(), worker(1), DrawnBatches(0, 0, True, (), ())),
        (server(0, 1), worker(), m.GroupIdle(0, 0, True)),  # not the coordinator
        (server(1), worker(1), m.Init(0)),  # group 0's values are everybody's
        (server(), server(1), m.Push(0, 0, 0, 1.0, b"\1")),
        (server(), server(1, 1), m.Delta(0, 1)),  # another shard
        (server(), server(0, 1), m.StepDecision(0, 0, 0, False, 0.0)),  # only the coordinator decides
        (worker(), server(), m.Push(0, 0, 0, 1.0, b"\1")),
        (worker(), server(1), m.Values(0, 0, 0)),
        (worker(), server(0, 1), Lease(0, 0, 0, 0, 1)),
        (worker(), worker(1), ActivationHello()),
        (worker(), worker(), ActivationHello()),
    ],
)
def test_a_message_of_the_wrong_sender_is_refused(me: Address, sender: Address, message: m.Message) -> None:
    with pytest.raises(ProtocolError, match=f"{me} does not accept {type(message).__name__} from {sender}"):
        manners(me, **TWO_GROUPS).check(sender, message)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "message",
    [
        m.SchemaPart(-1, 1, "x"),
        m.SchemaPart(0, 1, "x" * (m.MAX_TEXT // 2)),
        *(m.Push(0, 0, 0, weight, b"\1") for weight in (NAN, INF, -INF, -1.0, 1e300)),
        m.Push(0, -1, 0, 1.0, b"\1"),
        m.BackwardEnd(0, 0, 1.0, b"\1", -1),
        *(replace(COMMIT, weight=weight) for weight in (NAN, INF, -1.0)),
        *(replace(COMMIT, inv_scale=scale) for scale in (NAN, INF, 0.0, -1.0)),
        *(replace(COMMIT, clip_norm=norm) for norm in (NAN, -1.0)),
        *(replace(COMMIT, clip_norm=1.0, clip_type=kind) for kind in (NAN, 0.0, -2.0)),
        *(replace(COMMIT, marks=marks) for marks in ((1,), (1, 2), (0, -1, 0), (0, 0, 1 << 62))),
        replace(COMMIT, step=-1),
        replace(COMMIT, backwards=-1),
        LeaseRequest(1 << 31, 0, 3, 0, 0, False),
        LeaseRequest(0, 0, 3, 0, 1, False),
        m.WorkerRejoined(1 << 31),
        m.StatePart(0, 0, 0, 0.0, "k" * 201),
        m.Fetch(-1),
        TablePush(-1, 0, 0, True, b""),
    ],
)
def test_numbers_that_cannot_be_are_refused(message: m.Message) -> None:
    with pytest.raises(ProtocolError, match="worker 0/0 sent a message with impossible numbers"):
        manners(server()).check(worker(), message)


@pytest.mark.parametrize(("bits", "count", "good"), [
    (b"", 9, True), (b"\xff\x01", 9, True), (b"\xff\x02", 9, False), (b"\xff", 9, False), (b"\xff\1\0", 9, False),
    (b"\xff", 8, True), (b"\0", 0, False),
])  # fmt: skip
def test_a_bitmap_has_a_bit_for_each_item_and_no_more(bits: bytes, count: int, good: bool) -> None:
    if good:
        check_bits(bits, count, worker(), "x")
        return
    with pytest.raises(ProtocolError, match="x: a bitmap of"):
        check_bits(bits, count, worker(), "x")


# --- what depends on the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        m.Push(0, 0, 0, 1.0, b"\xff\xff"),
        m.Push(0, 0, 99, 1.0, b"\1"),
        m.BackwardEnd(0, 0, 1.0, b"\xff" * 40),
        replace(COMMIT, revisions=b"\1" * 300),
        replace(COMMIT, edited=b"\xff" * 9),
        m.StatePart(0, 0, 77, 1.0, "step"),
        m.ModelBufferValue(1, 0),
        m.ModelBufferValue(0, 3),
        m.AppliedBatchesRequest(-2),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_training_goes_on(message: m.Message) -> None:
    harness = started(nworkers_per_group=2)
    with pytest.raises(ProtocolError):
        harness.servers[server()].handle(worker(), message)
    for who in harness.workers:
        harness.step(who, 1)
    assert harness.heard(worker(), m.Applied)


@pytest.mark.parametrize(
    ("join", "most", "message", "words"),
    [
        (True, 64, lambda n: m.Push(0, n, 0, 1.0, b"\1", body=torch.zeros(192)), "while 64 others are not over"),
        (True, 64, lambda n: m.Fetch(n), "asks on and on"),
        (False, _MAX_HELD, lambda n: m.Fetch(1), "sends too much before"),
    ],
    ids=["open backwards", "readers", "before the model"],
)
def test_what_a_server_keeps_for_a_worker_is_bounded(
    join: bool, most: int, message: Callable[[int], m.Message], words: str
) -> None:
    home = ServerHarness(nworkers_per_group=2, join=join).servers[server()]
    for number in range(most):
        home.handle(worker(), message(number))
    with pytest.raises(ProtocolError, match=words):
        home.handle(worker(), message(most))


@pytest.mark.parametrize(
    "text",
    ["null", "[", "[" * 5000, "[]", "[{}, {}]", '[{"lr": "x"}]', '[{"lr": NaN}]', '[{"lr": -1.0}]',
     '[{"lr": 0.1, "momentum": -1}]', '[{"params": 3}]', "\udcff"],
)  # fmt: skip
def test_settings_that_the_optimizer_refuses_are_told_to_the_group_before_anything_changes(text: str) -> None:
    harness = started(nworkers_per_group=1)
    home, before = harness.servers[server()], harness.servers[server()].state.version
    home.handle(worker(), replace(COMMIT, revisions=b"\xff", hyper=text.encode("utf-8", "surrogateescape")))
    out = home.handle(worker(), m.AppliedBatchesRequest(0))
    assert home.state.version == before and [type(reply) for _, reply in out] == [m.AppliedBatchesReply]


def test_settings_of_one_kind_are_taken() -> None:
    spec = OptimizerSpec(
        "torch.optim.Adam", ({"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "amsgrad": False},), (0,)
    )
    check = HyperCheck(spec)
    for change in (
        {"lr": 5},
        {"lr": 0.0, "betas": [0.0, 0.5]},
        {"foreach": True},
        {"initial_lr": 3.0},
        {"amsgrad": True},
    ):
        check.check(json.dumps([{"lr": 0.1, **change}]).encode())


def test_a_norm_beyond_all_numbers_is_infinite_and_no_error() -> None:
    assert to_power(1e300, 2.0) == INF and to_power(INF, 0.5) == INF and to_power(3.0, 2.0) == 9.0


# --- whose fault it is -------------------------------------------------------------------------------------------


def test_a_wrong_message_that_was_held_is_reported_to_its_sender() -> None:
    harness = ServerHarness(nworkers_per_group=2, join=False)
    home = harness.servers[server()]
    assert home.handle(worker(0, 1), m.Push(0, 0, 99, 1.0, b"\1")) == []  # who knows yet which buckets there are
    out = [reply for part in harness.schema.parts() for reply in home.handle(worker(), part)]
    (fail,) = [(to, reply.text) for to, reply in out if isinstance(reply, m.Fail)]
    assert fail[0] == worker(0, 1) and "bucket 99 is not mine" in fail[1]


class DroppingTransports:
    """Every message is dropped."""

    def send(self, *_: object, **__: object) -> None:
        """As if it were sent."""


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrong_message_is_no_failure_and_a_fault_of_ours_is(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, troubles = ServerHarness(join=False), []
    resident = ServerEndpoint(
        server(),
        PlainServerFactory(harness.job, harness.topology),
        DroppingTransports(),  # type: ignore[arg-type]
        threading.Event(),
        HostOptions(FailureObserver(lambda: troubles.append(1))),
    )
    if broken:
        monkeypatch.setattr(Server, "_receive", lambda *_: {}[3])
        with pytest.raises(KeyError):
            resident.handle(worker(), m.Fetch(1))
        assert troubles
        return
    for sender, message in ((worker(), m.SchemaPart(0, 1, "[[[")), (worker(9), m.Fetch(1)), (worker(), m.Drained())):
        with pytest.raises(ProtocolError):
            resident.handle(sender, message)
    assert not troubles and resident.workers == {worker()}


# --- floods ------------------------------------------------------------------------------------------------------


def test_floods_at_the_desk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topotrain.training.data.lease_queue._MOST_EPOCHS", 10)
    monkeypatch.setattr("topotrain.training.data.drawn_chunks._MOST_CHUNKS", 10)
    monkeypatch.setattr("topotrain.training.data.drawn_chunks._MOST_DRAWN", 100)
    book = LeaseQueue(2)
    for number in range(10):
        book.handle(worker(), LeaseRequest(number, 0, 3, 0, 0, False))
        book.handle(worker(1), DrawRequest(number, 0))
    with pytest.raises(ProtocolError, match="while 10 others are not over"):
        book.handle(worker(), LeaseRequest(10, 0, 3, 0, 0, False))
    with pytest.raises(ProtocolError, match="while 10 others wait"):
        book.handle(worker(1), DrawRequest(10, 0))
    with pytest.raises(ProtocolError, match="were drawn that some worker has not fetched"):
        LeaseQueue(2).handle(worker(), DrawnBatches(0, 0, False, (), tuple(range(101))))


def test_a_request_sent_twice_is_held_once() -> None:
    book = LeaseQueue(2)
    book.handle(worker(), LeaseRequest(0, 0, 1, 0, 0, True))
    for _ in range(5):
        assert book.handle(worker(1), LeaseRequest(0, 0, 1, 0, 0, True)) == []
    assert len(book._epochs[0].held) == 1
