"""Hooks that send gradients when autograd has computed them.

There are several paths. The job chooses one (see `core.server.gradients`).

- *MeanPath* (a synchronous group, `grads: kVisible`): each backward is reduced over the group, so that `p.grad` is the
  group's mean when `backward()` returns. Full buckets are sent during the backward. A callback at its end waits for the
  means and sets `.grad` to the earlier value plus the mean. Where servers add up, the means stay there until the script
  reads one (`lazy_gradient`).
- *PushPath* (a group of one, or `grads: kHidden`): autograd accumulates as usual. The accumulated gradient is sent
  during the backward that is expected to be the last of the step, and at `step()` again if it is another one then.
- *ArrivalPath* (`apply: kOnArrival`): each bucket is applied as soon as all workers have pushed it.

A step of one of several optimizers takes the gradients of its own parameters only, and leaves all others as they are.

If parameters are on a device, a gradient arrives in "local" some time after its hook (`device_parameters`). A bucket
then leaves at a later hook, or at the end of the backward.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import nn

from topotrain.config.sharding import Bucket, in_steps_of
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.tensor_bits import same_bits, sum_of_bits, version_of
from topotrain.core.optim.adapter import HyperEncoder
from topotrain.core.protocol import NO_REVISION
from topotrain.training.parameters.device_parameters import HostParameters, QueuedPush
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.parameters.lazy_gradient import LazyGradient, MeanReader
from topotrain.training.parameters.script_hooks import ScriptHooks
from topotrain.training.worker_stats import StepBatches

_REQUIRES_GRAD = attrgetter("requires_grad")
_ALWAYS_READ = 3  # steps in a row with a look at a mean, after which all means are sent at once
# The number of the backward that runs, for which torch has no public name. A nested backward has a number of its own.
_backward_number = torch._C._current_graph_task_id


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
        self._seen: dict[int, _SentGradient] = {}  # by parameter: what a hook of this step has sent
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
        task = _backward_number()
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


class _SentGradient:
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


class _MeanWithoutGraph(torch.autograd.Function):
    """A mean instead of a gradient with a graph. A derivative of it is an error."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return mean.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "a second derivative through p.grad: after backward(create_graph=True) it is the mean of the group's "
            "workers, which has no graph; add the penalty to the loss before backward(), with "
            "torch.autograd.grad(…, create_graph=True), where it is a mean over samples"
        )


class MeanPath(GradientPath, MeanReader):
    """Reduces every backward, so that `p.grad` is the group's mean.

    Args:
        in_place: in shared memory, means may take the place of the workers' own gradients.
    """

    def __init__(
        self, buffers: ModelBuffers, gradients: GradientExchange, batches: StepBatches, in_place: bool = False
    ) -> None:
        self._earlier: dict[int, torch.Tensor] = {}  # `.grad` from before this backward
        self._union = [0] * len(buffers.map.buckets)  # bit per piece with a mean in this step, by any worker
        self._sums: dict[int, torch.Tensor] = {}  # sum of the step's means by bucket, as the servers have it
        self._own_sums = False  # the sums are copies, and not views that the next means overwrite
        self._left: dict[int, _SentGradient] = {}  # the last mean of each parameter, as the script got it
        self._by_hooks: dict[int, _SentGradient] = {}  # what the script's hooks have made of the last mean
        self._touched: set[int] = set()  # parameters with a mean that the script changed before a later backward
        self._graphs: set[int] = set()  # parameters with a gradient of this backward that has a graph
        self._lazy = False  # the means of this backward stay at the servers
        self._unread: dict[int, ref[LazyGradient]] = {}  # by parameter: means that are at the servers
        self._unread_step = 0  # the step of their backward
        self._reads = 0  # steps in a row in which they were read
        self._was_read = False
        super().__init__(buffers, gradients, batches)
        if in_place and gradients.model.windowed and isinstance(self._mirror, HostParameters):
            self._mirror.share = "grad"
        self.look()

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        def before(_: torch.Tensor) -> None:
            self._before(index, tensor)

        # A hook of a leaf itself is called before autograd accumulates into its `.grad`.
        handle = tensor.register_hook(before)  # type: ignore[no-untyped-call]
        self._hooks.own.add(handle.id)
        super()._hook(index, tensor)
        self._hooks.watch(index, tensor)

    def _before(self, index: int, tensor: nn.Parameter) -> None:
        # Nothing is to be set aside in a backward that has begun. Most hooks of most scripts end here.
        if tensor.grad is None and self._task == _backward_number():
            return
        with self._turn:
            self._set_aside(index, tensor)

    def _set_aside(self, index: int, tensor: nn.Parameter) -> None:
        if isinstance(tensor.grad, LazyGradient):
            self._mirror.set_gradient(index, tensor.grad.read())
        if self.private:
            return
        if self._arm():
            self._begin()
        # To a gradient that the script has made of this share, autograd adds that of this backward.
        if tensor.grad is not None and not self._is_added_to(index, tensor.grad):
            local = self._buffers.view(self._mirror.share, index)
            if self.backwards and self._is_changed(index, tensor.grad):
                self._touched.add(index)
            # A backward that raised has left a view of "local" here, which this backward overwrites.
            alias = tensor.grad.data_ptr() == local.data_ptr()
            self._earlier[index] = tensor.grad.clone() if alias else tensor.grad
            # Autograd now stores the gradient of this backward alone. The earlier one is a mean already, and must not
            # be reduced again.
            self._mirror.set_gradient(index, None)

    def _begin(self) -> None:
        self._give_up()
        # To the mean in `.grad` that of this backward is added, so the gradients in between need a place of their own.
        if self._mirror.share == "grad" and any(tensor.grad is not None for tensor in self._tensors):
            self._mirror.part()
        # The servers are about to overwrite the means. Another backward of the step needs the sums of all.
        if self.backwards or any(known() is not None for known in self._unread.values()):
            self.read_means()
        self._unread.clear()
        self._lazy = self._may_be_lazy()
        self._gradients.begin_backward(self._lazy)
        self.resets += self._is_reset()
        self._open = True
        # After one backward the sums are the means themselves, in memory that the next means overwrite.
        if self.backwards == 1:
            self._keep_sums()

    def _may_be_lazy(self) -> bool:
        # The means that a script reads at each step are there earlier without a request. For a gradient of another
        # class on a device, torch could take other kernels, with other last bits.
        return (
            self._gradients.keeps
            and self._reads < _ALWAYS_READ
            and not self.backwards
            and not self._hooks.of
            and isinstance(self._mirror, HostParameters)
            and all(tensor.grad is None for tensor in self._tensors)
        )

    def _is_reset(self) -> bool:
        """Whether the script dropped the step's gradient so far, judged by one parameter."""
        index = next((owners[0] for owners, here in zip(self._owners, self._union, strict=True) if here & 1), None)
        gradient = None if index is None else self._tensors[index].grad
        return index is not None and (gradient is None or not gradient.any())

    def _give_up(self) -> None:
        """End a backward that raised."""
        if not self._open:
            return
        self.resets += 1
        # Part of it was sent and cannot be taken back, so it counts as a backward for the servers.
        self._mirror.drain()
        self._gradients.end_backward(self._step, self.backwards, self._batches.weight(), self._pushed)
        means, written = self._gradients.wait_means()
        if self._lazy:
            means, written = self._gradients.ask_means(), 0
        # Not added to `.grad`: it then differs from the sums of the servers, and counts as the script's edit.
        for number, (present, mean) in means.items():
            self._sum(self._map.buckets[number], present, mean)
        self._note_written(written)
        self._count()
        self._close()

    def _close(self) -> None:
        self._open = False
        self._earlier.clear()
        self._hooks.held.clear()
        self._graphs.clear()
        self._arrived = [0] * len(self._arrived)
        self._pushed = 0

    def _finish_backward(self, task: int) -> None:
        if task != self._task:
            raise RuntimeError(
                "a backward ran inside another one, and both have gradients: reentrant checkpointing does that, "
                "use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
        super()._finish_backward(task)

    def _keep_sums(self) -> None:
        """Copy the running sums to a separate buffer, before new means overwrite them."""
        for number, mean in self._sums.items():
            kept = self._flats.view("expected", self._map.buckets[number])
            kept.copy_(mean)
            self._sums[number] = kept
        self._own_sums = True

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        if self.private or tensor.grad is None:
            return
        if tensor.grad.grad_fn is not None:
            self._graphs.add(index)
        full = self._copy_local(index, tensor.grad)
        self._mirror.keep(index)
        for bucket in full:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        self._pushed |= 1 << bucket.id
        fresh = self._gradients.model.windowed and self._is_fresh(bucket)
        self._send(self.backwards, bucket, self._arrived[bucket.id], fresh=fresh)

    def _is_fresh(self, bucket: Bucket) -> bool:
        """Return whether the bucket's parameters had no `.grad` before this backward."""
        # A server then may write the mean into "grad". Elsewhere it is added to the earlier value here.
        owners, arrived = self._owners[bucket.id], self._arrived[bucket.id]
        if not self._earlier.keys().isdisjoint(owners):
            return False
        if arrived == self._full[bucket.id]:
            return True
        return all(arrived >> i & 1 or self._tensors[index].grad is None for i, index in enumerate(owners))

    def _end(self) -> None:
        if not any(self._arrived):
            # autograd.grad() calls the hook before accumulation, too, but accumulates nothing.
            for index, gradient in self._earlier.items():
                self._mirror.set_gradient(index, gradient)
            held = next(iter(self._hooks.held), None)
            self._close()
            if held is not None:
                name = self._parameters[held].name
                raise RuntimeError(
                    f"parameter {name} has a hook (register_hook), which is called with the mean of the group, and "
                    f"torch.autograd.grad gives this worker's own gradient: use one of the two, or `with tt.local():`"
                )
            return
        self._call_hooks(self._reduce(hooks=True))

    def _reduce(self, hooks: bool) -> dict[int, torch.Tensor | None]:
        """Send the rest of a backward, and do as `_take_means`."""
        for bucket in self._rest():
            self._push(bucket)
        # The end of a backward lists its buckets, so all of them are sent before it.
        self._mirror.drain()
        self._gradients.end_backward(self._step, self.backwards, self._batches.weight(), self._pushed)
        hooked = self._take_means(hooks)
        self._count()
        self._close()
        return hooked

    def join(self) -> None:
        self._begin()
        super().join()
        hooked = self._take_means(hooks=True)
        self._close()
        self._call_hooks(hooked)

    @torch.no_grad()
    def _take_means(self, hooks: bool) -> dict[int, torch.Tensor | None]:
        """Show the means; return the parameters with hooks to call, and `.grad` to add."""
        means, written = self._gradients.wait_means()
        if self._lazy:
            kept = self._note_written(written)
            self._show_lazily(kept)
            if self._graphs:
                self.read_means()
                self._cut_graphs(kept)
            return {}
        shown = self._add(means)
        shown.update(dict.fromkeys(self._note_written(written)))
        hooked = {index: shown[index] for index in sorted(self._hooks.of.keys() & shown) if hooks}
        self._mirror.show(shown | dict.fromkeys(hooked))
        for index in shown:
            gradient = self._tensors[index].grad
            assert gradient is not None
            self._left[index] = _SentGradient(gradient)
        self._cut_graphs(shown)
        return hooked

    def _cut_graphs(self, shown: Collection[int]) -> None:
        """Make a derivative of a mean in place of a gradient with a graph an error."""
        for index in self._graphs.intersection(shown):
            gradient = self._tensors[index].grad
            with torch.enable_grad():
                gradient = _MeanWithoutGraph.apply(torch.empty(0, requires_grad=True), gradient)  # type: ignore[no-untyped-call]
            self._mirror.set_gradient(index, gradient)
            self._left[index] = _SentGradient(gradient)

    # --- means that stay at the servers ----------------------------------------------------------------------------

    def _show_lazily(self, indices: set[int]) -> None:
        self._unread_step = self._step
        for index in indices:
            gradient = LazyGradient(self._tensors[index], self, self._parameters[index].name)
            self._mirror.set_gradient(index, gradient)
            self._unread[index], self._left[index] = ref(gradient), _SentGradient(gradient)

    @torch.no_grad()
    def read_means(self) -> None:
        with self._turn:
            unread, self._unread = self._unread, {}
            if not unread:
                return
            self._was_read = True
            means = self._gradients.ask_means()
            for number, (present, mean) in means.items():
                bucket = self._map.buckets[number]
                # After its step the servers need no sum of it any more.
                if self._unread_step == self._step:
                    self._sum(bucket, present, mean)
                grad = self._flats.view("grad", bucket)
                for i, piece in enumerate(bucket.pieces):
                    if present >> i & 1:
                        part = bucket.place(piece)
                        grad[part] = mean[part]
            for index, known in unread.items():
                gradient = known()
                if gradient is not None:
                    # As without lazy means: a worker that its group has left behind goes on with its own gradient.
                    gradient.plain = plain = self._buffers.view("grad" if means else "local", index).detach()
                    # A script that has converted the parameter is about to convert the gradient.
                    if self._tensors[index].grad is gradient and self._tensors[index].dtype == plain.dtype:
                        self._mirror.set_gradient(index, plain)
                        self._left[index] = _SentGradient(plain)

    def finish(self) -> None:
        self._unread.clear()

    def _gradients_of(self, optimizer: int) -> dict[int, torch.Tensor]:
        found = super()._gradients_of(optimizer)
        # A mean of an earlier step, or in another place, is the script's gradient as any other.
        for index, gradient in found.items():
            if isinstance(gradient, LazyGradient) and not self._is_unread(index, gradient):
                found[index] = gradient.read()
        return found

    def _is_unread(self, index: int, gradient: LazyGradient) -> bool:
        """Whether this is the present step's mean in its place, as the servers have it."""
        known = self._unread.get(index)
        return known is not None and known() is gradient and self._unread_step == self._step

    def _call_hooks(self, hooked: Mapping[int, torch.Tensor | None]) -> None:
        """Call the script's hooks, as autograd does. They may make a step."""
        # A mean in place of a gradient with a graph has no derivative, and neither has what a hook makes of it.
        graphs = {index for index in hooked if getattr(self._tensors[index].grad, "requires_grad", False)}
        for index, earlier in hooked.items():
            gradient = self._tensors[index].grad
            assert gradient is not None
            with torch.set_grad_enabled(index in graphs):
                gradient = self._hooks.on_gradient(index, gradient)
                self._mirror.set_gradient(index, gradient if earlier is None else earlier.add_(gradient))
        for index in hooked:
            with torch.set_grad_enabled(index in graphs):
                self._hooks.behind(index, self._tensors[index])
            gradient = self._tensors[index].grad
            if gradient is not None:
                self._by_hooks[index] = _SentGradient(gradient)

    def _note_written(self, written: int) -> set[int]:
        """Record pieces that the servers wrote into "grad" and return their parameters."""
        found: set[int] = set()
        first = 0  # bit of the bucket's first piece: `written` numbers the pieces over all buckets
        for bucket in self._map.buckets if written else ():
            full = self._full[bucket.id]
            here = written >> first & full
            self._union[bucket.id] |= here
            owners = self._owners[bucket.id]
            found.update(owners if here == full else (index for i, index in enumerate(owners) if here >> i & 1))
            first += len(bucket.pieces)
        return found

    def _add(self, means: dict[int, tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor | None]:
        """Put means into "grad"; return their parameters with the `.grad` to be added."""
        shown: dict[int, torch.Tensor | None] = {}
        parts: dict[int, list[tuple[Bucket, int, torch.Tensor]]] = {}
        for number, (present, mean) in means.items():
            bucket = self._map.buckets[number]
            self._sum(bucket, present, mean)
            if present == self._full[number] and self._is_fresh(bucket):
                self._flats.view("grad", bucket).copy_(mean)
                shown |= dict.fromkeys(self._owners[number])
                continue
            for i, piece in enumerate(bucket.pieces):
                if present >> i & 1:
                    index = self._map.segments[piece.segment].parameter
                    part = mean[bucket.place(piece)]
                    parts.setdefault(index, []).append((bucket, i, part))
        return shown | {index: self._add_to(index, rows) for index, rows in parts.items()}

    def _sum(self, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        # Here the servers get "grad" itself, so there is nothing to compare at step().
        if self._gradients.model.windowed or self._gradients.model.sends_own_shard:
            self._union[bucket.id] |= present
            return
        if bucket.id not in self._sums:
            self._sums[bucket.id] = mean
            if self._own_sums:
                self._sums[bucket.id] = self._flats.view("expected", bucket)
                self._sums[bucket.id].copy_(mean)
        else:
            self._sums[bucket.id].add_(mean)
        self._union[bucket.id] |= present

    def _add_to(self, index: int, rows: list[tuple[Bucket, int, torch.Tensor]]) -> torch.Tensor | None:
        mine = self._buffers.view("grad", index)
        earlier = self._earlier.get(index)
        # Only other workers had a gradient, so no hook of this backward has set `.grad` aside.
        if earlier is None and not all(self._arrived[bucket.id] >> i & 1 for bucket, i in self._pieces[index]):
            earlier = self._tensors[index].grad
        # Where an earlier backward of this step has made `.grad` the flat buffer.
        in_place = earlier is not None and earlier.data_ptr() == mine.data_ptr()
        if in_place and earlier is not None and index in self._hooks.of:
            earlier, in_place = earlier.clone(), False  # the hooks get the mean of this backward alone
        for bucket, i, part in rows:
            piece = bucket.pieces[i]
            target = self._flats.view("grad", bucket)[bucket.place(piece)]
            if in_place:
                target.add_(part)
            else:
                target.copy_(part)
        return None if in_place else earlier

    def at_step(self, step: int, optimizer: int = 0) -> tuple[tuple[int, ...], int, int]:
        # The script may call step() after a backward that raised.
        self._give_up()
        self._reduce_own(self._gradients_of(optimizer))
        edited = dropped = 0
        model, union = self._gradients.model, self._union
        mine = self._gradients_of(optimizer)
        left = self._mirror.bring("grad", mine)
        compared: list[int] = []
        changed: list[int] = []  # gradients that the script has changed, or made itself
        for index, of in enumerate(self._optimizers):
            spots = self._spots[index]
            if not spots:  # a parameter without elements
                continue
            # `.grad` keeps the mean for the step of its own optimizer, which sends it as an edit: the servers forget.
            if not in_steps_of(of, optimizer):
                dropped |= self._bits(index)
                continue
            missing = [bit for bucket, bit in spots if not union[bucket.id] & bit]
            gradient = left.get(index)
            if gradient is None:
                dropped |= 0 if missing else self._bits(index)
                continue
            if isinstance(gradient, LazyGradient):
                continue
            kept = self._buffers.view("grad", index)
            if gradient is not kept and gradient.data_ptr() != kept.data_ptr():
                kept.copy_(gradient)
            # No worker had a gradient and the script has made one; or a collective, whose means the servers never saw.
            if missing or model.sends_own_shard:
                edited |= self._bits(index)
            elif not model.windowed:
                compared.append(index)
                continue
            if self._is_changed(index, mine[index]):
                changed.append(index)
        # In shared memory the servers read "grad" when they apply the step.
        if not model.windowed:
            found = self._edited(compared)
            changed += [index for index in compared if found & self._bits(index)] if found else []
            edited |= found
            self._send_edits(step, edited)
        self.digest = self._digest(changed)
        return (), edited, dropped

    def _is_own(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is no mean: the script has made it, of this worker's share."""
        if any(self._union[bucket.id] & bit for bucket, bit in self._spots[index]):
            return False
        left = self._left.get(index)
        return left is None or not left.is_still(gradient)

    def _is_added_to(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether autograd adds to this gradient of the same share. Raises RuntimeError."""
        own = self._is_own(index, gradient)
        if not own or index not in self._hooks.of:
            return own
        # Hooks are called with the mean of one backward, so what they made of an earlier one is set aside.
        hooked = self._by_hooks.get(index)
        if (hooked is not None and hooked.is_it(gradient)) or not gradient.any():
            return False
        raise RuntimeError(
            f"parameter {self._parameters[index].name} has a hook, which is called with the mean of the group, and a "
            f".grad that no backward has made, or that was replaced before the last step(): call optimizer.zero_grad() "
            f"before this backward()"
        )

    def _is_changed(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether the script may have changed the mean in `.grad`, or made it."""
        left = self._left.get(index)
        return index in self._touched or left is None or not left.is_still(gradient)

    def _digest(self, indices: list[int]) -> int:
        """As `Commit.digest`, of the gradients in "grad"."""
        digest = 0
        for index in indices:
            for bucket, i in self._pieces[index]:
                piece = bucket.pieces[i]
                part = self._flats.view("grad", bucket)[bucket.place(piece)]
                digest = digest * 0x9E3779B1 + sum_of_bits(part) + 1 & (1 << 63) - 1
        return digest

    def reduce_own(self) -> None:
        self._gradients.values.settle()
        self._give_up()
        gradients = {i: t.grad for i, t in enumerate(self._tensors) if t.grad is not None and not self.private}
        self._reduce_own({i: g for i, g in gradients.items() if not isinstance(g, LazyGradient)})

    def _reduce_own(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Reduce gradients that no backward has made, as those of a backward are."""
        own = [
            index
            for index, gradient in gradients.items()
            if self._is_own(index, gradient) and self._is_share(index, gradient)
        ]
        if own:
            self._begin()
            for index in own:
                self._after(index, self._tensors[index])
            # Without a backward autograd calls no hooks.
            self._reduce(hooks=False)

    def _is_share(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient that no backward has made is one of the share."""
        # zero_grad(set_to_none=False) has made the old mean one of zeros.
        if gradient.data_ptr() == self._buffers.view("grad", index).data_ptr():
            return bool(gradient.any())
        # One that was changed in place may be clipped by the norm of the share. It counts as it is, if it is the same
        # on all workers, as the mean is.
        return not version_of(gradient)

    def _bits(self, index: int) -> int:
        bits = 0
        for bucket, i in self._pieces[index]:
            bits |= self._gradients.model.piece_bit(bucket, i)
        return bits

    def _edited(self, indices: list[int]) -> int:
        """Return the pieces of these parameters that differ in bits from the sum of means."""
        bits = 0
        differ: dict[int, bool] = {}  # by bucket: most scripts edit nothing, so that one look is enough for all pieces
        for index in indices:
            for bucket, i in self._pieces[index]:
                if bucket.id not in differ:
                    differ[bucket.id] = self._differs(bucket, slice(None))
                piece = bucket.pieces[i]
                if differ[bucket.id] and self._differs(bucket, bucket.place(piece)):
                    bits |= self._gradients.model.piece_bit(bucket, i)
        return bits

    def _differs(self, bucket: Bucket, part: slice) -> bool:
        return not same_bits(self._flats.view("grad", bucket)[part], self._sums[bucket.id][part])

    def _send_edits(self, step: int, edited: int) -> None:
        """Send changed buckets, each from one worker of the group."""
        mine, absent = self._gradients.channel.me.index, self._gradients.absent
        workers = [index for index in range(self._gradients.channel.group_size) if index not in absent]
        for bucket in self._map.buckets if edited else ():
            changed = any(edited & self._gradients.model.piece_bit(bucket, i) for i in range(len(bucket.pieces)))
            # All workers edit alike, so one of them sends the bucket. The commits of all say which pieces were edited.
            sender = bucket.shard if self._gradients.model.sends_own_shard else workers[bucket.id % len(workers)]
            if changed and sender == mine:
                self._gradients.edit(step, bucket, self._flats.view("grad", bucket))

    def after_step(self) -> None:
        super().after_step()
        self._gradients.absent = ()
        if self._reads < _ALWAYS_READ:
            self._reads = self._reads + 1 if self._was_read else 0
        self._was_read = False
        self._union = [0] * len(self._union)
        self._sums.clear()
        self._touched.clear()
        self._own_sums = False


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
        self._seen[index] = _SentGradient(tensor.grad)
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
        self._seen[index] = _SentGradient(tensor.grad)
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
