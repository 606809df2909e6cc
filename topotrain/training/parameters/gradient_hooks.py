"""How gradients leave the user's model: hooks that see each one when autograd is done with it.

Two ways, chosen by the job (see `gradient_staging`):

*Means* (a synchronous group, `grads: kVisible`): each backward is reduced over the group, so that `p.grad` is the
group's mean when `backward()` returns. A hook before accumulation sets the earlier `.grad` aside and arms a callback
for the end of backward; the hook after accumulation copies this backward's part into the flat buffer "local" and sends
every bucket that is full; the callback waits for the means and puts `.grad` = aside + mean.

*Pushes* (a group of one, or `grads: kHidden`): autograd accumulates as always; the accumulated gradient is sent during
the backward that is expected to be the step's last, and again at `step()` where that guess was wrong or the script
changed a gradient.

Where parameters are on a device, a gradient reaches "local" some time after its hook (`device_parameters`): a bucket
then leaves at a later hook, or at the end of backward. On several devices, hooks run on several threads.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from topotrain.config.sharding import Bucket, SliceMap
from topotrain.core.bitmaps import NO_REVISION
from topotrain.core.client.client import Client
from topotrain.training.parameters.flat_parameters import ModelBuffers, ModelParts

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class GradientPath(Protocol):
    """What a worker's step asks of the way gradients leave."""

    backwards: int
    private: bool

    @property
    def sent(self) -> list[torch.Tensor | None]:
        """This worker's own gradients as the last backward left them, by parameter; None: it holds another's."""
        ...

    def at_step(self, step: int) -> tuple[tuple[int, ...], int, int]:
        """Everything has left; returns (revisions, edited bitmap, dropped bitmap) for the commit."""
        ...

    def after_step(self) -> None:
        """The step is applied."""
        ...

    def go_to(self, step: int) -> None:
        """The group is in this step already: those before it were made without this worker."""
        ...


class _Hooks:
    """What both ways share: which pieces a parameter has, and when a bucket is full."""

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        exchange: Client,
        slice_map: SliceMap,
        weight: Callable[[], float],
    ) -> None:
        self._tensors = parts.tensors
        self._parameters = parts.parameters
        self._buffers = buffers
        self._flats = buffers.flats
        self._mirror = buffers.mirror
        self._exchange = exchange
        self._map = slice_map
        self._weight = weight
        self._step = 0
        self._task: int | None = None
        self.private = False
        self.backwards = 0
        self._pieces: list[list[tuple[Bucket, int]]] = [[] for _ in parts.tensors]
        for bucket in slice_map.buckets:
            for i, piece in enumerate(bucket.pieces):
                self._pieces[slice_map.segments[piece.segment].parameter].append((bucket, i))
        self._expected = [self._trainable_pieces(bucket) for bucket in slice_map.buckets]
        self._owners = [[slice_map.segments[p.segment].parameter for p in b.pieces] for b in slice_map.buckets]
        self._arrived = [0] * len(slice_map.buckets)
        self._pushed = 0  # bit per bucket that left in this backward
        self._hooked: set[int] = set()
        self._turn = threading.Lock()
        for index, tensor in enumerate(parts.tensors):
            if tensor.requires_grad and not tensor.is_meta:  # else another worker holds it
                self._hooked.add(index)
                self._hook(index, tensor)

    @property
    def sent(self) -> list[torch.Tensor | None]:
        """This worker's own gradients as the last backward left them, by parameter; None: it holds another's."""
        return [self._buffers.view("local", i) if i in self._hooked else None for i in range(len(self._tensors))]

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        def after(p: torch.Tensor) -> None:
            with self._turn:
                self._after(index, p)

        tensor.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _trainable_pieces(self, bucket: Bucket) -> int:
        """Bitmap of the bucket's pieces whose parameter may get a gradient."""
        bits = 0
        for i, piece in enumerate(bucket.pieces):
            if self._tensors[self._map.segments[piece.segment].parameter].requires_grad:
                bits |= 1 << i
        return bits

    def _arm(self) -> bool:
        """At the first gradient of a backward: ask for a call at its end. True if this is the first."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return False
        self._exchange.settle()  # what the last step sent may still be read; it is about to be written over
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish_backward(task))
        return True

    def _finish_backward(self, task: int) -> None:
        self._check_task(task)
        self._task = None
        self._end()

    def _check_task(self, task: int) -> None:
        """The backward that ends should be the one that began last."""

    def _copy_local(self, index: int, gradient: torch.Tensor) -> list[Bucket]:
        """Copy a gradient into "local"; returns the buckets that are full now."""
        if gradient.is_sparse:
            name = self._parameters[index].name
            raise RuntimeError(f"parameter {name} has a sparse gradient: this version sends dense ones (sparse=False)")
        self._mirror.send(index, gradient.detach())  # after create_graph=True it has a history
        full = []
        for bucket, piece in self._pieces[index]:
            bit = 1 << piece
            if self._arrived[bucket.id] & bit:
                name = self._parameters[index].name
                raise RuntimeError(
                    f"parameter {name} got its gradient twice in one backward: reentrant checkpointing does that, "
                    f"use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
                )
            self._arrived[bucket.id] |= bit
            if self._arrived[bucket.id] == self._expected[bucket.id]:
                full.append(bucket)
        return full

    def _send(self, number: int, bucket: Bucket, present: int, **how: bool) -> None:
        """Let a bucket of "local" leave, as soon as all of it is there."""
        step, weight, body = self._step, self._weight(), self._flats.view("local", bucket)
        self._mirror.then(lambda: self._exchange.push(step, number, bucket, weight, present, body, **how))

    def _zero_absent(self, bucket: Bucket) -> None:
        """The pieces without a gradient count as zero."""
        local = self._flats.view("local", bucket)
        for i, piece in enumerate(bucket.pieces):
            if not self._arrived[bucket.id] >> i & 1:
                local[piece.lo - bucket.lo : piece.hi - bucket.lo] = 0

    def _rest(self) -> Iterator[Bucket]:
        """At the end of a backward: the buckets that only some of their gradients have reached, ready to leave."""
        for bucket in self._map.buckets:
            if self._arrived[bucket.id] and not self._pushed >> bucket.id & 1:
                self._zero_absent(bucket)
                yield bucket

    def _same_bits(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        kind = _BITS[a.element_size()]
        return torch.equal(a.view(kind), b.view(kind))

    def after_step(self) -> None:
        """The step is applied."""
        self._step += 1
        self.backwards = 0

    def go_to(self, step: int) -> None:
        """The group is in this step already: those before it were made without this worker."""
        self._step = step


class MeanPath(_Hooks):
    """Every backward ends with the group's mean in `p.grad`."""

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        exchange: Client,
        slice_map: SliceMap,
        weight: Callable[[], float],
    ) -> None:
        self._aside: dict[int, torch.Tensor] = {}
        self._union = [0] * len(slice_map.buckets)
        self._sums: dict[int, torch.Tensor] = {}
        self._own_sums = False
        self._open = False  # a backward has begun and not ended
        super().__init__(parts, buffers, exchange, slice_map, weight)

    def _hook(self, index: int, tensor: nn.Parameter) -> None:
        def before(_: torch.Tensor) -> None:
            with self._turn:
                self._before(index, tensor)

        tensor.register_hook(before)  # type: ignore[no-untyped-call]
        super()._hook(index, tensor)

    def _before(self, index: int, tensor: nn.Parameter) -> None:
        if self.private:
            return
        if self._arm():
            self._begin()
        if tensor.grad is not None:
            local = self._buffers.view("local", index)
            alias = tensor.grad.data_ptr() == local.data_ptr()  # of a backward that raised; about to be overwritten
            self._aside[index] = tensor.grad.clone() if alias else tensor.grad
            tensor.grad = None

    def _begin(self) -> None:
        self._give_up()
        self._open = True
        if self.backwards == 1:
            self._keep_sums()

    def _give_up(self) -> None:
        """A backward that raised never came to its end, but part of it has left: for the servers it counts.

        Its means go into the sums that the servers have, and not into `.grad`, which then counts as edited.
        """
        if not self._open:
            return
        self._mirror.drain()
        self._exchange.end_backward(self._step, self.backwards, self._weight(), self._pushed)
        means, written = self._exchange.wait_means()
        for number, (present, mean) in means.items():
            self._sum(self._map.buckets[number], present, mean)
        self._note_written(written)
        self.backwards += 1
        self._close()

    def _close(self) -> None:
        self._open = False
        self._aside.clear()
        self._arrived = [0] * len(self._arrived)
        self._pushed = 0

    def _check_task(self, task: int) -> None:
        if task != self._task:
            raise RuntimeError(
                "a backward ran inside another one, and both have gradients: reentrant checkpointing does that, "
                "use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )

    def _keep_sums(self) -> None:
        """Before new means overwrite the first ones: the running sums move to a buffer of their own."""
        for number, mean in self._sums.items():
            kept = self._flats.view("expected", self._map.buckets[number])
            kept.copy_(mean)
            self._sums[number] = kept
        self._own_sums = True

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        if self.private or tensor.grad is None:
            return
        full = self._copy_local(index, tensor.grad)
        self._mirror.keep(index)
        for bucket in full:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        self._pushed |= 1 << bucket.id
        fresh = self._exchange.windowed and self._is_fresh(bucket)
        self._send(self.backwards, bucket, self._arrived[bucket.id], fresh=fresh)

    def _is_fresh(self, bucket: Bucket) -> bool:
        """No parameter of the bucket has a `.grad` from before this backward."""
        for i, index in enumerate(self._owners[bucket.id]):
            arrived = self._arrived[bucket.id] >> i & 1
            if index in self._aside or not (arrived or self._tensors[index].grad is None):
                return False
        return True

    def _end(self) -> None:
        if not any(self._arrived):
            # autograd.grad() calls the first hook, too, but accumulates nothing.
            for index, gradient in self._aside.items():
                self._tensors[index].grad = gradient
            self._close()
            return
        for bucket in self._rest():
            self._push(bucket)
        self._mirror.drain()
        self._exchange.end_backward(self._step, self.backwards, self._weight(), self._pushed)
        means, written = self._exchange.wait_means()
        shown = self._add(means)
        shown.update(dict.fromkeys(self._note_written(written)))
        self._mirror.show(shown)
        self.backwards += 1
        self._close()

    def _note_written(self, written: int) -> set[int]:
        """The pieces that the servers wrote into "grad" have a gradient; returns whose they are."""
        found: set[int] = set()
        first = 0
        for bucket in self._map.buckets if written else ():
            here = written >> first & (1 << len(bucket.pieces)) - 1
            self._union[bucket.id] |= here
            found.update(index for i, index in enumerate(self._owners[bucket.id]) if here >> i & 1)
            first += len(bucket.pieces)
        return found

    def _add(self, means: dict[int, tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor | None]:
        """Put the means into "grad"; returns whose they are, with the earlier `.grad` that has to be added."""
        fresh: dict[int, list[tuple[Bucket, int, torch.Tensor]]] = {}
        for number, (present, mean) in means.items():
            bucket = self._map.buckets[number]
            self._sum(bucket, present, mean)
            for i, piece in enumerate(bucket.pieces):
                if present >> i & 1:
                    index = self._map.segments[piece.segment].parameter
                    part = mean[piece.lo - bucket.lo : piece.hi - bucket.lo]
                    fresh.setdefault(index, []).append((bucket, i, part))
        return {index: self._add_to(index, rows) for index, rows in fresh.items()}

    def _sum(self, bucket: Bucket, present: int, mean: torch.Tensor) -> None:
        if self._exchange.windowed or self._exchange.gives:  # what is in "grad" counts: nothing has to be compared
            self._union[bucket.id] |= present
            return
        if not self._union[bucket.id]:
            self._sums[bucket.id] = mean
            if self._own_sums:
                self._sums[bucket.id] = self._flats.view("expected", bucket)
                self._sums[bucket.id].copy_(mean)
        else:
            self._sums[bucket.id].add_(mean)
        self._union[bucket.id] |= present

    def _add_to(self, index: int, rows: list[tuple[Bucket, int, torch.Tensor]]) -> torch.Tensor | None:
        mine = self._buffers.view("grad", index)
        earlier = self._aside.get(index)
        if earlier is None and not self._arrived_for(index):
            earlier = self._tensors[index].grad
        in_place = earlier is not None and earlier.data_ptr() == mine.data_ptr()
        for bucket, i, part in rows:
            piece = bucket.pieces[i]
            target = self._flats.view("grad", bucket)[piece.lo - bucket.lo : piece.hi - bucket.lo]
            if in_place:
                target.add_(part)
            else:
                target.copy_(part)
        return None if in_place else earlier

    def _arrived_for(self, index: int) -> bool:
        return all(self._arrived[bucket.id] >> i & 1 for bucket, i in self._pieces[index])

    def at_step(self, step: int) -> tuple[tuple[int, ...], int, int]:
        self._give_up()
        edited = dropped = 0
        left = self._mirror.bring("grad", {i: t.grad for i, t in enumerate(self._tensors) if t.grad is not None})
        for index, tensor in enumerate(self._tensors):
            if not self._pieces[index]:
                continue
            if tensor.grad is not None and index not in self._hooked:
                raise RuntimeError(
                    f"parameter {self._parameters[index].name} was frozen at tt.prepare and has a gradient now: "
                    f"thaw parameters before tt.prepare"
                )
            has = all(self._union[bucket.id] >> i & 1 for bucket, i in self._pieces[index])
            if tensor.grad is None:
                dropped |= self._bits(index) if has else 0
                continue
            mine = self._buffers.view("grad", index)
            if left[index].data_ptr() != mine.data_ptr():
                mine.copy_(left[index])
            if not has or self._exchange.gives:
                edited |= self._bits(index)
            elif not self._exchange.windowed:
                edited |= self._edited(index)
        if not self._exchange.windowed:
            self._send_edits(step, edited)
        return (), edited, dropped

    def _bits(self, index: int) -> int:
        bits = 0
        for bucket, i in self._pieces[index]:
            bits |= self._exchange.piece_bit(bucket, i)
        return bits

    def _edited(self, index: int) -> int:
        """The pieces of a parameter whose gradient is no longer, bit for bit, the sum of the means."""
        bits = 0
        for bucket, i in self._pieces[index]:
            piece = bucket.pieces[i]
            part = slice(piece.lo - bucket.lo, piece.hi - bucket.lo)
            if not self._same_bits(self._flats.view("grad", bucket)[part], self._sums[bucket.id][part]):
                bits |= self._exchange.piece_bit(bucket, i)
        return bits

    def _send_edits(self, step: int, edited: int) -> None:
        """One worker of the group sends each changed bucket; all say which they are."""
        workers, mine = self._exchange.group_size, self._exchange.me.index
        for bucket in self._map.buckets if edited else ():
            changed = any(edited & self._exchange.piece_bit(bucket, i) for i in range(len(bucket.pieces)))
            sender = bucket.shard if self._exchange.gives else bucket.id % workers
            if changed and sender == mine:
                self._exchange.edit(step, bucket, self._flats.view("grad", bucket))

    def after_step(self) -> None:
        super().after_step()
        self._union = [0] * len(self._union)
        self._sums.clear()
        self._own_sums = False


class PushPath(_Hooks):
    """Autograd accumulates; the sum leaves during the backward that is expected to be the last of the step.

    Args:
        compare: find the script's edits by comparing bits (a group of one: what the script left is what counts).
            Otherwise an edit is an error: the other workers cannot know of it.
    """

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        exchange: Client,
        slice_map: SliceMap,
        weight: Callable[[], float],
        compare: bool,
        eager: bool = True,
    ) -> None:
        self._compare = compare
        # Where the servers read this memory itself, at step(), edits need not be found; where an edit is an error, its
        # version tells. Else `.grad` must stay apart from what has been sent, to be compared with it.
        self._sees = eager and (exchange.windowed or not compare)
        self._guess = 1 if eager else 0
        self._eager = eager
        self._revision = [NO_REVISION] * len(slice_map.buckets)
        self._sent = [0] * len(slice_map.buckets)
        self._unsent = [False] * len(slice_map.buckets)  # "local" is newer than what was pushed
        self._pushes = [0] * len(slice_map.buckets)  # in this step, which is what numbers the revisions
        self._versions: dict[int, tuple[int, int]] = {}
        super().__init__(parts, buffers, exchange, slice_map, weight)

    def begin(self) -> None:
        """A backward has begun, and it may end without a gradient for any parameter that is here (a split model)."""
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
        self._versions[index] = (id(tensor.grad), tensor.grad._version)
        if self.backwards == self._guess - 1:
            for bucket in full:
                self._push(bucket, self._arrived[bucket.id])

    def _push(self, bucket: Bucket, present: int) -> None:
        self._pushes[bucket.id] = number = min(self._pushes[bucket.id] + 1, NO_REVISION - 1)
        self._revision[bucket.id] = number
        self._sent[bucket.id] = present
        self._unsent[bucket.id] = False
        self._send(number, bucket, present)

    def _end(self) -> None:
        self._mirror.drain()
        self.backwards += 1

    def at_step(self, step: int) -> tuple[tuple[int, ...], int, int]:
        self._mirror.drain()
        wanted = [0] * len(self._map.buckets)
        gradients = {index: tensor.grad for index, tensor in enumerate(self._tensors) if tensor.grad is not None}
        unknown = {index: g for index, g in gradients.items() if self._compare or index not in self._versions}
        left = self._mirror.bring("local" if self._sees else "left", unknown)
        for index, gradient in gradients.items():
            self._check_edit(index, gradient)
            self._collect(index, left.get(index), wanted)
        for bucket in self._map.buckets:
            present = wanted[bucket.id]
            if present and (self._unsent[bucket.id] or self._sent[bucket.id] != present):
                self._arrived[bucket.id] = present
                self._zero_absent(bucket)
                self._push(bucket, present)
            elif not present:
                self._revision[bucket.id] = NO_REVISION
        self._mirror.drain()
        return tuple(self._revision), 0, 0

    def _check_edit(self, index: int, gradient: torch.Tensor) -> None:
        known = self._versions.get(index)
        if not self._compare and known is not None and known != (id(gradient), gradient._version):
            raise RuntimeError(
                f"the gradient of {self._parameters[index].name} was changed, but with grads: kHidden it has left "
                f"already; use grads: kVisible, tt.clip_grad_norm_, or updater {{ clip_norm: … }} in the conf"
            )

    def _collect(self, index: int, left: torch.Tensor | None, wanted: list[int]) -> None:
        """Bring "local" up to date with what the script left, and note which buckets have to be sent (again).

        left: None for what backward left, of which "local" is a copy.
        """
        changed = index not in self._versions
        if left is not None:
            local = self._buffers.view("local", index)
            if left.data_ptr() != local.data_ptr():
                changed = changed or not self._same(left, local)
                if changed:
                    local.copy_(left)
        for bucket, i in self._pieces[index]:
            wanted[bucket.id] |= 1 << i
            self._unsent[bucket.id] = self._unsent[bucket.id] or changed

    def _same(self, gradient: torch.Tensor, local: torch.Tensor) -> bool:
        if gradient.stride() != local.stride():
            return torch.equal(gradient, local)
        flat = (gradient.numel(),), (1,)
        return self._same_bits(
            gradient.as_strided(*flat, gradient.storage_offset()), local.as_strided(*flat, local.storage_offset())
        )

    def after_step(self) -> None:
        self._guess = max(1, self.backwards) if self._eager else 0
        super().after_step()
        self._revision = [NO_REVISION] * len(self._revision)
        self._sent = [0] * len(self._sent)
        self._unsent = [False] * len(self._unsent)
        self._pushes = [0] * len(self._pushes)
        self._versions.clear()


class ArrivalPath(_Hooks):
    """Each bucket is applied when all workers have pushed it, while backward still runs (`apply: kOnArrival`).

    So a step has one backward, and nothing can be taken back: whatever would have to is an error here.

    Args:
        rates: the optimizer's hyper-parameters as they are now.
    """

    def __init__(
        self,
        parts: ModelParts,
        buffers: ModelBuffers,
        exchange: Client,
        slice_map: SliceMap,
        weight: Callable[[], float],
        rates: Callable[[], bytes],
    ) -> None:
        self._rates = rates
        self._said = b""
        self._open = False
        self._versions: dict[int, tuple[int, int]] = {}
        super().__init__(parts, buffers, exchange, slice_map, weight)

    def _after(self, index: int, tensor: torch.Tensor) -> None:
        if self.private or tensor.grad is None:
            return
        if self._arm():
            self._begin()
        full = self._copy_local(index, tensor.grad)
        self._mirror.keep(index)
        self._versions[index] = (id(tensor.grad), tensor.grad._version)
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
        rates = self._rates()
        if rates != self._said:
            self._said = rates
            self._exchange.rates(rates)

    def _push(self, bucket: Bucket) -> None:
        self._pushed |= 1 << bucket.id
        self._send(0, bucket, self._arrived[bucket.id])

    def _end(self) -> None:
        for bucket in self._rest():
            self._push(bucket)
        self._mirror.drain()
        self._exchange.end_backward(self._step, 0, self._weight(), self._pushed)
        self.backwards = 1
        self._open = False

    def at_step(self, step: int) -> tuple[tuple[int, ...], int, int]:
        if self.backwards and self._rates() != self._said:
            raise RuntimeError(
                "the optimizer's hyper-parameters changed between backward() and step(), but with apply: kOnArrival "
                "the gradients are applied already: change them after step()"
            )
        for index, tensor in enumerate(self._tensors):
            gradient = tensor.grad
            now = None if gradient is None else (id(gradient), gradient._version)
            if now != self._versions.get(index):
                raise RuntimeError(
                    f"the gradient of {self._parameters[index].name} is not what backward() left, but with apply: "
                    f"kOnArrival it is applied already; use apply: kAtStep, or updater {{ clip_low, clip_high }}"
                )
        return (), 0, 0

    def after_step(self) -> None:
        super().after_step()
        self._versions.clear()
