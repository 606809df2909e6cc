"""A server with two workers and no transport: what they say travels as bytes, through `handle`."""

from collections.abc import Sequence

import torch

from topotrain.config.job import Cluster, Job
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory, Schema, slice_map_for
from topotrain.core.optim.adapter import describe, hyper
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ServerExtension
from topotrain.launch.runtime.server_composition import server_extensions

HOME, ELEMENTS = Address(Role.SERVER, 0, 0), 64


class Core:
    """The server of one parameter, before its first step. extensions: None: all that a job's server has."""

    def __init__(self, extensions: Sequence[ServerExtension] | None = None) -> None:
        job = Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True))
        topology, memory = layout(job.cluster), PrivateMemory()
        parameters = (Parameter("p", (ELEMENTS,), (1,), "float32", True),)
        tensor = torch.nn.Parameter(torch.zeros(ELEMENTS))
        optimizer = torch.optim.SGD([tensor], lr=0.1)
        digest = slice_map_for(parameters, topology).digest
        schema = Schema(parameters, (), describe(optimizer, [tensor]).to_text(), digest)
        self.server, self.workers = Server(HOME, job, topology, memory), topology.workers(0)
        self.server.attach(server_extensions(self.server, job, topology, memory) if extensions is None else extensions)
        self.hyper, self.step = hyper(optimizer), 0
        for worker in self.workers:
            for part in schema.parts():
                self.server.handle(worker, part)
        self.server.handle(self.workers[0], m.Init(0, body=torch.zeros(ELEMENTS)))
        for worker in self.workers:
            self.server.handle(worker, m.Fetch(1))

    def say(self, message: m.Message) -> None:
        """Both workers say it."""
        for worker in self.workers:
            body = torch.ones(ELEMENTS) if isinstance(message, m.Push) else None
            for _, answer in self.server.handle(worker, m.decode(*m.encode(message), body)):
                m.encode(answer)

    def steps(self, count: int) -> None:
        """Take so many steps."""
        for step in range(self.step, self.step + count):
            self.say(m.Push(step, 0, 0, 1.0, b"\x01"))
            self.say(m.BackwardEnd(step, 0, 1.0, b"\x01"))
            rest = (1.0, False, 0.0, 2.0, True, b"\xff", b"\x00", b"\x00", b"" if step else self.hyper, ())
            self.say(m.Commit(step, 1, 1.0, *rest))
        self.step += count
