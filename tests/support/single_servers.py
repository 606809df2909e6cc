"""Servers without a network: messages go in by hand, and the replies are looked at."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from topotrain.config.job import Cluster, Job
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.optim.adapter import describe, hyper
from topotrain.core.protocol import int_to_bits
from topotrain.launch.runtime.server_composition import make_server
from topotrain.training.parameters.flat_parameters import describe_model
from topotrain.training.worker import plan_of


def worker(group=0, index=0):
    return Address(Role.WORKER, group, index)


def server(group=0, index=0):
    return Address(Role.SERVER, group, index)


def model_of(size=150):
    """One parameter, zeros, so that values are what was added."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class ServerHarness:
    """The servers of a job. Messages between them arrive at once, or wait in `held` if their type is in `holding`."""

    def __init__(self, optimizer=None, size=150, holding=(), join=True, **fields):
        cluster = {k: fields.pop(k) for k in list(fields) if k in Cluster.__dataclass_fields__}
        self.job = Job(cluster=Cluster(**cluster), **fields)
        self.topology = layout(self.job.cluster)
        self.model = model_of(size)
        self.optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=1.0)))(self.model.parameters())
        self.parts = describe_model(self.model)
        spec = describe(self.optimizer, self.parts.tensors)
        self.schema, self.map = plan_of(self.topology, self.parts, spec)
        self.servers = {s: self.made(s) for u in self.topology.units for s in u.servers}
        self.got = defaultdict(list)
        self.holding, self.held = holding, []
        if join:
            for who in self.workers:
                self.join(who)

    def made(self, me):
        return make_server(me, self.job, self.topology, PrivateMemory())

    @property
    def workers(self):
        return [w for g in range(self.topology.worker_groups) for w in self.topology.workers(g)]

    def homes(self, who):
        return self.topology.servers(self.topology.server_group_of(who.group))

    def say(self, who, to, *messages):
        for message in messages:
            self.route(to, self.servers[to].handle(who, message))

    def route(self, sender, out):
        for to, message in out:
            if to.role is Role.WORKER:
                body = message.body if message.body is None else message.body.clone()
                self.got[to].append(replace(message, body=body))
            elif type(message) in self.holding:
                self.held.append((sender, to, message))
            else:
                self.say(sender, to, message)

    def let_go(self):
        held, self.held = self.held, []
        for sender, to, message in held:
            self.route(to, self.servers[to].handle(sender, message))

    def join(self, who, schema=None):
        for to in self.homes(who):
            self.say(who, to, *(schema or self.schema).parts())

    def give_values(self, value=0.0):
        for to in self.topology.servers(0):
            for bucket in self.map.buckets_of(to.index):
                self.say(worker(), to, m.Init(bucket.id, body=torch.full((bucket.hi - bucket.lo,), value)))

    def fetch(self, who, number=1):
        for to in self.homes(who):
            self.say(who, to, m.Fetch(number))

    def push(self, who, value, step=0, ordinal=None, weight=1.0):
        """The whole model's gradient, and, visible, the end of the backward."""
        visible = self.job.grads.value == "kVisible" and self.topology.workers_per_group > 1
        ordinal = ordinal if ordinal is not None else 0 if visible else 1
        for to in self.homes(who):
            buckets = self.map.buckets_of(to.index)
            for bucket in buckets:
                present = int_to_bits((1 << len(bucket.pieces)) - 1, len(bucket.pieces))
                body = torch.full((bucket.hi - bucket.lo,), float(value))
                self.say(who, to, m.Push(step, ordinal, bucket.id, weight, present, body=body))
            if visible:
                pushed = int_to_bits((1 << len(buckets)) - 1, len(buckets))
                self.say(who, to, m.BackwardEnd(step, ordinal, weight, pushed))

    def commit(self, who, step=0, to=None, **changes):
        for home in [to] if to else self.homes(who):
            buckets = self.map.buckets_of(home.index)
            fields = {
                "step": step,
                "backwards": 1,
                "weight": 1.0,
                "inv_scale": 1.0,
                "check_finite": False,
                "clip_norm": 0.0,
                "clip_type": 2.0,
                "fetch": True,
                "revisions": bytes([1] * len(buckets)),
                "edited": b"",
                "dropped": b"",
                "hyper": hyper(self.optimizer) if step == 0 else b"",
                "marks": (),
            }
            self.say(who, home, m.Commit(**{**fields, **changes}))

    def step(self, who, value, step=0, **changes):
        self.push(who, value, step)
        self.commit(who, step, **changes)

    def heard(self, who, kind):
        """What a worker was told of a kind, once."""
        found = [message for message in self.got[who] if isinstance(message, kind)]
        self.got[who] = [message for message in self.got[who] if not isinstance(message, kind)]
        return found

    def values(self, who):
        """The values in a worker's last Values, all elements; they must be equal."""
        found = self.heard(who, m.Values)
        assert found, f"{who} was sent no values"
        assert {v.bucket for v in found} == {b.id for to in self.homes(who) for b in self.map.buckets_of(to.index)}
        (value,) = {float(v) for message in found for v in self.inner(message).unique()}
        return value

    def inner(self, message):
        """A body without the padding."""
        bucket = self.map.buckets[message.bucket]
        return torch.cat([message.body[p.lo - bucket.lo : p.hi - bucket.lo] for p in bucket.pieces])


def started(**fields):
    harness = ServerHarness(**fields)
    harness.give_values()
    for who in harness.workers:
        harness.fetch(who)
    for who in harness.workers:
        harness.values(who)
    return harness
