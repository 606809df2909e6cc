"""The seam of the worker's client: an extension gets its messages and its calls, and each message has one owner."""

import pytest
import torch
from reports import FunctionSender
from single_client import ME, SERVERS, ClientHarness, applied, end

from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, PeerLost
from topotrain.core.client.client_extension import ClientExtension
from topotrain.core.model.body_codec import BodyCodec
from topotrain.extensions.tables.table_messages import TableIds
from topotrain.parallel.runtime.activation_messages import Activation, ActivationHello
from topotrain.training.data.data_messages import Lease

PEER = Address(Role.WORKER, 0, 0)


class Recorder(ClientExtension):
    """Notes its calls, and says that the loss of a worker is its own business."""

    messages = (ActivationHello, Activation)

    def __init__(self):
        self.calls, self.memory = [], torch.empty(8, dtype=torch.uint8)

    def bind(self, channel, model, values):
        self.calls.append(("bind", channel.me))

    def place(self, sender, message):
        return self.memory

    def handle(self, sender, message):
        self.calls.append((sender, message))

    def before_commit(self, step, end):
        self.calls.append(("before", step, end))

    def after_commit(self, end, outcome):
        self.calls.append(("after", outcome.version))

    def on_lost(self, peer, reason):
        return peer.role is Role.WORKER


def test_an_extension_gets_its_messages_with_memory_for_bodies_commits_and_losses():
    harness, recorder, step = ClientHarness(), Recorder(), end(fetch=False)
    hello, part = ActivationHello(), Activation(0, 0, 0, False, False, 0, 1, 8, 0, (2,), "float32")
    assert harness.exchange.place(PEER, part, True) is None
    harness.exchange.handle(PEER, hello)  # nothing handles it: it is dropped
    harness.exchange.attach(recorder)
    assert harness.exchange.place(PEER, part, False) is recorder.memory
    harness.exchange.handle(PEER, hello)
    assert harness.exchange.extension(Recorder) is recorder
    for number in (0, 1):
        harness.answer_next(number, applied(0, version=5))
    harness.exchange.steps.commit(0, step)
    assert recorder.calls == [("bind", ME), (PEER, hello), ("before", 0, step), ("after", 5)]
    harness.take(m.Commit)
    harness.exchange.lost(PEER, "closed")
    assert harness.exchange.channel.failure is None, "the extension says that it does not end the job"
    harness.exchange.lost(SERVERS[0], "closed")
    assert isinstance(harness.exchange.channel.failure, PeerLost)


def test_a_message_belongs_to_one_extension():
    class Greedy(ClientExtension):
        messages = (m.Values, ActivationHello, TableIds)

    harness = ClientHarness()
    harness.exchange.attach(Recorder())
    with pytest.raises(ValueError, match=r"Greedy handles Values, ActivationHello, which something else handles"):
        harness.exchange.attach(Greedy())
    with pytest.raises(KeyError):
        harness.exchange.extension(Greedy)


def test_a_client_without_extensions_trains():
    """It starts, commits a step and receives its values; what only an extension handles is dropped."""
    harness = ClientHarness()
    sender = FunctionSender(lambda to, message: harness.sent.append((to, message)))
    bare = Client(ME, layout(harness.cluster), sender, harness.waiter)
    bare.open(harness.schema, harness.map, harness.flats)
    harness.exchange = bare
    bare.handle(SERVERS[0], Lease(0, 0, 0, 0, 1))
    bucket = harness.map.buckets_of(0)[0]
    bare.gradients.push(4, 0, bucket, 1.0, 1, torch.ones(bucket.hi - bucket.lo))
    harness.answer_next(0, applied(4), *harness.values(0, 4, 3.0))
    harness.answer_next(1, applied(4), *harness.values(1, 4, 3.0))
    assert not bare.steps.commit(4, end()).late
    assert all(harness.flats.view("params", bucket).eq(3.0).all() for bucket in harness.map.buckets)


def test_without_a_codec_an_encoded_body_is_refused():
    harness = ClientHarness()
    bucket = harness.map.buckets_of(0)[0]
    coded = m.Values(-2, bucket.id, 0, coded=True, body=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(m.ProtocolError, match=rf"bucket {bucket.id} came encoded"):
        harness.exchange.place(SERVERS[0], coded, False)
    codec = BodyCodec()
    for refused in (lambda: codec.landing(coded, bucket), lambda: codec.values(bucket, coded.body)):
        with pytest.raises(m.ProtocolError, match="came encoded"):
            refused()
