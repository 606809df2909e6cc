"""Gradients that are sent once a step, or bucket by bucket to be applied at once."""

import torch

from topotrain.config.sharding import Bucket, in_steps_of
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.tensor_bits import same_bits, version_of
from topotrain.core.optim.adapter import HyperEncoder
from topotrain.core.protocol import NO_REVISION
from topotrain.training.gradients.gradient_hooks import GradientPath, SentGradient
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_stats import StepBatches


class StepHabits:
    """The order of a script's last steps, to guess the next one.

    Attributes:
        optimizer: the number of the optimizer of the next step.
        backwards: the number of backwards before it.
    """

    def __init__(self, backwards: int) -> None:
        self.optimizer, self.backwards = 0, backwards
        self._of: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._last = 0

    def note(self, optimizer: int, backwards: int) -> None:
        """A step of this optimizer is made, after so many backwards."""
        # Most scripts make as many backwards in each step of an optimizer, and its steps in the same order.
        self._of[optimizer], self._after[self._last] = max(1, backwards), optimizer
        self._last = optimizer
        self.optimizer = self._after.get(optimizer, optimizer)
        self.backwards = self._of.get(self.optimizer, 1)


class PushPath(GradientPath):
    """Lets autograd accumulate, and sends the sum during the step's last backward.

    The last backward is guessed from the step before.

    Args:
        compare: find the script's edits by comparing bits (a group of one, where the script's gradient counts).
            Otherwise an edit is an error, because the other workers cannot know of it.
        eager: send during the backward, and not only at `step()`.
    """

    def __init__(
        self,
        buffers: ModelBuffers,
        gradients: GradientExchange,
        batches: StepBatches,
        compare: bool,
        eager: bool = True,
    ) -> None:
        self._compare = compare
        # If the servers read this memory itself at step(), edits need not be found. If an edit is an error, the version
        # of the tensor shows it. Otherwise `.grad` must stay apart from the sent gradient, to be compared with it.
        self._sees = eager and (gradients.model.windowed or not compare)
        self._eager = eager
        self._habits = StepHabits(1 if eager else 0)
        self._revision = [NO_REVISION] * len(buffers.map.buckets)
        self._sent = [0] * len(buffers.map.buckets)  # bit per piece with a gradient in the last push
        self._unsent = [False] * len(buffers.map.buckets)  # "local" is newer than what was pushed
        self._pushes = [0] * len(buffers.map.buckets)  # in this step; numbers the revisions
        super().__init__(buffers, gradients, batches)

    @property
    def begun(self) -> bool:
        return any(self._pushes) or super().begun

    def begin(self) -> None:
        """Begin a backward that may reach no parameter of this worker (a split model)."""
        with self._turn:
            if not self.private and self._arm():
                self._arrived = [0] * len(self._arrived)

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        if self.private or tensor.grad is None:
            return
        if self._arm():
            self._arrived = [0] * len(self._arrived)
        full = self._copy_local(index, tensor.grad)
        if self._sees:
            self._mirror.keep(index)
        for bucket, _ in self._pieces[index]:
            self._unsent[bucket.id] = True
        self._seen[index] = SentGradient(tensor.grad)
        if self.backwards == self._habits.backwards - 1:
            for bucket in full:
                # What another optimizer's step takes would be pushed for nothing.
                if not in_steps_of(self._takes[bucket.id], self._habits.optimizer):
                    continue
                # A revision is one byte, and each backward that raised took one. The last is left for `at_step`.
                if self._pushes[bucket.id] < NO_REVISION - 2:
                    self._push(bucket, self._arrived[bucket.id])

    def _push(self, bucket: Bucket, present: int) -> None:
        self._pushes[bucket.id] = number = self._pushes[bucket.id] + 1
        self._revision[bucket.id] = number
        self._sent[bucket.id] = present
        self._unsent[bucket.id] = False
        self._send(number, bucket, present)

    def _end(self) -> None:
        self._mirror.drain()
        self._count()

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        self._mirror.drain()
        if self._eager:
            self._habits.note(optimizer, self.backwards)
        wanted = [0] * len(self._map.buckets)
        gradients = self._gradients_of(optimizer)
        # Where an edit is an error, only gradients that no hook has seen have to be read.
        unknown = {index: g for index, g in gradients.items() if self._compare or index not in self._seen}
        left = self._mirror.bring("local" if self._sees else "left", unknown)
        for index, gradient in gradients.items():
            self._check_edit(index, gradient)
            self._collect(index, left.get(index), wanted)
        for bucket in self._map.buckets:
            present = wanted[bucket.id]
            # The guess was wrong, the script has edited a gradient, or has set one to None.
            if present and (self._unsent[bucket.id] or self._sent[bucket.id] != present):
                self._arrived[bucket.id] = present
                self._zero_absent(bucket)
                self._push(bucket, present)
            elif not present:
                # What was pushed must not count: the script has set all these gradients to None.
                self._revision[bucket.id] = NO_REVISION
        self._mirror.drain()
        return tuple(self._revision), 0, 0

    def _check_edit(self, index: int, gradient: torch.Tensor) -> None:
        if self._compare:
            return
        known = self._seen.get(index)
        # One that no backward has made may be clipped by the norm of the share. An earlier one is in "local".
        other = gradient.data_ptr() != self._buffers.view("local", index).data_ptr()
        if other and version_of(gradient) if known is None else not known.is_still(gradient):
            raise RuntimeError(
                f"the gradient of {self._parameters[index].name} was changed, but with grads: kHidden it was sent "
                f"already; use grads: kVisible, tt.clip_grad_norm_, or updater {{ clip_norm: … }} in the job file"
            )

    def _collect(self, index: int, left: torch.Tensor | None, wanted: list[int]) -> None:
        """Update "local" with the script's gradient, and note the buckets to send (again)."""
        # `left` is None for a gradient that the script has not changed. "local" is a copy of it already.
        changed = index not in self._seen
        if left is not None:
            local = self._buffers.view("local", index)
            if left.data_ptr() != local.data_ptr():
                changed = changed or not same_bits(left, local)
                if changed:
                    local.copy_(left)
        for bucket, i in self._pieces[index]:
            wanted[bucket.id] |= 1 << i
            self._unsent[bucket.id] = self._unsent[bucket.id] or changed

    def after_step(self) -> None:
        super().after_step()
        self._revision = [NO_REVISION] * len(self._revision)
        self._sent = [0] * len(self._sent)
        self._unsent = [False] * len(self._unsent)
        self._pushes = [0] * len(self._pushes)


class ArrivalPath(GradientPath):
    """Sends buckets that servers apply during the backward (`apply: kOnArrival`).

    An applied gradient cannot be taken back. So a step has one backward, and anything that would need more is an error.

    Args:
        hyper: returns the optimizer's present hyper-parameters.
    """

    def __init__(
        self, buffers: ModelBuffers, gradients: GradientExchange, batches: StepBatches, hyper: HyperEncoder
    ) -> None:
        self._hyper = hyper
        self._sent_hyper = b""
        super().__init__(buffers, gradients, batches)

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        if self.private or tensor.grad is None:
            return
        if self._arm():
            self._begin()
        full = self._copy_local(index, tensor.grad)
        self._mirror.keep(index)
        self._seen[index] = SentGradient(tensor.grad)
        for bucket in full:
            self._push(bucket)

    def _begin(self) -> None:
        if self._open or self.backwards:
            what = "a backward raised, and part of it is applied" if self._open else "a second backward began"
            raise RuntimeError(
                f"{what}: apply: kOnArrival needs exactly one backward for each optimizer.step() "
                f"(use apply: kAtStep, or make a backward private: `with tt.local():`)"
            )
        self._open = True
        self._arrived = [0] * len(self._arrived)
        self._pushed = 0
        rates = self._hyper()
        if rates != self._sent_hyper:
            # Servers apply buckets before the commit, so they need the rates before the first bucket.
            self._sent_hyper = rates
            self._gradients.set_rates(rates)

    def _push(self, bucket: Bucket) -> None:
        self._pushed |= 1 << bucket.id
        self._send(0, bucket, self._arrived[bucket.id])

    def _end(self) -> None:
        for bucket in self._rest():
            self._push(bucket)
        self._mirror.drain()
        self._gradients.end_backward(self._step, 0, self._batches.weight(), self._pushed)
        self._count()
        self._open = False

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        if self.backwards and self._hyper() != self._sent_hyper:
            raise RuntimeError(
                "the optimizer's hyper-parameters changed between backward() and step(), but with apply: kOnArrival "
                "the gradients are applied already: change them after step()"
            )
        for index, tensor in enumerate(self._tensors):
            known = self._seen.get(index)
            if not (tensor.grad is None if known is None else known.is_still(tensor.grad)):
                raise RuntimeError(
                    f"the gradient of {self._parameters[index].name} is not what backward() left, but with apply: "
                    f"kOnArrival it is applied already; use apply: kAtStep, or updater {{ clip_low, clip_high }}"
                )
        return (), 0, 0
