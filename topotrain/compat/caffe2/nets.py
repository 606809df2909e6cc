"""A training loop in the form of a Caffe2 net, as `Parallelize` makes it.

Caffe2's builder functions built a net; here the functions are the net. As in Caffe2, gradients are summed over shards,
and `loss_scale` turns the sum into a mean.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from topotrain.comm.security.secret import load_secret
from topotrain.compat.caffe2.shard_rendezvous import ShardRendezvous, ShardStart, shard_name
from topotrain.config.job import Cluster, ConfigError, Job, Reduce, TransportChoice
from topotrain.config.topology import Address, Role
from topotrain.launch.by_hand.manual_server import SharedSettings
from topotrain.launch.by_hand.manual_worker import ColocatedServers, join, leave
from topotrain.training import context as process
from topotrain.training.api import prepare

COMPARE = "num_shards, and what is given to Parallelize"


class Model:
    """The argument of the builder functions: the module, the batch, and named values.

    It has every attribute of the module, too: `model.parameters()`, `model(images)`.

    Attributes:
        module: the user's.
        batch: the input of this iteration, on `device`.
        blobs: name -> any value that a function wants to keep, for `FetchBlob`.
        device: where this shard computes.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError("Parallelize model", type(module).__name__, "must be a torch.nn.Module")
        self.module = module
        self.batch: Any = None
        self.blobs: dict[str, Any] = {}
        self.device = torch.device("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_batch(self, batch: Any) -> None:
        self.batch = _moved(batch, self.device)

    def set_device(self, device: torch.device) -> None:
        self.device = device
        self.module.to(device)

    def __getattr__(self, name: str) -> Any:
        # Not set yet, as while the object is being copied. The look-up below would not end.
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)


InputBuilder = Callable[[Model], Any]  # batches, or None
ForwardBuilder = Callable[[Model, float], Sequence[torch.Tensor]]
OptimizerBuilder = Callable[[Model], Optimizer]


class Net:
    """The net that `Parallelize` has made.

    Attributes:
        model: the argument of the builder functions.
        optimizer: the one that `optimizer_builder_fun` returned. None: the net only computes losses.
        started: the shards have met.
        has_run: it has made an iteration.
    """

    def __init__(self, model: Model, meets: ShardRendezvous | None, patience_s: float, workspace: str) -> None:
        self._placed = process.placed()
        self.model = model
        self.optimizer: Optimizer | None = None
        # A launcher has placed this process already, and its job has a rendezvous of its own.
        self._meets = None if self._placed else meets
        self._patience_s, self._workspace = patience_s, workspace
        self._meeting: ShardStart | None = None
        self.started = self.has_run = self._over = False
        self._pid = os.getpid()
        # Of the given rendezvous, also where it is not used to meet.
        self._exit_nets = [] if meets is None else meets.exit_nets
        self._batches: Iterator[Any] = iter(())

    def build(self, inputs: InputBuilder, forward: ForwardBuilder, optimizer: OptimizerBuilder | None) -> None:
        """Call the functions that are called once. Raises ConfigError for bad results."""
        self._inputs, self._forward = inputs, forward
        source = inputs(self.model)
        if source is not None and not isinstance(source, Iterable):
            why = "must return batches, such as a DataLoader, or None"
            raise ConfigError("input_builder_fun", type(source).__name__, why)
        # None: the function itself sets `model.batch`, before every iteration.
        self._batches = self._called() if source is None else _repeated(source)
        if optimizer is None:
            return
        built = optimizer(self.model)
        if not isinstance(built, Optimizer):
            raise ConfigError("optimizer_builder_fun", type(built).__name__, "must return a torch.optim optimizer")
        self.optimizer = built

    @property
    def loss_scale(self) -> float:
        """1 / number of shards."""
        if self.optimizer is None:
            return 1.0
        here = process.current()
        if self._meets is not None:
            return 1.0 / self._meets.num_shards
        # Under a launcher the job's own `reduce` decides: sums need the scale, and averages do not.
        sums = here is not None and here.place.job.reduce is Reduce.kSum
        return 1.0 / here.place.topology.workers_per_group if here is not None and sums else 1.0

    # --- running -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Meet the other shards. All get shard 0's parameters before the first iteration.

        The first `run` does the same.

        Raises:
            ConfigError: another process is this shard, or has other settings.
            StoreError: the store cannot be used, or not all shards came in time.
            TransportError: another shard cannot be reached, or refuses this one.
        """
        if self._over:
            raise ConfigError("net", None, "has been finalized: make another one to go on")
        if self.started:
            return
        if self.optimizer is not None:
            # `prepare` serves one model per process.
            if process.prepared() or (self._meets is not None and process.current() is not None):
                raise ConfigError("RunInitNet", None, "this process trains another net: finalize that one first")
            # Before `join` does so: functions run in the opposite order, and the exit nets follow the end of the job.
            atexit.register(self._at_exit)
            if self._meets is not None:
                self._join(self._meets)
            prepare(self.model.module, self.optimizer)
        self.started = True

    def _join(self, meets: ShardRendezvous) -> None:
        count, number = meets.num_shards, meets.shard_id
        secret = load_secret(os.environ)
        assert meets.handler is not None
        self._meeting = ShardStart(meets.handler, number, count, self._patience_s)
        cluster = Cluster(
            nworkers_per_group=count,
            # The AllReduce layout: one server beside each shard.
            nservers_per_group=count,
            engine=meets.engine,
            transport=TransportChoice.kTcp,
            workspace=self._workspace,
        )
        # Sum, as in Caffe2. `loss_scale` makes it a mean.
        job = Job(name="parallelize", cluster=cluster, reduce=Reduce.kSum)
        join(
            job,
            Address(Role.WORKER, 0, number),
            self._meeting.store,
            secret,
            meets.host,
            beside=ColocatedServers([Address(Role.SERVER, 0, number)], self._meeting.url),
            terms=SharedSettings(f"{count} shards", COMPARE, self._patience_s, shard_name),
            gpus=self.model.device.type == "cuda",
        )

    def run(self, iterations: int = 1) -> float:
        """Run iterations; return the loss of the last one.

        The loss is that of this shard, scaled as the forward function has scaled it.

        Raises:
            ConfigError: there are no batches left, or a builder function returned an invalid value.
            JobError, PeerLost: the job cannot go on.
            Exception: the errors of `start`.
        """
        if type(iterations) is not int or iterations < 1:
            raise ConfigError("iterations", iterations, "must be a whole number >= 1")
        self.start()
        if self.optimizer is not None:
            process.use()
        self.has_run = True
        total = torch.zeros(())
        for _ in range(iterations):
            self.model.set_batch(next(self._batches))
            total = self._evaluate() if self.optimizer is None else self._train(self.optimizer)
        return float(total)

    def _called(self) -> Iterator[Any]:
        # The first call, in `build`, has set the first batch already.
        while True:
            yield self.model.batch
            self._inputs(self.model)

    def _train(self, optimizer: Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        losses = self._losses()
        # One backward from all losses, so that each parameter's gradient is complete once.
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        optimizer.step()
        return _total(losses)

    def _evaluate(self) -> torch.Tensor:
        was = self.model.module.training
        self.model.module.eval()
        try:
            with torch.no_grad():
                return _total(self._losses())
        finally:
            # Back to the script's mode, also after an error.
            self.model.module.train(was)

    def _losses(self) -> list[torch.Tensor]:
        losses = self._forward(self.model, self.loss_scale)
        if not isinstance(losses, list | tuple) or not losses or not all(isinstance(x, torch.Tensor) for x in losses):
            kind = type(losses).__name__
            raise ConfigError("forward_pass_builder_fun", kind, "must return a list of losses, as tensors")
        return list(losses)

    # --- the end -------------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """End this shard's part of the job.

        Shard 0 writes `final.safetensors`, then the exit nets run. The end of the script does the same.

        Raises:
            JobError, PeerLost: the job failed meanwhile.
        """
        if self._over:
            return
        try:
            # Under a launcher the end of the script ends the worker's part.
            if self._meeting is not None:
                leave()
        finally:
            # Also after a failed job: the store is closed, and the exit nets run.
            self._at_exit()

    def _at_exit(self) -> None:
        if self._over or os.getpid() != self._pid:  # a process that the script has forked is no worker
            return
        self._over = True
        atexit.unregister(self._at_exit)
        if self._meeting is not None:
            self._meeting.close()
        # An ordinary process may prepare another net after this one.
        if self.started and process.current() is None:
            process.forget()
        for net in self._exit_nets:
            net()


def _repeated(source: Iterable[Any]) -> Iterator[Any]:
    count = 0
    # Iterations are counted and epochs are not, as in Caffe2.
    while True:
        before = count
        for batch in source:
            count += 1
            yield batch
        # An exhausted iterator cannot be iterated again, and would repeat an empty epoch for ever.
        if count == before:
            why = "has no more batches; return something that can be iterated again, such as a DataLoader"
            raise ConfigError("input_builder_fun", f"{count} batches", why)


def _moved(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [_moved(part, device) for part in batch]
    return batch


def _total(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.detach().sum() for loss in losses]).sum()
