"""The changes of a script in the model after its last step.

The main worker's values are the job's result, as those of plain Python are. A change that only another worker has made
would be lost, so it ends the job with an error.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import torch

from topotrain.config.topology import Address, Role
from topotrain.training.final_parameters import fetch_final
from topotrain.training.parameters.device_parameters import move_to
from topotrain.training.parameters.flat_parameters import ModelParts
from topotrain.training.worker import Worker

_MAIN = Address(Role.WORKER, 0, 0)
_DIGEST = 8
"""Bytes of the digest of a parameter; 0: it was not changed."""


@dataclass(frozen=True, slots=True)
class LastWrites:
    """The parameters of one worker that its script has changed after the last step.

    Attributes:
        values: copies of them, by number.
        own: those that were the script's own before, and may differ on workers.
    """

    values: Mapping[int, torch.Tensor]
    own: Collection[int] = ()

    def result(self, worker: Worker) -> tuple[ModelParts, str]:
        """Worker (0,0): copy the job's result into the model.

        Returns:
            all parts of the model, and a complaint about changes of other workers that are lost; "": there is none.
        """
        # A script that loads parameters loads the buffers that belong to them.
        fetch_final(worker, alone=bool(self.values))
        for index in self.values.keys() - dict(worker.parts.replaced()).keys():
            move_to(worker.parts.tensors[index], self.values[index])
        return worker.parts.at_end(), self._complaint(worker)

    def digests(self, count: int) -> torch.Tensor:
        """Return the body of a `LastWrites` message about a model of so many parameters."""
        told = self.values.keys() - self.own
        found = torch.zeros(count, _DIGEST, dtype=torch.uint8)
        for index in told:
            found[index] = torch.frombuffer(bytearray(_digest(self.values[index])), dtype=torch.uint8)
        return found.view(-1)

    def _complaint(self, worker: Worker) -> str:
        mine = self.digests(len(worker.parts.parameters)).view(-1, _DIGEST)
        for (group, index), body in sorted(worker.client.buffers.last_writes.items()):
            theirs = body.view(-1, _DIGEST)
            # Asynchronous groups have other values.
            wrong = theirs.any(1) & ~(mine.any(1) if group else (theirs == mine).all(1))
            if wrong.any():
                number = int(wrong.nonzero()[0])
                return _words(worker.parts.parameters[number].name, group, index, bool(mine[number].any()))
        return ""


def _words(name: str, group: int, index: int, both: bool) -> str:
    who = Address(Role.WORKER, group, index)
    how = "in another way than by worker 0/0, the main worker" if both else "and not by worker 0/0, the main worker"
    return (
        f"parameter {name} was changed after the last step by {who} {how}. The main worker's values are the job's "
        f"result: this change would be lost. Make it alike on all workers, or on the main worker (`if tt.is_main():`), "
        f"or in a block `with tt.assign(model):`"
    )


def end_script(worker: Worker) -> LastWrites:
    """Send the worker's last messages; return what its script has changed at its end.

    The changes count in no step, nor in a round of an outer optimizer.
    """
    found = {index: tensor.detach().clone() for index, tensor in worker.buffers.edited()}
    if found and worker.runs_optimizers:
        # A round that is under way is added to the worker's own values.
        worker.client.values.settle()
        for index in found:
            worker.mirror.value(index).copy_(worker.buffers.view("params", index))
    writes = LastWrites(
        found | {index: tensor.detach() for index, tensor in worker.parts.replaced()}, worker.mirror.own
    )
    if writes.values and worker.me != _MAIN:
        worker.client.buffers.tell_writes(writes.digests(len(worker.parts.parameters)))
    worker.finish()
    return writes


def _digest(value: torch.Tensor) -> bytes:
    held = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    # Never 0, which says that nothing was changed.
    return blake2b(held.numpy().data, digest_size=_DIGEST - 1).digest() + b"\1"
