"""Copies between a device and the host's memory: beside the device's work, and still in its order.

A ferry has a stream of its own. A copy to the host starts when what the device was told so far is done; a copy to the
device is done before what the device is told next. All copies of a ferry happen one after another, so a mark set after
a copy covers every earlier one, in both directions.

The device copies by itself only from and to memory whose pages cannot move (pinned memory). The flat buffers are
pinned where they lie; small ones, and those that the driver refuses, get a pinned *bounce* buffer beside them.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch

WORTH_PINNING = 1 << 20  # bytes; the driver pins whole pages, and smaller buffers share theirs with others
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

Pair = tuple[torch.Tensor, torch.Tensor]


class CopyEvent(Protocol):
    """A point in a ferry's work."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class DeviceCopier(Protocol):
    """Copies of one device. `place` is always memory of the host that `reaches` allowed, or a `bounce`."""

    def home(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy from the device; `place` has it when a mark set from now on is reached. `source` may be freed."""
        ...

    def out(self, pairs: Iterable[Pair]) -> None:
        """Copy each (target on the device, place); places must stay as they are until `settle`."""
        ...

    def mark(self) -> CopyEvent:
        """The point at which everything asked for so far is done."""
        ...

    def settle(self) -> None:
        """Wait until the places of the last `out` may be written again."""
        ...

    def reaches(self, view: torch.Tensor) -> bool:
        """Whether copies from and to this memory go on beside other work."""
        ...

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Pinned memory with the shape and strides of `view`."""
        ...

    def close(self) -> None:
        """No more copies."""
        ...


class ImmediateEvent:
    """The mark of a ferry that copies at once."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class ImmediateCopier:
    """Copies at once: for parameters on the CPU beside others on a GPU."""

    def home(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy now."""
        place.copy_(source)

    def out(self, pairs: Iterable[Pair]) -> None:
        """Copy now."""
        for target, place in pairs:
            target.copy_(place)

    def mark(self) -> CopyEvent:
        """Everything is done."""
        return ImmediateEvent()

    def settle(self) -> None:
        """Nothing to wait for."""

    def reaches(self, view: torch.Tensor) -> bool:
        """All memory is alike."""
        return True

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)

    def close(self) -> None:
        """Nothing is held."""


class PinnedStorages:
    """Which memory of the host is pinned. Whole storages are, once each; it is the process's, not one device's.

    Args:
        register, unregister: by address and size; register says whether it worked.
    """

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._known: dict[int, tuple[bool, torch.UntypedStorage]] = {}  # the storage: its address stays taken

    def pinned(self, view: torch.Tensor) -> bool:
        """Whether the memory is pinned; tries it when first asked."""
        storage = view.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            worked = storage.nbytes() >= WORTH_PINNING and self._register(address, storage.nbytes())
            self._known[address] = worked, storage
        return self._known[address][0]

    def close(self) -> None:
        """Unpin everything."""
        for address, (worked, _) in self._known.items():
            if worked:
                self._unregister(address)
        self._known.clear()


class CudaCopier:
    """The copies of one NVIDIA GPU, on a stream of their own."""

    def __init__(self, device: torch.device, pins: PinnedStorages) -> None:
        self._device, self._pins = device, pins
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None

    def home(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy when the device's current stream has come so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            matching = source
            if source.stride() != place.stride() or source.dtype != place.dtype:
                # torch would copy through a second buffer and read that one before it is filled.
                matching = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=self._device)
                matching.copy_(source)
            place.copy_(matching, non_blocking=True)
        source.record_stream(self._stream)

    def out(self, pairs: Iterable[Pair]) -> None:
        """Copy before what the current stream is told from now on."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, place in pairs:
                target.copy_(place, non_blocking=True)
        current.wait_stream(self._stream)
        self._read = self._event()

    def mark(self) -> CopyEvent:
        """Where the stream will be after what it was told."""
        return self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits leaves the processor to the servers
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Wait for the last copies to the device."""
        if self._read is not None:
            self._read.synchronize()

    def reaches(self, view: torch.Tensor) -> bool:
        """Whether it is pinned."""
        with torch.cuda.device(self._device):  # else the driver would set up the first GPU for it
            return self._pins.pinned(view)

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Pinned memory that torch manages."""
        with torch.cuda.device(self._device):
            return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, pin_memory=True)

    def close(self) -> None:
        """Wait for what is on the way, then unpin."""
        self._stream.synchronize()
        self._pins.close()


def ferries(devices: Iterable[torch.device]) -> dict[torch.device, DeviceCopier]:
    """A ferry for each device; CPU parameters are copied directly."""
    pins = PinnedStorages(_pin, _unpin)
    return {d: CudaCopier(d, pins) if d.type == "cuda" else ImmediateCopier() for d in dict.fromkeys(devices)}


def _pin(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:  # type: ignore[no-untyped-call]
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the driver keeps the error, and the next kernel, whoever's, would report it
    return False


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
