"""Runs a program in place of the model's forward: steps and moves of one worker.

A call begins with an exchange of hellos between all workers (`worker_sync`). Then each micro-batch runs this worker's
steps (`microbatch`). Values are sent to other workers as soon as they are made, and received where they are first
needed (`transfers`). Autograd sends gradients back along the same edges. The default schedule is GPipe (Huang et al.,
2019): all micro-batches forward, then all back.
"""

import math
import zlib
from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from topotrain.config.job import ConfigError, Schedule
from topotrain.parallel.program.split_program import LocationKind, Program, StepKind
from topotrain.parallel.program.worker_program import digest, given_of
from topotrain.parallel.runtime import dropout
from topotrain.parallel.runtime.microbatch import ForwardPass, ForwardSettings, MicroBatchState, pipe
from topotrain.parallel.runtime.model_outputs import OutputMerger, tied
from topotrain.parallel.runtime.network_channel import NetworkChannel
from topotrain.parallel.runtime.one_f_one_b import OneFOneBForward, loss_of
from topotrain.parallel.runtime.transfers import ForwardMessages
from topotrain.parallel.runtime.worker_sync import ForwardHello, WorkerSync


class Runner:
    """Replaces `model.forward`: takes this worker's samples and returns their output.

    A worker with weight 0 (it repeats samples) takes part. The gradients of parameters that only it holds must count,
    so servers use `counts`, not `weight`, as the weight of its gradients.

    Args:
        program: the same on all workers of the group.
        model: has the modules and parameters of this worker. Others may be on the meta device.
        channel: the channel to the other workers of the group.
        microbatches: the maximum number of parts into which each worker's share is cut. All shares have fewer parts if
            a worker has fewer samples.
        schedule: the order of the micro-batches.
        sync: has the weight of this worker. All runners of a process (for training, for evaluation) share it.
        generator: draws the masks of dropout.

    Raises (from a call):
        ConfigError: the workers' scripts differ, or an argument has another shape than the program.
        JobError, PeerLost: another worker or a server is lost.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        channel: NetworkChannel,
        microbatches: int = 1,
        schedule: Schedule = Schedule.kGPipe,
        sync: WorkerSync | None = None,
        generator: torch.Generator = torch.default_generator,
    ) -> None:
        if program.workers != channel.size:
            raise ConfigError(
                "split model", None, f"is cut for {program.workers} workers, the group has {channel.size}"
            )
        self.program, self.model, self.channel = program, model, channel
        self.sync = WorkerSync(channel) if sync is None else sync
        self._microbatches, self._generator = microbatches, generator
        self._loss = loss_of(program) if schedule is Schedule.k1F1B else None
        self._settings, self._outputs = ForwardSettings(program, model, channel.me), OutputMerger(program)
        self._digest = digest(program, microbatches, schedule.value)
        # Of the class, because `model.forward` may be this object by now.
        self._signature = signature(type(model).forward)
        self.counts = 0.0
        """Weight of this worker's gradients since the last call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for this worker's samples, nested as the model does."""
        given = self._bind(args, kwargs)
        hellos = self.sync.exchange(self._hello(self._samples(given)))
        given_weights = [hello.weight for hello in hellos]
        weights = tuple(weight if weight > 0 else 1.0 for weight in given_weights)
        me = self.channel.me
        # Weight 0 counts as 1 here, and `factor` takes the loss of such a worker out of the mean.
        self.counts = weights[me]
        factor = given_weights[me] / weights[me] * (sum(weights) / (sum(given_weights) or math.inf))
        forward_pass = self._forward_pass(given, tuple(hello.samples for hello in hellos), weights)
        # The backward runs inside this call, so the script's graph behind an argument cannot get a gradient.
        if self._loss is not None and torch.is_grad_enabled():
            leaves = [name for name, value in given.items() if isinstance(value, torch.Tensor) and value.requires_grad]
            if leaves:
                raise ConfigError(leaves[0], None, "must not need a gradient where schedule is k1F1B: detach it")
            return OneFOneBForward(self._settings, forward_pass, self._loss, factor)(self.channel, self.sync)
        batches = [MicroBatchState(self._settings, forward_pass, micro) for micro in range(forward_pass.micros)]
        pipe(batches, self.channel)
        output = self._outputs.joined(batches, me)
        # Without gradients there is no backward that the tokens would have to run.
        if not torch.is_grad_enabled():
            return output
        return tied(output, [token for batch in batches for token in batch.tokens], self.sync, factor)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return the arguments by name. Raises TypeError like the model's own forward."""
        bound = self._signature.bind(self.model, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                given.update(given.pop(name))
        return given

    def _samples(self, given: Mapping[str, Any]) -> int:
        """Return the number of this worker's samples, which all arguments must have."""
        found: dict[int, str] = {}
        for step, value in given_of(self.program, given):
            shape = step.shape
            if step.layout.where is not LocationKind.BATCH or shape is None or shape.batch < 0:
                continue
            name = step.target if step.kind is StepKind.INPUT else step.name
            expected = ", ".join("samples" if d == shape.batch else str(size) for d, size in enumerate(shape.sizes))
            accepted = f"the split model takes a tensor of shape ({expected})"
            if not isinstance(value, torch.Tensor) or value.dim() != len(shape.sizes):
                raise ConfigError(name, _of(value), accepted)
            samples, rest = divmod(value.shape[shape.batch], shape.per_sample)
            # A tensor that is cut by samples has a fixed number of rows per sample, which need not be one.
            if rest or tuple(value.shape) != shape.at(samples):
                raise ConfigError(name, _of(value), accepted)
            found.setdefault(samples, name)
        if len(found) > 1:
            counts = ", ".join(f"{name} has {count}" for count, name in found.items())
            raise ConfigError("split model", None, f"its arguments have different numbers of samples: {counts}")
        return next(iter(found), 0)

    def _hello(self, samples: int) -> ForwardHello:
        modes = digest(*(module.training for module in self.model.modules()))
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return ForwardHello(
            steps=self.sync.steps,
            backwards=self.sync.backwards,
            samples=samples,
            weight_bits=ForwardHello.bits(float(self.sync.weight())),
            training=int(self.model.training),
            grad=int(torch.is_grad_enabled()),
            modes=modes,
            autocast=sum(1 + hash_of(torch.get_autocast_dtype(kind)) for kind in kinds),
            program=self._digest,
            chance=dropout.digest(self.program, self.model, self._generator),
        )

    def _forward_pass(
        self, given: Mapping[str, Any], samples: tuple[int, ...], weights: tuple[float, ...]
    ) -> ForwardPass:
        # Every worker's share must have a sample for each micro-batch.
        micros = max(1, min(self._microbatches, *samples))
        drops = {step.number: drop for step in self.program.steps if (drop := dropout.dropout(step, self.model))}
        themselves = dropout.inside(self.program, self.model)
        # All workers draw all masks here, in the program's order, so that their generators stay alike.
        masks = dropout.draw(self.program, drops, self.channel.me, samples, micros, self._generator, themselves)
        # `exchange` has counted this forward already.
        forward = self.sync.forwards - 1
        messages = ForwardMessages(self.channel, forward, weights, self._device(given), self.sync)
        mine = [stop.step for stop in self._settings.stops if stop.step is not None]
        modules = {step.number: self.model.get_submodule(step.target) for step in mine if step.kind is StepKind.MODULE}
        apart = themselves | {step.number for step in mine if dropout.draws_by_itself(step, self.model)}
        return ForwardPass(forward, messages, given, samples, micros, drops, masks, modules, apart)

    def _device(self, given: Mapping[str, Any]) -> torch.device:
        """Return the device of this worker: that of its parameters, else of its arguments."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *given.values()]
        devices = (tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_meta)
        return next(devices, torch.device("cpu"))


def hash_of(dtype: torch.dtype) -> int:
    """Return a number for a dtype that is the same in every process."""
    # The `hash` of a text differs from process to process.
    return zlib.crc32(str(dtype).encode())


def _of(value: Any) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value
