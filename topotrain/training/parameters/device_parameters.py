"""Where the parameters live, and how they and their gradients meet the flat buffers of the host.

The flat buffers are what servers read and write, and they are always the host's memory. `HostParameters`: the
parameters live in them, nothing is copied. `DeviceParameters`: the parameters live on a device; new values are copied
there when a step is applied, gradients are copied to the host while backward still runs.

Where a model is split, a tensor on the meta device is a parameter that another worker holds: nothing happens to it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from topotrain.training.parameters.device_copy import CopyEvent, DeviceCopier, ferries

View = Callable[[str, int], torch.Tensor]  # (flat buffer, parameter) -> its place there, in its shape and strides


class ParameterHolder(Protocol):
    """What a worker asks of the place where its parameters live. Parameters are named by their index."""

    def move(self) -> None:
        """The parameters take the values that stand in "params", for the first time."""
        ...

    def address(self, index: int) -> int:
        """Where a parameter's memory must be from then on."""
        ...

    def renew(self) -> None:
        """New values stand in "params"."""
        ...

    def settle(self) -> None:
        """Return when "params" may be written."""
        ...

    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into "local"; it may arrive later, see `then`."""
        ...

    def keep(self, index: int) -> None:
        """`.grad` has been sent: it may become "local" itself."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Call when what was sent so far has arrived: at once, or during a later call of `then` or `drain`."""
        ...

    def drain(self) -> None:
        """Wait until all that was sent has arrived and every call is made."""
        ...

    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """`.grad` of each named parameter becomes its earlier value (None: none) plus what stands in "grad"."""
        ...

    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """The same gradients in the host's memory: themselves, or copies in the flat buffer of that name."""
        ...

    def value(self, index: int) -> torch.Tensor:
        """A parameter's value, to be changed without the parameter counting it as an edit."""
        ...

    def room(self, name: str, index: int) -> torch.Tensor:
        """Memory like the parameter, beside it: zeros when first asked for, then always the same."""
        ...

    def close(self) -> None:
        """The job is over; parameters stay readable."""
        ...


class HostParameters:
    """The parameters live in the flat buffers.

    Args:
        tensors: the parameters.
        view: their places in the flat buffers.
        own: the same as tensors with a storage of their own: views of one big storage make torch.save and pickle write
            the whole.
    """

    def __init__(self, tensors: Sequence[nn.Parameter], view: View, own: View) -> None:
        self._tensors, self._view, self._own = tensors, view, own

    def move(self) -> None:
        """Each parameter gets memory in "params"."""
        for index, tensor in enumerate(self._tensors):
            if not tensor.is_meta:
                tensor.data = self._own("params", index)

    def address(self, index: int) -> int:
        """In "params"."""
        return self._view("params", index).data_ptr()

    def renew(self) -> None:
        """They are there."""

    def settle(self) -> None:
        """Who may write when is agreed on elsewhere (`shared_windows`)."""

    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Copy, unless it is "local" already."""
        local = self._view("local", index)
        if gradient.data_ptr() != local.data_ptr():
            local.copy_(gradient)

    def keep(self, index: int) -> None:
        """What autograd allocated is free for the next gradient, in cache.

        Not with a history (create_graph=True), which belongs to the script's own tensor.
        """
        gradient = self._tensors[index].grad
        if gradient is not None and gradient.grad_fn is None:
            self._tensors[index].grad = self._own("local", index)

    def then(self, call: Callable[[], None]) -> None:
        """At once."""
        call()

    def drain(self) -> None:
        """Nothing is on its way."""

    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """`.grad` is "grad" itself, or the script's own tensor with it added."""
        for index, before in earlier.items():
            mean = self._view("grad", index)
            self._tensors[index].grad = mean if before is None else before.add_(mean)

    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Themselves."""
        return gradients

    def value(self, index: int) -> torch.Tensor:
        """Its place in "params"."""
        return self._view("params", index)

    def room(self, name: str, index: int) -> torch.Tensor:
        """A flat buffer of that name."""
        return self._view(name, index)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Arrival:
    """Copies on their way: reached when, what has to be moved on from a bounce buffer, and what comes after."""

    marks: list[CopyEvent]
    landing: list[tuple[torch.Tensor, torch.Tensor]]  # (place in a flat buffer, bounce buffer)
    call: Callable[[], None]


class DeviceParameters:
    """The parameters live on devices, each on its own, and keep the memory that they have there.

    Nothing here waits for a device but `drain`, `bring` and `settle`. It has no thread: what arrives while hooks still
    run is noticed at the next one, the rest at the end of backward, where the script's thread has nothing else to do.

    Args:
        tensors, view: as for `HostParameters`.
        ferries_for: makes a ferry for each device.
    """

    def __init__(
        self,
        tensors: Sequence[nn.Parameter],
        view: View,
        ferries_for: Callable[[Iterable[torch.device]], dict[torch.device, DeviceCopier]] = ferries,
    ) -> None:
        self._tensors, self._view = tensors, view
        self._here = {index: tensor for index, tensor in enumerate(tensors) if not tensor.is_meta}
        self._ferries = ferries_for(tensor.device for tensor in self._here.values())
        self._ferry = {index: self._ferries[tensor.device] for index, tensor in self._here.items()}
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._places: dict[tuple[str, int], torch.Tensor] = {}
        self._rooms: dict[tuple[str, int], torch.Tensor] = {}
        self._landing: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrivals: deque[_Arrival] = deque()

    def move(self) -> None:
        """Copy; a parameter that does not fill its memory just once gets new memory."""
        for index, tensor in self._here.items():
            if tensor.stride() != self._view("params", index).stride():
                tensor.data = self._like("params", index)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.renew()

    def address(self, index: int) -> int:
        """Where the script, or `move`, had put it."""
        return self._addresses[index]

    def renew(self) -> None:
        """Copy all values to the devices; their work from now on sees them."""
        self._out("params", {index: tensor.data for index, tensor in self._here.items()})

    def settle(self) -> None:
        """The devices have read what they were to read."""
        for ferry in self._ferries.values():
            ferry.settle()

    def send(self, index: int, gradient: torch.Tensor) -> None:
        """Start the copy."""
        self._home("local", index, gradient)

    def keep(self, index: int) -> None:
        """`.grad` stays on the device."""

    def then(self, call: Callable[[], None]) -> None:
        """In order; those that are due now are called now."""
        landing, self._landing = self._landing, []
        self._arrivals.append(_Arrival([ferry.mark() for ferry in self._ferries.values()], landing, call))
        while self._arrivals and all(mark.query() for mark in self._arrivals[0].marks):
            self._arrive()

    def drain(self) -> None:
        """Wait for each in turn, so that the first is called while the last still travels."""
        if self._landing:
            self.then(_nothing)
        while self._arrivals:
            self._arrive()

    def _arrive(self) -> None:
        arrival = self._arrivals.popleft()
        for mark in arrival.marks:
            mark.synchronize()
        for view, place in arrival.landing:
            view.copy_(place)
        arrival.call()

    def show(self, earlier: Mapping[int, torch.Tensor | None]) -> None:
        """A new tensor on the device, or the script's own with it added."""
        means = {index: self._like("grad", index) for index in earlier}
        self._out("grad", means)
        with torch.no_grad():
            for index, before in earlier.items():
                self._tensors[index].grad = means[index] if before is None else before.add_(means[index])

    def bring(self, name: str, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Copies, complete."""
        for index, gradient in gradients.items():
            self._home(name, index, gradient)
        self.then(_nothing)
        self.drain()
        return {index: self._view(name, index) for index in gradients}

    def value(self, index: int) -> torch.Tensor:
        """On the device."""
        return self._tensors[index].data

    def room(self, name: str, index: int) -> torch.Tensor:
        """On the device."""
        room = self._rooms.get((name, index))
        if room is None:
            room = self._rooms[name, index] = self._like("params", index).zero_()
        return room

    def close(self) -> None:
        """Wait for the devices' copies, let the memory go."""
        self._arrivals.clear()
        self._landing.clear()
        for ferry in self._ferries.values():
            ferry.close()

    def _like(self, name: str, index: int) -> torch.Tensor:
        """New memory on the parameter's device, in the shape and strides of its place."""
        view = self._view(name, index)
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self._tensors[index].device)

    def _place(self, name: str, index: int) -> torch.Tensor:
        """Where a ferry may copy to and from: the place in the flat buffer, or a bounce buffer for it."""
        place = self._places.get((name, index))
        if place is None:
            view, ferry = self._view(name, index), self._ferry[index]
            place = self._places[name, index] = view if ferry.reaches(view) else ferry.bounce(view)
        return place

    def _home(self, name: str, index: int, gradient: torch.Tensor) -> None:
        view, place = self._view(name, index), self._place(name, index)
        self._ferry[index].home(gradient.detach(), place)
        if place is not view:
            self._landing.append((view, place))

    def _out(self, name: str, targets: Mapping[int, torch.Tensor]) -> None:
        pairs: dict[DeviceCopier, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.settle()  # a bounce buffer may still be read
        for index, target in targets.items():
            view, place = self._view(name, index), self._place(name, index)
            if place is not view:
                place.copy_(view)
            pairs.setdefault(self._ferry[index], []).append((target, place))
        for ferry, rows in pairs.items():
            ferry.out(rows)


def mirror_for(tensors: Sequence[nn.Parameter], view: View, own: View) -> ParameterHolder:
    """How these parameters meet the flat buffers: copied if any is on a device, where they are if none is."""
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
        return DeviceParameters(tensors, view)
    return HostParameters(tensors, view, own)


def _nothing() -> None:
    pass
