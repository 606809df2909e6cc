"""Sums of a group without a server: any order of arrival, messages that no worker sends, and the loss of a worker."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_process_job import cross_entropy, mlp, run_local, vectors
from island_jobs import building, job
from reports import FunctionSender

from topotrain.config.job import Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core.client.client import Client, PeerLost
from topotrain.core.model.body_codec import BodyCodec
from topotrain.core.model.schema import FlatBuffers, PrivateMemory, slice_map_for
from topotrain.core.protocol import Message, ProtocolError
from topotrain.extensions.outer_optimizer.groups.group_messages import (
    PeerBackwardEnd,
    PeerGradient,
    PeerMean,
)
from topotrain.extensions.outer_optimizer.groups.group_reduction import GroupReduction, PeerChannel
from topotrain.extensions.outer_optimizer.round_client import RoundClient
from topotrain.extensions.outer_optimizer.round_messages import OWN_TURN
from topotrain.launch.runtime.process_host import ConditionWaiter
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker_stats import StepBatches

WORKERS = 3


class OneWorker:
    """A worker of the group, and what the others have sent it."""

    def __init__(self, wanted: Job, index: int, group: "Group") -> None:
        topology = layout(wanted.cluster)
        self.me = Address(Role.WORKER, 0, index)
        self.client = Client(self.me, topology, FunctionSender(group.never), ConditionWaiter(0.05))
        self.map = slice_map_for(describe_model(mlp()).parameters, topology)
        self.flats = FlatBuffers(self.map, None, PrivateMemory())
        self.client.model.open(self.map, self.flats, BodyCodec())
        self.batches = StepBatches()
        self.client.attach(RoundClient(1))
        self.reduction = GroupReduction(self.me, wanted, topology)
        self.reduction.open(self.map, self.flats, self.batches)

        def send(to: Address, message: Message) -> None:
            group.queues[self.me.index, to.index].append(message)

        self.peers = PeerChannel(self.client, FunctionSender(send), self.reduction)

    def take(self, sender: Address, message: Message) -> None:
        """As a transport that shows no memory."""
        if message.body is not None:
            place = self.client.place(sender, message, False)
            assert place is not None and place.data_ptr() != message.body.data_ptr()
            message = replace(message, body=place.copy_(message.body))
        self.client.handle(sender, message)


class Group:
    """Workers whose messages wait in a queue for each pair."""

    def __init__(self) -> None:
        wanted = job(1, nworkers_per_group=WORKERS, nservers_per_group=4)
        pairs = [(a, b) for a in range(WORKERS) for b in range(WORKERS) if a != b]
        self.queues: dict[tuple[int, int], deque[Message]] = {pair: deque() for pair in pairs}
        self.workers = [OneWorker(wanted, index, self) for index in range(WORKERS)]

    @staticmethod
    def never(to: Address, message: Message) -> None:
        raise AssertionError(f"{message} to {to}: no server takes part")

    def deliver(self, pair: tuple[int, int]) -> None:
        self.workers[pair[1]].take(self.workers[pair[0]].me, self.queues[pair].popleft())

    @property
    def waiting(self) -> list[tuple[int, int]]:
        return [pair for pair, queue in self.queues.items() if queue]


def push(worker: OneWorker, step: int) -> None:
    """A backward with a gradient of each parameter."""
    pushed = 0
    for bucket in reversed(worker.map.buckets):
        body = worker.flats.view("local", bucket).zero_()
        worker.reduction.push(step, 0, bucket, 4.0, (1 << len(bucket.pieces)) - 1, body)
        pushed |= 1 << bucket.id
    worker.reduction.end_backward(step, 0, 4.0, pushed)


def test_messages_that_no_worker_sends_are_refused() -> None:
    group = Group()
    first, second = group.workers[:2]
    pieces = {bucket.id: len(bucket.pieces) for bucket in first.map.buckets}
    mine = next(number for number, adder in enumerate(first.reduction._adder) if adder == 0)
    theirs = next(number for number, adder in enumerate(first.reduction._adder) if adder == 1)
    bits = bytes([1]) * ((pieces[mine] + 7) // 8)
    body = torch.zeros(first.map.buckets[mine].hi - first.map.buckets[mine].lo)
    end = PeerBackwardEnd(0, 0, 1.0, b"", 0, True, OWN_TURN, 1)
    for wrong, words in (
        (PeerGradient(0, theirs, 1.0, bits, body=body), "which worker 0 does not add up"),
        (PeerGradient(0, 999, 1.0, bits, body=body), "which worker 0 does not add up"),
        (PeerGradient(2, mine, 1.0, bits, body=body), "is in backward 2, the group in 0"),
        (PeerGradient(0, mine, 1.0, bits * 9, body=body), "a bitmap of"),
        (PeerGradient(0, mine, 1.0, bits), "without a body"),
        (PeerGradient(0, mine, 1.0, bits, body=body[1:]), "bytes, expected"),
        (PeerMean(0, mine, bits, body=body), "which worker 1 does not add up"),
        (PeerMean(1, theirs, bits, body=body), "sends a mean of backward 1, not of 0"),
        (replace(end, backward=2), "ends backward 2, the group is in 0"),
        (replace(end, pushed=bytes(99)), "a bitmap of"),
        (replace(end, weight=-1.0), "impossible numbers"),
    ):
        with pytest.raises(ProtocolError, match=words):
            first.client.handle(second.me, wrong)

    # What a worker may send early is bounded.
    def send_early() -> None:
        for _ in range(WORKERS * (len(first.map.buckets) + 1) + 1):
            first.client.handle(second.me, PeerGradient(1, mine, 1.0, bits, body=body))

    with pytest.raises(ProtocolError):
        send_early()


def test_a_worker_that_is_lost_is_no_trouble_while_nothing_more_is_needed_of_it() -> None:
    group = Group()
    for worker in group.workers:
        push(worker, 0)
    while group.waiting:
        group.deliver(group.waiting[0])
    first, second, _ = group.workers
    first.client.lost(second.me, "it has ended")
    first.reduction.wait_means()
    push(first, 1)
    with pytest.raises(PeerLost, match="worker 0/0 lost worker 0/1: it has ended"):
        first.reduction.wait_means()


def test_the_failure_of_a_worker_ends_the_others() -> None:
    batches, errors = vectors(8), {}

    def run(t: Any) -> None:
        for number, batch in enumerate(batches):
            if t.me.index == 1 and number == 2:
                raise ValueError("a script's own")
            t.optimizer.zero_grad()
            try:
                t.backward(t.losses(cross_entropy, *batch))
            except PeerLost as error:
                errors[t.me.index] = str(error)
                raise
            t.optimizer.step()

    with pytest.raises(ValueError, match="a script's own"):
        run_local(job(1, nworkers_per_group=2), building(), run)
    assert errors == {0: "worker 0/0 lost worker 0/1: it failed: a script's own"}
