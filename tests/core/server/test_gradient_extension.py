"""The seam of gradients: an extension brings a codec and a gradient source, and decides how values travel."""

import torch
from reports import SentMessages
from server_core import Core

from topotrain.core import protocol as m
from topotrain.core.model.body_codec import ServerBodyCodec, present_body
from topotrain.core.server.gradients.backward_means import ReturnedMeans
from topotrain.core.server.server_extension import ExtensionHooks, GradientExtension, ServerExtension


class Negated(ServerBodyCodec):
    """Pushes travel with the other sign."""

    def push(self, worker, message, bucket, like):
        return -present_body(message)


class Doubled(ReturnedMeans):
    """The step's gradient is twice the mean."""

    def gradient(self, bucket):
        return 2 * super().gradient(bucket)


class Sums(GradientExtension):
    """Brings both, notes what workers send, and holds the values of steps back from worker 1."""

    def __init__(self, source=Doubled, codec=Negated):
        self.source, self.codec = source, codec
        self.ended, self.commits = [], []

    def server_codec(self, slice_map, shard, flats):
        return self.codec()

    def gradient_source(self, job, slice_map, settings):
        return self.source(settings)

    def backward_ended(self, sender, message):
        self.ended.append((sender.index, message.step))
        return ()

    def committed(self, sender, message):
        self.commits.append((sender.index, message.step))
        return ()

    def route_values(self, worker, values):
        return () if values.round >= 0 and worker.index == 1 else ((worker, values),)


def values_of(core):
    return core.server.state.known.values(0)


def test_a_server_updates_with_the_source_and_the_codec_of_an_extension():
    plain, other = Core(()), Core((Sums(),))
    plain.steps(1)
    other.steps(1)
    assert plain.server.state.version == other.server.state.version == 1
    assert torch.equal(values_of(other), -2 * values_of(plain)) and bool(values_of(plain).any())


def test_an_extension_hears_of_backwards_and_commits_of_the_current_step_only():
    sums = Sums()
    core = Core((sums,))
    core.steps(2)
    expected = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert sums.ended == sums.commits == expected
    core.server.handle(core.workers[0], m.BackwardEnd(1, 0, 1.0, b"\x01"))
    assert sums.ended == expected, "that step is over"


def test_an_extension_routes_the_values_of_steps():
    core, sender = Core((Sums(),)), SentMessages()
    core.server.queue._sender = sender
    core.steps(1)
    sent = [(to.index, type(message)) for to, message in sender.sent]
    assert (0, m.Values) in sent and (1, m.Values) not in sent
    assert {(0, m.Applied), (1, m.Applied)} <= set(sent), "replies without values are sent as ever"


def test_the_first_extension_with_a_codec_or_a_source_wins():
    class Silent(GradientExtension):
        def server_codec(self, slice_map, shard, flats):
            return None

        def gradient_source(self, job, slice_map, settings):
            return None

    hooks = ExtensionHooks([ServerExtension(), Silent(), Sums()])
    assert type(hooks.server_codec(None, 0, None)) is Negated
    assert type(ExtensionHooks([Silent()]).server_codec(None, 0, None)) is ServerBodyCodec
    assert ExtensionHooks([Silent()]).gradient_source(None, None, None) is None
