"""The means of a group in `.grad`: each backward is reduced over the group."""

from collections.abc import Collection, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from topotrain.config.sharding import Bucket, in_steps_of
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.model.tensor_bits import same_bits, sum_of_bits, version_of
from topotrain.training.gradients.gradient_hooks import GradientPath, SentGradient, backward_number
from topotrain.training.gradients.lazy_gradient import LazyGradient, MeanReader
from topotrain.training.parameters.device_parameters import HostParameters
from topotrain.training.parameters.flat_parameters import ModelBuffers
from topotrain.training.worker_stats import StepBatches

_ALWAYS_READ = 3  # steps in a row with a look at a mean, after which all means are sent at once


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
        self._left: dict[int, SentGradient] = {}  # the last mean of each parameter, as the script got it
        self._by_hooks: dict[int, SentGradient] = {}  # what the script's hooks have made of the last mean
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
        if tensor.grad is None and self._task == backward_number():
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
            self._left[index] = SentGradient(gradient)
        self._cut_graphs(shown)
        return hooked

    def _cut_graphs(self, shown: Collection[int]) -> None:
        """Make a derivative of a mean in place of a gradient with a graph an error."""
        for index in self._graphs.intersection(shown):
            gradient = self._tensors[index].grad
            with torch.enable_grad():
                gradient = _MeanWithoutGraph.apply(torch.empty(0, requires_grad=True), gradient)  # type: ignore[no-untyped-call]
            self._mirror.set_gradient(index, gradient)
            self._left[index] = SentGradient(gradient)

    # --- means that stay at the servers ----------------------------------------------------------------------------

    def _show_lazily(self, indices: set[int]) -> None:
        self._unread_step = self._step
        for index in indices:
            gradient = LazyGradient(self._tensors[index], self, self._parameters[index].name)
            self._mirror.set_gradient(index, gradient)
            self._unread[index], self._left[index] = ref(gradient), SentGradient(gradient)

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
                        self._left[index] = SentGradient(plain)

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
                self._by_hooks[index] = SentGradient(gradient)

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
