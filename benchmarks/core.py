"""P11: what the pure core costs: per message in Python, and per push with its update.

Rule: a message is read from bytes and handled, and the answers are written as bytes. A step of a synchronous group of
two workers with one server has 6 messages in and 8 out. For Python alone the tensors have 64 elements, and the
optimizer's kernel is left out. A push with its update has 1 MB, and its step ends with torch's own SGD.
"""

import argparse
import time
from collections.abc import Sequence

import torch

from benchmarks.harness import ROUNDS, Row, Samples, interleave, row
from benchmarks.record import run_table
from topotrain.config.job import Cluster, Job
from topotrain.config.sharding import Parameter
from topotrain.config.topology import Address, Role, layout
from topotrain.core import protocol as m
from topotrain.core.model.schema import PrivateMemory, Schema, slice_map_for
from topotrain.core.optim.adapter import SliceUpdate, describe, hyper
from topotrain.core.server.server import Server
from topotrain.core.server.server_extension import ServerExtension
from topotrain.launch.runtime.server_composition import server_extensions

NAME, TITLE, GOALS = "core", "Messages in the pure core", ("P11",)
STEPS = 500
MEGABYTE = 1 << 18  # elements of float32
HOME = Address(Role.SERVER, 0, 0)


class Core:
    """A server and what two workers say to it, without any transport.

    Args:
        extensions: of the server; None: all that a job's server has.
        elements: of the one parameter, which is one bucket.
    """

    def __init__(self, extensions: Sequence[ServerExtension] | None = None, elements: int = 64) -> None:
        job = Job(cluster=Cluster(nworkers_per_group=2, server_worker_separate=True))
        topology = layout(job.cluster)
        parameters = (Parameter("p", (elements,), (1,), "float32", True),)
        tensor = torch.nn.Parameter(torch.zeros(elements))
        optimizer = torch.optim.SGD([tensor], lr=0.1)
        digest = slice_map_for(parameters, topology).digest
        schema = Schema(parameters, (), describe(optimizer, [tensor]).to_text(), digest)
        memory = PrivateMemory()
        self.server = Server(HOME, job, topology, memory)
        self.server.attach(server_extensions(self.server, job, topology, memory) if extensions is None else extensions)
        self.workers = topology.workers(0)
        self.bodies = {worker: torch.full((elements,), 1.0) for worker in self.workers}
        self.hyper = hyper(optimizer)
        for worker in self.workers:
            for part in schema.parts():
                self.server.handle(worker, part)
        self.server.handle(self.workers[0], m.Init(0, body=torch.zeros(elements)))
        for worker in self.workers:
            self.server.handle(worker, m.Fetch(1))
        self.step = self.messages = 0

    def say(self, message: m.Message) -> None:
        """Both workers say it, as bytes."""
        for worker in self.workers:
            body = self.bodies[worker] if isinstance(message, m.Push) else None
            kind, meta = m.encode(message)
            answers = self.server.handle(worker, m.decode(kind, meta, body))
            self.messages += 1 + len(answers)
            for _, answer in answers:
                m.encode(answer)

    def steps(self, count: int) -> float:
        """Seconds per message of so many steps."""
        self.messages, began = 0, time.perf_counter()
        self._run(count)
        return (time.perf_counter() - began) / self.messages

    def pushes(self, count: int) -> float:
        """Seconds per push of so many steps with two pushes each."""
        began = time.perf_counter()
        self._run(count)
        return (time.perf_counter() - began) / (2 * count)

    def _run(self, count: int) -> None:
        for _ in range(count):
            step, self.step = self.step, self.step + 1
            self.say(m.Push(step, 0, 0, 1.0, b"\x01"))
            self.say(m.BackwardEnd(step, 0, 1.0, b"\x01"))
            rest = (1.0, False, 0.0, 2.0, True, b"\xff", b"\x00", b"\x00", self.hyper if step == 0 else b"", ())
            self.say(m.Commit(step, 1, 1.0, *rest))


def measure(options: argparse.Namespace) -> Sequence[Row]:
    """One row."""
    torch.set_num_threads(1)
    core = Core()
    apply, SliceUpdate.apply = SliceUpdate.apply, lambda *_: None  # type: ignore[method-assign]
    try:
        core.steps(STEPS)
        figure = Samples(tuple(core.steps(STEPS) * 1e6 for _ in range(options.rounds))).figure
    finally:
        SliceUpdate.apply = apply  # type: ignore[method-assign]
    note = "decode, handle, encode the answers; without sockets and without the optimizer's kernel"
    message = row("P11", "one message in the pure core", figure, "us", "<= 15", note, "kVisible, kAtStep")
    return [message, *_pushes(options.rounds)]


def _pushes(rounds: int) -> list[Row]:
    """A push of 1 MB with everything that follows from it, beside the arithmetic alone."""
    core, alone = Core(elements=MEGABYTE), _Arithmetic()
    found = interleave({"core": lambda: core.pushes(STEPS // 10), "alone": lambda: alone.pushes(STEPS // 10)}, rounds)
    own = Samples(tuple(a - b for a, b in zip(found["core"].values, found["alone"].values, strict=True)))
    whole, arithmetic = (found[name].median * 1e6 for name in ("core", "alone"))
    note = f"{whole:.0f} us, of which the mean of two and SGD's kernel take {arithmetic:.0f}"
    what = "a push of 1 MB with its update, beyond its arithmetic"
    return [row("P11", what, own.figure.times(1e6), "us", "<= 40", note, "kVisible, kAtStep")]


class _Arithmetic:
    """The mean of two gradients of 1 MB, and SGD's kernel."""

    def __init__(self) -> None:
        self._value = torch.nn.Parameter(torch.zeros(MEGABYTE))
        self._optimizer = torch.optim.SGD([self._value], lr=0.1, fused=True)
        self._gradients = [torch.full((MEGABYTE,), 1.0) for _ in range(2)]
        self._mean = torch.zeros(MEGABYTE)
        self._value.grad = self._mean

    def pushes(self, count: int) -> float:
        """Seconds per push of so many steps with two pushes each."""
        began = time.perf_counter()
        for _ in range(count):
            torch.add(*self._gradients, out=self._mean)
            self._mean.mul_(0.5)
            self._optimizer.step()
        return (time.perf_counter() - began) / (2 * count)


if __name__ == "__main__":
    run_table(NAME, TITLE, measure, lambda parser: parser.add_argument("--rounds", type=int, default=2 * ROUNDS + 1))
