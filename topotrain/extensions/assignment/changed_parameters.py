"""Copies of parameters that the script may change, and what it has changed.

The parameters of a worker may be memory of its servers, or of other workers of the host, which read it meanwhile. So
the script gets parameters in memory of this worker alone. On a device they are where they were: the servers see only
their copies on the host.
"""

from collections.abc import Iterable, Iterator, Sequence

from topotrain.config.sharding import Bucket
from topotrain.extensions.assignment.assignment_client import ChangedBucket, changed_bucket
from topotrain.training.parameters.device_parameters import HostParameters, move_to
from topotrain.training.worker import Worker

NEW, OLD = "assigned", "before assignment"
"""Names of flat buffers: the values that the script leaves, and those that it found."""


class ChangedParameters:
    """The parameters of one worker while the script changes them.

    Args:
        worker: the worker.
        indices: of the parameters that the script may change.
        apart: other groups change the values meanwhile, so the changes are found element by element.
    """

    def __init__(self, worker: Worker, indices: Sequence[int], apart: bool) -> None:
        self._worker, self._buffers, self._apart = worker, worker.buffers, apart
        tensors = worker.parts.tensors
        # A tensor on the meta device belongs to another worker.
        self._tensors = {index: tensors[index] for index in indices if not tensors[index].is_meta}
        self._on_host = isinstance(worker.mirror, HostParameters)
        for index, tensor in self._tensors.items() if self._on_host else ():
            self._buffers.view(NEW, index).copy_(tensor.detach())
            move_to(tensor, self._buffers.own(NEW, index))
        if apart:
            self._bring(OLD)
        self._buffers.lent = self._tensors.keys()
        self._memory = {index: tensor.data for index, tensor in self._tensors.items()}

    def _bring(self, name: str) -> None:
        """Copy the parameters into a flat buffer."""
        if self._on_host:
            for index, tensor in self._tensors.items():
                view = self._buffers.view(name, index)
                if view.data_ptr() != tensor.data_ptr():
                    view.copy_(tensor.detach())
        else:
            self._worker.mirror.bring(name, {index: tensor.data for index, tensor in self._tensors.items()})

    def outside(self) -> str:
        """The name of a parameter that was changed, and is not one of these; "": none."""
        edited = (index for index, _ in self._buffers.edited() if index not in self._worker.mirror.own)
        return next((self._worker.parts.parameters[index].name for index in edited), "")

    def collect(self) -> None:
        """Take what the script has left in the parameters.

        Raises:
            RuntimeError: a parameter has another shape, dtype or device now.
        """
        for index, tensor in self._tensors.items():
            memory = self._memory[index]
            if tensor.data_ptr() == memory.data_ptr():
                continue
            now, before = ((t.shape, t.dtype, t.device) for t in (tensor, memory))
            if now != before:
                words = " and ".join(f"{tuple(t[0])} of {t[1]} on {t[2]}" for t in (before, now))
                name = self._worker.parts.parameters[index].name
                raise RuntimeError(f"tt.assign: parameter {name} must keep its shape, dtype and device: {words}")
            # The script has set `p.data`. The parameter keeps its memory, and gets the values.
            memory.copy_(tensor.data)
            move_to(tensor, memory)
        self._bring(NEW)

    def changed(self, buckets: Iterable[Bucket]) -> Iterator[ChangedBucket]:
        """Yield those of these buckets that have changed."""
        flats, slice_map = self._buffers.flats, self._worker.client.model.map
        for bucket in buckets:
            pieces = [
                i for i, p in enumerate(bucket.pieces) if slice_map.segments[p.segment].parameter in self._tensors
            ]
            old = flats.view(OLD if self._apart else "params", bucket)
            changed = changed_bucket(bucket, pieces, flats.view(NEW, bucket), old, self._apart)
            if changed is not None:
                yield changed

    def take(self) -> None:
        """The servers have the values, which are no edit any more."""
        self._worker.mirror.take(self._tensors.keys())

    def give_back(self) -> None:
        """Connect the parameters to the job again, with the values that are there now."""
        for index, tensor in self._tensors.items():
            if tensor.data_ptr() != self._memory[index].data_ptr():
                move_to(tensor, self._memory[index])
        self._buffers.lent = ()
        self._buffers.move_model()
