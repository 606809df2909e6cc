"""Reads the state of a worker's process, and saves it on server (0,0)."""

from dataclasses import replace

import torch

from topotrain.config.job import ConfigError
from topotrain.extensions.resume.lr_schedulers import OptimizerRates
from topotrain.extensions.resume.pass_states import PassStates
from topotrain.extensions.resume.state_serialization import UnserializableState, pack
from topotrain.extensions.resume.worker_state import WorkerState
from topotrain.extensions.resume.worker_state_client import WorkerStateClient
from topotrain.training.context import Context
from topotrain.training.worker import Worker


class StateCapture:
    """The part of a worker's state that is read from its objects."""

    def __init__(self, here: Context, worker: Worker, rates: OptimizerRates) -> None:
        self._here, self._worker, self._rates = here, worker, rates
        self.passes = PassStates(worker.client.extension(WorkerStateClient), worker)
        """The states at the begins of passes."""
        # As the script has them. One that goes on with an edited script may freeze others.
        self._trained = [tensor.requires_grad for tensor in worker.parts.tensors]

    def whole(self, at: WorkerState) -> WorkerState:
        """Return the state at this position.

        Raises:
            ConfigError: an object of `tt.keep` has a state that is not plain data.
        """
        tensors: dict[str, torch.Tensor] = {}
        kept = {}
        for name, thing in self._here.kept.items():
            # Schedulers are in the part that `OptimizerRates` adds.
            if self._rates.has(thing):
                continue
            try:
                kept[name] = pack(thing.state_dict(), tensors)
            except UnserializableState as error:
                accepted = "its state must be numbers, texts, lists, dicts and tensors"
                raise ConfigError(f"tt.keep {name}", str(error), accepted) from None
        parts = self._worker.parts
        buffers = {
            # A copy: the state of a lazy step is held while BatchNorm changes the buffers.
            described.name: buffer.detach().cpu().contiguous().clone()
            for described, buffer in zip(parts.buffers, parts.buffer_tensors, strict=True)
            if not buffer.is_meta
        }
        # These are the script's, as buffers are.
        for index in self._worker.mirror.own:
            buffers[parts.parameters[index].name] = parts.tensors[index].detach().cpu().contiguous().clone()
        trains = {
            described.name: tensor.requires_grad
            for described, tensor, before in zip(parts.parameters, parts.tensors, self._trained, strict=True)
            if tensor.requires_grad != before
        }
        steps = self._worker.tally.steps
        return self._rates.pack(replace(at, steps=steps, trains=trains, kept=kept, buffers=buffers, tensors=tensors))

    def rates(self, passes: int) -> WorkerState:
        """Return a state that has learning rates and schedulers only."""
        return self._rates.pack(WorkerState(passes, self._worker.tally.steps))

    def save(self, number: int, condition: WorkerState) -> None:
        """Send the state at a snapshot to the server."""
        with self._worker.client.channel.spans.span("deposit"):
            self._worker.client.extension(WorkerStateClient).save(number, _packed(condition))

    def begin(self, condition: WorkerState) -> None:
        """Send the state at the begin of its pass, now or later (`PassStates`)."""
        with self._worker.client.channel.spans.span("deposit"):
            self.passes.begin(condition.passes, _packed(condition))

    def change(self, rates: WorkerState) -> None:
        """Send rates and schedulers that have changed within their pass."""
        with self._worker.client.channel.spans.span("deposit"):
            self.passes.change(rates.passes, _packed(rates))


def _packed(condition: WorkerState) -> torch.Tensor:
    # `frombuffer` needs writable memory. `bytes` would give a warning, and warnings are errors in tests.
    return torch.frombuffer(bytearray(condition.to_bytes()), dtype=torch.uint8)
