"""Hooks that send gradients when autograd has computed them.

There are several paths. The job chooses one (see `core.server.gradients`); `GradientPath` is what they share.

- `mean_path.MeanPath` (a synchronous group, `grads: kVisible`): each backward is reduced over the group, so that
  `p.grad` is the group's mean when `backward()` returns. Full buckets are sent during the backward. A callback at its
  end waits for the means and sets `.grad` to the earlier value plus the mean. Where servers add up, the means stay
  there until the script reads one (`lazy_gradient`).
- `push_path.PushPath` (a group of one, or `grads: kHidden`): autograd accumulates as usual. The accumulated gradient
  is sent during the backward that is expected to be the last of the step, and at `step()` again if it has changed.
- `push_path.ArrivalPath` (`apply: kOnArrival`): each bucket is applied as soon as all workers have pushed it.

A step of one of several optimizers takes the gradients of its own parameters only, and leaves all others as they are.

If parameters are on a device, a gradient arrives in "local" some time after its hook (`device_parameters`). A bucket
then leaves at a later hook, or at the end of the backward.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from weakref import ref

import torch
from torch import nn

from topotrain.config.sharding import Bucket, in_steps_of
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.tensor_bits import version_of
from topotrain.training.parameters.device_parameters import QueuedPush
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.parameters.script_hooks import ScriptHooks
from topotrain.training.worker_stats import StepBatches

_REQUIRES_GRAD = attrgetter("requires_grad")
# The number of the backward that runs, for which torch has no public name. A nested backward has a number of its own.
backward_number = torch._C._current_graph_task_id


class SentGradient:
    """A gradient that a hook has sent, to find out whether it was replaced or edited."""

    def __init__(self, gradient: torch.Tensor) -> None:
        # Not its id, which a later tensor may have.
        self._gradient, self._version = ref(gradient), version_of(gradient)

    def is_it(self, gradient: torch.Tensor) -> bool:
        """Whether this is the same gradient, perhaps changed in place."""
        return self._gradient() is gradient

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether this is the same gradient, without a change in place."""
        return gradient is not None and self._gradient() is gradient and self._version == version_of(gradient)


class GradientPath(ABC):
    """Common code of all paths: pieces of parameters, and full buckets."""

    def __init__(self, buffers: ModelBuffers, gradients: GradientExchange, batches: StepBatches) -> None:
        parts, slice_map = buffers.parts, buffers.map
        self._tensors, self._parameters = parts.tensors, parts.parameters
        self._buffers = buffers
        self._flats = buffers.flats
        self._mirror = buffers.mirror
        self._gradients = gradients
        self._map = slice_map
        self._batches = batches
        self._step = 0
        self._open = False  # a backward has begun and has not ended
        self._task: int | None = None  # autograd's number of the backward that has begun
        self.private = False
        """Whether a backward sends nothing, and `.grad` is this worker's own."""
        self.backwards = 0
        self.ended = 0
        """How many backwards, of all steps, have come to their end here."""
        self.resets = 0
        """As `Commit.resets`."""
        self.digest = 0
        """As `Commit.digest`, of the last `at_step`."""
        self._hooks = ScriptHooks(lambda: self.private)
        self._seen: dict[int, SentGradient] = {}  # by parameter: what a hook of this step has sent
        self._places: list[int] = []  # by backward: the batches that the script was given in the step before it
        # The optimizers of each parameter, and of each bucket, see `sharding.in_steps_of`.
        self._optimizers = [parameter.optimizer for parameter in parts.parameters]
        self._takes = [slice_map.spaces[bucket.space].optimizer for bucket in slice_map.buckets]
        self._pieces: list[list[tuple[Bucket, int]]] = [[] for _ in parts.tensors]
        for bucket in slice_map.buckets:
            for i, piece in enumerate(bucket.pieces):
                self._pieces[slice_map.segments[piece.segment].parameter].append((bucket, i))
        # The same with the bit of each piece, since every hook of every backward needs it.
        self._spots = [[(bucket, 1 << i) for bucket, i in pieces] for pieces in self._pieces]
        self._full = [(1 << len(bucket.pieces)) - 1 for bucket in slice_map.buckets]
        self._trains: list[bool] = []  # by parameter, at the last backward
        self.thaws = 0
        """How often other parameters trained in a backward than in the one before."""
        self._expected: list[int] = []  # bit per piece of a bucket that gets a gradient
        self._owners = [[slice_map.segments[p.segment].parameter for p in b.pieces] for b in slice_map.buckets]
        self._arrived = [0] * len(slice_map.buckets)  # bit per piece with a gradient of this backward
        self._pushed = 0  # bit per bucket that was sent in this backward
        self._hooked: set[int] = set()
        # With several devices autograd runs hooks on a thread for each.
        self._turn = threading.RLock()
        self._look_what_trains()
        for index, tensor in enumerate(parts.tensors):
            # Another worker holds a meta tensor, and integers have no gradients.
            if not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()):
                self._hooked.add(index)
                # A frozen one takes no hooks. They are called when it trains.
                trains = tensor.requires_grad
                tensor.requires_grad_(True)
                self._hook(index, tensor)
                tensor.requires_grad_(trains)

    @property
    def sent(self) -> list[torch.Tensor | None]:
        """This worker's own gradients after the last backward; None: not held here."""
        here = self._hooked if self._mirror.share == "local" else ()  # the servers have looked at others
        return [self._buffers.view("local", i) if i in here else None for i in range(len(self._tensors))]

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        # torch keeps such a hook where the garbage collector cannot see it. With a strong reference to this object a
        # model would never be freed, and a search with many rehearsals in one process would fill the memory.
        path = ref(self)

        def after(p: torch.Tensor) -> None:
            here = path()
            if here is not None:
                with here._turn:
                    here._after(index, p)

        # It fires once per parameter and backward, also for a tied weight that is used several times.
        handle = tensor.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        self._hooks.own.add(handle.id)

    @property
    def begun(self) -> bool:
        """Whether gradients of the coming step were sent."""
        return self._open or self.backwards > 0

    @property
    def ages(self) -> tuple[int, ...]:
        """As `Commit.ages`."""
        now = len(self._batches)
        found = tuple(now - place for place in self._places)
        return found if any(found) else ()

    def join(self) -> None:
        """In `step()`: take part in a backward of others, without a gradient."""
        self._gradients.end_backward(self._step, self.backwards, self._batches.weight(), 0, absent=True)
        self._count_absent()

    def _count(self) -> None:
        """A backward of this worker is over."""
        self.backwards += 1
        self._places.append(len(self._batches))

    def _count_absent(self) -> None:
        """A backward of others is over."""
        now = len(self._batches)
        # The batch of others may count for more than zero, and only the script knows how much (see `ages_of`).
        unsure = now not in self._places and self._batches.weight() > 0
        self._count()
        self._places[-1] += unsure

    @abstractmethod
    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        """Send the rest; return (revisions, edited bits, dropped bits) for the commit.

        optimizer: the number of the optimizer of the step.
        """

    def reduce_own(self) -> None:
        """Reduce gradients that no backward has made, if that can be before `step()`."""
        return

    @abstractmethod
    def _after(self, index: int, tensor: torch.Tensor) -> None:
        """Handle a parameter's gradient, which autograd has accumulated."""

    @abstractmethod
    def _end(self) -> None:
        """Handle the end of a backward."""

    def look(self) -> None:
        """A backward is about to begin: look which hooks the script has registered."""
        self._hooks.look()

    def _look_what_trains(self) -> None:
        """Look which parameters the script has frozen or thawed since the last backward."""
        self.look()
        trains = list(map(_REQUIRES_GRAD, self._tensors))
        if trains == self._trains:
            return
        self._trains = trains
        self.thaws += 1
        # Without frozen pieces: no hook fires for them, and their bucket would never be full.
        self._expected = [
            sum(1 << i for i, piece in enumerate(bucket.pieces) if trains[self._map.segments[piece.segment].parameter])
            for bucket in self._map.buckets
        ]

    def _arm(self) -> bool:
        """Register a call for the end of a backward; whether this is its first gradient."""
        # A backward that raised is never called back and leaves its number here, which no later one has.
        task = backward_number()
        if task == self._task:
            return False
        # Servers may still read "local" for a lazily committed step, and it is about to be overwritten.
        self._gradients.values.settle()
        self._look_what_trains()
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish_backward(task))
        return True

    def _finish_backward(self, task: int) -> None:
        self._task = None
        self.ended += 1
        self._end()

    def _copy_local(self, index: int, gradient: torch.Tensor) -> list[Bucket]:
        """Copy a gradient into the worker's share; return the buckets that are full now."""
        if gradient.is_sparse:
            name = self._parameters[index].name
            raise RuntimeError(f"parameter {name} has a sparse gradient: this version sends dense ones (sparse=False)")
        # After create_graph=True the gradient has a history.
        self._mirror.send(index, gradient.detach() if gradient.requires_grad else gradient)
        full = []
        for bucket, bit in self._spots[index]:
            arrived = self._arrived[bucket.id]
            if arrived & bit:
                name = self._parameters[index].name
                raise RuntimeError(
                    f"parameter {name} got its gradient twice in one backward: reentrant checkpointing does that, "
                    f"use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
                )
            self._arrived[bucket.id] = arrived = arrived | bit
            if arrived == self._expected[bucket.id]:
                full.append(bucket)
        return full

    def _send(self, number: int, bucket: Bucket, present: int, fresh: bool = False) -> None:
        """Send a bucket of the share as soon as all its gradients have arrived there."""
        body, weight = self._flats.view(self._mirror.share, bucket), self._batches.weight()
        self._mirror.then(QueuedPush(self._gradients, self._step, number, bucket, weight, present, body, fresh))

    def _zero_absent(self, bucket: Bucket) -> None:
        """Zero the pieces without a gradient."""
        local = self._flats.view(self._mirror.share, bucket)
        for i, piece in enumerate(bucket.pieces):
            if not self._arrived[bucket.id] >> i & 1:
                local[bucket.place(piece)] = 0

    def _rest(self) -> Iterator[Bucket]:
        """Yield the buckets that a backward filled in part only; other pieces are zeroed."""
        for bucket in self._map.buckets:
            if self._arrived[bucket.id] and not self._pushed >> bucket.id & 1:
                self._zero_absent(bucket)
                yield bucket

    def _gradients_of(self, optimizer: int) -> dict[int, torch.Tensor]:
        """Return the gradients of one optimizer's parameters, as the script left them."""
        tensors = zip(self._tensors, self._optimizers, strict=True)
        return {
            index: t.grad for index, (t, of) in enumerate(tensors) if in_steps_of(of, optimizer) and t.grad is not None
        }

    def finish(self) -> None:
        """The script has ended."""
        return

    def after_step(self) -> None:
        """Prepare for the next step, after this one was applied."""
        self._step += 1
        self.backwards = self.resets = self.digest = 0
        self._places.clear()
        self._seen.clear()

    def go_to(self, step: int) -> None:
        """Continue at this step. The group made the steps before it without this worker."""
        self._step = step
