"""The sums of a unit's gradients, and the messages that bring them to servers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from topotrain.config.job import Apply, Grads, Job, NonFinite, Reduce
from topotrain.config.sharding import Bucket
from topotrain.core import protocol as m
from topotrain.core.client.client_context import ClientModel
from topotrain.core.model.schema import FlatBuffers, typed
from topotrain.core.protocol import bits_to_int, int_to_bits
from topotrain.core.server.nonfinite import all_finite
from topotrain.core.server.ordered_sum import OrderedMean
from topotrain.extensions.host_sums.host_sum_messages import HostGradient, HostPush
from topotrain.extensions.host_sums.unit_gradients import UnitSum


@dataclass(frozen=True, slots=True)
class HostSumSettings:
    """The fields of a job that decide how a unit's gradients are added up.

    Attributes:
        divide: the servers make means, so the weights count.
        replaces: a later push replaces an earlier one, and the commit says which counts.
        checked: gradients that are not finite are looked for.
    """

    divide: bool
    replaces: bool
    checked: bool

    @classmethod
    def of(cls, job: Job) -> "HostSumSettings":
        """The settings of a job."""
        replaces = job.grads is Grads.kHidden and job.apply is Apply.kAtStep
        return cls(job.reduce is Reduce.kMean, replaces, job.nonfinite is not NonFinite.kAllow)


def elements(model: ClientModel, bucket: Bucket, message: HostGradient) -> torch.Tensor:
    """Return the gradient of a message.

    Raises ProtocolError for a body of another size.
    """
    if message.body is None:
        raise m.ProtocolError(f"a gradient of bucket {bucket.id} without a body")
    return typed(message.body, model.flats.view("local", bucket))


class SumWriter:
    """Adds up gradients of a unit, and makes the messages to servers.

    Args:
        model: the model.
        settings: how gradients are added up.
        workers: of the unit.
    """

    def __init__(self, model: ClientModel, settings: HostSumSettings, workers: Sequence[int]) -> None:
        self._model, self._settings = model, settings
        self._mean = OrderedMean([workers], divide=False)
        self._buffers: dict[int, FlatBuffers] = {}
        self.sums = 0
        """Sums that were made."""
        self.apart = 0
        """Gradients that were sent one by one, because their sum would have been of no use."""

    def buffer(self, name: str, bucket: Bucket) -> torch.Tensor:
        """Memory for the sum of a bucket ("sum"), or for its new values ("values")."""
        # Of the parts of the model that this worker is the lead for.
        if bucket.shard not in self._buffers:
            self._buffers.setdefault(bucket.shard, self._model.flats.of_shard(bucket.shard))
        return self._buffers[bucket.shard].view(name, bucket)

    def messages(self, bucket: Bucket, sums: UnitSum) -> list[HostPush]:
        """One message with the sum, or one for each gradient where that is of no use."""
        counted = {worker: weight for worker, weight in sums.weights.items() if weight > 0}
        bodies = {worker: elements(self._model, bucket, gradient) for worker, gradient in sums.gradients.items()}
        weighted = self._settings.divide and len(set(counted.values())) > 1
        total: torch.Tensor | None = None
        if counted and not weighted and not sums.apart:
            total = bodies[next(iter(counted))] if len(counted) == 1 else self._sum(bucket, counted, bodies)
        if total is None:
            self.apart += len(sums.gradients)
            return [self._message(bucket, sums, [worker], bodies[worker]) for worker in sums.gradients]
        self.sums += 1
        named = [*counted, *(worker for worker in sums.weights if worker not in counted)]
        return [self._message(bucket, sums, named, total, len(counted))]

    def _sum(self, bucket: Bucket, workers: Iterable[int], bodies: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The plain sum of gradients; None: it is not finite."""
        total = self.buffer("sum", bucket)
        self._mean.write({worker: (1.0, bodies[worker]) for worker in workers}, total)
        return total if not self._settings.checked or all_finite(total) else None

    def _message(
        self, bucket: Bucket, sums: UnitSum, named: Sequence[int], body: torch.Tensor, counted: int = 1
    ) -> HostPush:
        present = 0
        for worker in named:
            present |= bits_to_int(sums.gradients[worker].present)
        revisions = tuple(sums.gradients[worker].ordinal for worker in named) if self._settings.replaces else ()
        workers, idle = tuple(named[:counted]), tuple(named[counted:])
        where = (sums.step, sums.ordinal, bucket.id, sums.number)
        bits = int_to_bits(present, len(bucket.pieces))
        return HostPush(*where, sums.weights[named[0]], bits, workers, idle, revisions, body=body)
