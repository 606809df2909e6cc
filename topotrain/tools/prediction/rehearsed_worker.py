"""The script of a rehearsed worker: the product's worker with probed times."""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.config.job import ConfigError, Job
from topotrain.config.topology import Address, Topology
from topotrain.core.client.client import Client
from topotrain.core.model.schema import PrivateMemory
from topotrain.core.server.consistency import STATIC
from topotrain.extensions.elastic.eligibility import singly
from topotrain.extensions.outer_optimizer.inner_optimizer import InnerOptimizer
from topotrain.tools.prediction.process_work import CountedOperations, ProcessWork, VirtualClock
from topotrain.tools.probe.probe_file import Probe
from topotrain.training.data.sampling import cut
from topotrain.training.parameters.flat_parameters import ModelParts, describe_model
from topotrain.training.worker import Worker, WorkerMemory


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker, in seconds of the rehearsal."""

    number: int  # of the step of its group, from 0
    begun: float
    computed: float  # when its last gradient was
    ended: float  # when its values were there
    exchanged: bool  # the worker pushed in this step
    staleness: tuple[int, ...]
    late: bool  # the group has made the step without this worker; its batch is given again


class RehearsedModel(nn.Module):
    """Parameters of the probed shapes. Their memory is zero, and never written."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        for number, probed in enumerate(probe.model):
            tensor = torch.zeros(probed.shape, dtype=getattr(torch, probed.dtype))
            self.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=probed.trainable))


class _Ready(torch.autograd.Function):
    """Gives a parameter its gradient at its time in the backward.

    The node without a parameter ends the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, chain: torch.Tensor, parameter: torch.Tensor | None, step: "ComputedStep", share: float
    ) -> Any:
        ctx.step, ctx.share = step, share
        ctx.like = None if parameter is None else (parameter.shape, parameter.dtype)
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.step.backward_until(ctx.share)
        gradient = None if ctx.like is None else torch.zeros(ctx.like[0], dtype=ctx.like[1])
        return gradients[0], gradient, None, None


class ComputedStep:
    """The computing of one step of a worker, which may be slower by a factor."""

    def __init__(self, work: ProcessWork, forward_s: float, backward_s: float, factor: float) -> None:
        self._work, self._forward_s, self._backward_s, self._factor = work, forward_s, backward_s, factor
        self._share = 0.0
        self.computed = 0.0
        """When the last gradient was there."""

    def forward(self) -> None:
        self._compute(self._forward_s)

    def backward_until(self, share: float) -> None:
        self._work.spend()
        self._compute(max(0.0, share - self._share) * self._backward_s)
        self._share = max(share, self._share)
        self.computed = self._work.now()

    def _compute(self, seconds: float) -> None:
        # A slow machine is slow by itself: it does not take cores from others.
        self._work.compute(seconds, idle=(self._factor - 1.0) * seconds if self._factor > 1 else 0.0)


def optimizer_class(probe: Probe) -> type[Optimizer]:
    """Return the class of the probed optimizer.

    Raises ConfigError where torch has none of this name.
    """
    name = probe.optimizer.name.rpartition(".")[2]
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise ConfigError("optimizer", probe.optimizer.name, "must be one of torch.optim's: others cannot be predicted")
    return cls


def _make_optimizer(probe: Probe, model: nn.Module, inside: bool) -> Optimizer:
    cls = optimizer_class(probe)
    settings: dict[str, Any] = {"lr": 1e-3}
    known = inspect.signature(cls).parameters
    if "momentum" in known and probe.optimizer.momentum:
        settings["momentum"] = probe.optimizer.momentum
    if inside and "fused" in known:
        settings["fused"] = True
    return cls(model.parameters(), **settings)


class RehearsedWorker:
    """One worker of a rehearsal, which makes steps until it is stopped.

    factor: how many times longer it computes.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        topology: Topology,
        client: Client,
        work: ProcessWork,
        probe: Probe,
        factor: float,
        seed: int,
    ) -> None:
        self.me, self.records = me, list[StepRecord]()
        self._job, self._topology, self._client = job, topology, client
        self._work, self._probe, self._factor = work, probe, factor
        self._random = random.Random(f"{seed} {me}")
        self.samples = self._share()
        """Samples of each of its steps."""
        self.clock = VirtualClock(work)

    @property
    def extra_s(self) -> float:
        """Seconds that a step takes longer here than with the usual speed."""
        return max(0.0, self._factor - 1.0) * self._probe.batch.compute_s(self.samples)

    def _share(self) -> int:
        size, workers = self._probe.batch.size, self._topology.workers_per_group
        if self._job.per_worker_batch or workers == 1:
            return size
        lo, hi = cut(size, workers, self._job.cluster.shares)[self.me.index]
        return hi - lo

    def run(self, step_over: Callable[[], None]) -> None:
        """Make steps. step_over: is called at the end of each."""
        with CountedOperations(self._work.script_meter):
            worker = self._open()
            order = self._order(worker.parts)
            stream = STATIC | self.me.group
            if singly(self._job):
                stream = STATIC | self.me.group * self._topology.workers_per_group + self.me.index
            number = 0
            while True:
                worker.drawn(stream, number, float(max(1, self.samples)), self.samples)
                self.records.append(self._step(worker, order))
                number += not self.records[-1].late
                step_over()

    def _open(self) -> Worker:
        cluster = self._job.cluster
        model = RehearsedModel(self._probe)
        optimizer = _make_optimizer(self._probe, model, cluster.outer is not None)
        inner = None
        if cluster.outer is not None:
            inner = InnerOptimizer(optimizer, cluster, model.named_parameters(), clock=self.clock)
        parts = describe_model(model, (), (optimizer,) if inner is None else inner.optimizers)
        memory = WorkerMemory(PrivateMemory())
        worker = Worker(self.me, self._job, self._topology, parts, (optimizer,), self._client, memory, local=inner)
        worker.start()
        self._client.channel.spans.step_done(0)
        return worker

    def _order(self, parts: ModelParts) -> Sequence[tuple[nn.Parameter, float]]:
        """Return trained parameters in the forward's order, with when each is ready."""
        ready = [(probed.ready, tensor) for probed, tensor in zip(self._probe.model, parts.tensors, strict=True)]
        trained = [(share, tensor) for share, tensor in ready if tensor.requires_grad]
        # Backward goes the other way.
        return [(tensor, share) for share, tensor in sorted(trained, key=lambda each: -each[0])]

    def _step(self, worker: Worker, order: Sequence[tuple[nn.Parameter, float]]) -> StepRecord:
        work, batch, spans = self._work, self._probe.batch, self._client.channel.spans
        begun, number = work.now(), worker.committed
        scale = batch.compute_s(self.samples) / batch.compute_s(batch.size) * self._drawn()
        step = ComputedStep(work, batch.forward_s * scale, batch.backward_s * scale, self._factor)
        # The loader's time is that of the samples.
        work.compute(batch.other_s * self.samples / batch.size)
        spans.since("data")
        step.forward()
        # A lazily pulled step: as late as possible, since a rehearsed forward has no layers. What an exchange in the
        # background brings (`overlap`, a quorum) is no value that a forward waits for.
        if worker.lazy:
            self._client.values.settle()
        chain = _Ready.apply(torch.zeros((), requires_grad=True), None, step, 1.0)  # type: ignore[no-untyped-call]
        for parameter, share in order:
            chain = _Ready.apply(chain, parameter, step, share)  # type: ignore[no-untyped-call]
        spans.since("forward")
        with work.script_meter.counting():
            torch.autograd.backward(chain)
            spans.since("backward")
            work.script_meter.add(self._probe.worker_step_s)
            # Other kernels than fused ones count by themselves.
            if worker.runs_optimizers and worker.optimizers[0].defaults.get("fused"):
                work.script_meter.add(batch.optimizer_s)
            work.spend()
            outcome = worker.step()
        for tensor in worker.parts.tensors:
            tensor.grad = None
        work.spend()
        late = outcome is not None and outcome.late
        staleness = () if outcome is None or late else outcome.staleness
        return StepRecord(number, begun, step.computed, work.now(), worker.committed != number, staleness, late)

    def _drawn(self) -> float:
        """Draw a log-normal factor of the probed spread for the time of a step."""
        spread = self._probe.spread
        if not spread:
            return 1.0
        sigma = math.sqrt(math.log(1 + spread * spread))
        return self._random.lognormvariate(-sigma * sigma / 2, sigma)
