"""A client without a network, whose servers are played by the test."""

import threading

import torch
from in_process_job import adam, building, job_of
from reports import FunctionSender
from torch import nn

from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.client.client import Client, StepEnd
from topotrain.core.model.schema import FlatBuffers, PrivateMemory
from topotrain.core.optim.adapter import describe
from topotrain.launch.runtime.worker_composition import client_extensions
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of

ME = Address(Role.WORKER, 0, 1)


SERVERS = (Address(Role.SERVER, 0, 0), Address(Role.SERVER, 0, 1))


class ScriptedWaiter:
    """A waiter for one thread: instead of waiting, it gives the next answer of the test."""

    def __init__(self):
        self.answers = []

    def update(self):
        return threading.Lock()

    def wait(self, ready):
        while not ready():
            assert self.answers, "there is no answer left"
            self.answers.pop(0)()


class ClientHarness:
    """The client of worker 0/1 of two, with two servers, and all that it sends."""

    def __init__(self, **fields):
        job = job_of("sandblaster", **{"nworkers_per_group": 2, **fields})
        topology = layout(job.cluster)
        model, optimizer = building(lambda: nn.Sequential(nn.Linear(30, 5), nn.BatchNorm1d(5)), adam)()
        parts = describe_model(model)
        self.cluster, self.waiter, self.sent = job.cluster, ScriptedWaiter(), []
        self.schema, self.map = plan_of(topology, parts, describe(optimizer, parts.tensors))
        self.flats = FlatBuffers(self.map, None, PrivateMemory())
        extensions = client_extensions(topology)
        send = lambda to, message: self.sent.append((to, message))  # noqa: E731
        self.exchange = Client(ME, topology, FunctionSender(send), self.waiter, extensions=extensions)
        self.exchange.open(self.schema, self.map, self.flats)
        self.schema_parts = self.take()

    def take(self, kind=m.Message):
        sent, self.sent = self.sent, []
        assert all(isinstance(message, kind) for _, message in sent)
        return sent

    def answer_next(self, number, *messages):
        """At the next wait, a server answers."""
        self.waiter.answers.append(lambda: [self.exchange.handle(SERVERS[number], message) for message in messages])

    def values(self, number, round_, fill=1.0):
        return [m.Values(round_, b.id, 0, body=torch.full((b.hi - b.lo,), fill)) for b in self.map.buckets_of(number)]


def end(**changes):
    return StepEnd(**{"backwards": 1, "weight": 2.0, "fetch": True, "hyper": b"[]", "marks": (1, 0, 0), **changes})


def applied(step, version=1, staleness=0, found_inf=False, norm=-1.0):
    return m.Applied(step, version, staleness, found_inf, norm)
