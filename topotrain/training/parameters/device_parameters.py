"""Memory of the parameters, and copies between it and the host's flat buffers.

Servers read and write the flat buffers, which are always in host memory.

In a split model, a tensor on the meta device is a parameter of another worker. It is ignored here.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from topotrain.comm.private_views import PrivateViews, give_back_freed
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.config.sharding import Bucket
from topotrain.core.client.step_exchange import GradientExchange
from topotrain.core.client.value_pull import ValueObserver
from topotrain.core.model.tensor_bits import integers, same_bits, version_of
from topotrain.training.parameters.device_copy import CopyEvent, DeviceCopier, copiers_for


def move_to(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a parameter this memory, and the values in it. It stays the same object."""
    tensor.data = memory


class ParameterViews(ABC):
    """The parameters' places in the flat buffers."""

    regions: ProcessMemory | None = None
    """Where "params" lies. None: in memory in which writes of the script are not found."""

    @abstractmethod
    def view(self, name: str, index: int) -> torch.Tensor:
        """Return a parameter's view of a flat buffer, with its shape and strides."""

    @abstractmethod
    def own(self, name: str, index: int) -> torch.Tensor:
        """Return the same memory as a tensor with its own storage and version counter."""


@dataclass(frozen=True, slots=True)
class QueuedPush:
    """A bucket's push that waits until its gradients have arrived in "local"."""

    gradients: GradientExchange
    step: int
    ordinal: int
    bucket: Bucket
    weight: float
    present: int
    body: torch.Tensor
    fresh: bool

    def send(self) -> None:
        """Push the bucket."""
        self.gradients.push(self.step, self.ordinal, self.bucket, self.weight, self.present, self.body, self.fresh)


class ParameterHolder(ValueObserver, ABC):
    """Access of a worker to the memory of its parameters, which are named by index."""

    def __init__(self, tensors: Sequence[nn.Parameter]) -> None:
        self._tensors = tensors
        self.memory: dict[int, torch.Tensor] = {}
        """The memory that each parameter must have after `move`."""
        self.own: set[int] = set()
        """Parameters without gradients that the script has written. New values leave them as they are."""
        self.share = "local"
        """The flat buffer of this worker's own gradients. If it is "grad", means of the group take their place."""

        self._versions: Sequence[int] = [0] * len(tensors)

    def edited(self) -> Iterable[int]:
        """Return the parameters written by the script since the last values or own steps."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [index for index, (tensor, before) in enumerate(pairs) if version_of(tensor) != before]

    def take(self, indices: Collection[int]) -> None:
        """Give these parameters the values in "params", whatever the script has written."""
        self.own = self.own.difference(indices)

    def stepped(self) -> None:
        """The worker has changed the parameters by itself, which is no edit of the script."""
        self._versions = list(map(version_of, self._tensors))

    def part(self) -> None:
        """From here on the own gradients have a buffer apart from the means."""
        self.share = "local"

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Set `.grad` of a parameter."""
        self._tensors[index].grad = gradient

    @abstractmethod
    def move(self) -> None:
        """Take the first values from "params"."""

    @abstractmethod
    def after_values(self) -> None:
        """Take new values from "params"."""

    @abstractmethod
    def before_values(self) -> None:
        """Wait until "params" may be written."""

    @abstractmethod
    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into `share`. It may arrive later, see `then`."""

    @abstractmethod
    def keep(self, index: int) -> None:
        """Note that `.grad` was sent, so it may become a view of `share`."""

    @abstractmethod
    def then(self, push: QueuedPush) -> None:
        """Send a push when all copies so far have arrived, at the latest in `drain`."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until everything sent has arrived and all calls were made."""

    @abstractmethod
    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """Set `.grad` of each named parameter to its earlier value, if any, plus "grad"."""

    @abstractmethod
    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return gradients in host memory: themselves, or copies in that flat buffer."""

    @abstractmethod
    def value(self, index: int) -> torch.Tensor:
        """Return a parameter's value, which may be changed without counting as an edit."""

    @abstractmethod
    def room(self, name: str, index: int) -> torch.Tensor:
        """Return memory like the parameter on its device, zeroed at the first call only."""

    @abstractmethod
    def close(self) -> None:
        """Release resources at the end of the job. Parameters stay readable."""


class HostParameters(ParameterHolder):
    """Parameters that are views of the flat buffers, so that nothing is copied.

    Other processes may use "params", too. So the parameters are in a private mapping of it: what the script writes is
    seen here only, until it is given back.
    """

    def __init__(self, tensors: Sequence[nn.Parameter], views: ParameterViews) -> None:
        super().__init__(tensors)
        self._view, self._own, self._regions = views.view, views.own, views.regions
        self._private: PrivateViews | None = None
        self._mapped: list[int] = []  # the parameter of each private view
        self._local: dict[int, tuple[torch.Tensor, int]] = {}  # views of `share` and their addresses, by parameter
        self._own_local: dict[int, torch.Tensor] = {}  # the same memory, see `ParameterViews.own`

    def move(self) -> None:
        """Give each parameter memory in "params"."""
        if not self.memory:
            # A meta tensor belongs to another worker of the group and must not get memory.
            here = [index for index, tensor in enumerate(self._tensors) if not tensor.is_meta]
            # A storage of its own: torch.save and pickle would write the whole storage of a view.
            self.memory = {index: self._own("params", index) for index in here}
            if self._regions is not None:
                self._map(self._regions)
        for index, memory in self.memory.items():
            move_to(self._tensors[index], memory)

    def _map(self, regions: ProcessMemory) -> None:
        shared = {index: memory for index, memory in self.memory.items() if memory.numel()}
        self._private, self._mapped = regions.private_views(list(shared.values())), list(shared)
        for number, index in enumerate(self._mapped):
            self.memory[index] = self._private.tensor(number, shared[index])
            # At once, so that the memory that the parameter had is free before the next view counts as taken.
            move_to(self._tensors[index], self.memory[index])
        # Before a backward: made between its gradients, these objects would split the memory of each that is freed.
        self._own_local = {index: self._own(self.share, index) for index in self.memory}
        give_back_freed()

    def edited(self) -> Iterable[int]:
        """Return the parameters with other bits than "params"; give back equal pages."""
        written = {self._mapped[number] for number in self._private.written()} if self._private is not None else ()
        found = {index for index in written if not same_bits(self.memory[index], self._view("params", index))}
        self._give_back({*written} - found)
        return sorted(found)

    def before_fetch(self) -> None:
        """Give back pages that the script has put back: they would hide the new values."""
        self.edited()

    def take(self, indices: Collection[int]) -> None:
        """Give back all that the script has written to these parameters."""
        super().take(indices)
        self._give_back(indices)

    def _give_back(self, indices: Collection[int]) -> None:
        for number, index in enumerate(self._mapped) if indices else ():
            if index in indices and self._private is not None:
                self._private.give_back(number)

    def after_values(self) -> None:
        """Do nothing: the parameters are views of "params"."""

    def before_values(self) -> None:
        """Do nothing: `shared_windows` says which process may write when."""

    def part(self) -> None:
        super().part()
        self._local.clear()
        self._own_local.clear()

    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Copy the gradient, unless it is there already."""
        # Hooks of every backward come here, so addresses and views are looked up once.
        local, address = self._local.get(index) or self._find_local(index)
        # `keep` has made `.grad` a view of it, and autograd accumulated into it.
        if gradient.data_ptr() != address:
            local.copy_(gradient)

    def _find_local(self, index: int) -> tuple[torch.Tensor, int]:
        local = self._view(self.share, index)
        self._local[index] = local, local.data_ptr()
        return self._local[index]

    def keep(self, index: int) -> None:
        """Make `.grad` a view of `share`."""
        # This frees autograd's memory, so the next gradient can reuse memory that is in cache.
        gradient, local = self._tensors[index].grad, self._own_local.get(index)
        if local is None:
            local = self._own_local[index] = self._own(self.share, index)
        # A history means create_graph=True: the tensor is the script's own, and overwriting it would change it.
        if gradient is not None and gradient.data_ptr() != local.data_ptr() and gradient.grad_fn is None:
            self._give(index, local)

    def then(self, push: QueuedPush) -> None:
        """Send at once: the gradients are here."""
        push.send()

    def drain(self) -> None:
        """Do nothing: copies are synchronous."""

    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """Set `.grad` to "grad" itself, or add "grad" to the script's own tensor."""
        for index, before in earlier.items():
            mean = self._view("grad", index)
            if before is None:
                self._give(index, mean)
            else:
                self.set_gradient(index, before.add_(mean))

    def _give(self, index: int, gradient: torch.Tensor) -> None:
        """Set `.grad` to memory of the flat buffers, as an object of the script's own."""
        # `model.double()` gives the object other memory, which that of this class must not get.
        self.set_gradient(index, gradient.detach())

    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return the gradients themselves."""
        return gradients

    def value(self, index: int) -> torch.Tensor:
        """Return the view in "params"."""
        return self._view("params", index)

    def room(self, name: str, index: int) -> torch.Tensor:
        """Return a flat buffer of that name."""
        return self._view(name, index)

    def close(self) -> None:
        """Do nothing."""


LOCAL = "model"
"""The flat buffer of parameters that are copies in the memory of the host."""


class CopiedParameters(HostParameters):
    """Parameters in host memory of their own, which a worker changes by itself.

    They are copied from "params" when there are new values.
    """

    _fresh = False  # the worker has changed nothing since

    def move(self) -> None:
        """Give each parameter memory of its own, and the values in "params"."""
        for index, tensor in enumerate(self._tensors):
            memory = self.memory[index] = self._own(LOCAL, index)
            memory.copy_(self._view("params", index))
            move_to(tensor, memory)
        self._fresh = True

    def stepped(self) -> None:
        """The copies are no longer those of "params"."""
        super().stepped()
        self._fresh = False

    def edited(self) -> Iterable[int]:
        """Return the parameters that the script has written, as far as that can be known."""
        if self._fresh:
            return [i for i, memory in self.memory.items() if not same_bits(memory, self._view("params", i))]
        return ParameterHolder.edited(self)

    def after_values(self) -> None:
        """Copy the values."""
        for index in range(len(self._tensors)):
            if index not in self.own:
                self._view(LOCAL, index).copy_(self._view("params", index))
        self._fresh = True

    def value(self, index: int) -> torch.Tensor:
        """Return the view in the flat buffer of the copies."""
        return self._view(LOCAL, index)


@dataclass(slots=True)
class _Arrival:
    """Copies in flight: events, bounce buffers to copy from, and a push afterwards."""

    marks: list[CopyEvent]
    bounced: list[tuple[torch.Tensor, torch.Tensor]]  # (view of a flat buffer, bounce buffer)
    push: QueuedPush | None


class DeviceParameters(ParameterHolder):
    """Parameters on devices, each on its own. They keep their memory there.

    New values are copied there when a step is applied, and gradients to the host while the backward still runs. Only
    `drain`, `bring` and `before_values` wait for a device.

    Args:
        copiers: a copier for each device. None: those of this machine.
        apart: the worker changes the parameters by itself, so that writes of the script are not found.
    """

    def __init__(
        self,
        tensors: Sequence[nn.Parameter],
        views: ParameterViews,
        copiers: Mapping[torch.device, DeviceCopier] | None = None,
        apart: bool = False,
    ) -> None:
        super().__init__(tensors)
        self._view = views.view
        self._here = {index: tensor for index, tensor in enumerate(tensors) if not tensor.is_meta}
        self._copiers = copiers or copiers_for(tensor.device for tensor in self._here.values())
        self._copier = {index: self._copiers[tensor.device] for index, tensor in self._here.items()}
        self._apart = apart
        self._digests: dict[torch.device, torch.Tensor] = {}
        self._places: dict[tuple[str, int], torch.Tensor] = {}
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}
        self._bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrivals: deque[_Arrival] = deque()

    def move(self) -> None:
        """Copy the values."""
        for index, tensor in self._here.items():
            # An expanded or overlapping tensor cannot be the target of a copy, and gets new memory.
            if tensor.stride() != self._view("params", index).stride():
                move_to(tensor, self._like("params", index))
        self.memory = {index: tensor.data for index, tensor in self._here.items()}
        self.after_values()

    def after_values(self) -> None:
        """Copy all values to the devices, before later work of theirs."""
        self._start_to_device("params", {i: tensor.data for i, tensor in self._here.items() if i not in self.own})
        self.stepped()

    def stepped(self) -> None:
        """Note the bits that the parameters have."""
        super().stepped()
        self._digests = {} if self._apart else self._digest()

    def _digest(self) -> dict[torch.device, torch.Tensor]:
        """Return the sum of each parameter's bits, by device."""
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for memory in self.memory.values():
            sums.setdefault(memory.device, []).append(integers(memory).sum(dtype=torch.int64))
        return {device: torch.stack(rows) for device, rows in sums.items()}

    def edited(self) -> Iterable[int]:
        """Wait for the devices; return the parameters with other bit sums than before."""
        if self._apart:
            return super().edited()
        # Not by the version: a write through `.data` raises none, and one that is taken back does.
        found, now = set(self.own), self._digest()
        for device, before in self._digests.items():
            members = [index for index, memory in self.memory.items() if memory.device == device]
            found.update(members[row] for row in (now[device] != before).nonzero().flatten().tolist())
        return sorted(found)

    def before_values(self) -> None:
        """Wait until the devices have read their copies."""
        for copier in self._copiers.values():
            copier.settle()

    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Start the copy."""
        self._start_to_host("local", index, gradient)

    def keep(self, index: int) -> None:
        """Do nothing: `.grad` stays on the device."""

    def then(self, push: QueuedPush) -> None:
        """Queue the push, and send all pushes that are due, in order."""
        # No thread waits for copies. Those that arrive while hooks run are noticed here, at the next hook. The rest is
        # left to `drain`, when the script's thread has nothing else to do.
        self._queue(push)
        while self._arrivals and all(mark.query() for mark in self._arrivals[0].marks):
            self._arrive()

    def _queue(self, push: QueuedPush | None) -> None:
        # Marks come after all copies of `bounced`, so their events cover these copies.
        bounced, self._bounced = self._bounced, []
        self._arrivals.append(_Arrival([copier.mark() for copier in self._copiers.values()], bounced, push))

    def drain(self) -> None:
        """Wait for each copy in turn, and send its push while later copies are in flight."""
        # Copies without a full bucket may still be in bounce buffers.
        if self._bounced:
            self._queue(None)
        while self._arrivals:
            self._arrive()

    def _arrive(self) -> None:
        arrival = self._arrivals.popleft()
        # A bounce buffer has its contents only after the mark.
        for mark in arrival.marks:
            mark.synchronize()
        for view, place in arrival.bounced:
            view.copy_(place)
        if arrival.push is not None:
            arrival.push.send()

    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """Set `.grad` to a new tensor on the device, or add to the script's own tensor."""
        # New memory each time: the script may hold the `.grad` of an earlier step.
        means = {index: self._like("grad", index) for index in earlier}
        self._start_to_device("grad", means)
        with torch.no_grad():
            for index, before in earlier.items():
                self.set_gradient(index, means[index] if before is None else before.add_(means[index]))

    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return complete copies."""
        for index, gradient in gradients.items():
            self._start_to_host(name, index, gradient)
        self._queue(None)
        self.drain()
        return {index: self._view(name, index) for index in gradients}

    def value(self, index: int) -> torch.Tensor:
        """Return the value on the device."""
        return self._tensors[index].data

    def room(self, name: str, index: int) -> torch.Tensor:
        """Return memory on the device."""
        room = self._rooms.get((name, index))
        if room is None:
            room = self._rooms[name, index] = self._like("params", index).zero_()
        return room

    def close(self) -> None:
        """Wait for the copies and release memory."""
        # The job has ended: pushes that were not sent have no receiver any more.
        self._arrivals.clear()
        self._bounced.clear()
        # All of them before the first is closed: the copiers of a process unpin their memory together.
        for copier in self._copiers.values():
            copier.mark().synchronize()
        for copier in self._copiers.values():
            copier.close()

    def _like(self, name: str, index: int) -> torch.Tensor:
        """Allocate memory on the parameter's device, like its view in a flat buffer."""
        view = self._view(name, index)
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self._tensors[index].device)

    def _place(self, name: str, index: int) -> torch.Tensor:
        """Return host memory for copies: the view in the flat buffer, or a bounce buffer."""
        place = self._places.get((name, index))
        # To ask for the place may pin memory, which is slow, so it is done once.
        if place is None:
            view, copier = self._view(name, index), self._copier[index]
            place = self._places[name, index] = view if copier.reaches(view) else copier.bounce(view)
        return place

    def _start_to_host(self, name: str, index: int, gradient: torch.Tensor) -> None:
        view, place = self._view(name, index), self._place(name, index)
        self._copier[index].copy_to_host(gradient.detach(), place)
        # The bounce buffer is read after the event of this copy (`_arrive`).
        if place is not view:
            self._bounced.append((view, place))

    def _start_to_device(self, name: str, targets: Mapping[int, torch.Tensor]) -> None:
        pairs: dict[DeviceCopier, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.before_values()  # a bounce buffer may still be read
        for index, target in targets.items():
            view, place = self._view(name, index), self._place(name, index)
            if place is not view:
                place.copy_(view)
            pairs.setdefault(self._copier[index], []).append((target, place))
        for copier, rows in pairs.items():
            copier.copy_to_device(rows)


def mirror_for(tensors: Sequence[nn.Parameter], views: ParameterViews, apart: bool = False) -> ParameterHolder:
    """Return the holder of these parameters: copies if one is on a device, or `apart`."""
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        return DeviceParameters(tensors, views, apart=apart)
    return CopiedParameters(tensors, views) if apart else HostParameters(tensors, views)
