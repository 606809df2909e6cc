"""The way from worker to worker: tensors as they were, in parts, over every transport; and the loss of a worker."""

from dataclasses import replace

import pytest
import torch
from in_process_job import building, job_of, run_hosted, usual_loop, vectors
from reports import FunctionSender

from topotrain.comm.transport import TransportError
from topotrain.config.job import ConfigError, Grads
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, JobError, PeerLost
from topotrain.launch.runtime.process_host import ConditionWaiter
from topotrain.parallel.runtime import network_channel as crossings
from topotrain.parallel.runtime.activation_messages import Activation
from topotrain.parallel.runtime.channel import TensorKey
from topotrain.parallel.runtime.network_channel import NetworkChannel

KEY = TensorKey(3, 1, 7, False)
FIRST, SECOND = (Address(Role.WORKER, 0, index) for index in range(2))
SERVER = Address(Role.SERVER, 0, 0)


class Pair:
    """Two workers that hand each other their messages at once; `said` holds them back."""

    def __init__(self):
        topology = layout(job_of(nworkers_per_group=2).cluster)
        self.exchanges = {
            me: Client(me, topology, FunctionSender(self.none), ConditionWaiter(0.05)) for me in (FIRST, SECOND)
        }
        self.first, self.second = (NetworkChannel(exchange, self.sender(me)) for me, exchange in self.exchanges.items())
        self.said, self.held = [], False

    @staticmethod
    def none(to, message):
        raise AssertionError(f"{message} to {to}")

    def sender(self, me):
        def send(to, message):
            self.said.append(message)
            if not self.held:
                self.hand(me, to, message)

        return FunctionSender(send)

    def hand(self, sender, to, message):
        """As a transport that shows no memory."""
        if message.body is not None:
            place = self.exchanges[to].place(sender, message, False)
            assert place.nbytes == message.body.nbytes and place.data_ptr() != message.body.data_ptr()
            message = replace(message, body=place.copy_(message.body))
        self.exchanges[to].handle(sender, message)


TENSORS = {
    "floats": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).t(),
    "a number": torch.tensor(2.5),
    "none": torch.empty(0, 7),
    "flags": torch.tensor([True, False]),
    "integers": torch.arange(9).reshape(3, 3),
    "halves": torch.randn(5).bfloat16(),
    "complex": torch.randn(4, dtype=torch.complex64).conj(),
    "with a history": torch.randn(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    pair, tensor = Pair(), TENSORS[name]
    pair.first.send(1, KEY, tensor, grad=True)
    assert pair.second.arrived(0, KEY) and not pair.second.arrived(0, replace(KEY, backward=True))
    found, grad = pair.second.receive(0, KEY)
    assert grad and found.dtype is tensor.dtype and torch.equal(found, tensor.detach().resolve_conj())
    assert found.shape == tensor.shape and not found.requires_grad and not pair.second.arrived(0, KEY)


@pytest.mark.parametrize("count", [15, 16, 17, 100])
def test_a_large_tensor_travels_in_parts_and_is_not_here_before_the_last(count, monkeypatch):
    monkeypatch.setattr(crossings, "PART_BYTES", 64)
    pair, tensor = Pair(), torch.randn(count)
    pair.held = True
    pair.first.send(1, KEY, tensor)
    assert [message.part for message in pair.said] == list(range(-(-count * 4 // 64)))
    assert max(message.body.nbytes for message in pair.said) <= 64
    for message in pair.said:
        assert not pair.second.arrived(0, KEY), message.part
        pair.hand(FIRST, SECOND, message)
    assert torch.equal(pair.second.receive(0, KEY)[0], tensor)


def test_one_key_twice_is_first_come_first_served_and_oneself_needs_no_transport():
    pair = Pair()
    for number in range(2):
        pair.second.send(0, KEY, torch.tensor(number))
        pair.first.send(0, KEY, torch.tensor(10 + number))
    assert [int(pair.first.receive(1, KEY)[0]) for _ in range(2)] == [0, 1]
    assert [int(pair.first.receive(0, KEY)[0]) for _ in range(2)] == [10, 11]


GOOD = Activation(3, 1, 7, False, False, 0, 1, 12, (3,), "float32", body=torch.zeros(12, dtype=torch.uint8))


def hear(exchange, sender, message):
    if message.body is not None:
        assert exchange.place(sender, message, False).nbytes <= crossings.PART_BYTES
    exchange.handle(sender, message)


def test_a_peer_that_reports_more_read_than_was_sent_is_refused():
    pair = Pair()
    pair.first.send(1, KEY, torch.zeros(3))
    for taken in (2, -1):
        with pytest.raises(m.ProtocolError, match=f"reports {taken} messages read"):
            hear(pair.exchanges[FIRST], SECOND, replace(GOOD, taken=taken))
    hear(pair.exchanges[FIRST], SECOND, replace(GOOD, taken=1))


@pytest.mark.parametrize(
    ("sender", "change", "words"),
    [
        (FIRST, {"parts": 2}, "part 0 of 2 of 12 bytes"),
        (FIRST, {"part": 1}, "part 1 of 1 of 12 bytes"),
        (FIRST, {"nbytes": 1 << 60}, "part 0 of 1 of"),
        (FIRST, {"nbytes": -1}, "part 0 of 1 of -1 bytes"),
        (FIRST, {"sizes": (4,)}, r"12 bytes, but \(4,\) needs 16"),
        (FIRST, {"sizes": (-3, -1)}, "elements of float32"),
        (FIRST, {"dtype": "Tensor"}, "elements of Tensor"),
        (FIRST, {"body": None}, "12 bytes"),
        (SERVER, {}, "does not accept Activation from server 0/0"),
        (Address(Role.WORKER, 1, 0), {}, "does not accept Activation from worker 1/0"),
        (Address(Role.WORKER, 0, 2), {}, "does not accept Activation from worker 0/2"),
    ],
)
def test_what_cannot_be_is_refused_before_memory_is_made_for_it(sender, change, words):
    with pytest.raises(m.ProtocolError, match=words):
        hear(Pair().exchanges[SECOND], sender, replace(GOOD, **change))


def test_a_worker_that_left_is_missed_by_a_worker_that_needs_it():
    pair = Pair()
    pair.first.send(1, KEY, torch.ones(2))
    pair.exchanges[SECOND].lost(FIRST, "its script has ended")
    assert pair.exchanges[SECOND].channel.failure is None
    assert float(pair.second.receive(0, KEY)[0].sum()) == 2.0, "what it had said counts"
    for ask in (pair.second.receive, pair.second.arrived):
        with pytest.raises(PeerLost, match="worker 0/1 lost worker 0/0: its script has ended"):
            ask(0, KEY)
    with pytest.raises(PeerLost, match="lost worker 0/0"):
        pair.second.wait_any([(1, KEY), (0, KEY)])
    with pytest.raises(PeerLost, match="lost worker 0/0"):
        pair.second.wait_for_hellos([0])


def test_a_way_that_is_gone_and_a_server_that_refuses_end_the_passage():
    pair = Pair()
    exchange = pair.exchanges[FIRST]

    def send(to, message):
        raise TransportError("no way")

    alone = Client(
        FIRST, layout(job_of(nworkers_per_group=2).cluster), FunctionSender(Pair.none), ConditionWaiter(0.05)
    )
    with pytest.raises(PeerLost, match="worker 0/0 lost worker 0/1: no way"):
        NetworkChannel(alone, FunctionSender(send)).send(1, KEY, torch.ones(1))
    exchange.handle(SERVER, m.Fail("the models differ", True))
    for ask in (pair.first.receive, pair.first.arrived):
        with pytest.raises(JobError, match="the models differ"):
            ask(1, KEY)
    big = replace(GOOD, nbytes=2 * crossings.PART_BYTES, parts=2, part=1)
    with pytest.raises(m.ProtocolError, match=r"part 1 of 2 .*, 1 have come"):
        pair.exchanges[SECOND].handle(FIRST, big)


# --- over real transports ----------------------------------------------------------------------------------------

PLACES = {
    "shared memory": ("sandblaster", "kShm", ()),
    "a server beside each worker": ("allreduce", "kAuto", ()),
    "TCP": ("sandblaster", "kTcp", ()),
    "two hosts": ("sandblaster", "kAuto", (0, 0, 1, 1)),
}


@pytest.mark.parametrize("place", PLACES)
def test_workers_meet_send_train_and_leave(place, tmp_path, monkeypatch):
    name, transport, hosts = PLACES[place]
    monkeypatch.setattr(crossings, "PART_BYTES", 1 << 20)
    job = job_of(name, nworkers_per_group=3, nservers_per_group=3 if name == "allreduce" else 1, transport=transport)
    job = replace(job, grads=Grads.kHidden)
    left = []

    def script(t):
        crossing = t.notes["connections"].meet_group()
        me, others = t.me.index, [index for index in range(3) if index != t.me.index]
        for forward in range(4):
            key = TensorKey(forward, 0, 0, False)
            for other in others:
                crossing.send(other, key, torch.full((300_000 * (forward % 2) + 7,), float(10 * me + other)))
            crossing.wait_any([(other, key) for other in others])
            for other in others:
                found = crossing.receive(other, key)[0]
                assert bool((found == 10 * other + me).all()) and len(found) == 300_000 * (forward % 2) + 7
            usual_loop(vectors(1, seed=forward))(t)
        if me == 0 and name != "allreduce":  # the others leave, and only who wants more of them hears of it
            with pytest.raises(PeerLost, match="worker 0/0 lost worker 0/"):
                crossing.receive(1, TensorKey(9, 0, 0, False))
            left.append(True)

    run_hosted(job, building(), script, tmp_path, hosts)
    assert left or name == "allreduce"


def test_a_list_of_addresses_is_no_place_to_meet(tmp_path, monkeypatch):
    from topotrain.comm.store.discovery.static_addresses import StaticStore

    def script(t):
        connections = t.notes["connections"]
        monkeypatch.setattr(connections, "_place", replace(connections._place, store=StaticStore(["127.0.0.1:7164"])))
        with pytest.raises(ConfigError, match="split model: needs a store in which the workers find each other"):
            connections.meet_group()
        usual_loop(vectors(1))(t)

    run_hosted(job_of("one"), building(), script, tmp_path)
